"""The embedded PostgreSQL under real programs that open it, close it and are killed.

A `Program` is another process that opens the directory, prints "open", and closes it when its stdin ends. Every wait
is for a condition, with a time limit.
"""

import asyncio
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import asyncpg
import psutil
import pytest
from structlog.testing import capture_logs

from windlass.model.config import Config
from windlass.model.errors import ConfigError, DatabaseUnavailable
from windlass.store import embedded, postgres_programs
from windlass.store.embedded import EmbeddedPostgres, default_data_dir
from windlass.wiring import stores

LIMIT_S = 60  # far more than any wait needs
IS_ROOT = os.geteuid() == 0
HOLD_OPEN = """
import sys
from pathlib import Path
from windlass.store.embedded import EmbeddedPostgres
with EmbeddedPostgres(Path(sys.argv[1])):
    print("open", flush=True)
    sys.stdin.read()
"""
OPEN_AND_CLOSE_REPEATEDLY = """
import asyncio, sys
from pathlib import Path
import asyncpg
from windlass.store.embedded import EmbeddedPostgres
async def write(dsn):
    connection = await asyncpg.connect(dsn)
    await connection.execute("insert into visits default values")
    await connection.close()
for _ in range(int(sys.argv[2])):
    with EmbeddedPostgres(Path(sys.argv[1])) as postgres:
        asyncio.run(write(postgres.dsn))
"""
OPEN_AS_OTHER_USER = """
import os, sys
from pathlib import Path
from windlass.model.errors import WindlassError
from windlass.store.embedded import EmbeddedPostgres
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    EmbeddedPostgres(Path(sys.argv[1])).open()
except WindlassError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""
OPEN_WITH_FEW_FILES = """
import resource, sys
from pathlib import Path
from windlass.model.errors import WindlassError
from windlass.store.embedded import EmbeddedPostgres
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
try:
    EmbeddedPostgres(Path(sys.argv[1])).open()
except WindlassError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


def spawn(code: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,  # its own process group, for interrupt()
    )


class Program:
    """Another process that has the directory open until close()."""

    def __init__(self, data_dir: Path) -> None:
        self.process = spawn(HOLD_OPEN, data_dir)

    def wait_until_open(self) -> "Program":
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], LIMIT_S)[0], "the program did not open the database in time"
        if self.process.stdout.readline() != "open\n":
            pytest.fail(self.process.communicate(timeout=LIMIT_S)[1])
        return self

    def close(self) -> None:
        stderr = self.process.communicate("", timeout=LIMIT_S)[1]
        assert self.process.returncode == 0, stderr

    def interrupt(self, signal_number: signal.Signals) -> None:
        os.killpg(self.process.pid, signal_number)
        self.process.communicate(timeout=LIMIT_S)


@contextmanager
def new_data_dir() -> Iterator[Path]:
    """A directory that does not exist yet. Not tmp_path: under root the server's user could not enter it."""
    parent = Path(tempfile.mkdtemp(prefix="windlass-test-")).resolve()
    parent.chmod(0o755)
    try:
        yield parent / "data"
    finally:
        for pid_file in parent.rglob("postmaster.pid"):  # left by a failed test
            with suppress(psutil.Error, ValueError, IndexError):
                process = psutil.Process(int(pid_file.read_text().split()[0]))
                if process.name() == "postgres":
                    process.kill()
        shutil.rmtree(parent)


@pytest.fixture
def data_dir() -> Iterator[Path]:
    with new_data_dir() as path:
        yield path


@pytest.fixture(scope="module")
def shared() -> Iterator[EmbeddedPostgres]:
    """One running server for all tests that do not change it."""
    with new_data_dir() as path, EmbeddedPostgres(path) as postgres:
        yield postgres


@pytest.fixture(scope="module")
def stopped_dir() -> Iterator[Path]:
    with new_data_dir() as path:
        with EmbeddedPostgres(path) as postgres:
            ask(postgres, "create table kept (n int)", "insert into kept values (42)")
        yield path


