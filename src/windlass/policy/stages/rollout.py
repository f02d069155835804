"""Rollouts: old workers are replaced by workers of the fleet's current version, a few at a time.

A new worker passes its probe when it finished its first tasks and the last one did not fail, when it worked on one for
a minute, or when it was ready without a task: for two heartbeats while there is none, for a minute while others get all
of them. A worker imports its handler before it registers. Old workers drain only for new ones that passed.

A version is rejected when MAX_FAILED of its workers failed, one was quarantined, several tasks failed on one, or
the provider refused its settings. A failed check of the host counts once it failed on a second host. The version's
workers that passed no probe drain, old workers stay, and the fleet spawns none of it until a person deploys again or
the version changes. If the settings of the last working version could be restored (control/deployment.py), that is the
current version meanwhile. If not, no old worker is spare: none could be spawned.

A surge takes free slots: there are never more than max_workers machines. Where billing periods are long, an old worker
stays until its period nearly ends, at most for one period, unless the request says otherwise. One new worker is spawned
at once in any case, so that a bad version shows early.

`advance_rollout` is a stage. stages/scaling.py calls `replace_workers`, after the spawns that the policy wants.
"""

from dataclasses import replace
from datetime import timedelta

from windlass.model.action import Action, Drain, RecordEvent, Spawn
from windlass.model.plural import plural
from windlass.model.rollout import DeployRequest, Rollout, RolloutStatus, WorkingVersion, changed_settings
from windlass.model.worker import WorkerStatus
from windlass.policy.billing import TerminationWindow
from windlass.policy.boot import boot_limit
from windlass.policy.placement import HOST_AVOIDED, MISPLACED
from windlass.policy.planning_context import PlanningContext
from windlass.policy.quarantine import QUARANTINED
from windlass.policy.stages.spawning import slots_to_fill, spawnable_slots
from windlass.policy.worker_state import WorkerState

REJECTED = "VERSION_REJECTED"
STALLED = "DEPLOY_STALLED"
DEPLOY = "DEPLOY"
ROLLBACK = "ROLLBACK"
# One machine may be bad. Two that fail before they worked show that the version is.
MAX_FAILED = 2
# Heartbeat intervals for which a worker without tasks must be ready.
PROBE_HEARTBEATS = 2
# The same while other workers get tasks.
BUSY_PROBE_S = 60.0
# A rollout without progress for this long raises an alert. A slow boot takes minutes.
STALL_S = 1800.0
# Failures that say nothing about the version: a person, the vendor or the placement ended the worker.
NOT_OF_VERSION = frozenset({"MANUAL", "NO_MACHINE_ID", MISPLACED, HOST_AVOIDED})
# Checks that most often fail because of the host. 10_observe.sql avoids hosts by them, whatever the version.
CHECKS_OF_HOST = frozenset({"GPU_NOT_DETECTED", "STORAGE_NOT_MOUNTED"})
INVALID_REQUEST = "INVALID_REQUEST"
_END_CODES = {
    RolloutStatus.COMPLETE: "DEPLOY_COMPLETE",
    RolloutStatus.ROLLED_BACK: "DEPLOY_ROLLED_BACK",
    RolloutStatus.ABORTED: "DEPLOY_ABORTED",
}


def advance_rollout(context: PlanningContext) -> list[Action]:
    """Begin, retarget, reject, abort or complete the fleet's rollout, and hold the spawns of a rejected version."""
    current = context.snapshot.fingerprint
    if current is None:
        # Unknown, so nothing is concluded from it; the version of the last plan stays.
        return []
    context.remember(fingerprint=current)
    if context.is_stopped or context.snapshot.is_shutting_down:
        return []
    events = _begin(context, current)
    rollout = context.planner_state.rollout
    if rollout is not None and rollout.is_running:
        events += _judge(context, rollout)
    rollout = context.planner_state.rollout
    if rollout is not None and rollout.status is RolloutStatus.ROLLED_BACK:
        why = f"version {rollout.target} was rolled back: {rollout.reason}"
        changes = f"; changed: {', '.join(rollout.changes)}" if rollout.changes else ""
        if context.snapshot.rejected == rollout.target:
            events += context.alert(REJECTED, f"{why}{changes}; new workers get the settings of version {current}")
        elif is_rejected(context):
            context.hold(REJECTED, f"{why}{changes}")
            events += context.alert(REJECTED, f"{why}{changes}")
        elif rollout.target == current:
            # A person declared the cause fixed.
            context.remember(rollout=replace(rollout, status=RolloutStatus.ABORTED, surged=()))
    _remember_working(context, current)
    return events


