"""What an operator changes: slots, requests, pauses, terminations; and reads about fleets."""

from dataclasses import replace
from datetime import timedelta
from uuid import UUID

import pytest

from support.control_actions import ANN, FLEET, ControlStores, Leader, VirtualClock, intent
from support.memory_store import fleet_store as memory_fleets
from windlass.model.action import (
    Drain,
    Fail,
    FailSlot,
    RecordEvent,
)
from windlass.model.errors import BadInput
from windlass.model.outcome import (
    CreationRefused,
    Deleted,
)
from windlass.model.rollout import DeployRequest, Rollout
from windlass.model.snapshot import (
    Cadence,
    PlannerState,
    RecentFailure,
)
from windlass.model.task import Finished, NewTask, TaskStatus
from windlass.model.worker import RecoveredTasks, Registration, WorkerKind, WorkerStatus
from windlass.store import fleets


async def test_restarting_slots_clears_restart_counts_and_failures(store: ControlStores, ann: Leader) -> None:
    await ann.spawn_worker(0, 1, 2)
    await ann.commit(Fail("w0", "X", "x"), Fail("w1", "X", "x"), FailSlot(0, "x"), FailSlot(1, "x"), FailSlot(2, "x"))
    assert await store.restart_slots("f", 1) == 1
    assert [slot.slot for slot in (await ann.observe()).slots] == [0, 2]
    assert await store.restart_slots("f") == 2
    assert (await ann.observe()).slots == ()
    assert await store.restart_slots("f") == 0


async def test_worker_requests_stay_open_until_spawned(store: ControlStores, ann: Leader) -> None:
    assert await store.request_workers("f", 2) == 2
    assert (await ann.observe()).requested == 2
    await ann.commit(intents=(replace(intent("w0", 0), is_requested=True), intent("w1", 1)))
    assert (await ann.observe()).requested == 1
    assert await store.request_workers("f", 99) == FLEET.max_workers - 2
    assert await store.request_workers("f", -1) == 1
    assert await store.request_workers("f", -3) == 0
    assert (await store.fleets())[0].requested_workers == 0


async def test_worker_requests_never_exceed_free_slots(store: ControlStores, ann: Leader) -> None:
    await ann.spawn_worker(0, 1, 2, 3)
    await ann.report(Deleted("w3", None, "X", "x"))
    assert await store.request_workers("f", 9) == 1
    await ann.commit(FailSlot(3, "x"))
    assert (await ann.observe()).requested == 0, "the last slot is failed: no worker can be spawned for this request"
    await ann.commit(Drain("w0", "IDLE", "idle"))
    assert await store.request_workers("f", 9) == 1, "a terminated worker frees its slot"


async def test_request_that_no_slot_can_take_is_dropped(store: ControlStores, ann: Leader) -> None:
    """Otherwise it would spawn workers again that were drained for being idle."""
    assert await store.request_workers("f", 3) == 3
    await ann.spawn_worker(0, 1)
    await ann.spawn_worker(2, 3)
    assert (await ann.observe()).requested == 0


@pytest.mark.parametrize("slot", [-1, 4, 17])
async def test_restarting_slot_outside_fleet_is_bad_input(store: ControlStores, ann: Leader, slot: int) -> None:
    with pytest.raises(BadInput, match=f"slot {slot} not found in fleet f: its slots are 0 to 3"):
        await store.restart_slots("f", slot)
    assert (await ann.observe()).reset_at is None


async def test_snapshot_has_last_failure_with_reason(store: ControlStores, clock: VirtualClock, ann: Leader) -> None:
    assert ann.snapshot.last_failure is None
    await ann.spawn_worker(0, 1, 2)
    await ann.commit(Fail("w1", "MACHINE_GONE", "exit code 2"), Drain("w2", "IDLE", "idle"))
    assert (await ann.observe()).last_failure == RecentFailure("w1", "MACHINE_GONE", "exit code 2", clock())
    clock.advance(5)
    await ann.spawn_worker(3)
    await ann.report(CreationRefused("w3", "REFUSED", "there is no folder /x"))
    assert (await ann.observe()).last_failure == RecentFailure("w3", "REFUSED", "there is no folder /x", clock())


