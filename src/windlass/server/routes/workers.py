"""Workers: JSON routes, pages and dashboard forms."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response
from pydantic import Field

from windlass import operations
from windlass.cost.report import Meter, read_meter
from windlass.dashboard.workers import MAX_CELLS, SlotMap, slot_map, worker_page, workers_page
from windlass.log_reader import read_worker_log
from windlass.model.auth import EVERYTHING, TokenScope
from windlass.model.listing import Page, WorkerRow
from windlass.model.overview import FleetOverview
from windlass.model.worker import WorkerStatus
from windlass.model.worker_log import WorkerLogPage
from windlass.operations import OperationResult, worker_not_found
from windlass.server.context import AppContext
from windlass.server.errors import forbidden, not_found
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
from windlass.server.log_responses import (
    OUTPUT_IS_PRIVATE,
    LogCursor,
    LogLineCount,
    LogLinesResponse,
    is_output_private,
    log_response,
)
from windlass.server.openapi import documented
from windlass.server.pages import PAGE_ROWS, PageCursor, PageFilter, PageViewer, html, page_context
from windlass.server.payload_previews import without_private_note, without_private_parts

LOG_LINES_ON_PAGE = 300
# Running tasks listed on the page of a worker.
TASKS_ON_PAGE = 100
# Slot maps on the page of all fleets. Further fleets have a page of their own.
MAX_SLOT_MAPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerResponse(WorkerRow):
    # Cost of the machine. Null without a price.
    meter: Meter | None


class TerminateBody(ReasonBody):
    force: bool = Field(default=False, description="Terminate at once and requeue running tasks.")


_workers = json_response(PageResponse[WorkerResponse])
_worker = json_response(WorkerResponse)


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
        rows = [without_private_note(context.privacy, row) for row in page.rows]
        return _workers(page_response(page, [_worker_response(row, now) for row in rows]))

    @viewer.get("/workers/{worker_id}", **documented(WorkerResponse, "Get a worker"))
    async def worker(request: Request, worker_id: WorkerId, scope: CallerScope) -> Response:
        """After a worker failed or terminated, `metadata.diagnostics` has what was known about it then."""
        row = without_private_note(context.privacy, await _worker_row(context, worker_id, scope))
        is_private = is_output_private(context, request, row.queues)
        diagnostics = await _diagnostics(context, worker_id, is_private=is_private)
        if diagnostics is not None:
            row = replace(row, metadata={**row.metadata, "diagnostics": diagnostics})
        return _worker(_worker_response(row, await store.now()))

    @viewer.get("/workers/{worker_id}/logs", **documented(LogLinesResponse, "Get a worker's output"))
    async def worker_log(
        request: Request,
        worker_id: WorkerId,
        scope: CallerScope,
        lines: LogLineCount = 200,
        after: LogCursor = None,
    ) -> Response:
        """The last lines that a worker and its attempts printed, oldest first, also after its machine is gone.

        With `after`, the lines since that cursor: repeat the request to follow the output.
        Handlers may print payloads, so a worker of a queue with `redact` needs the role operator."""
        row = await _worker_row(context, worker_id, scope)
        if is_output_private(context, request, row.queues):
            raise forbidden(OUTPUT_IS_PRIVATE)
        if after is not None:
            return log_response(await store.worker_log(worker_id, lines, after=after))
        return log_response(await _worker_log(context, row, lines))

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
        found = Page(tuple(without_private_note(context.privacy, row) for row in found.rows), found.next_cursor)
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
        row = without_private_note(context.privacy, await _worker_row(context, worker_id))
        explanation = await context.control.explain(worker_id, context.privacy.redact_event)
        running = await store.running_tasks_of(worker_id, TASKS_ON_PAGE) if row.running_tasks else []
        is_private = is_output_private(context, request, row.queues)
        log = WorkerLogPage() if is_private else await _worker_log(context, row, LOG_LINES_ON_PAGE)
        diagnostics = await _diagnostics(context, worker_id, is_private=is_private)
        # A terminated worker does not change any more.
        is_live = row.status is not WorkerStatus.TERMINATED
        page = worker_page(
            page_context(context, request, await store.now(), is_live=is_live),
            row,
            answer=explanation.answer,
            history=explanation.history,
            tasks=without_private_parts(context.privacy, running),
            log=log.lines,
            diagnostics=diagnostics or {},
            log_problem=OUTPUT_IS_PRIVATE if is_private else None,
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


async def _diagnostics(context: AppContext, worker_id: str, *, is_private: bool) -> dict[str, Any] | None:
    found = await context.store.diagnostics(worker_id)
    if found is None:
        return None
    return {name: value for name, value in found.items() if not (is_private and name == "last_lines")}


async def _worker_log(context: AppContext, row: WorkerRow, lines: int) -> WorkerLogPage:
    is_private = any(map(context.privacy.hides, row.queues))
    file_lines = None if is_private else context.control.worker_log(row.fleet, row.id, lines)
    return await read_worker_log(context.store, file_lines, row.id, lines)


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
