"""Alerts about conditions that a person should know and that no other stage acts on."""

from windlass.model.action import Action, Delete, DeleteOrphan, FailSlot
from windlass.model.worker import LIVE, WorkerStatus
from windlass.policy.planning_context import PlanningContext
from windlass.policy.quarantine import LONELY_FAILURES, describe_streak, is_undecided
from windlass.policy.stages.termination import slot_failures
from windlass.policy.worker_state import Lifecycle

# Failures of a slot within its window before an alert fires.
FAILURES_TO_ALERT = 4
# Poll intervals without a complete machine list before an alert fires.
UNLISTED_CYCLES_TO_ALERT = 3
# An alert fires above this share of max_workers, while a task has been queued for longer than this: a full fleet that
# keeps up does its job. Only for rented machines: small local fleets are often full.
NEAR_MAX_SHARE = 0.8
NEAR_MAX_WAIT_S = 300.0
# A machine may take this long to disappear after its deletion was requested.
DELETION_ALERT_S = 300.0
# A task without any time limit is reported after this time, or after this many times the 99th percentile of recent
# durations if that is longer. It may hang (a CUDA call that never returns) while heartbeats go on and it is billed.
LONG_TASK_S = 6 * 3600.0
LONG_TASK_FACTOR = 10


def raise_warnings(context: PlanningContext) -> list[Action]:
    fleet, states = context.fleet, context.states.values()
    actions: list[Action] = []
    for state in states:
        is_ready = state.is_managed and state.lifecycle is Lifecycle.ACTIVE_READY
        if fleet.has_gpu and is_ready and state.is_vram_stale:
            why = f"worker {state.worker.id} has not reported its GPU memory for over {fleet.vram_stale_s:g} s"
            actions += context.alert("VRAM_STALE", why, worker_id=state.worker.id)
    for streak in context.snapshot.failure_streaks:
        # No decision is possible, but a person may know: bad tasks, a worker started by hand, a bad handler everywhere.
        is_long = len(streak.failed) >= LONELY_FAILURES or is_undecided(streak, fleet, context.now)
        if is_long and streak.worker_id not in context.failed_ids:
            actions += context.alert("TASKS_FAILING", describe_streak(streak), worker_id=streak.worker_id)
    actions += _warn_of_slots(context)
    working = [s for s in states if s.is_managed and (s.lifecycle is Lifecycle.CRASHED or s.is_healthy)]
    if len(working) > 1 and all(s.lifecycle is Lifecycle.CRASHED for s in working):
        actions += context.alert("ALL_CRASHED", f"all {len(working)} workers crashed at the same time")
    for choice, error in context.snapshot.traits.refused_choices:
        why = f"the provider refuses {choice}, so the fleet uses its other choices: {error}"
        actions += context.alert("CHOICE_REFUSED", why, about=choice)
    spawned = sum(state.is_managed for state in states)
    oldest_s = context.snapshot.queue.oldest_queued_age_s or 0.0
    is_near_max = spawned > NEAR_MAX_SHARE * fleet.max_workers and oldest_s > NEAR_MAX_WAIT_S
    if context.snapshot.traits.is_remote and is_near_max:
        why = f"{spawned} of max_workers ({fleet.max_workers}) exist, and a task has been queued for {oldest_s:.0f} s"
        actions += context.alert("NEAR_MAX", why)
    actions += _warn_of_long_tasks(context)
    actions += _warn_of_locked(context)
    actions += _warn_of_undeleted(context)
    actions += _warn_of_engine(context)
    unlisted_since = context.planner_state.machines.unlisted_since
    if unlisted_since and context.age_s(unlisted_since) >= UNLISTED_CYCLES_TO_ALERT * fleet.poll_interval_s:
        why = f"{fleet.provider} has returned no machine list since {unlisted_since:%H:%M:%S} UTC"
        actions += context.alert("LIST_UNKNOWN", why)
    return actions


