"""Recovery of the tasks of lost workers, and who may declare a worker lost."""

from typing import Any

import pytest

from support.queue_actions import add, claim_one, claimed, codes, complete, fail, held, register, status_of, task_of
from support.stores import AnyStore
from windlass.model.errors import UnknownWorker
from windlass.model.task import TaskStatus
from windlass.model.worker import RecoveredTasks, WorkerStatus


async def beat(store: AnyStore, clock: Any, worker_id: str, duration_s: float, every_s: float = 5.0) -> None:
    """Send heartbeats without a gap for `duration_s`."""
    await store.heartbeat(worker_id)
    for _ in range(round(duration_s / every_s)):
        clock.advance(every_s)
        await store.heartbeat(worker_id)


async def test_tasks_of_lost_worker_are_requeued(store: AnyStore, clock: Any) -> None:
    await register(store, "lost", "judge", lease_s=30)
    task_id = await add(store)
    claim = await claim_one(store, "lost")
    await store.heartbeat("lost", [held(claim, 0.5, "half")])
    await beat(store, clock, "judge", 30)
    assert await store.recover_lost_workers("judge") == []
    clock.advance(1)
    assert await store.recover_lost_workers("judge") == [RecoveredTasks("lost", tasks_requeued=1, tasks_failed=0)]
    task = await task_of(store, task_id)
    assert (task.status, task.attempts, task.worker_id) == (TaskStatus.QUEUED, 1, None)
    assert (task.error_code, task.error) == ("WORKER_LOST", "worker lost was lost")
    assert (task.started_at, task.progress, task.progress_note) == (None, None, None)
    worker = await store.worker("lost")
    assert worker is not None
    assert (worker.status, worker.terminated_at) == (WorkerStatus.TERMINATED, clock())
    assert (worker.code, worker.reason) == ("STALE_HEARTBEAT", "no heartbeat for 31 s")
    assert (await claim_one(store, "judge")).attempt == 2
    assert await complete(store, claim, "lost") == [claim.token]
    assert await codes(store, worker_id="lost") == [
        "WORKER_REGISTERED",
        "WORKER_LOST",
        "TASK_REQUEUED",
        "LATE_RESULT",
    ]
    assert await store.recover_lost_workers("judge") == []


async def test_lost_worker_loses_only_its_running_tasks(store: AnyStore, clock: Any) -> None:
    await register(store, "lost", "judge", lease_s=30)
    for _ in range(5):
        await add(store)
    complete_, failed, retrying, cancelled, running = await store.claim("lost", ("q",), 5)
    assert await complete(store, complete_, "lost", "1") == []
    assert await fail(store, failed, "lost", retry=False) is TaskStatus.FAILED
    assert await fail(store, retrying, "lost") is TaskStatus.ERROR
    assert await store.cancel_task(cancelled.task_id, "no longer wanted")
    ended = (complete_, failed, retrying, cancelled)
    before = [await task_of(store, claim) for claim in ended]
    await beat(store, clock, "judge", 35)
    assert await store.recover_lost_workers("judge") == [RecoveredTasks("lost", tasks_requeued=1, tasks_failed=0)]
    assert [await task_of(store, claim) for claim in ended] == before
    assert await status_of(store, running) is TaskStatus.QUEUED


async def test_task_that_kills_its_workers_becomes_failed(store: AnyStore, clock: Any) -> None:
    await register(store, "judge", "fine")
    poison = await add(store, max_attempts=2)
    for victim in ("first", "second"):
        await register(store, victim)
        await claim_one(store, victim)
        for _ in range(8):
            clock.advance(5)
            await store.heartbeat("judge")
            await store.heartbeat("fine")
        (recovery,) = await store.recover_lost_workers("judge")
        assert recovery.worker_id == victim
    assert (recovery.tasks_requeued, recovery.tasks_failed) == (0, 1)
    task = await task_of(store, poison)
    assert (task.status, task.attempts, task.worker_id) == (TaskStatus.FAILED, 2, "second")
    assert (task.error_code, task.finished_at) == ("WORKER_LOST", clock())
    assert await codes(store, task_id=poison) == ["TASK_REQUEUED", "TASK_FAILED"]


