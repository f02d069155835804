"""Who works, who is broken, and whose tasks go to others."""

from collections import Counter

from windlass.model.action import Action, AttemptRefund, Delete, DeleteOrphan, Fail, FailSlot, Promote, Requeue
from windlass.model.worker import LIVE
from windlass.policy.derive import Lifecycle, WorkerState
from windlass.policy.planning_context import LIST_SHRANK, PlanningContext
from windlass.policy.quarantine import LONELY_FAILURES, QuarantineDecision, describe, is_undecided

# Fewer silent workers than this are an ordinary misfortune; this many, and more than half, look like our own blindness.
MANY_DEAD_MIN = 3
# Whoever lives is heard within this many beats after a database, or we, came back.
BEATS_TO_BE_HEARD = 2
# Restarts of a slot within its window before a person should know.
RESTARTS_TO_TELL = 4
# Cycles without a list of machines before a person should know.
UNLISTED_TO_TELL = 3
# More than this share of the maximum in use is worth a word; of small fleets it is their everyday life.
NEAR_MAX_SHARE = 0.8
# How long a machine may take to go before a person should know.
UNDELETED_TO_TELL_S = 300.0


def promote(context: PlanningContext) -> list[Action]:
    """Spawning workers that have been heard of are active."""
    return [
        Promote(state.worker.id, f"heartbeat {state.heartbeat_age_s:.0f} s ago")
        for state in context.states.values()
        if state.should_promote and not state.should_terminate
    ]


def brake(context: PlanningContext) -> list[Action]:
    """Before silence counts: could it be us who did not hear?

    When most workers fall silent at once, the fault is more likely the network's or the database's than theirs, and
    nothing is touched for one more heartbeat time-out. When there was no cycle for a while, the database may have been
    away, and whoever lives gets two beats to be heard.
    """
    alerts = _warn_of_list(context)
    heard = [s for s in context.states.values() if s.has_heartbeat and s.worker.status in LIVE]
    silent = [s for s in heard if s.is_stale]
    is_many = len(silent) >= MANY_DEAD_MIN and len(silent) * 2 > len(heard)
    since = context.planner_state.health.mass_silence_since
    if not silent or (since is None and not is_many and not _was_away(context)):
        context.remember_in("health", mass_silence_since=None)
        return alerts
    since = since or context.now
    context.remember_in("health", mass_silence_since=since)
    if is_many:
        if context.age_s(since) >= context.fleet.heartbeat_timeout_s:
            return alerts
        what = f"{len(silent)} of {len(heard)} workers fell silent at once"
        context.hold("TOO_MANY_DEAD", what, is_total=True)
        return alerts + context.alert("TOO_MANY_DEAD", f"{what}: nothing is touched")
    if context.age_s(since) < BEATS_TO_BE_HEARD * context.fleet.heartbeat_interval_s:
        what = f"nobody watched for a while; {len(silent)} silent workers may be heard yet"
        context.hold("WAS_AWAY", what, is_total=True)
        return alerts + context.alert("WAS_AWAY", what)
    return alerts


def _warn_of_list(context: PlanningContext) -> list[Action]:
    hold = context.planner_state.hold
    return context.alert(hold.code, hold.reason) if hold is not None and hold.code == LIST_SHRANK else []


def _was_away(context: PlanningContext) -> bool:
    """Whether there was no cycle for so long that heartbeats may have been missed."""
    last = context.snapshot.planner_state.cadence.planned_at
    return last is None or context.age_s(last) > context.fleet.heartbeat_timeout_s / 2


