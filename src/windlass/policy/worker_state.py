"""Derives a worker's lifecycle state and, if it must be terminated, the error code and reason.

Health is derived from times and lists in every cycle and is never stored. Missing information is never evidence:
without a complete machine list no machine counts as gone. Conditions that must hold for a while are passed in as the
moment since when they have held, and returned the same way for the next cycle.

A worker that a person started (no slot) fails only by silence. Its queues, machine and task durations are that
person's responsibility.
"""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from windlass.model.fleet import FleetConfig
from windlass.model.machine import Machine, MachineState
from windlass.model.node import NodeState
from windlass.model.snapshot import BootTimes, WorkerView
from windlass.model.worker import LIVE, WorkerStatus
from windlass.policy.boot import BootLimit, boot_limit, boot_timeout
from windlass.policy.quarantine import QUARANTINED

# A worker enforces each task's own timeout itself. It counts as stuck only if it is late by this much.
TASK_LIMIT_MARGIN_S = 60.0
# A worker that lives this long after its first claim has proven to work. A bad image or GPU fails sooner.
PROOF_S = 60.0
# A worker without tasks has proven to work if it lived for this many times not_claiming_timeout_s.
PROOF_WITHOUT_TASKS = 2
# Ray's amounts are sums of decimal fractions. Smaller amounts are rounding errors.
MIN_RAY_USAGE = 0.001
# Without queued tasks, a worker may stay without a GPU report for this many times startup_grace_s. Longer, it costs
# money and would not be ready when a task arrives.
STARTUP_GRACES_WITHOUT_TASKS = 2
SPAWNING_TIMEOUT = "SPAWNING_TIMEOUT"


class Lifecycle(StrEnum):
    # no heartbeat yet
    SPAWNING_POD_PENDING = "spawning_pod_pending"  # the machine is not running
    SPAWNING_SCRIPT_PENDING = "spawning_script_pending"  # the machine runs, the worker's program was not started
    SPAWNING_SCRIPT_RUNNING = "spawning_script_running"  # the program was started
    # heartbeats, in fleets with an engine
    NODE_JOINING = "node_joining"  # the node has not joined the Ray cluster
    NODE_DEAD = "node_dead"  # Ray declared the node dead, whatever its heartbeat says
    # heartbeats
    ACTIVE_INITIALIZING = "active_initializing"  # no GPU report yet
    ACTIVE_GPU_NOT_DETECTED = "active_gpu_not_detected"  # the GPU reports zero memory
    ACTIVE_READY = "active_ready"
    ACTIVE_STALE = "active_stale"  # the last heartbeat is too old
    CRASHED = "crashed"  # the machine or process is known to be gone, whatever the heartbeat says
    TERMINATING = "terminating"  # finishes its tasks, then terminates
    # ended
    ERROR = "error"
    TERMINATED = "terminated"


# Tuples, not sets: a lookup in a set calls the enum's slow hash function.
SPAWNING = (Lifecycle.SPAWNING_POD_PENDING, Lifecycle.SPAWNING_SCRIPT_PENDING, Lifecycle.SPAWNING_SCRIPT_RUNNING)
BOOTING = (*SPAWNING, Lifecycle.NODE_JOINING)
PROMOTABLE = (Lifecycle.ACTIVE_INITIALIZING, Lifecycle.ACTIVE_GPU_NOT_DETECTED, Lifecycle.ACTIVE_READY)
NOT_READY = (Lifecycle.ACTIVE_INITIALIZING, Lifecycle.ACTIVE_GPU_NOT_DETECTED)
ENDED = (Lifecycle.ERROR, Lifecycle.TERMINATED, Lifecycle.TERMINATING)

Failure = tuple[str, str]  # error code and reason


class Presence(StrEnum):
    """What the provider's list says about a worker's machine."""

    PRESENT = "present"
    EXITED = "exited"  # listed, but it will never run again
    MISSING = "missing"  # missing from complete lists for longer than the provider's lists may lag
    NEVER = "never"  # the create call was never answered, and no machine appeared within creation_lateness_s
    UNKNOWN = "unknown"


