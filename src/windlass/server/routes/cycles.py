"""Cycles, replays and explanations: JSON routes and pages."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response

from windlass.dashboard.charts import WIDE_POINTS, Chart, ChartRange, fleet_charts, history_s
from windlass.dashboard.cycles import (
    REPLAY_SETTINGS,
    ReplayResult,
    cycle_page,
    cycles_page,
    replay_cycle,
    replay_options,
)
from windlass.model.action import actions_to_plain
from windlass.model.auth import Role
from windlass.model.cycle import Cycle, CycleDetail
from windlass.model.errors import BadInput
from windlass.model.fleet_changes import with_changes
from windlass.model.overview import FleetOverview
from windlass.model.task import MAX_TASK_ID
from windlass.policy.plan import plan
from windlass.ports.queries import QueryStore
from windlass.server.context import AppContext
from windlass.server.errors import not_found
from windlass.server.json_api import (
    VIEWER,
    Cursor,
    CycleId,
    FleetFilter,
    Limit,
    PageResponse,
    api_router,
    json_response,
    page_response,
)
from windlass.server.openapi import documented
from windlass.server.pages import PAGE_ROWS, PageCursor, PageFilter, PageViewer, html, page_context
from windlass.server.payload_previews import text_filter

# Changes that are marked in a chart.
MAX_MARKS = 100


@dataclass(frozen=True, slots=True)
class CycleResponse:
    """A Cycle with its actions as JSON objects."""

    id: int
    fleet: str
    term: int
    started_at: datetime
    finished_at: datetime | None
    decision: str
    actions: list[dict[str, Any]]
    summary: Mapping[str, Any] | None
    repeats: int
    repeated_at: datetime | None


@dataclass(frozen=True, slots=True)
class DecisionResponse:
    decision: str
    actions: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ReplayResponse:
    """`then`: the stored decision. `again`: the decision with the changed settings."""

    cycle_id: int
    fleet: str
    is_same: bool
    then: DecisionResponse
    again: DecisionResponse


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    at: datetime
    what: str


@dataclass(frozen=True, slots=True)
class ExplanationResponse:
    answer: list[str]
    history: list[HistoryEntry]


_cycles = json_response(PageResponse[CycleResponse])
_cycle = json_response(CycleResponse)
_replay = json_response(ReplayResponse)
_explanation = json_response(ExplanationResponse)


def routes(context: AppContext) -> APIRouter:
    router, viewer = APIRouter(), api_router(VIEWER)
    _add_json_routes(viewer, context)
    _add_pages(router, context)
    router.include_router(viewer)
    return router


def _cycle_response(cycle: Cycle) -> CycleResponse:
    values = {field.name: getattr(cycle, field.name) for field in fields(cycle)}
    return CycleResponse(**{**values, "actions": actions_to_plain(cycle.actions)})


async def _stored_cycle(context: AppContext, cycle_id: int) -> CycleDetail:
    stored = await context.store.cycle(cycle_id)
    if stored is None:
        raise not_found(f"cycle {cycle_id} not found (unknown, or already purged)")
    return stored


def _add_json_routes(viewer: APIRouter, context: AppContext) -> None:
    store = context.store

    @viewer.get("/cycles", **documented(PageResponse[CycleResponse], "List cycles"))
    async def cycles(
        fleet: FleetFilter = None,
        changes: Annotated[
            bool, Query(description="Only cycles with actions, or with another kind of decision than before.")
        ] = False,
        limit: Limit = 50,
        cursor: Cursor = None,
    ) -> Response:
        """Newest first. Cycles with the same decision and no actions are counted in `repeats`."""
        page = await store.cycles_page(fleet=fleet, is_changes_only=changes, limit=limit, cursor=cursor)
        return _cycles(page_response(page, [_cycle_response(cycle) for cycle in page.rows]))

    @viewer.get("/cycles/{cycle_id}", **documented(CycleResponse, "Get a cycle"))
    async def cycle(cycle_id: CycleId) -> Response:
        return _cycle(_cycle_response((await _stored_cycle(context, cycle_id)).cycle))

    @viewer.get("/cycles/{cycle_id}/replay", **documented(ReplayResponse, "Replay a cycle"))
    async def replay(
        cycle_id: CycleId,
        setting: Annotated[
            list[str] | None, Query(alias="set", max_length=50, description="A fleet setting, as max_workers=3.")
        ] = None,
    ) -> Response:
        """Plan again from the stored snapshot, with some settings changed. Changes nothing. Runs one at a time."""
        stored = await _stored_cycle(context, cycle_id)
        return _replay(await context.executor.run(functools.partial(_replay_with, stored, setting or [])))

    @viewer.get("/explain/{subject}", **documented(ExplanationResponse, "Explain a state"))
    async def explain(request: Request, subject: Annotated[str, Path(max_length=200)]) -> Response:
        """Why a task (by id), a worker or a fleet is in its current state."""
        is_viewer = request.state.caller.role is Role.VIEWER
        could_be_task = subject.isascii() and subject.isdigit() and len(subject) <= len(str(MAX_TASK_ID))
        # Before it is explained: after that it may be purged.
        task = await store.task(int(subject)) if is_viewer and could_be_task and int(subject) <= MAX_TASK_ID else None
        try:
            explanation = await context.control.explain(subject, context.privacy.redact_event if is_viewer else None)
        except BadInput as error:
            raise not_found(str(error)) from None
        hide = text_filter(context.privacy, task) if task is not None else str
        history = [HistoryEntry(at, hide(what)) for at, what in explanation.history]
        return _explanation(ExplanationResponse([hide(line) for line in explanation.answer], history))


def _replay_with(stored: CycleDetail, changes: list[str]) -> ReplayResponse:
    """Raises BadInput for an invalid setting."""
    settings = stored.snapshot.settings
    if settings is None:
        raise BadInput(f"cycle {stored.cycle.id} was stored without its settings.")
    again = plan(stored.snapshot, with_changes(settings, changes))
    then = DecisionResponse(stored.cycle.decision, actions_to_plain(stored.cycle.actions))
    now = DecisionResponse(again.decision, actions_to_plain(again.actions))
    return ReplayResponse(stored.cycle.id, stored.cycle.fleet, then == now, then, now)


async def timeline_charts(
    store: QueryStore, overview: FleetOverview, now: datetime, chosen: ChartRange | None
) -> list[Chart]:
    """The chart of the fleet's workers with the changes marked."""
    since_s = history_s(overview.fleet, now, chosen)
    changes = await changes_of(store, overview.fleet.name, now - timedelta(seconds=since_s))
    history = await store.history(overview.fleet.name, since_s, WIDE_POINTS)
    return fleet_charts(overview, now, history, changes)[1:2]