def is_rejected(context: PlanningContext) -> bool:
    """The fleet's current version was rolled back, so that no worker can be spawned."""
    rollout = context.planner_state.rollout
    return rollout is not None and rollout.rejects(context.planner_state.fingerprint, context.snapshot.reset_at)


def _remember_working(context: PlanningContext, current: str) -> None:
    """Remember the settings of a version that all workers have and that works: a rollback returns to them."""
    settings, rollout = context.snapshot.version_settings, context.planner_state.rollout
    if settings is None or is_rejected(context) or (rollout is not None and rollout.is_running):
        return
    new = [s for s in context.states.values() if s.is_managed and s.worker.fingerprint == current]
    if not _old_workers(context, current) and any(has_passed(context, state) for state in new):
        context.remember(working=WorkingVersion(current, settings))


def _begin(context: PlanningContext, current: str) -> list[Action]:
    """Start what a person requested or `--watch` noticed, follow a version that changed meanwhile, or abort."""
    request, rollout = context.snapshot.deploy, context.planner_state.rollout
    known = rollout.id if rollout is not None else 0
    if request is not None and request.id > known and not request.is_aborted:
        return _start(context, request, current, "requested")
    # An abort counts once, even if its request was never begun. Rollouts that `--watch` begins later have the same id.
    is_abort = request is not None and request.is_aborted and request.id > context.planner_state.aborted_deploy
    if request is not None and is_abort:
        context.remember(aborted_deploy=request.id)
    if rollout is not None and rollout.is_running:
        if is_abort:
            return _end(context, rollout, RolloutStatus.ABORTED, "aborted by a person")
        if rollout.target != current:
            # The surged workers are of an old version by now, and are replaced like the others.
            again = DeployRequest(rollout.id, rollout.surge, rollout.max_unavailable, rollout.is_immediate)
            return _start(context, again, current, "code or settings changed again", owed=rollout.owed)
        return []
    is_refused = rollout is not None and rollout.status is not RolloutStatus.COMPLETE and rollout.target == current
    # Workers of a rejected version that did work stay, even though they are of another version than new ones.
    is_refused = is_refused or context.snapshot.rejected is not None
    if context.snapshot.is_watching and not is_refused and _old_workers(context, current):
        return _start(context, DeployRequest(known, is_immediate=True), current, "code or settings changed")
    return []


def _start(context: PlanningContext, request: DeployRequest, target: str, cause: str, owed: int = 0) -> list[Action]:
    surge, max_unavailable = request.surge, request.max_unavailable
    if surge == max_unavailable == 0:
        surge = max_unavailable = 1
    working, settings = context.planner_state.working, context.snapshot.version_settings
    rollout = Rollout(
        request.id,
        target,
        surge,
        max_unavailable,
        request.is_immediate,
        context.now,
        owed=owed,
        changed_at=context.now,
        changes=changed_settings(working.settings, settings) if working is not None and settings is not None else (),
    )
    context.remember(rollout=rollout)
    count = len(_old_workers(context, target))
    return [RecordEvent("DEPLOY_STARTED", f"version {target}, {plural(count, 'worker')} to replace: {cause}")]


def _end(context: PlanningContext, rollout: Rollout, status: RolloutStatus, reason: str) -> list[Action]:
    context.remember(rollout=replace(rollout, status=status, ended_at=context.now, reason=reason))
    seconds = (context.now - rollout.started_at).total_seconds()
    return [RecordEvent(_END_CODES[status], f"version {rollout.target} after {seconds:.0f} s: {reason}")]


