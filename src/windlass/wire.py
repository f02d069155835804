"""The composition root: the only module that knows all the others and puts them together.

Each part is imported when it is asked for: a producer with a DATABASE_URL loads neither the worker nor the embedded
server, and a worker nothing that only people look at.
"""

import asyncio
import contextlib
import os
import random
import secrets
import shutil
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncpg

from windlass.model.address import masked
from windlass.model.config import Config
from windlass.model.errors import BadInput, ConfigError, DatabaseUnavailable
from windlass.store.migrate import Migration, applied_migrations, migrate
from windlass.store.postgres import (
    COMMAND_TIMEOUT_S,
    CONNECT_TIMEOUT_S,
    CONNECTION_ERRORS,
    PostgresStore,
    unavailable,
)

if TYPE_CHECKING:
    from windlass.configure import Loaded
    from windlass.control.cycle import FleetCycle
    from windlass.control.summary import Summary
    from windlass.control.up import Up
    from windlass.model.fleet import FleetConfig
    from windlass.ports.control import Candidate
    from windlass.providers.local import LocalProvider
    from windlass.store.control import PostgresControlStore
    from windlass.store.examine import Examination
    from windlass.worker.executor import Executor
    from windlass.worker.runtime import Ending, WorkerSettings

# Of the machine's memory: what all handlers of a worker may use together when nothing else is configured.
MEMORY_SHARE = 0.9


def data_dir(config: Config) -> Path:
    from windlass.store.embedded import default_data_dir

    return (config.data_dir or default_data_dir()).expanduser()


def has_embedded_database(config: Config) -> bool:
    """Whether the data directory holds one already; opening it would make one."""
    try:
        return (data_dir(config) / "postgres" / "PG_VERSION").exists()
    except PermissionError:
        return True  # somebody else's: opening it says so


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
async def database(config: Config, *, is_migrating: bool = True, may_create: bool = True) -> AsyncIterator[str]:
    """The address of the database, running for as long as this is open.

    The embedded one is brought up to date, unless `is_migrating` is false; any other is left as it is. For whoever only
    looks, `may_create` is false: BadInput if there is none yet.
    """
    if config.database_url is not None:
        yield config.database_url.get_secret_value()
        return
    if not may_create and not has_embedded_database(config):
        raise BadInput(
            f"there is no database in {data_dir(config)} yet: `windlass up`, `worker` or `enqueue` makes one; "
            "--data-dir or DATABASE_URL names another."
        )
    from windlass.store.embedded import EmbeddedPostgres

    server = EmbeddedPostgres(data_dir(config))
    try:
        await _in_thread(server.open)
        if is_migrating:
            await migrate_database(server.dsn)
        yield server.dsn
    finally:
        await _in_thread(server.close)


async def _in_thread(function: Callable[[], None]) -> None:
    """Once begun it is waited for, even when we are cancelled: only then can what it did be undone."""
    work = asyncio.create_task(asyncio.to_thread(function))
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
async def control_store(
    config: Config, *, max_connections: int = 4, may_create: bool = True
) -> "AsyncIterator[PostgresControlStore]":
    from windlass.store.control import PostgresControlStore

    async with (
        database(config, may_create=may_create) as dsn,
        PostgresControlStore(dsn, retention=config.retention, max_connections=max_connections) as opened,
    ):
        yield opened


async def migrate_database(dsn: str) -> list[Migration]:
    try:
        return await migrate(dsn)
    except CONNECTION_ERRORS as error:
        raise unavailable("migrating", dsn, error) from None


async def applied_migrations_of(dsn: str) -> dict[int, Any]:
    """Version to row of what the database has; changes nothing."""
    try:
        connection = await asyncpg.connect(
            dsn, timeout=CONNECT_TIMEOUT_S, command_timeout=COMMAND_TIMEOUT_S, statement_cache_size=0
        )
        try:
            async with connection.transaction(readonly=True):
                return await applied_migrations(connection)
        finally:
            await connection.close(timeout=CONNECT_TIMEOUT_S)
    except CONNECTION_ERRORS as error:
        raise unavailable("reading the schema's version", dsn, error) from None


async def examine_database(dsn: str) -> "Examination":
    from windlass.store.examine import examine

    try:
        return await examine(dsn)
    except CONNECTION_ERRORS as error:
        raise unavailable("examining the database", dsn, error) from None


async def run_worker(
    config: Config, settings: "WorkerSettings", *, handler: str | None, command: str | None, is_inline: bool
) -> "Ending":
    """One worker over the database, until it is told to end."""
    from windlass.worker.runtime import WorkerRuntime

    executor = _executor(config, settings, handler=handler, command=command, is_inline=is_inline)
    async with database(config) as dsn:

        def open_transport() -> PostgresStore:
            # The loop and its look-out each need one connection at a time.
            return PostgresStore(dsn, retention=config.retention, max_connections=2)

        return await WorkerRuntime(settings, open_transport, executor).run()


