"""From a policy's wish to who is hired and who is let go, within the limits that hold for every policy.

The control loop counts what it hired. A worker that a person started takes tasks, and so makes the queue shorter, but
it may leave at any moment and may serve other queues: no hiring is saved, and no limit used up, on its account. A
paused worker is what a person made it: it does not count as capacity, and it is not let go.

Where time is paid in long units (policy/billing.py), a spare worker stays and claims whatever comes until shortly
before what is paid for it is used up. Then it goes, if it is spare and idle at that moment; at work, or needed, it is
looked at again when the next unit ends.
"""

from dataclasses import replace
from datetime import datetime, timedelta
from itertools import islice

from windlass.model.action import Action, Drain, FailSlot, Requeue, Spawn
from windlass.model.machine import MachineState
from windlass.model.worker import WorkerStatus
from windlass.policy import billing
from windlass.policy.billing import TerminationWindow
from windlass.policy.budget import is_price_known
from windlass.policy.derive import WorkerState
from windlass.policy.planning_context import PlanningContext
from windlass.policy.scale import POLICIES, Demand, ScalingDecision
from windlass.policy.stages import budget
from windlass.policy.stages import failure_rate as guard
from windlass.policy.stages import provider_backoff as refusal

ASKED_FOR = "asked for by hand"
PRICE_UNKNOWN = "what one costs is not known yet, and the budget waits for the first to tell"
TRIED_BY_HAND = frozenset({guard.CODE, *refusal.CODES})


def scale(context: PlanningContext) -> list[Action]:
    """Hire, or let go, never both."""
    alerts = [*guard.guard_hiring(context), *refusal.heed_refusal(context)]
    staying = _staying(context)
    departures = _departures(context, staying)
    demand = _demand(context, staying, departures)
    departures |= _with_turns(context, demand, staying, departures)
    wish = POLICIES[context.fleet.policy](demand)
    is_over = wish.is_over_capacity or len(staying) > context.fleet.max_workers
    context.remember_in(
        "scaling",
        over_capacity_since=(context.planner_state.scaling.over_capacity_since or context.now) if is_over else None,
    )
    if context.snapshot.is_shutting_down:
        return [*alerts, *_shut_down(context, staying)]
    changes = _hire(context, demand, staying, wish)
    # Whoever would hire as soon as it can has nobody to spare.
    if not changes and (not context.is_cut_short or context.over_budget is not None):
        changes = _let_go(context, demand, staying, wish, departures)
    if not context.decision:
        context.decision = _standing_still(context, staying, wish, departures)
    return [*alerts, *changes]


def _standing_still(
    context: PlanningContext,
    staying: list[WorkerState],
    wish: ScalingDecision,
    departures: dict[str, TerminationWindow],
) -> str:
    if context.planner_state.hold is not None:
        return f"holding: {context.planner_state.hold.reason}"
    if context.snapshot.is_paused:
        return f"paused: {wish.reason}"
    if wish.hire > 0:
        is_full = len(staying) >= context.fleet.max_workers
        return f"{'full' if is_full else 'waiting until the next hiring may be'}: {wish.reason}"
    kept = [departures[state.worker.id] for state in wish.spare if state.worker.id in departures]
    if kept:
        # By the clock, not from now: a cycle that decides what the last one decided is not stored again.
        paid_until = min(departure.boundary for departure in kept)
        return f"steady: {wish.reason}; {len(kept)} kept, as the first is paid until {paid_until:%H:%M:%S} UTC"
    return f"steady: {wish.reason}"


def _staying(context: PlanningContext) -> list[WorkerState]:
    """Those hired, starting or working, whom nothing in this plan ends."""
    leaving = context.failed_ids | context.deleted_ids
    return [
        state
        for state in context.states.values()
        if state.is_managed
        and state.worker.status in (WorkerStatus.SPAWNING, WorkerStatus.ACTIVE)
        and state.worker.id not in leaving
    ]


def _departures(context: PlanningContext, staying: list[WorkerState]) -> dict[str, TerminationWindow]:
    """When each could leave without being paid for again. Empty where time is paid as it passes."""
    unit_s, pace_s = context.snapshot.traits.billing_unit_s, context.pace_s
    if not billing.is_worth_waiting(unit_s, pace_s):
        return {}
    return {
        state.worker.id: billing.next_departure(unit_s, _billed_since(state), context.now, pace_s) for state in staying
    }