def _judge(context: PlanningContext, rollout: Rollout) -> list[Action]:
    """Reject the version, or complete the rollout. Otherwise it goes on."""
    new = [s for s in context.states.values() if s.is_managed and s.worker.fingerprint == rollout.target]
    failing = [s for s in new if _has_failed(context, s) and s.worker.created_at >= rollout.started_at]
    rollout = _add_failures(context, rollout, failing)
    context.remember(rollout=rollout)
    if (why := _rejection(context, rollout, failing, new)) is not None:
        return _end(context, rollout, RolloutStatus.ROLLED_BACK, why)

    leaving = context.failed_ids | context.deleted_ids
    staying = {s.worker.slot: s for s in new if s.worker.status in _STAYING and s.worker.id not in leaving}
    # A slot without its worker: the provider refused it, or the worker failed. A replacement is owed again.
    lost = [slot for slot in rollout.replacing if slot not in staying]
    unproven = tuple(s for s in rollout.replacing if s in staying and not has_passed(context, staying[s]))
    surged = tuple(slot for slot in rollout.surged if slot in staying)
    rollout = replace(rollout, surged=surged, replacing=unproven, owed=rollout.owed + len(lost))
    context.remember(rollout=rollout)
    if not _old_workers(context, rollout.target) and not unproven and rollout.owed == 0:
        count = len(staying)
        return _end(context, rollout, RolloutStatus.COMPLETE, f"{plural(count, 'worker')} on it")
    is_late = context.age_s(rollout.changed_at or rollout.started_at) > max(
        STALL_S, boot_limit(context.fleet, context.snapshot.boots).total_s, context.snapshot.traits.billing_unit_s
    )
    if is_late:
        left = len(_old_workers(context, rollout.target))
        return context.alert(STALLED, f"the rollout of version {rollout.target} makes no progress: {left} on the old")
    return []


_STAYING = (WorkerStatus.SPAWNING, WorkerStatus.ACTIVE)


def _has_failed(context: PlanningContext, state: WorkerState) -> bool:
    """It failed, in this plan or before, without having shown that its version works."""
    worker = state.worker
    is_failed = worker.id in context.failed_ids or worker.status is WorkerStatus.ERROR
    code = state.code or worker.code
    # The vendor took a rented machine. A process of this host that is gone has crashed.
    is_taken = code == "MACHINE_GONE" and context.snapshot.traits.is_remote
    if not is_failed or code in NOT_OF_VERSION or is_taken:
        return False
    return not state.is_proven or worker.failing_since is not None


def _add_failures(context: PlanningContext, rollout: Rollout, failing: list[WorkerState]) -> Rollout:
    """Count each worker once, and each host once of which a check failed."""
    failed, hosts = list(rollout.failed), list(rollout.failed_hosts)
    for state in failing:
        host = _failed_host(context, state)
        known, new = (failed, state.worker.id) if host is None else (hosts, host)
        if new not in known:
            known.append(new)
    return replace(rollout, failed=tuple(failed[:MAX_FAILED]), failed_hosts=tuple(hosts[:MAX_FAILED]))


def _failed_host(context: PlanningContext, state: WorkerState) -> str | None:
    """The host that may be at fault. None: the failure has another code, or the host is unknown."""
    if (state.code or state.worker.code) not in CHECKS_OF_HOST:
        return None
    machine = context.machine_of(state.worker)
    return state.worker.machine_host or (machine.host if machine is not None else None)


def _rejection(
    context: PlanningContext, rollout: Rollout, failing: list[WorkerState], new: list[WorkerState]
) -> str | None:
    last = f": {failing[-1].reason or failing[-1].worker.reason}" if failing else ""
    if any((s.code or s.worker.code) == QUARANTINED for s in failing):
        return f"tasks fail on its workers{last}"
    # One host may be bad. The same check on a second one shows that the version is.
    count = len(rollout.failed) + (len(rollout.failed_hosts) if len(rollout.failed_hosts) > 1 else 0)
    if count >= MAX_FAILED:
        return f"{count} of its workers failed before they worked{last}"
    ids, min_failures = {s.worker.id for s in new}, context.fleet.quarantine_min_failures
    for streak in context.snapshot.failure_streaks:
        alone = len(streak.failed) - len(streak.failed_elsewhere)
        if streak.worker_id in ids and streak.since >= rollout.started_at and alone >= min_failures:
            return f"{alone} different tasks in a row failed on {streak.worker_id}"
    refusal = context.snapshot.refusal
    if refusal is not None and refusal.code == INVALID_REQUEST and refusal.at >= rollout.started_at:
        return f"the provider refuses its settings: {refusal.reason}"
    return None


def has_passed(context: PlanningContext, state: WorkerState) -> bool:
    """A new worker has shown that its version works: it finished a task, or passed the health probe."""
    worker = state.worker
    if not state.is_healthy or worker.failing_since is not None or worker.status is not WorkerStatus.ACTIVE:
        return False
    if state.is_proven:
        return True
    queue = context.snapshot.queue
    if worker.first_claimed_at is not None or worker.activated_at is None or queue.queued > 0:
        return False
    # While tasks come and go, it will most likely get one, which proves more than a probe.
    probe_s = PROBE_HEARTBEATS * context.fleet.heartbeat_interval_s
    needed_s = max(probe_s, BUSY_PROBE_S) if queue.running or queue.arrived else probe_s
    return context.age_s(worker.activated_at) >= needed_s


