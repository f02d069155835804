"""Everything one cycle observed, as plain values.

A plan is a pure function of a snapshot and the fleet's settings. The snapshot is stored with its cycle, so
`windlass replay` can plan again from it.

Unknown is a value: `machines` is None if the provider returned no complete list. No conclusion is then drawn from the
absence of a machine.
"""

from dataclasses import dataclass, field
from datetime import datetime

from windlass.model.adaptive import AdaptiveMemory
from windlass.model.cost import Bill, Spending
from windlass.model.fleet import FleetConfig
from windlass.model.machine import Machine, ProviderTraits, Volume
from windlass.model.node import NodeView
from windlass.model.rollout import DeployRequest, Rollout, WorkingVersion
from windlass.model.worker import WorkerStatus

# Queued tasks of a queue that a cycle counts, as in 10_observe_queues.sql.
MAX_QUEUED = 1_000_000


# RunningView and WorkerView are immutable by convention only. A cycle creates thousands of them, and frozen=True
# doubles the cost of creating one.
@dataclass(slots=True)
class RunningView:
    """A task that a worker has claimed."""

    task_id: int
    started_at: datetime
    timeout_s: float | None
    # None: the fleet has one queue.
    queue: str | None = None


@dataclass(slots=True)
class WorkerView:
    """A worker that is not terminated."""

    id: str
    # None: a person started the worker. The control plane does not count it as capacity and does not terminate it.
    slot: int | None
    status: WorkerStatus
    is_paused: bool
    concurrency: int
    created_at: datetime
    activated_at: datetime | None = None
    last_heartbeat: datetime | None = None
    first_claimed_at: datetime | None = None
    terminating_at: datetime | None = None
    # Idle time that the worker reported with its last heartbeat.
    idle_s: float | None = None
    machine_id: str | None = None
    # When the control plane learned the machine's id.
    machine_at: datetime | None = None
    # Result of the provider's create call: "created", "refused", "ambiguous". None: pending, or never answered.
    creation: str | None = None
    prepared_at: datetime | None = None
    vram_total_mb: int | None = None
    vram_used_mb: int | None = None
    vram_at: datetime | None = None
    # Start of the unbroken time in which the GPU reports zero memory, after it reported some. None: the last report had
    # memory, or no report ever had.
    vram_lost_at: datetime | None = None
    running: tuple[RunningView, ...] = ()
    code: str | None = None
    reason: str | None = None
    # Lease that a worker started by hand asked for. Other workers use the fleet's heartbeat_timeout_s.
    lease_s: float | None = None
    # None: the machine has no price.
    bill: Bill | None = None
    # The error, if the control plane could not start the worker's program on the machine.
    prepare_code: str | None = None
    prepare_reason: str | None = None
    # SSH host key that the machine presented at the first connection.
    host_key: str | None = None
    # The worker's Ray node, in fleets with engine = "ray".
    node: NodeView | None = None
    # Start of the unbroken series of failed attempts on this worker.
    failing_since: datetime | None = None
    # Provider of the worker's machine. None for a worker started by hand.
    provider: str | None = None
    # When the provider first reported the machine as running, and when its boot last made progress after that: a step
    # that it reported, its join, the start of its preparation.
    running_at: datetime | None = None
    progress_at: datetime | None = None
    # The last recorded address.
    address: str | None = None
    machine_host: str | None = None
    instance_type: str | None = None
    place: str | None = None
    machine_created_at: datetime | None = None
    # Version of the code and settings it was spawned with. None: unknown.
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True)
class FailureStreak:
    """Tasks that failed one after another on one worker, and how other workers did in the same time."""

    worker_id: str
    # When the first of them failed.
    since: datetime
    # Ids of different tasks, newest last. A long streak is cut to the newest.
    failed: tuple[int, ...]
    # Failed task id to the worker that has completed it since.
    completed_by: dict[int, str] = field(default_factory=dict)
    # Failed task ids that also failed on a worker that completed tasks in this time.
    failed_elsewhere: tuple[int, ...] = ()
    # Other workers that completed tasks of the fleet's queues in this time, their completed tasks and failed attempts.
    others: int = 0
    others_completed: int = 0
    others_failed: int = 0


