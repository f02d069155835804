"""The dashboard's pages: each reads what it shows and hands it to windlass.dashboard, which makes the page.

Whoever may read the API may read these. What goes wrong is told on a page, never as JSON or a traceback.
"""

import asyncio
import functools
import gzip
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated
from urllib.parse import unquote

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from starlette.types import Receive, Scope, Send

from windlass.cost.queries import CostReportInputs, read_costs, task_cost
from windlass.cost.report import By, forecasts
from windlass.dashboard import pages
from windlass.dashboard.charts import HISTORY_POINTS, history_s
from windlass.dashboard.pages import BudgetView
from windlass.dashboard.render import KEPT_S, PageContext, Viewer, assets
from windlass.dashboard.replay import KNOBS, ReplayResult, decide_again, knobs
from windlass.dashboard.slots import MAX_CELLS, SlotMap, slot_map
from windlass.model.auth import Role, TokenCaller
from windlass.model.cost import BillingAccount, day_of, hour_of, month_of
from windlass.model.errors import BadInput
from windlass.model.listing import LogLine, TaskList
from windlass.model.money import to_micros
from windlass.model.overview import FleetOverview
from windlass.model.task import MAX_TASK_ID, TaskStatus
from windlass.model.worker import WorkerStatus
from windlass.server.auth import csrf_of, viewer
from windlass.server.context import AppContext, DashboardContext
from windlass.server.errors import ApiError, not_found
from windlass.server.routes.queries import COSTS_FRESH_S
from windlass.server.ttl_cache import TtlCache

STREAM = "/api/v1/stream"
PAGE_ROWS = 50
# Of dead letters fewer, because each brings its history.
DEAD_LETTERS = 25
EVENTS_SHOWN = 12
# Tasks at hand that a worker's page names.
TASKS_AT_HAND = 100
LOG_LINES = 300
COST_ROWS = 100
# More than anybody pays in: each day has a row for each.
CURRENCIES = 10
# What is paid changes by the hour, whatever else changes.
COST_REFRESH_S = 10.0
# Fleets whose slots are drawn on the page of all workers; the others have their own.
MAPS = 5
# Compressing one as big as this takes a millisecond; bigger ones are no reason to keep a cycle waiting.
BIG_PAGE_BYTES = 64_000
THEME_COOKIE = "windlass_theme"
# What was done a moment ago, for the page that comes next.
SAID_COOKIE = "windlass_said"

Cursor = Annotated[str | None, Query(max_length=500)]
Name = Annotated[str | None, Query(max_length=63)]
Looker = Annotated[TokenCaller, Depends(viewer)]


def page_routes(face: AppContext, shown: DashboardContext) -> APIRouter:
    router = APIRouter(include_in_schema=False)
    for add in (_add_overview, _add_workers, _add_tasks, _add_decisions, _add_cost):
        add(router, face, shown)
    return router


def asset_routes() -> APIRouter:
    router = APIRouter(include_in_schema=False)

    @router.get("/favicon.ico")
    async def icon() -> Response:
        """Browsers ask for it wherever a page names none: on the way in, or when they show JSON."""
        found = next(asset for address, asset in assets().items() if address.startswith("/static/icon-"))
        return Response(found.content, media_type=found.media_type, headers={"Cache-Control": "public, max-age=86400"})

    @router.get("/static/{name}")
    async def static(name: str, request: Request) -> Response:
        found = assets().get(f"/static/{name}")
        if found is None:
            raise not_found("there is no such file: reload the page.")
        headers = {"Cache-Control": f"public, max-age={KEPT_S}, immutable", "Vary": "Accept-Encoding"}
        if not _takes_gzip(request):
            return Response(found.content, media_type=found.media_type, headers=headers)
        headers["Content-Encoding"] = "gzip"
        return Response(found.compressed, media_type=found.media_type, headers=headers)

    return router


# --------------------------------------------------------------------------------------------------------------- pages


def _add_overview(router: APIRouter, face: AppContext, shown: DashboardContext) -> None:
    @router.get("/")
    async def overview(request: Request, _looker: Looker) -> Response:
        found = await shown.live.overview()
        fleets = [standing.fleet for standing in found.fleets]
        histories = await asyncio.gather(
            *(shown.store.history(fleet.name, history_s(fleet, found.at), HISTORY_POINTS) for fleet in fleets)
        )
        events = await shown.store.events_page(limit=EVENTS_SHOWN)
        setting = setting_of(face, request, found.at)
        by_fleet = {fleet.name: history for fleet, history in zip(fleets, histories, strict=True)}
        return html(request, pages.overview_page(setting, found, by_fleet, events.rows))


