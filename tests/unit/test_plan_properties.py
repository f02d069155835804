"""What holds for every plan, whatever the fleet looks like."""

from dataclasses import replace
from datetime import datetime, timedelta

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.snapshots import Clockwork, apply, beating, of_kind, with_state
from support.strategies import DemoScenario, paid_scenes, scenes, uncapped
from windlass.model.action import (
    Action,
    Delete,
    DeleteOrphan,
    Drain,
    Fail,
    FailSlot,
    Plan,
    Promote,
    RaiseAlert,
    Requeue,
    Spawn,
)
from windlass.model.cost import Spending
from windlass.model.machine import MachineState
from windlass.model.snapshot import WorkerView
from windlass.model.worker import WorkerStatus
from windlass.policy.billing import cost, is_worth_waiting, next_window
from windlass.policy.budget import budgets
from windlass.policy.plan import plan
from windlass.policy.planning_context import build_context

# The same scenes in every run: a failure in CI is a failure at home.
always = settings(
    max_examples=150, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)

often = settings(always, max_examples=500)


def unforeseen(first: Plan, second: Plan) -> list[Action]:
    """What comes second and does not follow from what was done first: where that made the fleet smaller, those who were
    told to leave need not be doubted any more if they are not listed, and strays may have become the most."""
    leaving = {action.worker_id for action in of_kind(first.actions, Drain)}
    is_smaller = bool(of_kind(first.actions, Delete))
    return [
        action
        for action in second.actions
        if not (isinstance(action, Delete) and action.code == "DRAINED" and action.worker_id in leaving)
        and not (isinstance(action, RaiseAlert) and action.code == "TOO_MANY_ORPHANS" and is_smaller)
    ]


@often
@given(st.one_of(scenes(), paid_scenes()))
def test_planning_again_after_its_own_actions_gives_nothing(scene: DemoScenario) -> None:
    first = plan(scene.snapshot, scene.fleet)
    second = plan(apply(first, scene.snapshot, scene.fleet), scene.fleet)
    if first.is_cut_short:
        # What a cap left for later, in the same direction, is all that may follow.
        going_on = Spawn if not of_kind(first.actions, Drain) else Drain
        assert all(isinstance(action, going_on | DeleteOrphan) for action in unforeseen(first, second)), second.actions
    else:
        assert unforeseen(first, second) == [], second.actions


@often
@given(st.one_of(scenes(), paid_scenes()))
def test_a_moment_later_nothing_more_is_wanted(scene: DemoScenario) -> None:
    scene = uncapped(scene)
    first = plan(scene.snapshot, scene.fleet)
    if first.is_cut_short:
        return
    after = apply(first, scene.snapshot, scene.fleet)
    later = plan(replace(after, now=after.now + timedelta(milliseconds=1)), scene.fleet)
    assert unforeseen(first, later) == [], later.actions


@settings(always, max_examples=60)
@given(scenes())
def test_every_fleet_comes_to_rest_under_a_constant_load(scene: DemoScenario) -> None:
    """Whatever it looks like at first, if its machines live from now on and no task ends."""

    def live(view: WorkerView, now: datetime) -> WorkerView:
        running = tuple(replace(task, timeout_s=None) for task in view.running)
        return beating(replace(view, idle_s=None, running=running), now)

    world = Clockwork(scene.fleet.model_copy(update={"stuck_timeout_s": 1e9}), scene.snapshot, live)
    for _ in range(150):
        world.cycle()
    assert [
        action for planned in world.plans[-30:] for action in planned.actions if not isinstance(action, RaiseAlert)
    ] == []


@always
@given(scenes())
def test_there_are_never_more_machines_than_the_maximum(scene: DemoScenario) -> None:
    """Counted as a provider would: what exists, what is being deleted, what is being made."""
    seen, limit = scene.snapshot, scene.fleet.max_workers
    planned = plan(seen, scene.fleet)
    held = {view.slot: view.id for view in seen.workers if view.slot is not None}
    deleted = {action.worker_id for action in of_kind(planned.actions, Delete)}
    spawned = [action.slot for action in of_kind(planned.actions, Spawn)]
    assert len(spawned) == len(set(spawned))
    assert all(0 <= slot < limit for slot in spawned)
    assert all(slot not in held or held[slot] in deleted for slot in spawned)
    orphans = strays_of(scene)
    at_once = [slot for slot in spawned if slot not in held]
    assert not at_once or len(held) + orphans + len(at_once) <= limit
    assert not spawned or len(held) - len(deleted & set(held.values())) + orphans + len(spawned) <= limit


def strays_of(scene: DemoScenario) -> int:
    rows = {view.id: view for view in scene.snapshot.workers}
    running = [m for m in scene.snapshot.machines or () if m.state is not MachineState.EXITED]
    names = [machine.name for machine in running if machine.name in rows]
    unowned = sum(machine.name not in rows for machine in running)
    return unowned + len(names) - len(set(names))


