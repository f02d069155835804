"""What a worker is, and why. The one place that says so; everything else matches on its answer.

Health is derived from times and lists in every cycle and never stored. Missing knowledge is never evidence: without
a complete list of machines no machine is gone. What must have been so for a while, cycle after cycle, comes in as
the moment since when it has been so, and goes out the same way for the next cycle.

A worker that a person started (without a slot) is judged by its silence alone: what it serves, what it runs on and
for how long its tasks may take is that person's business.
"""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from windlass.model.fleet import FleetConfig
from windlass.model.machine import Machine, MachineState
from windlass.model.node import NodeState
from windlass.model.snapshot import RunningView, WorkerView
from windlass.model.worker import LIVE, WorkerStatus
from windlass.policy.quarantine import QUARANTINED

# A task's own limit is kept by its worker; only a worker that fails at that is stuck, and this is its time to act.
TASK_LIMIT_MARGIN_S = 60.0
# Whoever lives this long after its first claim works. A bad image, or a bad GPU, shows sooner.
PROOF_S = 60.0
# An engine's amounts are sums of decimal fractions: less than this is nothing.
LEAST_USE = 0.001
# Whoever finds nothing to claim works if it has lived for this many times as long as one may go without claiming.
PROOF_WITHOUT_TASKS = 2
# Nothing waits for it, and it has not said a word of its GPU for this many times as long as it may take to start: it is
# paid for, and will be of no use when something does wait.
GRACES_WITHOUT_TASKS = 2


class Lifecycle(StrEnum):
    # no heartbeat yet
    SPAWNING_POD_PENDING = "spawning_pod_pending"  # its machine does not run yet
    SPAWNING_SCRIPT_PENDING = "spawning_script_pending"  # its machine runs, the worker's program was not started
    SPAWNING_SCRIPT_RUNNING = "spawning_script_running"  # started, not heard of yet
    # heard of, where an engine places tasks
    NODE_JOINING = "node_joining"  # its engine has not seen it yet
    NODE_DEAD = "node_dead"  # its engine has given it up, whatever its heartbeat says
    # heard of
    ACTIVE_INITIALIZING = "active_initializing"  # no word about its GPU yet
    ACTIVE_GPU_NOT_DETECTED = "active_gpu_not_detected"  # a GPU of zero memory
    ACTIVE_READY = "active_ready"
    ACTIVE_STALE = "active_stale"  # not heard of for too long
    CRASHED = "crashed"  # its machine, or process, is known to be gone, whatever its heartbeat says
    TERMINATING = "terminating"  # finishes what it has, then ends
    # over
    ERROR = "error"
    TERMINATED = "terminated"


# Tuples and not sets: looking for a member of an enum in a set calls its hash function, which is slow.
SPAWNING = (Lifecycle.SPAWNING_POD_PENDING, Lifecycle.SPAWNING_SCRIPT_PENDING, Lifecycle.SPAWNING_SCRIPT_RUNNING)
PROMOTABLE = (Lifecycle.ACTIVE_INITIALIZING, Lifecycle.ACTIVE_GPU_NOT_DETECTED, Lifecycle.ACTIVE_READY)
NOT_READY = (Lifecycle.ACTIVE_INITIALIZING, Lifecycle.ACTIVE_GPU_NOT_DETECTED)


class Presence(StrEnum):
    """What the provider's list says about a worker's machine."""

    PRESENT = "present"
    EXITED = "exited"  # listed, but it will never run again
    MISSING = "missing"  # not in a complete list, for longer than the provider's lists may lag
    NEVER = "never"  # its creation was never answered, and no machine appeared in all the time one could
    UNKNOWN = "unknown"


