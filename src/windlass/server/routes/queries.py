"""Reading over HTTP: how everything stands, lists in pages, stories, costs. Thin handlers over ports/queries.py."""

import functools
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from pydantic import AwareDatetime

from windlass.cost.queries import CostReport, build_report, task_cost
from windlass.cost.report import By
from windlass.model.action import actions_to_plain
from windlass.model.cycle import ACTION_COUNTS, COUNTED_STATUSES, STATUS_COUNTS, CycleDetail
from windlass.model.errors import BadInput
from windlass.model.event import Event
from windlass.model.fleet import with_changes
from windlass.model.listing import MAX_PAGE, LogLine, TaskList, TaskRow
from windlass.model.overview import MAX_POINTS, OpenAlert, Overview, Sample
from windlass.model.task import MAX_TASK_ID
from windlass.model.worker import WorkerStatus
from windlass.policy.plan import plan
from windlass.server.auth import viewer
from windlass.server.context import AppContext, DashboardContext, answering
from windlass.server.errors import not_found
from windlass.server.event_stream import EventStream
from windlass.server.openapi import documented
from windlass.server.schemas import (
    CostReportResponse,
    CycleResponse,
    DecisionResponse,
    ExplanationResponse,
    FleetResponse,
    LogLinesResponse,
    PageResponse,
    ReplayResponse,
    Status,
    TaskResponse,
    WorkerResponse,
    cycle_shown,
    fleet_shown,
    listed,
    report_shown,
    story_shown,
    task_as_json,
    worker_shown,
)
from windlass.server.ttl_cache import TtlCache

API = "/api/v1"
MAX_LOG_LINES = 10_000
MAX_COSTS = 1_000
# What is paid changes by the hour: whoever asks for the same again within this time gets the same.
COSTS_FRESH_S = 5.0
# A chart goes back no further than samples are kept.
MAX_HISTORY_S = 400 * 86_400.0

Looking = Depends(viewer)
Name = Annotated[str | None, Query(max_length=63, description="Only of this one.")]
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE, description="Rows of a page.")]
Cursor = Annotated[str | None, Query(max_length=1_000, description="`next_cursor` of the page before.")]
FleetName = Annotated[str, Path(max_length=63)]
WorkerId = Annotated[str, Path(max_length=200)]
TaskId = Annotated[int, Path(ge=1, le=MAX_TASK_ID)]
CycleId = Annotated[int, Path(ge=1, le=MAX_TASK_ID)]

_status = answering(Status)
_overview = answering(Overview)
_fleets = answering(list[FleetResponse])
_fleet = answering(FleetResponse)
_samples = answering(list[Sample])
_workers = answering(PageResponse[WorkerResponse])
_worker = answering(WorkerResponse)
_tasks = answering(PageResponse[TaskRow])
_events = answering(PageResponse[Event])
_cycles = answering(PageResponse[CycleResponse])
_cycle = answering(CycleResponse)
_replayed = answering(ReplayResponse)
_story = answering(ExplanationResponse)
_report = answering(CostReportResponse)
_alerts = answering(PageResponse[OpenAlert])
_logs = answering(PageResponse[LogLine])
_lines = answering(LogLinesResponse)


def looking_routes(face: AppContext, shown: DashboardContext) -> APIRouter:
    router = APIRouter(prefix=API, dependencies=[Looking])
    _standing(router, face, shown)
    _who_works(router, shown)
    _what_is_worked_on(router, shown)
    _what_happened(router, shown)
    _why(router, shown)
    return router


