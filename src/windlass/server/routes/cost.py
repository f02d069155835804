"""Cost: the JSON route and the page. Both cache their reports, because cost changes slowly."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import AwareDatetime

from windlass.cost.queries import CostReport, CostReportInputs, build_report, read_costs
from windlass.cost.report import By, Forecast, TotalCost, forecasts
from windlass.dashboard.cost import BudgetView, cost_page
from windlass.model.cost import BillingAccount, Cost, VolumeCost, day_of, hour_of, month_of
from windlass.model.errors import BadInput
from windlass.model.fleet import FleetConfig
from windlass.model.money import to_micros
from windlass.ports.costs import CostStore
from windlass.server.context import AppContext
from windlass.server.json_api import VIEWER, FleetFilter, api_router, json_response
from windlass.server.openapi import documented
from windlass.server.pages import PageFilter, PageViewer, html, page_context
from windlass.server.ttl_cache import TtlCache

MAX_ROWS = 1_000
# A report is loaded at most once in this time.
REPORT_TTL_S = 5.0
# The page is not reloaded more often, whatever else changes.
PAGE_REFRESH_S = 10.0
TABLE_ROWS = 100
# More currencies than any user has. Each day has a row per currency.
MAX_CURRENCIES = 10
# Charges cannot be older.
FIRST_YEAR = 2020
DEFAULT_PERIOD = timedelta(days=30)


@dataclass(frozen=True, slots=True)
class CostReportResponse:
    by: By
    since: datetime
    costs: list[dict[str, Any]]
    total: list[dict[str, Any]]
    forecasts: list[dict[str, Any]]
    volumes: list[dict[str, Any]]
    sums: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _CostPageData:
    now: datetime
    report: CostReportInputs
    budgets: list[BudgetView]


_report = json_response(CostReportResponse)


def routes(context: AppContext) -> APIRouter:
    router, viewer = APIRouter(), api_router(VIEWER)
    store = context.store

    async def load_report(key: tuple[By, datetime | None, str | None, int]) -> CostReport:
        by, since, fleet, limit = key
        now = await store.now()
        if since is not None and not FIRST_YEAR <= since.year <= now.year + 1:
            raise BadInput(f"since is in the year {since.year}: there are no charges from then.")
        return await build_report(store, by, since if since is not None else now - DEFAULT_PERIOD, now, fleet, limit)

    async def load_page_data(key: tuple[str | None, int]) -> _CostPageData:
        fleet, days = key
        now = await store.now()
        since = hour_of(now - timedelta(days=1)) if days == 1 else day_of(now) - timedelta(days=days - 1)
        rows = {By.DAY: (days + 1) * MAX_CURRENCIES, By.FLEET: TABLE_ROWS, By.QUEUE: TABLE_ROWS}
        report = await read_costs(store, rows, since, now, fleet)
        overview = await context.overview_feed.overview()
        names = [fleet] if fleet is not None else [each.fleet.name for each in overview.fleets]
        # Limits of fleets that other processes run are unknown here.
        configs = {name: config for name in names if (config := context.control.fleet_config(name)) is not None}
        return _CostPageData(now, report, await budget_views(store, configs, report.accounts, now))

    reports, page_data = TtlCache(load_report, REPORT_TTL_S), TtlCache(load_page_data, REPORT_TTL_S)

    @viewer.get("/cost", **documented(CostReportResponse, "Get a cost report"))
    async def report(
        by: By = By.DAY,
        since: Annotated[AwareDatetime | None, Query(description="Default: thirty days ago.")] = None,
        fleet: FleetFilter = None,
        limit: Annotated[int, Query(ge=1, le=MAX_ROWS)] = 100,
    ) -> Response:
        """Sums by day, fleet, queue or task, the wasted share, and a forecast for the month. Amounts are in micros.

        `total` is of machines. `volumes` has each shared volume once, with all fleets that use it; `sums` has machines
        and volumes together."""
        found = await reports.get((by, since, fleet, limit))
        return _report(
            CostReportResponse(
                found.by,
                found.since,
                [_plain(cost, "total_micros", "wasted_share") for cost in found.costs],
                [_plain(cost, "total_micros", "wasted_share") for cost in found.total],
                [_plain(forecast, "month_micros") for forecast in found.forecasts],
                [_plain(volume, "month_micros") for volume in found.volumes],
                [_plain(each, "total_micros") for each in found.sums],
            )
        )

    @router.get("/cost", include_in_schema=False)
    async def page(
        request: Request, _viewer: PageViewer, fleet: PageFilter = None, days: Annotated[int, Query(ge=1, le=366)] = 30
    ) -> Response:
        data = await page_data.get((fleet or None, days))
        first_day = day_of(data.report.since)
        shown = cost_page(
            page_context(context, request, data.now, refresh_s=PAGE_REFRESH_S),
            since=data.report.since,
            chosen_days=days,
            fleet=fleet or None,
            days=[f"{first_day + timedelta(days=n):%Y-%m-%d}" for n in range((data.now - first_day).days + 1)],
            by_day=data.report.costs[By.DAY],
            by_fleet=data.report.costs[By.FLEET],
            by_queue=data.report.costs[By.QUEUE],
            totals=data.report.total,
            forecasts=data.report.forecasts,
            volumes=data.report.volumes,
            budgets=data.budgets,
        )
        return html(request, shown)

    router.include_router(viewer)
    return router


def _plain(value: Cost | Forecast | VolumeCost | TotalCost, *properties: str) -> dict[str, Any]:
    """A dataclass as JSON object, with some of its properties."""
    return {name: getattr(value, name) for name in (*(field.name for field in fields(value)), *properties)}


async def budget_views(
    store: CostStore, configs: Mapping[str, FleetConfig], accounts: Sequence[BillingAccount], now: datetime
) -> list[BudgetView]:
    """Budgets of these fleets and what they have spent. `accounts`: all that are not fully settled."""
    budgets = []
    fleet = next(iter(configs)) if len(configs) == 1 else None
    for period, since in (("hour", hour_of(now)), ("day", day_of(now)), ("month", month_of(now))):
        limits = {name: getattr(config, f"budget_per_{period}") for name, config in configs.items()}
        if all(limit is None for limit in limits.values()):
            continue
        settled = await store.costs(By.FLEET, since, fleet=fleet)
        for name, limit in limits.items():
            if limit is None:
                continue
            own_accounts = [account for account in accounts if account.fleet == name]
            found = forecasts([cost for cost in settled if cost.key == name], own_accounts, since, now)
            spent = [(forecast.currency, forecast.spent_micros) for forecast in found]
            budgets += [
                BudgetView(name, period, currency, micros, to_micros(limit), configs[name].budget_action)
                # Without charges the currency is unknown and the amount is zero.
                for currency, micros in spent or [("", 0)]
            ]
    return sorted(budgets, key=lambda budget: budget.fleet)
