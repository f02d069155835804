"""Why a worker is terminated: failed workers and slots, their tasks, and the deletion of machines.

policy/worker_state.py decides whether a worker failed. stages/draining.py decides which healthy workers drain.
"""

from collections import Counter

from windlass.model.action import Action, AttemptRefund, Delete, Fail, FailSlot, Requeue
from windlass.model.worker import WorkerStatus
from windlass.policy.planning_context import PlanningContext
from windlass.policy.worker_state import Lifecycle, Presence, WorkerState

# A claim that was in progress when a drain was recorded has finished after this time and is visible.
DRAIN_SETTLE_S = 0.5
# The vendor stopped the machine, or a task on it did: after this many such ends of a task, its attempts count.
MAX_RELEASES_OF_STOPPED = 2


def fail_workers(context: PlanningContext) -> list[Action]:
    """Workers that must terminate get status error, and their tasks are requeued."""
    if context.is_stopped:
        return []
    actions: list[Action] = []
    for state in context.states.values():
        if not state.should_terminate or _never_had_machine(state):
            continue
        worker, quarantine = state.worker, context.quarantines.get(state.worker.id)
        if quarantine is not None and quarantine.is_trial:
            context.remember_in("health", quarantine_trial_at=context.now)
        # Attempts that failed because of the worker do not count for their tasks. A dead GPU proves that without
        # comparison with other workers. The evidence is recorded whatever the code: later cycles cannot collect it.
        has_dead_gpu = context.fleet.has_gpu and (
            worker.vram_total_mb == 0 or state.lifecycle is Lifecycle.ACTIVE_GPU_NOT_DETECTED
        )
        refund = None
        if has_dead_gpu and worker.failing_since is not None:
            refund = AttemptRefund(worker.failing_since)
        elif context.snapshot.traits.is_remote and state.presence is Presence.MISSING:
            # The vendor, or a person, took the machine: no task can do that, so its attempts do not count.
            refund = AttemptRefund(context.now)
        elif context.snapshot.traits.is_remote and state.presence is Presence.EXITED:
            # Listed, but stopped. That is how most hosts of others end, but a task can stop its machine too.
            refund = AttemptRefund(context.now, max_releases=MAX_RELEASES_OF_STOPPED)
        elif quarantine is not None:
            refund = AttemptRefund(quarantine.streak.since, quarantine.is_trial)
        evidence = quarantine.streak if quarantine is not None else None
        code, reason = state.code or "FAILED", state.reason or "failed"
        actions.append(Fail(worker.id, code, reason, evidence, refund, state.is_proven))
    return actions


def _never_had_machine(state: WorkerState) -> bool:
    """No machine was created for the worker. Its row is closed without a failure: no restart is counted."""
    return state.code == "NO_MACHINE_ID"


def fail_slots(context: PlanningContext) -> list[Action]:
    """A slot whose workers fail too often stays empty until `windlass restart`."""
    if context.is_stopped:
        return []
    reasons = {context.states[id_].worker.slot: context.states[id_].reason for id_ in context.failed_ids}
    window_min = context.fleet.restart_window_s / 60
    actions: list[Action] = []
    for slot, count in sorted(slot_failures(context).items()):
        if count > context.fleet.max_restarts:
            last = f", last: {reasons[slot]}" if slot in reasons else ""
            actions.append(FailSlot(slot, f"{count} workers failed in {window_min:g} min{last}"))
    return actions


def slot_failures(context: PlanningContext) -> Counter[int]:
    """Failures in the restart window by slot, including those of this plan. Without slots that are failed already."""
    failures = Counter({slot.slot: len(slot.restarts) for slot in context.snapshot.slots})
    slots = [context.states[id_].worker.slot for id_ in context.failed_ids]
    failures.update(slot for slot in slots if slot is not None)
    failed = {slot.slot for slot in context.snapshot.slots if slot.is_failed}
    return Counter({slot: count for slot, count in failures.items() if slot not in failed})


def requeue_orphaned_tasks(context: PlanningContext) -> list[Action]:
    """Tasks that still run in the name of workers that are no longer live. Fail requeues those of its own worker."""
    if context.is_stopped:
        return []
    return [Requeue(worker_id, f"worker {worker_id} is no longer live") for worker_id in context.snapshot.orphaned]


def delete_failed(context: PlanningContext) -> list[Action]:
    """Delete the machines of workers in status error, including those that this plan fails."""
    if context.is_stopped:
        return []
    actions: list[Action] = []
    for state in context.states.values():
        worker = state.worker
        if worker.status is WorkerStatus.ERROR:
            actions += _delete(context, state, worker.code or "ERROR", f"failed: {worker.reason or 'status error'}")
        elif worker.id in context.failed_ids or _never_had_machine(state):
            actions += _delete(context, state, state.code or "ERROR", f"failed: {state.reason}")
    return actions


def delete_drained(context: PlanningContext) -> list[Action]:
    """Delete the machines of terminating workers that finished, timed out, fell silent, or are gone already."""
    if context.is_stopped:
        return []
    actions: list[Action] = []
    for state in context.states.values():
        if state.worker.status is WorkerStatus.TERMINATING:
            ended = _drain_result(context, state)
            actions += _delete(context, state, *ended) if ended is not None else []
    return actions


def _drain_result(context: PlanningContext, state: WorkerState) -> tuple[str, str] | None:
    """Code and reason if the drain has ended. None while the worker finishes its tasks."""
    worker, fleet = state.worker, context.fleet
    if not state.is_managed and not context.machines.get(worker.id):
        # It deregisters by itself and takes as long as it needs. Only silence ends it here.
        silent_s = context.age_s(worker.last_heartbeat or worker.activated_at or worker.created_at)
        is_silent = silent_s > (fleet.heartbeat_timeout_s if worker.lease_s is None else worker.lease_s)
        return ("DRAIN_STALE", f"fell silent while draining ({silent_s:.0f} s ago)") if is_silent else None
    waited_s = context.age_s(worker.terminating_at or worker.created_at)
    if state.presence in (Presence.MISSING, Presence.EXITED):
        return "DRAINED", "its machine is gone"
    if state.is_stale:
        return "DRAIN_STALE", f"fell silent while draining ({state.heartbeat_age_s:.0f} s ago)"
    if state.has_active_task and waited_s >= fleet.stop_timeout_s:
        tasks = ", ".join(str(task.task_id) for task in worker.running)
        work = f"task {tasks}" if tasks else "work that others placed on its Ray node"
        return "DRAIN_TIMEOUT", f"still running {work} after {waited_s:.0f} s"
    if not state.has_active_task and waited_s >= DRAIN_SETTLE_S:
        return "DRAINED", "no tasks left"
    return None


def _delete(context: PlanningContext, state: WorkerState, code: str, reason: str) -> list[Action]:
    """Delete the worker's machine, once it is certain which machine that is or that there is none."""
    worker = state.worker
    if not state.is_managed or (worker.machine_id is None and state.presence is Presence.NEVER):
        return [Delete(worker.id, None, code, reason)]
    own = context.machine_of(worker)
    if own is not None and own.is_locked:
        return []  # the provider would refuse it; stages/warnings.py alerts
    machine_id = worker.machine_id or (own.id if own is not None else None)
    return [Delete(worker.id, machine_id, code, reason)] if machine_id is not None else []
