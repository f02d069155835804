"""pgmq by its own Python client and its own SQL, which the client's package carries for databases without extensions.

It is a message queue: the loop around read and delete is the user's. Ours does what serves pgmq best: a connection
of its own instead of the client's pool, each call its own transaction.
"""

import argparse
import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
from pgmq.async_queue import PGMQueue
from pgmq.install import get_embedded_install_sql

from bench.bench_server import connected
from bench.contenders.base import QUEUE, Mode, Send, Stopwatch, chunks
from bench.worker_processes import python_module

VISIBILITY_TIMEOUT_S = 60


class Pgmq:
    schema = "pgmq_queue"

    async def install(self, dsn: str) -> None:
        async with connected(dsn) as connection:
            await connection.execute(get_embedded_install_sql())
            await connection.execute("select pgmq.create($1)", QUEUE)

    async def enqueue(self, dsn: str, count: int) -> float:
        stopwatch = Stopwatch()
        async with client(dsn) as (queue, connection):
            for rows in chunks(count):
                messages = [{"n": n} for n in range(rows)]
                with stopwatch:
                    await queue.send_batch(QUEUE, messages, conn=connection)
        return stopwatch.seconds

    async def finished(self, connection: Any) -> int:
        """Deleted messages leave no trace but the gap below the last number given out."""
        sent: int = await connection.fetchval("select last_value from pgmq.q_bench_msg_id_seq")
        left: int = await connection.fetchval("select count(*) from pgmq.q_bench")
        return sent - left

    @asynccontextmanager
    async def producer(self, dsn: str) -> AsyncIterator[Send]:
        async with client(dsn) as (queue, connection):
            # 0: every insert notifies. The default notifies at most four times a second.
            await queue.enable_notify(QUEUE, 0, conn=connection)

            async def send(sent_at_ns: int) -> None:
                await queue.send(QUEUE, {"sent_at_ns": sent_at_ns}, conn=connection)

            yield send

    def worker(self, mode: Mode) -> list[str]:
        return python_module("bench.contenders.pgmq", mode.task, mode.batch, mode.variant or "delete")


@asynccontextmanager
async def client(dsn: str) -> AsyncIterator[tuple[PGMQueue, asyncpg.Connection]]:
    # The client's own address format knows no sockets, so the pool is made here.
    async with asyncpg.create_pool(dsn, min_size=1, max_size=2) as pool, connected(dsn) as connection:
        queue = PGMQueue(pool=pool, init_extension=False, conn_string=None)
        await queue.init()
        yield queue, connection


async def work_one_at_a_time(queue: PGMQueue, connection: asyncpg.Connection, is_archived: bool) -> None:
    from bench import shared_counters as counters  # noqa: PLC0415 - only worker processes have one

    end = queue.archive if is_archived else queue.delete
    while (message := await queue.read(QUEUE, vt=VISIBILITY_TIMEOUT_S, conn=connection)) is not None:
        counters.count()
        await end(QUEUE, message.msg_id, conn=connection)


async def work_in_batches(queue: PGMQueue, connection: asyncpg.Connection, is_archived: bool, size: int) -> None:
    from bench import shared_counters as counters  # noqa: PLC0415

    end = queue.archive_batch if is_archived else queue.delete_batch
    while messages := await queue.read_batch(QUEUE, vt=VISIBILITY_TIMEOUT_S, batch_size=size, conn=connection):
        for _ in messages:
            counters.count()
        await end(QUEUE, [message.msg_id for message in messages], conn=connection)


async def wake(queue: PGMQueue, connection: asyncpg.Connection) -> None:
    from bench import shared_counters as counters  # noqa: PLC0415

    arrival = asyncio.Event()
    listening = await asyncpg.connect(os.environ["DATABASE_URL"])
    await listening.add_listener(f"pgmq.q_{QUEUE}.INSERT", lambda *_: arrival.set())
    while True:
        while (message := await queue.read(QUEUE, vt=VISIBILITY_TIMEOUT_S, conn=connection)) is not None:
            counters.arrived(message.message["sent_at_ns"])
            await queue.delete(QUEUE, message.msg_id, conn=connection)
        await arrival.wait()
        arrival.clear()


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=["noop", "wake"])
    parser.add_argument("batch", type=int)
    parser.add_argument("end", choices=["delete", "archive"])
    arguments = parser.parse_args()
    is_archived = arguments.end == "archive"
    async with client(os.environ["DATABASE_URL"]) as (queue, connection):
        if arguments.task == "wake":
            await wake(queue, connection)
        elif arguments.batch == 1:
            await work_one_at_a_time(queue, connection, is_archived)
        else:
            await work_in_batches(queue, connection, is_archived, arguments.batch)


if __name__ == "__main__":
    asyncio.run(main())