def _warn_of_slots(context: PlanningContext) -> list[Action]:
    failed = {slot.slot: "max_restarts exceeded" for slot in context.snapshot.slots if slot.is_failed}
    failed |= {action.slot: action.reason for action in context.actions if isinstance(action, FailSlot)}
    actions: list[Action] = []
    for number, reason in failed.items():
        why = f"slot {number} is failed and stays empty until `windlass restart`: {reason}"
        actions += context.alert("SLOT_FAILED", why, about=str(number))
    window_min = context.fleet.restart_window_s / 60
    for number, count in slot_failures(context).items():
        if number not in failed and count >= FAILURES_TO_ALERT:
            why = f"{count} workers of slot {number} failed in {window_min:g} min"
            actions += context.alert("SLOT_RESTARTS", why, about=str(number))
    return actions


def _warn_of_long_tasks(context: PlanningContext) -> list[Action]:
    """Tasks on rented machines that no limit ends. Not a failure: only a person knows how long a task may take."""
    if not context.snapshot.traits.is_remote or context.fleet.stuck_timeout_s is not None:
        return []
    durations_s = context.snapshot.queue.durations_s
    p99_s = durations_s[int(0.99 * len(durations_s))] if durations_s else 0.0
    limit_s = max(LONG_TASK_S, LONG_TASK_FACTOR * p99_s)
    failed_ids = context.failed_ids
    actions: list[Action] = []
    for worker in (state.worker for state in context.states.values() if state.is_managed):
        for task in worker.running:
            is_long = task.timeout_s is None and context.age_s(task.started_at) > limit_s
            if is_long and worker.id not in failed_ids:
                why = f"task {task.task_id} has been running on worker {worker.id} since {task.started_at:%F %H:%M} UTC"
                actions += context.alert("TASK_LONG", why, about=str(task.task_id), worker_id=worker.id)
    return actions


def _warn_of_locked(context: PlanningContext) -> list[Action]:
    """Machines that should be deleted and that a person locked. They hold their slots and are billed."""
    actions: list[Action] = []
    leaving = (WorkerStatus.ERROR, WorkerStatus.TERMINATING)
    unneeded = {
        own.id: own
        for state in context.states.values()
        if (own := context.machine_of(state.worker)) is not None
        and (state.worker.status in leaving or state.worker.id in context.failed_ids)
    }
    unneeded |= {machine.id: machine for machine in (*context.unowned, *(extra for extra, _ in context.duplicates))}
    for machine in unneeded.values():
        if machine.is_locked:
            why = f"machine {machine.id} of worker {machine.name} is locked and cannot be deleted: unlock it"
            actions += context.alert("MACHINE_LOCKED", why, about=machine.id)
    return actions


def _warn_of_undeleted(context: PlanningContext) -> list[Action]:
    """Machines whose deletion was requested in every cycle for minutes. They need not be listed: a machine that lost
    its tags is in no list, and is billed."""
    if context.snapshot.machines is None:
        return []
    deleted = {
        action.machine_id: action.worker_id if isinstance(action, Delete) else action.name
        for action in context.actions
        if isinstance(action, Delete | DeleteOrphan)
    }
    before = context.snapshot.planner_state.machines.deleting_since
    since = {machine_id: before.get(machine_id, context.now) for machine_id in deleted if machine_id is not None}
    context.remember_in("machines", deleting_since=since)
    actions: list[Action] = []
    for machine_id, name in deleted.items():
        if machine_id is not None and context.age_s(since[machine_id]) >= DELETION_ALERT_S:
            why = (
                f"machine {machine_id} of worker {name} still exists, its deletion was requested at "
                f"{since[machine_id]:%H:%M:%S} UTC; see `windlass explain {name}`"
            )
            actions += context.alert("NOT_DELETED", why, about=machine_id)
    return actions


def _warn_of_engine(context: PlanningContext) -> list[Action]:
    """Ray nodes on which no tasks are placed, because the dispatcher does not report."""
    nodes = [s.worker for s in context.states.values() if s.is_managed and s.has_heartbeat and s.worker.status in LIVE]
    if context.fleet.engine is None or not nodes:
        return []
    since = max((node.node.at for node in nodes if node.node is not None), default=min(n.created_at for n in nodes))
    if context.age_s(since) <= max(context.fleet.heartbeat_timeout_s, context.fleet.poll_interval_s):
        return []
    why = f"the dispatcher has not reported on the fleet's Ray nodes since {since:%H:%M:%S} UTC"
    return context.alert("ENGINE_SILENT", why)