def _with_turns(
    context: PlanningContext, demand: Demand, staying: list[WorkerState], departures: dict[str, TerminationWindow]
) -> dict[str, TerminationWindow]:
    """The same for those who could all go, where they cannot all be deleted at once."""
    traits, most = context.snapshot.traits, max(0, len(staying) - context.fleet.min_workers)
    ids = [state.worker.id for state in demand.idle[:most] if state.worker.id in departures]
    windows = billing.one_after_another(
        traits.billing_unit_s, [departures[worker_id] for worker_id in ids], traits.deletions_per_s
    )
    return dict(zip(ids, windows, strict=True))


def _billed_since(state: WorkerState) -> datetime:
    worker = state.worker
    return worker.bill.since if worker.bill is not None else worker.machine_at or worker.created_at


def _demand(context: PlanningContext, staying: list[WorkerState], departures: dict[str, TerminationWindow]) -> Demand:
    counted = [state for state in staying if not state.worker.is_paused]
    # Tasks that this plan takes from workers wait again: who replaces those is hired in the same cycle.
    losing = context.failed_ids | context.deleted_ids | _requeued_ids(context)
    if context.fleet.engine is not None:
        # But what a dispatcher, whom nobody hires, had claimed and not placed was waiting all along.
        losing = {id_ for id_ in losing if id_ in context.states and context.states[id_].is_managed}
    returned = sum(len(context.states[id_].worker.running) if id_ in context.states else 1 for id_ in losing)
    return Demand(
        queue=replace(context.snapshot.queue, queued=context.snapshot.queue.queued + returned),
        active=tuple(state for state in counted if not state.is_booting),
        booting=tuple(state for state in counted if state.is_booting),
        fleet=context.fleet,
        paid_until={worker_id: departure.boundary for worker_id, departure in departures.items()},
    )


def _requeued_ids(context: PlanningContext) -> set[str]:
    return {action.worker_id for action in context.actions if isinstance(action, Requeue)}


# ------------------------------------------------------------------------------------------------------------- hiring


def _hire(context: PlanningContext, demand: Demand, staying: list[WorkerState], wish: ScalingDecision) -> list[Action]:
    if context.snapshot.is_paused or context.is_stopped:
        return []
    wanted, reason = _wanted(context, demand, staying, wish)
    if wanted <= 0:
        return []
    hold, allowed = context.planner_state.hold, wanted
    if hold is not None and hold.code in TRIED_BY_HAND and context.snapshot.requested > 0:
        # A person who asks may try what we would not: one at a time, as a probe.
        allowed, reason = min(wanted, context.snapshot.requested), ASKED_FOR
    elif hold is not None:
        context.is_cut_short = True
        context.decision = f"holding ({hold.reason}), would hire {wanted}: {reason}"
        return []
    taken, cap = _taken_slots(context), _cap(context, staying)
    free = context.fleet.max_workers - len(taken)
    slots = _with_room(context, taken, min(allowed, cap))
    context.is_cut_short = len(slots) < min(wanted, free) or wish.is_first_step
    context.decision = f"hiring {len(slots)}: {reason}" if slots else f"wanting {wanted} more: {reason}"
    if len(slots) < wanted:
        why = "only what was asked for, while holding" if len(slots) == allowed else None
        why = why or _what_limits(context, cap, len(slots), free)
        context.decision += f" ({wanted - len(slots)} fewer than wanted: {why})"
    if slots:
        context.remember_in("scaling", spawned_at=context.now)
    return [Spawn(slot, reason) for slot in slots]


def _wanted(
    context: PlanningContext, demand: Demand, staying: list[WorkerState], wish: ScalingDecision
) -> tuple[int, str]:
    """How many more the policy, the minimum or a person wants, within the maximum."""
    fleet, last = context.fleet, context.planner_state.scaling.spawned_at
    wanted, reason = wish.hire, wish.reason
    # Two hirings in short order answer the same rush; but the minimum, and the first worker, do not wait.
    if last is not None and context.age_s(last) < fleet.min_scaling_interval_s and demand.capacity > 0:
        wanted = 0
    if context.snapshot.requested > wanted:
        wanted, reason = context.snapshot.requested, ASKED_FOR
    below_min = fleet.min_workers - len(staying)
    if below_min > wanted:
        wanted, reason = below_min, f"{len(staying)} workers, the minimum is {fleet.min_workers}"
    return min(wanted, fleet.max_workers - len(staying)), reason


