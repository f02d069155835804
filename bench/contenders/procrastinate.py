"""procrastinate over its psycopg pool. It claims one job per statement; "batch" is its concurrency."""

import argparse
import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import procrastinate

from bench.contenders.base import QUEUE, Mode, Send, Stopwatch, chunks
from bench.worker_processes import python_module


class Procrastinate:
    schema = "procrastinate_queue"

    async def install(self, dsn: str) -> None:
        async with application(dsn).open_async() as app:
            await app.schema_manager.apply_schema_async()

    async def enqueue(self, dsn: str, count: int) -> float:
        stopwatch = Stopwatch()
        async with application(dsn).open_async() as app:
            for rows in chunks(count):
                arguments = [{"n": n} for n in range(rows)]
                with stopwatch:
                    await app.tasks["noop"].batch_defer_async(*arguments)
        return stopwatch.seconds

    async def finished(self, connection: Any) -> int:
        count: int = await connection.fetchval("select count(*) from procrastinate_jobs where status = 'succeeded'")
        return count

    @asynccontextmanager
    async def producer(self, dsn: str) -> AsyncIterator[Send]:
        async with application(dsn).open_async() as app:

            async def send(sent_at_ns: int) -> None:
                await app.tasks["wake"].defer_async(sent_at_ns=sent_at_ns)

            yield send

    def worker(self, mode: Mode) -> list[str]:
        return python_module("bench.contenders.procrastinate", mode.batch)


def application(dsn: str, connections: int = 4) -> procrastinate.App:
    connector = procrastinate.PsycopgConnector(conninfo=dsn, min_size=connections, max_size=connections)
    app = procrastinate.App(connector=connector)

    @app.task(name="noop", queue=QUEUE)  # type: ignore[untyped-decorator]
    async def noop(n: int) -> None:  # noqa: ARG001
        from bench import shared_counters as counters  # noqa: PLC0415 - only worker processes have one

        counters.count()

    @app.task(name="wake", queue=QUEUE)  # type: ignore[untyped-decorator]
    async def wake(sent_at_ns: int) -> None:
        from bench import shared_counters as counters  # noqa: PLC0415

        counters.arrived(sent_at_ns)

    return app


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("concurrency", type=int)
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    # Two more connections: one listens, one is for heartbeats.
    async with application(os.environ["DATABASE_URL"], arguments.concurrency + 2).open_async() as app:
        await app.run_worker_async(queues=[QUEUE], concurrency=arguments.concurrency)


if __name__ == "__main__":
    asyncio.run(main())
