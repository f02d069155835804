"""Fleets: JSON routes, the page of a fleet and dashboard forms."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Body, Query, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import Field

from windlass import operations, rollouts
from windlass.dashboard.alerts import fleet_items
from windlass.dashboard.charts import WIDE_POINTS, ChartRange, history_s
from windlass.dashboard.cost import BudgetView
from windlass.dashboard.fleets import fleet_card, fleet_page, settings_of
from windlass.dashboard.workers import MAX_CELLS, slot_map
from windlass.model.auth import EVERYTHING, TokenScope
from windlass.model.fleet import FleetConfig
from windlass.model.overview import MAX_POINTS, FleetOverview, Overview, Sample
from windlass.model.redaction import shown_settings
from windlass.operations import OperationResult, RestartResult, SpawnResult, fleet_not_found
from windlass.rollouts import DeployResult, RolloutReport
from windlass.server.context import AppContext
from windlass.server.errors import not_found
from windlass.server.forms import submit_form
from windlass.server.json_api import (
    FORM_OPERATOR,
    OPERATOR,
    VIEWER,
    CallerScope,
    FleetName,
    RequestBody,
    api_router,
    extend,
    json_response,
    operation_response,
)
from windlass.server.openapi import documented
from windlass.server.pages import PageViewer, html, page_context
from windlass.server.routes.cost import budget_views
from windlass.server.routes.cycles import changes_of

CHANGES_ON_PAGE = 20
EVENTS_ON_PAGE = 12
# Samples are kept for no longer.
MAX_HISTORY_S = 400 * 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetResponse(FleetOverview):
    # Current settings without secrets. Null if another process runs the fleet.
    settings: Mapping[str, Any] | None
    # Time without a cycle beyond the expected interval. Null if cycles run as expected.
    without_orchestrator_s: float | None


class SpawnBody(RequestBody):
    count: Annotated[int, Field(ge=1, le=10_000)] = Field(default=1, description="Number of additional workers.")


class RestartBody(RequestBody):
    slot: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(default=None, description="Only this slot.")


class DeployBody(RequestBody):
    surge: Annotated[int, Field(ge=0, le=10_000)] = Field(
        default=0, description="New workers in addition to the old ones, within max_workers."
    )
    max_unavailable: Annotated[int, Field(ge=0, le=10_000)] = Field(
        default=0, description="Old workers that may be missing at a time. Excludes surge."
    )
    is_immediate: bool = Field(
        default=False, description="Do not wait until the billing periods of old workers nearly end."
    )


_report = json_response(RolloutReport)
_fleets = json_response(list[FleetResponse])
_fleet = json_response(FleetResponse)
_samples = json_response(list[Sample])
_budgets = json_response(list[BudgetView])


def routes(context: AppContext) -> APIRouter:
    router, viewer, operator = APIRouter(), api_router(VIEWER), api_router(OPERATOR)
    _add_json_routes(viewer, operator, context)
    _add_page(router, context)
    _add_form_routes(router, context)
    for part in (viewer, operator):
        router.include_router(part)
    return router


def _fleet_response(overview: FleetOverview, settings: FleetConfig | None, now: datetime) -> FleetResponse:
    return extend(
        FleetResponse,
        overview,
        settings=shown_settings(settings.model_dump(mode="json")) if settings is not None else None,
        without_orchestrator_s=overview.fleet.without_orchestrator_s(now),
    )


async def _find_fleet(context: AppContext, name: str, scope: TokenScope = EVERYTHING) -> tuple[Overview, FleetOverview]:
    seen = await context.overview_feed.overview()
    for each in seen.fleets:
        if each.fleet.name == name:
            return seen, each
    allowed = [each.fleet for each in seen.fleets if scope.allows_fleet(each.fleet.name)]
    raise not_found(fleet_not_found(name, allowed))


async def _settings(context: AppContext, overview: FleetOverview) -> FleetConfig | None:
    """The current settings; of a fleet that another process runs, those of its last cycle."""
    config = context.control.fleet_config(overview.fleet.name)
    if config is not None or overview.cycle_id is None:
        return config
    stored = await context.store.cycle(overview.cycle_id)
    return stored.snapshot.settings if stored is not None else None


async def _budgets_of(context: AppContext, fleet: str, settings: FleetConfig | None, now: datetime) -> list[BudgetView]:
    if settings is None:
        return []
    accounts = await context.store.open_accounts(fleet=fleet)
    return await budget_views(context.store, {fleet: settings}, accounts, now)


def _add_page(router: APIRouter, context: AppContext) -> None:
    store = context.store

    @router.get("/fleets", dependencies=[VIEWER], include_in_schema=False)
    async def fleets() -> Response:
        """The overview lists all fleets."""
        return RedirectResponse("/")

    @router.get("/fleets/{fleet}", include_in_schema=False)
    async def fleet(
        request: Request,
        fleet: FleetName,
        _viewer: PageViewer,
        chosen: Annotated[ChartRange | None, Query(alias="range")] = None,
    ) -> Response:
        seen, found = await _find_fleet(context, fleet)
        since_s = history_s(found.fleet, seen.at, chosen)
        changes = await changes_of(store, fleet, seen.at - timedelta(seconds=since_s))
        settings = await _settings(context, found)
        workers = await store.workers_page(fleet=fleet, limit=MAX_CELLS)
        page = fleet_page(
            page_context(context, request, seen.at),
            fleet_card(found, await store.history(fleet, since_s, WIDE_POINTS), seen.at, changes),
            items=fleet_items(seen, fleet),
            chosen=chosen,
            settings=settings_of(settings) if settings is not None else None,
            budgets=await _budgets_of(context, fleet, settings, seen.at),
            slots=slot_map(found.fleet, workers.rows, next_cursor=workers.next_cursor),
            changes=changes[:CHANGES_ON_PAGE],
            events=[
                context.privacy.redact_event(event)
                for event in (await store.events_page(fleet=fleet, limit=EVENTS_ON_PAGE)).rows
            ],
            places=await store.machine_places(fleet),
            boots=await store.boot_times(fleet),
        )
        return html(request, page)


def _add_json_routes(viewer: APIRouter, operator: APIRouter, context: AppContext) -> None:
    store, feed = context.store, context.overview_feed

    @viewer.get("/fleets", **documented(list[FleetResponse], "List fleets"))
    async def fleets(scope: CallerScope) -> Response:
        seen = await feed.overview()
        config = context.control.fleet_config
        allowed = [each for each in seen.fleets if scope.allows_fleet(each.fleet.name)]
        return _fleets([_fleet_response(each, config(each.fleet.name), seen.at) for each in allowed])

    @viewer.get("/fleets/{fleet}", **documented(FleetResponse, "Get a fleet"))
    async def fleet(fleet: FleetName, scope: CallerScope) -> Response:
        operations.check_fleet_scope(scope, fleet)
        seen, found = await _find_fleet(context, fleet, scope)
        return _fleet(_fleet_response(found, context.control.fleet_config(fleet), seen.at))

    @viewer.get("/fleets/{fleet}/budgets", **documented(list[BudgetView], "Get budgets"))
    async def budgets(fleet: FleetName) -> Response:
        """What the fleet has spent of each of its budgets in the current hour, day or month."""
        seen, found = await _find_fleet(context, fleet)
        return _budgets(await _budgets_of(context, fleet, await _settings(context, found), seen.at))

    @viewer.get("/fleets/{fleet}/history", **documented(list[Sample], "Get samples"))
    async def history(
        fleet: FleetName,
        since_s: Annotated[float, Query(gt=0, le=MAX_HISTORY_S, description="Length of the period.")] = 3_600.0,
        points: Annotated[int, Query(ge=1, le=MAX_POINTS, description="Maximum number of samples.")] = 240,
    ) -> Response:
        """Tasks, workers and cost over time, averaged to at most `points` samples, oldest first."""
        return _samples(await store.history(fleet, since_s, points))

    @operator.post("/fleets/{fleet}/pause", **documented(OperationResult, "Pause a fleet"))
    async def pause(fleet: FleetName) -> Response:
        """Its workers finish their current tasks and claim no others. No workers are spawned."""
        return operation_response(feed, await operations.pause_fleet(store, fleet))

    @operator.post("/fleets/{fleet}/resume", **documented(OperationResult, "Resume a fleet"))
    async def resume(fleet: FleetName) -> Response:
        return operation_response(feed, await operations.resume_fleet(store, fleet))

    @operator.post("/fleets/{fleet}/restart", **documented(RestartResult, "Restart a fleet"))
    async def restart(fleet: FleetName, body: Annotated[RestartBody, Body(default_factory=RestartBody)]) -> Response:
        """Declare the cause of failures fixed: restart counts are cleared, failed slots become free, a hold ends.

        Workers drain, and later cycles spawn replacements. A fleet on hold with OTHER_ACCOUNT abandons the machines
        that its API key does not list; they may still be billed."""
        return operation_response(feed, await operations.restart_fleet(store, fleet, body.slot))

    @viewer.get("/fleets/{fleet}/deploy", **documented(RolloutReport, "Get the rollout of a fleet"))
    async def rollout(fleet: FleetName, scope: CallerScope) -> Response:
        """How many workers are on an old version, and the running or last rollout."""
        operations.check_fleet_scope(scope, fleet)
        report = await rollouts.rollout_report(store, fleet)
        if report.is_refused:
            raise not_found(report.message)
        return _report(report)

    @operator.post("/fleets/{fleet}/deploy", **documented(DeployResult, "Deploy a fleet"))
    async def deploy(fleet: FleetName, body: Annotated[DeployBody, Body(default_factory=DeployBody)]) -> Response:
        """Replace its workers by workers of its current code and settings, a few at a time.

        The control process reads its configuration again first. If the new version fails, old workers stay."""
        result = await rollouts.deploy_fleet(
            store,
            fleet,
            context.control.fleet_config(fleet),
            surge=body.surge,
            max_unavailable=body.max_unavailable,
            is_immediate=body.is_immediate,
        )
        return operation_response(feed, result)

    @operator.post("/fleets/{fleet}/deploy/abort", **documented(DeployResult, "Abort a rollout"))
    async def abort_deploy(fleet: FleetName) -> Response:
        """Additional workers of the new version drain. The others stay."""
        return operation_response(feed, await rollouts.abort_deploy(store, fleet))

    @operator.post("/fleets/{fleet}/spawn", **documented(SpawnResult, "Spawn workers"))
    async def spawn(fleet: FleetName, body: Annotated[SpawnBody, Body(default_factory=SpawnBody)]) -> Response:
        """Independent of the scaling policy, up to the fleet's free slots. Idle workers drain as usual."""
        return operation_response(feed, await operations.spawn_workers(store, fleet, body.count))

    @operator.post("/pause", **documented(OperationResult, "Pause all fleets"))
    async def pause_all() -> Response:
        return operation_response(feed, await operations.pause_all_fleets(store))

    @operator.post("/resume", **documented(OperationResult, "Resume all fleets"))
    async def resume_all() -> Response:
        return operation_response(feed, await operations.resume_all_fleets(store))

    @operator.post("/restart", **documented(RestartResult, "Restart all fleets"))
    async def restart_all() -> Response:
        return operation_response(feed, await operations.restart_all_fleets(store))


