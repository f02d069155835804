"""Read side of the dashboard, the HTTP API and metrics: overview, pages of lists, series for charts.

The contract:
- No method changes anything except `take_samples`. Every method raises DatabaseUnavailable when no answer came.
- Every call reads a bounded number of rows, however many workers and tasks there are. Where that leaves a result
  incomplete, the result says so: a count of COUNT_LIMIT means "at least"; a page with a cursor is not the last.
- A search page may hold few rows or none and still have a cursor: it examined as many rows as its time allows (of
  queued tasks: per queue), and the next page continues there.
- Lists of waiting tasks of all queues cover the queues of an overview. Any other queue is listed by its name.
- A cursor is opaque. An invalid cursor raises BadInput.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from windlass.model.cycle import Cycle
from windlass.model.event import Event
from windlass.model.listing import (
    ErrorCounts,
    LogLine,
    Page,
    TaskDetail,
    TaskError,
    TaskList,
    TaskRow,
    WorkerRow,
)
from windlass.model.overview import BootQuantiles, FleetMetrics, OpenAlert, Overview, Sample, Work
from windlass.model.worker import WorkerStatus
from windlass.ports.clock import DatabaseClock

# Rows that a search examines in one statement, and if it reads payloads and errors.
SCAN_LIMIT = 20_000
SEARCH_LIMIT = 5_000
# A search for tasks examines further blocks of rows for about this long.
SEARCH_S = 1.0
# Failed attempts that `task_error_counts` counts.
MAX_COUNTED_ERRORS = 10_000


class QueryStore(DatabaseClock, Protocol):
    async def ray_dashboards(self) -> Mapping[str, str]:
        """URL of Ray's own dashboard by fleet, for Ray fleets whose dispatcher reports one."""

    async def overview(self, configured: frozenset[str] | None = None) -> Overview:
        """`configured`: names of the fleets configured here. With it, former fleets are left out."""

    async def queue_work(self, queue: str) -> Work:
        """Counts of any queue, also of one that is not in the overview."""

    async def history(self, fleet: str, since_s: float, points: int = 240) -> list[Sample]:
        """The last `since_s` seconds in at most `points` points (never more than MAX_POINTS), oldest first."""

    async def boot_times(self, fleet: str) -> list[BootQuantiles]:
        """Phases of a boot, in their order, that one of the fleet's last 200 spawned workers has reached."""

    async def take_samples(self, overview: Overview) -> None:
        """Store one sample per fleet for `history`. Several processes may do so at the same time."""

    async def fleet_metrics(self) -> list[FleetMetrics]:
        """One per fleet."""

    async def workers_page(
        self,
        *,
        fleet: str | None = None,
        status: WorkerStatus | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page[WorkerRow]:
        """Without a status: all that are not terminated, by fleet and slot. Terminated ones: newest first."""

    async def worker_row(self, worker_id: str) -> WorkerRow | None: ...

    async def running_tasks_of(self, worker_id: str, limit: int) -> list[TaskRow]:
        """A worker's running tasks, oldest first."""

    async def task_in_full(self, task_id: int) -> TaskDetail | None: ...

    async def tasks_page(
        self,
        *,
        queue: str | None = None,
        which: TaskList | None = None,
        search: str | None = None,
        unsearched_queues: Sequence[str] = (),
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page[TaskRow]:
        """Without `which`: all tasks, newest first.

        `search` matches an id, the start of a unique key, part of a payload of up to 8 kB, and an error code or part of
        an error text of any attempt. Tasks that match by id or by whole unique key come first.
        Payloads of `unsearched_queues` are left out.
        """

    async def task_errors(
        self,
        *,
        since_s: float,
        queue: str | None = None,
        worker_id: str | None = None,
        search: str | None = None,
        unsearched_queues: Sequence[str] = (),
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page[TaskError]:
        """Failed attempts of the last `since_s` seconds, newest first. `search`: an error code or part of an error.

        Errors of `unsearched_queues` are found by their code only, and so are those of purged tasks if there are any.
        """

    async def task_error_counts(
        self,
        *,
        since_s: float,
        queue: str | None = None,
        worker_id: str | None = None,
        search: str | None = None,
        unsearched_queues: Sequence[str] = (),
    ) -> ErrorCounts:
        """Count the errors of the attempts that `task_errors` lists, at most MAX_COUNTED_ERRORS."""

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

    async def cycles_page(
        self,
        *,
        fleet: str | None = None,
        is_changes_only: bool = False,
        since: datetime | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page[Cycle]:
        """Newest first. `is_changes_only`: only cycles with actions, or with another kind of decision than before."""

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