@pytest.fixture
def filled_dir(stopped_dir: Path, data_dir: Path) -> Path:
    """A copy of a directory with a stopped server and 42 in the table `kept`."""
    subprocess.run(["cp", "-a", stopped_dir, data_dir], check=True)
    return data_dir


def postmaster_pid(data_dir: Path) -> int:
    return int((data_dir / "postgres" / "postmaster.pid").read_text().split()[0])


def is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"condition not met within {LIMIT_S} s"
        time.sleep(0.01)


def kill_server(data_dir: Path) -> None:
    pid = postmaster_pid(data_dir)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(pid))


def ask(postgres: EmbeddedPostgres, *statements: str) -> Any:
    """Run the statements on a new connection. Returns the value of the last one."""

    async def run() -> Any:
        connection = await asyncpg.connect(postgres.dsn)
        try:
            return [await connection.fetchval(statement) for statement in statements][-1]
        finally:
            await connection.close()

    return asyncio.run(run())


def test_open_creates_server_and_close_stops_it(data_dir: Path) -> None:
    with EmbeddedPostgres(data_dir) as postgres:
        assert ask(postgres, "select current_database() || ' ' || current_user") == "windlass windlass"
        pid = postmaster_pid(data_dir)
        assert is_alive(pid)
    assert not is_alive(pid)
    assert not (data_dir / "postgres" / "postmaster.pid").exists()


def test_committed_data_survives_restart(data_dir: Path) -> None:
    with EmbeddedPostgres(data_dir) as postgres:
        ask(postgres, "create table kept (n int)", "insert into kept values (42)")
    with EmbeddedPostgres(data_dir) as postgres:
        assert ask(postgres, "select n from kept") == 42


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        pytest.param("fsync", "on", id="commits are durable"),
        pytest.param("synchronous_commit", "on", id="commit waits for the disk"),
        pytest.param("max_connections", "300", id="connections for many workers"),
        pytest.param("server_encoding", "UTF8", id="UTF-8 text"),
        pytest.param("listen_addresses", "", id="no network"),
        pytest.param("unix_socket_permissions", "0700", id="private socket"),
        pytest.param("search_path", "public", id="tables of users outside of our schema"),
    ],
)
def test_server_has_setting(shared: EmbeddedPostgres, setting: str, value: str) -> None:
    assert ask(shared, f"select current_setting('{setting}')") == value


def test_server_listens_on_unix_socket_only(shared: EmbeddedPostgres) -> None:
    listening = [line for line in (shared.data_dir / "postgres.log").read_text().splitlines() if "listening on" in line]
    assert len(listening) == 1
    assert "Unix socket" in listening[0]


def test_data_and_socket_directories_are_private(shared: EmbeddedPostgres) -> None:
    for private in (shared.data_dir / "postgres", shared.data_dir / "run"):
        assert private.stat().st_mode & 0o777 == 0o700


