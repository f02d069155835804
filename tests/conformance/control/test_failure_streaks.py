"""Evidence against a worker, refunds of attempts, and reported storage."""

from collections.abc import Awaitable, Callable
from datetime import timedelta

import pytest

from support.control_actions import (
    FLEET,
    ControlStores,
    Leader,
    VirtualClock,
    do,
)
from windlass.model.action import (
    AttemptRefund,
    Fail,
    GrowVolume,
)
from windlass.model.outcome import (
    VolumeGrown,
    VolumeNotGrown,
)
from windlass.model.snapshot import (
    FailureStreak,
    StorageUse,
)
from windlass.model.task import Finished, NewTask, TaskStatus
from windlass.model.worker import Registration


async def fail_one(store: ControlStores, worker_id: str, queue: str = "a", error: str = "boom") -> int:
    (claim,) = await store.claim(worker_id, (queue,))
    await store.fail(worker_id, claim.task_id, claim.token, error, jitter=0.0)
    return claim.task_id


async def join(store: ControlStores, *worker_ids: str) -> None:
    for worker_id in worker_ids:
        await store.register(Registration(worker_id, ("a", "b"), fleet="f"))


async def test_failing_worker_has_streak_with_results_of_others(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await ann.spawn_worker(0, 1, 2)
    await join(store, "w0", "w1", "w2")
    await do(store, clock, "w0", 1.0)
    await do(store, clock, "w2", 1.0)
    clock.advance(1)
    for queue in "aaa":
        await store.enqueue(NewTask(queue))
    since, failed = clock(), []
    for _ in range(3):
        failed.append(await fail_one(store, "w0"))
        clock.advance(1)
    assert (await ann.observe()).failure_streaks == (FailureStreak("w0", since, tuple(failed)),)
    clock.advance(5)
    # The first task is retried and fails on w1 too. w1 completes another one. c is not a queue of this fleet.
    assert await fail_one(store, "w1") == failed[0]
    (claim,) = await store.claim("w1", ("a",))
    assert claim.task_id == failed[1]
    await store.finish_and_claim("w1", [Finished(claim.task_id, claim.token, None)], (), 0)
    await do(store, clock, "w1", 1.0, "b")
    await do(store, clock, "w2", 1.0, "c")
    (suspect,) = (await ann.observe()).failure_streaks
    assert suspect == FailureStreak(
        "w0", since, tuple(failed), {failed[1]: "w1"}, (failed[0],), others=1, others_completed=2, others_failed=1
    )
    assert (await ann.observe(FLEET.model_copy(update={"quarantine_min_failures": 4}))).failure_streaks == ()


async def test_busier_queue_does_not_hide_results_of_other_workers(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await ann.spawn_worker(0, 1)
    await join(store, "w0", "w1")
    await store.register(Registration("busy", ("c",)))
    for queue in "aaab":
        await store.enqueue(NewTask(queue))
    for _ in range(3):
        await fail_one(store, "w0")
    clock.advance(0.1)
    await complete_alone(store, "w1")
    clock.advance(1)
    await store.enqueue_many([NewTask("c") for _ in range(600)])
    claims = await store.claim("busy", ("c",), 600)
    await store.finish_and_claim("busy", [Finished(claim.task_id, claim.token, None) for claim in claims], (), 0)
    (suspect,) = (await ann.observe()).failure_streaks
    assert (suspect.others, suspect.others_completed) == (1, 1)


async def complete_alone(store: ControlStores, worker_id: str) -> None:
    (claim,) = await store.claim(worker_id, ("b",))
    await store.finish_and_claim(worker_id, [Finished(claim.task_id, claim.token, None)], (), 0)


async def complete_and_claim(store: ControlStores, worker_id: str) -> None:
    (claim,) = await store.claim(worker_id, ("b",))
    await store.finish_and_claim(worker_id, [Finished(claim.task_id, claim.token, None)], ("b",), 1)


@pytest.mark.parametrize("complete", [complete_alone, complete_and_claim])
async def test_completed_task_ends_failure_streak(
    store: ControlStores, ann: Leader, complete: Callable[[ControlStores, str], Awaitable[None]]
) -> None:
    await ann.spawn_worker(0)
    await join(store, "w0")
    for queue in "aaaab":
        await store.enqueue(NewTask(queue))
    for _ in range(3):
        await fail_one(store, "w0")
    assert len((await ann.observe()).failure_streaks) == 1
    await complete(store, "w0")
    await fail_one(store, "w0")
    assert (await ann.observe()).failure_streaks == ()


async def test_failure_streak_counts_tasks_once_and_is_bounded(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await ann.spawn_worker(0)
    await join(store, "w0")
    again = await store.enqueue(NewTask("b", max_attempts=5))
    for _ in range(3):
        assert await fail_one(store, "w0", "b") == again
        clock.advance(60)
    assert (await ann.observe()).failure_streaks == ()
    ids = [await store.enqueue(NewTask("a")) for _ in range(101)]
    for _ in ids:
        await fail_one(store, "w0")
    (suspect,) = (await ann.observe()).failure_streaks
    assert suspect.failed == tuple(ids[-100:])


async def test_quarantine_refunds_attempts_of_failed_tasks(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await ann.spawn_worker(0, 1)
    await join(store, "w0", "w1")
    before = await store.enqueue(NewTask("b", max_attempts=2))
    await fail_one(store, "w0", "b")
    clock.advance(60)
    await store.enqueue(NewTask("b", priority=1))
    await do(store, clock, "w0", 1.0, "b")
    dead = await store.enqueue(NewTask("a", max_attempts=1))
    waiting = await store.enqueue(NewTask("a"))
    others = await store.enqueue(NewTask("a", max_attempts=2))
    cancelled = await store.enqueue(NewTask("a"))
    for _ in range(4):
        await fail_one(store, "w0")
    await store.cancel_task(cancelled, "not needed")
    clock.advance(0.5)
    assert await fail_one(store, "w0", "b") == before  # its last attempt, and its first was before the row began
    clock.advance(10)
    at_hand = await store.enqueue(NewTask("a", priority=9, max_attempts=1))
    assert [claim.task_id for claim in await store.claim("w0", ("a",))] == [at_hand]
    (claim,) = [claim for claim in await store.claim("w1", ("a",), 2) if claim.task_id == others]
    await store.fail("w1", others, claim.token, "no", jitter=0.0)
    (suspect,) = (await ann.observe()).failure_streaks
    committed = await ann.commit(Fail("w0", "QUARANTINED", "all fails here", suspect, AttemptRefund(suspect.since)))
    assert committed.requeued == 1
    reported = {task_id: await store.task(task_id) for task_id in (before, dead, waiting, others, cancelled, at_hand)}
    assert {
        task_id: (task.status, task.attempts, task.worker_id) for task_id, task in reported.items() if task is not None
    } == {
        before: (TaskStatus.QUEUED, 1, None),
        dead: (TaskStatus.QUEUED, 0, None),
        waiting: (TaskStatus.RUNNING, 1, "w1"),
        others: (TaskStatus.QUEUED, 1, None),
        cancelled: (TaskStatus.FAILED, 1, "w0"),
        at_hand: (TaskStatus.QUEUED, 0, None),
    }
    (error,) = [event for event in await store.events(worker_id="w0") if event.code == "WORKER_ERROR"]
    assert error.detail is not None
    assert error.detail["code"] == "QUARANTINED"
    assert error.detail["evidence"]["failed"] == list(suspect.failed)
    refunds = [event for event in await store.events(worker_id="w0") if event.code == "ATTEMPTS_REFUNDED"]
    assert [event.task_id for event in refunds] == [before, dead, waiting, others]
    assert refunds[0].reason == "1 failed attempts on worker w0 refunded"
    assert {depth.queue: depth.oldest_queued_age_s for depth in await store.queue_depths()}["a"] == 0


async def test_trial_refund_happens_once_per_task(store: ControlStores, ann: Leader) -> None:
    task_id = await store.enqueue(NewTask("a", max_attempts=1))
    attempts = []
    for slot, is_retried in ((0, False), (1, False), (2, True)):
        await ann.spawn_worker(slot)
        await join(store, f"w{slot}")
        if is_retried:
            assert await store.retry_task(task_id)
        assert await fail_one(store, f"w{slot}") == task_id
        (view,) = [view for view in (await ann.observe()).workers if view.id == f"w{slot}"]
        assert view.failing_since is not None
        attempt_refund = AttemptRefund(view.failing_since, is_trial=True)
        await ann.commit(Fail(f"w{slot}", "QUARANTINED", "another is tried", None, attempt_refund))
        task = await store.task(task_id)
        assert task is not None
        attempts.append((task.status, task.attempts))
    ready, dead = (TaskStatus.QUEUED, 0), (TaskStatus.FAILED, 1)
    assert attempts == [ready, dead, ready]


async def test_attempts_on_stopped_machines_count_after_two_releases(store: ControlStores, ann: Leader) -> None:
    task_id = await store.enqueue(NewTask("a", max_attempts=3))
    attempts = []
    for slot in range(4):
        await ann.spawn_worker(slot)
        await join(store, f"w{slot}")
        assert [claim.task_id for claim in await store.claim(f"w{slot}", ("a",))] == [task_id]
        refund = AttemptRefund(await store.now(), max_releases=2)
        committed = await ann.commit(Fail(f"w{slot}", "MACHINE_GONE", "the pod has stopped", None, refund))
        assert committed.requeued == 1
        task = await store.task(task_id)
        assert task is not None
        attempts.append((task.status, task.attempts))
    queued = TaskStatus.QUEUED
    assert attempts == [(queued, 0), (queued, 0), (queued, 1), (queued, 2)]


async def test_worker_keeps_provider_when_fleet_changes_provider(store: ControlStores, ann: Leader) -> None:
    await ann.spawn_worker(0)
    seen = await ann.observe(FLEET.model_copy(update={"provider": "hetzner"}))
    assert [view.provider for view in seen.workers] == [FLEET.provider]
    await join(store, "by-hand")
    assert {view.id: view.provider for view in (await ann.observe()).workers}["by-hand"] is None


async def test_completed_task_clears_failing_since(store: ControlStores, ann: Leader) -> None:
    await ann.spawn_worker(0)
    await join(store, "w0")
    for queue in "ab":
        await store.enqueue(NewTask(queue))
    await fail_one(store, "w0")
    assert [view.failing_since is None for view in (await ann.observe()).workers] == [False]
    await complete_alone(store, "w0")
    assert [view.failing_since is None for view in (await ann.observe()).workers] == [True]


async def test_failed_task_lists_workers_of_its_attempts(store: ControlStores, clock: VirtualClock) -> None:
    await join(store, "w0", "w1", "w2")
    task_id = await store.enqueue(NewTask("a", max_attempts=9))
    await fail_one(store, "w0")
    await store.retry_task(task_id)  # what was before counts no more
    for worker_id in ("w0", "w1"):
        assert await fail_one(store, worker_id) == task_id
        clock.advance(60)
    await store.enqueue(NewTask("b"))
    await do(store, clock, "w0", 1.0, "b")
    (claim,) = await store.claim("w2", ("a",))
    await store.fail("w2", task_id, claim.token, "boom", code="HANDLER_ERROR", retry=False)
    last = (await store.events(task_id=task_id))[-1]
    assert (last.code, last.reason) == ("TASK_FAILED", "attempt 3 of 9: boom; failed on w0, w1, w2")
    assert last.detail is not None
    assert last.detail["failed_attempts"] == [
        {"attempt": 1, "worker_id": "w0", "error_code": "HANDLER_ERROR", "has_worked_since": True},
        {"attempt": 2, "worker_id": "w1", "error_code": "HANDLER_ERROR", "has_worked_since": False},
        {"attempt": 3, "worker_id": "w2", "error_code": "HANDLER_ERROR", "has_worked_since": False},
    ]


async def test_snapshot_has_newest_reported_storage_use(store: ControlStores, clock: VirtualClock, ann: Leader) -> None:
    await ann.spawn_worker(0, 1, 2)
    assert (await ann.observe()).storage is None
    await store.heartbeat("w1", (), {"storage_used_bytes": 10**13, "storage_free_bytes": None})
    clock.advance(1)
    await store.heartbeat("w0", (), {"storage_used_bytes": 7})
    clock.advance(1)
    for nonsense in ("7", 7.5, True, None, [7]):
        await store.heartbeat("w2", (), {"storage_used_bytes": nonsense})
        assert (await ann.observe()).storage == StorageUse("w0", 7, clock() - timedelta(seconds=1))
    # A worker without a value reports none.
    await store.heartbeat("w0", (), {"storage_used_bytes": None})
    assert (await ann.observe()).storage == StorageUse("w1", 10**13, clock() - timedelta(seconds=2))
    await ann.commit(Fail("w1", "X", "broken"))
    assert (await ann.observe()).storage is None


async def test_volume_growth_outcomes_record_events(store: ControlStores, ann: Leader) -> None:
    committed = await ann.commit(GrowVolume("v1", 150, "95 of 100 GB are used"))
    cycle = await store.cycle(committed.cycle_id)
    assert cycle is not None
    assert cycle.cycle.finished_at is None
    await ann.report(VolumeGrown("v1", 150, "95 of 100 GB are used"), VolumeNotGrown("v2", 200, "no funds"))
    reported = [(event.code, event.reason, event.detail) for event in await store.events() if event.detail]
    assert reported == [
        ("VOLUME_GROWN", "95 of 100 GB are used", {"volume_id": "v1", "size_gb": 150}),
        ("VOLUME_NOT_GROWN", "no funds", {"volume_id": "v2", "size_gb": 200}),
    ]
