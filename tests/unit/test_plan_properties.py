"""Properties of every plan, for random fleets."""

from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.snapshots import FleetSimulation, apply, beating, of_kind, with_state
from support.strategies import Scenario, priced_scenarios, scenarios, uncapped
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
from windlass.policy.planning_context import LIST_SHRANK, build_context

# Thousands of plans.
pytestmark = pytest.mark.slow

# Deterministic: a failure in CI can be reproduced locally.
always = settings(
    max_examples=150, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)

# Alerts that compare numbers of machines.
MAJORITIES = ("TOO_MANY_ORPHANS", LIST_SHRANK)

often = settings(always, max_examples=500)


def unforeseen(first: Plan, second: Plan) -> list[Action]:
    """Actions of a second plan that the first could not foresee.

    If the first made the fleet smaller, orphans or missing machines may have become the majority. Or a suspect list
    lacks too few machines now: one that was missing for three times the grace period is gone, and two others are
    believed.
    """
    leaving = {action.worker_id for action in of_kind(first.actions, Drain)}
    is_smaller = bool(of_kind(first.actions, Delete))
    is_suspect = first.hold is not None and first.hold.code == LIST_SHRANK
    is_suspect = is_suspect or any(alert.code == LIST_SHRANK for alert in of_kind(first.actions, RaiseAlert))
    is_believed = is_suspect and any(fail.code == "MACHINE_GONE" for fail in of_kind(first.actions, Fail))
    return [
        action
        for action in second.actions
        if not (isinstance(action, Delete) and action.code == "DRAINED" and action.worker_id in leaving)
        and not (isinstance(action, RaiseAlert) and action.code in MAJORITIES and is_smaller)
        and not (isinstance(action, Fail | Delete) and action.code == "MACHINE_GONE" and is_believed)
    ]


@often
@given(st.one_of(scenarios(), priced_scenarios()))
def test_plan_is_idempotent(scene: Scenario) -> None:
    first = plan(scene.snapshot, scene.fleet)
    second = plan(apply(first, scene.snapshot, scene.fleet), scene.fleet)
    if first.is_cut_short:
        # Only what a cap postponed may follow, in the same direction.
        going_on = Spawn if not of_kind(first.actions, Drain) else Drain
        assert all(isinstance(action, going_on | DeleteOrphan) for action in unforeseen(first, second)), second.actions
    else:
        assert unforeseen(first, second) == [], second.actions


@often
@given(st.one_of(scenarios(), priced_scenarios()))
def test_plan_is_stable_a_moment_later(scene: Scenario) -> None:
    scene = uncapped(scene)
    first = plan(scene.snapshot, scene.fleet)
    if first.is_cut_short:
        return
    after = apply(first, scene.snapshot, scene.fleet)
    later = plan(replace(after, now=after.now + timedelta(milliseconds=1)), scene.fleet)
    assert unforeseen(first, later) == [], later.actions


@settings(always, max_examples=60)
@given(scenarios())
def test_every_fleet_converges_under_constant_load(scene: Scenario) -> None:
    """From any state, if all machines live from now on and no task ends."""

    def live(view: WorkerView, now: datetime) -> WorkerView:
        running = tuple(replace(task, timeout_s=None) for task in view.running)
        return beating(replace(view, idle_s=None, running=running), now)

    world = FleetSimulation(scene.fleet.model_copy(update={"stuck_timeout_s": 1e9}), scene.snapshot, live)
    for _ in range(150):
        world.cycle()
    assert [
        action for planned in world.plans[-30:] for action in planned.actions if not isinstance(action, RaiseAlert)
    ] == []