def _add_workers(router: APIRouter, face: AppContext, shown: DashboardContext) -> None:
    @router.get("/workers")
    async def workers(
        request: Request,
        _looker: Looker,
        fleet: Name = None,
        ended: str | None = None,
        cursor: Cursor = None,
        slots: Cursor = None,
    ) -> Response:
        """`slots`: where the slot map of the fleet begins."""
        overview = await shown.live.overview()
        is_ended = ended is not None
        standings = [standing for standing in overview.fleets if fleet in (None, "", standing.fleet.name)]
        found = await shown.store.workers_page(
            fleet=fleet or None,
            status=WorkerStatus.TERMINATED if is_ended else None,
            limit=PAGE_ROWS,
            cursor=cursor,
        )
        return html(
            request,
            pages.workers_page(
                setting_of(face, request, overview.at),
                found,
                fleets=[standing.fleet.name for standing in overview.fleets],
                maps=await _slot_maps(shown, standings[:MAPS], slots) if not is_ended and cursor is None else [],
                counts=_worker_counts(standings),
                ray_dashboards=await shown.store.ray_dashboards(),
                fleet=fleet or None,
                is_ended=is_ended,
                is_first=cursor is None,
            ),
        )

    @router.get("/workers/{worker_id}")
    async def worker(request: Request, worker_id: str, _looker: Looker) -> Response:
        row = await shown.store.worker_row(worker_id)
        if row is None:
            raise not_found(f"there is no worker {worker_id}: it never was, or its retention is over.")
        story = await shown.explain(worker_id)
        running = await shown.store.running_tasks_of(worker_id, TASKS_AT_HAND) if row.running_tasks else []
        log, problem = await _log_of(shown, row.fleet, worker_id)
        # Nothing more happens to one that has ended.
        is_live = row.status is not WorkerStatus.TERMINATED
        setting = setting_of(face, request, await shown.store.now(), is_live=is_live)
        return html(
            request,
            pages.worker_page(
                setting,
                row,
                answer=story.answer,
                history=story.history,
                tasks=running,
                log=log,
                log_problem=problem,
                ray_dashboard=(await shown.store.ray_dashboards()).get(row.fleet),
            ),
        )


async def _slot_maps(shown: DashboardContext, standings: Sequence[FleetOverview], cursor: str | None) -> list[SlotMap]:
    maps = []
    # A cursor is of one fleet.
    for standing in standings if cursor is None else standings[:1]:
        if standing.fleet.planned_at is not None:  # nobody hired for the others: they have no slots
            page = await shown.store.workers_page(fleet=standing.fleet.name, limit=MAX_CELLS, cursor=cursor)
            is_first_page, next_cursor = cursor is None, page.next_cursor
            maps.append(slot_map(standing.fleet, page.rows, is_first_page=is_first_page, next_cursor=next_cursor))
    return maps


def _worker_counts(standings: Sequence[FleetOverview]) -> Mapping[WorkerStatus, int]:
    return {
        status: sum(standing.workers.get(status, 0) for standing in standings)
        for status in WorkerStatus
        if status is not WorkerStatus.TERMINATED
    }


async def _log_of(shown: DashboardContext, fleet: str, worker_id: str) -> tuple[list[str] | None, str | None]:
    """What it printed, if it runs here; otherwise what is in the database about it, if logs are kept there."""
    try:
        return [line async for line in shown.worker_log(fleet, worker_id, LOG_LINES)], None
    except BadInput as error:
        kept = (await shown.store.logs_page(worker_id=worker_id, limit=LOG_LINES)).rows
        return [_log_text(line) for line in reversed(kept)] or None, str(error)


def _log_text(line: LogLine) -> str:
    more = "".join(f" {name}={value}" for name, value in (line.fields or {}).items())
    return f"{line.at:%Y-%m-%d %H:%M:%S} {line.level} {line.message}{more}"


