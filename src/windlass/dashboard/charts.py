"""What charts are drawn from: series for the browser's, geometry for those that are plain SVG."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from windlass.dashboard.filters import counted
from windlass.model.cost import ChargeKind, Cost
from windlass.model.cycle import Fleet
from windlass.model.money import MICROS
from windlass.model.overview import FleetOverview, Sample
from windlass.model.worker import WorkerStatus

# Over an hour, or for as long as a younger fleet is there; in about as many points as a third of a screen shows.
MAX_HISTORY_S = 3_600.0
MIN_HISTORY_S = 300.0
HISTORY_POINTS = 120


@dataclass(frozen=True, slots=True)
class Series:
    label: str
    # Of the style sheet: `--series-…` colours the line, `.fill-…` its key.
    colour: str
    values: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Chart:
    id: str
    title: str
    series: tuple[Series, ...]
    # What it shows, for whoever cannot see it.
    summary: str
    # For the browser, as JSON.
    drawing: str
    unit: str | None = None


def history_s(fleet: Fleet, now: datetime) -> float:
    """How far back its charts begin."""
    return min(MAX_HISTORY_S, max(MIN_HISTORY_S, (now - fleet.created_at).total_seconds()))


def fleet_charts(standing: FleetOverview, now: datetime, before: Sequence[Sample]) -> list[Chart]:
    """Queue depth, workers by state and cost per hour, from `before` to now."""
    fleet, samples = standing.fleet.name, [*before, _sample(standing, now)]
    at = [round(sample.at.timestamp(), 1) for sample in samples]
    column = _columns(samples)
    tasks = (
        Series("waiting", "waiting", column(lambda s: s.queued)),
        Series("running", "running", column(lambda s: s.running)),
    )
    workers = (
        Series("active", "active", column(lambda s: s.active)),
        Series("starting", "spawning", column(lambda s: s.spawning)),
        Series("leaving", "terminating", column(lambda s: s.terminating)),
        Series("broken", "error", column(lambda s: s.error)),
    )
    charts = [
        _chart(f"{fleet}-tasks", "Tasks", at, tasks),
        _chart(
            f"{fleet}-workers",
            "Workers",
            at,
            tuple(s for s in workers if any(s.values)) or workers[:1],
            is_stacked=True,
        ),
    ]
    currency = next((sample.currency for sample in reversed(samples) if sample.currency), None)
    if currency is not None:
        cost = Series("per hour", "cost", column(lambda s: (s.burn_micros_per_hour or 0) / MICROS))
        charts.append(_chart(f"{fleet}-cost", f"Cost per hour, {currency}", at, (cost,), unit=currency))
    else:
        rate = Series("per minute", "running", column(lambda s: s.completed_per_minute))
        charts.append(_chart(f"{fleet}-rate", "Completed per minute", at, (rate,)))
    return charts


def _sample(standing: FleetOverview, now: datetime) -> Sample:
    work, burn = standing.work, next(iter(standing.burn), None)
    return Sample(
        at=now,
        queued=work.queued,
        running=work.running,
        **{str(status): standing.workers.get(status, 0) for status in WorkerStatus if status != "terminated"},
        completed_per_minute=work.completed_per_minute,
        wait_p95_s=work.wait_p95_s,
        burn_micros_per_hour=burn.micros_per_hour if burn is not None else None,
        currency=burn.currency if burn is not None else None,
    )


def _columns(samples: Sequence[Sample]) -> Callable[[Callable[[Sample], float]], tuple[float, ...]]:
    return lambda value: tuple(round(value(sample), 4) for sample in samples)


def _chart(
    chart_id: str,
    title: str,
    at: Sequence[float],
    series: tuple[Series, ...],
    *,
    is_stacked: bool = False,
    unit: str | None = None,
) -> Chart:
    is_whole = unit is None
    drawing: dict[str, Any] = {
        "at": at,
        "series": [
            {"label": s.label, "colour": f"--series-{s.colour}", "values": [_short(v) for v in s.values]}
            for s in series
        ],
        "isStacked": is_stacked,
        "isStepped": unit is not None,
        "isWhole": is_whole,
        "unit": unit,
        "least": 4 if is_whole else 0.01,
    }
    now = ", ".join(f"{s.label} {s.values[-1] or 0:g}" for s in series)
    most = ", ".join(f"{s.label} {max(v or 0 for v in s.values):g}" for s in series)
    minutes = max(1, round((at[-1] - at[0]) / 60))
    summary = f"{title} over the last {counted(minutes, 'minute')}: now {now}; at most {most}."
    return Chart(f"chart-{chart_id}", title, series, summary, json.dumps(drawing, separators=(",", ":")), unit)


def _short(value: float | None) -> float | int | None:
    return int(value) if value is not None and value == int(value) else value


# --------------------------------------------------------------------------------------------------------- cost by day

KINDS = (ChargeKind.TASK, ChargeKind.BOOT, ChargeKind.IDLE, ChargeKind.TAIL, ChargeKind.AHEAD)
WIDTH, HEIGHT, _BOTTOM, _LEFT, _RIGHT = 1100.0, 230.0, 24.0, 52.0, 12.0
MAX_BAR_WIDTH = 44.0


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
class Bars:
    """A bar a day, oldest first, each stacked by what it was for. Lines: height and amount."""

    bars: tuple[Bar, ...]
    lines: tuple[tuple[float, int], ...]
    currency: str
    width: float = WIDTH
    height: float = HEIGHT


def day_bars(days: Sequence[str], costs: Sequence[Cost]) -> list[Bars]:
    """One drawing for each currency, over all the days."""
    return [
        _bars(days, {cost.key: cost for cost in costs if cost.currency == currency}, currency)
        for currency in sorted({cost.currency for cost in costs})
    ]


def _bars(days: Sequence[str], by_day: dict[str | None, Cost], currency: str) -> Bars:
    step = round_up(max((cost.total_micros for cost in by_day.values()), default=0) / 4)
    top, room = 4 * step, HEIGHT - _BOTTOM - 8
    pitch = (WIDTH - _LEFT - _RIGHT) / max(len(days), 1)
    width = min(pitch * 0.72, MAX_BAR_WIDTH)
    every = max(1, -(-len(days) // 12))
    bars = []
    for number, day in enumerate(days):
        x = _LEFT + number * pitch + (pitch - width) / 2
        cost = by_day.get(day)
        is_labelled = (len(days) - 1 - number) % every == 0
        bars.append(
            Bar(
                day,
                day[5:] if is_labelled else None,
                round(x + width / 2, 1),
                tuple(_pieces(cost, x, width, room, top)) if cost is not None else (),
                cost.total_micros if cost is not None else 0,
            )
        )
    lines = tuple((round(8 + room * (1 - part / 4), 1), step * part) for part in range(5))
    return Bars(tuple(bars), lines, currency)


def _pieces(cost: Cost, x: float, width: float, room: float, top: int) -> list[Piece]:
    pieces, below = [], 0
    for kind in KINDS:
        micros = getattr(cost, f"{kind}_micros")
        if micros > 0:
            below += micros
            y, height = 8 + room * (1 - below / top), room * micros / top
            pieces.append(Piece(kind, round(x, 1), round(y, 1), round(width, 1), round(height, 1)))
    return pieces


def round_up(number: float) -> int:
    """The next number that reads well on an axis: 1, 2 or 5 and zeros."""
    scale = 1
    while True:
        for digit in (1, 2, 5):
            if digit * scale >= number:
                return digit * scale
        scale *= 10
