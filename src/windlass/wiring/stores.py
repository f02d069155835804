"""Where the database is, and everything that is kept in it."""

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

from windlass.model.config import Config
from windlass.model.errors import BadInput, WindlassError
from windlass.model.redaction import masked
from windlass.store.connect import connected
from windlass.store.migrate import applied_migrations, migrate
from windlass.store.postgres import PostgresStore
from windlass.wiring.background import beside

if TYPE_CHECKING:
    from windlass.store.auth import PostgresAuthStore
    from windlass.store.control import PostgresControlStore
    from windlass.store.doctor_checks import DatabaseCheck
    from windlass.store.embedded import EmbeddedPostgres

# How often we look whether an embedded server that we use still runs: a file is read, and a process looked at.
LOOK_INTERVAL_S = 5.0


def data_dir(config: Config) -> Path:
    from windlass.store.embedded import default_data_dir

    return (config.data_dir or default_data_dir()).expanduser()


def has_embedded_database(config: Config) -> bool:
    """Whether the data directory holds one already; opening it would make one."""
    try:
        return (data_dir(config) / "postgres" / "PG_VERSION").exists()
    except PermissionError:
        return True  # somebody else's: opening it says so


def check_embedded_database_is_there(config: Config) -> None:
    """Raise BadInput, with what makes one, where the data directory holds none yet."""
    if not has_embedded_database(config):
        raise BadInput(
            f"there is no database in {data_dir(config)} yet: `windlass up`, `worker`, `enqueue` or `db migrate` makes "
            "one; --data-dir or DATABASE_URL names another."
        )


def check_place_of_embedded_database(config: Config) -> None:
    """Raise WindlassError where no server could run in the data directory, as far as that is seen without making it."""
    from windlass.store.embedded import EmbeddedPostgres

    EmbeddedPostgres(data_dir(config)).check_place()


def described_database(config: Config) -> str:
    """Where the database is, without secrets."""
    if config.database_url is not None:
        return masked(config.database_url.get_secret_value())
    return f"embedded, in {data_dir(config)}"


def running_database_url(config: Config) -> str | None:
    """The address of the embedded database, if it runs now. Starts nothing."""
    from windlass.store.embedded import EmbeddedPostgres

    server = EmbeddedPostgres(data_dir(config))
    return server.dsn if server.is_running() else None


@contextmanager
def temporary_data_dir() -> Iterator[Path]:
    """A data directory that is gone afterwards, with all that is in it."""
    folder = make_temporary_folder("windlass-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make_temporary_folder(prefix: str) -> Path:
    """For a data directory. Whoever asks deletes it."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=_temporary_place()))
    # Under root the server runs as somebody else, who must get through. What lies inside is closed to others.
    folder.chmod(0o711)
    return folder


def _temporary_place() -> Path:
    """Where temporary files go; under root, if others cannot get there (TMPDIR in root's home), /tmp."""
    place = Path(tempfile.gettempdir()).absolute()
    is_open = os.geteuid() != 0 or all(folder.stat().st_mode & 0o001 for folder in (place, *place.parents))
    return place if is_open else Path("/tmp")  # noqa: S108 - mkdtemp makes its own folder in it


@asynccontextmanager
async def database(config: Config, *, makes_schema: bool = True, may_create: bool = True) -> AsyncIterator[str]:
    """The address of the database, running for as long as this is open.

    An embedded one without a schema gets it, unless `makes_schema` is false. A schema that is there is left as it is,
    as any other database: only `windlass up` and `windlass db migrate` bring it up to date. For whoever only looks,
    `may_create` is false: BadInput if there is none yet.
    """
    if config.database_url is not None:
        yield config.database_url.get_secret_value()
        return
    if not may_create:
        check_embedded_database_is_there(config)
    from windlass.store.embedded import EmbeddedPostgres

    server = EmbeddedPostgres(data_dir(config))
    try:
        await _in_thread(server.open)
        if makes_schema and not await applied_migrations_of(server.dsn):
            await migrate(server.dsn)
        async with beside(_keep_running(server, config)):
            yield server.dsn
    finally:
        await _in_thread(server.close)


async def _keep_running(server: "EmbeddedPostgres", config: Config) -> None:
    """A server that was killed has nobody but us, its users, to start it again. Whatever happens, we go on looking."""
    import structlog

    log = structlog.get_logger(__name__)
    is_trouble_told = False
    while True:
        # Not all of its users at the same moment.
        await asyncio.sleep(LOOK_INTERVAL_S * random.uniform(0.5, 1.5))  # noqa: S311
        try:
            await _in_thread(lambda: _revive(server, config))
        except Exception as error:
            # Once: we look every few seconds, and what is the matter may last for days.
            if not is_trouble_told:
                is_defect = not isinstance(error, WindlassError | OSError)
                log.error("the database's server does not start again", error=str(error), exc_info=is_defect)
            is_trouble_told = True
        else:
            if is_trouble_told:
                log.info("the database's server runs again")
            is_trouble_told = False


def _revive(server: "EmbeddedPostgres", config: Config) -> None:
    # Where somebody deleted the directory there is nothing to bring back, and a new one would be empty.
    if not server.is_running() and has_embedded_database(config):
        server.open()


async def _in_thread(function: Callable[[], None]) -> None:
    """Once begun it is waited for, even when we are cancelled: only then can what it did be undone."""
    # Not in the loop's own threads: handlers may have taken all of them, for ever.
    thread = ThreadPoolExecutor(1)
    work = asyncio.get_running_loop().run_in_executor(thread, function)
    thread.shutdown(wait=False)
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise


@asynccontextmanager
async def store(config: Config, *, max_connections: int = 4, may_create: bool = True) -> AsyncIterator[PostgresStore]:
    async with (
        database(config, may_create=may_create) as dsn,
        PostgresStore(dsn, retention=config.retention, max_connections=max_connections) as opened,
    ):
        yield opened


@asynccontextmanager
async def access_store(config: Config, *, may_create: bool = True) -> "AsyncIterator[PostgresAuthStore]":
    from windlass.store.auth import PostgresAuthStore

    async with (
        database(config, may_create=may_create) as dsn,
        PostgresAuthStore(dsn, retention=config.retention) as opened,
    ):
        yield opened


@asynccontextmanager
async def control_store(
    config: Config, *, max_connections: int = 4, may_create: bool = True
) -> "AsyncIterator[PostgresControlStore]":
    from windlass.store.control import PostgresControlStore

    async with (
        database(config, may_create=may_create) as dsn,
        PostgresControlStore(dsn, retention=config.retention, max_connections=max_connections) as opened,
    ):
        yield opened


async def applied_migrations_of(dsn: str) -> dict[int, Any]:
    """Version to row of what the database has; changes nothing."""
    async with connected(dsn, "reading the schema's version") as connection, connection.transaction(readonly=True):
        return await applied_migrations(connection)


async def examine_database(dsn: str) -> "DatabaseCheck":
    from windlass.store.doctor_checks import examine

    return await examine(dsn)
