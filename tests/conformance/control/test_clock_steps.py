"""The database's clock is set back or forward: nothing waits for the length of the step, and nothing is killed."""

from dataclasses import replace
from datetime import timedelta

import pytest

from support.control_actions import ANN, BOB, FLEET, ControlStores, Leader, VirtualClock, events
from windlass.model.action import Fail
from windlass.model.lease import Standby
from windlass.model.node import dispatcher_lease
from windlass.model.snapshot import Cadence, FailureRateState, HealthState, PlannerState
from windlass.model.task import NewTask, TaskStatus
from windlass.model.worker import HeldClaim, RecoveredTasks, Registration, WorkerStatus

HOUR_S = 3600.0


async def register(store: ControlStores, *worker_ids: str) -> None:
    for worker_id in worker_ids:
        await store.register(Registration(worker_id, fleet="f", queues=("a",), lease_s=30.0))
        await store.heartbeat(worker_id)


@pytest.mark.parametrize("lease", ["orchestrator", dispatcher_lease("f")])
@pytest.mark.parametrize("step_s", [60.0, HOUR_S, 400 * 86400.0])
async def test_lease_of_dead_holder_lasts_at_most_its_ttl_after_a_step_back(
    store: ControlStores, clock: VirtualClock, lease: str, step_s: float
) -> None:
    assert await store.acquire_lease(replace(ANN, lease=lease)) == 1
    clock.advance(-step_s)
    bob = replace(BOB, lease=lease, ttl_s=5.0)
    assert await store.acquire_lease(bob) == Standby(30.0, clock(), ANN.holder)
    clock.advance(29)
    assert await store.acquire_lease(bob) == Standby(1.0, clock(), ANN.holder)
    clock.advance(1)
    assert await store.acquire_lease(bob) == 2


async def test_live_holder_keeps_its_lease_after_a_step_back(store: ControlStores, clock: VirtualClock) -> None:
    ann = Leader(store)
    await ann.observe()
    clock.advance(-HOUR_S)
    assert isinstance(await store.acquire_lease(BOB), Standby)
    clock.advance(10)
    assert await store.acquire_lease(ANN) == 1
    await ann.spawn_worker(0)
    clock.advance(29)
    assert isinstance(await store.acquire_lease(BOB), Standby)


