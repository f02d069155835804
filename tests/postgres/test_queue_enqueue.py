"""Enqueueing on a real PostgreSQL: unique keys under concurrency, transactions, limits that hold in SQL."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from support.queue_sql import LIMIT_S, connections, eventually, is_blocked, register
from support.stores import PostgresStores
from windlass.model.task import NewTask
from windlass.store.tasks import enqueue_on


async def test_concurrent_enqueues_with_one_key_create_one_task(each_dsn: str) -> None:
    async with connections(each_dsn, 8) as pool:
        ids = await asyncio.gather(
            *(connection.fetchval("select windlass.enqueue('q', p_unique_key => 'k')") for connection in pool)
        )
        assert len(set(ids)) == 1
        assert await pool[0].fetchval("select count(*) from windlass.tasks") == 1


@pytest.mark.parametrize("is_committed", [True, False])
async def test_enqueue_waits_for_open_transaction_with_same_key(
    connection: Any, second_connection: Any, store: PostgresStores, is_committed: bool
) -> None:
    transaction = connection.transaction()
    await transaction.start()
    first = await enqueue_on(connection, NewTask("q", unique_key="k"))
    second = asyncio.create_task(store.enqueue(NewTask("q", unique_key="k")))
    await eventually(lambda: is_blocked(second_connection), "the second enqueue blocks")
    await (transaction.commit() if is_committed else transaction.rollback())
    assert (await asyncio.wait_for(second, LIMIT_S) == first) is is_committed
    assert len(await store.tasks()) == 1


async def test_producers_with_keys_in_different_order_do_not_deadlock(
    connection: Any, second_connection: Any, store: PostgresStores
) -> None:
    # The session with the shorter deadlock_timeout is cancelled: here the store's.
    await connection.execute("set deadlock_timeout = '1h'")
    async with connection.transaction():
        await enqueue_on(connection, NewTask("q", unique_key="b"))
        enqueueing = asyncio.create_task(store.enqueue_many([NewTask("q", unique_key=key) for key in "cab"]))
        await eventually(lambda: is_blocked(second_connection), "enqueue_many blocks at the taken key")
        await asyncio.wait_for(enqueue_on(connection, NewTask("q", unique_key="a")), LIMIT_S)
    assert await asyncio.wait_for(enqueueing, LIMIT_S) == 1
    assert [task.unique_key for task in await store.tasks()] == ["c", "a", "b"]


async def test_task_enqueued_in_transaction_appears_on_commit(connection: Any, store: PostgresStores) -> None:
    await register(store, "w1")
    async with connection.transaction():
        task_id = await enqueue_on(connection, NewTask("q"))
        assert await store.task(task_id) is None
        assert await store.claim("w1", ("q",)) == []
    assert [claim.task_id for claim in await store.claim("w1", ("q",))] == [task_id]


async def test_task_enqueued_in_transaction_vanishes_on_rollback(connection: Any, store: PostgresStores) -> None:
    transaction = connection.transaction()
    await transaction.start()
    task_id = await enqueue_on(connection, NewTask("q", unique_key="k"))
    await transaction.rollback()
    assert await store.task(task_id) is None
    assert await store.enqueue(NewTask("q", unique_key="k")) != task_id


@pytest.mark.parametrize(
    "what",
    [
        "p_run_after => 'infinity'",
        "p_run_after => '-infinity'",
        "p_run_after => '20000-01-01'",
        "p_run_after => '0044-03-15 BC'",
        "p_timeout_s => 'NaN'",
        "p_timeout_s => 'infinity'",
    ],
)
async def test_sql_enqueue_rejects_times_outside_range(connection: Any, what: str) -> None:
    with pytest.raises(asyncpg.CheckViolationError):
        await connection.execute(f"select windlass.enqueue('q', {what})")


async def test_extreme_accepted_run_after_can_be_read(connection: Any, store: PostgresStores) -> None:
    last = await connection.fetchval("select windlass.enqueue('q', p_run_after => '9998-12-31 23:59:59+00')")
    first = await connection.fetchval("select windlass.enqueue('r', p_run_after => '0002-01-01 00:00+00')")
    assert {task.id for task in (await store.task_summaries()).rows} == {first, last}
    due = await store.next_run_after(["q"])
    assert due is not None
    assert due.year == 9998


async def test_sql_enqueue_rejects_payload_over_limit(connection: Any) -> None:
    with pytest.raises(asyncpg.ProgramLimitExceededError, match="has 12 bytes and at most 10 are accepted"):
        await connection.fetchval(
            "select windlass.enqueue('q', to_jsonb('0123456789'::text), p_max_payload_bytes => 10)"
        )


async def test_now_is_statement_time_unless_overridden(connection: Any) -> None:
    async with connection.transaction():
        first = await connection.fetchval("select windlass.now()")
        assert await connection.fetchval("select windlass.now()") > first
        assert abs(first - datetime.now(UTC)) < timedelta(seconds=LIMIT_S)
    await connection.execute("set windlass.now = '2030-01-01T12:00:00Z'")
    task_id = await connection.fetchval("select windlass.enqueue('q')")
    created_at = await connection.fetchval("select created_at from windlass.tasks where id = $1", task_id)
    assert created_at == datetime(2030, 1, 1, 12, tzinfo=UTC)
    await connection.execute("reset windlass.now")
    assert abs(await connection.fetchval("select windlass.now()") - datetime.now(UTC)) < timedelta(seconds=LIMIT_S)
