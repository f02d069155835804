"""Views of the whole system for the dashboard, the API and metrics: overview, fleets, queues, alerts, samples."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from windlass.model.cycle import Fleet
from windlass.model.worker import WorkerStatus

# Counts stop here: a count of this value means "at least".
COUNT_LIMIT = 100_000
# Queues in an overview beyond those that fleets serve. Producers choose queue names freely, so there may be thousands.
MAX_QUEUES = 200
# Points in one chart: more than a screen can show.
MAX_POINTS = 600


@dataclass(frozen=True, slots=True)
class Work:
    """Task counts of one queue, or of all queues that a fleet serves, and recent wait times and throughput.

    Wait times and throughput are taken from the newest completed tasks of the last minutes; None where there were none.
    Throughput covers the last five minutes, or since the first of these tasks started if that is shorter.
    A task's wait starts when it became claimable: when it was enqueued, reached its run_after, or was requeued.
    """

    queued: int = 0
    scheduled: int = 0
    retrying: int = 0
    running: int = 0
    # Failed permanently, without cancelled ones.
    dead: int = 0
    oldest_queued_age_s: float | None = None
    wait_p50_s: float | None = None
    wait_p95_s: float | None = None
    duration_p50_s: float | None = None
    completed_per_minute: float = 0.0
    # Over the last minute only, for charts.
    current_per_minute: float = 0.0


@dataclass(frozen=True, slots=True)
class Burn:
    """Current cost rate of the existing machines."""

    currency: str
    micros_per_hour: int
    machines: int


@dataclass(frozen=True, slots=True)
class OpenAlert:
    """An alert as lists show it. `fleet` None: it concerns all fleets."""

    id: int
    fleet: str | None
    code: str
    severity: str
    reason: str
    since: datetime
    seen_at: datetime
    resolved_at: datetime | None


@dataclass(frozen=True, slots=True)
class FleetOverview:
    fleet: Fleet
    work: Work
    # Workers by status, without terminated ones and without dispatchers, which run no tasks themselves.
    workers: Mapping[WorkerStatus, int]
    # Workers in a slot of the fleet.
    managed: int
    paused: int
    # Active workers whose last heartbeat is older than their lease.
    silent: int
    # Among workers that can start a task now (not paused, not silent): how many run none, and their free slots.
    idle: int
    free_slots: int
    # The last cycle's decision; None before the first cycle.
    decision: str | None
    cycle_id: int | None
    decided_at: datetime | None
    burn: tuple[Burn, ...]
    alerts: tuple[OpenAlert, ...]
    # Spawned workers that do not drain and have other code or settings than the fleet's current ones.
    outdated: int = 0
    # Workers that a person started. The fleet neither spawns nor replaces them.
    by_hand: int = 0
    # Whether the process that reads the overview has the fleet in its configuration.
    is_configured: bool = False
    # What the last cycle did, as opposed to what it decided, such as "spawned 1 of 3".
    done: tuple[str, ...] = ()

    @property
    def is_by_hand(self) -> bool:
        """Whether the fleet exists only because workers were started by hand: no cycle runs for it."""
        return self.by_hand > 0 and not self.managed and not self.is_configured and self.fleet.planned_at is None


@dataclass(frozen=True, slots=True)
class Leader:
    holder: str
    term: int
    expires_in_s: float


@dataclass(frozen=True, slots=True)
class QueueOverview:
    """A queue, and what serves it."""

    name: str
    work: Work
    fleets: tuple[str, ...]
    # Live workers that run its tasks, of fleets or started by hand.
    workers: int

    @property
    def is_served(self) -> bool:
        return bool(self.fleets) or self.workers > 0


@dataclass(frozen=True, slots=True)
class Overview:
    at: datetime
    fleets: tuple[FleetOverview, ...]
    # By name: all queues that a fleet serves, and the first MAX_QUEUES of the others.
    queues: Mapping[str, Work]
    # Alerts that concern no single fleet.
    alerts: tuple[OpenAlert, ...]
    # None: no orchestrator holds the lease.
    leader: Leader | None
    # Id of the newest event; 0 without any.
    last_event_id: int
    # Whether `queues` is incomplete.
    has_more_queues: bool = False
    # Live workers by queue, without dispatchers. Queues without any are left out.
    workers_by_queue: Mapping[str, int] = field(default_factory=dict)
    # All of `queues` together. Medians and p95 are those of all their tasks.
    total: Work = field(default_factory=Work)

    def queue(self, name: str, work: Work | None = None) -> QueueOverview:
        """`work`: the counts of a queue that is not in `queues`."""
        fleets = tuple(each.fleet.name for each in self.fleets if name in each.fleet.queues)
        return QueueOverview(name, work or self.queues[name], fleets, self.workers_by_queue.get(name, 0))


@dataclass(frozen=True, slots=True)
class Sample:
    """One point of a fleet's history: its state at one moment, or the average over one interval."""

    at: datetime
    queued: float
    running: float
    spawning: float
    active: float
    terminating: float
    error: float
    completed_per_minute: float
    wait_p95_s: float | None
    burn_micros_per_hour: float | None
    currency: str | None


@dataclass(frozen=True, slots=True)
class BootPhase:
    """How long one worker took from the request to one phase of its boot."""

    worker_id: str
    # running, reachable, joined, first_claim
    phase: str
    seconds: float


@dataclass(frozen=True, slots=True)
class BootQuantiles:
    """Boot times of a fleet's last 200 spawned workers, to one phase."""

    phase: str
    # Workers that reached it.
    count: int
    p50_s: float
    p95_s: float
    p99_s: float


@dataclass(frozen=True, slots=True)
class FleetMetrics:
    """Figures of a fleet that only metrics use. Provisioning figures cover its last fifty spawned workers."""

    fleet: str
    provisioning_success_ratio: float | None
    provisioning_mean_s: float | None
    # Restarts of all its slots that are still stored.
    restarts: int
    failed_slots: int
    since_last_crash_s: float | None
    # Terminated workers that retention has not deleted yet, counted up to ten thousand.
    terminated: int
    # Cost so far of the existing machines, by currency.
    machine_costs: tuple[tuple[str, int], ...]
    # Billed time of the last day, by currency: task, boot, idle, tail.
    spent: tuple[tuple[str, int, int, int, int], ...]
    # Phases that its last 200 spawned workers have reached, and their quantiles.
    boots: tuple[BootPhase, ...] = ()
    boot_quantiles: tuple[BootQuantiles, ...] = ()