def _old_workers(context: PlanningContext, target: str) -> list[WorkerState]:
    """Spawned workers of other versions that this plan does not fail or delete, and that do not drain."""
    leaving = context.failed_ids | context.deleted_ids
    return [
        state
        for state in context.states.values()
        if state.is_managed
        and state.worker.status in _STAYING
        and state.worker.fingerprint != target
        and state.worker.id not in leaving
    ]


def spare_workers(
    context: PlanningContext, staying: list[WorkerState], spare: tuple[WorkerState, ...]
) -> tuple[WorkerState, ...]:
    """Old workers that the policy can do without, reduced by the number of new workers on trial.

    While the current version is rejected, no worker of another version is spare: it could not be spawned again.
    """
    rollout = context.planner_state.rollout
    if is_rejected(context):
        return tuple(state for state in spare if state.worker.fingerprint == context.planner_state.fingerprint)
    if rollout is None or not rollout.is_running or not _old_workers(context, rollout.target):
        return spare
    new = [state for state in staying if state.worker.fingerprint == rollout.target]
    on_trial = sum(state.worker.slot in rollout.surged or not has_passed(context, state) for state in new)
    # Workers on trial do not count.
    most = max(0, min(len(spare), len(staying) - context.fleet.min_workers) - on_trial)
    return tuple(state for state in spare if state.worker.fingerprint != rollout.target)[:most]


def count_policy_spawns(context: PlanningContext, spawns: list[Action]) -> None:
    """Workers that the policy spawns replace drained ones first: they are of the new version too."""
    rollout = context.planner_state.rollout
    if rollout is not None and rollout.is_running and rollout.owed:
        slots = tuple(spawn.slot for spawn in spawns if isinstance(spawn, Spawn))[: rollout.owed]
        replacing = (*rollout.replacing, *slots)
        context.remember(rollout=replace(rollout, replacing=replacing, owed=rollout.owed - len(slots)))


def replace_workers(
    context: PlanningContext, staying: list[WorkerState], windows: dict[str, TerminationWindow]
) -> list[Action]:
    """The next step of a rollout: spawns, or drains."""
    rollout = context.planner_state.rollout
    if rollout is None or context.is_stopped or context.snapshot.is_shutting_down:
        return []
    if not rollout.is_running:
        return _drain_rejected(context, rollout, staying)
    if context.snapshot.is_paused or context.planner_state.hold is not None:
        return []
    if context.snapshot.fingerprint != rollout.target:
        # Unknown, or another version: a worker that is spawned now would not count for this rollout.
        return []
    new = {s.worker.slot: s for s in staying if s.worker.fingerprint == rollout.target}
    old = [s for s in staying if s.worker.fingerprint != rollout.target]
    # Idle ones first, then those whose billing period ends first.
    old.sort(
        key=lambda s: (s.has_active_task, windows[s.worker.id].boundary if s.worker.id in windows else context.now)
    )
    boot_s = context.snapshot.boots.p99_s or 0.0
    due_soon = [s for s in old if _is_due(context, rollout, windows.get(s.worker.id), boot_s)]
    is_canary = bool(old) and not any(has_passed(context, s) for s in new.values())

    wanted_surge = min(rollout.surge, max(len(due_soon), int(is_canary))) - len(rollout.surged)
    wanted = rollout.owed + max(0, wanted_surge)
    slots, limit = slots_to_fill(context, staying, wanted) if wanted else ([], "")
    count = f"{len(old)} of {len(staying)} on the old version"
    if slots:
        replacing, surged = slots[: rollout.owed], slots[rollout.owed :]
        _remember_step(context, rollout, replacing=replacing, surged=surged, owed=rollout.owed - len(replacing))
        context.decision = f"spawn {len(slots)}: version {rollout.target}, {count}"
        context.remember_in("scaling", spawned_at=context.now)
        return [Spawn(slot, context.decision, "deploy") for slot in slots]

    due = [s for s in old if _is_due(context, rollout, windows.get(s.worker.id), 0.0)]
    passed = [slot for slot in rollout.surged if slot in new and has_passed(context, new[slot])]
    most = context.fleet.max_changes_per_cycle
    pairs = list(zip(passed, due, strict=False))[:most]
    if pairs:
        paired = {slot for slot, _ in pairs}
        left = tuple(slot for slot in rollout.surged if slot not in paired)
        _remember_step(context, replace(rollout, surged=left))
        return _drains(context, [s for _, s in pairs], f"replaced by version {rollout.target}; {count}", DEPLOY)
    # No slot is free for a surge, or none was asked for: a few old workers drain before their replacements start.
    is_blocked = rollout.surge == 0 or (not rollout.surged and spawnable_slots(context, staying) <= 0)
    # Workers that the policy spawned show whether the version works, as long as none has passed.
    is_on_trial = is_canary and any(slot not in (*rollout.surged, *rollout.replacing) for slot in new)
    room = rollout.max_unavailable - rollout.owed - len(rollout.replacing) if is_blocked and not is_on_trial else 0
    chosen = due[: max(0, min(room, most))]
    if chosen:
        _remember_step(context, rollout, owed=rollout.owed + len(chosen))
        return _drains(context, chosen, f"replaced by version {rollout.target}; {count}", DEPLOY)
    if not context.decision:
        context.decision = f"deploying {rollout.target}: {_wait_reason(rollout, old, due, limit)}; {count}"
    return []