@always
@given(scenarios())
def test_machines_never_exceed_max_workers(scene: Scenario) -> None:
    """Counted like a provider: existing machines, those being deleted, and those being created."""
    seen, limit = scene.snapshot, scene.fleet.max_workers
    planned = plan(seen, scene.fleet)
    held = {view.slot: view.id for view in seen.workers if view.slot is not None}
    deleted = {action.worker_id for action in of_kind(planned.actions, Delete)}
    spawned = [action.slot for action in of_kind(planned.actions, Spawn)]
    assert len(spawned) == len(set(spawned))
    assert all(0 <= slot < limit for slot in spawned)
    assert all(slot not in held or held[slot] in deleted for slot in spawned)
    orphans = orphans_of(scene)
    at_once = [slot for slot in spawned if slot not in held]
    assert not at_once or len(held) + orphans + len(at_once) <= limit
    assert not spawned or len(held) - len(deleted & set(held.values())) + orphans + len(spawned) <= limit


def orphans_of(scene: Scenario) -> int:
    rows = {view.id: view for view in scene.snapshot.workers}
    running = [m for m in scene.snapshot.machines or () if m.state is not MachineState.EXITED]
    names = [machine.name for machine in running if machine.name in rows]
    unowned = sum(machine.name not in rows for machine in running)
    return unowned + len(names) - len(set(names))


@always
@given(scenarios())
def test_without_list_no_orphan_and_no_row_is_removed(scene: Scenario) -> None:
    unknown = replace(scene.snapshot, machines=None)
    planned = plan(unknown, scene.fleet)
    # Other terminations (silence, a stuck task, a drain) need no list and delete the known machine.
    rows = {view.id: view for view in unknown.workers}
    assert not of_kind(planned.actions, DeleteOrphan)
    for action in of_kind(planned.actions, Delete):
        view = rows[action.worker_id]
        assert action.machine_id == view.machine_id
        assert action.machine_id is not None or view.slot is None, "a row was closed though its machine may exist"
    assert all(fail.code not in ("MACHINE_GONE", "NO_MACHINE_ID") for fail in of_kind(planned.actions, Fail))


@always
@given(scenarios())
def test_healthy_busy_worker_is_never_failed_or_deleted(scene: Scenario) -> None:
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
    allowed = ("OVER_MAX", "SHUT_DOWN")
    assert all(drained.get(id_, "OVER_MAX") in allowed for id_ in at_work)


@always
@given(scenarios())
def test_busy_draining_worker_lives_until_its_deadline(scene: Scenario) -> None:
    deleted = {action.worker_id for action in of_kind(plan(scene.snapshot, scene.fleet).actions, Delete)}
    for id_, state in build_context(scene.snapshot, scene.fleet).states.items():
        worker = state.worker
        is_at_work = worker.status is WorkerStatus.TERMINATING and state.has_active_task
        if not is_at_work or id_ not in deleted:
            continue
        if not state.is_managed:
            # A manual worker has no deadline: only silence ends it.
            heartbeat_at = worker.last_heartbeat or worker.activated_at or worker.created_at
            lease_s = worker.lease_s if worker.lease_s is not None else scene.fleet.heartbeat_timeout_s
            assert (scene.snapshot.now - heartbeat_at).total_seconds() > lease_s
        elif not state.is_stale and state.presence not in ("missing", "exited"):
            assert worker.terminating_at is not None
            waited = scene.snapshot.now - worker.terminating_at
            assert waited.total_seconds() >= scene.fleet.stop_timeout_s


@always
@given(scenarios())
def test_manual_worker_is_never_drained(scene: Scenario) -> None:
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
@given(st.one_of(scenarios(), priced_scenarios()))
def test_plan_actions_are_consistent(scene: Scenario) -> None:
    planned = plan(scene.snapshot, scene.fleet)
    spawns, drains = of_kind(planned.actions, Spawn), of_kind(planned.actions, Drain)
    assert not (spawns and drains), "spawns and drains in one plan"
    assert len(spawns) <= scene.fleet.max_changes_per_cycle
    assert len(drains) <= scene.fleet.max_changes_per_cycle or scene.snapshot.is_shutting_down
    assert len(of_kind(planned.actions, DeleteOrphan)) <= scene.fleet.max_changes_per_cycle
    assert all(action.reason.strip() for action in planned.actions)
    assert planned.decision.strip()
    assert len(set(planned.actions)) == len(planned.actions), "duplicate action"
    failed = {slot.slot for slot in scene.snapshot.slots if slot.is_failed}
    failed |= {action.slot for action in of_kind(planned.actions, FailSlot)}
    assert not failed & {spawn.slot for spawn in spawns}, "a failed slot is never filled"
    if scene.snapshot.is_paused or scene.snapshot.is_shutting_down:
        assert not spawns


