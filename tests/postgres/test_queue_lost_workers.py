"""Heartbeats, departures and recovery of lost workers while other transactions hold locks."""

import asyncio
import time
from typing import Any

from support.queue_sql import LIMIT_S, RoleDsn, eventually, is_blocked, register, stopped_before_locking
from support.stores import PostgresStores
from windlass.model.task import Finished, NewTask, TaskStatus
from windlass.model.worker import HeartbeatReport, HeldClaim, WorkerStatus


async def test_heartbeat_does_not_wait_for_locked_tasks(connection: Any, store: PostgresStores) -> None:
    """Otherwise a long transaction on a task would let its worker's lease expire."""
    await register(store, "w1")
    await store.enqueue_many([NewTask("q"), NewTask("q")])
    reported, unreported = await store.claim("w1", ("q",), 2)
    await connection.execute("update windlass.tasks set started_at = now() - interval '1 hour'")
    async with connection.transaction():
        await connection.execute("select from windlass.tasks for update")
        held = [HeldClaim(reported.task_id, reported.token, 0.5, "half")]
        reply = await asyncio.wait_for(store.heartbeat("w1", held), LIMIT_S)
        assert reply.lost == frozenset()
    await store.heartbeat("w1", held)
    by_id = {task.id: task for task in await store.tasks()}
    assert by_id[reported.task_id].progress == 0.5
    assert by_id[unreported.task_id].status is TaskStatus.QUEUED


async def test_heartbeat_with_thousands_of_claims_is_fast(connection: Any, store: PostgresStores) -> None:
    """A nested loop over the claims would need 64 million comparisons, about two minutes."""
    count = 8_000
    await register(store, "w1")
    await store.enqueue_many([NewTask("q")] * count)
    claims = await store.claim("w1", ("q",), count)
    await connection.execute("update windlass.tasks set started_at = now() - interval '1 hour'")
    held = [HeldClaim(claim.task_id, claim.token, 0.5, "half") for claim in claims[:-1]]
    began = time.monotonic()
    reply = await store.heartbeat("w1", held)
    assert time.monotonic() - began < 30
    assert reply.lost == frozenset()
    statuses = await connection.fetch("select status, progress, count(*) from windlass.tasks group by 1, 2 order by 1")
    assert [tuple(row) for row in statuses] == [("queued", None, 1), ("running", 0.5, count - 1)]


async def test_heartbeat_keeps_claim_made_during_its_snapshot(
    role_dsn: RoleDsn, connection: Any, second_connection: Any, store: PostgresStores
) -> None:
    await register(store, "w1")
    await store.enqueue(NewTask("q"))
    (old,) = await store.claim("w1", ("q",))
    await connection.execute("update windlass.tasks set started_at = now() - interval '1 hour'")
    async with stopped_before_locking(
        role_dsn, connection, second_connection, "select status from windlass.heartbeat('w1')"
    ):
        await store.release("w1", old.task_id, old.token, "not now")
        (new,) = await store.claim("w1", ("q",))
    result = await store.finish_and_claim("w1", [Finished(new.task_id, new.token, None)], (), 0)
    assert result.lost == []


async def test_group_of_heartbeats_does_not_wait_for_locked_worker(connection: Any, store: PostgresStores) -> None:
    await register(store, "w1", "w2")
    async with connection.transaction():
        await connection.execute("select from windlass.workers where id = 'w1' for update")
        beats = [HeartbeatReport("w1", (), {"load": 1}), HeartbeatReport("w2")]
        locked, recorded = await asyncio.wait_for(store.heartbeat_many(beats), LIMIT_S)
        assert (locked, recorded and recorded.status) == (None, WorkerStatus.ACTIVE)
        alone = asyncio.create_task(store.heartbeat_many([HeartbeatReport("w1", (), {"load": 2})], waits=True))
        await eventually(lambda: is_blocked(connection), "the heartbeat waits for its row")
    (reply,) = await asyncio.wait_for(alone, LIMIT_S)
    assert reply is not None
    assert reply.status is WorkerStatus.ACTIVE
    workers = [await store.worker(name) for name in ("w1", "w2")]
    assert [worker and (worker.last_heartbeat is not None, worker.metadata) for worker in workers] == [
        (True, {"load": 2}),
        (True, {}),
    ]


