"""Stores the log lines of a process in the database, if that is configured."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from windlass.background import background_task
from windlass.model.config import Config
from windlass.store.database import Database
from windlass.store.log_sink import LogSink, PostgresLogStore

# Registers a receiver of log lines; returns the function that removes it.
Tap = Callable[[Callable[[Mapping[str, Any]], None]], Callable[[], None]]


@asynccontextmanager
async def stored_log_lines(
    config: Config, dsn: str, tap: Tap, on_dropped: Callable[[int], None]
) -> AsyncIterator[None]:
    """`on_dropped` gets the number of lines that could not be stored."""
    if not config.logs.in_database:
        yield
        return
    async with Database(dsn, retention=config.retention, max_connections=1) as opened:
        sink = LogSink(PostgresLogStore(opened), on_dropped)
        async with background_task(sink.run()):
            remove = tap(sink.take)
            try:
                yield
            finally:
                remove()