@dataclass(slots=True)
class WorkerState:
    """A worker at one moment: every judgement made, nothing left to conclude. Not frozen, as WorkerView is not."""

    worker: WorkerView
    lifecycle: Lifecycle
    presence: Presence
    is_managed: bool  # False: a person started it
    # Or runs, as its engine says, what others placed there: tasks and actors of another's handler.
    has_active_task: bool
    # Since its program was started, or since it was hired.
    effective_age_s: float
    heartbeat_age_s: float | None
    # Since when cycles have seen it idle, and for how long it has been: by its own word where it gave one.
    idle_since: datetime | None
    idle_s: float | None  # None while it has a task
    # Since when tasks have waited for it while it has never claimed one. None when it is not so.
    unclaimed_since: datetime | None

    is_heartbeat_recent: bool
    is_vram_reported: bool
    is_vram_stale: bool
    is_gpu_broken: bool
    is_not_claiming: bool
    is_stale: bool
    # On its way, and of no use yet.
    is_booting: bool
    # What it is made of works: it has got through its first tasks, or could have taken any for long enough.
    is_proven: bool

    should_promote: bool
    should_terminate: bool
    reason: str | None
    code: str | None

    @property
    def has_heartbeat(self) -> bool:
        return self.heartbeat_age_s is not None

    @property
    def has_ever_claimed(self) -> bool:
        return self.worker.first_claimed_at is not None

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
    blamed: str | None = None,
) -> WorkerState:
    """Everything there is to say about a worker. `queued`: tasks that wait in the queues its fleet serves.

    `idle_since`, `unclaimed_since`: what the last cycle's state of it said. `blamed`: why it is to blame for
    the tasks that failed on it, if it is.
    """
    heartbeat_age_s = _age_s(worker.last_heartbeat, now)
    age_s = (now - (worker.prepared_at or worker.created_at)).total_seconds()
    is_silent = heartbeat_age_s is not None and heartbeat_age_s > _silence_limit_s(worker, fleet)
    lifecycle = _lifecycle(worker, machine, presence, fleet, heartbeat_age_s, is_silent)
    is_recent = heartbeat_age_s is not None and heartbeat_age_s < fleet.promotion_age_s
    is_at_work = bool(worker.running) or _is_used(worker, fleet, now)
    idle_since = None if is_at_work else idle_since or now
    has_worked = worker.first_claimed_at is not None or bool(worker.running)
    # Where nobody places tasks, who gets none is not to blame.
    is_dispatched = fleet.engine is None or not _is_engine_silent(worker, fleet, now)
    is_unclaimed = queued > 0 and not has_worked and is_dispatched and _is_unclaimed(worker, lifecycle)
    unclaimed_since = (unclaimed_since or now) if is_unclaimed else None
    code, reason = _trouble(worker, machine, presence, lifecycle, fleet, now, queued, age_s, unclaimed_since, blamed)
    return WorkerState(
        worker=worker,
        lifecycle=lifecycle,
        presence=presence,
        is_managed=worker.slot is not None,
        has_active_task=is_at_work,
        effective_age_s=age_s,
        heartbeat_age_s=heartbeat_age_s,
        idle_since=idle_since,
        idle_s=None if idle_since is None else _idle_s(worker, idle_since, now),
        unclaimed_since=unclaimed_since,
        is_heartbeat_recent=is_recent,
        is_vram_reported=worker.vram_at is not None,
        is_vram_stale=worker.vram_at is not None and (now - worker.vram_at).total_seconds() > fleet.vram_stale_s,
        is_gpu_broken=code == "GPU_NOT_DETECTED",
        is_not_claiming=code == "GPU_READY_NOT_CLAIMING",
        # A worker that finishes its last tasks can fall silent too; a crashed one is worse than silent.
        is_stale=is_silent and worker.status in LIVE and lifecycle is not Lifecycle.CRASHED,
        is_booting=not has_worked and _is_booting(lifecycle, fleet, age_s),
        is_proven=_is_proven(worker, lifecycle, fleet) and code != "GPU_READY_NOT_CLAIMING" and blamed is None,
        should_promote=worker.status is WorkerStatus.SPAWNING and is_recent and lifecycle in PROMOTABLE,
        should_terminate=code is not None,
        reason=reason,
        code=code,
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
    # What a node has is its engine's word, not its own.
    if fleet.has_gpu and not worker.node.total.get("GPU"):
        return Lifecycle.ACTIVE_GPU_NOT_DETECTED
    return Lifecycle.ACTIVE_READY


def _trouble(  # noqa: PLR0912 - one for each way to be broken
    worker: WorkerView,
    machine: Machine | None,
    presence: Presence,
    lifecycle: Lifecycle,
    fleet: FleetConfig,
    now: datetime,
    queued: int,
    age_s: float,
    unclaimed_since: datetime | None,
    blamed: str | None,
) -> tuple[str | None, str | None]:
    """Why this worker must end: a code for machines and a reason in words. (None, None) if it need not."""
    if lifecycle in (Lifecycle.ERROR, Lifecycle.TERMINATED, Lifecycle.TERMINATING):
        return None, None
    if lifecycle is Lifecycle.CRASHED:
        how = machine.note if machine is not None and machine.note else "its machine is gone"
        return "MACHINE_GONE", how[0].upper() + how[1:]
    if lifecycle is Lifecycle.ACTIVE_STALE:
        return _stale(worker, now, queued)
    if lifecycle in SPAWNING:
        return _not_heard(worker, presence, fleet, now, queued)
    if worker.slot is None:
        return None, None
    if lifecycle in (Lifecycle.NODE_JOINING, Lifecycle.NODE_DEAD):
        return _given_up(worker, lifecycle, fleet, now)
    stuck = _stuck_task(worker, fleet, now)
    if stuck is not None:
        return "STUCK_TASK", f"Stuck task {stuck.task_id} ({(now - stuck.started_at).total_seconds():.0f}s)"
    if blamed is not None:
        return QUARANTINED, blamed
    if fleet.engine is not None and _is_engine_silent(worker, fleet, now):
        return None, None
    if lifecycle is Lifecycle.ACTIVE_GPU_NOT_DETECTED:
        lost_s = _age_s(worker.vram_lost_at, now)
        # One that never had a GPU has been without for as long as it has run.
        without_s = age_s if lost_s is None else lost_s
        if without_s > fleet.gpu_not_detected_timeout_s:
            return "GPU_NOT_DETECTED", f"GPU not detected (VRAM=0) after {without_s:.0f}s"
    unclaimed_s = _age_s(unclaimed_since, now)
    if lifecycle is Lifecycle.ACTIVE_INITIALIZING:
        if _is_never_ready(worker, fleet, age_s, unclaimed_s):
            return "STARTUP_NEVER_READY", f"Never initialized after startup grace period ({age_s:.0f}s)"
    elif unclaimed_s is not None and unclaimed_s > fleet.not_claiming_timeout_s:
        what = "GPU ready" if fleet.has_gpu else "Ready"
        return "GPU_READY_NOT_CLAIMING", f"{what} but never claimed tasks ({unclaimed_s:.0f}s)"
    return None, None


def _is_never_ready(worker: WorkerView, fleet: FleetConfig, age_s: float, unclaimed_s: float | None) -> bool:
    """Of one without a word about its GPU. Whoever has worked has one."""
    if unclaimed_s is not None:
        # The task for which it is too late may have come just now: one more beat to say that it is ready.
        return age_s > fleet.startup_grace_s and unclaimed_s > fleet.heartbeat_interval_s
    has_worked = worker.first_claimed_at is not None or bool(worker.running)
    return not has_worked and age_s > GRACES_WITHOUT_TASKS * fleet.startup_grace_s


def _stale(worker: WorkerView, now: datetime, queued: int) -> tuple[str, str]:
    age = f"({_age_s(worker.last_heartbeat, now):.0f}s old)"
    if worker.running:
        return "STALE_HEARTBEAT_ACTIVE_TASK", f"Stale heartbeat with active tasks {age}"
    if queued:
        return "STALE_HEARTBEAT_TASKS_QUEUED", f"Heartbeat expired with tasks queued {age}"
    return "STALE_HEARTBEAT_IDLE", f"Heartbeat expired while idle {age}"


def _not_heard(
    worker: WorkerView, presence: Presence, fleet: FleetConfig, now: datetime, queued: int
) -> tuple[str | None, str | None]:
    """A worker without a heartbeat: on its way, or never to be heard of."""
    if worker.status is WorkerStatus.ACTIVE:
        # It announced itself, so its boot is over and its silence is counted from there.
        age_s = (now - (worker.activated_at or worker.created_at)).total_seconds()
        if age_s > _silence_limit_s(worker, fleet):
            what = "No heartbeat received with tasks queued" if queued else "No heartbeat received"
            return "NO_HEARTBEAT", f"{what} ({age_s:.0f}s after it announced itself)"
        return None, None
    age_s = (now - worker.created_at).total_seconds()
    if presence is Presence.NEVER:
        return "NO_MACHINE_ID", f"No machine id, and no machine appeared for it ({age_s:.0f}s)"
    if worker.prepare_code is not None:
        return worker.prepare_code, worker.prepare_reason or "its machine could not be prepared"
    # Before it was made it could not boot, and providers take their time.
    boot_s = (now - (worker.machine_at or worker.created_at)).total_seconds()
    if boot_s > fleet.spawn_timeout_s:
        return "SPAWNING_TIMEOUT", f"Spawning timeout ({boot_s:.0f}s)"
    return None, None


def _given_up(
    worker: WorkerView, lifecycle: Lifecycle, fleet: FleetConfig, now: datetime
) -> tuple[str | None, str | None]:
    """A node that its engine has never seen, or sees no more. An engine nobody has looked at lately says nothing."""
    node = worker.node
    if node is None or _is_engine_silent(worker, fleet, now):
        return None, None
    if lifecycle is Lifecycle.NODE_DEAD:
        return "NODE_DEAD", f"Its node is dead: {node.note or 'no word why'}"
    # Not from its hiring: since it said that it had booted, as its engine was asked for it from then on.
    waited_s = (now - node.since).total_seconds()
    if waited_s > fleet.spawn_timeout_s:
        return "NODE_NOT_JOINED", f"Booted, but never joined its cluster ({waited_s:.0f}s)"
    return None, None


def _is_engine_silent(worker: WorkerView, fleet: FleetConfig, now: datetime) -> bool:
    """Whether nobody has looked at its engine lately: what was last said of its node may have changed."""
    said_at = worker.node.at if worker.node is not None else None
    return said_at is None or (now - said_at).total_seconds() > fleet.heartbeat_timeout_s


def _is_used(worker: WorkerView, fleet: FleetConfig, now: datetime) -> bool:
    """Whether its engine says that something of its node is in use, by whomever."""
    if worker.node is None or not worker.node.used or _is_engine_silent(worker, fleet, now):
        return False
    return any(amount > LEAST_USE for amount in worker.node.used.values())


def _is_unclaimed(worker: WorkerView, lifecycle: Lifecycle) -> bool:
    """Whether one that has never taken a task could take any. For a moment that is nothing; for long it is broken."""
    is_able = lifecycle in (Lifecycle.ACTIVE_READY, Lifecycle.ACTIVE_INITIALIZING)
    return is_able and worker.slot is not None and not worker.is_paused


def _is_booting(lifecycle: Lifecycle, fleet: FleetConfig, age_s: float) -> bool:
    if lifecycle in SPAWNING or lifecycle is Lifecycle.NODE_JOINING:
        return True
    # One that has no word of its GPU after all its time is no longer expected: it may be let go like any other.
    return lifecycle in NOT_READY and age_s <= fleet.startup_grace_s


def _is_proven(worker: WorkerView, lifecycle: Lifecycle, fleet: FleetConfig) -> bool:
    """By what it did until it was last heard of: whatever has happened since is another matter."""
    first, heard = worker.first_claimed_at, worker.last_heartbeat
    if heard is None:
        return False
    if first is not None:
        is_at_its_first = any(task.started_at <= first for task in worker.running)
        return not is_at_its_first or (heard - first).total_seconds() >= PROOF_S
    is_ready = lifecycle in (Lifecycle.ACTIVE_READY, Lifecycle.ACTIVE_STALE, Lifecycle.CRASHED)
    lived_s = (heard - worker.activated_at).total_seconds() if worker.activated_at is not None else 0.0
    return is_ready and lived_s >= PROOF_WITHOUT_TASKS * fleet.not_claiming_timeout_s


def _stuck_task(worker: WorkerView, fleet: FleetConfig, now: datetime) -> RunningView | None:
    for task in worker.running:
        limit_s = fleet.stuck_timeout_s if task.timeout_s is None else task.timeout_s + TASK_LIMIT_MARGIN_S
        if limit_s is not None and (now - task.started_at).total_seconds() > limit_s:
            return task
    return None


def _silence_limit_s(worker: WorkerView, fleet: FleetConfig) -> float:
    if worker.slot is None and worker.lease_s is not None:
        return worker.lease_s
    return fleet.heartbeat_timeout_s


def _idle_s(worker: WorkerView, idle_since: datetime, now: datetime) -> float:
    """For how long it has had nothing to do."""
    since_beat_s = _age_s(worker.last_heartbeat, now)
    if worker.idle_s is None or since_beat_s is None:
        # Cycles only sample: what it did between two of them is not known.
        return max(0.0, (now - idle_since).total_seconds())
    # At work when it last beat: what it did then is over by now, but since when is not known.
    return max(0.0, worker.idle_s + since_beat_s) if worker.idle_s > 0 else 0.0


def _age_s(moment: datetime | None, now: datetime) -> float | None:
    return None if moment is None else (now - moment).total_seconds()
