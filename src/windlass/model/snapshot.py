"""Everything one cycle knows, as plain values. A plan is a pure function of it, so it is stored with each cycle and
`windlass replay` can think again.

Unknown is a value: `machines` is None when the provider's list could not be had whole, and nothing is then concluded
from a machine's absence.
"""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from windlass.model.cost import Bill, Spending
from windlass.model.fleet import FleetConfig
from windlass.model.machine import Machine, ProviderTraits, Volume
from windlass.model.node import NodeView
from windlass.model.worker import WorkerStatus


# A cycle makes thousands of these two. They are values like all others here, and nobody changes one; but to freeze them
# takes as long as to make them.
@dataclass(slots=True)
class RunningView:
    """A task a worker has at hand."""

    task_id: int
    started_at: datetime
    timeout_s: float | None


@dataclass(slots=True)
class WorkerView:
    """A worker that is not terminated."""

    id: str
    # None: a person started it. The control loop did not hire it, does not count on it and does not end it.
    slot: int | None
    status: WorkerStatus
    is_paused: bool
    concurrency: int
    created_at: datetime
    activated_at: datetime | None = None
    last_heartbeat: datetime | None = None
    first_claimed_at: datetime | None = None
    terminating_at: datetime | None = None
    # For how long it had been idle when it last beat, by its own word.
    idle_s: float | None = None
    machine_id: str | None = None
    # When its machine became known to us.
    machine_at: datetime | None = None
    # What happened to the call that should have made its machine: None while it is under way or was never answered.
    creation: str | None = None
    prepared_at: datetime | None = None
    vram_total_mb: int | None = None
    vram_used_mb: int | None = None
    vram_at: datetime | None = None
    # Since when it has reported a GPU of zero memory without a break, having reported some before. None: it has memory
    # by its last word, or never had any.
    vram_lost_at: datetime | None = None
    running: tuple[RunningView, ...] = ()
    code: str | None = None
    reason: str | None = None
    # For how long it may be silent by its own word. Only asked of workers started by hand; others keep the fleet's.
    lease_s: float | None = None
    # What its machine is charged for, where that has a price.
    bill: Bill | None = None
    # When we first set about starting its program on its machine, and why that cannot be done, if it cannot.
    preparing_at: datetime | None = None
    prepare_code: str | None = None
    prepare_reason: str | None = None
    # Who its machine proved to be when it first let us in.
    host_key: str | None = None
    # What its engine last said of it, where tasks are placed by one.
    node: NodeView | None = None
    # Since when nothing but failures has come of what it took.
    failing_since: datetime | None = None
    # Who was asked for its machine. None for one that a person started.
    provider: str | None = None


@dataclass(frozen=True, slots=True)
class FailureStreak:
    """A worker that has completed nothing since several tasks failed on it, and how others did meanwhile."""

    worker_id: str
    # When the first of them failed.
    since: datetime
    # Different tasks, the newest last; of a long row only the newest.
    failed: tuple[int, ...]
    # Of those, which others have completed since, and who.
    completed_by: dict[int, str] = field(default_factory=dict)
    # Of those, which failed on others too that completed tasks meanwhile.
    failed_elsewhere: tuple[int, ...] = ()
    # Others that completed tasks of the fleet's queues meanwhile; how many they completed, and how many attempts of
    # theirs failed.
    others: int = 0
    others_completed: int = 0
    others_failed: int = 0


@dataclass(frozen=True, slots=True)
class SlotView:
    """What a slot remembers of its former workers."""

    slot: int
    is_failed: bool
    # When its workers broke within the restart window, newest last. Each meant, or means, a restart.
    restarts: tuple[datetime, ...] = ()


@dataclass(frozen=True, slots=True)
class QueueView:
    """The queues a fleet serves, together. What a dispatcher has claimed and not placed counts as queued."""

    queued: int = 0
    running: int = 0
    oldest_queued_age_s: float | None = None
    # Median of recently completed tasks; None when there are none.
    duration_p50_s: float | None = None


@dataclass(frozen=True, slots=True)
class LaunchRecord:
    """That a worker was hired, and whether it ended broken."""

    at: datetime
    has_failed: bool


@dataclass(frozen=True, slots=True)
class RecentFailure:
    """The last worker of a fleet that broke, or could not be hired, and why."""

    worker_id: str
    code: str
    reason: str
    at: datetime


@dataclass(frozen=True, slots=True)
class Hold:
    """The brake: while it is on, the fleet spawns nothing, or (`is_total`) nothing is touched."""

    code: str
    reason: str
    since: datetime
    is_total: bool = False


@dataclass(frozen=True, slots=True)
class FailureRateState:
    """What the failure-rate guard remembers."""

    # How often in a row it tripped, and until when nobody is hired.
    trips: int = 0
    until: datetime | None = None
    # What was hired up to here has had its consequence and is not judged again.
    judged_until: datetime | None = None
    # Workers that broke before they had proven themselves, one after another, and when the last of them did.
    failed_starts: int = 0
    last_failure_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class ProviderRefusal:
    """The last answer to a creation, where it was a no that concerns the whole fleet."""

    # LIMIT_REACHED, DENIED, INVALID_REQUEST, NO_CAPACITY; PROVIDER_PAUSE: we were told to wait for many minutes.
    code: str
    reason: str
    at: datetime


@dataclass(frozen=True, slots=True)
class ProviderBackoff:
    """For how long a refusal is heeded, and how often in a row it came."""

    code: str
    times: int
    until: datetime


