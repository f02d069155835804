"""PostgreSQL servers and databases for the fixtures of tests/conftest.py and for tests that need their own."""

import asyncio
import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, LiteralString, NoReturn, TypeVar
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest

from windlass.store.migration import migrate

SYSTEM_POSTGRES = Path("/usr/lib/postgresql")
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.01
PORT = 5432  # only the name of a socket; nothing listens on a port
# Tests need no protection against power loss. Committed data still survives a crash of the server process.
UNSAFE_SETTINGS = {"fsync": "off", "full_page_writes": "off", "max_wal_size": "256MB"}
# A file system in memory, where databases are copied in half of the time.
MEMORY = Path("/dev/shm")
MEMORY_BYTES = 4 << 30

T = TypeVar("T")


class Server:
    """A running server on which tests create databases."""

    def __init__(self, dsn: str, socket_dir: Path, crash: Callable[[], None], start: Callable[[], None]) -> None:
        self.dsn = dsn
        self.socket_dir = socket_dir
        self.crash = crash
        self.start = start
        self._numbers = itertools.count()
        self._template: str | None = None
        self._lock = threading.Lock()
        self._connection: psycopg.Connection | None = None

    def dsn_of(self, database: str) -> str:
        return urlunsplit(urlsplit(self.dsn)._replace(path=f"/{database}"))

    @contextmanager
    def database(self, template: str = "template0") -> Iterator[str]:
        name = f"test_{next(self._numbers)}"
        # A copy of files, or of pages through the log: each is faster than the other on its kind of file system.
        strategy = "file_copy" if self.socket_dir.is_relative_to(MEMORY) else "wal_log"
        self.execute(f"create database {name} template {template} strategy {strategy}")
        try:
            yield self.dsn_of(name)
        finally:
            self.execute(f"drop database {name} with (force)")

    @contextmanager
    def migrated_database(self) -> Iterator[str]:
        if self._template is None:
            self.execute("create database windlass_template template template0")
            run_aside(migrate(self.dsn_of("windlass_template")))
            self._template = "windlass_template"
        with self.database(self._template) as dsn:
            yield dsn

    def execute(self, sql: LiteralString) -> None:
        with self._lock:
            if self._connection is None or not _answers(self._connection):
                self._connection = psycopg.connect(self.dsn, autocommit=True, connect_timeout=round(START_TIMEOUT_S))
            self._connection.execute(sql)

    def disconnect(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()


def _answers(connection: psycopg.Connection) -> bool:
    """Not after a crash or a restart of the server."""
    try:
        connection.execute("")
    except psycopg.OperationalError:
        return False
    return True


def do_without(why: str) -> NoReturn:
    """Skip the test, or fail it in .ci/run, which can install the missing package."""
    if os.environ.get("TESTS_NEED_SYSTEM_SERVERS"):
        pytest.fail(why)
    pytest.skip(why)


def run_aside(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run in another thread: pytest-asyncio may have a running loop in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


@contextmanager
def reachable_temp_dir(parent: Path | None = None) -> Iterator[Path]:
    """A folder that the server's user can enter. Under root that is another user, and pytest's tmp_path is private."""
    path = Path(tempfile.mkdtemp(prefix="windlass-pytest-", dir=parent))
    path.chmod(0o755)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def database_folder() -> AbstractContextManager[Path]:
    """A folder for a server's data that need not survive: in memory where there is room."""
    has_room = os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > MEMORY_BYTES
    return reachable_temp_dir(MEMORY if has_room else None)


def wait_until(is_so: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} took longer than {timeout_s:g} s")
        time.sleep(POLL_S)


class SystemPostgres:
    """A server of the system's PostgreSQL, reachable only by a socket in `path`."""

    def __init__(self, bin_dir: Path, path: Path) -> None:
        self._bin_dir = bin_dir
        self._path = path
        self._user = unprivileged_user()
        self._process: subprocess.Popen[bytes] | None = None
        if self._user is not None:
            shutil.chown(path, self._user)
        initdb = [bin_dir / "initdb", "-D", path / "data", "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C"]
        subprocess.run([*initdb, "--no-sync"], check=True, capture_output=True, cwd=path, user=self._user)

    @property
    def dsn(self) -> str:
        return f"postgresql://postgres@/postgres?host={self._path}&port={PORT}"

    def start(self) -> None:
        place = {"listen_addresses": "", "unix_socket_directories": str(self._path), "port": PORT}
        options = [word for name, value in {**UNSAFE_SETTINGS, **place}.items() for word in ("-c", f"{name}={value}")]
        with (self._path / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._bin_dir / "postgres", "-D", self._path / "data", *options],
                cwd=self._path,
                user=self._user,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_until(self._answers, START_TIMEOUT_S, "starting PostgreSQL")

    def stop(self, how: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(how)
        self._process.wait(STOP_TIMEOUT_S)

    def _answers(self) -> bool:
        asked = subprocess.run([self._bin_dir / "pg_isready", "-q", "-h", self._path, "-p", str(PORT)], check=False)
        return asked.returncode == 0


@contextmanager
def transaction_pooler(server: Server, dsn: str, path: Path, *, pool_size: int = 20) -> Iterator[str]:
    """The URL of a database behind a pgbouncer in transaction mode, which has its files in `path`."""
    program = shutil.which("pgbouncer", path="/usr/sbin:/usr/bin:/usr/local/bin:/usr/local/sbin")
    if program is None:
        do_without("there is no pgbouncer here: install the package pgbouncer to run this")
    target = urlsplit(dsn)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {
        "listen_addr": "127.0.0.1",
        "listen_port": port,
        "unix_socket_dir": "",
        "auth_type": "any",
        "pool_mode": "transaction",
        "default_pool_size": pool_size,
    }
    lines = [
        *("[databases]", f"* = host={server.socket_dir} port={PORT} user={target.username}"),
        *("[pgbouncer]", *(f"{name} = {value}" for name, value in settings.items())),
    ]
    (path / "pgbouncer.ini").write_text("\n".join(lines) + "\n")
    # pgbouncer refuses to run as root, and its user must reach the server's socket.
    owner = server.socket_dir.stat()
    account: dict[str, Any] = {}
    if os.geteuid() == 0:
        account = {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []}
    with (path / "pgbouncer.log").open("wb") as log:
        process = subprocess.Popen(
            [program, path / "pgbouncer.ini"], stdout=log, stderr=log, start_new_session=True, **account
        )
    try:
        wait_until(lambda: _listens(port), START_TIMEOUT_S, "starting pgbouncer")
        yield f"postgresql://{target.username}@127.0.0.1:{port}{target.path}"
    finally:
        process.terminate()
        process.wait(STOP_TIMEOUT_S)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def unprivileged_user() -> str | None:
    """The user that a server runs as: PostgreSQL refuses root. None: the current user."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "unknown"


class VirtualClock:
    """For PostgresStores(virtual_now=...) and MemoryStores: a clock that only tests advance."""

    def __init__(self) -> None:
        self.now = datetime(2030, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now

    def advance(self, seconds: float) -> datetime:
        self.now += timedelta(seconds=seconds)
        return self.now