def fail_broken(context: PlanningContext) -> list[Action]:
    """Broken workers become `error`, and their tasks go to others."""
    if context.is_stopped:
        return []
    actions: list[Action] = []
    for state in context.states.values():
        if not state.should_terminate or has_no_machine(state):
            continue
        # Whatever it ends of: what speaks against it is known in this cycle, and never again.
        verdict = context.verdicts.get(state.worker.id)
        if verdict is not None and verdict.is_trial:
            context.remember_in("health", quarantine_trial_at=context.now)
        evidence = verdict.suspect if verdict is not None else None
        code, reason = state.code or "BROKEN", state.reason or "broken"
        actions.append(Fail(state.worker.id, code, reason, evidence, _acquittal(context, state, verdict)))
    return actions


def _acquittal(
    context: PlanningContext, state: WorkerState, verdict: QuarantineDecision | None
) -> AttemptRefund | None:
    """A dead GPU needs no comparison with others, nor a row of failures."""
    has_dead_gpu = context.fleet.has_gpu and (
        state.worker.vram_total_mb == 0 or state.lifecycle is Lifecycle.ACTIVE_GPU_NOT_DETECTED
    )
    if has_dead_gpu and state.worker.failing_since is not None:
        return AttemptRefund(state.worker.failing_since)
    return AttemptRefund(verdict.suspect.since, verdict.is_trial) if verdict is not None else None


def has_no_machine(state: WorkerState) -> bool:
    """Nobody broke, because there never was anybody: its row is closed, and no restart is counted."""
    return state.code == "NO_MACHINE_ID"


def fail_slots(context: PlanningContext) -> list[Action]:
    """A slot whose workers break too often becomes `failed`: nothing is put into it until a person says so."""
    if context.is_stopped:
        return []
    reasons = {context.states[id_].worker.slot: context.states[id_].reason for id_ in context.failed_ids}
    window_min = context.fleet.restart_window_s / 60
    actions: list[Action] = []
    for slot, count in sorted(_breaks(context).items()):
        if count > context.fleet.max_restarts:
            last = f", the last time: {reasons[slot]}" if slot in reasons else ""
            actions.append(FailSlot(slot, f"its workers broke {count} times within {window_min:g} minutes{last}"))
    return actions


def _breaks(context: PlanningContext) -> Counter[int]:
    """How often the workers of each slot that is not failed broke in the window, those of this plan included."""
    breaks = Counter({slot.slot: len(slot.restarts) for slot in context.snapshot.slots})
    slots = [context.states[id_].worker.slot for id_ in context.failed_ids]
    breaks.update(slot for slot in slots if slot is not None)
    failed = {slot.slot for slot in context.snapshot.slots if slot.is_failed}
    return Counter({slot: count for slot, count in breaks.items() if slot not in failed})


def requeue_orphans(context: PlanningContext) -> list[Action]:
    """Tasks in the name of workers that are no longer live: Fail takes its own, here is what slipped past it."""
    if context.is_stopped:
        return []
    return [Requeue(worker_id, f"worker {worker_id} is no longer live") for worker_id in context.snapshot.orphaned]


def warn(context: PlanningContext) -> list[Action]:
    """What a person should know and no stage acts on."""
    actions: list[Action] = []
    for state in context.states.values():
        if (
            state.is_vram_stale
            and state.lifecycle is Lifecycle.ACTIVE_READY
            and context.fleet.has_gpu
            and state.is_managed
        ):
            actions += context.alert(
                "VRAM_STALE", "no word about its GPU's memory for too long", worker_id=state.worker.id
            )
    for suspect in context.snapshot.failure_streaks:
        # A person may know whose fault it is: what they sent, what they started, or the handler everywhere.
        is_told = len(suspect.failed) >= LONELY_FAILURES or is_undecided(suspect, context.fleet, context.now)
        if is_told and suspect.worker_id not in context.failed_ids:
            actions += context.alert("TASKS_FAILING", describe(suspect), worker_id=suspect.worker_id)
    actions += _warn_of_slots(context)
    working = [
        s for s in context.states.values() if s.is_managed and (s.lifecycle is Lifecycle.CRASHED or s.is_healthy)
    ]
    if len(working) > 1 and all(s.lifecycle is Lifecycle.CRASHED for s in working):
        actions += context.alert("ALL_CRASHED", f"all {len(working)} workers crashed at the same time")
    for choice, words in context.snapshot.traits.refused_choices:
        why = f"{choice} is refused, and the fleet's other choices are hired instead: {words}"
        actions += context.alert("CHOICE_REFUSED", why, about=choice)
    actions += _warn_of_maximum(context)
    actions += _warn_of_undeleted(context)
    actions += _warn_of_engine(context)
    unlisted_since = context.planner_state.machines.unlisted_since
    if unlisted_since and context.age_s(unlisted_since) >= UNLISTED_TO_TELL * context.fleet.poll_interval_s:
        actions += context.alert(
            "LIST_UNKNOWN", f"the provider has listed no machines since {unlisted_since:%H:%M:%S} UTC"
        )
    return actions