def _add_form_routes(router: APIRouter, context: AppContext) -> None:
    store = context.store

    @router.post("/fleets/{fleet}/pause", dependencies=[FORM_OPERATOR], include_in_schema=False)
    async def pause(request: Request, fleet: FleetName) -> Response:
        return await submit_form(context, request, lambda _: operations.pause_fleet(store, fleet))

    @router.post("/fleets/{fleet}/resume", dependencies=[FORM_OPERATOR], include_in_schema=False)
    async def resume(request: Request, fleet: FleetName) -> Response:
        return await submit_form(context, request, lambda _: operations.resume_fleet(store, fleet))

    @router.post("/fleets/{fleet}/spawn", dependencies=[FORM_OPERATOR], include_in_schema=False)
    async def spawn(request: Request, fleet: FleetName) -> Response:
        return await submit_form(context, request, lambda _: operations.spawn_workers(store, fleet))

    @router.post("/fleets/{fleet}/deploy", dependencies=[FORM_OPERATOR], include_in_schema=False)
    async def deploy(request: Request, fleet: FleetName) -> Response:
        settings = context.control.fleet_config(fleet)
        return await submit_form(context, request, lambda _: rollouts.deploy_fleet(store, fleet, settings))

    @router.post("/fleets/{fleet}/deploy/abort", dependencies=[FORM_OPERATOR], include_in_schema=False)
    async def abort_deploy(request: Request, fleet: FleetName) -> Response:
        return await submit_form(context, request, lambda _: rollouts.abort_deploy(store, fleet))

    @router.post("/fleets/{fleet}/restart", dependencies=[FORM_OPERATOR], include_in_schema=False)
    async def restart(request: Request, fleet: FleetName) -> Response:
        return await submit_form(context, request, lambda _: operations.restart_fleet(store, fleet))
