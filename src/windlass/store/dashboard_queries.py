"""Pages of workers, events, cycles, logs and alerts over PostgreSQL. Implements ports/queries.py with its bases."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from windlass.model.cycle import Cycle
from windlass.model.event import Event
from windlass.model.listing import LogLine, Page, WorkerRow
from windlass.model.overview import OpenAlert
from windlass.model.worker import WorkerStatus
from windlass.ports.queries import SCAN_LIMIT
from windlass.store.cursors import (
    AT_AND_NAME,
    FLEET_SLOT_AND_NAME,
    ID,
    next_cursor,
    page_size,
    read_cursor,
    write_cursor,
)
from windlass.store.overview import QUERIES, PostgresOverview
from windlass.store.rows import cycle_of, event_of, worker_fields
from windlass.store.task_lists import PostgresTaskLists

# Rows of `component_health`.
MAX_COMPONENTS = 10_000
# Workers without a slot sort after all slots.
_NO_SLOT = 2**31 - 1


class PostgresQueryStore(PostgresOverview, PostgresTaskLists):
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
        return [WorkerRow(**worker_fields(row)) for row in rows]

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

    async def cycles_page(
        self,
        *,
        fleet: str | None = None,
        is_changes_only: bool = False,
        since: datetime | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page[Cycle]:
        limit = page_size(limit)
        (before,) = read_cursor(cursor, ID) or (None,)
        query = "changes_page" if is_changes_only else "cycles_page"
        rows = await self._database.fetch("listing cycles", QUERIES[query], fleet, before, limit, since)
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


def _log_line(row: Any) -> LogLine:
    return LogLine(**{**row, "fields": json.loads(row["fields"]) if row["fields"] is not None else None})