def _is_due(context: PlanningContext, rollout: Rollout, window: TerminationWindow | None, lead_s: float) -> bool:
    """Whether an old worker may drain in `lead_s` from now without wasting much of its billing period."""
    if rollout.is_immediate or window is None:
        return True
    if context.age_s(rollout.started_at) >= context.snapshot.traits.billing_unit_s:
        return True
    return context.now >= window.opens - timedelta(seconds=lead_s)


def _wait_reason(rollout: Rollout, old: list[WorkerState], due: list[WorkerState], limit: str) -> str:
    if rollout.surged or rollout.replacing:
        waiting = len(rollout.surged) + len(rollout.replacing)
        if due or not old:
            return f"{plural(waiting, 'new worker')} must finish a task or pass the health probe"
    if not due:
        return "old workers stay until their billing periods end"
    return limit or "waiting for a free slot"


def _remember_step(
    context: PlanningContext,
    rollout: Rollout,
    *,
    replacing: list[int] | None = None,
    surged: list[int] | None = None,
    owed: int | None = None,
) -> None:
    # The next cycle continues: with drains after spawns, or with spawns after drains.
    context.is_cut_short = True
    context.remember(
        rollout=replace(
            rollout,
            surged=(*rollout.surged, *(surged or ())),
            replacing=(*rollout.replacing, *(replacing or ())),
            owed=rollout.owed if owed is None else owed,
            changed_at=context.now,
        )
    )


def _drains(context: PlanningContext, states: list[WorkerState], reason: str, code: str) -> list[Action]:
    context.decision = f"drain {len(states)}: {reason}"
    context.is_cut_short = True
    return [Drain(state.worker.id, code, reason) for state in states]


def _drain_rejected(context: PlanningContext, rollout: Rollout, staying: list[WorkerState]) -> list[Action]:
    """After a rollback, new workers that never worked; after an abort, the additional ones."""
    most = context.fleet.max_changes_per_cycle
    if rollout.status is RolloutStatus.ABORTED and rollout.surged:
        extra = [s for s in staying if s.worker.slot in rollout.surged and s.worker.fingerprint == rollout.target]
        drained = {s.worker.slot for s in extra[:most]}
        left = tuple(s.worker.slot for s in extra if s.worker.slot not in drained and s.worker.slot is not None)
        context.remember(rollout=replace(rollout, surged=left))
        return _drains(context, extra[:most], f"rollout of version {rollout.target} aborted", ROLLBACK) if extra else []
    if rollout.status is RolloutStatus.ROLLED_BACK:
        # Workers that worked stay: the fleet cannot spawn the former version in their place.
        bad = [s for s in staying if s.worker.fingerprint == rollout.target and not has_passed(context, s)]
        # Only those of the rollout: a later one was requested by a person, who may want to see it fail.
        ended_at = rollout.ended_at or context.now
        bad = [s for s in bad if rollout.started_at <= s.worker.created_at <= ended_at]
        return _drains(context, bad[:most], f"version {rollout.target} was rolled back", ROLLBACK) if bad else []
    return []
