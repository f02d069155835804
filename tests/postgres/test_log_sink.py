"""Log lines in the database: written in batches, bounded, without delaying callers."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from support.stores import PostgresStores
from windlass.model.errors import DatabaseUnavailable
from windlass.store.log_sink import LogSink


class Flaky(PostgresStores):
    is_away = False

    async def add_logs(self, rows: list[dict[str, Any]]) -> None:
        if self.is_away:
            raise DatabaseUnavailable("away")
        await super().add_logs(rows)


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Flaky]:
    async with Flaky(dsn, max_connections=1) as store:
        yield store


async def written(dsn: str) -> list[Any]:
    async with PostgresStores(dsn) as reading:
        return list((await reading.logs_page(limit=500)).rows)[::-1]


async def test_log_lines_are_stored_with_worker_and_cycle(store: Flaky, dsn: str) -> None:
    sink = LogSink(store)
    sink.take({"level": "warning", "event": "fail attempt", "worker_id": "w0", "cycle": 7, "code": "X\x00", "n": 1})
    sink.take({"level": "info", "event": "up", "timestamp": "2030-01-01T00:00:00Z", "odd": {1, 2}})
    await sink.write()
    first, second = await written(dsn)
    assert (first.level, first.message, first.worker_id, first.cycle_id) == ("warning", "fail attempt", "w0", 7)
    assert first.fields == {"code": "X\\0", "n": 1}
    assert second.at.year == 2030


async def test_unavailable_database_drops_only_excess_lines(store: Flaky, dsn: str) -> None:
    dropped: list[int] = []
    sink = LogSink(store, dropped.append, limit=10)
    store.is_away = True
    started = time.monotonic()
    for number in range(10_000):
        sink.take({"level": "info", "event": f"line {number}"})
    assert time.monotonic() - started < 60.0
    await sink.write()
    store.is_away = False
    await sink.write()
    lines = [line.message for line in await written(dsn)]
    assert len(lines) <= 12
    assert "line 9" in lines
    assert sum(dropped) >= 9_990 - 2
    assert any("were not written" in line for line in lines)


async def test_refused_lines_are_dropped_and_counted(store: Flaky, dsn: str) -> None:
    dropped: list[int] = []
    sink = LogSink(store, dropped.append)
    sink.take({"level": "info", "event": "no moment", "timestamp": "never"})
    await sink.write()
    sink.take({"level": "info", "event": "the next"})
    await sink.write()
    assert [line.message for line in await written(dsn)] == ["the next", "1 log lines were not written to the database"]
    assert dropped == [1]


async def test_lines_from_any_thread_are_written_at_the_end(store: Flaky, dsn: str) -> None:
    sink = LogSink(store)
    running = asyncio.create_task(sink.run())

    def talk() -> None:
        for number in range(100):
            sink.take({"level": "info", "event": f"line {number}"})

    threads = [threading.Thread(target=talk) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert len(await written(dsn)) == 400
