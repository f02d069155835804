"""Retries and dead letters on a real PostgreSQL: back-off, locked rows, bounded scans."""

from datetime import timedelta
from typing import Any

import pytest

from support.error_texts import HEADLINES
from support.queue_sql import connected, register, task_reads
from support.stores import PostgresStores
from windlass import queue_operations
from windlass.model.task import NewTask
from windlass.policy.backoff import retry_delay_s


async def test_sql_back_off_equals_policy_back_off(connection: Any) -> None:
    cases = [(attempts, jitter) for attempts in (-1, 0, *range(1, 13), 31, 10_000) for jitter in (0.0, 0.1, 1 / 3, 1.0)]
    rows = await connection.fetch(
        "select windlass_internal.retry_delay_s(c.attempts, c.jitter)"
        " from unnest($1::integer[], $2::double precision[]) as c (attempts, jitter)",
        [attempts for attempts, _ in cases],
        [jitter for _, jitter in cases],
    )
    assert [row[0] for row in rows] == [retry_delay_s(*case) for case in cases]


async def test_retry_failed_skips_other_queues_only_once(connection: Any, each_dsn: str) -> None:
    await connection.execute(
        "insert into windlass.tasks (queue, status, finished_at)"
        " select case when n > 5000 then 'q' else 'r' end, 'failed', now() - interval '1 day' + n * interval '1 s'"
        " from generate_series(1, 5020) as n"
    )
    await connection.execute("vacuum analyze windlass.tasks")
    call = "select max(failed_at) from windlass.retry_failed('q', 10, p_failed_from => $1)"
    first_to = await connection.fetchval(call, None)
    async with connected(each_dsn) as next_round, next_round.transaction():
        second_to = await next_round.fetchval(call, first_to)
        read = await task_reads(next_round)
    assert second_to - first_to == timedelta(seconds=10)
    assert read["seq_scan"] == 0
    assert read["idx_tup_fetch"] < 100


async def test_locked_failed_tasks_are_retried_after_unlock(
    store: PostgresStores, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_operations, "RETRY_BATCH", 1)
    await register(store, "w1")
    ids = [await store.enqueue(NewTask("q", max_attempts=1)) for _ in range(3)]
    for claim in await store.claim("w1", ("q",), 3):
        await store.fail("w1", claim.task_id, claim.token, "failed")
    retry_failed = store.retry_failed
    batches: list[list[int]] = []
    lock = connection.transaction()
    await lock.start()
    await connection.execute("select from windlass.tasks where id = $1 for update", ids[0])

    async def unlock_after_empty_batch(*arguments: Any, **options: Any) -> Any:
        batch = await retry_failed(*arguments, **options)
        if batch.ids == [] and [] not in batches:
            await lock.rollback()
        batches.append(batch.ids)
        return batch

    monkeypatch.setattr(store, "retry_failed", unlock_after_empty_batch)
    assert list((await queue_operations.retry_failed_tasks(store, "q")).task_ids) == ids
    assert batches[:4] == [[ids[1]], [ids[2]], [], [ids[0]]]


async def test_sql_headline_equals_python_headline(connection: Any) -> None:
    rows = await connection.fetch(
        "select e, windlass_internal.error_headline(e) as headline from unnest($1::text[]) as e",
        [error for error, _ in HEADLINES.values()],
    )
    assert [(row["e"], row["headline"]) for row in rows] == list(HEADLINES.values())
    assert await connection.fetchval("select windlass_internal.error_headline(null)") == ""
