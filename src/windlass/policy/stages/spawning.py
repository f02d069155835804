"""Decides how many workers to spawn and into which slots.

The policy, the minimum or a person wants workers. Limits then apply in this order: the scaling interval, max_workers,
holds, probes after failures, the budget, max_changes_per_cycle, and free slots.
"""

from itertools import islice

from windlass.model.action import Action, Spawn
from windlass.model.machine import MachineState
from windlass.model.plural import plural
from windlass.model.worker import WorkerStatus
from windlass.policy.budget import is_price_known
from windlass.policy.planning_context import PlanningContext
from windlass.policy.scale import Demand, ScalingDecision
from windlass.policy.stages import failure_rate, provider_backoff
from windlass.policy.worker_state import WorkerState

# Holds under which a person's request may still spawn one probe.
PROBE_ON_REQUEST = frozenset({failure_rate.CODE, *provider_backoff.CODES})


def spawn_workers(
    context: PlanningContext, demand: Demand, staying: list[WorkerState], proposal: ScalingDecision
) -> list[Action]:
    if context.snapshot.is_paused or context.is_stopped:
        return []
    wanted, reason, cause = _wanted_workers(context, demand, staying, proposal)
    if wanted <= 0:
        return []
    allowed, requested, hold = wanted, context.snapshot.requested, context.planner_state.hold
    if hold is not None and hold.code in PROBE_ON_REQUEST and requested > 0:
        allowed, reason, cause = min(wanted, requested), f"{requested} requested by a person", "requested"
    elif hold is not None:
        context.is_cut_short = True
        context.decision = f"hold: {hold.reason}; would spawn {wanted}: {reason}"
        return []

    cap, cap_reason = _spawn_cap(context, staying)
    taken = _taken_slots(context)
    slots = _fillable_slots(context, taken, min(allowed, cap))
    free = context.fleet.max_workers - len(taken)
    context.is_cut_short = len(slots) < min(wanted, free) or proposal.is_first_step
    context.decision = f"spawn {len(slots)}: {reason}"
    if len(slots) < wanted:
        if len(slots) == allowed:
            limit = "only requested workers while on hold"
        elif len(slots) == free:
            limit = "no free slot"
        elif len(slots) < cap:
            limit = "machines that are not deleted yet count towards max_workers"
        else:
            limit = cap_reason
        context.decision = f"spawn {len(slots)} of {wanted}: {reason}; {limit}"
    if slots:
        context.remember_in("scaling", spawned_at=context.now)
    return [Spawn(slot, reason, cause) for slot in slots]


def _wanted_workers(
    context: PlanningContext, demand: Demand, staying: list[WorkerState], proposal: ScalingDecision
) -> tuple[int, str, str]:
    """How many more the policy, a person or the minimum wants, whichever is most; why; and the cause as Spawn has it.

    At most max_workers.
    """
    fleet, requested = context.fleet, context.snapshot.requested
    wanted, reason = proposal.spawn, proposal.reason
    counted = sum(not state.is_late for state in staying)
    idle_cause = "min_workers" if counted < fleet.min_workers else "idle_buffer"
    cause = "queue_depth" if demand.queue.queued > 0 else idle_cause
    if proposal.target > fleet.max_workers:
        reason += f", max_workers {fleet.max_workers}"
    # Two spawns in short order would answer the same tasks, so the policy waits; but not for the first worker.
    if demand.capacity > 0 and scaling_interval_left_s(context) > 0:
        wanted = 0
    if requested > wanted:
        wanted, reason, cause = requested, f"{requested} requested by a person", "requested"
    below_min = fleet.min_workers - counted
    if below_min > wanted:
        wanted, reason = below_min, f"{plural(counted, 'worker')}, min_workers {fleet.min_workers}"
        cause = "min_workers"
    return min(wanted, fleet.max_workers - len(staying)), reason, cause