def test_pg_environment_variables_are_ignored(filled_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PGPORT": "6000", "PGHOST": "example.org", "PGDATABASE": "x", "PGSSLMODE": "require"}.items():
        monkeypatch.setenv(name, value)
    with EmbeddedPostgres(filled_dir) as postgres:
        assert ask(postgres, "select current_database()") == "windlass"


def test_close_keeps_server_that_another_program_uses(filled_dir: Path) -> None:
    first = Program(filled_dir).wait_until_open()
    with EmbeddedPostgres(filled_dir) as second:
        pid = postmaster_pid(filled_dir)
        first.close()
        assert ask(second, "select 1") == 1
        assert postmaster_pid(filled_dir) == pid
    assert not is_alive(pid)


def test_ctrl_c_in_starting_program_does_not_stop_server(filled_dir: Path) -> None:
    first = Program(filled_dir).wait_until_open()
    with EmbeddedPostgres(filled_dir) as second:
        pid = postmaster_pid(filled_dir)
        first.interrupt(signal.SIGINT)
        assert ask(second, "select 1") == 1
        assert postmaster_pid(filled_dir) == pid


def test_server_of_killed_program_is_shared_and_stopped_by_next(filled_dir: Path) -> None:
    killed = Program(filled_dir).wait_until_open()
    pid = postmaster_pid(filled_dir)
    killed.interrupt(signal.SIGKILL)
    assert is_alive(pid)
    with EmbeddedPostgres(filled_dir) as postgres:
        assert postmaster_pid(filled_dir) == pid
        assert ask(postgres, "select 1") == 1
    assert not is_alive(pid)


def test_open_works_after_kill_during_initdb(data_dir: Path) -> None:
    killed = Program(data_dir)
    wait_for(lambda: any(data_dir.glob("new-*/base")))  # initdb is running
    killed.interrupt(signal.SIGKILL)
    with EmbeddedPostgres(data_dir) as postgres:
        assert ask(postgres, "select 1") == 1


def test_open_works_after_kill_during_server_stop(filled_dir: Path) -> None:
    killed = Program(filled_dir).wait_until_open()
    killed.interrupt(signal.SIGKILL)
    # The state after these two steps of close(). The server may not have handled the signal yet.
    (filled_dir / "stopping").touch()
    os.kill(postmaster_pid(filled_dir), signal.SIGINT)
    with EmbeddedPostgres(filled_dir) as postgres:
        assert ask(postgres, "select n from kept") == 42


def test_concurrent_first_opens_share_one_server(data_dir: Path) -> None:
    programs = [Program(data_dir) for _ in range(3)]
    for program in programs:
        program.wait_until_open()
    pid = postmaster_pid(data_dir)
    for program in programs:
        program.close()
    assert not is_alive(pid)


def test_programs_opening_and_closing_repeatedly_always_connect(filled_dir: Path) -> None:
    with EmbeddedPostgres(filled_dir) as postgres:
        ask(postgres, "create table visits (at timestamptz default now())")
    programs = [spawn(OPEN_AND_CLOSE_REPEATEDLY, filled_dir, 8) for _ in range(4)]
    for program in programs:
        _, stderr = program.communicate(timeout=LIMIT_S)
        assert program.returncode == 0, stderr
    assert not (filled_dir / "postgres" / "postmaster.pid").exists()
    with EmbeddedPostgres(filled_dir) as postgres:
        assert ask(postgres, "select count(*) from visits") == 32


def test_two_opens_in_one_program_count_separately(filled_dir: Path) -> None:
    with EmbeddedPostgres(filled_dir) as outer:
        with EmbeddedPostgres(filled_dir):
            pass
        assert ask(outer, "select 1") == 1


def test_next_open_recovers_killed_server_with_its_data(filled_dir: Path) -> None:
    with EmbeddedPostgres(filled_dir) as postgres:
        ask(postgres, "update kept set n = 43")
        kill_server(filled_dir)
        with EmbeddedPostgres(filled_dir) as next_one:
            assert ask(next_one, "select n from kept") == 43


def test_reopening_restarts_killed_server(filled_dir: Path) -> None:
    with EmbeddedPostgres(filled_dir) as postgres:
        kill_server(filled_dir)
        postgres.open()
        assert ask(postgres, "select 1") == 1
    assert not (filled_dir / "postgres" / "postmaster.pid").exists()


def test_running_program_restarts_killed_server(filled_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "CHECK_INTERVAL_S", 0.1)

    async def kill_server_and_read() -> int:
        async with stores.database(Config(data_dir=filled_dir)) as dsn, asyncio.timeout(LIMIT_S):
            await asyncio.to_thread(kill_server, filled_dir)
            while True:
                with suppress(OSError, asyncpg.PostgresError):
                    connection = await asyncpg.connect(dsn)
                    break
                await asyncio.sleep(0.01)
            found: int = await connection.fetchval("select n from kept")
            await connection.close()
            return found

    assert asyncio.run(kill_server_and_read()) == 42
    assert not (filled_dir / "postgres" / "postmaster.pid").exists()


@contextmanager
def unable_to_start(data_dir: Path) -> Iterator[None]:
    settings = data_dir / "postgres" / "postgresql.conf"
    good = settings.read_text()
    settings.write_text(good + "shared_buffers = nonsense\n")
    yield
    settings.write_text(good)


def test_program_still_counts_as_user_after_failed_restart(filled_dir: Path) -> None:
    with EmbeddedPostgres(filled_dir) as postgres:
        kill_server(filled_dir)
        with unable_to_start(filled_dir), pytest.raises(DatabaseUnavailable, match="shared_buffers"):
            postgres.open()
        Program(filled_dir).wait_until_open().close()
        assert ask(postgres, "select n from kept") == 42
    assert not (filled_dir / "postgres" / "postmaster.pid").exists()


def test_failed_restart_and_recovery_are_logged_once(filled_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "CHECK_INTERVAL_S", 0.02)
    log = filled_dir / "postgres.log"

    async def log_events_after_kill() -> list[str]:
        async with stores.database(Config(data_dir=filled_dir), makes_schema=False), asyncio.timeout(LIMIT_S):
            with capture_logs() as lines:
                with unable_to_start(filled_dir):
                    await asyncio.to_thread(kill_server, filled_dir)
                    while log.read_text().count("shared_buffers") < 3:
                        await asyncio.sleep(0.01)
                while "restarted embedded database" not in [line["event"] for line in lines]:
                    await asyncio.sleep(0.01)
            return [line["event"] for line in lines]

    assert asyncio.run(log_events_after_kill()) == ["restart embedded database failed", "restarted embedded database"]


def test_busy_backend_does_not_prevent_recovery_of_killed_server(filled_dir: Path) -> None:
    async def kill_server_during_query(dsn: str) -> None:
        connection, watcher = await asyncpg.connect(dsn), await asyncpg.connect(dsn)
        busy = asyncio.create_task(
            connection.execute("do $$ begin loop end loop; end $$")
        )  # never checks for interrupts
        while not await watcher.fetchval("select count(*) from pg_stat_activity where query like 'do $$%'"):
            pass
        kill_server(filled_dir)
        await asyncio.to_thread(postgres.open)
        with pytest.raises((asyncpg.PostgresError, OSError)):
            await asyncio.wait_for(busy, LIMIT_S)
        watcher.terminate()

    with EmbeddedPostgres(filled_dir) as postgres:
        asyncio.run(kill_server_during_query(postgres.dsn))
        assert ask(postgres, "select 1") == 1


@pytest.mark.parametrize(
    "content", [pytest.param("{pid}\n", id="pid of another process"), pytest.param("", id="empty file")]
)
def test_server_starts_despite_stale_pid_file(filled_dir: Path, content: str) -> None:
    cluster = filled_dir / "postgres"
    identity = {"user": cluster.stat().st_uid, "extra_groups": []} if IS_ROOT else {}
    # Run by the server's user: only then PostgreSQL takes the process for a running server and refuses to start.
    with subprocess.Popen(["sleep", str(LIMIT_S)], **identity) as stranger:
        (filled_dir / "run").mkdir(mode=0o700)
        for lock in (cluster / "postmaster.pid", filled_dir / "run" / ".s.PGSQL.5432.lock"):
            lock.write_text(content.format(pid=stranger.pid))
        with EmbeddedPostgres(filled_dir) as postgres:
            assert ask(postgres, "select n from kept") == 42
        assert stranger.poll() is None
        stranger.kill()


def test_server_of_deleted_directory_does_not_disturb_new_server(data_dir: Path) -> None:
    abandoned = Program(data_dir).wait_until_open()
    old_pid = postmaster_pid(data_dir)
    shutil.rmtree(data_dir)
    with EmbeddedPostgres(data_dir) as postgres:
        assert not is_alive(old_pid)
        abandoned.close()
        assert ask(postgres, "select 1") == 1


def test_server_with_deleted_socket_is_replaced(filled_dir: Path) -> None:
    Program(filled_dir).wait_until_open().interrupt(signal.SIGKILL)
    (filled_dir / "run" / ".s.PGSQL.5432").unlink()
    with EmbeddedPostgres(filled_dir) as postgres:
        assert ask(postgres, "select n from kept") == 42


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("x" * 150, id="too long for a socket path"),
        pytest.param("a b", id="space"),
        pytest.param("a,b", id="comma"),
        pytest.param("$HOME`id`\"'%41", id="special characters of shells and URLs"),
    ],
)
def test_open_works_with_unusual_path(data_dir: Path, name: str) -> None:
    with EmbeddedPostgres(data_dir / name) as postgres:
        assert ask(postgres, "select 1") == 1
        socket_dir = Path(ask(postgres, "select current_setting('unix_socket_directories')"))
        assert socket_dir.stat().st_mode & 0o777 == 0o700
    assert not socket_dir.exists()


