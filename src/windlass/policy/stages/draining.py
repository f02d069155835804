"""Decides which workers drain: without a slot, misplaced, above max_workers, over budget, idle and spare, or all at a
shutdown.

A draining worker claims no more tasks and finishes those it has. stages/termination.py then deletes its machine.
"""

from datetime import timedelta

from windlass.model.action import Action, Drain
from windlass.model.plural import plural
from windlass.model.worker import WorkerStatus
from windlass.policy.billing import HOUR, TerminationWindow
from windlass.policy.placement import MISPLACED
from windlass.policy.planning_context import PlanningContext
from windlass.policy.scale import Demand, ScalingDecision
from windlass.policy.stages import budget
from windlass.policy.stages.spawning import spawnable_slots
from windlass.policy.worker_state import WorkerState


def drain_all(context: PlanningContext, staying: list[WorkerState]) -> list[Action]:
    """Shut the fleet down: all workers at once, paused or not, under any hold. They may finish their tasks."""
    left = sum(state.is_managed for state in context.states.values())
    context.decision = f"shutting down: {left} left" + (f", drain {len(staying)}" if staying else "")
    slotless = [state for state, _ in context.slotless if state.worker.status is WorkerStatus.ACTIVE]
    return [Drain(state.worker.id, "SHUT_DOWN", "fleet is shut down") for state in (*staying, *slotless)]


def drain_misplaced(context: PlanningContext, staying: list[WorkerState]) -> list[Action]:
    """Active workers whose machine is no longer where the fleet wants it, those without a task first."""
    if context.is_stopped:
        return []
    found = [
        (state.has_active_task, Drain(state.worker.id, MISPLACED, own.misplaced))
        for state in staying
        if state.worker.status is WorkerStatus.ACTIVE
        and (own := context.machine_of(state.worker)) is not None
        and own.misplaced is not None
    ]
    found.sort(key=lambda pair: pair[0])
    drains = [drain for _, drain in found[: context.fleet.max_changes_per_cycle]]
    if drains:
        # Their replacements, and other drains, follow in a later cycle, which no longer counts them as capacity.
        context.is_cut_short = True
        context.decision = f"drain {len(drains)} of {len(found)} misplaced: {drains[0].reason}"
    return [*drains]


def drain_slotless(context: PlanningContext) -> list[Action]:
    """Active workers without a slot on machines of the fleet. Their machines are orphaned when they have ended."""
    if context.is_stopped:
        return []
    found = {
        state.worker.id: Drain(state.worker.id, "NO_SLOT", f"machine {machine.id} belongs to no slot: its row was lost")
        for state, machine in context.slotless
        if state.worker.status is WorkerStatus.ACTIVE and state.worker.id not in context.failed_ids
    }
    drains = list(found.values())[: context.fleet.max_changes_per_cycle]
    if drains:
        context.is_cut_short = True
        context.decision = f"drain {len(drains)} of {len(found)} without a slot: {drains[0].reason}"
    return [*drains]


def drain_workers(
    context: PlanningContext,
    demand: Demand,
    staying: list[WorkerState],
    proposal: ScalingDecision,
    windows: dict[str, TerminationWindow],
) -> list[Action]:
    if context.is_stopped:
        return []
    max_workers, grace = context.fleet.max_workers, timedelta(seconds=context.fleet.stop_timeout_s)
    forced: list[Drain] = []

    # max_workers was lowered. Idle workers first, then those without a task, then the newest.
    excess = max(0, len(staying) - max_workers)
    idle_ids = {state.worker.id for state in demand.idle}
    rest = [state for state in staying if state.worker.id not in idle_ids]
    rest.sort(key=lambda state: state.worker.created_at, reverse=True)
    rest.sort(key=lambda state: state.has_active_task)
    above_max = f"{plural(len(staying), 'worker')}, max_workers {max_workers}"
    forced += [Drain(state.worker.id, "OVER_MAX", above_max) for state in [*demand.idle, *rest][:excess]]

    # Over budget: every worker whose billing period ends. A busy one drains early enough to finish its tasks before.
    for state in staying if context.over_budget_reason is not None else ():
        window = windows.get(state.worker.id)
        lead = grace if state.has_active_task else timedelta()
        if window is None or context.now >= window.opens - lead:
            forced.append(Drain(state.worker.id, budget.CODE, context.over_budget_reason or ""))

    spare = _drainable_spare(context, staying, proposal, windows)
    idle = [_idle_drain(context, state, proposal, windows.get(state.worker.id)) for state in spare]
    # A worker with several reasons drains for the first.
    first: dict[str, Drain] = {}
    for drain in (*forced, *idle):
        first.setdefault(drain.worker_id, drain)
    drains = list(first.values())[: context.fleet.max_changes_per_cycle]
    if drains:
        context.is_cut_short = len(drains) < len(first)
        idle_s = min((state.idle_s or 0.0 for state in spare if not state.is_booting), default=0.0)
        needed = len(staying) - len(proposal.spare)
        workers = plural(len(staying), "worker")
        starting = sum(state.is_booting for state in spare)
        why = f"idle {idle_s:.0f} s, {workers}, {needed} needed"
        if starting == len(spare):
            why = f"starting, another was ready first, {workers}, {needed} needed"
        why = forced[0].reason if forced else why
        context.decision = f"drain {len(drains)}: {why}"
    return [*drains]