async def test_observation_is_standby_for_at_most_the_ttl_after_a_step_back(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    clock.advance(-HOUR_S)
    assert await store.observe(BOB, "f", FLEET) == Standby(30.0, clock(), ANN.holder)
    clock.advance(30)
    assert (await Leader(store, BOB).observe()).fleet == "f"


async def test_fleet_has_no_leader_while_a_lease_lies_in_the_future(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await ann.commit(planner_state=PlannerState(Cadence(1, planned_at=clock(), next_plan_in_s=1.0)))
    (fleet,) = await store.fleets()
    assert (fleet.is_led, fleet.without_orchestrator_s(clock())) == (True, None)
    clock.advance(-HOUR_S)
    (fleet,) = await store.fleets()
    assert (fleet.is_led, fleet.without_orchestrator_s(clock())) == (False, 0.0)


async def test_worker_that_died_before_a_step_back_is_lost_after_its_lease(
    store: ControlStores, clock: VirtualClock
) -> None:
    await register(store, "dead", "judge")
    task_id = await store.enqueue(NewTask("a"))
    assert len(await store.claim("dead", ("a",), 1)) == 1
    await store.recover_lost_workers("judge")
    clock.advance(-HOUR_S)
    for _ in range(7):
        await store.heartbeat("judge")
        assert await store.recover_lost_workers("judge") == []
        clock.advance(5)
    await store.heartbeat("judge")
    assert await store.recover_lost_workers("judge") == [RecoveredTasks("dead", tasks_requeued=1, tasks_failed=0)]
    task = await store.task(task_id)
    assert task is not None
    assert task.status is TaskStatus.QUEUED


async def test_spawned_worker_is_recovered_after_a_step_back_without_leader(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await ann.spawn_worker(0)
    await store.register(Registration("w0", fleet="f", queues=("a",), lease_s=30.0))
    await store.heartbeat("w0")
    await register(store, "judge")
    await store.recover_lost_workers("judge")
    clock.advance(-HOUR_S)
    # The leader's lease ends after 30 s, then it is missing for twice the lease of the lost worker.
    for _ in range(19):
        await store.heartbeat("judge")
        assert await store.recover_lost_workers("judge") == []
        clock.advance(5)
    await store.heartbeat("judge")
    assert [lost.worker_id for lost in await store.recover_lost_workers("judge")] == ["w0"]
    worker = await store.worker("w0")
    assert worker is not None
    assert worker.status is WorkerStatus.ERROR


async def test_ages_in_a_cycle_stay_the_same_after_a_step_back(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await register(store, "w")
    await store.enqueue(NewTask("a"))
    await store.claim("w", ("a",), 1)
    clock.advance(20)
    await ann.observe()
    clock.advance(-HOUR_S)
    (worker,) = (await ann.observe()).workers
    assert worker.last_heartbeat == worker.created_at == worker.activated_at == clock() - timedelta(seconds=20)
    assert [running.started_at for running in worker.running] == [clock() - timedelta(seconds=20)]


@pytest.mark.parametrize("is_released", [True, False], ids=["released", "failed"])
async def test_task_that_is_tried_again_waits_no_longer_after_a_step_back(
    store: ControlStores, clock: VirtualClock, ann: Leader, is_released: bool
) -> None:
    await register(store, "w")
    task_id = await store.enqueue(NewTask("a"))
    (claim,) = await store.claim("w", ("a",), 1)
    if is_released:
        assert await store.release("w", task_id, claim.token, "not now", 5.0)
    else:
        assert await store.fail("w", task_id, claim.token, "no", jitter=0.0) is TaskStatus.ERROR
    await ann.observe()
    clock.advance(-HOUR_S)
    await ann.observe()
    clock.advance(4.9)
    assert await store.claim("w", ("a",), 1) == []
    clock.advance(0.1)
    assert [claim.task_id for claim in await store.claim("w", ("a",), 1)] == [task_id]


async def test_time_that_a_producer_chose_is_not_moved(store: ControlStores, clock: VirtualClock, ann: Leader) -> None:
    due = clock() + timedelta(seconds=60)
    task_id = await store.enqueue(NewTask("a", run_after=due))
    clock.advance(-HOUR_S)
    await ann.observe()
    task = await store.task(task_id)
    assert task is not None
    assert task.run_after == due


async def test_planner_state_moves_back_with_the_clock(store: ControlStores, clock: VirtualClock, ann: Leader) -> None:
    def state(shift_s: float) -> PlannerState:
        now = clock() + timedelta(seconds=shift_s)
        return PlannerState(
            Cadence(1, planned_at=now, gaps_s=(1.5,), next_plan_in_s=2.0),
            health=HealthState(idle_since={"w": now - timedelta(seconds=5)}),
            failure_rate=FailureRateState(1, until=now + timedelta(seconds=300)),
        )

    await ann.commit(planner_state=state(0))
    await ann.observe()
    clock.advance(-HOUR_S)
    expected = state(0)
    assert (await ann.observe()).planner_state == expected


async def test_plan_from_before_a_step_back_moves_with_the_clock(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    now = clock()
    state = PlannerState(Cadence(1, planned_at=now), health=HealthState(idle_since={"w": now - timedelta(seconds=5)}))
    clock.advance(-HOUR_S)
    await register(store, "w")
    await store.recover_lost_workers("w")  # corrects the state that the plan replaces
    await ann.commit(planner_state=state)
    state = (await ann.observe()).planner_state
    assert state.cadence.planned_at == clock()
    assert state.health.idle_since == {"w": clock() - timedelta(seconds=5)}


async def test_step_back_and_forth_between_two_cycles_is_noticed(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    """A heartbeat in between looks old afterwards. The gap since the last plan says why."""
    await ann.spawn_worker(0)
    await ann.commit(planner_state=PlannerState(Cadence(1, planned_at=clock())))
    clock.advance(3 - HOUR_S)
    await store.heartbeat("w0")
    assert "CLOCK_SET_BACK" in await events(store)
    clock.advance(HOUR_S)
    planned_at = (await ann.observe()).planner_state.cadence.planned_at
    assert planned_at is not None
    assert clock() - planned_at >= timedelta(seconds=HOUR_S)


async def test_failures_before_a_step_back_are_not_counted_for_its_length(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await ann.spawn_worker(0)
    await ann.commit(Fail("w0", "X", "failed"))
    await ann.report(cycle_id=1)
    clock.advance(-HOUR_S)
    snapshot = await ann.observe()
    assert len(snapshot.launches) == 0
    # Restarts are times of the slot, which lives on: they keep their age.
    assert [slot.restarts for slot in snapshot.slots] == [(clock(),)]


async def test_step_back_is_recorded_once(store: ControlStores, clock: VirtualClock, ann: Leader) -> None:
    clock.advance(-0.5)
    await ann.observe()
    assert await events(store) == []
    clock.advance(-HOUR_S)
    await ann.observe()
    await ann.observe()
    recorded = await store.events(limit=10)
    assert [(event.code, event.reason) for event in recorded] == [
        ("CLOCK_SET_BACK", "the database clock was set back by 3601 s")
    ]


async def test_step_back_of_more_than_a_day_changes_no_ages(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await ann.spawn_worker(0)
    await store.heartbeat("w0")
    created_at = clock()
    clock.advance(-2 * 86400.0)
    (worker,) = (await ann.observe()).workers
    assert (worker.created_at, worker.last_heartbeat) == (created_at, clock())


async def test_step_forward_loses_no_worker_and_no_claim(store: ControlStores, clock: VirtualClock) -> None:
    assert await store.acquire_lease(ANN) == 1
    await register(store, "a", "judge")
    task_id = await store.enqueue(NewTask("a"))
    (claim,) = await store.claim("a", ("a",), 1)
    clock.advance(HOUR_S)
    await store.heartbeat("judge")
    assert await store.recover_lost_workers("judge") == []
    assert (await store.heartbeat("a", [HeldClaim(claim.task_id, claim.token)])).lost == frozenset()
    assert await store.recover_lost_workers("judge") == []
    # The lease has expired: its holder acquires it again, or another candidate does.
    assert await store.acquire_lease(ANN) == 1
    task = await store.task(task_id)
    assert task is not None
    assert task.status is TaskStatus.RUNNING
