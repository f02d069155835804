"""Read side of the dashboard, the HTTP API and metrics: overview, pages of lists, series for charts.

The contract:
- No method changes anything except `take_samples`. Every method raises DatabaseUnavailable when no answer came.
- Every call reads a bounded number of rows, however many workers and tasks there are. Where that leaves a result
  incomplete, the result says so: a count of COUNT_LIMIT means "at least"; a page with a cursor is not the last.
- A search page may hold few rows or none and still have a cursor: it examined SCAN_LIMIT rows (of waiting tasks: per
  queue), and the next page continues there.
- Lists of waiting tasks of all queues cover the queues of an overview. Any other queue is listed by its name.
- A cursor is opaque. An invalid cursor raises BadInput.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from windlass.model.cycle import Cycle
from windlass.model.event import Event
from windlass.model.listing import LogLine, Page, TaskDetail, TaskList, TaskRow, WorkerRow
from windlass.model.overview import FleetMetrics, OpenAlert, Overview, Sample
from windlass.model.worker import WorkerStatus
from windlass.ports.clock import DatabaseClock

# Rows that one page of a search examines.
SCAN_LIMIT = 20_000
# A search for tasks examines further blocks of SCAN_LIMIT rows for about this long.
SEARCH_S = 1.0


class QueryStore(DatabaseClock, Protocol):
    async def ray_dashboards(self) -> Mapping[str, str]:
        """URL of Ray's own dashboard by fleet, for Ray fleets whose dispatcher reports one."""

    async def overview(self, configured: frozenset[str] | None = None) -> Overview:
        """`configured`: names of the fleets configured here. With it, former fleets are left out."""

    async def history(self, fleet: str, since_s: float, points: int = 240) -> list[Sample]:
        """The last `since_s` seconds in at most `points` points (never more than MAX_POINTS), oldest first."""

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
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page[TaskRow]:
        """Without `which`: all tasks, newest first.

        `search` matches an id, the start of a unique key, an error code, or part of an error text. Tasks that match by
        id or by whole unique key come first.
        """

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