def _drainable_spare(
    context: PlanningContext,
    staying: list[WorkerState],
    proposal: ScalingDecision,
    windows: dict[str, TerminationWindow],
) -> list[WorkerState]:
    """Spare workers that may drain now: the fleet exceeded its need, and each worker was idle, for long enough."""
    fleet, since = context.fleet, context.planner_state.scaling.over_capacity_since
    # A person requested workers: an idle worker that drains now would be spawned again at once.
    if context.snapshot.requested > 0 and spawnable_slots(context, staying) > 0:
        return []
    if since is None or context.snapshot.is_paused:
        return []
    if proposal.is_timed:
        # The policy decided which workers were idle for long enough, when their billing period ends, and which starting
        # workers are no longer needed.
        spare_ids = {state.worker.id for state in proposal.spare}
        started = [s for s in staying if (not s.is_booting or s.worker.id in spare_ids) and not s.is_late]
        due = [state for state in proposal.spare if _is_window_open(context, windows.get(state.worker.id))]
        return due[: max(0, len(started) - fleet.min_workers)]
    if context.age_s(since) < fleet.scale_down_grace_s:
        return []
    # A starting worker was needed a moment ago, and demand may come back before it is ready: keep the others meanwhile.
    # Not where billing periods are long: a window lasts a few cycles, a boot lasts longer, and waiting costs a period.
    started = [state for state in staying if not state.is_booting and not state.is_late]
    is_any_new = any(context.age_s(state.worker.created_at) < fleet.spawn_grace_s for state in staying)
    if not windows and (len(started) < len(staying) or is_any_new):
        return []
    found = []
    for state in proposal.spare:
        idle_s, window = state.idle_s or 0.0, windows.get(state.worker.id)
        # Within a window one idle cycle is enough; a moment between two tasks is not.
        is_due = _is_window_open(context, window)
        limit_s = fleet.idle_timeout_s if window is None else min(fleet.idle_timeout_s, fleet.poll_interval_s)
        if is_due and idle_s >= limit_s:
            found.append(state)
    return found[: max(0, len(started) - fleet.min_workers)]


def _is_window_open(context: PlanningContext, window: TerminationWindow | None) -> bool:
    return window is None or context.now >= window.opens


def _idle_drain(
    context: PlanningContext, state: WorkerState, proposal: ScalingDecision, window: TerminationWindow | None
) -> Drain:
    if state.is_booting:
        return Drain(state.worker.id, "START_CANCELLED", f"another worker was ready first, {proposal.reason}")
    idle = f"idle {state.idle_s or 0.0:.0f} s"
    if window is None:
        return Drain(state.worker.id, "IDLE", f"{idle}, {proposal.reason}")
    left_s = (window.boundary - context.now).total_seconds()
    is_hour = context.snapshot.traits.billing_unit_s == HOUR.total_seconds()
    period = "billing hour" if is_hour else "billing period"
    why = "queue empty" if context.snapshot.queue.queued == 0 else proposal.reason
    return Drain(state.worker.id, "BILLING_HOUR_END", f"{idle}, {period} ends in {left_s:.0f} s, {why}")
