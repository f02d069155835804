"""What the faces show: how everything stands, lists in pages, series for charts.

The contract:
- Nothing here changes anything but `take_samples`. Every method raises DatabaseUnavailable when no answer came.
- No call reads more than a bounded number of rows, however many workers and tasks there are. Where that leaves a number
  or a list incomplete, it says so: a count of COUNT_LIMIT means "at least", a page with a cursor has more behind it.
- A page is a list of rows and the cursor of the next page; None at the end. A search may come back with few rows, or
  none, and a cursor: it has looked at SCAN_LIMIT rows (of tasks that wait: of each queue) and goes on from there.
- Lists of tasks that wait in any queue are of those queues that an overview tells of; of another, by its name.
- A cursor is opaque. One that is not ours is BadInput.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar

from windlass.model.cost import Bill
from windlass.model.cycle import Cycle, Fleet
from windlass.model.event import Event
from windlass.model.task import Task, TaskSummary
from windlass.model.worker import Worker, WorkerStatus

# Nobody needs to know more exactly how many wait.
COUNT_LIMIT = 100_000
# Rows that one page of a search looks at.
SCAN_LIMIT = 20_000
# A search for tasks goes on over further pieces of that size for about so long.
SEARCH_S = 1.0
MAX_PAGE = 500
# Queues told of, beyond those that fleets serve: their names are made up by whoever enqueues.
MAX_QUEUES = 200
# Points of a chart: more than a screen has room for.
MAX_POINTS = 600

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Page(Generic[Row]):
    rows: tuple[Row, ...]
    next_cursor: str | None


# ------------------------------------------------------------------------------------------------ how everything stands


@dataclass(frozen=True, slots=True)
class Work:
    """What waits and runs, in one queue or in all that a fleet serves, and how recent work went.

    Waits and throughput are those of the newest completed tasks of the last minutes; None where there were none. A wait
    begins when the task could have been claimed: when it was enqueued, its time came, or it was put back.
    """

    queued: int = 0
    scheduled: int = 0
    retrying: int = 0
    running: int = 0
    dead: int = 0
    oldest_queued_age_s: float | None = None
    wait_p50_s: float | None = None
    wait_p95_s: float | None = None
    duration_p50_s: float | None = None
    completed_per_minute: float = 0.0


@dataclass(frozen=True, slots=True)
class Burn:
    """What the machines that are there cost."""

    currency: str
    micros_per_hour: int
    machines: int


@dataclass(frozen=True, slots=True)
class OpenAlert:
    """Something that is the matter. `fleet` None: it concerns them all."""

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
    # Of those that are not terminated.
    workers: Mapping[WorkerStatus, int]
    hired: int
    paused: int
    # Active, and not heard for longer than their lease.
    silent: int
    # Of those that could begin a task now, neither paused nor silent: who has none, and how many they could begin.
    idle: int
    free_slots: int
    # What the last cycle decided, in words; None before the first.
    decision: str | None
    cycle_id: int | None
    decided_at: datetime | None
    burn: tuple[Burn, ...]
    alerts: tuple[OpenAlert, ...]


@dataclass(frozen=True, slots=True)
class Leader:
    holder: str
    term: int
    expires_in_s: float


@dataclass(frozen=True, slots=True)
class Overview:
    at: datetime
    fleets: tuple[FleetOverview, ...]
    # By name: those that a fleet serves, and of the others the first MAX_QUEUES.
    queues: Mapping[str, Work]
    # Those of no fleet in particular.
    alerts: tuple[OpenAlert, ...]
    # None: nobody leads now.
    leader: Leader | None
    # The newest event there is; 0 without any.
    last_event_id: int
    # Whether there are queues that are not in `queues`.
    has_more_queues: bool = False


@dataclass(frozen=True, slots=True)
class Sample:
    """How a fleet stood, or stood on average, around a moment."""

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
class Measures:
    """What only metrics tell of a fleet. Provisioning is that of the last fifty it hired."""

    fleet: str
    provisioning_success_ratio: float | None
    provisioning_mean_s: float | None
    # Of all its slots, for as long as anybody remembers.
    restarts: int
    failed_slots: int
    since_last_crash_s: float | None
    # Workers that have ended and are still remembered, counted up to ten thousand.
    terminated: int
    # What the machines that are there have cost so far, by currency.
    machine_costs: tuple[tuple[str, int], ...]
    # What the last day's paid time was for, by currency: task, boot, idle, tail.
    spent: tuple[tuple[str, int, int, int, int], ...]


# ---------------------------------------------------------------------------------------------------------------- lists


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRow(Worker):
    """A worker with what it has at hand. What its machine costs follows from `bill`: see cost/meter.py."""

    terminating_at: datetime | None
    # None for one that never beat.
    heartbeat_age_s: float | None
    is_silent: bool
    running_tasks: int
    # The oldest of those it has at hand.
    task_id: int | None
    task_queue: str | None
    task_started_at: datetime | None
    task_progress: float | None
    task_note: str | None
    # Of its slot, for as long as anybody remembers.
    restarts: int
    is_slot_failed: bool
    bill: Bill | None


class TaskList(StrEnum):
    """Tasks in one state, each list in the order that is of use."""

    QUEUED = "queued"  # ready, in the order in which they will be claimed
    SCHEDULED = "scheduled"  # not before a time, the nearest first
    ERROR = "error"  # waiting for their retry, the nearest first
    RUNNING = "running"  # newest first
    COMPLETE = "complete"  # finished last, first
    FAILED = "failed"  # dead letters, newest first


@dataclass(frozen=True, slots=True)
class TaskRow(TaskSummary):
    # Since when it could have been claimed: when it was enqueued, its time came, or it was put back.
    ready_at: datetime
    # What is in the ledger for it; None if it ran on nothing that has a price, or nothing is settled yet.
    cost_micros: int | None
    currency: str | None


@dataclass(frozen=True, slots=True)
class TaskDetail(Task):
    # As of a TaskRow.
    ready_at: datetime


@dataclass(frozen=True, slots=True)
class LogLine:
    id: int
    at: datetime
    level: str
    message: str
    worker_id: str | None
    cycle_id: int | None
    fields: Mapping[str, Any] | None


class QueryStore(Protocol):
    async def ray_dashboards(self) -> Mapping[str, str]:
        """By fleet whose tasks Ray places: where Ray's own dashboard is, if its dispatcher says so."""

    async def overview(self, configured: frozenset[str] | None = None) -> Overview:
        """With the names of those that are configured here, fleets that are over are left out."""

    async def history(self, fleet: str, since_s: float, points: int = 240) -> list[Sample]:
        """The last so many seconds in at most so many points (and never more than MAX_POINTS), oldest first."""

    async def take_samples(self, overview: Overview) -> None:
        """Write down how the fleets stand, for `history`. Whoever else does so at the same time does no harm."""

    async def measures(self) -> list[Measures]:
        """One for each fleet."""

    async def workers_page(
        self,
        *,
        fleet: str | None = None,
        status: WorkerStatus | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page[WorkerRow]:
        """Without a status those that are not terminated, by fleet and slot. Terminated ones newest first."""

    async def worker_row(self, worker_id: str) -> WorkerRow | None: ...

    async def running_tasks_of(self, worker_id: str, limit: int) -> list[TaskRow]:
        """What a worker runs now, the oldest task first."""

    async def task_in_full(self, task_id: int) -> TaskDetail | None: ...

    async def tasks_page(
        self,
        *,
        queue: str | None = None,
        which: TaskList | None = None,
        search: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page[TaskRow]:
        """Without `which` all, newest first. `search`: an id, the beginning of a unique key, an error's code, or a part
        of its text; a task found by its id or its whole unique key comes first, whatever else it matches."""

    async def events_page(
        self,
        *,
        fleet: str | None = None,
        worker_id: str | None = None,
        task_id: int | None = None,
        code: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page[Event]:
        """Newest first."""

    async def events_after(self, event_id: int, limit: int) -> list[Event]:
        """Oldest first."""

    async def cycles_page(self, *, fleet: str | None = None, limit: int = 50, cursor: str | None = None) -> Page[Cycle]:
        """Newest first."""

    async def logs_page(
        self, *, worker_id: str | None = None, level: str | None = None, limit: int = 50, cursor: str | None = None
    ) -> Page[LogLine]:
        """Newest first."""

    async def alerts_page(
        self, *, is_open: bool | None = None, limit: int = 50, cursor: str | None = None
    ) -> Page[OpenAlert]:
        """Newest first."""

    async def component_health(self) -> Sequence[Mapping[str, Any]]:
        """Rows of the view windlass.health."""
