"""The page about cost: totals, budgets, a bar chart by day and tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from windlass.cost.report import Forecast, TotalCost, with_volumes
from windlass.dashboard.rendering import PageContext, render
from windlass.model.cost import ChargeKind, Cost, VolumeCost
from windlass.policy.stages.budget import CONSEQUENCES

KINDS = {
    ChargeKind.TASK: "Time in which the worker ran tasks",
    ChargeKind.BOOT: "From the machine's creation until its worker was ready",
    ChargeKind.IDLE: "Time in which the worker was ready and ran no task",
    ChargeKind.TAIL: "From the machine's deletion to the end of its billing period",
    ChargeKind.AHEAD: "The rest of the billing period of a machine that still runs: billed, not used yet",
}
WASTED = "Share of boot, idle and tail in the cost"
# Steps of the axis.
MAX_STEPS = 5
# A chart begins with the first day that has cost, and shows at least this many days.
MIN_CHART_DAYS = 7
WIDTH, HEIGHT, _TOP, _BOTTOM, _LEFT, _RIGHT = 1100.0, 230.0, 8.0, 24.0, 52.0, 12.0
MAX_BAR_WIDTH = 44.0
# Fits below the chart without overlap.
MAX_DAY_LABELS = 12
# Share of a budget above which it is shown as a warning.
BUDGET_WARNING_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Piece:
    kind: ChargeKind
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Bar:
    key: str
    label: str | None
    x: float
    pieces: tuple[Piece, ...]
    total_micros: int


@dataclass(frozen=True, slots=True)
class BarChart:
    """One bar per day, oldest first, stacked by kind of charge. `lines`: height and amount of each grid line."""

    bars: tuple[Bar, ...]
    lines: tuple[tuple[float, int], ...]
    currency: str
    width: float = WIDTH
    height: float = HEIGHT


@dataclass(frozen=True, slots=True)
class CurrencySummary:
    """Cost in one currency: of the chosen period, and of the current month. `sum`: machines and volumes together."""

    currency: str
    total: Cost | None
    forecast: Forecast | None
    sum: TotalCost | None

    @property
    def is_month_estimate(self) -> bool:
        return bool(self.forecast and self.forecast.workers) or bool(self.sum and self.sum.is_estimate)


def currency_summaries(
    totals: Sequence[Cost], forecasts: Sequence[Forecast], volumes: Sequence[VolumeCost]
) -> list[CurrencySummary]:
    by_currency = {cost.currency: cost for cost in totals}
    months = {forecast.currency: forecast for forecast in forecasts}
    sums = {each.currency: each for each in with_volumes(totals, volumes)}
    return [
        CurrencySummary(currency, by_currency.get(currency), months.get(currency), sums.get(currency))
        for currency in sorted({*sums, *months})
    ]


def days_with_cost(days: Sequence[str], costs: Sequence[Cost]) -> Sequence[str]:
    """From the first day that has cost, at least MIN_CHART_DAYS days."""
    first = min((cost.key for cost in costs if cost.key is not None and cost.key in days), default=days[-1])
    return days[min(days.index(first), max(0, len(days) - MIN_CHART_DAYS)) :]


def day_charts(days: Sequence[str], costs: Sequence[Cost]) -> list[BarChart]:
    """One chart per currency, over all the days."""
    return [
        _day_chart(days, {cost.key: cost for cost in costs if cost.currency == currency}, currency)
        for currency in sorted({cost.currency for cost in costs})
    ]


def _day_chart(days: Sequence[str], by_day: dict[str | None, Cost], currency: str) -> BarChart:
    most_micros = max((cost.total_micros for cost in by_day.values()), default=0)
    # Three to five steps, so that the highest bar fills more than half of the chart.
    step = round_up(most_micros / MAX_STEPS)
    steps = max(1, -(-most_micros // step))
    top_micros, plot_height = steps * step, HEIGHT - _BOTTOM - _TOP
    pitch = (WIDTH - _LEFT - _RIGHT) / max(len(days), 1)
    width = min(pitch * 0.72, MAX_BAR_WIDTH)
    days_per_label = max(1, -(-len(days) // MAX_DAY_LABELS))
    bars = []
    for number, day in enumerate(days):
        x = _LEFT + number * pitch + (pitch - width) / 2
        cost = by_day.get(day)
        pieces, below = [], 0
        for kind in KINDS if cost is not None else ():
            micros = getattr(cost, f"{kind}_micros")
            if micros > 0:
                below += micros
                y, height = _TOP + plot_height * (1 - below / top_micros), plot_height * micros / top_micros
                pieces.append(Piece(kind, round(x, 1), round(y, 1), round(width, 1), round(height, 1)))
        is_labelled = (len(days) - 1 - number) % days_per_label == 0
        total_micros = cost.total_micros if cost is not None else 0
        bars.append(Bar(day, day[5:] if is_labelled else None, round(x + width / 2, 1), tuple(pieces), total_micros))
    lines = tuple((round(_TOP + plot_height * (1 - part / steps), 1), step * part) for part in range(steps + 1))
    return BarChart(tuple(bars), lines, currency)


def round_up(number: float) -> int:
    """The next round number for an axis: 1, 2 or 5 times a power of ten."""
    scale = 1
    while True:
        for digit in (1, 2, 5):
            if digit * scale >= number:
                return digit * scale
        scale *= 10


@dataclass(frozen=True, slots=True)
class BudgetView:
    fleet: str
    period: str
    currency: str
    spent_micros: int
    limit_micros: int
    # The setting `budget_action` of the fleet.
    action: str

    @property
    def consequence(self) -> str:
        """What happens when it is used up."""
        return CONSEQUENCES[self.action]

    @property
    def share(self) -> float:
        return self.spent_micros / self.limit_micros

    @property
    def level(self) -> str:
        return "bad" if self.share >= 1 else "warn" if self.share >= BUDGET_WARNING_SHARE else ""


def cost_page(
    page_context: PageContext,
    *,
    since: datetime,
    chosen_days: int,
    fleet: str | None,
    days: Sequence[str],
    by_day: Sequence[Cost],
    by_fleet: Sequence[Cost],
    by_queue: Sequence[Cost],
    totals: Sequence[Cost],
    forecasts: Sequence[Forecast],
    volumes: Sequence[VolumeCost],
    budgets: Sequence[BudgetView],
) -> str:
    tables = (("By fleet", "Fleet", by_fleet), ("By queue", "Queue", by_queue), ("By day", "Day", by_day))
    return render(
        "cost.html",
        page_context,
        here="cost",
        since=since,
        chosen_days=chosen_days,
        fleet=fleet,
        charts=day_charts(days_with_cost(days, by_day), by_day) if len(days) > 1 else [],
        kinds=[str(kind) for kind in KINDS],
        kind_texts={str(kind): text for kind, text in KINDS.items()},
        # One currency after the other: amounts in different currencies cannot be compared.
        tables=[
            (title, heading, sorted(costs, key=lambda cost: cost.currency)) for title, heading, costs in tables if costs
        ],
        wasted_text=WASTED,
        # A period without cost still shows the current month.
        summaries=currency_summaries(totals, forecasts, volumes),
        volumes=volumes,
        budgets=budgets,
    )