@dataclass(frozen=True, slots=True)
class StorageUse:
    """How much of the storage that a fleet shares is used, by the word of one of its workers."""

    worker_id: str
    used_bytes: int
    at: datetime


@dataclass(frozen=True, slots=True)
class VolumeResize:
    """That a volume was to grow to this size."""

    volume_id: str
    size_gb: int
    at: datetime


@dataclass(frozen=True, slots=True)
class PlannerState:
    """The explicit memory of plan(): in with the snapshot, out with the plan, stored with the fleet."""

    cycle: int = 0
    # When the last plan was made. A long gap since then means that we, or the database, were away.
    planned_at: datetime | None = None
    # How far apart the last plans were, the newest last; not those that something brought about before their time. Kept
    # only from one single cycle to the next: of one program that plans again and again a gap is an outage.
    gaps_s: tuple[float, ...] = ()
    # How long after it the next one is due. None: it was to be the last, because the fleet is wound down.
    next_plan_in_s: float | None = None
    scaled_up_at: datetime | None = None
    # Since when there have been more workers than needed, without a break.
    over_capacity_since: datetime | None = None
    # Worker id to when it was first missing from a complete list.
    missing_since: dict[str, datetime] = field(default_factory=dict)
    # Machine id to when it was first seen without a row.
    orphan_since: dict[str, datetime] = field(default_factory=dict)
    # Since when so many machines have had no row that it may be our own forgetting.
    orphans_held_since: datetime | None = None
    # Since when workers have been silent in a way that may be our own blindness.
    doubted_since: datetime | None = None
    # Worker id to the first of the cycles, without a break, that saw it idle.
    idle_since: dict[str, datetime] = field(default_factory=dict)
    # Worker id to the first of the cycles, without a break, that saw tasks waiting and it without any claim ever.
    unclaimed_since: dict[str, datetime] = field(default_factory=dict)
    # Machine id to the first of the cycles, without a break, that asked for its end.
    terminating_since: dict[str, datetime] = field(default_factory=dict)
    # When a worker on which all tasks fail was last replaced to see how they fare on another.
    tried_at: datetime | None = None
    # The key that its machines were last listed with (ProviderTraits.key_hash).
    key_hash: str | None = None
    # When a machine of the fleet was last listed: until then the key was the one that rents them.
    own_listed_at: datetime | None = None
    # When a person last gave up machines that are not listed: those of everybody hired before.
    abandoned_at: datetime | None = None
    # Since when no list of machines could be had.
    unlisted_since: datetime | None = None
    guard: FailureRateState = FailureRateState()
    # In which cycle its storage was last seen, and how many looks, one after another, did not say how full it is.
    storage_looked_in: int | None = None
    blind_looks: int = 0
    # What was asked for when its storage was last looked at.
    growth: VolumeResize | None = None
    refused: ProviderBackoff | None = None
    # What a person has been told, and when. A cause that is gone is forgotten.
    alerts: dict[str, datetime] = field(default_factory=dict)
    hold: Hold | None = None
    # Whatever a policy wants to keep. None of those there are does; one that learns from the past will.
    policy: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Snapshot:
    now: datetime
    fleet: str
    queue: QueueView = QueueView()
    workers: tuple[WorkerView, ...] = ()
    slots: tuple[SlotView, ...] = ()
    machines: tuple[Machine, ...] | None = None
    # When that list was asked for, by the database's clock. What became known later cannot be missing from it.
    listed_at: datetime | None = None
    traits: ProviderTraits = field(default_factory=ProviderTraits)
    # Everybody hired, or found broken, within the failure window, in the order of hiring.
    launches: tuple[LaunchRecord, ...] = ()
    # None as soon as a machine was had after it.
    refusal: ProviderRefusal | None = None
    last_failure: RecentFailure | None = None
    # Storage that its machines share: None where there is none, or it was not looked at in this cycle.
    volume: Volume | None = None
    # Why it could not be seen, where it was looked for.
    volume_problem: str | None = None
    # The newest word about how much of it is used.
    storage: StorageUse | None = None
    # Workers on which tasks fail, one after another.
    failure_streaks: tuple[FailureStreak, ...] = ()
    # Names in which tasks run although no live worker has them.
    orphaned: tuple[str, ...] = ()
    # Workers whose machines this orchestrator is preparing at this moment.
    preparing: tuple[str, ...] = ()
    is_paused: bool = False
    # The fleet is to end: everybody is let go, and nobody hired, whatever waits.
    is_shutting_down: bool = False
    boot_p50_s: float | None = None
    # Workers a person asked for, whatever the policy thinks.
    requested: int = 0
    # When a person last said, by `windlass restart`, that what was broken is mended.
    reset_at: datetime | None = None
    # When they last said it of the whole fleet, not of one slot.
    restarted_at: datetime | None = None
    # What the ledger has closed of the present hour, day and month, for each currency.
    spending: tuple[Spending, ...] = ()
    # Machines that are gone and not in the ledger yet. Those that are there stand with their workers.
    ended_bills: tuple[Bill, ...] = ()
    # The ledger has something to close; nothing is decided by it.
    is_settlement_due: bool = False
    # What earlier plans wanted later ones to know.
    memory: PlannerState = field(default_factory=PlannerState)
    # The settings it was judged by, for whoever thinks again later.
    settings: FleetConfig | None = None