async def changes_of(store: QueryStore, fleet: str, since: datetime) -> Sequence[Cycle]:
    return (await store.cycles_page(fleet=fleet, is_changes_only=True, since=since, limit=MAX_MARKS)).rows


def _add_pages(router: APIRouter, context: AppContext) -> None:
    store = context.store

    @router.get("/cycles", include_in_schema=False)
    async def cycles(
        request: Request,
        _viewer: PageViewer,
        fleet: PageFilter = None,
        all_cycles: Annotated[str | None, Query(alias="all", max_length=10)] = None,
        chosen: Annotated[ChartRange | None, Query(alias="range")] = None,
        cursor: PageCursor = None,
    ) -> Response:
        """Only changes unless `all` is given. With a fleet, also its workers over time."""
        overview = await context.overview_feed.overview()
        found = await store.cycles_page(
            fleet=fleet or None, is_changes_only=not all_cycles, limit=PAGE_ROWS, cursor=cursor
        )
        page = cycles_page(
            page_context(context, request, overview.at),
            found,
            # Workers that were started by hand have no cycles.
            fleets=[each.fleet.name for each in overview.fleets if not each.is_by_hand],
            fleet=fleet or None,
            has_all=bool(all_cycles),
            charts=[
                chart
                for each in overview.fleets
                if each.fleet.name == fleet and cursor is None
                for chart in await timeline_charts(store, each, overview.at, chosen)
            ],
            chosen=chosen,
            is_first=cursor is None,
        )
        return html(request, page)

    @router.get("/cycles/{cycle_id}", include_in_schema=False)
    async def cycle(request: Request, cycle_id: CycleId, _viewer: PageViewer) -> Response:
        """With `replay` in the query, the cycle is planned again with the settings in the query."""
        stored = await _stored_cycle(context, cycle_id)
        settings = stored.snapshot.settings
        given = {name: request.query_params[name] for name in REPLAY_SETTINGS if name in request.query_params}
        replayed: ReplayResult | None = None
        problem = None
        if settings is not None and "replay" in request.query_params:
            try:
                replayed = await context.executor.run(functools.partial(replay_cycle, stored, settings, given))
            except BadInput as error:
                problem = str(error)
        shown = page_context(context, request, await store.now(), is_live=False)
        options = replay_options(settings, given) if settings is not None else None
        return html(request, cycle_page(shown, stored, options=options, replayed=replayed, problem=problem))