def _standing(router: APIRouter, face: AppContext, shown: DashboardContext) -> None:
    store, live = shown.store, shown.live

    @router.get("/status", **documented(Status, "How everything stands", "status"))
    async def status() -> Response:
        """In the form of a cycle's summary: what the last cycles did, and what waits and works now."""
        seen = await live.overview()
        return _status(status_of(seen, shown.last_actions()))

    @router.get("/overview", **documented(Overview, "Everything at a glance", "overview"))
    async def overview() -> Response:
        """Fleets with their work, workers, decision, cost and alerts. At most a second or so old."""
        return _overview(await live.overview())

    @router.get("/fleets", **documented(list[FleetResponse], "All fleets", "fleets"))
    async def fleets() -> Response:
        seen = await live.overview()
        return _fleets([fleet_shown(each, face.fleet(each.fleet.name), seen.at) for each in seen.fleets])

    @router.get("/fleets/{fleet}", **documented(FleetResponse, "One fleet", "fleet"))
    async def fleet(fleet: FleetName) -> Response:
        seen = await live.overview()
        for each in seen.fleets:
            if each.fleet.name == fleet:
                return _fleet(fleet_shown(each, face.fleet(fleet), seen.at))
        raise not_found(f"there is no fleet {fleet}: {API}/fleets lists them.")

    @router.get("/fleets/{fleet}/history", **documented(list[Sample], "A fleet over time", "samples"))
    async def history(
        fleet: FleetName,
        since_s: Annotated[float, Query(gt=0, le=MAX_HISTORY_S, description="How far back.")] = 3_600.0,
        points: Annotated[int, Query(ge=1, le=MAX_POINTS, description="At most so many.")] = 240,
    ) -> Response:
        """For charts: what waited, who worked and what it cost, averaged to so many points, oldest first."""
        return _samples(await store.history(fleet, since_s, points))

    @router.get("/stream", **documented(str, "Live change", "stream", media_type="text/event-stream"))
    async def stream(
        request: Request,
        last_event_id: Annotated[int | None, Header(ge=0, le=MAX_TASK_ID, description="Of the last one seen.")] = None,
    ) -> Response:
        """Server-sent events: `overview` about once a second, `event` for each event (with its id), `trouble` while the
        database is away."""
        caller = request.state.caller_name or (request.client.host if request.client is not None else "")
        return EventStream(await live.listen(last_event_id, caller, request.state.may_look))


def status_of(seen: Overview, last_actions: Any) -> Status:
    by_fleet = {
        each.fleet.name: {
            "queued_tasks": each.work.queued,
            "running_tasks": each.work.running,
            **{f"{status}_workers": each.workers[status] for status in COUNTED_STATUSES},
            "total_workers": sum(each.workers.values()),
        }
        for each in seen.fleets
    }
    totals = {name: sum(counts[name] for counts in by_fleet.values()) for name in STATUS_COUNTS}
    # A queue may be served by several fleets, or by none.
    totals["queued_tasks"] = sum(work.queued for work in seen.queues.values())
    totals["running_tasks"] = sum(work.running for work in seen.queues.values())
    actions = {name: sum(did.get(name, 0) for did in last_actions.values()) for name in ACTION_COUNTS}
    return Status(seen.at, actions, totals, by_fleet)


def _who_works(router: APIRouter, shown: DashboardContext) -> None:
    store = shown.store

    @router.get("/workers", **documented(PageResponse[WorkerResponse], "Workers, page by page", "workers"))
    async def workers(
        fleet: Name = None, status: WorkerStatus | None = None, limit: Limit = 50, cursor: Cursor = None
    ) -> Response:
        """By fleet and slot, those that are not terminated; with `status=terminated` those, newest first."""
        page = await store.workers_page(fleet=fleet, status=status, limit=limit, cursor=cursor)
        now = await store.now()
        return _workers(listed(page, [worker_shown(row, now) for row in page.rows]))

    @router.get("/workers/{worker_id}", **documented(WorkerResponse, "One worker", "worker"))
    async def worker(worker_id: WorkerId) -> Response:
        row = await store.worker_row(worker_id)
        if row is None:
            raise not_found(f"there is no worker {worker_id}: it never was, or its retention is over.")
        return _worker(worker_shown(row, await store.now()))

    @router.get("/workers/{worker_id}/log", **documented(LogLinesResponse, "What a worker printed", "lines"))
    async def worker_log(
        worker_id: WorkerId, lines: Annotated[int, Query(ge=1, le=MAX_LOG_LINES, description="The last so many.")] = 200
    ) -> Response:
        """Of a worker of a local fleet on the control plane's host; others keep their own logs."""
        row = await store.worker_row(worker_id)
        if row is None:
            raise not_found(f"there is no worker {worker_id}: it never was, or its retention is over.")
        try:
            return _lines(LogLinesResponse([line async for line in shown.worker_log(row.fleet, worker_id, lines)]))
        except BadInput as error:
            raise not_found(str(error)) from None


