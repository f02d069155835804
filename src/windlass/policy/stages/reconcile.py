"""Rows and machines made to agree: what is over is deleted, what was lost is found, what nobody knows is ended."""

from datetime import datetime, timedelta

from windlass.model.action import Action, Adopt, Delete, DeleteOrphan, Drain, Prepare, RaiseAlert, RecordPrice
from windlass.model.machine import Machine, MachineState
from windlass.model.snapshot import Hold
from windlass.model.worker import WorkerStatus
from windlass.policy.derive import Lifecycle, Presence, WorkerState
from windlass.policy.planning_context import PlanningContext
from windlass.policy.stages.health import has_no_machine

OTHER_PROVIDER, OTHER_ACCOUNT = "OTHER_PROVIDER", "OTHER_ACCOUNT"
# No list has told yet whether it is another account's.
KEY_CHANGED = "KEY_CHANGED"
# Machines of another account that a person gave up.
ABANDONED = "ABANDONED"
# Machines named in one sentence; the rest are counted.
MAX_NAMED = 3
# Whose machines are of the same kind as another's: processes of this host, whatever they run.
_SAME_MACHINES = {"ray-local": "local"}
TOO_MANY_ORPHANS = "TOO_MANY_ORPHANS"
# So many machines without a worker, and more than half of all, look rather like a database that forgot.
MANY_STRAYS_MIN = 3
# A person has been told. What they leave as it is for this long is what it looks like.
STRAYS_DOUBTED_S = 3600.0
# A claim that was under way when a drain was written down has ended by then, and shows.
DRAIN_SETTLE_S = 0.5


def keep_provider(context: PlanningContext) -> list[Action]:
    """A fleet's machines are all rented from one provider. While some of another's are not gone, nothing is touched:
    the provider of today knows nothing of them, and what it does not know it would call gone."""
    rents = context.fleet.provider
    others = [
        state.worker.provider
        for state in context.states.values()
        if state.is_managed
        and state.worker.provider is not None
        and _machines_of(state.worker.provider) != _machines_of(rents)
    ]
    if not others:
        return _keep_account(context)
    before = " and ".join(sorted(set(others)))
    what = f"its provider is {rents} now, and {len(others)} of its workers are of {before}, which only {before} can end"
    context.hold(OTHER_PROVIDER, what, is_total=True)
    return context.alert(OTHER_PROVIDER, f"{what}: nothing is touched")


def _keep_account(context: PlanningContext) -> list[Action]:
    """A key that has changed is taken over once a machine of the fleet is listed with it, at once where no machine can
    be left that was rented with the former one, or when a person gives those up. Until then nothing is touched:
    machines would be made in another account, and those of the former one, which it does not find, be taken for gone.
    That nobody is heard proves nothing: a machine is paid for though its worker is silent."""
    key, known = context.snapshot.traits.key_hash, context.planner_state.account.key_hash
    if context.own:
        context.remember_in("account", own_listed_at=context.now)
    if key == known:
        return _heed_voices(context)
    # Also those whose creation has no answer: their machines may be there.
    rented = [s for s in context.states.values() if s.is_managed and s.worker.creation != "refused"]
    if known is None or context.own or not rented:
        context.remember_in("account", key_hash=key)
        return _heed_voices(context)
    what = f"its key for {context.fleet.provider} has changed"
    if context.snapshot.machines is None:
        # Who has not been told that they are not listed cannot give them up: until then it is a hold of its own.
        code = OTHER_ACCOUNT if _told(context) is not None else KEY_CHANGED
        why = f"{what}, and its machines ({_named(rented)}) could not be listed with the new one yet"
        context.hold(code, why, is_total=True)
        context.keep_alerts(OTHER_ACCOUNT)
        return []
    if _are_given_up(context, rented):
        context.remember_in("account", key_hash=key)
        return _leave_behind(context, rented)
    return _hold_account(context, f"{what}, and the new one lists none of its machines ({_named(rented)})")


