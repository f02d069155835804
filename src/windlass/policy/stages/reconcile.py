"""Rows and machines made to agree: what is over is deleted, what was lost is found, what nobody knows is ended."""

from windlass.model.action import Action, Adopt, Delete, DeleteStray
from windlass.model.worker import WorkerStatus
from windlass.policy.derive import Presence, WorkerState
from windlass.policy.draft import Draft
from windlass.policy.stages.health import has_no_machine

# A claim that was under way when a drain was written down has ended by then, and shows.
DRAIN_SETTLE_S = 0.5


def clean_up(draft: Draft) -> list[Action]:
    """Workers in error, and those that became it in this plan: end their machines."""
    if draft.is_stopped:
        return []
    failing = draft.failed_ids
    actions: list[Action] = []
    for state in draft.states.values():
        worker = state.worker
        if worker.status is WorkerStatus.ERROR:
            reason = worker.reason or "it was in error"
            actions += _end(draft, state, worker.code or "ERROR", f"cleaning up: {reason}")
        elif worker.id in failing or has_no_machine(state):
            actions += _end(draft, state, state.code or "ERROR", f"cleaning up: {state.reason}")
    return actions


def end_drained(draft: Draft) -> list[Action]:
    """Terminating workers end when they have nothing left, when their time is up, or when they are gone anyway."""
    if draft.is_stopped:
        return []
    actions: list[Action] = []
    for state in draft.states.values():
        if state.worker.status is not WorkerStatus.TERMINATING:
            continue
        why = _why_drained(draft, state)
        if why is not None:
            actions += _end(draft, state, *why)
    return actions


def _why_drained(draft: Draft, state: WorkerState) -> tuple[str, str] | None:
    worker, fleet = state.worker, draft.fleet
    waited_s = draft.age_s(worker.terminating_at or worker.created_at)
    if state.presence in (Presence.MISSING, Presence.EXITED):
        return "DRAINED", "its machine is gone"
    if state.is_stale:
        return "DRAIN_STALE", f"it fell silent while it finished ({state.heartbeat_age_s:.0f} s ago)"
    if worker.running and waited_s >= fleet.stop_timeout_s:
        tasks = ", ".join(str(task.task_id) for task in worker.running)
        return "DRAIN_TIMEOUT", f"still at work on {tasks} after {waited_s:.0f} s"
    if not state.is_hired:
        # It leaves by itself; nobody but its own silence can say that it did not.
        return ("DRAINED", "it should have left by now") if waited_s >= fleet.stop_timeout_s else None
    if not worker.running and waited_s >= DRAIN_SETTLE_S:
        return "DRAINED", "it has no task left"
    return None


def _end(draft: Draft, state: WorkerState, code: str, reason: str) -> list[Action]:
    """Delete the worker's machine; not before it is certain which one that is, or that there is none."""
    worker = state.worker
    if not state.is_hired or (worker.machine_id is None and state.presence is Presence.NEVER):
        return [Delete(worker.id, None, code, reason)]
    own = draft.machine_of(worker)
    machine_id = worker.machine_id or (own.id if own is not None else None)
    return [Delete(worker.id, machine_id, code, reason)] if machine_id is not None else []


def reconcile(draft: Draft) -> list[Action]:
    """Find the machines of unanswered creations; end machines that have no worker."""
    if draft.snapshot.machines is None or draft.is_stopped:
        return []
    ending = draft.deleted_ids
    actions: list[Action] = []
    for name, state in draft.states.items():
        own = draft.machine_of(state.worker)
        if own is not None and state.worker.machine_id is None and name not in ending:
            actions.append(Adopt(name, own.id, "found for a creation that was never answered"))
    actions += [DeleteStray(double.id, double.name, f"a double of {keep}") for double, keep in draft.doubles]
    return actions + _end_strays(draft)


def _end_strays(draft: Draft) -> list[Action]:
    before = draft.snapshot.memory.stray_since
    since = {machine.id: before.get(machine.id, draft.now) for machine in draft.unowned}
    draft.remember(stray_since=since)
    return [
        DeleteStray(machine.id, machine.name, "it carries our tags and no worker has it")
        for machine in draft.unowned
        if draft.age_s(since[machine.id]) >= draft.snapshot.traits.stray_grace_s
    ]
