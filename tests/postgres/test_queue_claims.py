"""Claims on a real PostgreSQL: each task goes to one worker, and finishing a claim twice is safe."""

import asyncio
from collections import Counter
from typing import Any

import asyncpg
import pytest

from support.queue_sql import connections, eventually, is_blocked, register
from support.stores import PostgresStores
from windlass.model.errors import DatabaseUnavailable
from windlass.model.task import Finished, NewTask, TaskStatus


async def claim_all(connection: Any, worker_id: str, limit: int) -> list[int]:
    taken: list[int] = []
    while rows := await connection.fetch("select * from windlass.claim_tasks($1, '{q}', $2)", worker_id, limit):
        taken += [row["task_id"] for row in rows]
    return taken


async def test_concurrent_claims_return_each_task_once(each_dsn: str) -> None:
    count, worker_count = 400, 8
    async with connections(each_dsn, worker_count) as pool:
        await pool[0].execute("insert into windlass.tasks (queue) select 'q' from generate_series(1, $1)", count)
        for number in range(worker_count):
            await pool[0].execute("select windlass.register_worker($1)", f"w{number}")
        taken = await asyncio.gather(
            *(claim_all(pool[number], f"w{number}", 1 + number % 3) for number in range(worker_count))
        )
        assert Counter(id_ for ids in taken for id_ in ids).most_common(1)[0][1] == 1
        assert sum(map(len, taken)) == count
        rows = await pool[0].fetch("select worker_id, count(distinct claim_token) as n from windlass.tasks group by 1")
        assert {row["worker_id"]: row["n"] for row in rows} == {f"w{n}": len(ids) for n, ids in enumerate(taken) if ids}


async def test_concurrent_claims_return_each_due_task_once(each_dsn: str) -> None:
    async with connections(each_dsn, 6) as pool:
        await pool[0].execute("select windlass.register_worker('w')")
        await pool[0].execute(
            "insert into windlass.tasks (queue, run_after)"
            " select 'q', now() - interval '1 s' from generate_series(1, 120)"
        )
        taken = await asyncio.gather(*(claim_all(connection, "w", 2) for connection in pool))
        ids = [id_ for ids in taken for id_ in ids]
        # A claim skips rows that a concurrent claim makes ready. The next claim returns them.
        ids += await claim_all(pool[0], "w", 10)
        assert len(ids) == len(set(ids)) == 120


async def test_concurrent_completions_of_one_claim_are_all_accepted(store: PostgresStores) -> None:
    """A worker retries when the first answer was lost: one completion, no late result."""
    await register(store, "w1")
    await store.enqueue(NewTask("q"))
    (claim,) = await store.claim("w1", ("q",))
    done = [Finished(claim.task_id, claim.token, "1")]
    results = await asyncio.gather(*(store.finish_and_claim("w1", done, (), 0) for _ in range(4)))
    assert [result.lost for result in results] == [[], [], [], []]
    worker = await store.worker("w1")
    assert worker is not None
    assert worker.late_results == 0


async def test_deadlock_raises_unavailable_and_retry_succeeds(
    connection: Any, second_connection: Any, store: PostgresStores
) -> None:
    await register(store, "w1")
    await store.enqueue_many([NewTask("q"), NewTask("q")])
    first, second = await store.claim("w1", ("q",), 2)
    done = [Finished(claim.task_id, claim.token, None) for claim in (first, second)]
    # The session with the shorter deadlock_timeout is cancelled: here the store's.
    await connection.execute("set deadlock_timeout = '1h'")
    async with connection.transaction():
        await connection.execute("select from windlass.tasks where id = $1 for update", second.task_id)
        finishing = asyncio.create_task(store.finish_and_claim("w1", done, (), 0))
        await eventually(lambda: is_blocked(second_connection), "finish_and_claim blocks at the second task")
        await connection.execute("select from windlass.tasks where id = $1 for update", first.task_id)
        with pytest.raises(DatabaseUnavailable, match=r"\(deadlock detected\)\. Try again\.$"):
            await finishing
    result = await store.finish_and_claim("w1", done, (), 0)
    assert result.lost == []
    assert {task.status for task in await store.tasks()} == {TaskStatus.COMPLETE}


async def test_slot_holds_one_live_worker(connection: Any) -> None:
    await connection.execute("insert into windlass.fleets (name) values ('gpus')")
    await connection.execute("insert into windlass.slots (fleet, slot) values ('gpus', 0)")
    insert = "insert into windlass.workers (id, fleet, slot, status) values ($1, 'gpus', 0, 'spawning')"
    await connection.execute(insert, "h1")
    with pytest.raises(asyncpg.UniqueViolationError):
        await connection.execute(insert, "h2")
    await connection.execute("update windlass.workers set status = 'terminated' where id = 'h1'")
    await connection.execute(insert, "h2")