def _cap(context: PlanningContext, staying: list[WorkerState]) -> int:
    planner_state = context.planner_state
    if planner_state.failure_rate.trips:
        # After a trip, one at a time until one of them works.
        return 0 if any(guard.is_probe(state, planner_state.failure_rate) for state in staying) else 1
    if planner_state.provider_backoff is not None:
        return 0 if refusal.is_tried(context) else 1
    most = context.fleet.max_changes_per_cycle
    return most if context.affordable is None else min(most, context.affordable)


def _what_limits(context: PlanningContext, cap: int, hired: int, free: int) -> str:
    if hired == free:
        return "no free slot"
    if hired < cap:
        return "machines that are on their way out take up the room"
    if context.planner_state.failure_rate.trips or context.planner_state.provider_backoff:
        return "one probe at a time"
    most = context.fleet.max_changes_per_cycle
    if cap == most:
        return f"at most {most} at once"
    return "the budget has room for no more" if is_price_known(context.snapshot) else PRICE_UNKNOWN


def _taken_slots(context: PlanningContext) -> set[int]:
    """Slots that are failed, or whose worker this plan does not delete."""
    gone = context.deleted_ids
    taken = {state.worker.slot for state in context.states.values() if state.worker.id not in gone}
    taken |= {slot.slot for slot in context.snapshot.slots if slot.is_failed}
    taken |= {action.slot for action in context.actions if isinstance(action, FailSlot)}
    return {slot for slot in taken if slot is not None and slot < context.fleet.max_workers}


def _room_for_requests(context: PlanningContext, staying: list[WorkerState]) -> int:
    """How many more could be hired once everybody who is leaving has left."""
    failed = {slot.slot for slot in context.snapshot.slots if slot.is_failed and slot.slot < context.fleet.max_workers}
    failed |= {action.slot for action in context.actions if isinstance(action, FailSlot)}
    return context.fleet.max_workers - len(failed | {state.worker.slot for state in staying})


def _with_room(context: PlanningContext, taken: set[int], most: int) -> list[int]:
    """Of the slots not taken, those to fill now, so that no more machines than the maximum exist at any moment.

    A slot whose worker this plan deletes is filled only after the deletion. Any other must leave room for every machine
    there is: strays, and those being deleted, too.
    """
    rows = {state.worker.slot: state.worker.id for state in context.states.values() if state.is_managed}
    limit = context.fleet.max_workers - _count_strays(context)
    empty = (slot for slot in range(context.fleet.max_workers) if slot not in taken and slot not in rows)
    lowest = islice(empty, max(0, min(most, limit - len(rows))))
    freed = [slot for slot in rows if slot is not None and slot < context.fleet.max_workers and slot not in taken]
    staying = len(rows) - sum(id_ in context.deleted_ids for id_ in rows.values())
    # A machine that was asked to end before this cycle may take its time over it: its slot comes last.
    over = (WorkerStatus.ERROR, WorkerStatus.TERMINATING)
    lingering = {state.worker.slot for state in context.states.values() if state.worker.status in over}
    return sorted([*lowest, *freed], key=lambda slot: (slot in lingering, slot))[: max(0, min(most, limit - staying))]


def _count_strays(context: PlanningContext) -> int:
    """Machines that are billed and belong to no worker; as far as the last list said, when there is none now."""
    if context.snapshot.machines is None:
        return len(context.planner_state.orphans.orphan_since)
    orphans = [*context.unowned, *(double for double, _ in context.doubles)]
    return sum(machine.state is not MachineState.EXITED for machine in orphans)


# --------------------------------------------------------------------------------------------------------- letting go


def _shut_down(context: PlanningContext, staying: list[WorkerState]) -> list[Action]:
    """Everybody at once, paused or not, and under any hold: a person wants it, and they may finish what they have."""
    left = sum(state.is_managed for state in context.states.values())
    context.decision = f"winding down: {left} left" + (f", letting {len(staying)} go" if staying else "")
    return [Drain(state.worker.id, "WOUND_DOWN", "its fleet is being wound down") for state in staying]