@dataclass(frozen=True, slots=True)
class BootTimes:
    """Measured boots of the fleet's last workers: seconds from the request to the first heartbeat."""

    count: int = 0
    p50_s: float | None = None
    p99_s: float | None = None


@dataclass(frozen=True, slots=True)
class SlotView:
    """The failure history of a slot."""

    slot: int
    is_failed: bool
    # When workers of this slot failed within the restart window, newest last.
    restarts: tuple[datetime, ...] = ()


@dataclass(frozen=True, slots=True)
class QueueDurations:
    """One of several queues of a fleet, with a sorted sample of its recent durations and their mean."""

    name: str
    queued: int = 0
    durations_s: tuple[float, ...] = ()
    duration_mean_s: float | None = None


@dataclass(frozen=True, slots=True)
class QueueView:
    """Totals over the queues of a fleet. Tasks that a dispatcher claimed and did not place yet count as queued.

    `queued` is exact below MAX_QUEUED tasks per queue.
    """

    queued: int = 0
    running: int = 0
    oldest_queued_age_s: float | None = None
    # Median of recently completed tasks. None: there are none.
    duration_p50_s: float | None = None
    # A sorted sample of the durations of recently completed tasks, and their mean.
    durations_s: tuple[float, ...] = ()
    duration_mean_s: float | None = None
    # Tasks that were added since the plan that stored `newest_task_id`, and the id of the newest task of all.
    arrived: int = 0
    newest_task_id: int | None = None
    # Sorted boot times of the fleet's recent workers.
    boots_s: tuple[float, ...] = ()
    # Each queue with queued or running tasks, by name; at most 32, those with most tasks. Empty: the fleet has one.
    each: tuple[QueueDurations, ...] = ()

    @property
    def queued_text(self) -> str:
        return f"{self.queued} queued" if self.queued < MAX_QUEUED else f"at least {self.queued} queued"


@dataclass(frozen=True, slots=True)
class LaunchRecord:
    """A worker that was spawned, and whether it failed before it had proven to work. None if its host is avoided."""

    at: datetime
    has_failed: bool
    slot: int | None = None


@dataclass(frozen=True, slots=True)
class RecentFailure:
    """The fleet's most recent worker that failed or could not be spawned."""

    worker_id: str
    code: str
    reason: str
    at: datetime


@dataclass(frozen=True, slots=True)
class ProviderRefusal:
    """The provider's last answer to a create call, if it refused for a reason that concerns the whole fleet."""

    # LIMIT_REACHED, DENIED, INVALID_REQUEST, NO_CAPACITY, or PROVIDER_PAUSE (it asked for a pause of several minutes).
    code: str
    reason: str
    at: datetime


@dataclass(frozen=True, slots=True)
class StorageUse:
    """How much of the fleet's shared volume is used, as measured by one of its workers."""

    worker_id: str
    used_bytes: int
    at: datetime


# ------------------------------------------------------------------------------------- what one plan keeps for the next


@dataclass(frozen=True, slots=True)
class Hold:
    """A rule stopped spawning (or, if `is_total`, every action) in this cycle."""

    code: str
    reason: str
    since: datetime
    is_total: bool = False


@dataclass(frozen=True, slots=True)
class Cadence:
    """How often plans are made."""

    cycle: int = 0
    # When the last plan was made. A long gap since then means that the orchestrator or the database was unavailable.
    planned_at: datetime | None = None
    # Seconds between the last plans, newest last, without plans that an event triggered early. Only `windlass cycle`
    # keeps them; in `windlass up` a long gap is an outage, not a cadence.
    gaps_s: tuple[float, ...] = ()
    # Seconds until the next plan is due. None: the fleet is shut down and this was its last plan.
    next_plan_in_s: float | None = None