@always
@given(scenes())
def test_an_unknown_list_deletes_no_stray_and_closes_no_row_whose_machine_may_exist(scene: DemoScenario) -> None:
    unknown = replace(scene.snapshot, machines=None)
    planned = plan(unknown, scene.fleet)
    # What else ends a worker (silence, a stuck task, its own drain) needs no list, and deletes the machine it knows of.
    rows = {view.id: view for view in unknown.workers}
    assert not of_kind(planned.actions, DeleteOrphan)
    for action in of_kind(planned.actions, Delete):
        view = rows[action.worker_id]
        assert action.machine_id == view.machine_id
        assert action.machine_id is not None or view.slot is None, "a row was closed though its machine may exist"
    assert all(fail.code not in ("MACHINE_GONE", "NO_MACHINE_ID") for fail in of_kind(planned.actions, Fail))


@always
@given(scenes())
def test_a_healthy_worker_at_work_is_neither_failed_nor_deleted(scene: DemoScenario) -> None:
    planned = plan(scene.snapshot, scene.fleet)
    states = build_context(scene.snapshot, scene.fleet).states
    at_work = {
        id_
        for id_, state in states.items()
        if state.is_healthy and state.has_active_task and state.worker.status is not WorkerStatus.TERMINATING
    }
    ended = {action.worker_id for action in planned.actions if isinstance(action, Fail | Delete)}
    assert not at_work & ended
    drained = {drain.worker_id: drain.code for drain in of_kind(planned.actions, Drain)}
    may_be = ("OVER_MAX", "SHUT_DOWN")
    assert all(drained.get(id_, "OVER_MAX") in may_be for id_ in at_work)


@always
@given(scenes())
def test_a_draining_worker_that_is_heard_and_at_work_lives_until_its_deadline(scene: DemoScenario) -> None:
    deleted = {action.worker_id for action in of_kind(plan(scene.snapshot, scene.fleet).actions, Delete)}
    for id_, state in build_context(scene.snapshot, scene.fleet).states.items():
        worker = state.worker
        is_at_work = worker.status is WorkerStatus.TERMINATING and state.has_active_task
        if not is_at_work or id_ not in deleted:
            continue
        if not state.is_managed:
            # Its time is its own: it ends with its silence alone.
            heard_at = worker.last_heartbeat or worker.activated_at or worker.created_at
            lease_s = worker.lease_s if worker.lease_s is not None else scene.fleet.heartbeat_timeout_s
            assert (scene.snapshot.now - heard_at).total_seconds() > lease_s
        elif not state.is_stale and state.presence not in ("missing", "exited"):
            assert worker.terminating_at is not None
            waited = scene.snapshot.now - worker.terminating_at
            assert waited.total_seconds() >= scene.fleet.stop_timeout_s


@always
@given(scenes())
def test_a_worker_started_by_hand_is_never_drained_and_ends_only_when_it_is_over(scene: DemoScenario) -> None:
    planned = plan(scene.snapshot, scene.fleet)
    states = build_context(scene.snapshot, scene.fleet).states
    for action in planned.actions:
        state = states.get(getattr(action, "worker_id", None) or "")
        if state is None or state.is_managed:
            continue
        assert isinstance(action, Fail | Delete | RaiseAlert | Requeue), action
        if isinstance(action, Fail):
            assert state.code in ("NO_HEARTBEAT",) or state.is_stale
        if isinstance(action, Delete):
            assert action.machine_id is None


@always
@given(st.one_of(scenes(), paid_scenes()))
def test_a_plan_keeps_its_manners(scene: DemoScenario) -> None:
    planned = plan(scene.snapshot, scene.fleet)
    spawns, drains = of_kind(planned.actions, Spawn), of_kind(planned.actions, Drain)
    assert not (spawns and drains), "never both hired and let go"
    assert len(spawns) <= scene.fleet.max_changes_per_cycle
    assert len(drains) <= scene.fleet.max_changes_per_cycle or scene.snapshot.is_shutting_down
    assert len(of_kind(planned.actions, DeleteOrphan)) <= scene.fleet.max_changes_per_cycle
    assert all(action.reason.strip() for action in planned.actions)
    assert planned.decision.strip()
    assert len(set(planned.actions)) == len(planned.actions), "nothing is asked for twice"
    failed = {slot.slot for slot in scene.snapshot.slots if slot.is_failed}
    failed |= {action.slot for action in of_kind(planned.actions, FailSlot)}
    assert not failed & {spawn.slot for spawn in spawns}, "a failed slot is never filled"
    if scene.snapshot.is_paused or scene.snapshot.is_shutting_down:
        assert not spawns


@always
@given(st.one_of(scenes(), paid_scenes()))
def test_under_a_total_hold_nobody_is_touched(scene: DemoScenario) -> None:
    planned = plan(scene.snapshot, scene.fleet)
    if planned.hold is not None and planned.hold.is_total:
        # Whoever is told to leave because a person ends the fleet loses nothing by it.
        allowed = (Promote, RaiseAlert, Drain) if scene.snapshot.is_shutting_down else (Promote, RaiseAlert)
        assert all(isinstance(action, allowed) for action in planned.actions)