def scaling_interval_left_s(context: PlanningContext) -> float:
    """Seconds until min_scaling_interval_s has passed since the last spawn. 0: it has."""
    spawned_at = context.planner_state.scaling.spawned_at
    return 0.0 if spawned_at is None else max(0.0, context.fleet.min_scaling_interval_s - context.age_s(spawned_at))


def slots_to_fill(context: PlanningContext, staying: list[WorkerState], wanted: int) -> tuple[list[int], str]:
    """Slots for workers that a rollout wants, within every limit on spawning; and the limit if there are fewer."""
    cap, cap_reason = _spawn_cap(context, staying)
    # Terminating workers have their machines still.
    taken = _taken_slots(context)
    slots = _fillable_slots(context, taken, min(wanted, cap))
    return slots, cap_reason if cap < wanted else "no free slot"


def spawnable_slots(context: PlanningContext, staying: list[WorkerState]) -> int:
    """Slots for requested workers once all terminating workers are gone."""
    failed = {slot for slot in context.failed_slots if slot < context.fleet.max_workers}
    return context.fleet.max_workers - len(failed | {state.worker.slot for state in staying})


def _spawn_cap(context: PlanningContext, staying: list[WorkerState]) -> tuple[int, str]:
    """The most that may be spawned in this cycle, and the limit in words."""
    rate, most = context.planner_state.failure_rate, context.fleet.max_changes_per_cycle
    # After a failure-rate hold or a refusal: one probe at a time, until one succeeds.
    if rate.trips:
        return 0 if any(failure_rate.is_probe(state, rate) for state in staying) else 1, "one probe at a time"
    if context.planner_state.provider_backoff is not None:
        return 0 if provider_backoff.is_probe_in_flight(context) else 1, "one probe at a time"
    if context.affordable_spawns is not None and context.affordable_spawns < most:
        is_known = is_price_known(context.snapshot)
        limit = "budget leaves no room for more" if is_known else "price unknown, the first machine shows it"
        return context.affordable_spawns, limit
    return most, f"max_changes_per_cycle {most}"


def _taken_slots(context: PlanningContext) -> set[int]:
    """Slots that are failed, or whose worker this plan does not delete."""
    deleted = context.deleted_ids
    taken = {state.worker.slot for state in context.states.values() if state.worker.id not in deleted}
    taken |= context.failed_slots
    return {slot for slot in taken if slot is not None and slot < context.fleet.max_workers}


def _fillable_slots(context: PlanningContext, taken: set[int], most: int) -> list[int]:
    """Slots to fill now, so that never more than max_workers machines exist at the same time.

    Orphaned machines and machines that are being deleted take up room. The slot of a worker that this plan deletes is
    reserved for its replacement, even if other slots are empty: a component keeps its number, and a restart loop is
    counted where it happens. The next cycle spawns it, a moment later; into another slot if the deletion takes longer.
    """
    max_workers = context.fleet.max_workers
    if context.snapshot.machines is None:
        orphans = len(context.planner_state.orphans.orphan_since)  # as the last list showed
    else:
        extra = [*context.unowned, *(machine for machine, _ in context.duplicates)]
        extra += [machine for _, machine in context.slotless]
        orphans = sum(machine.state is not MachineState.EXITED for machine in extra)
    limit = max_workers - orphans

    rows = {state.worker.slot: state.worker.id for state in context.states.values() if state.is_managed}
    empty = (slot for slot in range(max_workers) if slot not in taken and slot not in rows)
    lowest = islice(empty, max(0, min(most, limit - len(rows))))
    freed = [slot for slot in rows if slot is not None and slot < max_workers and slot not in taken]
    remaining = len(rows) - sum(id_ in context.deleted_ids for id_ in rows.values())
    # A machine whose deletion began in an earlier cycle may take long: its slot comes last.
    ending = (WorkerStatus.ERROR, WorkerStatus.TERMINATING)
    slow = {state.worker.slot for state in context.states.values() if state.worker.status in ending}
    chosen = sorted([*lowest, *freed], key=lambda slot: (slot in slow, slot))[: max(0, min(most, limit - remaining))]
    return [slot for slot in chosen if slot not in rows]
