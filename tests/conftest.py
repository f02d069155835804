"""PostgreSQL for the tests: real servers, a fresh database for each test, no process or file remains.

- `dsn`: a fresh, migrated database on the PostgreSQL that Windlass brings along.
- `each_dsn`: the same, once over that server and once over the system's own (the newest in /usr/lib/postgresql).
- `empty_dsn`: the same two servers, a database without our schema.
- `clock`: virtual time for either store.

One server of each kind per test session and xdist worker, started when the first test asks for it. Fresh databases are
copies of a migrated one, which takes a few milliseconds. The servers do not sync to disk: they need not survive.
"""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import hypothesis.internal.conjecture.providers as hypothesis_providers
import psutil
import pytest

from support.postgres_servers import (
    STOP_TIMEOUT_S,
    SYSTEM_POSTGRES,
    UNSAFE_SETTINGS,
    Server,
    SystemPostgres,
    VirtualClock,
    database_folder,
    do_without,
    reachable_temp_dir,
    wait_until,
)
from windlass.store.embedded import EmbeddedPostgres

# A run that was started in the background ignores Ctrl-C, and everything the tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# An example that takes long on a busy machine says nothing about the product.
# And a failure in CI is a failure at home: every run tries the same. (By itself Hypothesis also tries constants of
# whatever modules are loaded, which would differ by what ran before.)
hypothesis_providers._get_local_constants = lambda: hypothesis_providers._local_constants
hypothesis.settings.register_profile("windlass", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("windlass")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if os.geteuid() != 0 and item.get_closest_marker("needs_root"):
        pytest.skip("needs root; .ci/run runs this test as root")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # With several processes, pytest-xdist names failed tests only at the end of the run.
    if report.failed and hasattr(report, "node"):
        message = f"failed after {report.duration:.1f} s: {report.nodeid} ({report.when})"
        print(f"\n{message}", file=sys.__stderr__, flush=True)


@pytest.fixture
def reachable_path() -> Iterator[Path]:
    with reachable_temp_dir() as path:
        yield path


# -------------------------------------------------------------------------------------------------------- servers


@pytest.fixture(scope="session")
def embedded_server() -> Iterator[Server]:
    with database_folder() as path, EmbeddedPostgres(path / "data") as postgres:

        def crash() -> None:
            pid = int((postgres.data_dir / "postgres" / "postmaster.pid").read_text().split()[0])
            os.kill(pid, signal.SIGQUIT)
            wait_until(lambda: not psutil.pid_exists(pid), STOP_TIMEOUT_S, "stopping PostgreSQL")

        server = Server(postgres.dsn, path / "data" / "run", crash, postgres.open)
        for name, value in UNSAFE_SETTINGS.items():
            server.execute(f"alter system set {name} = '{value}'")
        server.execute("select pg_reload_conf()")
        yield server
        server.disconnect()


@pytest.fixture(scope="session")
def system_server() -> Iterator[Server]:
    found = sorted(SYSTEM_POSTGRES.glob("*/bin/postgres"), key=lambda path: float(path.parent.parent.name))
    if not found:
        do_without(f"no PostgreSQL under {SYSTEM_POSTGRES}: install the package postgresql to run this over it too")
    with database_folder() as path:
        process = SystemPostgres(found[-1].parent, path)
        process.start()
        server = Server(process.dsn, path, lambda: process.stop(signal.SIGQUIT), process.start)
        try:
            yield server
        finally:
            server.disconnect()
            process.stop(signal.SIGINT)


@pytest.fixture(scope="session", params=["embedded", "system"])
def each_server(request: pytest.FixtureRequest) -> Server:
    server: Server = request.getfixturevalue(f"{request.param}_server")
    return server


# ------------------------------------------------------------------------------------------------------ databases


@pytest.fixture
def dsn(embedded_server: Server) -> Iterator[str]:
    with embedded_server.migrated_database() as dsn:
        yield dsn


@pytest.fixture
def each_dsn(each_server: Server) -> Iterator[str]:
    with each_server.migrated_database() as dsn:
        yield dsn


@pytest.fixture
def empty_dsn(each_server: Server) -> Iterator[str]:
    with each_server.database() as dsn:
        yield dsn


# ----------------------------------------------------------------------------------------------------------- time


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()