def test_socket_directory_open_to_others_is_refused(data_dir: Path) -> None:
    with EmbeddedPostgres(data_dir / ("x" * 150)) as postgres:
        socket_dir = Path(ask(postgres, "select current_setting('unix_socket_directories')"))
    socket_dir.mkdir(mode=0o700)
    socket_dir.chmod(0o777)
    try:
        with pytest.raises(ConfigError, match=f"{socket_dir}.*remove it"):
            postgres.open()
    finally:
        socket_dir.rmdir()


def test_oversized_log_is_rotated_at_next_start(filled_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "LOG_LIMIT_BYTES", 100)
    for _ in range(3):
        with EmbeddedPostgres(filled_dir):
            pass
    assert (filled_dir / "postgres.log").read_text().count("starting PostgreSQL") == 1
    assert (filled_dir / "postgres.log.1").read_text().count("starting PostgreSQL") == 1


def test_data_of_other_major_version_is_refused_and_kept(filled_dir: Path) -> None:
    (filled_dir / "postgres" / "PG_VERSION").write_text("16\n")
    with pytest.raises(ConfigError, match=r"version 16.*name another data directory"):
        EmbeddedPostgres(filled_dir).open()
    (filled_dir / "postgres" / "PG_VERSION").write_text("18\n")
    with EmbeddedPostgres(filled_dir) as postgres:
        assert ask(postgres, "select n from kept") == 42