def _add_tasks(router: APIRouter, face: AppContext, shown: DashboardContext) -> None:
    @router.get("/tasks")
    async def tasks(
        request: Request,
        _looker: Looker,
        queue: Name = None,
        which: TaskList | None = None,
        search: Annotated[str | None, Query(max_length=200)] = None,
        cursor: Cursor = None,
    ) -> Response:
        limit = DEAD_LETTERS if which is TaskList.FAILED else PAGE_ROWS
        found = await shown.store.tasks_page(
            queue=queue or None, which=which, search=search or None, limit=limit, cursor=cursor
        )
        dead = [task.id for task in found.rows] if which is TaskList.FAILED else []
        histories = {task_id: await shown.store.events(task_id=task_id) for task_id in dead}
        overview = await shown.live.overview()
        return html(
            request,
            pages.tasks_page(
                setting_of(face, request, await shown.store.now()),
                found,
                queues=sorted({*overview.queues, *([queue] if queue else [])}),
                has_more_queues=overview.has_more_queues,
                queue=queue or None,
                which=which.value if which is not None else None,
                search=search or None,
                histories=histories,
                is_first=cursor is None,
                is_cut_short=found.next_cursor is not None and len(found.rows) < limit,
            ),
        )

    @router.get("/tasks/{task_id}")
    async def task(request: Request, task_id: Annotated[int, Path(ge=1, le=MAX_TASK_ID)], _looker: Looker) -> Response:
        found = await shown.store.task_in_full(task_id)
        if found is None:
            raise not_found(f"there is no task {task_id}: it was never enqueued, or its retention is over.")
        story = await shown.explain(str(task_id))
        now = await shown.store.now()
        return html(
            request,
            pages.task_page(
                # Nothing more happens to one that is complete; a dead letter may be retried.
                setting_of(face, request, now, is_live=found.status is not TaskStatus.COMPLETE),
                found,
                answer=story.answer,
                history=story.history,
                events=await shown.store.events(task_id=task_id),
                cost=await task_cost(shown.store, task_id, now, found.worker_id),
            ),
        )


def _add_decisions(router: APIRouter, face: AppContext, shown: DashboardContext) -> None:
    @router.get("/decisions")
    async def decisions(request: Request, _looker: Looker, fleet: Name = None, cursor: Cursor = None) -> Response:
        overview = await shown.live.overview()
        found = await shown.store.cycles_page(fleet=fleet or None, limit=PAGE_ROWS, cursor=cursor)
        fleets = [standing.fleet.name for standing in overview.fleets]
        setting = setting_of(face, request, await shown.store.now())
        return html(
            request, pages.decisions_page(setting, found, fleets=fleets, fleet=fleet or None, is_first=cursor is None)
        )

    @router.get("/decisions/{cycle_id}")
    async def decision(
        request: Request, cycle_id: Annotated[int, Path(ge=1, le=MAX_TASK_ID)], _looker: Looker
    ) -> Response:
        """With `replay` in the address it is decided again, with the settings that are there too."""
        found = await shown.store.cycle(cycle_id)
        if found is None:
            raise not_found(f"there is no cycle {cycle_id}: only those of the last days are kept.")
        settings, given = found.snapshot.settings, _knobs_given(request)
        again: ReplayResult | None = None
        problem = None
        if settings is not None and "replay" in request.query_params:
            try:
                again = await shown.thinking.about(functools.partial(decide_again, found, settings, given))
            except BadInput as error:
                problem = str(error)
        setting = setting_of(face, request, await shown.store.now(), is_live=False)
        turned = knobs(settings, given) if settings is not None else None
        return html(request, pages.decision_page(setting, found, knobs=turned, again=again, problem=problem))


def _knobs_given(request: Request) -> dict[str, str]:
    return {name: request.query_params[name] for name in KNOBS if name in request.query_params}


@dataclass(frozen=True, slots=True)
class _Costs:
    now: datetime
    look: CostReportInputs
    budgets: list[BudgetView]


def _add_cost(router: APIRouter, face: AppContext, shown: DashboardContext) -> None:
    async def look_up(question: tuple[str | None, int]) -> _Costs:
        fleet, days = question
        now = await shown.store.now()
        since = hour_of(now - timedelta(days=1)) if days == 1 else day_of(now) - timedelta(days=days - 1)
        sides = {By.DAY: (days + 1) * CURRENCIES, By.FLEET: COST_ROWS, By.QUEUE: COST_ROWS}
        found = await read_costs(shown.store, sides, since, now, fleet)
        return _Costs(now, found, await _budgets(face, shown, found.accounts, fleet, now))

    costs = TtlCache(look_up, COSTS_FRESH_S)

    @router.get("/cost")
    async def cost(
        request: Request, _looker: Looker, fleet: Name = None, days: Annotated[int, Query(ge=1, le=366)] = 30
    ) -> Response:
        found = await costs.of((fleet or None, days))
        look = found.look
        return html(
            request,
            pages.cost_page(
                setting_of(face, request, found.now, refresh_s=COST_REFRESH_S),
                since=look.since,
                chosen_days=days,
                fleet=fleet or None,
                days=_days_between(look.since, found.now),
                by_day=look.costs[By.DAY],
                by_fleet=look.costs[By.FLEET],
                by_queue=look.costs[By.QUEUE],
                totals=look.total,
                forecasts=look.forecasts,
                budgets=found.budgets,
            ),
        )


