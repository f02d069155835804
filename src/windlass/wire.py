"""The composition root: the only module that knows all the others and puts them together."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from windlass.model.config import Config
from windlass.store.embedded import EmbeddedPostgres, default_data_dir
from windlass.store.migrate import Migration, migrate
from windlass.store.postgres import CONNECTION_ERRORS, PostgresStore, unavailable
from windlass.worker.command import CommandExecutor
from windlass.worker.executor import Executor
from windlass.worker.inline import InlineExecutor
from windlass.worker.isolated import IsolatedExecutor
from windlass.worker.runtime import Ending, WorkerRuntime, WorkerSettings

# Of the machine's memory: what all handlers of a worker may use together when nothing else is configured.
MEMORY_SHARE = 0.9


def data_dir(config: Config) -> Path:
    return (config.data_dir or default_data_dir()).expanduser()


@asynccontextmanager
async def database(config: Config) -> AsyncIterator[str]:
    """The address of the database, running for as long as this is open. The embedded one is brought up to date."""
    if config.database_url is not None:
        yield config.database_url.get_secret_value()
        return
    server = EmbeddedPostgres(data_dir(config))
    await asyncio.to_thread(server.open)
    try:
        await migrate_database(server.dsn)
        yield server.dsn
    finally:
        await asyncio.to_thread(server.close)


@asynccontextmanager
async def store(config: Config, *, max_connections: int = 4) -> AsyncIterator[PostgresStore]:
    async with (
        database(config) as dsn,
        PostgresStore(dsn, retention=config.retention, max_connections=max_connections) as opened,
    ):
        yield opened


async def migrate_database(dsn: str) -> list[Migration]:
    try:
        return await migrate(dsn)
    except CONNECTION_ERRORS as error:
        raise unavailable("migrating", dsn, error) from None


async def run_worker(
    config: Config, settings: WorkerSettings, *, handler: str | None, command: str | None, is_inline: bool
) -> Ending:
    """One worker over the database, until it is told to end."""
    executor = _executor(config, settings, handler=handler, command=command, is_inline=is_inline)
    async with database(config) as dsn:

        def open_transport() -> PostgresStore:
            # The loop and its look-out each need one connection at a time.
            return PostgresStore(dsn, retention=config.retention, max_connections=2)

        return await WorkerRuntime(settings, open_transport, executor).run()


def _executor(
    config: Config, settings: WorkerSettings, *, handler: str | None, command: str | None, is_inline: bool
) -> Executor:
    if command is not None:
        return CommandExecutor(command, max_result_bytes=config.max_payload_bytes)
    if handler is None:
        raise AssertionError("a worker has a handler or a command")
    if is_inline:
        return InlineExecutor(handler, max_result_bytes=config.max_payload_bytes)
    limit_mb = config.worker.memory_limit_mb
    return IsolatedExecutor(
        handler,
        concurrency=settings.concurrency,
        memory_limit_bytes=limit_mb << 20 if limit_mb else int(_memory_bytes() * MEMORY_SHARE) // settings.concurrency,
        max_result_bytes=config.max_payload_bytes,
    )


def _memory_bytes() -> int:
    """The memory of this machine, or of the container we are in if that is less."""
    total = int(psutil.virtual_memory().total)
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no cgroup, or "max"
        return total