@always
@given(st.one_of(scenarios(), priced_scenarios()))
def test_total_hold_allows_no_action_on_workers(scene: Scenario) -> None:
    planned = plan(scene.snapshot, scene.fleet)
    if planned.hold is not None and planned.hold.is_total:
        # A shutdown still drains workers: they may finish their tasks.
        allowed = (Promote, RaiseAlert, Drain) if scene.snapshot.is_shutting_down else (Promote, RaiseAlert)
        assert all(isinstance(action, allowed) for action in planned.actions)


@always
@given(scenarios())
def test_plan_is_deterministic(scene: Scenario) -> None:
    assert plan(scene.snapshot, scene.fleet) == plan(scene.snapshot, scene.fleet)


@always
@given(scenarios())
def test_drains_never_go_below_the_minimum(scene: Scenario) -> None:
    planned = plan(scene.snapshot, scene.fleet)
    if of_kind(planned.actions, Drain) and not scene.snapshot.is_shutting_down:
        assert staying_after(scene, planned) >= scene.fleet.min_workers


def staying_after(scene: Scenario, planned: Plan) -> int:
    after = apply(planned, scene.snapshot, scene.fleet)
    return sum(
        view.slot is not None and view.status in (WorkerStatus.SPAWNING, WorkerStatus.ACTIVE) for view in after.workers
    )


# ------------------------------------------------------------------------------------------------- billing and budgets


@always
@given(scenarios())
def test_idle_drains_happen_only_in_termination_windows(scene: Scenario) -> None:
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
        assert not view.running, "a busy worker drains for billing"
        window = next_window(unit_s, view.machine_at or view.created_at, scene.snapshot.now, cycle_interval_s)
        assert window.opens <= scene.snapshot.now < window.boundary


@always
@given(st.one_of(scenarios(), priced_scenarios()), st.floats(0, 1), st.sampled_from((0.0, 1.0, 9999.0)), st.booleans())
def test_usual_cycle_gaps_do_not_change_decisions(scene: Scenario, share: float, longer_s: float, is_now: bool) -> None:
    """A single longer gap, the last or the one before, is an outage."""
    usual_s, other_s = share * scene.fleet.poll_interval_s, scene.fleet.poll_interval_s + longer_s
    last_s, before_s = (other_s, usual_s) if is_now else (usual_s, other_s)
    last = scene.snapshot.now - timedelta(seconds=last_s)

    def decided(gaps_s: tuple[float, ...]) -> Plan:
        planner_state = with_state(scene.snapshot.planner_state, planned_at=last, gaps_s=gaps_s)
        planned = plan(replace(scene.snapshot, planner_state=planner_state), scene.fleet)
        return replace(planned, planner_state=with_state(planned.planner_state, gaps_s=()))

    assert decided((before_s,)) == decided(())


@often
@given(priced_scenarios())
def test_spent_budget_stops_spawning(scene: Scenario) -> None:
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
@given(priced_scenarios())
def test_spawns_stay_within_remaining_budget(scene: Scenario) -> None:
    """At the highest known price. Starting workers without a known price count."""
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
@given(scenarios())
def test_no_budget_means_no_budget_alerts(scene: Scenario) -> None:
    paid = replace(scene.snapshot, spending=(Spending("EUR", 10**12, 10**12, 10**12),))
    assert plan(paid, scene.fleet) == plan(scene.snapshot, scene.fleet)
