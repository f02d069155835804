"""Stored cycles, and workers that deregister."""

from dataclasses import replace
from datetime import timedelta

from support.control_actions import (
    RETENTION,
    ControlStores,
    Leader,
    VirtualClock,
    intent,
    machine,
)
from windlass.model.action import (
    Action,
    Adopt,
    Delete,
    DeleteOrphan,
    Drain,
    Fail,
    FailSlot,
    Promote,
    RaiseAlert,
    Requeue,
    Spawn,
)
from windlass.model.machine import ProviderTraits
from windlass.model.outcome import (
    Deleted,
)
from windlass.model.snapshot import (
    Cadence,
    PlannerState,
)
from windlass.model.task import NewTask, TaskStatus
from windlass.model.worker import Registration, WorkerStatus


async def test_cycle_is_stored_with_snapshot_and_decision(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await store.enqueue(NewTask("a"))
    await ann.observe()
    ann.snapshot = replace(
        ann.snapshot,
        machines=(replace(machine(1), created_at=clock(), note="x"),),
        listed_at=clock() - timedelta(seconds=1.5),
        traits=ProviderTraits(1.0, 2.0, 3.0),
    )
    actions: tuple[Action, ...] = (
        Promote("a", "first heartbeat"),
        Fail("b", "X", "x"),
        Requeue("c", "x"),
        Drain("d", "IDLE", "idle"),
        Delete("e", None, "X", "x"),
        Adopt("f", "m1", "found"),
        DeleteOrphan("m2", "g", "x"),
        FailSlot(0, "x"),
        Spawn(1, "x"),
        RaiseAlert("Y", "y"),
    )
    committed = await ann.commit(*actions, decision="spawn 1: 1 queued")
    stored = await store.cycle(committed.cycle_id)
    assert stored.snapshot == ann.snapshot
    assert stored.cycle.actions == actions
    assert (stored.cycle.fleet, stored.cycle.term, stored.cycle.started_at) == ("f", 1, clock())
    assert (stored.cycle.decision, stored.cycle.repeats) == ("spawn 1: 1 queued", 0)
    assert (stored.cycle.finished_at, stored.cycle.summary) == (None, None)
    clock.advance(2)
    await ann.report(Deleted("e", None, "X", "x"), cycle_id=committed.cycle_id)
    (cycle,) = await store.cycles("f")
    assert cycle == (await store.cycle(committed.cycle_id)).cycle
    assert (cycle.finished_at, cycle.summary) == (clock(), {"n": 1})
    assert await store.cycles("other") == []
    assert await store.cycle(99_999) is None


async def test_cycle_without_provider_calls_finishes_at_once(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    committed = await ann.commit(RaiseAlert("X", "x"))
    assert (await store.cycle(committed.cycle_id)).cycle.finished_at == clock()


async def test_repeated_idle_cycles_are_counted_not_stored(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    first = (await ann.commit(decision="steady")).cycle_id
    for _ in range(2):
        clock.advance(10)
        await ann.observe()
        assert (await ann.commit(decision="steady", planner_state=PlannerState(Cadence(cycle=5)))).cycle_id == first
    (cycle,) = await store.cycles("f")
    assert (cycle.repeats, cycle.repeated_at) == (2, clock())
    assert (await ann.observe()).planner_state.cadence.cycle == 5
    second = (await ann.commit(decision="other")).cycle_id
    third = (await ann.commit(RaiseAlert("X", "x"), decision="other")).cycle_id
    fourth = (await ann.commit(decision="other")).cycle_id
    assert len({first, second, third, fourth}) == 4
    assert [cycle.id for cycle in await store.cycles("f")] == [fourth, third, second, first]
    assert [cycle.id for cycle in await store.cycles("f", 2)] == [fourth, third]


async def test_cycle_is_stored_at_least_every_five_minutes(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    first = (await ann.commit(decision="steady")).cycle_id
    clock.advance(299)
    await ann.observe()
    assert (await ann.commit(decision="steady")).cycle_id == first
    clock.advance(1)
    await ann.observe()
    assert (await ann.commit(decision="steady")).cycle_id != first


async def test_retention_deletes_old_cycles(store: ControlStores, clock: VirtualClock, ann: Leader) -> None:
    await ann.commit(decision="steady")
    clock.advance(RETENTION.cycles_s + 1)
    assert await store.sweep() == 1
    assert await store.cycles("f") == []


async def test_deregistered_worker_keeps_slot_until_machine_is_deleted(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await ann.spawn_worker(0)
    await ann.commit(Promote("w0", "first heartbeat"))
    task_id = await store.enqueue(NewTask("a"))
    await store.claim("w0", ("a",), 1)
    clock.advance(3)
    await store.deregister("w0", "SIGTERM")
    (view,) = (await ann.observe()).workers
    assert (view.status, view.terminating_at, view.code, view.running) == ("terminating", clock(), "DEREGISTERED", ())
    task = await store.task(task_id)
    assert (task.status, task.attempts) == (TaskStatus.QUEUED, 0)
    assert (await ann.commit(intents=(intent("y0", 0),))).granted == frozenset()
    await ann.report(Deleted("w0", None, "DRAINED", "x"))
    assert (await ann.commit(intents=(intent("y0", 0),))).granted == {"y0"}


async def test_drained_worker_keeps_drain_reason_when_it_deregisters(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await ann.spawn_worker(0)
    await ann.commit(Drain("w0", "IDLE", "idle 41 s"))
    drained_at = clock()
    clock.advance(3)
    await store.deregister("w0", "requested")
    (view,) = (await ann.observe()).workers
    assert (view.terminating_at, view.code, view.reason) == (drained_at, "IDLE", "idle 41 s")


async def test_unmanaged_worker_is_terminated_when_it_deregisters(store: ControlStores, ann: Leader) -> None:
    await store.register(Registration("hand", ("a",), fleet="f"))
    await store.deregister("hand", "SIGTERM")
    assert (await store.worker("hand")).status is WorkerStatus.TERMINATED


async def test_manual_drain_records_terminating_time(store: ControlStores, clock: VirtualClock, ann: Leader) -> None:
    await ann.spawn_worker(0)
    clock.advance(5)
    assert await store.set_terminating(["w0"], "enough") == 1
    (view,) = (await ann.observe()).workers
    assert (view.status, view.terminating_at, view.code) == ("terminating", clock(), "MANUAL")