@dataclass(frozen=True, slots=True)
class ScalingState:
    spawned_at: datetime | None = None
    # Start of the unbroken time with more workers than needed.
    over_capacity_since: datetime | None = None
    # The newest task that the last plan knew: later ones have arrived since.
    newest_task_id: int | None = None
    # None: another policy decides.
    adaptive: AdaptiveMemory | None = None


@dataclass(frozen=True, slots=True)
class HealthState:
    # Worker id to the first of the consecutive cycles that saw it idle.
    idle_since: dict[str, datetime] = field(default_factory=dict)
    # Worker id to the first of the consecutive cycles that saw queued tasks and a worker that has never claimed one.
    unclaimed_since: dict[str, datetime] = field(default_factory=dict)
    # Start of a mass silence: most workers are silent, perhaps because of the database or this orchestrator.
    mass_silence_since: datetime | None = None
    # When cycles ran again after an outage. None when live workers have had time for their heartbeats.
    outage_ended_at: datetime | None = None
    # When a worker was last replaced as a trial, without evidence from other workers (policy/quarantine.py).
    quarantine_trial_at: datetime | None = None
    # startup_grace_s of a fleet whose workers need a GPU, for the view windlass.health. None: they need none.
    gpu_grace_s: float | None = None


@dataclass(frozen=True, slots=True)
class MachineListState:
    # Worker id to the first complete list that lacked its machine.
    missing_since: dict[str, datetime] = field(default_factory=dict)
    # Id of a worker without a known machine to unproven seconds of its age: the database's clock may have been set
    # forward by them. A machine may still appear until the rest of the age is long enough.
    unproven_s: dict[str, float] = field(default_factory=dict)
    # Since when the provider has returned no complete list.
    unlisted_since: datetime | None = None
    # Machine id to the first of the consecutive cycles that asked for its deletion.
    deleting_since: dict[str, datetime] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OrphanState:
    # Machine id to when it was first listed without a worker row.
    orphan_since: dict[str, datetime] = field(default_factory=dict)
    # Since when most machines have been orphaned: the database may have lost their rows.
    orphans_held_since: datetime | None = None


@dataclass(frozen=True, slots=True)
class AccountState:
    """Which provider account the fleet's machines belong to."""

    # ProviderTraits.key_hash of the key that last listed the fleet's machines.
    key_hash: str | None = None
    # When a machine of the fleet was last listed, which proves that the key was the right one at that time.
    own_listed_at: datetime | None = None
    # When a person last abandoned unlisted machines by `windlass restart`. Concerns workers created before.
    abandoned_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class FailureRateState:
    # How often in a row the hold tripped, and until when it stops spawning.
    trips: int = 0
    until: datetime | None = None
    # Workers spawned up to this moment have been judged and do not count again.
    judged_until: datetime | None = None
    # Consecutive workers that failed before they had proven to work, and when the last of them failed.
    failed_starts: int = 0
    # The same for machines that were not used because their host is avoided. They are not in `failed_starts`.
    avoided_starts: int = 0
    last_failure_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class ProviderBackoff:
    """No machine is requested until this moment, because the provider refused `times` times in a row."""

    code: str
    times: int
    until: datetime


@dataclass(frozen=True, slots=True)
class VolumeResize:
    """A resize that was requested."""

    volume_id: str
    size_gb: int
    at: datetime


@dataclass(frozen=True, slots=True)
class StorageState:
    # The cycle in which the volume was last read from the provider.
    checked_in_cycle: int | None = None
    # Consecutive checks that could not tell how full it is.
    unknown_checks: int = 0
    # The resize that the last check requested.
    resize: VolumeResize | None = None