def test_directory_with_unrelated_files_is_refused_and_kept(data_dir: Path) -> None:
    foreign = data_dir / "postgres" / "unrelated.txt"
    foreign.parent.mkdir(parents=True)
    foreign.touch()
    with pytest.raises(ConfigError, match="name another data directory"):
        EmbeddedPostgres(data_dir).open()
    assert foreign.exists()


def test_file_as_data_directory_is_refused(data_dir: Path) -> None:
    data_dir.touch()
    with pytest.raises(ConfigError, match=f"{data_dir} is a file"):
        EmbeddedPostgres(data_dir).open()


def test_read_only_data_directory_is_refused(data_dir: Path) -> None:
    data_dir.mkdir()
    data_dir.chmod(0o555)
    program = spawn(OPEN_AS_OTHER_USER, data_dir)
    stderr = program.communicate(timeout=LIMIT_S)[1]
    assert stderr.startswith(f"ConfigError: cannot use {data_dir} as the data directory (Permission denied")
    assert stderr.count("\n") == 1


def test_start_failure_shows_message_of_server(filled_dir: Path) -> None:
    with (filled_dir / "postgres" / "postgresql.conf").open("a") as config:
        config.write("shared_buffers = nonsense\n")
    with pytest.raises(DatabaseUnavailable, match=r"shared_buffers.*or set DATABASE_URL") as caught:
        EmbeddedPostgres(filled_dir).open()
    assert "\n" not in str(caught.value)
    assert (filled_dir / "postgres").exists()


