"""What the faces show, out of PostgreSQL: the queries of reading.sql, put together.

ports/queries.py says what is promised; tests/postgres/test_reading.py tries it, also with a million tasks in mind.
"""

import base64
import binascii
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import AwareDatetime, Field, TypeAdapter, ValidationError

from windlass.model.cost import Bill, Tariff
from windlass.model.cycle import Cycle, Fleet
from windlass.model.errors import BadInput
from windlass.model.event import Event
from windlass.model.listing import MAX_PAGE, LogLine, Page, TaskDetail, TaskList, TaskRow, WorkerRow
from windlass.model.overview import (
    COUNT_LIMIT,
    MAX_POINTS,
    MAX_QUEUES,
    Burn,
    FleetMetrics,
    FleetOverview,
    Leader,
    OpenAlert,
    Overview,
    Sample,
    Work,
)
from windlass.model.task import TaskStatus
from windlass.model.worker import WorkerKind, WorkerStatus
from windlass.ports.queries import SCAN_LIMIT, SEARCH_S
from windlass.store.auth import PostgresAuthStore
from windlass.store.control import _cycle, price_parts_of
from windlass.store.postgres import QUERIES as QUEUE_QUERIES
from windlass.store.postgres import _event, node_view
from windlass.store.queries import read_queries

if TYPE_CHECKING:
    from windlass.ports.queries import QueryStore

QUERIES = read_queries("windlass.store", "dashboard_queries.sql")
# Recent work: so many completed tasks of all queues are counted, of so many seconds, and so many of each queue looked
# at. A quiet queue is then not forgotten because another is busy.
RECENT_TASKS = 20_000
RECENT_TASKS_OF_QUEUE = 500
RECENT_S = 300.0
# From one sample to the next.
SAMPLE_INTERVAL_S = 5.0
# Components of `component_health`.
MAX_COMPONENTS = 10_000
# The largest id there can be: a number beyond it is no task's.
_MAX_ID = 2**63 - 1
_LIVE = (WorkerStatus.SPAWNING, WorkerStatus.ACTIVE, WorkerStatus.TERMINATING, WorkerStatus.ERROR)
# A slot's place among those without one.
_NO_SLOT = 2**31 - 1

Row = TypeVar("Row")