def _let_go(
    context: PlanningContext,
    demand: Demand,
    staying: list[WorkerState],
    wish: ScalingDecision,
    departures: dict[str, TerminationWindow],
) -> list[Action]:
    if context.is_stopped:
        return []
    too_many = f"more workers than the maximum of {context.fleet.max_workers}"
    forced = [Drain(s.worker.id, "OVER_MAX", too_many) for s in _over_max(context, demand, staying)]
    if context.over_budget is not None:
        reason = context.over_budget
        forced += [Drain(s.worker.id, budget.CODE, reason) for s in _unpaid(context, staying, departures)]
    idle = [
        Drain(s.worker.id, *_why_spare(context, s, wish, departures.get(s.worker.id)))
        for s in _rested(context, staying, wish, departures)
    ]
    # Whoever must go for several reasons goes for the first.
    first: dict[str, Drain] = {}
    for drain in (*forced, *idle):
        first.setdefault(drain.worker_id, drain)
    chosen = list(first.values())
    going = chosen[: context.fleet.max_changes_per_cycle]
    if going:
        context.is_cut_short = len(going) < len(chosen)
        context.decision = f"letting {len(going)} go: {forced[0].reason if forced else wish.reason}"
    return [*going]


def _why_spare(
    context: PlanningContext, state: WorkerState, wish: ScalingDecision, departure: TerminationWindow | None
) -> tuple[str, str]:
    """The code and the reason."""
    idle = f"idle {state.idle_s or 0.0:.0f} s"
    if departure is None:
        return "IDLE", f"{idle}; {wish.reason}"
    left_s = (departure.boundary - context.now).total_seconds()
    what = "hour" if context.snapshot.traits.billing_unit_s == billing.HOUR.total_seconds() else "paid time"
    why = "nothing waits" if context.snapshot.queue.queued == 0 else wish.reason
    return "BILLING_HOUR_END", f"{idle}, its {what} ends in {left_s:.0f} s, {why}"


def _unpaid(
    context: PlanningContext, staying: list[WorkerState], departures: dict[str, TerminationWindow]
) -> list[WorkerState]:
    """Who is about to be paid for again. At work, a worker is told early enough to finish within what is paid."""
    grace = timedelta(seconds=context.fleet.stop_timeout_s)

    def is_due(state: WorkerState) -> bool:
        departure = departures.get(state.worker.id)
        return departure is None or context.now >= departure.opens - (grace if state.has_active_task else timedelta())

    return [state for state in staying if is_due(state)]


def _over_max(context: PlanningContext, demand: Demand, staying: list[WorkerState]) -> list[WorkerState]:
    """The configuration shrank. Idle ones first, then those that started last; all may finish what they have."""
    excess = max(0, len(staying) - context.fleet.max_workers)
    idle_ids = {state.worker.id for state in demand.idle}
    rest = [state for state in staying if state.worker.id not in idle_ids]
    rest.sort(key=lambda state: state.worker.created_at, reverse=True)
    rest.sort(key=lambda state: state.has_active_task)
    return [*demand.idle, *rest][:excess]


def _rested(
    context: PlanningContext,
    staying: list[WorkerState],
    wish: ScalingDecision,
    departures: dict[str, TerminationWindow],
) -> list[WorkerState]:
    """Spare workers that may go: long enough too many, nobody just starting, each idle for long enough.

    Where paid time ends there is one occasion, a few cycles long, and a boot lasts longer: whoever is spare then goes
    though others are starting, as long as the minimum is there without those."""
    fleet, since = context.fleet, context.planner_state.scaling.over_capacity_since
    # A person wants more than the policy does: whoever went for having nothing to do would be hired again at once.
    if context.snapshot.requested > 0 and _room_for_requests(context, staying) > 0:
        return []
    if since is None or context.age_s(since) < fleet.scale_down_grace_s or context.snapshot.is_paused:
        return []
    there = [state for state in staying if not state.is_booting]
    is_anybody_new = any(context.age_s(state.worker.created_at) < fleet.spawn_grace_s for state in staying)
    # Whoever is starting was needed a moment ago. What has changed since may change back before it is there.
    if not departures and (len(there) < len(staying) or is_anybody_new):
        return []
    rested = [state for state in wish.spare if _may_leave(context, state, departures.get(state.worker.id))]
    return rested[: max(0, len(there) - fleet.min_workers)]


def _may_leave(context: PlanningContext, state: WorkerState, departure: TerminationWindow | None) -> bool:
    idle_s, fleet = state.idle_s or 0.0, context.fleet
    if departure is None:
        return idle_s >= fleet.idle_timeout_s
    # It has waited for all that is paid, which is patience enough; but a pause between two tasks is not idleness.
    return context.now >= departure.opens and idle_s >= min(fleet.idle_timeout_s, fleet.poll_interval_s)