@dataclass(frozen=True, slots=True)
class PlannerState:
    """State that plan() passes from one cycle to the next: an input in the snapshot, an output of the plan.

    It is stored as JSON with the fleet and grouped by feature. Queries read `cadence`, `alerts`, `hold`,
    `fingerprint`, `rollout` and `gpu_grace_s`.
    """

    cadence: Cadence = Cadence()
    scaling: ScalingState = ScalingState()
    health: HealthState = field(default_factory=HealthState)
    machines: MachineListState = field(default_factory=MachineListState)
    orphans: OrphanState = field(default_factory=OrphanState)
    account: AccountState = AccountState()
    failure_rate: FailureRateState = FailureRateState()
    provider_backoff: ProviderBackoff | None = None
    storage: StorageState = StorageState()
    # Alert key to when its alert was last raised. Only keys whose condition still holds.
    alerts: dict[str, datetime] = field(default_factory=dict)
    # Decided anew in every cycle.
    hold: Hold | None = None
    # Fingerprint of the fleet's current code and settings, as the last plan knew it.
    fingerprint: str | None = None
    rollout: Rollout | None = None
    # Id of the last aborted DeployRequest that a plan has executed.
    aborted_deploy: int = 0
    working: WorkingVersion | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    now: datetime
    fleet: str
    queue: QueueView = QueueView()
    workers: tuple[WorkerView, ...] = ()
    slots: tuple[SlotView, ...] = ()
    machines: tuple[Machine, ...] | None = None
    # When the list was requested, by the database's clock. Machines that became known later cannot be missing from it.
    listed_at: datetime | None = None
    # Seconds since the last plan by the leader's own clock. None: another process made it, or it is not known.
    since_plan_s: float | None = None
    traits: ProviderTraits = field(default_factory=ProviderTraits)
    # Workers spawned, or found failed, within the failure window, oldest first.
    launches: tuple[LaunchRecord, ...] = ()
    # None as soon as a later create call succeeded.
    refusal: ProviderRefusal | None = None
    last_failure: RecentFailure | None = None
    # The fleet's shared volume. None: there is none, or this cycle did not check it.
    volume: Volume | None = None
    # Why the check of the volume failed.
    volume_problem: str | None = None
    # The newest measurement of the volume.
    storage: StorageUse | None = None
    failure_streaks: tuple[FailureStreak, ...] = ()
    # Hosts on which the checks of two or more of the fleet's machines failed within a day.
    avoided_hosts: tuple[str, ...] = ()
    # Ids that hold running tasks without being a live worker.
    orphaned: tuple[str, ...] = ()
    # Workers whose machines this orchestrator is preparing at this moment.
    preparing: tuple[str, ...] = ()
    is_paused: bool = False
    # The fleet is shut down: all workers drain and none is spawned, whatever is queued.
    is_shutting_down: bool = False
    # The spawn timeout follows them, unless it is set.
    boots: BootTimes = BootTimes()
    # Workers that a person requested by `windlass spawn`, in addition to the policy.
    requested: int = 0
    # When a person last ran `windlass restart` for the fleet, a slot or a worker.
    reset_at: datetime | None = None
    # When a person last ran it for the whole fleet.
    restarted_at: datetime | None = None
    # Fingerprint of the fleet's current code and settings. None: unknown.
    fingerprint: str | None = None
    # What the fingerprint covers, as a JSON object. None: unknown.
    version_settings: str | None = None
    # The version of the configuration, if it was rolled back and `fingerprint` is that of the last working one instead.
    rejected: str | None = None
    # The last `windlass deploy`, and whether a changed version begins a rollout by itself.
    deploy: DeployRequest | None = None
    is_watching: bool = False
    # What the ledger has closed of the present hour, day and month, one per currency.
    spending: tuple[Spending, ...] = ()
    # Bills of deleted machines that the ledger has not closed. Bills of existing machines are with their workers.
    ended_bills: tuple[Bill, ...] = ()
    # The ledger has something to close. No decision depends on it.
    is_settlement_due: bool = False
    # Rows of adopted tables wait to be settled. No decision depends on it.
    has_due_rows: bool = False
    planner_state: PlannerState = field(default_factory=PlannerState)
    # The settings this snapshot was planned with, for replay.
    settings: FleetConfig | None = None