@always
@given(scenes())
def test_a_plan_is_a_function_of_its_snapshot(scene: DemoScenario) -> None:
    assert plan(scene.snapshot, scene.fleet) == plan(scene.snapshot, scene.fleet)


@always
@given(scenes())
def test_letting_go_never_goes_below_the_minimum(scene: DemoScenario) -> None:
    planned = plan(scene.snapshot, scene.fleet)
    if of_kind(planned.actions, Drain) and not scene.snapshot.is_shutting_down:
        assert staying_after(scene, planned) >= scene.fleet.min_workers


def staying_after(scene: DemoScenario, planned: Plan) -> int:
    after = apply(planned, scene.snapshot, scene.fleet)
    return sum(
        view.slot is not None and view.status in (WorkerStatus.SPAWNING, WorkerStatus.ACTIVE) for view in after.workers
    )


# ------------------------------------------------------------------------------------------------- paid time and money


@always
@given(scenes())
def test_nobody_is_let_go_for_want_of_work_while_its_time_is_paid(scene: DemoScenario) -> None:
    unit_s, cycle_interval_s = (
        scene.snapshot.traits.billing_unit_s,
        build_context(scene.snapshot, scene.fleet).cycle_interval_s,
    )
    is_kept = is_worth_waiting(unit_s, cycle_interval_s)
    views = {view.id: view for view in scene.snapshot.workers}
    for drain in of_kind(plan(scene.snapshot, scene.fleet).actions, Drain):
        assert drain.code in ("OVER_MAX", "SHUT_DOWN", "BILLING_HOUR_END" if is_kept else "IDLE")
        if drain.code != "BILLING_HOUR_END":
            continue
        view = views[drain.worker_id]
        assert not view.running, "at work, it is never ended for billing"
        departure = next_window(unit_s, view.machine_at or view.created_at, scene.snapshot.now, cycle_interval_s)
        assert departure.opens <= scene.snapshot.now < departure.boundary


@always
@given(st.one_of(scenes(), paid_scenes()), st.floats(0, 1), st.sampled_from((0.0, 1.0, 9999.0)), st.booleans())
def test_cycles_at_their_usual_pace_decide_as_if_nothing_were_known_of_it(
    scene: DemoScenario, share: float, longer_s: float, is_now: bool
) -> None:
    """A single gap that is longer, the last one or the one before, is an outage."""
    usual_s, other_s = share * scene.fleet.poll_interval_s, scene.fleet.poll_interval_s + longer_s
    last_s, before_s = (other_s, usual_s) if is_now else (usual_s, other_s)
    last = scene.snapshot.now - timedelta(seconds=last_s)

    def decided(gaps_s: tuple[float, ...]) -> Plan:
        planner_state = with_state(scene.snapshot.planner_state, planned_at=last, gaps_s=gaps_s)
        planned = plan(replace(scene.snapshot, planner_state=planner_state), scene.fleet)
        return replace(planned, planner_state=with_state(planned.planner_state, gaps_s=()))

    assert decided((before_s,)) == decided(())


@often
@given(paid_scenes())
def test_a_spent_budget_is_a_stop_whatever_waits(scene: DemoScenario) -> None:
    planned = plan(scene.snapshot, scene.fleet)
    is_spent = any(budget.is_spent for budget in budgets(scene.snapshot, scene.fleet))
    drained = [drain for drain in of_kind(planned.actions, Drain) if drain.code == "BUDGET"]
    if is_spent and scene.fleet.budget_action != "warn":
        assert planned.hold is not None
        assert not of_kind(planned.actions, Spawn), "not even the minimum"
    if drained:
        assert is_spent
        assert scene.fleet.budget_action == "drain"
    ended = {action.worker_id for action in planned.actions if isinstance(action, Fail | Delete)}
    for id_, state in build_context(scene.snapshot, scene.fleet).states.items():
        if state.is_healthy and state.has_active_task and state.worker.status is not WorkerStatus.TERMINATING:
            assert id_ not in ended, "at work, it has until its deadline"


@always
@given(paid_scenes())
def test_hiring_stays_within_what_is_left(scene: DemoScenario) -> None:
    """At the highest price that is known; those on their way whose price is not known yet count."""
    if scene.fleet.budget_action == "warn":
        return
    spawned = len(of_kind(plan(scene.snapshot, scene.fleet).actions, Spawn))
    for budget in budgets(scene.snapshot, scene.fleet):
        bills = [view.bill for view in scene.snapshot.workers if view.bill] + list(scene.snapshot.ended_bills)
        prices = [
            cost(bill.tariff, bill.since, bill.since) for bill in bills if bill.tariff.currency == budget.currency
        ]
        if spawned and prices:
            assert budget.spent_micros + spawned * max(prices) <= budget.limit_micros


@always
@given(scenes())
def test_without_a_budget_nothing_is_said_about_money(scene: DemoScenario) -> None:
    paid = replace(scene.snapshot, spending=(Spending("EUR", 10**12, 10**12, 10**12),))
    assert plan(paid, scene.fleet) == plan(scene.snapshot, scene.fleet)
