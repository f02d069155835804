"""Windlass: the command a user types, `windlass worker`, and its own client."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bench.contenders.base import QUEUE, Mode, Send, Stopwatch
from windlass.model.task import new_task
from windlass.store.database import Database
from windlass.store.migration import migrate
from windlass.store.tasks import PostgresTaskStore


class Windlass:
    schema = "windlass_queue"

    async def install(self, dsn: str) -> None:
        await migrate(dsn)

    async def enqueue(self, dsn: str, count: int) -> float:
        tasks = [new_task(QUEUE, {"n": n}) for n in range(count)]
        stopwatch = Stopwatch()
        async with Database(dsn) as database:
            with stopwatch:
                await PostgresTaskStore(database).enqueue_many(tasks)
        return stopwatch.seconds

    async def finished(self, connection: Any) -> int:
        count: int = await connection.fetchval("select count(*) from windlass.tasks where status = 'complete'")
        return count

    @asynccontextmanager
    async def producer(self, dsn: str) -> AsyncIterator[Send]:
        async with Database(dsn) as database:

            async def send(sent_at_ns: int) -> None:
                await PostgresTaskStore(database).enqueue(new_task(QUEUE, sent_at_ns))

            yield send

    def worker(self, mode: Mode) -> list[str]:
        program = str(Path(sys.executable).with_name("windlass"))
        command = [program, "worker", "--queue", QUEUE, "--concurrency", str(mode.batch)]
        if mode.variant == "inline":
            return [*command, "--handler", f"bench.handlers:{mode.task}_inline", "--inline"]
        return [*command, "--handler", f"bench.handlers:{mode.task}"]