@dataclass(slots=True)
class WorkerState:
    """A worker at one moment, with every conclusion drawn. Not frozen, for the same reason as WorkerView."""

    worker: WorkerView
    lifecycle: Lifecycle
    presence: Presence
    is_managed: bool  # False: a person started it
    has_active_task: bool  # also true if Ray reports work of others on its node
    heartbeat_age_s: float | None
    # First of the consecutive cycles that saw it idle, and its idle time: as the worker reports it, if it does.
    idle_since: datetime | None
    idle_s: float | None  # None while it has a task
    # First of the consecutive cycles that saw queued tasks while this worker has never claimed one.
    unclaimed_since: datetime | None
    is_vram_stale: bool
    is_stale: bool
    is_booting: bool  # not ready yet, but expected to be
    is_late: bool  # its boot took too long; it is kept because its billing period has begun, and does not count
    is_proven: bool  # it got through its first tasks, or was ready for long enough
    should_promote: bool
    code: str | None  # the error code if the worker must be terminated
    reason: str | None

    @property
    def should_terminate(self) -> bool:
        return self.code is not None

    @property
    def has_heartbeat(self) -> bool:
        return self.heartbeat_age_s is not None

    @property
    def is_healthy(self) -> bool:
        return self.lifecycle is Lifecycle.ACTIVE_READY and not self.should_terminate


def derive_worker_state(
    worker: WorkerView,
    machine: Machine | None,
    presence: Presence,
    fleet: FleetConfig,
    now: datetime,
    queued: int,
    *,
    idle_since: datetime | None = None,
    unclaimed_since: datetime | None = None,
    quarantine_reason: str | None = None,
    limit: BootLimit | None = None,
    late_until: datetime | None = None,
    misplaced: Failure | None = None,
) -> WorkerState:
    """`queued`: tasks in the fleet's queues. `idle_since`, `unclaimed_since`: values of the previous cycle's state.
    `limit`: how long its boot may take. `late_until`: it is kept until then although its boot takes longer.
    `misplaced`: why its machine must not be used."""
    limit = limit or boot_limit(fleet, BootTimes())
    if late_until is not None:
        # Waiting costs nothing: a machine that makes no progress gets the whole time before it is replaced.
        limit = BootLimit(limit.total_s, limit.total_s)
    heartbeat_age_s = _age_s(worker.last_heartbeat, now)
    age_s = (now - (worker.prepared_at or worker.created_at)).total_seconds()
    is_silent = heartbeat_age_s is not None and heartbeat_age_s > _silence_limit_s(worker, fleet)
    lifecycle = _lifecycle(worker, machine, presence, fleet, heartbeat_age_s, is_silent)
    is_recent = heartbeat_age_s is not None and heartbeat_age_s < fleet.promotion_age_s
    has_claimed = worker.first_claimed_at is not None or bool(worker.running)

    has_active_task = bool(worker.running) or _has_ray_usage(worker, fleet, now)
    idle_since = None if has_active_task else idle_since or now

    # A ready worker that never claims is unremarkable for a moment and a failure after not_claiming_timeout_s. In a
    # fleet with an engine it counts only while the dispatcher, which places the tasks, reports.
    is_able = lifecycle in (Lifecycle.ACTIVE_READY, Lifecycle.ACTIVE_INITIALIZING) and not worker.is_paused
    is_dispatched = fleet.engine is None or not _is_node_report_old(worker, fleet, now)
    is_unclaimed = queued > 0 and not has_claimed and is_able and is_dispatched and worker.slot is not None
    unclaimed_since = (unclaimed_since or now) if is_unclaimed else None

    failure = (misplaced if lifecycle not in (*ENDED, Lifecycle.CRASHED) else None) or _failure_reason(
        worker, machine, presence, lifecycle, fleet, now, queued, age_s, unclaimed_since, quarantine_reason, limit
    )
    is_late = failure is not None and failure[0] == SPAWNING_TIMEOUT and late_until is not None
    code, reason = (None, None) if is_late or failure is None else failure

    # A worker without a GPU report after startup_grace_s is no longer expected to become ready.
    is_booting = lifecycle in BOOTING or (lifecycle in NOT_READY and age_s <= fleet.startup_grace_s)
    is_proven = _is_proven(worker, lifecycle, fleet) and code != "GPU_READY_NOT_CLAIMING" and quarantine_reason is None
    return WorkerState(
        worker=worker,
        lifecycle=lifecycle,
        presence=presence,
        is_managed=worker.slot is not None,
        has_active_task=has_active_task,
        heartbeat_age_s=heartbeat_age_s,
        idle_since=idle_since,
        idle_s=None if idle_since is None else _idle_s(worker, idle_since, now),
        unclaimed_since=unclaimed_since,
        is_vram_stale=worker.vram_at is not None and (now - worker.vram_at).total_seconds() > fleet.vram_stale_s,
        # A draining worker can be stale too. A crashed one is reported as crashed.
        is_stale=is_silent and worker.status in LIVE and lifecycle is not Lifecycle.CRASHED,
        is_booting=not has_claimed and is_booting and not is_late,
        is_late=is_late,
        is_proven=is_proven,
        should_promote=worker.status is WorkerStatus.SPAWNING and is_recent and lifecycle in PROMOTABLE,
        code=code,
        reason=reason,
    )


