"""The overview page, and the JSON routes over all fleets: status, overview and the event stream."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response

from windlass.dashboard.charts import HISTORY_POINTS, ChartRange, history_s
from windlass.dashboard.overview import overview_page
from windlass.model.cycle import ACTION_COUNTS, COUNTED_STATUSES, STATUS_COUNTS
from windlass.model.overview import Overview
from windlass.model.task import MAX_TASK_ID
from windlass.server.context import AppContext
from windlass.server.event_stream import EventStream
from windlass.server.json_api import OPEN, VIEWER, api_router, json_response
from windlass.server.openapi import documented
from windlass.server.pages import STREAM, PageViewer, html, page_context

EVENTS_ON_PAGE = 12


@dataclass(frozen=True, slots=True)
class Status:
    """In the form of a cycle's summary."""

    timestamp: datetime
    actions: Mapping[str, int]
    status: Mapping[str, int]
    fleets: Mapping[str, Mapping[str, int]]


_status = json_response(Status)
_overview = json_response(Overview)


def routes(context: AppContext) -> APIRouter:
    router, viewer = APIRouter(), api_router(VIEWER)
    feed, store = context.overview_feed, context.store

    @viewer.get("/status", **documented(Status, "Get counts"))
    async def status() -> Response:
        """Actions of the last cycle of each fleet, and current tasks and workers, in the form of a cycle's summary."""
        return _status(count_status(await feed.overview(), await context.control.last_actions()))

    @viewer.get("/overview", **documented(Overview, "Get the overview"))
    async def overview() -> Response:
        """Fleets with their tasks, workers, last decision, cost and alerts. About one second old at most."""
        return _overview(await feed.overview())

    @router.get(
        STREAM,
        dependencies=[VIEWER],
        **documented(
            str,
            "Stream changes",
            media_type="text/event-stream",
            example='id: 812\nevent: event\ndata: {"id": 812, "code": "FLEET_PAUSED"}\n\n',
        ),
    )
    async def stream(
        request: Request,
        last_event_id: Annotated[
            int | None, Header(ge=0, le=MAX_TASK_ID, description="Continue after this event.")
        ] = None,
    ) -> Response:
        """Server-sent events: `overview` about once a second, `event` for each event (with its id), `unavailable` while
        the database is unavailable."""
        caller = request.state.caller_name or (request.client.host if request.client is not None else "")
        return EventStream(await feed.listen(last_event_id, caller, request.state.is_still_allowed))

    @router.get("/", include_in_schema=False)
    async def page(
        request: Request, _viewer: PageViewer, chosen: Annotated[ChartRange | None, Query(alias="range")] = None
    ) -> Response:
        found = await feed.overview()
        fleets = [each.fleet for each in found.fleets]
        histories = await asyncio.gather(
            *(store.history(fleet.name, history_s(fleet, found.at, chosen), HISTORY_POINTS) for fleet in fleets)
        )
        by_fleet = {fleet.name: history for fleet, history in zip(fleets, histories, strict=True)}
        events = [context.privacy.redact_event(event) for event in (await store.events_page(limit=EVENTS_ON_PAGE)).rows]
        shown = page_context(context, request, found.at)
        return html(request, overview_page(shown, found, by_fleet, events, chosen))

    @router.get("/favicon.ico", dependencies=[OPEN], include_in_schema=False)
    async def icon() -> Response:
        """Browsers request it on pages that name no icon, such as the login page or JSON."""
        content = resources.files("windlass.dashboard").joinpath("static", "icon.svg").read_bytes()
        return Response(content, media_type="image/svg+xml", headers={"Cache-Control": "public, max-age=86400"})

    router.include_router(viewer)
    return router


def count_status(overview: Overview, last_actions: Mapping[str, Mapping[str, int]]) -> Status:
    by_fleet = {
        each.fleet.name: {
            "queued_tasks": each.work.queued,
            "running_tasks": each.work.running,
            **{f"{status}_workers": each.workers[status] for status in COUNTED_STATUSES},
            "total_workers": sum(each.workers.values()),
        }
        for each in overview.fleets
    }
    totals = {name: sum(counts[name] for counts in by_fleet.values()) for name in STATUS_COUNTS}
    # Several fleets, or none, may serve a queue: sums over fleets would be wrong.
    totals["queued_tasks"] = sum(work.queued for work in overview.queues.values())
    totals["running_tasks"] = sum(work.running for work in overview.queues.values())
    actions = {name: sum(counts.get(name, 0) for counts in last_actions.values()) for name in ACTION_COUNTS}
    return Status(overview.at, actions, totals, by_fleet)