def _warn_of_maximum(context: PlanningContext) -> list[Action]:
    """Of rented machines: whoever pays for them should know before they are all in use, and the limit can be raised."""
    hired, limit = sum(state.is_managed for state in context.states.values()), context.fleet.max_workers
    if not context.snapshot.traits.is_remote or hired <= NEAR_MAX_SHARE * limit:
        return []
    return context.alert("NEAR_MAX", f"{hired} of at most {limit} workers are hired")


def _warn_of_undeleted(context: PlanningContext) -> list[Action]:
    """Machines that were asked to go, in every cycle for minutes, and have not gone. Listed or not: one that has lost
    our tags is in no list, and paid for."""
    if context.snapshot.machines is None:
        return []
    asked = {
        action.machine_id: action.worker_id if isinstance(action, Delete) else action.name
        for action in context.actions
        if isinstance(action, Delete | DeleteOrphan)
    }
    before = context.snapshot.planner_state.machines.deleting_since
    since = {machine_id: before.get(machine_id, context.now) for machine_id in asked if machine_id is not None}
    context.remember_in("machines", deleting_since=since)
    actions: list[Action] = []
    for machine_id, name in asked.items():
        if machine_id is not None and context.age_s(since[machine_id]) >= UNDELETED_TO_TELL_S:
            why = (
                f"machine {machine_id} of {name} was asked to go at {since[machine_id]:%H:%M:%S} UTC and is not gone: "
                f"`windlass explain {name}` says what the provider answered; delete it by hand if that does not end it"
            )
            actions += context.alert("NOT_DELETED", why, about=machine_id)
    return actions


def _warn_of_engine(context: PlanningContext) -> list[Action]:
    """Of nodes that nobody places tasks on: they are paid for, and no state of theirs says so."""
    nodes = [s.worker for s in context.states.values() if s.is_managed and s.has_heartbeat and s.worker.status in LIVE]
    if context.fleet.engine is None or not nodes:
        return []
    since = max((node.node.at for node in nodes if node.node is not None), default=min(n.created_at for n in nodes))
    if context.age_s(since) <= max(context.fleet.heartbeat_timeout_s, context.fleet.poll_interval_s):
        return []
    what = f"nobody has looked at its nodes in Ray since {since:%H:%M:%S} UTC: its dispatcher is not there"
    return context.alert("ENGINE_SILENT", what)


def _warn_of_slots(context: PlanningContext) -> list[Action]:
    failed = {slot.slot: "its restarts are used up" for slot in context.snapshot.slots if slot.is_failed}
    failed |= {action.slot: action.reason for action in context.actions if isinstance(action, FailSlot)}
    actions: list[Action] = []
    for number, reason in failed.items():
        why = f"slot {number} is failed, and empty until `windlass restart`: {reason}"
        actions += context.alert("SLOT_FAILED", why, about=str(number))
    for number, count in _breaks(context).items():
        if number not in failed and count >= RESTARTS_TO_TELL:
            actions += context.alert("SLOT_RESTARTS", f"slot {number} broke {count} times lately", about=str(number))
    return actions
