"""JSON routes for alerts, events and log lines. The dashboard shows open alerts on its overview."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from windlass.model.auth import Role
from windlass.model.event import Event
from windlass.model.listing import LogLine
from windlass.model.overview import OpenAlert
from windlass.model.task import MAX_TASK_ID
from windlass.server.context import AppContext
from windlass.server.json_api import (
    API,
    VIEWER,
    Cursor,
    FleetFilter,
    Limit,
    PageResponse,
    WorkerFilter,
    json_response,
    page_response,
)
from windlass.server.openapi import documented

_alerts = json_response(PageResponse[OpenAlert])
_events = json_response(PageResponse[Event])
_logs = json_response(PageResponse[LogLine])


def routes(context: AppContext) -> APIRouter:
    router = APIRouter(prefix=API, dependencies=[VIEWER])
    store = context.store

    @router.get("/alerts", **documented(PageResponse[OpenAlert], "List alerts"))
    async def alerts(
        is_open: Annotated[bool | None, Query(description="Only open alerts, or only resolved ones.")] = None,
        limit: Limit = 50,
        cursor: Cursor = None,
    ) -> Response:
        """Newest first."""
        return _alerts(page_response(await store.alerts_page(is_open=is_open, limit=limit, cursor=cursor)))

    @router.get("/events", **documented(PageResponse[Event], "List events"))
    async def events(
        request: Request,
        fleet: FleetFilter = None,
        worker_id: WorkerFilter = None,
        task_id: Annotated[int | None, Query(ge=1, le=MAX_TASK_ID, description="Only this task.")] = None,
        code: Annotated[str | None, Query(max_length=63, description="Only this code.")] = None,
        limit: Limit = 50,
        cursor: Cursor = None,
    ) -> Response:
        """Newest first."""
        page = await store.events_page(
            fleet=fleet, worker_id=worker_id, task_id=task_id, code=code, limit=limit, cursor=cursor
        )
        if request.state.caller.role is not Role.VIEWER:
            return _events(page_response(page))
        return _events(page_response(page, [context.privacy.redact_event(event) for event in page.rows]))

    @router.get("/logs", **documented(PageResponse[LogLine], "List log lines"))
    async def logs(
        worker_id: WorkerFilter = None,
        level: Annotated[str | None, Query(max_length=20, description="info, warning or error.")] = None,
        limit: Limit = 50,
        cursor: Cursor = None,
    ) -> Response:
        """Newest first. Empty unless `logs.in_database` is set."""
        return _logs(page_response(await store.logs_page(worker_id=worker_id, level=level, limit=limit, cursor=cursor)))

    return router
