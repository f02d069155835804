"""pgqueuer over asyncpg's pool and uvloop: what its documentation recommends and its command line uses."""

import argparse
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import asyncpg
import pgqueuer
import uvloop
from pgqueuer.adapters.cli import supervisor
from pgqueuer.db import AsyncpgDriver, AsyncpgPoolDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries

from bench.bench_server import connected
from bench.contenders.base import QUEUE, Mode, Send, Stopwatch, chunks
from bench.worker_processes import python_module


class PgQueuer:
    schema = "pgqueuer_queue"

    async def install(self, dsn: str) -> None:
        async with connected(dsn) as connection:
            await Queries(AsyncpgDriver(connection)).install()

    async def enqueue(self, dsn: str, count: int) -> float:
        stopwatch = Stopwatch()
        async with connected(dsn) as connection:
            queries = Queries(AsyncpgDriver(connection))
            for rows in chunks(count):
                payloads: list[bytes | None] = [b'{"n": %d}' % n for n in range(rows)]
                with stopwatch:
                    await queries.enqueue([QUEUE] * rows, payloads, [0] * rows)
        return stopwatch.seconds

    async def finished(self, connection: Any) -> int:
        count: int = await connection.fetchval("select count(*) from pgqueuer_log where status = 'successful'")
        return count

    @asynccontextmanager
    async def producer(self, dsn: str) -> AsyncIterator[Send]:
        async with connected(dsn) as connection:
            queries = Queries(AsyncpgDriver(connection))

            async def send(sent_at_ns: int) -> None:
                await queries.enqueue(QUEUE, str(sent_at_ns).encode())

            yield send

    def worker(self, mode: Mode) -> list[str]:
        return python_module("bench.contenders.pgqueuer", mode.task, mode.batch)


@asynccontextmanager
async def manager(task: str) -> AsyncIterator[pgqueuer.PgQueuer]:
    from bench import shared_counters as counters  # noqa: PLC0415 - only worker processes have one

    async with asyncpg.create_pool(os.environ["DATABASE_URL"], min_size=2, max_size=5) as pool:
        queue = pgqueuer.PgQueuer(AsyncpgPoolDriver(pool))

        @queue.entrypoint(QUEUE)
        async def handle(job: Job) -> None:
            if task == "noop":
                counters.count()
            else:
                counters.arrived(int(job.payload or b"0"))

        yield queue


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=["noop", "wake"])
    parser.add_argument("batch", type=int)
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    uvloop.run(
        supervisor.run(
            lambda: manager(arguments.task), batch_size=arguments.batch, dequeue_timeout=timedelta(seconds=30)
        )
    )


if __name__ == "__main__":
    main()
