"""Workers: JSON routes, pages and dashboard forms."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Body, Query, Request, Response
from pydantic import Field

from windlass import operations
from windlass.cost.report import Meter, read_meter
from windlass.dashboard.workers import MAX_CELLS, SlotMap, slot_map, worker_page, workers_page
from windlass.model.auth import EVERYTHING, TokenScope
from windlass.model.errors import BadInput
from windlass.model.listing import WorkerRow
from windlass.model.overview import FleetOverview
from windlass.model.worker import WorkerStatus
from windlass.operations import OperationResult, worker_not_found
from windlass.server.context import AppContext
from windlass.server.errors import not_found
from windlass.server.forms import submit_form
from windlass.server.json_api import (
    FORM_OPERATOR,
    OPERATOR,
    VIEWER,
    CallerScope,
    Cursor,
    FleetFilter,
    Limit,
    PageResponse,
    ReasonBody,
    WorkerId,
    api_router,
    extend,
    filter_in_scope,
    json_response,
    operation_response,
    page_response,
)
from windlass.server.openapi import documented
from windlass.server.pages import PAGE_ROWS, PageCursor, PageFilter, PageViewer, html, page_context

MAX_LOG_LINES = 10_000
LOG_LINES_ON_PAGE = 300
# Running tasks listed on the page of a worker.
TASKS_ON_PAGE = 100
# Slot maps on the page of all fleets. Further fleets have a page of their own.
MAX_SLOT_MAPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerResponse(WorkerRow):
    # Cost of the machine. Null without a price.
    meter: Meter | None


@dataclass(frozen=True, slots=True)
class LogLinesResponse:
    lines: list[str]


class TerminateBody(ReasonBody):
    force: bool = Field(default=False, description="Terminate at once and requeue running tasks.")


_workers = json_response(PageResponse[WorkerResponse])
_worker = json_response(WorkerResponse)
_lines = json_response(LogLinesResponse)


def routes(context: AppContext) -> APIRouter:
    router, viewer, operator = APIRouter(), api_router(VIEWER), api_router(OPERATOR)
    _add_json_routes(viewer, operator, context)
    _add_pages(router, context)
    _add_form_routes(router, context)
    for part in (viewer, operator):
        router.include_router(part)
    return router


def _worker_response(row: WorkerRow, now: datetime) -> WorkerResponse:
    return extend(WorkerResponse, row, meter=read_meter(row.bill, now) if row.bill is not None else None)


async def _worker_row(context: AppContext, worker_id: str, scope: TokenScope = EVERYTHING) -> WorkerRow:
    row = await context.store.worker_row(worker_id)
    if row is None or not scope.allows_fleet(row.fleet):
        raise not_found(worker_not_found(worker_id))
    return row


def _add_json_routes(viewer: APIRouter, operator: APIRouter, context: AppContext) -> None:
    store, feed = context.store, context.overview_feed

    @viewer.get("/workers", **documented(PageResponse[WorkerResponse], "List workers"))
    async def workers(
        scope: CallerScope,
        fleet: FleetFilter = None,
        status: WorkerStatus | None = None,
        limit: Limit = 50,
        cursor: Cursor = None,
    ) -> Response:
        """By fleet and slot, without terminated workers. With `status=terminated` only those, newest first."""
        fleet = filter_in_scope(fleet, scope.fleets, scope, "fleet")
        page = await store.workers_page(fleet=fleet, status=status, limit=limit, cursor=cursor)
        now = await store.now()
        return _workers(page_response(page, [_worker_response(row, now) for row in page.rows]))

    @viewer.get("/workers/{worker_id}", **documented(WorkerResponse, "Get a worker"))
    async def worker(worker_id: WorkerId, scope: CallerScope) -> Response:
        return _worker(_worker_response(await _worker_row(context, worker_id, scope), await store.now()))

    @viewer.get("/workers/{worker_id}/log", **documented(LogLinesResponse, "Get a worker's log"))
    async def worker_log(
        worker_id: WorkerId,
        scope: CallerScope,
        lines: Annotated[int, Query(ge=1, le=MAX_LOG_LINES, description="Last lines.")] = 200,
    ) -> Response:
        """The output of a worker on the server's own host. Workers on other machines keep their logs there."""
        row = await _worker_row(context, worker_id, scope)
        try:
            log = [line async for line in context.control.worker_log(row.fleet, worker_id, lines)]
        except BadInput as error:
            raise not_found(str(error)) from None
        return _lines(LogLinesResponse(log))

    @operator.post("/workers/{worker_id}/pause", **documented(OperationResult, "Pause a worker"))
    async def pause(worker_id: WorkerId, scope: CallerScope) -> Response:
        """It finishes its current tasks and claims no others."""
        return operation_response(feed, await operations.pause_worker(store, worker_id, scope=scope))

    @operator.post("/workers/{worker_id}/resume", **documented(OperationResult, "Resume a worker"))
    async def resume(worker_id: WorkerId, scope: CallerScope) -> Response:
        return operation_response(feed, await operations.resume_worker(store, worker_id, scope=scope))

    @operator.post("/workers/{worker_id}/restart", **documented(OperationResult, "Restart a worker"))
    async def restart(worker_id: WorkerId, scope: CallerScope) -> Response:
        """It drains, the restart count of its slot is cleared, and a later cycle spawns a replacement."""
        return operation_response(feed, await operations.restart_worker(store, worker_id, scope=scope))

    @operator.post("/workers/{worker_id}/terminate", **documented(OperationResult, "Terminate a worker"))
    async def terminate(
        worker_id: WorkerId, scope: CallerScope, body: Annotated[TerminateBody, Body(default_factory=TerminateBody)]
    ) -> Response:
        """It drains first. With `force` it terminates at once and its running tasks are requeued."""
        result = await operations.terminate_worker(store, worker_id, body.reason, force=body.force, scope=scope)
        return operation_response(feed, result)