class PostgresQueryStore(PostgresAuthStore):
    # --------------------------------------------------------------------------------------- how everything stands

    async def overview(self, configured: frozenset[str] | None = None) -> Overview:
        fleets = await self.fleets()
        async with self._connection("looking at everything") as connection:
            moment = await connection.fetchrow(QUERIES["overview_time"])
            queues, has_more_queues = await _queues(connection)
            counted = await connection.fetch(QUERIES["queue_counts"], queues, COUNT_LIMIT)
            running = dict(map(tuple, await connection.fetch(QUERIES["running_by_queue"])))
            dead = dict(map(tuple, await connection.fetch(QUERIES["failed_by_queue"], COUNT_LIMIT)))
            recent = await connection.fetch(
                QUERIES["recent_completions"], RECENT_TASKS, RECENT_TASKS_OF_QUEUE, RECENT_S
            )
            workers = {row["fleet"]: row for row in await connection.fetch(QUERIES["worker_counts"])}
            burn = await connection.fetch(QUERIES["burn_rates"])
            cycles = {row["fleet"]: row for row in await connection.fetch(QUERIES["last_cycles"])}
            alerts = [OpenAlert(**row) for row in await connection.fetch(QUERIES["open_alerts"])]
            leader = await connection.fetchrow(QUERIES["leader"])
        recently = _Recently(recent)
        of_queues = {
            row["queue"]: Work(
                **{name: value for name, value in row.items() if name != "queue"},
                running=running.get(row["queue"], 0),
                dead=dead.get(row["queue"], 0),
                **recently.of({row["queue"]}),
            )
            for row in counted
        }
        shown = fleets if configured is None else _still_there(fleets, configured, workers.keys(), moment["at"])
        return Overview(
            at=moment["at"],
            fleets=tuple(
                FleetOverview(
                    fleet=fleet,
                    work=_together([of_queues[name] for name in fleet.queues], recently.of(set(fleet.queues))),
                    workers={status: workers[fleet.name][status] if fleet.name in workers else 0 for status in _LIVE},
                    **{
                        name: workers[fleet.name][name] if fleet.name in workers else 0
                        for name in ("hired", "paused", "silent", "idle", "free_slots")
                    },
                    decision=cycles[fleet.name]["decision"] if fleet.name in cycles else None,
                    cycle_id=cycles[fleet.name]["id"] if fleet.name in cycles else None,
                    decided_at=cycles[fleet.name]["decided_at"] if fleet.name in cycles else None,
                    burn=tuple(
                        Burn(row["currency"], row["micros_per_hour"], row["machines"])
                        for row in burn
                        if row["fleet"] == fleet.name
                    ),
                    alerts=tuple(alert for alert in alerts if alert.fleet == fleet.name),
                )
                for fleet in shown
            ),
            queues=of_queues,
            alerts=tuple(alert for alert in alerts if alert.fleet is None),
            leader=Leader(**leader) if leader is not None else None,
            last_event_id=moment["last_event_id"],
            has_more_queues=has_more_queues,
        )

    async def history(self, fleet: str, since_s: float, points: int = 240) -> list[Sample]:
        step_s = max(SAMPLE_INTERVAL_S, since_s / max(1, min(points, MAX_POINTS)))
        async with self._connection("reading the history") as connection:
            rows = await connection.fetch(QUERIES["history"], fleet, since_s, step_s)
        return [Sample(**row) for row in rows[-MAX_POINTS:]]

    async def take_samples(self, overview: Overview) -> None:
        rows = [_sample(standing) for standing in overview.fleets]
        async with self._connection("writing samples") as connection:
            await connection.execute(QUERIES["add_samples"], json.dumps(rows), SAMPLE_INTERVAL_S)

    async def purge_servers(self) -> int:
        """Apply retention to what only faces need. Returns how many rows went."""
        return await self._sweep_all("select windlass_internal.sweep_dashboard($1, $2)", self._retention.samples_s)

    async def fleet_metrics(self) -> list[FleetMetrics]:
        async with self._connection("measuring") as connection:
            rows = await connection.fetch(QUERIES["fleet_metrics"])
            costs = await connection.fetch(QUERIES["machine_costs"])
            spent = await connection.fetch(QUERIES["recent_spending"])
        return [
            FleetMetrics(
                **row,
                machine_costs=tuple((c["currency"], c["micros"]) for c in costs if c["fleet"] == row["fleet"]),
                spent=tuple(tuple(s)[1:] for s in spent if s["fleet"] == row["fleet"]),
            )
            for row in rows
        ]

    # ---------------------------------------------------------------------------------------------------- lists

    async def workers_page(
        self,
        *,
        fleet: str | None = None,
        status: WorkerStatus | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page[WorkerRow]:
        limit = _limit(limit)
        if status is WorkerStatus.TERMINATED:
            at, last_id = _read_cursor(cursor, _AT_AND_NAME) or (None, None)
            ids = await self._ids("listing workers", "terminated_workers", fleet, at, last_id, limit)
        else:
            after = _read_cursor(cursor, _PLACE) or (None, None, None)
            ids = await self._ids("listing workers", "live_workers", fleet, status, *after, limit)
        rows = await self._worker_rows(ids)
        last = rows[-1] if len(ids) == limit and rows else None
        if last is None:
            return Page(tuple(rows), None)
        if status is WorkerStatus.TERMINATED:
            return Page(tuple(rows), _cursor(last.terminated_at, last.id))
        return Page(tuple(rows), _cursor(last.fleet, _NO_SLOT if last.slot is None else last.slot, last.id))

    async def worker_row(self, worker_id: str) -> WorkerRow | None:
        return next(iter(await self._worker_rows([worker_id])), None)

    async def _ids(self, doing: str, query: str, *arguments: Any) -> list[Any]:
        async with self._connection(doing) as connection:
            return [row["id"] for row in await connection.fetch(QUERIES[query], *arguments)]

    async def _worker_rows(self, ids: Sequence[str]) -> list[WorkerRow]:
        async with self._connection("reading workers") as connection:
            rows = await connection.fetch(QUERIES["worker_rows"], ids)
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
        limit = _limit(limit)
        search = search.strip() or None if search is not None else None
        found: list[int] = []
        if search is not None and cursor is None:
            found = await self._named(search, queue, which)
        ids, next_cursor = await self._task_ids(queue, which, search, limit, cursor)
        return Page(tuple(await self._task_rows(list(dict.fromkeys([*found, *ids])))), next_cursor)

    async def task_in_full(self, task_id: int) -> TaskDetail | None:
        async with self._connection("reading a task") as connection:
            row = await connection.fetchrow(QUERIES["task_with_payload"], task_id)
        return TaskDetail(**{**row, "status": TaskStatus(row["status"])}) if row is not None else None

    async def _task_rows(self, ids: Sequence[int]) -> list[TaskRow]:
        async with self._connection("listing tasks") as connection:
            rows = await connection.fetch(QUERIES["task_rows"], ids)
        return [TaskRow(**{**row, "status": TaskStatus(row["status"])}) for row in rows]

    async def _named(self, search: str, queue: str | None, which: TaskList | None) -> list[int]:
        """Tasks that a search means exactly, if they are in the list that is looked at."""
        task_id = int(search) if search.isascii() and search.isdigit() and int(search) <= _MAX_ID else None
        async with self._connection("listing tasks") as connection:
            queues = [queue] if queue is not None else (await _queues(connection))[0]
            rows = await connection.fetch(QUERIES["tasks_by_id_or_key"], search, queues, task_id)
        return [row["id"] for row in rows if queue in (None, row["queue"]) and which in (None, _list_of(row))]

    async def _task_ids(
        self, queue: str | None, which: TaskList | None, search: str | None, limit: int, cursor: str | None
    ) -> tuple[list[int], str | None]:
        if which in (TaskList.QUEUED, TaskList.SCHEDULED, TaskList.ERROR):
            return await self._waiting_ids(queue, which, search, limit, cursor)
        async with self._connection("listing tasks") as connection:
            if which is TaskList.RUNNING:
                (before,) = _read_cursor(cursor, _ID) or (None,)
                rows = await connection.fetch(QUERIES["tasks_running"], queue, search, before, limit)
                return [row["id"] for row in rows], _next(rows, limit)
            if which is None:
                after: tuple[Any, ...] = _read_cursor(cursor, _ID) or (None,)
            else:
                after = _read_cursor(cursor, _AT_AND_ID) or (None, None)
            query = f"tasks_{which or 'newest'}"
            return await _searched(connection, query, queue, search, limit, after)

    async def _waiting_ids(
        self, queue: str | None, which: TaskList, search: str | None, limit: int, cursor: str | None
    ) -> tuple[list[int], str | None]:
        after: tuple[Any, ...]
        status: tuple[TaskStatus, ...] = ()
        if which is TaskList.QUEUED:
            query = "tasks_queued"
            after = _read_cursor(cursor, _PRIORITY_AND_ID) or (None, None)
        else:
            query = "tasks_scheduled"
            after = _read_cursor(cursor, _AT_AND_ID) or (None, None)
            status = (TaskStatus.ERROR if which is TaskList.ERROR else TaskStatus.QUEUED,)
        scan = SCAN_LIMIT if search is not None else limit
        rows: list[Any] = []
        end = None
        until = time.monotonic() + SEARCH_S
        async with self._connection("listing tasks") as connection, connection.transaction(isolation="repeatable_read"):
            # Of one moment: while workers claim, the end would lie beyond what was looked at.
            queues = [queue] if queue is not None else (await _queues(connection))[0]
            while True:
                found = await connection.fetch(QUERIES[query], queues, search, limit - len(rows), scan, *after, *status)
                if search is not None:
                    end = await connection.fetchrow(QUERIES[f"{query}_end"], queues, scan, *after, *status)
                # What lies beyond comes again: there a queue that was not looked through may have something before it.
                rows += found if end is None else [row for row in found if _turn(row) <= _turn(end)]
                if len(rows) == limit or end is None or time.monotonic() >= until:
                    return [row["id"] for row in rows], _next(rows, limit, end)
                after = _key(end)

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
        limit = _limit(limit)
        (before,) = _read_cursor(cursor, _ID) or (None,)
        is_search = fleet is not None or code is not None
        scan = SCAN_LIMIT if is_search else limit
        async with self._connection("listing events") as connection:
            rows = await connection.fetch(QUERIES["events_page"], task_id, worker_id, fleet, code, before, limit, scan)
            end = None
            if len(rows) < limit and is_search:
                end = await connection.fetchrow(QUERIES["events_page_end"], task_id, worker_id, before, scan)
        return Page(tuple(map(_event, rows)), _next(rows, limit, end, key=("id",)))

    async def events_after(self, event_id: int, limit: int) -> list[Event]:
        async with self._connection("reading events") as connection:
            rows = await connection.fetch(QUERIES["events_after"], event_id, limit)
        return [_event(row) for row in rows]

    async def cycles_page(self, *, fleet: str | None = None, limit: int = 50, cursor: str | None = None) -> Page[Cycle]:
        limit = _limit(limit)
        (before,) = _read_cursor(cursor, _ID) or (None,)
        async with self._connection("listing cycles") as connection:
            rows = await connection.fetch(QUERIES["cycles_page"], fleet, before, limit)
        return Page(tuple(map(_cycle, rows)), _next(rows, limit, key=("id",)))

    async def logs_page(
        self, *, worker_id: str | None = None, level: str | None = None, limit: int = 50, cursor: str | None = None
    ) -> Page[LogLine]:
        limit = _limit(limit)
        (before,) = _read_cursor(cursor, _ID) or (None,)
        scan = SCAN_LIMIT if level is not None else limit
        async with self._connection("reading the log") as connection:
            rows = await connection.fetch(QUERIES["logs_page"], worker_id, level, before, limit, scan)
            end = None
            if len(rows) < limit and level is not None:
                end = await connection.fetchrow(QUERIES["logs_page_end"], worker_id, before, scan)
        return Page(tuple(map(_log_line, rows)), _next(rows, limit, end, key=("id",)))

    async def alerts_page(
        self, *, is_open: bool | None = None, limit: int = 50, cursor: str | None = None
    ) -> Page[OpenAlert]:
        limit = _limit(limit)
        (before,) = _read_cursor(cursor, _ID) or (None,)
        async with self._connection("listing alerts") as connection:
            rows = await connection.fetch(QUERIES["alerts_page"], is_open, before, limit)
        return Page(tuple(OpenAlert(**row) for row in rows), _next(rows, limit, key=("id",)))

    async def ray_dashboards(self) -> Mapping[str, str]:
        async with self._connection("looking for Ray's dashboards") as connection:
            rows = await connection.fetch(QUERIES["ray_dashboards"])
        return {row["fleet"]: row["url"] for row in rows}

    async def component_health(self) -> Sequence[Mapping[str, Any]]:
        async with self._connection("reading the workers' health") as connection:
            rows = await connection.fetch(QUERIES["component_health"], MAX_COMPONENTS)
        return [dict(row) for row in rows]


async def _queues(connection: Any) -> tuple[list[str], bool]:
    """All that are served, and of those that have tasks which are not finished so many; whether there are more."""
    served = {row["queue"] for row in await connection.fetch(QUERIES["fleet_queues"])}
    known = {row["queue"] for row in await connection.fetch(QUEUE_QUERIES["known_queues"])}
    others = sorted(known - served)
    return sorted([*served, *others[:MAX_QUEUES]]), len(others) > MAX_QUEUES


class _Recently:
    """How the newest completed tasks went, by any set of queues."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self._by_queue: defaultdict[str, list[Any]] = defaultdict(list)
        for row in rows:
            self._by_queue[row["queue"]].append(row)

    def of(self, queues: Iterable[str]) -> dict[str, Any]:
        found = [self._by_queue[queue] for queue in queues if queue in self._by_queue]
        # Of a busy queue fewer are told of than were completed: each of them stands for so many.
        weighed = [(row, row["completed"] / len(rows)) for rows in found for row in rows]
        waits = sorted((row["wait_s"], weight) for row, weight in weighed if row["wait_s"] is not None)
        return {
            "wait_p50_s": _quantile(waits, 0.5),
            "wait_p95_s": _quantile(waits, 0.95),
            "duration_p50_s": _quantile(sorted((row["duration_s"], weight) for row, weight in weighed), 0.5),
            "completed_per_minute": sum(60.0 * rows[0]["completed"] / rows[0]["span_s"] for rows in found),
        }


def _quantile(weighed: Sequence[tuple[float, float]], share: float) -> float | None:
    """Of values in order, each with its weight; between two of them in proportion."""
    if not weighed:
        return None
    # From one value to the next it is as far as half the weight of both.
    steps = [(one + other) / 2 for (_, one), (_, other) in pairwise(weighed)]
    left = share * sum(steps)
    for step, ((value, _), (following, _)) in zip(steps, pairwise(weighed), strict=True):
        if left <= step:
            return value + (following - value) * left / step
        left -= step
    return weighed[-1][0]


def _together(parts: Sequence[Work], recently: Mapping[str, Any]) -> Work:
    ages = [part.oldest_queued_age_s for part in parts if part.oldest_queued_age_s is not None]
    return Work(
        queued=sum(part.queued for part in parts),
        scheduled=sum(part.scheduled for part in parts),
        retrying=sum(part.retrying for part in parts),
        running=sum(part.running for part in parts),
        dead=sum(part.dead for part in parts),
        oldest_queued_age_s=max(ages, default=None),
        **recently,
    )


def _still_there(fleets: list[Fleet], configured: Iterable[str], staffed: Iterable[str], now: datetime) -> list[Fleet]:
    """Without those that are over: that nobody has configured here, runs, or works for."""
    attended = {fleet.name for fleet in fleets if fleet.planned_at and fleet.without_orchestrator_s(now) is None}
    there = {*configured, *staffed, *attended}
    return [fleet for fleet in fleets if fleet.name in there]


def _sample(standing: FleetOverview) -> dict[str, Any]:
    burn = standing.burn[0] if standing.burn else None
    return {
        "fleet": standing.fleet.name,
        "queued": standing.work.queued,
        "running": standing.work.running,
        **{str(status): count for status, count in standing.workers.items()},
        "completed_per_minute": standing.work.completed_per_minute,
        "wait_p95_s": standing.work.wait_p95_s,
        "burn_micros_per_hour": burn.micros_per_hour if burn is not None else None,
        "currency": burn.currency if burn is not None else None,
    }


_BILL_COLUMNS = (
    "price_micros_per_hour",
    "currency",
    "billing_unit_s",
    "price_parts",
    "billed_since",
    "billed_until",
    "settled_until",
)


def _worker_row(row: Any) -> WorkerRow:
    fields = dict(row)
    price, currency, unit_s, parts, since, until, settled_until = (fields.pop(name) for name in _BILL_COLUMNS)
    fields["is_paused"] = fields.pop("paused")
    fields["queues"] = tuple(row["queues"])
    fields["status"] = WorkerStatus(row["status"])
    fields["metadata"] = json.loads(row["metadata"])
    fields["kind"] = WorkerKind(row["kind"])
    fields["node"] = node_view(row["node"])
    if since is None:
        return WorkerRow(**fields, bill=None)
    tariff = Tariff(price, currency, unit_s, price_parts_of(parts))
    return WorkerRow(**fields, bill=Bill(tariff, since, until, settled_until))


def _log_line(row: Any) -> LogLine:
    return LogLine(**{**row, "fields": json.loads(row["fields"]) if row["fields"] is not None else None})


def _list_of(row: Any) -> TaskList:
    if row["status"] == TaskStatus.QUEUED and row["run_after"] is not None:
        return TaskList.SCHEDULED
    return TaskList(row["status"])


# -------------------------------------------------------------------------------------------------------------- cursors

_Number = Annotated[int, Field(ge=-(2**63), lt=2**63)]
_Small = Annotated[int, Field(ge=-(2**31), lt=2**31)]
_ID = TypeAdapter(tuple[_Number])
_AT_AND_ID = TypeAdapter(tuple[AwareDatetime, _Number])
_AT_AND_NAME = TypeAdapter(tuple[AwareDatetime, str])
_PRIORITY_AND_ID = TypeAdapter(tuple[_Small, _Number])
_PLACE = TypeAdapter(tuple[str, _Small, str])


async def _searched(
    connection: Any, query: str, queue: str | None, search: str | None, limit: int, after: tuple[Any, ...]
) -> tuple[list[int], str | None]:
    """A page of what is looked for, piece by piece: what is rare is found among many, and nobody waits for long."""
    is_search = queue is not None or search is not None
    # Without anything to look for, what comes first is what is wanted.
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
        after = _key(end)
    return [row["id"] for row in rows], _next(rows, limit, end)


def _next(rows: Sequence[Any], limit: int, end: Any = None, key: Sequence[str] = ()) -> str | None:
    """The cursor after a full page, or after `end`: the row that a search which found fewer has come to. Without a key
    the columns are the key, the id last."""
    last = rows[-1] if len(rows) == limit else end
    if last is None:
        return None
    return _cursor(*([last[column] for column in key] if key else _key(last)))


def _key(row: Any) -> tuple[Any, ...]:
    """All its columns, the id last."""
    return tuple(row[column] for column in sorted(row.keys(), key=lambda column: column == "id"))


def _turn(row: Any) -> tuple[Any, ...]:
    """Its place among tasks that wait: by priority, the highest first, or by the time that they wait for."""
    return (-row["priority"], row["id"]) if "priority" in row.keys() else (row["at"], row["id"])  # noqa: SIM118


def _limit(limit: int) -> int:
    return max(1, min(limit, MAX_PAGE))


def _cursor(*key: Any) -> str:
    text = json.dumps([part.isoformat() if isinstance(part, datetime) else part for part in key])
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _read_cursor(cursor: str | None, key: TypeAdapter[Row]) -> Row | None:
    if cursor is None:
        return None
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        return key.validate_json(text)
    except (ValidationError, binascii.Error, ValueError):
        raise BadInput("the cursor is none of ours: take the one that the page before came with.") from None


if TYPE_CHECKING:
    # mypy compares every signature with the contract's.
    _: type[QueryStore] = PostgresQueryStore
