"""No product: an asyncpg connection and one statement that finishes the last task and claims the next.

The baseline. It has no retries, heartbeats, leases, isolation or shutdown: the difference to it is the cost of a real
worker.
"""

import argparse
import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg

from bench.bench_server import connected
from bench.contenders.base import QUEUE, Mode, Send, Stopwatch
from bench.worker_processes import python_module
from windlass.store.tasks import COPY_COLUMNS

_named = (block.split("\n", 1) for block in Path(__file__).with_suffix(".sql").read_text().split("-- name: ")[1:])
SQL = {name.strip(): sql for name, sql in _named}
CHANNEL = "bare_tasks"
WORKER = f"bare-{os.getpid()}"


class Bare:
    schema = "bare"
    table = "bare_tasks"

    async def install(self, dsn: str) -> None:
        async with connected(dsn) as connection:
            await connection.execute(SQL["schema"])

    async def enqueue(self, dsn: str, count: int) -> float:
        rows = [(QUEUE, json.dumps({"n": n}), 0, None, 3, None, None) for n in range(count)]
        stopwatch = Stopwatch()
        async with connected(dsn) as connection:
            with stopwatch:
                await connection.copy_records_to_table(self.table, records=rows, columns=COPY_COLUMNS)
        return stopwatch.seconds

    async def finished(self, connection: Any) -> int:
        count: int = await connection.fetchval("select count(*) from bare_tasks where status = 'complete'")
        return count

    @asynccontextmanager
    async def producer(self, dsn: str) -> AsyncIterator[Send]:
        async with connected(dsn) as connection:

            async def send(sent_at_ns: int) -> None:
                await connection.execute(
                    "with added as (insert into bare_tasks (queue, payload) values ($1, $2))"
                    " select pg_notify('bare_tasks', '')",
                    QUEUE,
                    str(sent_at_ns),
                )

            yield send

    def worker(self, mode: Mode) -> list[str]:
        return python_module("bench.contenders.bare", mode.task, mode.batch)


async def work_one_at_a_time(connection: asyncpg.Connection) -> None:
    from bench import shared_counters as counters  # noqa: PLC0415 - only worker processes have one

    turn = await connection.prepare(SQL["turn"])
    task_id = token = None
    while (task := await turn.fetchrow(task_id, token, "null", QUEUE, WORKER)) is not None:
        task_id, token = task["id"], task["claim_token"]
        json.loads(task["payload"])
        counters.count()


async def work_in_batches(connection: asyncpg.Connection, size: int) -> None:
    from bench import shared_counters as counters  # noqa: PLC0415

    turn = await connection.prepare(SQL["turn_batch"])
    tasks: list[Any] = []
    while True:
        done = [(task["id"], task["claim_token"], "null") for task in tasks]
        ids, tokens, results = zip(*done, strict=True) if done else ([], [], [])
        tasks = await turn.fetch(ids, tokens, results, QUEUE, WORKER, size)
        if not tasks:
            return
        for task in tasks:
            json.loads(task["payload"])
            counters.count()


async def wake(connection: asyncpg.Connection) -> None:
    from bench import shared_counters as counters  # noqa: PLC0415

    arrival = asyncio.Event()
    listening = await asyncpg.connect(os.environ["DATABASE_URL"])
    await listening.add_listener(CHANNEL, lambda *_: arrival.set())
    turn = await connection.prepare(SQL["turn"])
    task_id = token = None
    while True:
        while (task := await turn.fetchrow(task_id, token, "null", QUEUE, WORKER)) is not None:
            task_id, token = task["id"], task["claim_token"]
            counters.arrived(json.loads(task["payload"]))
        task_id = token = None
        await arrival.wait()
        arrival.clear()


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=["noop", "wake"])
    parser.add_argument("batch", type=int)
    arguments = parser.parse_args()
    async with connected(os.environ["DATABASE_URL"]) as connection:
        if arguments.task == "wake":
            await wake(connection)
        elif arguments.batch == 1:
            await work_one_at_a_time(connection)
        else:
            await work_in_batches(connection, arguments.batch)


if __name__ == "__main__":
    asyncio.run(main())
