"""Observing a fleet: what a snapshot holds."""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from support.control_actions import (
    ANN,
    FLEET,
    ControlStores,
    Leader,
    SetStatus,
    VirtualClock,
    intent,
    machine,
)
from windlass.model.action import (
    Fail,
    FailSlot,
    Promote,
    Requeue,
    Spawn,
)
from windlass.model.fleet import FleetConfig
from windlass.model.outcome import (
    Created,
    Deleted,
)
from windlass.model.snapshot import (
    Cadence,
    Hold,
    MachineListState,
    OrphanState,
    PlannerState,
    QueueDurations,
    ScalingState,
    Snapshot,
)
from windlass.model.task import Finished, NewTask
from windlass.model.worker import Registration, WorkerStatus


def repr_of(value: Any) -> str:
    return repr(value)[:12]


async def test_first_observation_is_empty_and_creates_fleet(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    assert ann.snapshot == Snapshot(now=clock(), fleet="f")
    (fleet,) = await store.fleets()
    assert (fleet.name, fleet.provider, fleet.queues, fleet.min_workers, fleet.max_workers) == (
        "f", "local", ("a", "b"), 0, 4,
    )  # fmt: skip
    assert (fleet.is_paused, fleet.requested_workers, fleet.hold, fleet.failed_slots) == (False, 0, None, ())
    await ann.observe(FleetConfig(queues=("c",), min_workers=1, max_workers=2))
    (fleet,) = await store.fleets()
    assert (fleet.queues, fleet.min_workers, fleet.max_workers) == (("c",), 1, 2)


async def test_snapshot_has_all_fields_of_a_worker(store: ControlStores, clock: VirtualClock, ann: Leader) -> None:
    created_at = clock()
    await ann.spawn_worker(0)
    await ann.report(Created("w0", machine(1)))
    machine_at = clock()
    clock.advance(5)
    await store.register(Registration("w0", ("a", "b"), fleet="f", concurrency=2))
    clock.advance(5)
    await store.heartbeat("w0", (), {"vram_total_mb": 100, "vram_used_mb": 7, "idle_s": 2.5})
    heartbeat_at = clock()
    await ann.observe()
    await ann.commit(Promote("w0", "first heartbeat"))
    activated_at = clock()
    first = await store.enqueue(NewTask("a", timeout_s=9.0))
    second = await store.enqueue(NewTask("b"))
    await store.enqueue(NewTask("a"))
    clock.advance(1)
    assert len(await store.claim("w0", ("a", "b"), 1)) == 1
    claimed_at = clock()
    clock.advance(1)
    await store.claim("w0", ("b",), 1)
    await ann.observe()
    (view,) = ann.snapshot.workers
    assert (view.id, view.slot, view.status, view.is_paused, view.concurrency) == ("w0", 0, "active", False, 2)
    assert (view.created_at, view.activated_at, view.last_heartbeat) == (created_at, activated_at, heartbeat_at)
    assert (view.first_claimed_at, view.terminating_at, view.idle_s) == (claimed_at, None, 2.5)
    assert (view.machine_id, view.machine_at, view.creation) == ("m1", machine_at, "created")
    assert view.prepared_at == machine_at, "its machine starts the worker's program by itself"
    assert (view.vram_total_mb, view.vram_used_mb, view.vram_at) == (100, 7, heartbeat_at)
    assert [(task.task_id, task.started_at, task.timeout_s) for task in view.running] == [
        (first, claimed_at, 9.0),
        (second, clock(), None),
    ]
    assert (view.code, view.reason) == (None, None)
    assert ann.snapshot.boots.p50_s == 10.0


async def test_gpu_loss_time_is_the_first_heartbeat_without_vram(store: ControlStores, ann: Leader, clock: Any) -> None:
    await ann.spawn_worker(0)
    await store.register(Registration("w0", ("a",), fleet="f"))

    async def lost_after(**vitals: int | None) -> datetime | None:
        clock.advance(5)
        await store.heartbeat("w0", (), vitals)
        (view,) = (await ann.observe()).workers
        return view.vram_lost_at

    assert await lost_after(pid=7) is None
    assert await lost_after(vram_total_mb=0, vram_used_mb=0) is None, "it has never had any"
    assert await lost_after(vram_total_mb=0, vram_used_mb=0) is None
    assert await lost_after(vram_total_mb=100, vram_used_mb=7) is None
    assert await lost_after(vram_total_mb=0, vram_used_mb=0) == (gone_at := clock())
    assert await lost_after(vram_total_mb=0, vram_used_mb=0) == gone_at
    assert await lost_after(pid=7) == gone_at, "no word changes nothing"
    assert await lost_after(vram_total_mb=None) == gone_at
    assert await lost_after(vram_total_mb=100, vram_used_mb=7) is None
    assert await lost_after(vram_total_mb=0, vram_used_mb=0) == clock()


async def test_snapshot_omits_other_fleets_and_terminated_workers(store: ControlStores, ann: Leader) -> None:
    other = Leader(store, ANN, "g")
    await other.observe()
    await other.commit(Spawn(0, "x"), intents=(intent("g0", 0),))
    await ann.spawn_worker(0, 1)
    await ann.report(Deleted("w0", None, "X", "gone"))
    assert [worker.id for worker in (await ann.observe()).workers] == ["w1"]


async def test_snapshot_has_unmanaged_workers_of_its_fleet(store: ControlStores, ann: Leader) -> None:
    await store.register(Registration("hand", ("a",), fleet="f"))
    (view,) = (await ann.observe()).workers
    assert (view.id, view.slot, view.status, view.machine_id) == ("hand", None, "active", None)


async def test_snapshot_counts_queued_and_running_tasks(store: ControlStores, clock: VirtualClock, ann: Leader) -> None:
    await store.register(Registration("hand", ("a",), fleet="g"))
    for _ in range(3):
        await store.enqueue(NewTask("a"))
    clock.advance(2)
    await store.enqueue(NewTask("b", priority=5))
    await store.enqueue(NewTask("b", run_after=clock() + timedelta(seconds=10)))
    await store.enqueue(NewTask("elsewhere"))
    (claim,) = await store.claim("hand", ("a",), 1)
    clock.advance(4)
    queue = (await ann.observe()).queue
    assert (queue.queued, queue.running, queue.oldest_queued_age_s, queue.duration_p50_s) == (3, 1, 6.0, None)
    await store.finish_and_claim("hand", [Finished(claim.task_id, claim.token, None)], (), 0)
    clock.advance(6)
    queue = (await ann.observe()).queue
    assert (queue.queued, queue.running, queue.oldest_queued_age_s, queue.duration_p50_s) == (4, 0, 12.0, 4.0)


async def test_queued_age_starts_when_task_becomes_claimable(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await store.register(Registration("hand", ("a",), fleet="g"))
    await store.enqueue(NewTask("a"))
    await store.enqueue(NewTask("a"))
    (claim, _) = await store.claim("hand", ("a",), 2)
    clock.advance(60)
    await store.release("hand", claim.task_id, claim.token, "no room")
    await store.enqueue(NewTask("a", run_after=clock() + timedelta(seconds=1)))
    clock.advance(2)
    assert (await ann.observe()).queue.oldest_queued_age_s == 2.0


async def test_recently_requeued_task_does_not_hide_older_tasks(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await store.register(Registration("hand", ("a",), fleet="g"))
    for _ in range(3):
        await store.enqueue(NewTask("a"))
    (claim,) = await store.claim("hand", ("a",), 1)
    clock.advance(60)
    await store.release("hand", claim.task_id, claim.token, "no room")
    assert (await ann.observe()).queue.oldest_queued_age_s == 60.0


async def test_due_retry_counts_as_queued(store: ControlStores, clock: VirtualClock, ann: Leader) -> None:
    await store.register(Registration("hand", ("a",), fleet="g"))
    await store.enqueue(NewTask("a"))
    (claim,) = await store.claim("hand", ("a",), 1)
    await store.fail("hand", claim.task_id, claim.token, "oh", jitter=0.0)
    assert (await ann.observe()).queue.queued == 0
    clock.advance(5)
    assert (await ann.observe()).queue.queued == 1


async def test_median_of_even_count_is_mean_of_middle_values(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await store.register(Registration("hand", ("a",), fleet="g"))
    for duration_s in (1.0, 9.0, 2.0, 4.5):
        await store.enqueue(NewTask("a"))
        (claim,) = await store.claim("hand", ("a",), 1)
        clock.advance(duration_s)
        await store.finish_and_claim("hand", [Finished(claim.task_id, claim.token, None)], (), 0)
    await store.enqueue(NewTask("a", max_attempts=1))
    (claim,) = await store.claim("hand", ("a",), 1)
    clock.advance(100)
    await store.fail("hand", claim.task_id, claim.token, "failures say nothing")
    assert (await ann.observe()).queue.duration_p50_s == 3.25


async def test_snapshot_has_a_sample_of_durations_and_new_tasks(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await store.register(Registration("hand", ("a",), fleet="g"))
    first = (await ann.observe()).queue
    assert (first.durations_s, first.duration_mean_s, first.arrived) == ((), None, 0)
    for duration_s in (1.0, 9.0, 2.0):
        await store.enqueue(NewTask("a"))
        (claim,) = await store.claim("hand", ("a",), 1)
        clock.advance(duration_s)
        await store.finish_and_claim("hand", [Finished(claim.task_id, claim.token, None)], (), 0)
    snapshot = await ann.observe()
    assert (snapshot.queue.durations_s, snapshot.queue.duration_mean_s) == ((1.0, 2.0, 9.0), 4.0)
    # Tasks count as arrived once a plan has stored which ones were known.
    assert (snapshot.queue.arrived, snapshot.queue.newest_task_id) == (0, claim.task_id)
    known = ScalingState(newest_task_id=snapshot.queue.newest_task_id)
    await ann.commit(planner_state=PlannerState(scaling=known))
    await store.enqueue(NewTask("elsewhere"))
    assert (await ann.observe()).queue.arrived == 0
    await store.enqueue(NewTask("a"))
    assert (await ann.observe()).queue.arrived == 1


async def test_snapshot_has_durations_of_each_queue_with_tasks(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await store.register(Registration("hand", ("a", "b"), fleet="f"))
    for queue, duration_s in (("a", 1.0), ("b", 90.0), ("a", 3.0)):
        await store.enqueue(NewTask(queue))
        (claim,) = await store.claim("hand", (queue,), 1)
        clock.advance(duration_s)
        await store.finish_and_claim("hand", [Finished(claim.task_id, claim.token, None)], (), 0)
    assert (await ann.observe()).queue.each == ()
    await store.enqueue(NewTask("a"))
    await store.enqueue(NewTask("a"))
    await store.enqueue(NewTask("b"))
    await store.claim("hand", ("b",), 1)
    snapshot = await ann.observe()
    assert snapshot.queue.each == (
        QueueDurations("a", 2, (1.0, 3.0), 2.0), QueueDurations("b", 0, (90.0,), 90.0),
    )  # fmt: skip
    assert [task.queue for worker in snapshot.workers for task in worker.running] == ["b"]
    # A fleet of one queue has neither.
    snapshot = await ann.observe(FleetConfig(queues=("b",)))
    assert snapshot.queue.each == ()
    assert [task.queue for worker in snapshot.workers for task in worker.running] == [None]


async def test_busy_queue_does_not_hide_durations_of_another(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await store.register(Registration("hand", ("a", "elsewhere"), fleet="g", concurrency=1000))
    await store.enqueue(NewTask("a"))
    (claim,) = await store.claim("hand", ("a",), 1)
    clock.advance(7)
    await store.finish_and_claim("hand", [Finished(claim.task_id, claim.token, None)], (), 0)
    await store.enqueue_many([NewTask("elsewhere")] * 600)
    busy = await store.claim("hand", ("elsewhere",), 600)
    clock.advance(1)
    await store.finish_and_claim("hand", [Finished(claim.task_id, claim.token, None) for claim in busy], (), 0)
    assert (len(busy), (await ann.observe()).queue.duration_p50_s) == (600, 7.0)


async def test_snapshot_has_launches_and_failures_in_window(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await ann.spawn_worker(0, 1)
    first = clock()
    await ann.report(Deleted("w1", None, "X", "gone"))
    clock.advance(200)
    await ann.observe()
    await ann.spawn_worker(1, 2)
    second = clock()
    assert [(launch.at, launch.has_failed) for launch in (await ann.observe()).launches] == [
        (first, False), (first, False), (second, False),
    ]  # fmt: skip
    clock.advance(200)
    await ann.observe()
    # Spawned before the window, failed in it.
    await ann.commit(Fail("w0", "SPAWNING_TIMEOUT", "too slow"), Fail("w2", "SPAWNING_TIMEOUT", "too slow"))
    assert [(launch.at, launch.has_failed) for launch in (await ann.observe()).launches] == [
        (first, True), (second, True),
    ]  # fmt: skip
    clock.advance(299)
    assert len((await ann.observe()).launches) == 2
    clock.advance(1)
    assert (await ann.observe()).launches == ()


async def test_machine_on_an_avoided_host_is_no_launch(store: ControlStores, ann: Leader) -> None:
    await ann.spawn_worker(0, 1)
    await ann.commit(Fail("w0", "HOST_AVOIDED", "bad host"), Fail("w1", "SPAWNING_TIMEOUT", "too slow"))
    assert [(launch.slot, launch.has_failed) for launch in (await ann.observe()).launches] == [(1, True)]


async def test_snapshot_has_slot_restarts_within_window(store: ControlStores, clock: VirtualClock, ann: Leader) -> None:
    await ann.spawn_worker(0, 1)
    await ann.commit(Fail("w0", "CRASHED", "x"))
    broke_at = clock()
    (slot,) = (await ann.observe()).slots
    assert (slot.slot, slot.is_failed, slot.restarts) == (0, False, (broke_at,))
    clock.advance(FLEET.restart_window_s)
    assert (await ann.observe()).slots == ()
    await ann.commit(FailSlot(0, "too often"))
    (slot,) = (await ann.observe()).slots
    assert (slot.slot, slot.is_failed, slot.restarts) == (0, True, ())
    assert (await store.fleets())[0].failed_slots == (0,)


@pytest.mark.parametrize(
    "value", ["n/a", "Infinity", "5", 10**400, -(10**400), -1, 1e9 + 1, True, {"s": 5}, [5], None], ids=repr_of
)
async def test_unusable_report_of_a_worker_counts_as_unknown(store: ControlStores, ann: Leader, value: Any) -> None:
    for worker_id in ("w1", "w2"):
        await store.register(Registration(worker_id, ("a",), fleet="f"))
    await store.heartbeat("w2", (), {"idle_s": 5, "storage_used_bytes": 7})
    await store.heartbeat("w1", (), {"idle_s": value, "storage_used_bytes": value if value != -1 else "-1"})
    snapshot = await ann.observe()
    assert {view.id: view.idle_s for view in snapshot.workers} == {"w1": None, "w2": 5.0}
    assert snapshot.storage is not None
    assert snapshot.storage.worker_id == "w2"


async def test_tasks_of_ended_workers_are_orphaned(
    store: ControlStores, clock: VirtualClock, ann: Leader, set_status: SetStatus
) -> None:
    for worker_id in ("broken", "gone", "well"):
        await store.register(Registration(worker_id, ("a",), fleet="f"))
    await store.register(Registration("stranger", ("a",), fleet="g"))
    for worker_id in ("broken", "gone", "well", "stranger"):
        await store.enqueue(NewTask("a"))
        await store.claim(worker_id, ("a",), 1)
    # Like a claim that was in progress when its worker ended.
    await set_status("gone", WorkerStatus.TERMINATED)
    await set_status("broken", WorkerStatus.ERROR)
    await set_status("stranger", WorkerStatus.ERROR)
    assert (await ann.observe()).orphaned == ("broken", "gone")
    await ann.commit(Requeue("gone", "worker gone is no longer live"))
    assert (await ann.observe()).orphaned == ("broken",)


async def test_planner_state_round_trips(store: ControlStores, clock: VirtualClock, ann: Leader) -> None:
    planner_state = PlannerState(
        cadence=Cadence(cycle=7, gaps_s=(1.25, 60.0)),
        scaling=ScalingState(spawned_at=clock(), over_capacity_since=clock()),
        machines=MachineListState(missing_since={"w0": clock()}),
        orphans=OrphanState(orphan_since={"m0": clock() - timedelta(microseconds=1)}),
        hold=Hold("X", "because: ü", clock(), is_total=True),
    )
    await ann.commit(planner_state=planner_state)
    assert (await ann.observe()).planner_state == planner_state
    assert (await store.fleets())[0].hold == planner_state.hold
    await ann.commit(planner_state=replace(planner_state, hold=None))
    assert (await ann.observe()).planner_state.hold is None
    assert (await store.fleets())[0].hold is None