def _add_pages(router: APIRouter, context: AppContext) -> None:
    store = context.store

    @router.get("/workers", include_in_schema=False)
    async def workers(
        request: Request,
        _viewer: PageViewer,
        fleet: PageFilter = None,
        terminated: str | None = None,
        cursor: PageCursor = None,
        slots: PageCursor = None,
    ) -> Response:
        """`slots`: cursor of the fleet's slot map."""
        overview = await context.overview_feed.overview()
        is_terminated = terminated is not None
        fleets = [each for each in overview.fleets if fleet in (None, "", each.fleet.name)]
        found = await store.workers_page(
            fleet=fleet or None,
            status=WorkerStatus.TERMINATED if is_terminated else None,
            limit=PAGE_ROWS,
            cursor=cursor,
        )
        has_maps = not is_terminated and cursor is None
        page = workers_page(
            page_context(context, request, overview.at),
            found,
            fleets=[each.fleet.name for each in overview.fleets],
            maps=await _slot_maps(context, fleets[:MAX_SLOT_MAPS], slots) if has_maps else [],
            counts={
                status: sum(each.workers.get(status, 0) for each in fleets)
                for status in WorkerStatus
                if status is not WorkerStatus.TERMINATED
            },
            ray_dashboards=await store.ray_dashboards(),
            fleet=fleet or None,
            is_terminated=is_terminated,
            is_first=cursor is None,
        )
        return html(request, page)

    @router.get("/workers/{worker_id}", include_in_schema=False)
    async def worker(request: Request, worker_id: WorkerId, _viewer: PageViewer) -> Response:
        row = await _worker_row(context, worker_id)
        explanation = await context.control.explain(worker_id)
        running = await store.running_tasks_of(worker_id, TASKS_ON_PAGE) if row.running_tasks else []
        log, problem = await _worker_log(context, row.fleet, worker_id)
        # A terminated worker does not change any more.
        is_live = row.status is not WorkerStatus.TERMINATED
        page = worker_page(
            page_context(context, request, await store.now(), is_live=is_live),
            row,
            answer=explanation.answer,
            history=explanation.history,
            tasks=running,
            log=log,
            log_problem=problem,
            ray_dashboard=(await store.ray_dashboards()).get(row.fleet),
        )
        return html(request, page)


async def _slot_maps(context: AppContext, fleets: Sequence[FleetOverview], cursor: str | None) -> list[SlotMap]:
    maps = []
    # A cursor belongs to one fleet.
    for each in fleets if cursor is None else fleets[:1]:
        if each.fleet.planned_at is not None:  # fleets without cycles have no slots
            page = await context.store.workers_page(fleet=each.fleet.name, limit=MAX_CELLS, cursor=cursor)
            is_first_page, next_cursor = cursor is None, page.next_cursor
            maps.append(slot_map(each.fleet, page.rows, is_first_page=is_first_page, next_cursor=next_cursor))
    return maps


async def _worker_log(context: AppContext, fleet: str, worker_id: str) -> tuple[list[str] | None, str | None]:
    """The worker's output if it runs on this host. Otherwise log lines about it in the database, and the reason."""
    try:
        return [line async for line in context.control.worker_log(fleet, worker_id, LOG_LINES_ON_PAGE)], None
    except BadInput as error:
        lines = []
        for row in reversed((await context.store.logs_page(worker_id=worker_id, limit=LOG_LINES_ON_PAGE)).rows):
            fields = "".join(f" {name}={value}" for name, value in (row.fields or {}).items())
            lines.append(f"{row.at:%Y-%m-%d %H:%M:%S} {row.level} {row.message}{fields}")
        return lines or None, str(error)


def _add_form_routes(router: APIRouter, context: AppContext) -> None:
    store = context.store

    @router.post("/workers/{worker_id}/pause", dependencies=[FORM_OPERATOR], include_in_schema=False)
    async def pause(request: Request, worker_id: WorkerId) -> Response:
        return await submit_form(context, request, lambda _: operations.pause_worker(store, worker_id))

    @router.post("/workers/{worker_id}/resume", dependencies=[FORM_OPERATOR], include_in_schema=False)
    async def resume(request: Request, worker_id: WorkerId) -> Response:
        return await submit_form(context, request, lambda _: operations.resume_worker(store, worker_id))

    @router.post("/workers/{worker_id}/restart", dependencies=[FORM_OPERATOR], include_in_schema=False)
    async def restart(request: Request, worker_id: WorkerId) -> Response:
        return await submit_form(context, request, lambda _: operations.restart_worker(store, worker_id))

    @router.post("/workers/{worker_id}/terminate", dependencies=[FORM_OPERATOR], include_in_schema=False)
    async def terminate(request: Request, worker_id: WorkerId) -> Response:
        return await submit_form(
            context,
            request,
            lambda fields: operations.terminate_worker(store, worker_id, force=fields.get("force") == "yes"),
        )
