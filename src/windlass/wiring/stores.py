"""Opens the database, external or embedded, and the stores on it.

The client library imports this module, so the embedded server and structlog are imported where they are used.
"""

import asyncio
import os
import random
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.background import background_task
from windlass.model.config import Config
from windlass.model.errors import BadInput, WindlassError
from windlass.model.redaction import masked
from windlass.store.connection import connected
from windlass.store.costs import PostgresCostStore
from windlass.store.database import Database
from windlass.store.doctor_checks import DatabaseCheck, dsn_with_role, examine
from windlass.store.fleets import PostgresFleetQueries, PostgresOperations
from windlass.store.history import PostgresHistoryStore
from windlass.store.migration import applied_migrations, migrate
from windlass.store.postgres_programs import PROGRAMS, package_dir
from windlass.store.processes import PostgresProcessQueries
from windlass.store.task_lists import PostgresTaskLists
from windlass.store.tasks import PostgresTaskStore
from windlass.store.worker_logs import PostgresWorkerLogs
from windlass.wiring.store_roles import AccessStores

if TYPE_CHECKING:
    from windlass.store.embedded import EmbeddedPostgres

# Interval of the check that the embedded server still runs. It reads a file and looks up a process.
CHECK_INTERVAL_S = 5.0


def _embedded_server(config: Config) -> "EmbeddedPostgres":
    from windlass.store.embedded import EmbeddedPostgres

    return EmbeddedPostgres(data_dir(config))


def data_dir(config: Config) -> Path:
    from windlass.store.embedded import default_data_dir

    return (config.data_dir or default_data_dir()).expanduser()


def has_embedded_database(config: Config) -> bool:
    """Whether the data directory holds a database. Opening one would create it."""
    try:
        return (data_dir(config) / "postgres" / "PG_VERSION").exists()
    except PermissionError:
        return True  # it belongs to another user: opening it reports that


def check_embedded_database_is_there(config: Config) -> None:
    """Raise BadInput if the data directory holds no database yet."""
    if not has_embedded_database(config):
        check_place_of_embedded_database(config)
        raise BadInput(
            f"there is no database in {data_dir(config)} yet. `windlass up`, `worker`, `enqueue` or `db migrate` "
            "creates one; --data-dir or DATABASE_URL selects another."
        )


def check_place_of_embedded_database(config: Config) -> None:
    """Raise WindlassError if no server could run in the data directory. Creates nothing."""
    _embedded_server(config).check_place()


def described_database(config: Config) -> str:
    """The location of the database, without secrets."""
    if config.database_url is not None:
        return masked(config.database_url.get_secret_value())
    return f"embedded, in {data_dir(config)}"


def postgres_programs() -> Path:
    """The folder with the programs of the embedded PostgreSQL. ConfigError if this platform has none."""
    return package_dir() / PROGRAMS


def running_database_url(config: Config) -> str | None:
    """The URL of the embedded database, if it runs now. Starts nothing."""
    server = _embedded_server(config)
    return server.dsn if server.is_running() else None