def _executor(
    config: Config, settings: "WorkerSettings", *, handler: str | None, command: str | None, is_inline: bool
) -> "Executor":
    limit_mb = config.worker.memory_limit_mb
    limit_bytes = limit_mb << 20 if limit_mb else int(_memory_bytes() * MEMORY_SHARE) // settings.concurrency
    if command is not None:
        from windlass.worker.command import CommandExecutor

        return CommandExecutor(command, memory_limit_bytes=limit_bytes, max_result_bytes=config.max_payload_bytes)
    if handler is None:
        raise AssertionError("a worker has a handler or a command")
    if is_inline:
        from windlass.worker.inline import InlineExecutor

        return InlineExecutor(handler, max_result_bytes=config.max_payload_bytes)
    from windlass.worker.isolated import IsolatedExecutor

    return IsolatedExecutor(
        handler,
        concurrency=settings.concurrency,
        memory_limit_bytes=limit_bytes,
        max_result_bytes=config.max_payload_bytes,
    )


def _memory_bytes() -> int:
    """The memory of this machine, or of the container we are in if that is less."""
    import psutil

    total = int(psutil.virtual_memory().total)
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no cgroup, or "max"
        return total


# ------------------------------------------------------------------------------------------------------------- fleets


def fleet_cycle(
    name: str,
    fleet: "FleetConfig",
    config: Config,
    store: "PostgresControlStore",
    candidate: "Candidate",
    instance_id: str,
) -> "FleetCycle":
    from windlass.control.cycle import FleetCycle

    rents = provider(name, fleet, config, instance_id)
    return FleetCycle(name, fleet, store, rents, candidate, random.SystemRandom())


def provider(name: str, fleet: "FleetConfig", config: Config, instance_id: str) -> "LocalProvider":
    """Who rents a fleet's machines. `instance_id`: the database's, with which they are tagged."""
    from windlass.configure import environment_of, secret_variables
    from windlass.providers.local import LocalProvider

    url = config.database_url.get_secret_value() if config.database_url is not None else None
    return LocalProvider(
        name,
        fleet,
        identity=instance_id,
        state_dir=data_dir(config),
        database_url=url,
        data_dir=data_dir(config) if url is None else None,
        settings=environment_of(config, "worker", "retention", "max_payload_bytes"),
        # All that a worker needs to know is where its database is.
        withheld=[name for name, key in secret_variables().items() if key != ("database_url",)],
    )


def candidate(config: Config) -> "Candidate":
    """Ourselves, as one who might lead."""
    from windlass.ports.control import Candidate

    return Candidate(f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}", config.control.lease_s)


async def run_cycles(config: Config) -> "list[Summary]":
    """One cycle of every fleet, then give the lead up: for cron and the like."""
    async with control_store(config) as store:
        ourselves, instance_id = candidate(config), await store.instance_id()
        try:
            return [
                await _run_once(fleet_cycle(name, fleet, config, store, ourselves, instance_id))
                for name, fleet in config.fleets.items()
            ]
        finally:
            await store.resign(ourselves)


async def _run_once(cycle: "FleetCycle") -> "Summary":
    try:
        return await cycle.run()
    finally:
        await cycle.close()


async def run_up(
    loaded: "Loaded",
    reload: "Callable[[], Loaded]",
    on_summary: "Callable[[Summary], None]",
    *,
    is_leaving_workers: bool,
) -> None:
    """Every fleet, until told to stop: SIGTERM and Ctrl-C end in good order, a second one at once; SIGHUP reloads."""
    import structlog

    from windlass.control.up import Up
    from windlass.store.control import PostgresControlStore

    config = loaded.config
    async with database(config) as dsn:
        await migrate_database(dsn)
        async with PostgresControlStore(dsn, retention=config.retention) as opened:
            ourselves, instance_id = candidate(config), await opened.instance_id()
            up = Up(
                opened,
                lambda name, fleet: fleet_cycle(name, fleet, config, opened, ourselves, instance_id),
                lambda name, fleet: provider(name, fleet, config, instance_id),
                on_summary,
            )
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, lambda: up.stop(is_leaving_workers=is_leaving_workers))
            loop.add_signal_handler(signal.SIGHUP, lambda: _reconfigure(up, reload))
            log = structlog.get_logger("windlass.up")
            log.info("up", database=described_database(config), fleets=list(config.fleets), pid=os.getpid())
            await up.run(config.fleets)
            with contextlib.suppress(DatabaseUnavailable):
                await opened.resign(ourselves)
            log.info("ended")


def _reconfigure(up: "Up", reload: "Callable[[], Loaded]") -> None:
    try:
        up.reconfigure(reload().config.fleets)
    except (ConfigError, BadInput) as error:
        import structlog

        structlog.get_logger(__name__).error("configuration not reloaded, nothing changed", error=str(error))


async def worker_log(
    config: Config, fleet: str, worker_id: str, lines: int, *, is_following: bool
) -> AsyncIterator[str]:
    """What a worker of a local fleet printed on this host. Raises BadInput if nothing of it is here."""
    from windlass.providers.local.logs import log_folder

    async for line in log_folder(data_dir(config), fleet).read(worker_id, lines, follow=is_following):
        yield line