def _lifecycle(
    worker: WorkerView,
    machine: Machine | None,
    presence: Presence,
    fleet: FleetConfig,
    heartbeat_age_s: float | None,
    is_silent: bool,
) -> Lifecycle:
    if worker.status is WorkerStatus.TERMINATED:
        return Lifecycle.TERMINATED
    if worker.status is WorkerStatus.ERROR:
        return Lifecycle.ERROR
    if worker.status is WorkerStatus.TERMINATING:
        return Lifecycle.TERMINATING
    if presence in (Presence.EXITED, Presence.MISSING):
        return Lifecycle.CRASHED
    if heartbeat_age_s is None:
        if machine is None or machine.state is not MachineState.RUNNING:
            return Lifecycle.SPAWNING_POD_PENDING
        return Lifecycle.SPAWNING_SCRIPT_RUNNING if worker.prepared_at else Lifecycle.SPAWNING_SCRIPT_PENDING
    if is_silent:
        return Lifecycle.ACTIVE_STALE
    if fleet.engine is not None and worker.slot is not None:
        return _lifecycle_of_node(worker, fleet)
    if not fleet.has_gpu or worker.slot is None:
        return Lifecycle.ACTIVE_READY
    if worker.vram_at is None:
        return Lifecycle.ACTIVE_INITIALIZING
    return Lifecycle.ACTIVE_READY if worker.vram_total_mb else Lifecycle.ACTIVE_GPU_NOT_DETECTED


def _lifecycle_of_node(worker: WorkerView, fleet: FleetConfig) -> Lifecycle:
    if worker.node is None or worker.node.state is NodeState.ABSENT:
        return Lifecycle.NODE_JOINING
    if worker.node.state is NodeState.DEAD:
        return Lifecycle.NODE_DEAD
    # Ray, not the worker, decides which GPUs a node has.
    if fleet.has_gpu and not worker.node.total.get("GPU"):
        return Lifecycle.ACTIVE_GPU_NOT_DETECTED
    return Lifecycle.ACTIVE_READY