def _days_between(since: datetime, now: datetime) -> list[str]:
    first = day_of(since)
    return [f"{first + timedelta(days=number):%Y-%m-%d}" for number in range((now - first).days + 1)]


async def _budgets(
    face: AppContext, shown: DashboardContext, accounts: Sequence[BillingAccount], fleet: str | None, now: datetime
) -> list[BudgetView]:
    """Of fleets that are run here: elsewhere nobody knows their limits. `accounts`: of those that are asked for."""
    names = [fleet] if fleet is not None else [each.fleet.name for each in (await shown.live.overview()).fleets]
    limited = {name: settings for name in names if (settings := face.fleet(name)) is not None}
    found = []
    for period, since in (("hour", hour_of(now)), ("day", day_of(now)), ("month", month_of(now))):
        limits = {name: getattr(settings, f"budget_per_{period}") for name, settings in limited.items()}
        if all(limit is None for limit in limits.values()):
            continue
        settled = await shown.store.costs(By.FLEET, since, fleet=fleet)
        for name, limit in limits.items():
            if limit is None:
                continue
            own = [account for account in accounts if account.fleet == name]
            told = forecasts([cost for cost in settled if cost.key == name], own, since, now)
            spent = [(forecast.currency, forecast.spent_micros) for forecast in told]
            found += [
                BudgetView(name, period, currency, micros, to_micros(limit), limited[name].budget_action)
                # Nothing is spent in any currency: that is known too.
                for currency, micros in spent or [("", 0)]
            ]
    return sorted(found, key=lambda budget: budget.fleet)


# -------------------------------------------------------------------------------------------------------------- answers


def setting_of(
    face: AppContext, request: Request, now: datetime, *, is_live: bool = True, refresh_s: float | None = None
) -> PageContext:
    caller = getattr(request.state, "caller", None)
    csrf = csrf_of(request) if caller is not None else None
    may_act = csrf is not None and isinstance(caller, TokenCaller) and caller.role is Role.OPERATOR
    theme = request.cookies.get(THEME_COOKIE)
    query = f"?{request.url.query}" if request.url.query else ""
    return PageContext(
        now=now,
        version=face.version,
        viewer=Viewer(may_act, csrf or ""),
        theme=theme if theme in ("light", "dark") else None,
        stream=STREAM if is_live else None,
        refresh_s=refresh_s,
        back=f"{request.url.path}{query}",
        said=unquote(request.cookies[SAID_COOKIE]) if SAID_COOKIE in request.cookies else None,
    )


def html(request: Request, page: str, status: int = 200) -> Response:
    response = _Page(page, status, {"Vary": "Accept-Encoding, Cookie"}, "text/html; charset=utf-8")
    response.is_compressed = _takes_gzip(request)
    if SAID_COOKIE in request.cookies:
        response.delete_cookie(SAID_COOKIE, path="/")
    return response


class _Page(Response):
    """Compressed when it is sent, and beside the loop if that takes long."""

    is_compressed = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.is_compressed:
            compress = functools.partial(gzip.compress, self.body, 5, mtime=0)
            self.body = await asyncio.to_thread(compress) if len(self.body) > BIG_PAGE_BYTES else compress()
            self.headers["Content-Encoding"] = "gzip"
            self.headers["Content-Length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def _takes_gzip(request: Request) -> bool:
    return "gzip" in request.headers.get("accept-encoding", "")


_TITLES = {
    400: "This cannot be shown",
    401: "Who are you?",
    403: "Not with this session",
    404: "Not here",
    410: "This link is over",
    429: "Too many at once",
    500: "This is a defect",
    503: "The database is away",
}


def problem(face: AppContext, request: Request, error: ApiError) -> Response:
    """What went wrong, as a page."""
    setting = setting_of(face, request, datetime.now(UTC), is_live=False)
    sentence = str(error.detail)
    if error.status_code == 401:
        sentence = "Open a link that `windlass tokens link` or `windlass up` printed; it lets this browser in, once."
    title = _TITLES.get(error.status_code, "This did not work")
    return html(request, pages.problem_page(setting, title, sentence[:1].upper() + sentence[1:]), error.status_code)