def _heed_voices(context: PlanningContext) -> list[Action]:
    """Whoever speaks has a machine. A provider that lists none of a fleet's machines, asked to end one, says that it is
    gone: with the key of another account, that would be how each of them is forgotten. (Whoever was missing while
    others were listed was so in the right account.)"""
    grace_s, missing = context.snapshot.traits.absence_grace_s, context.planner_state.machines.missing_since
    abandoned_at, is_unlisted = context.planner_state.account.abandoned_at, context.snapshot.machines is None
    proven_at = context.planner_state.account.own_listed_at
    # Without a list, what the last one lacked is as it was.
    if grace_s == 0 or context.own or (is_unlisted and _told(context) is None):
        return []
    speaking = [
        state
        for state in context.states.values()
        if state.worker.id in missing
        and context.age_s(missing[state.worker.id]) >= grace_s
        and context.is_speaking(state.worker)
        and (proven_at is None or missing[state.worker.id] > proven_at)
        and (abandoned_at is None or state.worker.created_at >= abandoned_at)
    ]
    if not speaking:
        return []
    if not is_unlisted and _are_given_up(context, speaking):
        return _leave_behind(context, speaking)
    listed = f"{context.fleet.provider} lists none of its machines ({_named(speaking)})"
    return _hold_account(context, f"{len(speaking)} of its workers are heard, and {listed}")


def _hold_account(context: PlanningContext, what: str) -> list[Action]:
    how = f"put the key back that rented them, or give them up with `windlass restart {context.snapshot.fleet}`"
    context.hold(OTHER_ACCOUNT, f"{what}: {how}", is_total=True)
    return context.alert(OTHER_ACCOUNT, f"{what}. Is it the key of another account? Nothing is touched: {how}")


def _are_given_up(context: PlanningContext, states: list[WorkerState]) -> bool:
    """Whether a person, who could read that they are not listed, has restarted the fleet since. All of it: of one slot,
    or one worker, that is said for other reasons, even if there is no other."""
    told, said_at = _told(context), context.snapshot.restarted_at
    is_said = told is not None and said_at is not None and said_at >= told.since
    # It is said of the fleet first, and then to each worker: this look may have come between the two.
    return is_said and not any(s.worker.status in (WorkerStatus.SPAWNING, WorkerStatus.ACTIVE) for s in states)


def _told(context: PlanningContext) -> Hold | None:
    """The last look's hold, if it is that no machine is listed: it began when a list said so, and a person was told."""
    before = context.snapshot.planner_state.hold
    return before if before is not None and before.code == OTHER_ACCOUNT else None


def _leave_behind(context: PlanningContext, states: list[WorkerState]) -> list[Action]:
    """Their rows close from now on, as if their machines were gone; which those are is remembered, each for itself.
    Nobody is told when it is over, as of other alerts: we shall not know."""
    # They were there until now, as far as anybody knows: their bills end here, not where they were first missing.
    context.remember_in("account", abandoned_at=context.now)
    context.remember_in("machines", missing_since={})
    return [
        RaiseAlert(
            ABANDONED,
            f"{state.worker.machine_id or f'whatever was made as {state.worker.id}'} was given up by hand: the key for "
            f"{context.fleet.provider} does not list it, and where it was rented it may still be charged",
            state.worker.id,
        )
        for state in states
    ]


def _named(states: list[WorkerState]) -> str:
    """Their machines, as a person finds them in the provider's console: by id, or by name where none was told."""
    names = sorted(state.worker.machine_id or state.worker.id for state in states)
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _machines_of(provider: str) -> str:
    return _SAME_MACHINES.get(provider, provider)