def _what_is_worked_on(router: APIRouter, shown: DashboardContext) -> None:
    store = shown.store

    @router.get("/tasks", **documented(PageResponse[TaskRow], "Tasks, page by page", "tasks"))
    async def tasks(
        queue: Name = None,
        status: Annotated[TaskList | None, Query(description="Without it all, newest first.")] = None,
        search: Annotated[
            str | None, Query(max_length=200, description="An id, a unique key's beginning, an error's code or words.")
        ] = None,
        limit: Limit = 50,
        cursor: Cursor = None,
    ) -> Response:
        """Without payloads and results. `queued` come in the order in which they will be claimed."""
        page = await store.tasks_page(queue=queue, which=status, search=search, limit=limit, cursor=cursor)
        return _tasks(listed(page))

    @router.get("/tasks/{task_id}", **documented(TaskResponse, "One task", "task"))
    async def task(task_id: TaskId) -> Response:
        """With payload, result, the story of its attempts, and what it cost."""
        found = await store.task(task_id)
        if found is None:
            raise not_found(f"there is no task {task_id}: it was never enqueued, or its retention is over.")
        events = await store.events(task_id=task_id)
        story = await shown.explain(str(task_id))
        cost = None
        if found.worker_id is not None:
            cost = await task_cost(store, task_id, await store.now(), found.worker_id)
        return Response(task_as_json(found, events, story.answer, cost), media_type="application/json")


def _what_happened(router: APIRouter, shown: DashboardContext) -> None:
    store = shown.store

    @router.get("/events", **documented(PageResponse[Event], "Events, newest first", "events"))
    async def events(
        fleet: Name = None,
        worker_id: Annotated[str | None, Query(max_length=200)] = None,
        task_id: Annotated[int | None, Query(ge=1, le=MAX_TASK_ID)] = None,
        code: Annotated[str | None, Query(max_length=63)] = None,
        limit: Limit = 50,
        cursor: Cursor = None,
    ) -> Response:
        page = await store.events_page(
            fleet=fleet, worker_id=worker_id, task_id=task_id, code=code, limit=limit, cursor=cursor
        )
        return _events(listed(page))

    @router.get("/alerts", **documented(PageResponse[OpenAlert], "What is, and was, the matter", "alerts"))
    async def alerts(
        is_open: Annotated[bool | None, Query(description="Only those that last, or only those that are over.")] = None,
        limit: Limit = 50,
        cursor: Cursor = None,
    ) -> Response:
        return _alerts(listed(await store.alerts_page(is_open=is_open, limit=limit, cursor=cursor)))

    @router.get("/logs", **documented(PageResponse[LogLine], "Log lines in the database", "logs"))
    async def logs(
        worker_id: Annotated[str | None, Query(max_length=200)] = None,
        level: Annotated[str | None, Query(max_length=20, description="info, warning or error.")] = None,
        limit: Limit = 50,
        cursor: Cursor = None,
    ) -> Response:
        """Newest first; only where `logs.in_database` is set."""
        page = await store.logs_page(worker_id=worker_id, level=level, limit=limit, cursor=cursor)
        return _logs(listed(page))


