"""Pages of workers, tasks, events, cycles, logs and alerts over PostgreSQL. Implements ports/queries.py."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from windlass.model.cycle import Cycle
from windlass.model.event import Event
from windlass.model.listing import LogLine, Page, TaskDetail, TaskList, TaskRow, WorkerRow
from windlass.model.overview import OpenAlert
from windlass.model.task import MAX_TASK_ID, TaskStatus
from windlass.model.worker import WorkerStatus
from windlass.ports.queries import SCAN_LIMIT, SEARCH_S
from windlass.store.cursors import (
    AT_AND_ID,
    AT_AND_NAME,
    FLEET_SLOT_AND_NAME,
    ID,
    PRIORITY_AND_ID,
    next_cursor,
    page_size,
    read_cursor,
    row_key,
    write_cursor,
)
from windlass.store.overview import QUERIES, PostgresOverview, overview_queues
from windlass.store.rows import cycle_of, event_of, worker_fields

# Rows of `component_health`.
MAX_COMPONENTS = 10_000
# Workers without a slot sort after all slots.
_NO_SLOT = 2**31 - 1


class PostgresQueryStore(PostgresOverview):
    async def workers_page(
        self,
        *,
        fleet: str | None = None,
        status: WorkerStatus | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page[WorkerRow]:
        limit = page_size(limit)
        if status is WorkerStatus.TERMINATED:
            at, last_id = read_cursor(cursor, AT_AND_NAME) or (None, None)
            ids = await self._ids("listing workers", "terminated_workers", fleet, at, last_id, limit)
        else:
            after = read_cursor(cursor, FLEET_SLOT_AND_NAME) or (None, None, None)
            ids = await self._ids("listing workers", "live_workers", fleet, status, *after, limit)
        rows = await self._worker_rows(ids)
        last = rows[-1] if len(ids) == limit and rows else None
        if last is None:
            return Page(tuple(rows), None)
        if status is WorkerStatus.TERMINATED:
            return Page(tuple(rows), write_cursor(last.terminated_at, last.id))
        return Page(tuple(rows), write_cursor(last.fleet, _NO_SLOT if last.slot is None else last.slot, last.id))

    async def worker_row(self, worker_id: str) -> WorkerRow | None:
        return next(iter(await self._worker_rows([worker_id])), None)

    async def _ids(self, doing: str, query: str, *arguments: Any) -> list[Any]:
        return [row["id"] for row in await self._database.fetch(doing, QUERIES[query], *arguments)]

    async def _worker_rows(self, ids: Sequence[str]) -> list[WorkerRow]:
        rows = await self._database.fetch("reading workers", QUERIES["worker_rows"], ids)
        return [_worker_row(row) for row in rows]

    async def running_tasks_of(self, worker_id: str, limit: int) -> list[TaskRow]:
        return await self._task_rows(await self._ids("listing tasks", "running_tasks_of", worker_id, limit))

    async def tasks_page(
        self,
        *,
        queue: str | None = None,
        which: TaskList | None = None,
        search: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page[TaskRow]:
        limit = page_size(limit)
        search = search.strip() or None if search is not None else None
        found: list[int] = []
        if search is not None and cursor is None:
            found = await self._exact_matches(search, queue, which)
        ids, following = await self._task_ids(queue, which, search, limit, cursor)
        return Page(tuple(await self._task_rows(list(dict.fromkeys([*found, *ids])))), following)

    async def task_in_full(self, task_id: int) -> TaskDetail | None:
        row = await self._database.fetchrow("reading a task", QUERIES["task_with_payload"], task_id)
        return TaskDetail(**{**row, "status": TaskStatus(row["status"])}) if row is not None else None

    async def _task_rows(self, ids: Sequence[int]) -> list[TaskRow]:
        rows = await self._database.fetch("listing tasks", QUERIES["task_rows"], ids)
        return [TaskRow(**{**row, "status": TaskStatus(row["status"])}) for row in rows]

    async def _exact_matches(self, search: str, queue: str | None, which: TaskList | None) -> list[int]:
        """Tasks of the list whose id or whole unique key is the search text."""
        task_id = int(search) if search.isascii() and search.isdigit() and int(search) <= MAX_TASK_ID else None
        async with self._database.connection("listing tasks") as connection:
            queues = [queue] if queue is not None else (await overview_queues(connection))[0]
            rows = await connection.fetch(QUERIES["tasks_by_id_or_key"], search, queues, task_id)
        return [row["id"] for row in rows if queue in (None, row["queue"]) and which in (None, _list_of(row))]

    async def _task_ids(
        self, queue: str | None, which: TaskList | None, search: str | None, limit: int, cursor: str | None
    ) -> tuple[list[int], str | None]:
        if which in (TaskList.QUEUED, TaskList.SCHEDULED, TaskList.ERROR):
            return await self._waiting_ids(queue, which, search, limit, cursor)
        async with self._database.connection("listing tasks") as connection:
            if which is TaskList.RUNNING:
                (before,) = read_cursor(cursor, ID) or (None,)
                rows = await connection.fetch(QUERIES["tasks_running"], queue, search, before, limit)
                return [row["id"] for row in rows], next_cursor(rows, limit)
            if which is None:
                after: tuple[Any, ...] = read_cursor(cursor, ID) or (None,)
            else:
                after = read_cursor(cursor, AT_AND_ID) or (None, None)
            query = f"tasks_{which or 'newest'}"
            return await _searched(connection, query, queue, search, limit, after)

    async def _waiting_ids(
        self, queue: str | None, which: TaskList, search: str | None, limit: int, cursor: str | None
    ) -> tuple[list[int], str | None]:
        after: tuple[Any, ...]
        status: tuple[TaskStatus, ...] = ()
        if which is TaskList.QUEUED:
            query = "tasks_queued"
            after = read_cursor(cursor, PRIORITY_AND_ID) or (None, None)
        else:
            query = "tasks_scheduled"
            after = read_cursor(cursor, AT_AND_ID) or (None, None)
            status = (TaskStatus.ERROR if which is TaskList.ERROR else TaskStatus.QUEUED,)
        scan = SCAN_LIMIT if search is not None else limit
        rows: list[Any] = []
        end = None
        until = time.monotonic() + SEARCH_S
        async with (
            self._database.connection("listing tasks") as connection,
            connection.transaction(isolation="repeatable_read"),
        ):
            # One snapshot for both queries: workers claim tasks meanwhile.
            queues = [queue] if queue is not None else (await overview_queues(connection))[0]
            while True:
                found = await connection.fetch(QUERIES[query], queues, search, limit - len(rows), scan, *after, *status)
                if search is not None:
                    end = await connection.fetchrow(QUERIES[f"{query}_end"], queues, scan, *after, *status)
                # The next scan reads rows after `end` again: a queue that was not fully scanned may have earlier ones.
                rows += found if end is None else [row for row in found if _claim_order(row) <= _claim_order(end)]
                if len(rows) == limit or end is None or time.monotonic() >= until:
                    return [row["id"] for row in rows], next_cursor(rows, limit, end)
                after = row_key(end)

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
        limit = page_size(limit)
        (before,) = read_cursor(cursor, ID) or (None,)
        is_search = fleet is not None or code is not None
        scan = SCAN_LIMIT if is_search else limit
        async with self._database.connection("listing events") as connection:
            rows = await connection.fetch(QUERIES["events_page"], task_id, worker_id, fleet, code, before, limit, scan)
            end = None
            if len(rows) < limit and is_search:
                end = await connection.fetchrow(QUERIES["events_page_end"], task_id, worker_id, before, scan)
        return Page(tuple(map(event_of, rows)), next_cursor(rows, limit, end, key=("id",)))

    async def events_after(self, event_id: int, limit: int) -> list[Event]:
        rows = await self._database.fetch("reading events", QUERIES["events_after"], event_id, limit)
        return [event_of(row) for row in rows]

    async def cycles_page(self, *, fleet: str | None = None, limit: int = 50, cursor: str | None = None) -> Page[Cycle]:
        limit = page_size(limit)
        (before,) = read_cursor(cursor, ID) or (None,)
        rows = await self._database.fetch("listing cycles", QUERIES["cycles_page"], fleet, before, limit)
        return Page(tuple(map(cycle_of, rows)), next_cursor(rows, limit, key=("id",)))

    async def logs_page(
        self, *, worker_id: str | None = None, level: str | None = None, limit: int = 50, cursor: str | None = None
    ) -> Page[LogLine]:
        limit = page_size(limit)
        (before,) = read_cursor(cursor, ID) or (None,)
        scan = SCAN_LIMIT if level is not None else limit
        async with self._database.connection("reading the log") as connection:
            rows = await connection.fetch(QUERIES["logs_page"], worker_id, level, before, limit, scan)
            end = None
            if len(rows) < limit and level is not None:
                end = await connection.fetchrow(QUERIES["logs_page_end"], worker_id, before, scan)
        return Page(tuple(map(_log_line, rows)), next_cursor(rows, limit, end, key=("id",)))

    async def alerts_page(
        self, *, is_open: bool | None = None, limit: int = 50, cursor: str | None = None
    ) -> Page[OpenAlert]:
        limit = page_size(limit)
        (before,) = read_cursor(cursor, ID) or (None,)
        rows = await self._database.fetch("listing alerts", QUERIES["alerts_page"], is_open, before, limit)
        return Page(tuple(OpenAlert(**row) for row in rows), next_cursor(rows, limit, key=("id",)))

    async def ray_dashboards(self) -> Mapping[str, str]:
        rows = await self._database.fetch("looking for Ray's dashboards", QUERIES["ray_dashboards"])
        return {row["fleet"]: row["url"] for row in rows}

    async def component_health(self) -> Sequence[Mapping[str, Any]]:
        rows = await self._database.fetch("reading the workers' health", QUERIES["component_health"], MAX_COMPONENTS)
        return [dict(row) for row in rows]


def _worker_row(row: Any) -> WorkerRow:
    return WorkerRow(**worker_fields(row))


def _log_line(row: Any) -> LogLine:
    return LogLine(**{**row, "fields": json.loads(row["fields"]) if row["fields"] is not None else None})


def _list_of(row: Any) -> TaskList:
    if row["status"] == TaskStatus.QUEUED and row["run_after"] is not None:
        return TaskList.SCHEDULED
    return TaskList(row["status"])


async def _searched(
    connection: Any, query: str, queue: str | None, search: str | None, limit: int, after: tuple[Any, ...]
) -> tuple[list[int], str | None]:
    """A page of ids. A search scans SCAN_LIMIT rows at a time until the page is full or SEARCH_S has passed."""
    is_search = queue is not None or search is not None
    scan = SCAN_LIMIT if is_search else limit
    rows: list[Any] = []
    end = None
    until = time.monotonic() + SEARCH_S
    while True:
        rows += await connection.fetch(QUERIES[query], queue, search, limit - len(rows), scan, *after)
        if len(rows) == limit or not is_search:
            break
        end = await connection.fetchrow(QUERIES[f"{query}_end"], scan, *after)
        if end is None or time.monotonic() >= until:
            break
        after = row_key(end)
    return [row["id"] for row in rows], next_cursor(rows, limit, end)


def _claim_order(row: Any) -> tuple[Any, ...]:
    """Sort key of a queued task: highest priority first. Of a scheduled one: its due time."""
    return (-row["priority"], row["id"]) if "priority" in row.keys() else (row["at"], row["id"])  # noqa: SIM118