def clean_up(context: PlanningContext) -> list[Action]:
    """Workers in error, and those that became it in this plan: end their machines."""
    if context.is_stopped:
        return []
    failing = context.failed_ids
    actions: list[Action] = []
    for state in context.states.values():
        worker = state.worker
        if worker.status is WorkerStatus.ERROR:
            reason = worker.reason or "it was in error"
            actions += _end(context, state, worker.code or "ERROR", f"cleaning up: {reason}")
        elif worker.id in failing or has_no_machine(state):
            actions += _end(context, state, state.code or "ERROR", f"cleaning up: {state.reason}")
    return actions


def end_drained(context: PlanningContext) -> list[Action]:
    """Terminating workers end when they have nothing left, when their time is up, or when they are gone anyway."""
    if context.is_stopped:
        return []
    actions: list[Action] = []
    for state in context.states.values():
        if state.worker.status is not WorkerStatus.TERMINATING:
            continue
        why = _why_drained(context, state)
        if why is not None:
            actions += _end(context, state, *why)
    return actions


def _why_drained(context: PlanningContext, state: WorkerState) -> tuple[str, str] | None:
    worker, fleet = state.worker, context.fleet
    if not state.is_managed:
        # It leaves by itself, and takes the time it needs; nobody but its own silence can say that it did not.
        silent_s = context.age_s(worker.last_heartbeat or worker.activated_at or worker.created_at)
        if silent_s > (fleet.heartbeat_timeout_s if worker.lease_s is None else worker.lease_s):
            return "DRAIN_STALE", f"it fell silent while it finished ({silent_s:.0f} s ago)"
        return None
    waited_s = context.age_s(worker.terminating_at or worker.created_at)
    if state.presence in (Presence.MISSING, Presence.EXITED):
        return "DRAINED", "its machine is gone"
    if state.is_stale:
        return "DRAIN_STALE", f"it fell silent while it finished ({state.heartbeat_age_s:.0f} s ago)"
    if state.has_active_task and waited_s >= fleet.stop_timeout_s:
        tasks = ", ".join(str(task.task_id) for task in worker.running) or "what others placed there"
        return "DRAIN_TIMEOUT", f"still at work on {tasks} after {waited_s:.0f} s"
    if not state.has_active_task and waited_s >= DRAIN_SETTLE_S:
        return "DRAINED", "it has no task left"
    return None


def _end(context: PlanningContext, state: WorkerState, code: str, reason: str) -> list[Action]:
    """Delete the worker's machine; not before it is certain which one that is, or that there is none."""
    worker = state.worker
    if not state.is_managed or (worker.machine_id is None and state.presence is Presence.NEVER):
        return [Delete(worker.id, None, code, reason)]
    own = context.machine_of(worker)
    machine_id = worker.machine_id or (own.id if own is not None else None)
    return [Delete(worker.id, machine_id, code, reason)] if machine_id is not None else []


def find_machines(context: PlanningContext) -> list[Action]:
    """The machines of unanswered creations, and prices that were not known."""
    if context.snapshot.machines is None or context.is_stopped:
        return []
    actions: list[Action] = []
    for name, state in context.states.items():
        own = context.machine_of(state.worker)
        if own is None:
            continue
        if state.worker.machine_id is not None and state.worker.bill is None and own.price_micros_per_hour is not None:
            actions.append(RecordPrice(name, own.id, "what its machine costs is known now"))
        # Also if it is about to be ended: it is paid for until then.
        if state.worker.machine_id is None:
            is_prepared = not context.snapshot.traits.has_prepare_step
            actions.append(Adopt(name, own.id, "found for a creation that was never answered", is_prepared))
    return actions