async def test_worker_without_heartbeat_is_judged_by_age(store: AnyStore, clock: Any) -> None:
    await register(store, "silent", "judge")
    await beat(store, clock, "judge", 30)
    assert await store.recover_lost_workers("judge") == []
    clock.advance(0.5)
    assert await store.recover_lost_workers("judge") == [RecoveredTasks("silent", 0, 0)]
    worker = await store.worker("silent")
    assert worker is not None
    assert worker.reason == "no heartbeat for 31 s"


async def test_judge_needs_gapless_heartbeats_for_the_whole_lease(store: AnyStore, clock: Any) -> None:
    await register(store, "patient", lease_s=60)
    await store.heartbeat("patient")
    clock.advance(61)
    await register(store, "judge", lease_s=30)
    await beat(store, clock, "judge", 55)
    assert await store.recover_lost_workers("judge") == []
    await beat(store, clock, "judge", 5)
    assert [recovery.worker_id for recovery in await store.recover_lost_workers("judge")] == ["patient"]


async def test_slightly_late_heartbeat_is_no_gap(store: AnyStore, clock: Any) -> None:
    """A gap is a silence of more than 0.4 leases."""
    await register(store, "lost", "judge", lease_s=30)
    await beat(store, clock, "judge", 60, every_s=12)
    assert [recovery.worker_id for recovery in await store.recover_lost_workers("judge")] == ["lost"]
    await register(store, "other", lease_s=30)
    clock.advance(12.000001)
    await store.heartbeat("judge")
    await beat(store, clock, "judge", 20)
    assert await store.recover_lost_workers("judge") == []


@pytest.mark.parametrize("share", [0.41, 0.7, 0.9, 1.0], ids=lambda share: f"{share:.0%} of a lease")
async def test_no_worker_is_lost_after_outage_shorter_than_lease(store: AnyStore, clock: Any, share: float) -> None:
    """All workers are silent. The judge returns first, the other one within its lease."""
    await register(store, "judge", "other", lease_s=30)
    await beat(store, clock, "judge", 60)
    await store.heartbeat("other")
    clock.advance(30 * share)
    await store.heartbeat("judge")
    await beat(store, clock, "judge", 25)
    assert await store.recover_lost_workers("judge") == []
    await store.heartbeat("other")
    await beat(store, clock, "judge", 10)
    assert await store.recover_lost_workers("judge") == []


async def test_judge_with_longer_lease_allows_for_unnoticed_outages(store: AnyStore, clock: Any) -> None:
    """The judge sends a heartbeat every 20 s: an outage of 20 s is a gap only for the other worker."""
    await register(store, "judge", lease_s=60)
    await register(store, "short", lease_s=30)
    await beat(store, clock, "judge", 60, every_s=20)
    await store.heartbeat("short")
    await beat(store, clock, "judge", 40, every_s=20)
    assert await store.recover_lost_workers("judge") == []
    clock.advance(2.000001)
    assert [recovery.worker_id for recovery in await store.recover_lost_workers("judge")] == ["short"]


async def test_judge_with_shorter_lease_uses_lease_of_silent_worker(store: AnyStore, clock: Any) -> None:
    await register(store, "judge", lease_s=10)
    await register(store, "long", lease_s=60)
    await store.heartbeat("long")
    await beat(store, clock, "judge", 60, every_s=2)
    assert await store.recover_lost_workers("judge") == []
    clock.advance(1)
    assert [recovery.worker_id for recovery in await store.recover_lost_workers("judge")] == ["long"]


async def test_silent_worker_does_not_judge(store: AnyStore, clock: Any) -> None:
    await register(store, "lost", "judge", lease_s=30)
    await beat(store, clock, "judge", 60)
    clock.advance(12.000001)
    assert await store.recover_lost_workers("judge") == []


async def test_no_worker_is_lost_after_outage_of_all_workers(store: AnyStore, clock: Any) -> None:
    await register(store, "judge", "other", lease_s=30)
    for worker_id in ("judge", "other"):
        await store.heartbeat(worker_id)
    await beat(store, clock, "judge", 20)
    clock.advance(3600)
    assert await store.recover_lost_workers("judge") == []
    await store.heartbeat("judge")
    assert await store.recover_lost_workers("judge") == []
    await store.heartbeat("other")
    await beat(store, clock, "judge", 30)
    assert await store.recover_lost_workers("judge") == []
    clock.advance(1)
    assert [recovery.worker_id for recovery in await store.recover_lost_workers("judge")] == ["other"]