def _why(router: APIRouter, shown: DashboardContext) -> None:
    store = shown.store

    async def report(question: tuple[By, datetime | None, str | None, int]) -> CostReport:
        by, since, fleet, limit = question
        now = await store.now()
        return await build_report(store, by, _since(since, now), now, fleet, limit)

    reports = TtlCache(report, COSTS_FRESH_S)

    @router.get("/cycles", **documented(PageResponse[CycleResponse], "What each cycle decided", "cycles"))
    async def cycles(fleet: Name = None, limit: Limit = 50, cursor: Cursor = None) -> Response:
        """Newest first. Cycles that decided the same and did nothing are counted (`repeats`)."""
        page = await store.cycles_page(fleet=fleet, limit=limit, cursor=cursor)
        return _cycles(listed(page, [cycle_shown(cycle) for cycle in page.rows]))

    @router.get("/cycles/{cycle_id}", **documented(CycleResponse, "One cycle", "cycle"))
    async def cycle(cycle_id: CycleId) -> Response:
        return _cycle(cycle_shown((await _stored(store.cycle, cycle_id)).cycle))

    @router.get("/cycles/{cycle_id}/replay", **documented(ReplayResponse, "Decide again", "replayed"))
    async def replay(
        cycle_id: CycleId,
        setting: Annotated[
            list[str] | None, Query(alias="set", max_length=50, description="A setting of the fleet: max_workers=3.")
        ] = None,
    ) -> Response:
        """From what a cycle saw, with its own settings or with some of them changed. Changes nothing. One at a time."""
        stored = await _stored(store.cycle, cycle_id)
        return _replayed(await shown.thinking.about(functools.partial(replay_of, stored, setting or [])))

    @router.get("/explain/{what}", **documented(ExplanationResponse, "Why is it so?", "story"))
    async def explain(what: Annotated[str, Path(max_length=200)]) -> Response:
        """The story of a task (by its id), a worker or a fleet, in sentences."""
        try:
            return _story(story_shown(await shown.explain(what)))
        except BadInput as error:
            raise not_found(str(error)) from None

    @router.get("/cost", **documented(CostReportResponse, "What it cost", "report"))
    async def cost(
        by: By = By.DAY,
        since: Annotated[AwareDatetime | None, Query(description="Without it: thirty days ago.")] = None,
        fleet: Name = None,
        limit: Annotated[int, Query(ge=1, le=MAX_COSTS)] = 100,
    ) -> Response:
        """Added up, with what was wasted and what the month will come to. In micros of a currency; seconds old."""
        return _report(report_shown(await reports.of((by, since, fleet, limit))))


# Nothing was paid before windlass was.
_BEGINNING_YEAR = 2020


def _since(since: datetime | None, now: datetime) -> datetime:
    if since is None:
        return now - timedelta(days=30)
    if not _BEGINNING_YEAR <= since.year <= now.year + 1:
        raise BadInput(f"since is in the year {since.year}: nothing was paid then.")
    return since


async def _stored(read: Callable[[int], Awaitable[CycleDetail | None]], cycle_id: int) -> CycleDetail:
    stored = await read(cycle_id)
    if stored is None:
        raise not_found(f"there is no cycle {cycle_id}: only those of the last days are kept.")
    return stored


def replay_of(stored: CycleDetail, changes: list[str]) -> ReplayResponse:
    """BadInput for what is no setting of a fleet."""
    settings = stored.snapshot.settings
    if settings is None:
        raise BadInput(f"cycle {stored.cycle.id} was stored without its settings.")
    again = plan(stored.snapshot, with_changes(settings, changes))
    then = DecisionResponse(stored.cycle.decision, actions_to_plain(stored.cycle.actions))
    now = DecisionResponse(again.decision, actions_to_plain(again.actions))
    return ReplayResponse(stored.cycle.id, stored.cycle.fleet, then == now, then, now)