def test_start_failure_names_a_full_disk(filled_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (filled_dir / "postgres" / "global" / "pg_control").write_bytes(b"")
    usage = shutil.disk_usage(filled_dir)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=3 << 20))
    with pytest.raises(DatabaseUnavailable, match=r"The disk of .* is full \(3 MB free\): free some space\.$"):
        EmbeddedPostgres(filled_dir).open()


def test_first_start_with_few_open_files_names_the_limit(data_dir: Path) -> None:
    program = spawn(OPEN_WITH_FEW_FILES, data_dir)
    stderr = program.communicate(timeout=LIMIT_S)[1]
    assert "This process may open only 32 files: raise the limit with `ulimit -n 1024`." in stderr
    assert stderr.count("\n") == 1


def test_platform_without_binaries_is_refused(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"no embedded PostgreSQL for this platform.*DATABASE_URL"):
        EmbeddedPostgres(data_dir).open()


def test_failed_open_does_not_block_later_open(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    postgres = EmbeddedPostgres(data_dir)
    with monkeypatch.context() as patched, pytest.raises(ConfigError):
        patched.setattr("importlib.util.find_spec", lambda _: None)
        postgres.open()
    with postgres:
        pid = postmaster_pid(data_dir)
    assert not is_alive(pid)


def test_default_data_dir_does_not_need_home_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    assert default_data_dir().is_absolute()


def test_user_without_home_must_name_data_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # the result for an unknown user
    with pytest.raises(ConfigError, match="name a data directory"):
        default_data_dir()


@pytest.mark.needs_root
def test_root_runs_server_as_dedicated_user(shared: EmbeddedPostgres) -> None:
    assert psutil.Process(postmaster_pid(shared.data_dir)).username() == "windlass-postgres"
    assert psutil.Process(postmaster_pid(shared.data_dir)).uids().saved != 0


@pytest.mark.needs_root
def test_root_copies_binaries_that_other_users_cannot_reach(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = postgres_programs.package_dir()
    hidden = data_dir.parent / "hidden"
    hidden.mkdir(mode=0o700)
    for source in (package, package.with_name(f"{package.name}.libs")):
        (hidden / source.name).symlink_to(source)
    monkeypatch.setattr(postgres_programs, "package_dir", lambda: hidden / package.name)
    for _ in range(2):
        with EmbeddedPostgres(data_dir) as postgres:
            assert ask(postgres, "select 1") == 1
            assert Path(psutil.Process(postmaster_pid(data_dir)).cmdline()[0]).is_relative_to(data_dir)
    assert hidden.stat().st_mode & 0o777 == 0o700


@pytest.mark.needs_root
def test_root_gets_error_if_server_user_cannot_enter_data_directory(data_dir: Path) -> None:
    data_dir.parent.chmod(0o700)
    with pytest.raises(ConfigError, match=r"cannot enter.*name a data directory every user may enter"):
        EmbeddedPostgres(data_dir).open()
    assert data_dir.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.needs_root
@pytest.mark.parametrize(
    ("uid", "mode", "sentence"),
    [
        pytest.param(65534, 0o755, "belongs to user nobody, who controls its database", id="of another user"),
        pytest.param(65534, 0o777, "belongs to user nobody", id="of another user, open to all"),
        pytest.param(0, 0o777, "other users can write to the data directory", id="open to all"),
    ],
)
def test_data_directory_that_others_control_is_refused(data_dir: Path, uid: int, mode: int, sentence: str) -> None:
    data_dir.mkdir()
    (data_dir / "run").mkdir()
    os.chown(data_dir, uid, uid)
    data_dir.chmod(mode)
    server = EmbeddedPostgres(data_dir)
    for use in (server.open, server.check_place, server.is_running):
        with pytest.raises(ConfigError, match=sentence):
            use()
    assert {path.name for path in data_dir.iterdir()} == {"run"}