async def test_fleet_has_last_cycle_time_and_leader_flag(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    (before,) = await store.fleets()
    assert (before.planned_at, before.next_plan_in_s, before.is_led) == (None, None, True)
    await ann.commit(planner_state=PlannerState(Cadence(planned_at=clock(), next_plan_in_s=10.0)))
    clock.advance(29)
    (fleet,) = await store.fleets()
    assert (fleet.planned_at, fleet.next_plan_in_s, fleet.is_led) == (clock() - timedelta(seconds=29), 10.0, True)
    assert fleet.without_orchestrator_s(clock()) is None
    clock.advance(1)
    (fleet,) = await store.fleets()
    assert (fleet.is_led, fleet.without_orchestrator_s(clock())) == (False, 30.0)


async def test_worker_spawned_for_queue_fulfils_no_request(store: ControlStores, ann: Leader) -> None:
    """A request made after the observation stays open."""
    await store.request_workers("f", 2)
    await ann.spawn_worker(0, 1)
    assert (await ann.observe()).requested == 2
    await ann.commit(intents=(replace(intent("not granted", 0), is_requested=True),))
    await ann.report(Deleted("w1", None, "X", "x"))
    await ann.commit(intents=(replace(intent("y1", 1), is_requested=True),))
    assert (await ann.observe()).requested == 1


async def test_snapshot_has_times_of_slot_and_fleet_restarts(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    assert (ann.snapshot.reset_at, ann.snapshot.restarted_at) == (None, None)
    clock.advance(5)
    await store.restart_slots("f", 0)
    of_a_slot = clock()
    clock.advance(5)
    seen = await ann.observe()
    assert (seen.reset_at, seen.restarted_at) == (of_a_slot, None)
    await store.restart_slots("f")
    of_all = clock()
    clock.advance(5)
    seen = await ann.observe()
    assert (seen.reset_at, seen.restarted_at) == (of_all, of_all)
    await store.restart_slots("f", 0)
    seen = await ann.observe()
    assert (seen.reset_at, seen.restarted_at) == (clock(), of_all)


async def test_instance_id_is_constant(store: ControlStores) -> None:
    assert str(UUID(await store.instance_id())) == await store.instance_id()


async def test_last_cycle_with_worker_is_found(store: ControlStores, clock: VirtualClock, ann: Leader) -> None:
    await ann.spawn_worker(0)
    await ann.observe()
    first = (await ann.commit(decision="one")).cycle_id
    await ann.report(Deleted("w0", None, "X", "x"))
    await ann.observe()
    await ann.commit(decision="two")
    found = await store.last_cycle_with("f", "w0")
    assert (found.cycle.id, [view.id for view in found.snapshot.workers]) == (first, ["w0"])
    assert await store.last_cycle_with("f", "unknown") is None
    assert await store.last_cycle_with("g", "w0") is None
    # The search starts at the end of the worker, however long ago that was.
    for number in range(201):
        clock.advance(1)
        await ann.observe()
        await ann.commit(decision=f"later {number}")
    assert (await store.last_cycle_with("f", "w0")).cycle.id == first  # type: ignore[union-attr]


async def test_running_tasks_are_listed_by_worker(store: ControlStores, ann: Leader) -> None:
    await store.register(Registration("hand", ("a",), fleet="f"))
    assert await store.running_tasks() == {}
    ids = [await store.enqueue(NewTask("a")) for _ in range(3)]
    await store.claim("hand", ("a",), 2)
    assert await store.running_tasks() == {"hand": ids[:2]}


async def test_ready_before_counts_tasks_claimed_earlier(
    store: ControlStores, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await store.enqueue(NewTask("a")), await store.enqueue(NewTask("a"))
    urgent = await store.enqueue(NewTask("a", priority=1))
    await store.enqueue(NewTask("b"))
    await store.enqueue(NewTask("a", priority=9, run_after=clock() + timedelta(seconds=9)))
    assert [await store.ready_before(task_id) for task_id in (urgent, first, second, 4711)] == [0, 1, 2, 0]
    for module in (fleets, memory_fleets):
        monkeypatch.setattr(module, "MAX_AHEAD", 0)
    assert [await store.ready_before(task_id) for task_id in (urgent, first, second, 4711)] == [0, 1, 1, 0]


async def test_queues_with_tasks_returns_only_queues_with_queued_tasks(
    store: ControlStores, clock: VirtualClock
) -> None:
    queues = ("ready", "later", "busy", "held", "empty")
    await store.register(Registration("hand", ("busy",), fleet="f"))
    await store.register(Registration("d", ("held",), fleet="f", kind=WorkerKind.DISPATCHER))
    for queue in ("ready", "busy", "held"):
        await store.enqueue(NewTask(queue))
    await store.enqueue(NewTask("later", run_after=clock() + timedelta(seconds=9)))
    await store.claim("hand", ("busy",), 1)
    await store.claim("d", ("held",), 1)
    assert await store.queues_with_tasks(queues) == {"ready", "held"}
    clock.advance(10)
    assert await store.queues_with_tasks(queues) == {"ready", "held", "later"}
    assert await store.queues_with_tasks(()) == set()


async def test_pausing_fleet_pauses_present_and_future_workers(store: ControlStores, ann: Leader) -> None:
    await ann.spawn_worker(0, 1)
    await store.set_paused(["w1"], True)
    assert await store.pause_fleet("f", True) == 1
    assert (await ann.observe()).is_paused
    assert (await store.fleets())[0].is_paused
    await store.register(Registration("hand", ("a",), fleet="f"))
    assert {worker.id: worker.is_paused for worker in await store.workers()} == {"w0": True, "w1": True, "hand": True}
    await store.enqueue(NewTask("a"))
    assert await store.claim("hand", ("a",), 1) == []
    assert await store.pause_fleet("f", False) == 3
    assert not (await ann.observe()).is_paused
    assert len(await store.claim("hand", ("a",), 1)) == 1


async def test_terminated_worker_loses_tasks_without_counting_a_restart(store: ControlStores, ann: Leader) -> None:
    await ann.spawn_worker(0)
    task_id = await store.enqueue(NewTask("a"))
    await store.claim("w0", ("a",), 1)
    assert await store.terminate_worker("w0", "it annoys me") is True
    worker = await store.worker("w0")
    assert (worker.status, worker.code, worker.reason) == (WorkerStatus.ERROR, "MANUAL", "it annoys me")
    assert (await store.task(task_id)).status is TaskStatus.QUEUED
    snapshot = await ann.observe()
    assert [launch.has_failed for launch in snapshot.launches] == [False]
    assert snapshot.slots == ()
    assert await store.terminate_worker("w0", "again") is False
    assert await store.terminate_worker("unknown", "x") is False


async def test_forced_end_of_unmanaged_worker_terminates_it(store: ControlStores, ann: Leader) -> None:
    await store.register(Registration("hand", ("a",), fleet="f"))
    assert await store.terminate_worker("hand", "x") is True
    worker = await store.worker("hand")
    assert (worker.status, worker.code) == (WorkerStatus.TERMINATED, "MANUAL")
    assert worker.terminated_at is not None


async def test_peers_judge_spawned_workers_after_two_leaderless_leases(
    store: ControlStores, ann: Leader, clock: VirtualClock
) -> None:
    await ann.spawn_worker(0)
    for worker_id in ("w0", "judge"):
        await store.register(Registration(worker_id, ("a",)))
        await store.heartbeat(worker_id)
    task_id = await store.enqueue(NewTask("a"))
    await store.claim("w0", ("a",), 1)

    async def judged_after(seconds: int) -> list[RecoveredTasks]:
        for _ in range(seconds // 10):
            clock.advance(10)
            await store.heartbeat("judge")
        return await store.recover_lost_workers("judge")

    # While a leader exists, and for two leases of the lost worker after it.
    for _ in range(20):
        await store.acquire_lease(ANN)
        assert await judged_after(10) == []
    await store.release_lease(ANN)
    assert await judged_after(60) == []
    assert await judged_after(10) == [RecoveredTasks("w0", tasks_requeued=1, tasks_failed=0)]
    assert (await store.task(task_id)).status is TaskStatus.QUEUED
    # The returning control loop finds a failed worker, and its slot has counted a restart.
    snapshot = await ann.observe()
    (broken,) = snapshot.workers
    assert (broken.id, broken.status, broken.code) == ("w0", WorkerStatus.ERROR, "STALE_HEARTBEAT")
    assert [(slot.slot, len(slot.restarts)) for slot in snapshot.slots] == [(0, 1)]
    assert [launch.has_failed for launch in snapshot.launches] == [True]


async def test_proven_worker_lost_without_a_leader_is_no_failed_launch(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await ann.spawn_worker(0)
    for worker_id in ("w0", "judge"):
        await store.register(Registration(worker_id, ("a",)))
    await store.enqueue_many([NewTask("a")] * 2)
    (first,) = await store.claim("w0", ("a",), 1)
    clock.advance(1)
    await store.finish_and_claim("w0", [Finished(first.task_id, first.token, None)], ("a",), 1)
    await store.heartbeat("w0")
    await store.release_lease(ANN)
    for _ in range(10):
        await store.heartbeat("judge")
        clock.advance(10)
    await store.heartbeat("judge")
    assert await store.recover_lost_workers("judge") == [RecoveredTasks("w0", tasks_requeued=1, tasks_failed=0)]
    assert [(launch.slot, launch.has_failed) for launch in (await ann.observe()).launches] == [(0, False)]


async def test_operation_on_unknown_fleet_is_bad_input(store: ControlStores) -> None:
    for asked in (store.restart_slots("no"), store.request_workers("no", 1), store.pause_fleet("no", True)):
        with pytest.raises(BadInput, match="fleet no not found"):
            await asked
    assert await store.fleets() == []


async def test_deploy_requests_are_numbered_and_aborted_once(store: ControlStores, ann: Leader) -> None:
    assert (await ann.observe()).deploy is None
    assert not await store.abort_deploy("f"), "nothing was requested"
    assert await store.request_deploy("f", 2, 0, is_immediate=True) == 1
    assert (await ann.observe()).deploy == DeployRequest(1, surge=2, is_immediate=True)
    assert await store.abort_deploy("f")
    assert not await store.abort_deploy("f")
    assert await store.request_deploy("f", 0, 1, is_immediate=False) == 2
    assert (await ann.observe()).deploy == DeployRequest(2, max_unavailable=1)
    with pytest.raises(BadInput):
        await store.request_deploy("unknown", 0, 0, is_immediate=False)


@pytest.mark.parametrize("requests", [0, 2])
async def test_rollout_that_began_without_a_request_is_aborted(
    store: ControlStores, clock: VirtualClock, ann: Leader, requests: int
) -> None:
    """Begin a rollout like `windlass up --watch`: without any request, or after one that was aborted."""
    for _ in range(requests):
        await store.request_deploy("f", 0, 0, is_immediate=False)
    assert await store.abort_deploy("f") is bool(requests)
    state = PlannerState(rollout=Rollout(requests, "b2", 1, 0, True, clock()), aborted_deploy=requests)
    await ann.commit(planner_state=state)
    assert await store.abort_deploy("f")
    assert (await ann.observe()).deploy == DeployRequest(requests + 1, is_aborted=True)
    assert not await store.abort_deploy("f"), "no cycle has seen the first abort yet"


async def test_worker_keeps_its_fingerprint_and_the_fleet_its_rollout(store: ControlStores, ann: Leader) -> None:
    await ann.commit(intents=(replace(intent("w0", 0), fingerprint="a1"), intent("w1", 1)))
    assert [view.fingerprint for view in (await ann.observe()).workers] == ["a1", None]
    assert [worker.fingerprint for worker in await store.workers()] == ["a1", None]
    (at,) = [worker.created_at for worker in await store.workers() if worker.id == "w0"]
    rollout = Rollout(3, "b2", 1, 0, False, at, surged=(2,), failed=("w9",), changed_at=at)
    await ann.commit(
        RecordEvent("DEPLOY_STARTED", "version b2"), planner_state=PlannerState(fingerprint="b2", rollout=rollout)
    )
    (fleet,) = await store.fleets()
    assert (fleet.fingerprint, fleet.rollout) == ("b2", rollout)
    assert (await ann.observe()).planner_state.rollout == rollout
    assert (await store.events(limit=1))[0].code == "DEPLOY_STARTED"