async def test_claim_committed_after_deregistration_is_recovered(connection: Any, store: PostgresStores) -> None:
    await register(store, "departing", "survivor")
    await store.enqueue_many([NewTask("q"), NewTask("q", max_attempts=1)])
    await store.claim("departing", ("q",))
    async with connection.transaction():
        late = await connection.fetchrow("select * from windlass.claim_tasks('departing', '{q}')")
        await store.deregister("departing", "done")
    task = await store.task(late["task_id"])
    assert task is not None
    assert (task.status, task.worker_id) == (TaskStatus.RUNNING, "departing")
    (recovery,) = await store.recover_lost_workers("survivor")
    assert (recovery.worker_id, recovery.tasks_requeued, recovery.tasks_failed) == ("departing", 0, 1)
    assert await store.recover_lost_workers("survivor") == []
    assert {task.status for task in await store.tasks()} == {TaskStatus.QUEUED, TaskStatus.FAILED}


async def test_deregistration_does_not_wait_for_locked_tasks(connection: Any, store: PostgresStores) -> None:
    """deregister locks the worker's row. If it waited for a task whose holder wants that row, it would deadlock."""
    await register(store, "departing", "survivor")
    await store.enqueue_many([NewTask("q")] * 2)
    locked, free = await store.claim("departing", ("q",), 2)
    async with connection.transaction():
        await connection.execute("select from windlass.tasks where id = $1 for update", locked.task_id)
        await asyncio.wait_for(store.deregister("departing", "done"), LIMIT_S)
        await connection.execute("update windlass.workers set late_results = 1 where id = 'departing'")
    assert {task.id: task.status for task in await store.tasks()} == {
        locked.task_id: TaskStatus.RUNNING,
        free.task_id: TaskStatus.QUEUED,
    }
    (recovery,) = await store.recover_lost_workers("survivor")
    assert (recovery.worker_id, recovery.tasks_requeued) == ("departing", 1)


async def test_locked_task_does_not_delay_recovery_of_others(connection: Any, store: PostgresStores) -> None:
    await register(store, "lost", "gone", "survivor")
    await store.enqueue_many([NewTask("q")] * 4)
    locked, *_ = await store.claim("lost", ("q",), 3)
    await store.claim("gone", ("q",))
    await connection.execute(
        "update windlass.workers set last_heartbeat = now() - interval '1 hour' where id in ('lost', 'gone')"
    )
    await connection.execute(
        "update windlass.workers set last_heartbeat = now(), heartbeat_gapless_since = now() - interval '1 hour'"
        " where id = 'survivor'"
    )
    async with connection.transaction():
        await connection.execute("select from windlass.tasks where id = $1 for update", locked.task_id)
        recovered = await asyncio.wait_for(store.recover_lost_workers("survivor"), LIMIT_S)
        assert [(r.worker_id, r.tasks_requeued) for r in recovered] == [("gone", 1), ("lost", 2)]
        assert await store.recover_lost_workers("survivor") == []
    recovered = await store.recover_lost_workers("survivor")
    assert [(r.worker_id, r.tasks_requeued) for r in recovered] == [("lost", 1)]
    assert {task.status for task in await store.tasks()} == {TaskStatus.QUEUED}


async def test_attempt_refund_skips_task_claimed_meanwhile(
    role_dsn: RoleDsn, connection: Any, second_connection: Any, store: PostgresStores
) -> None:
    await register(store, "faulty", "w1")
    await store.enqueue(NewTask("q", max_attempts=2))
    (old,) = await store.claim("faulty", ("q",))
    await store.fail("faulty", old.task_id, old.token, "failed", retry=False)
    refund = "select windlass_internal.refund_attempts('faulty', '-infinity', false)"
    async with stopped_before_locking(role_dsn, connection, second_connection, refund):
        await store.retry_task(old.task_id)
        (new,) = await store.claim("w1", ("q",))
    result = await store.finish_and_claim("w1", [Finished(new.task_id, new.token, None)], (), 0)
    assert result.lost == []
