"""Scaling: turns the policy's proposal into spawns (stages/spawning.py) or drains (stages/draining.py).

Only workers that the control plane spawned count. A worker that a person started claims tasks and shortens the queue,
but it may leave at any moment and may serve other queues. It neither replaces a spawn nor counts towards a limit.
A worker that a person paused does not count as capacity and is not drained.

Where billing periods are long (policy/billing.py), an idle worker stays and claims tasks until shortly before its
period ends. If it is spare and idle then, it drains; otherwise it is considered again at the end of the next period.
"""

from dataclasses import replace

from windlass.model.action import Action, Requeue
from windlass.model.plural import plural
from windlass.model.worker import WorkerStatus
from windlass.policy import billing
from windlass.policy.billing import TerminationWindow
from windlass.policy.planning_context import PlanningContext
from windlass.policy.scale import POLICIES, Demand, ScalingDecision
from windlass.policy.stages.draining import drain_all, drain_misplaced, drain_slotless, drain_workers
from windlass.policy.stages.failure_rate import hold_on_failure_rate, hold_on_late_machines
from windlass.policy.stages.provider_backoff import apply_provider_backoff
from windlass.policy.stages.rollout import count_policy_spawns, replace_workers, spare_workers
from windlass.policy.stages.spawning import scaling_interval_left_s, spawn_workers
from windlass.policy.worker_state import WorkerState


def scale(context: PlanningContext) -> list[Action]:
    """Spawn or drain, never both in one cycle. Writes the decision."""
    alerts = [*hold_on_failure_rate(context), *hold_on_late_machines(context), *apply_provider_backoff(context)]
    leaving = context.failed_ids | context.deleted_ids
    staying = [
        state
        for state in context.states.values()
        if state.is_managed
        and state.worker.status in (WorkerStatus.SPAWNING, WorkerStatus.ACTIVE)
        and state.worker.id not in leaving
    ]
    windows = _termination_windows(context, staying)
    demand = _demand(context, staying, windows)

    # Workers that may all drain together need earlier windows if the provider deletes slowly.
    traits, most = context.snapshot.traits, max(0, len(staying) - context.fleet.min_workers)
    ids = [state.worker.id for state in demand.idle[:most] if state.worker.id in windows]
    staggered = billing.stagger_windows(traits.billing_unit_s, [windows[id_] for id_ in ids], traits.deletions_per_s)
    windows |= dict(zip(ids, staggered, strict=True))
    demand = replace(demand, opens_at={worker_id: window.opens for worker_id, window in windows.items()})

    proposal = POLICIES[context.fleet.policy](demand)
    is_over = proposal.is_over_capacity or len(staying) > context.fleet.max_workers
    over_since = (context.planner_state.scaling.over_capacity_since or context.now) if is_over else None
    newest = context.snapshot.queue.newest_task_id
    context.remember_in("scaling", over_capacity_since=over_since, adaptive=proposal.memory, newest_task_id=newest)
    if context.snapshot.is_shutting_down:
        return [*alerts, *drain_all(context, staying)]
    # First, because their machines take up room for spawns.
    changes = drain_slotless(context)
    changes = changes or spawn_workers(context, demand, staying, proposal)
    count_policy_spawns(context, changes)
    # Even if spawns are postponed: a person may have excluded the place for legal reasons.
    changes = changes or drain_misplaced(context, staying)
    changes = changes or replace_workers(context, staying, windows)
    proposal = replace(proposal, spare=spare_workers(context, staying, proposal.spare))
    # A fleet whose spawns are only postponed has no worker to spare, unless the budget forces it.
    if not changes and (not context.is_cut_short or context.over_budget_reason is not None):
        changes = drain_workers(context, demand, staying, proposal, windows)
    if not context.decision:
        context.decision = _no_change_reason(context, demand, staying, proposal, windows)
    return [*alerts, *changes]


def _termination_windows(context: PlanningContext, staying: list[WorkerState]) -> dict[str, TerminationWindow]:
    """When each worker can drain without being billed again. Empty where billing periods are short."""
    unit_s, cycle_s = context.snapshot.traits.billing_unit_s, context.cycle_interval_s
    if not billing.is_worth_waiting(unit_s, cycle_s):
        return {}
    windows = {}
    for worker in (state.worker for state in staying):
        since = worker.bill.since if worker.bill is not None else worker.machine_at or worker.created_at
        windows[worker.id] = billing.next_window(unit_s, since, context.now, cycle_s)
    return windows


def _demand(context: PlanningContext, staying: list[WorkerState], windows: dict[str, TerminationWindow]) -> Demand:
    # A machine that is late may never join: it holds its slot, but does not count as capacity.
    counted = [state for state in staying if not state.worker.is_paused and not state.is_late]
    # Tasks that this plan takes from workers count as queued, so that a replacement is spawned in the same cycle.
    requeued = {action.worker_id for action in context.actions if isinstance(action, Requeue)}
    losing = context.failed_ids | context.deleted_ids | requeued
    if context.fleet.engine is not None:
        # Tasks that a dispatcher (never spawned by the fleet) claimed and did not place count as queued already.
        losing = {id_ for id_ in losing if id_ in context.states and context.states[id_].is_managed}
    returned = sum(len(context.states[id_].worker.running) if id_ in context.states else 1 for id_ in losing)
    unit_s = context.snapshot.traits.billing_unit_s
    return Demand(
        queue=replace(context.snapshot.queue, queued=context.snapshot.queue.queued + returned),
        active=tuple(state for state in counted if not state.is_booting),
        booting=tuple(state for state in counted if state.is_booting),
        fleet=context.fleet,
        billed_until={worker_id: window.boundary for worker_id, window in windows.items()},
        now=context.now,
        # Applies without a worker, too: the first spawn costs a billing period.
        billing_unit_s=unit_s if billing.is_worth_waiting(unit_s, context.cycle_interval_s) else 1,
        is_free=context.snapshot.traits.host is not None,
        memory=context.planner_state.scaling.adaptive,
    )


def _no_change_reason(
    context: PlanningContext,
    demand: Demand,
    staying: list[WorkerState],
    proposal: ScalingDecision,
    windows: dict[str, TerminationWindow],
) -> str:
    max_workers = context.fleet.max_workers
    if context.planner_state.hold is not None:
        return f"hold: {context.planner_state.hold.reason}"
    if context.snapshot.is_paused:
        # Paused workers do not count for the policy, so its numbers would say that there are none.
        return f"paused: {demand.queue.queued_text}, {plural(len(staying), 'worker')}"
    if len(staying) >= max_workers and (proposal.spawn > 0 or proposal.target > max_workers):
        return f"at max_workers ({max_workers}): {proposal.reason}"
    if proposal.spawn > 0:
        left_s = scaling_interval_left_s(context)
        return f"waiting: min_scaling_interval has {left_s:.0f} s left; {proposal.reason}"
    kept = [windows[state.worker.id] for state in proposal.spare if state.worker.id in windows]
    if kept:
        # A clock time, not a countdown: a cycle with the same decision as the last one is not stored again.
        billed_until = min(window.boundary for window in kept)
        return f"no change: {proposal.reason}; {len(kept)} idle kept, first billed until {billed_until:%H:%M:%S} UTC"
    if demand.queue.queued == 0 and not staying:
        return "queue empty, no workers"
    return f"no change: {proposal.reason}"