@contextmanager
def temporary_data_dir() -> Iterator[Path]:
    """A data directory that is deleted afterwards."""
    folder = make_temporary_folder("windlass-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make_temporary_folder(prefix: str) -> Path:
    """A folder for a data directory, which the caller deletes.

    Under root the server runs as another user, who must reach the folder: if TMPDIR is closed to others (as in root's
    home), /tmp is used. The contents stay closed to others.
    """
    parent = Path(tempfile.gettempdir()).absolute()
    if os.geteuid() == 0 and not all(folder.stat().st_mode & 0o001 for folder in (parent, *parent.parents)):
        parent = Path("/tmp")  # noqa: S108 - mkdtemp creates its own folder in it
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    folder.chmod(0o711)
    return folder


@asynccontextmanager
async def database(config: Config, *, makes_schema: bool = True, may_create: bool = True) -> AsyncIterator[str]:
    """The URL of the database, which runs for as long as the context is open.

    A new embedded database gets the schema, unless `makes_schema` is false. An existing schema, like that of any other
    database, is only updated by `windlass up` and `windlass db migrate`. Commands that only read set `may_create` to
    false: then a missing database is BadInput.
    """
    if config.database_url is not None:
        yield config.database_url.get_secret_value()
        return
    if not may_create:
        check_embedded_database_is_there(config)
    server = _embedded_server(config)
    try:
        await _in_thread(server.open)
        if makes_schema and not await applied_migrations_of(server.dsn):
            await migrate(server.dsn)
        async with background_task(_keep_running(server, config)):
            yield server.dsn
    finally:
        await _in_thread(server.close)


@asynccontextmanager
async def database_as(role: str, config: Config, **options: bool) -> AsyncIterator[str]:
    """The same without the owner's rights, if `windlass db roles` was run and this user is a member of the role."""
    async with database(config, **options) as dsn:
        yield await dsn_with_role(dsn, role)


async def open_embedded_database(config: Config) -> "EmbeddedPostgres | None":
    """Start the embedded database, which the caller closes; None if another is configured."""
    if config.database_url is not None:
        return None
    server = _embedded_server(config)
    try:
        await _in_thread(server.open)
    except BaseException:
        await _in_thread(server.close)
        raise
    return server


async def _keep_running(server: "EmbeddedPostgres", config: Config) -> None:
    """Restart an embedded server that was killed. Only its users can, and they check for as long as they run."""
    import structlog

    log = structlog.get_logger(__name__)
    is_failure_logged = False

    def restart() -> None:
        # If the directory was deleted there is nothing to restart, and a new database would be empty.
        if not server.is_running() and has_embedded_database(config):
            server.open()

    while True:
        # Jitter: the users of one server should not check at the same moment.
        await asyncio.sleep(CHECK_INTERVAL_S * random.uniform(0.5, 1.5))  # noqa: S311
        try:
            await _in_thread(restart)
        except Exception as error:
            # Logged once: the check runs every few seconds, and the failure may last for days.
            if not is_failure_logged:
                is_defect = not isinstance(error, WindlassError | OSError)
                log.error("restart embedded database failed", error=str(error), exc_info=is_defect)
            is_failure_logged = True
        else:
            if is_failure_logged:
                log.info("restarted embedded database")
            is_failure_logged = False


async def _in_thread(function: Callable[[], None]) -> None:
    """Run a function to its end even if the caller is cancelled, so that its effect can be undone afterwards."""
    # Not in the loop's default threads: handlers may occupy all of them indefinitely.
    thread = ThreadPoolExecutor(1)
    work = asyncio.get_running_loop().run_in_executor(thread, function)
    thread.shutdown(wait=False)
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise


class CommandStore(
    PostgresTaskStore,
    PostgresTaskLists,
    PostgresFleetQueries,
    PostgresOperations,
    PostgresCostStore,
    PostgresHistoryStore,
    PostgresWorkerLogs,
    PostgresProcessQueries,
):
    """The ports of commands and of the client: tasks, fleets, operations, costs, history, output, processes.

    No claims, leases or plans.
    """


@asynccontextmanager
async def store(
    config: Config, *, max_connections: int = 4, may_create: bool = True, is_contract_sufficient: bool = False
) -> AsyncIterator[CommandStore]:
    """`is_contract_sufficient`: for producers, which work with every schema that supports their contract version."""
    async with (
        database(config, may_create=may_create) as dsn,
        Database(
            dsn,
            retention=config.retention,
            max_connections=max_connections,
            is_contract_sufficient=is_contract_sufficient,
        ) as opened,
    ):
        yield CommandStore(opened)


@asynccontextmanager
async def auth_store(config: Config, *, may_create: bool = True) -> AsyncIterator[AccessStores]:
    async with database(config, may_create=may_create) as dsn, Database(dsn, retention=config.retention) as opened:
        yield AccessStores(opened)


async def applied_migrations_of(dsn: str) -> dict[int, Any]:
    """The applied migrations, by version. Changes nothing."""
    async with connected(dsn, "reading the schema's version") as connection, connection.transaction(readonly=True):
        return await applied_migrations(connection)


async def examine_database(dsn: str) -> DatabaseCheck:
    return await examine(dsn)