async def test_unknown_silent_or_ended_worker_cannot_judge(store: AnyStore, clock: Any) -> None:
    await register(store, "lost", "silent", "left")
    await beat(store, clock, "left", 60)
    await store.deregister("left", "done")
    for judge in ("unknown", "silent", "left"):
        assert await store.recover_lost_workers(judge) == []


async def test_silent_terminating_worker_is_lost(store: AnyStore, clock: Any) -> None:
    await register(store, "lost", "judge")
    await store.set_terminating(["lost"], "enough")
    await beat(store, clock, "judge", 60)
    assert [recovery.worker_id for recovery in await store.recover_lost_workers("judge")] == ["lost"]


@pytest.mark.parametrize("status", [WorkerStatus.ACTIVE, WorkerStatus.TERMINATING])
async def test_without_a_leader_lost_spawned_worker_loses_its_tasks(
    store: AnyStore, spawn_worker: Any, clock: Any, status: WorkerStatus
) -> None:
    await spawn_worker("h1", "gpus", 0)
    await register(store, "h1", "judge")
    await add(store)
    claim = await claim_one(store, "h1")
    await store.heartbeat("h1", [held(claim)])
    if status is WorkerStatus.TERMINATING:
        await store.set_terminating(["h1"], "enough")
    await beat(store, clock, "judge", 30)
    assert await store.recover_lost_workers("judge") == []
    clock.advance(1)
    assert await store.recover_lost_workers("judge") == [RecoveredTasks("h1", tasks_requeued=1, tasks_failed=0)]
    assert await status_of(store, claim) is TaskStatus.QUEUED
    worker = await store.worker("h1")
    assert worker is not None
    assert (worker.status, worker.code, worker.reason) == (
        WorkerStatus.ERROR,
        "STALE_HEARTBEAT",
        "no heartbeat for 31 s",
    )
    with pytest.raises(UnknownWorker, match="h1 has terminated"):
        await store.claim("h1", ("q",))
    assert await codes(store, worker_id="h1") == [
        "WORKER_REGISTERED",
        "WORKER_ACTIVATED",
        *(["WORKER_TERMINATING"] if status is WorkerStatus.TERMINATING else []),
        "WORKER_LOST",
        "TASK_REQUEUED",
        "WORKER_ERROR",
    ]
    assert await store.recover_lost_workers("judge") == []


async def test_spawned_worker_without_heartbeat_is_not_lost(store: AnyStore, spawn_worker: Any, clock: Any) -> None:
    await spawn_worker("h1", "gpus", 0)
    await register(store, "judge")
    await beat(store, clock, "judge", 600)
    assert await store.recover_lost_workers("judge") == []


async def test_judging_that_found_nothing_delays_no_later_one(store: AnyStore, clock: Any) -> None:
    """Many workers judge; after each call that finds nothing, calls return at once until a lease may expire."""
    await register(store, "first", "judge", lease_s=30)
    await beat(store, clock, "judge", 29.5, every_s=0.5)
    assert await store.recover_lost_workers("judge") == []
    clock.advance(0.5)
    assert await store.recover_lost_workers("judge") == []
    clock.advance(0.000001)
    assert [recovery.worker_id for recovery in await store.recover_lost_workers("judge")] == ["first"]
    assert await store.recover_lost_workers("judge") == []
    await register(store, "brief", "quick", lease_s=1)
    await beat(store, clock, "quick", 1, every_s=0.25)
    assert await store.recover_lost_workers("quick") == []
    clock.advance(0.000001)
    assert [recovery.worker_id for recovery in await store.recover_lost_workers("quick")] == ["brief"]


async def test_maintenance_recovers_workers_and_applies_retention(store: AnyStore, clock: Any) -> None:
    claim = await claimed(store, "judge")
    await complete(store, claim, "judge")
    left_behind = await claimed(store, "lost")
    await beat(store, clock, "judge", 7200, every_s=10)
    assert await store.run_maintenance("judge") == [RecoveredTasks("lost", tasks_requeued=1, tasks_failed=0)]
    assert await store.task(claim.task_id) is None
    assert await status_of(store, left_behind) is TaskStatus.QUEUED