def _failure_reason(  # noqa: PLR0912 - one branch for each way to fail
    worker: WorkerView,
    machine: Machine | None,
    presence: Presence,
    lifecycle: Lifecycle,
    fleet: FleetConfig,
    now: datetime,
    queued: int,
    age_s: float,
    unclaimed_since: datetime | None,
    quarantine_reason: str | None,
    limit: BootLimit,
) -> Failure | None:
    """Why this worker must be terminated, or None."""
    if lifecycle in ENDED:
        return None
    if lifecycle is Lifecycle.CRASHED:
        cause = machine.note if machine is not None and machine.note else "its machine is gone"
        return "MACHINE_GONE", cause[0].upper() + cause[1:]
    if lifecycle is Lifecycle.ACTIVE_STALE:
        age = f"({_age_s(worker.last_heartbeat, now):.0f}s old)"
        if worker.running:
            return "STALE_HEARTBEAT_ACTIVE_TASK", f"Stale heartbeat with active tasks {age}"
        if queued:
            return "STALE_HEARTBEAT_TASKS_QUEUED", f"Heartbeat expired with tasks queued {age}"
        return "STALE_HEARTBEAT_IDLE", f"Heartbeat expired while idle {age}"
    if lifecycle in SPAWNING:
        return _startup_failure(worker, machine, presence, fleet, now, queued, limit)
    if worker.slot is None:
        return None
    if lifecycle in (Lifecycle.NODE_JOINING, Lifecycle.NODE_DEAD):
        return _node_failure(worker, lifecycle, fleet, now, limit)

    for task in worker.running:
        limit_s = fleet.stuck_timeout_s if task.timeout_s is None else task.timeout_s + TASK_LIMIT_MARGIN_S
        running_s = (now - task.started_at).total_seconds()
        if limit_s is not None and running_s > limit_s:
            return "STUCK_TASK", f"Stuck task {task.task_id} ({running_s:.0f}s)"
    if quarantine_reason is not None:
        return QUARANTINED, quarantine_reason
    # The rest depends on the node's resources and on tasks being placed: unknown while the dispatcher does not report.
    if fleet.engine is not None and _is_node_report_old(worker, fleet, now):
        return None

    if lifecycle is Lifecycle.ACTIVE_GPU_NOT_DETECTED:
        lost_s = _age_s(worker.vram_lost_at, now)
        # A worker that never reported GPU memory has been without for its whole life.
        without_s = age_s if lost_s is None else lost_s
        if without_s > fleet.gpu_not_detected_timeout_s:
            return "GPU_NOT_DETECTED", f"GPU not detected (VRAM=0) after {without_s:.0f}s"
    unclaimed_s = _age_s(unclaimed_since, now)
    if lifecycle is Lifecycle.ACTIVE_INITIALIZING:
        has_claimed = worker.first_claimed_at is not None or bool(worker.running)
        if unclaimed_s is not None:
            # The queued task may have arrived just now: allow one more heartbeat to report the GPU.
            is_late = age_s > fleet.startup_grace_s and unclaimed_s > fleet.heartbeat_interval_s
        else:
            is_late = not has_claimed and age_s > STARTUP_GRACES_WITHOUT_TASKS * fleet.startup_grace_s
        if is_late:
            return "STARTUP_NEVER_READY", f"Never initialized after startup grace period ({age_s:.0f}s)"
    elif unclaimed_s is not None and unclaimed_s > fleet.not_claiming_timeout_s:
        ready = "GPU ready" if fleet.has_gpu else "Ready"
        return "GPU_READY_NOT_CLAIMING", f"{ready} but never claimed tasks ({unclaimed_s:.0f}s)"
    return None