def prepare(context: PlanningContext) -> list[Action]:
    """Machines that run, and whose worker's program nobody has started yet: start it.

    Not of those that this orchestrator is at already. One that another began, and died, is begun again at once.
    """
    if not context.snapshot.traits.has_prepare_step or context.is_stopped:
        return []
    exit_reason = (
        context.deleted_ids | context.failed_ids | {a.worker_id for a in context.actions if isinstance(a, Drain)}
    )
    actions: list[Action] = []
    for state in context.states.values():
        worker, own = state.worker, context.machine_of(state.worker)
        is_pending = state.lifecycle is Lifecycle.SPAWNING_SCRIPT_PENDING and worker.status is WorkerStatus.SPAWNING
        is_begun = worker.prepare_code is not None or worker.id in context.snapshot.preparing
        if own is not None and is_pending and not is_begun and worker.id not in exit_reason:
            actions.append(Prepare(worker.id, own.id, "its machine runs"))
    return actions


def end_strays(context: PlanningContext) -> list[Action]:
    """Machines without a worker, as many as may change at once: if we are wrong about them, somebody can notice."""
    if context.snapshot.machines is None or context.is_stopped:
        return []
    orphans = [DeleteOrphan(double.id, double.name, f"a double of {keep}") for double, keep in context.doubles]
    if not context.are_strays_doubted:
        orphans += [
            DeleteOrphan(machine.id, machine.name, "it carries our tags and no worker has it")
            for machine in _lasting_strays(context)
        ]
    exit_reason = orphans[: context.fleet.max_changes_per_cycle]
    context.is_cut_short = context.is_cut_short or len(exit_reason) < len(orphans)
    return [*exit_reason]


def doubt_strays(context: PlanningContext) -> list[Action]:
    """Before machines without a worker are ended: could it be us who forgot their workers?

    A database that was restored from a copy, or emptied, knows none of the machines that work on. When most machines
    have no worker, none of those is ended, and nobody hired, until a person has had an hour to look, or has said
    `windlass restart`.
    """
    if context.snapshot.machines is None:
        since = context.planner_state.orphans.orphans_held_since
        if since is not None and _are_strays_in_doubt(context, since):
            context.hold(TOO_MANY_ORPHANS, "in the last list of machines most carried our tags and no worker had them")
            context.keep_alerts(TOO_MANY_ORPHANS)
        return []
    before = context.snapshot.planner_state.orphans.orphan_since
    since_of_each = {machine.id: before.get(machine.id, context.now) for machine in context.unowned}
    context.remember_in("orphans", orphan_since=since_of_each, orphans_held_since=None)
    if len(since_of_each) < MANY_STRAYS_MIN:
        return []
    running = [machine for machine in context.snapshot.machines if machine.state is not MachineState.EXITED]
    orphans = [machine for machine in _lasting_strays(context) if machine.state is not MachineState.EXITED]
    if len(orphans) < MANY_STRAYS_MIN or len(orphans) * 2 <= len(running):
        return []
    since = context.snapshot.planner_state.orphans.orphans_held_since or context.now
    context.remember_in("orphans", orphans_held_since=since)
    if not _are_strays_in_doubt(context, since):
        return []
    what = f"{len(orphans)} of {len(running)} machines carry our tags and no worker has them"
    context.are_strays_doubted = True
    context.hold(TOO_MANY_ORPHANS, what)
    ends_at = since + timedelta(seconds=STRAYS_DOUBTED_S)
    return context.alert(
        TOO_MANY_ORPHANS, f"{what}: is this the right database? They are ended at {ends_at:%H:%M:%S} UTC"
    )


def _are_strays_in_doubt(context: PlanningContext, since: datetime) -> bool:
    """Whether a person may still look: not for longer than an hour, nor after the fleet was restarted by hand."""
    restarted_at = context.snapshot.restarted_at
    return context.age_s(since) < STRAYS_DOUBTED_S and (restarted_at is None or restarted_at < since)


def _lasting_strays(context: PlanningContext) -> list[Machine]:
    """Those that have been there for longer than a row, or a list, may be late."""
    since, grace_s = context.planner_state.orphans.orphan_since, context.snapshot.traits.orphan_grace_s
    if not since:
        return []
    return [machine for machine in context.unowned if context.age_s(since[machine.id]) >= grace_s]