def _startup_failure(
    worker: WorkerView,
    machine: Machine | None,
    presence: Presence,
    fleet: FleetConfig,
    now: datetime,
    queued: int,
    limit: BootLimit,
) -> Failure | None:
    """For a worker without any heartbeat."""
    if worker.status is WorkerStatus.ACTIVE:
        # It registered, so it has booted: its silence counts from the registration.
        age_s = (now - (worker.activated_at or worker.created_at)).total_seconds()
        if age_s > _silence_limit_s(worker, fleet):
            what = "No heartbeat received with tasks queued" if queued else "No heartbeat received"
            return "NO_HEARTBEAT", f"{what} ({age_s:.0f}s after it registered)"
        return None
    age_s = (now - worker.created_at).total_seconds()
    if presence is Presence.NEVER:
        return "NO_MACHINE_ID", f"No machine id, and no machine appeared for it ({age_s:.0f}s)"
    if worker.prepare_code is not None:
        return worker.prepare_code, worker.prepare_reason or "Its machine could not be prepared"
    # The boot counts from the machine's creation: create calls may take long themselves.
    late = boot_timeout(worker, machine, limit, now)
    return None if late is None else (SPAWNING_TIMEOUT, f"Spawning timeout {late}")


def _node_failure(
    worker: WorkerView, lifecycle: Lifecycle, fleet: FleetConfig, now: datetime, limit: BootLimit
) -> Failure | None:
    """For a node that Ray declared dead or that never joined. An old report proves neither."""
    node = worker.node
    if node is None or _is_node_report_old(worker, fleet, now):
        return None
    if lifecycle is Lifecycle.NODE_DEAD:
        return "NODE_DEAD", f"Its Ray node is dead: {node.note or 'no reason given'}"
    # From its first heartbeat, not its creation: the dispatcher looks for the node from then on.
    waited_s = (now - node.since).total_seconds()
    if waited_s > limit.stall_s:
        return "NODE_NOT_JOINED", f"Booted, but never joined its Ray cluster ({waited_s:.0f}s)"
    return None


def _is_node_report_old(worker: WorkerView, fleet: FleetConfig, now: datetime) -> bool:
    """The dispatcher has not reported on the worker's node within heartbeat_timeout_s."""
    reported_at = worker.node.at if worker.node is not None else None
    return reported_at is None or (now - reported_at).total_seconds() > fleet.heartbeat_timeout_s


def _has_ray_usage(worker: WorkerView, fleet: FleetConfig, now: datetime) -> bool:
    """Ray reports resources of the node in use, by Windlass tasks or by anything else on the cluster."""
    if worker.node is None or not worker.node.used or _is_node_report_old(worker, fleet, now):
        return False
    return any(amount > MIN_RAY_USAGE for amount in worker.node.used.values())


def _is_proven(worker: WorkerView, lifecycle: Lifecycle, fleet: FleetConfig) -> bool:
    """Judged by what it did up to its last heartbeat. What happened since is a separate failure."""
    first, beat_at = worker.first_claimed_at, worker.last_heartbeat
    if beat_at is None:
        return False
    if first is not None:
        is_first_running = any(task.started_at <= first for task in worker.running)
        return not is_first_running or (beat_at - first).total_seconds() >= PROOF_S
    is_ready = lifecycle in (Lifecycle.ACTIVE_READY, Lifecycle.ACTIVE_STALE, Lifecycle.CRASHED)
    lived_s = (beat_at - worker.activated_at).total_seconds() if worker.activated_at is not None else 0.0
    return is_ready and lived_s >= PROOF_WITHOUT_TASKS * fleet.not_claiming_timeout_s


def _silence_limit_s(worker: WorkerView, fleet: FleetConfig) -> float:
    if worker.slot is None and worker.lease_s is not None:
        return worker.lease_s
    return fleet.heartbeat_timeout_s


def _idle_s(worker: WorkerView, idle_since: datetime, now: datetime) -> float:
    since_beat_s = _age_s(worker.last_heartbeat, now)
    if worker.idle_s is None or since_beat_s is None:
        # Cycles only sample: tasks between two cycles are not seen.
        return max(0.0, (now - idle_since).total_seconds())
    # Busy at its last heartbeat: the task has ended since, but when is unknown.
    return max(0.0, worker.idle_s + since_beat_s) if worker.idle_s > 0 else 0.0


def _age_s(moment: datetime | None, now: datetime) -> float | None:
    return None if moment is None else (now - moment).total_seconds()
