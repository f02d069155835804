"""Line charts of a fleet: tasks, workers, and cost or throughput. The browser draws them with uPlot."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from windlass.dashboard.filters import brief
from windlass.model.cycle import Cycle, Fleet
from windlass.model.money import MICROS
from windlass.model.overview import FleetOverview, Sample
from windlass.model.worker import WorkerStatus

# Without a chosen range a chart covers an hour, or the age of a younger fleet.
DEFAULT_HISTORY_S = 3_600.0
MIN_HISTORY_S = 300.0
# The points of a chart fit a third of a screen, and a whole one on the page of a fleet.
HISTORY_POINTS = 120
WIDE_POINTS = 240


class ChartRange(StrEnum):
    """The time that charts cover."""

    QUARTER = "15m"
    HOUR = "1h"
    DAY = "24h"
    WEEK = "7d"


RANGE_S = {
    ChartRange.QUARTER: 900.0,
    ChartRange.HOUR: 3_600.0,
    ChartRange.DAY: 86_400.0,
    ChartRange.WEEK: 604_800.0,
}
RANGE_LABELS = {
    ChartRange.QUARTER: "15 min",
    ChartRange.HOUR: "1 h",
    ChartRange.DAY: "24 h",
    ChartRange.WEEK: "7 d",
}
# After "in the last".
RANGE_WORDS = {
    ChartRange.QUARTER: "15 minutes",
    ChartRange.HOUR: "hour",
    ChartRange.DAY: "24 hours",
    ChartRange.WEEK: "7 days",
}


@dataclass(frozen=True, slots=True)
class Series:
    label: str
    # Name in the style sheet: `--series-<name>` for the line, `.fill-<name>` for its key.
    colour: str
    values: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Chart:
    id: str
    title: str
    series: tuple[Series, ...]
    # Text for screen readers.
    summary: str
    # JSON that static/charts.js draws.
    data: str
    unit: str | None = None


def history_s(fleet: Fleet, now: datetime, chosen: ChartRange | None = None) -> float:
    """Length of the fleet's charts."""
    if chosen is not None:
        return RANGE_S[chosen]
    return min(DEFAULT_HISTORY_S, max(MIN_HISTORY_S, (now - fleet.created_at).total_seconds()))


def fleet_charts(
    overview: FleetOverview, now: datetime, history: Sequence[Sample], changes: Sequence[Cycle] = ()
) -> list[Chart]:
    """Tasks, workers by status, and cost per hour (throughput for fleets without prices), from `history` to now.

    `changes` are marked in the chart of workers.
    """
    name, work, burn = overview.fleet.name, overview.work, next(iter(overview.burn), None)
    current = Sample(
        at=now,
        queued=work.queued,
        running=work.running,
        **{str(status): overview.workers.get(status, 0) for status in WorkerStatus if status != "terminated"},
        completed_per_minute=work.current_per_minute,
        wait_p95_s=work.wait_p95_s,
        burn_micros_per_hour=burn.micros_per_hour if burn is not None else None,
        currency=burn.currency if burn is not None else None,
    )
    samples = [*history, current]
    at = [round(sample.at.timestamp(), 1) for sample in samples]

    def series(label: str, colour: str, field: str, divisor: int = 1) -> Series:
        values = (round((getattr(sample, field) or 0) / divisor, 4) for sample in samples)
        return Series(label, colour, tuple(values))

    tasks = (series("queued", "queued", "queued"), series("running", "running", "running"))
    workers = (
        series("active", "active", "active"),
        series("spawning", "spawning", "spawning"),
        series("terminating", "terminating", "terminating"),
        series("error", "error", "error"),
    )
    used = tuple(one for one in workers if any(one.values)) or workers[:1]
    marks = [
        {"at": round(cycle.started_at.timestamp(), 1), "text": cycle.decision}
        for cycle in reversed(changes)
        if cycle.started_at.timestamp() >= at[0]
    ]
    charts = [
        _chart(f"{name}-tasks", "Tasks", at, tasks),
        _chart(f"{name}-workers", "Workers", at, used, is_stacked=True, marks=marks),
    ]
    currency = next((sample.currency for sample in reversed(samples) if sample.currency), None)
    if currency is not None:
        cost = series("per hour", "cost", "burn_micros_per_hour", MICROS)
        charts.append(_chart(f"{name}-cost", f"Cost per hour, {currency}", at, (cost,), unit=currency))
    else:
        rate = series("per minute", "running", "completed_per_minute")
        charts.append(_chart(f"{name}-rate", "Completed per minute", at, (rate,)))
    return charts


def _chart(
    chart_id: str,
    title: str,
    at: Sequence[float],
    series: tuple[Series, ...],
    *,
    is_stacked: bool = False,
    unit: str | None = None,
    marks: Sequence[dict[str, Any]] = (),
) -> Chart:
    is_whole = unit is None
    data: dict[str, Any] = {
        "at": at,
        "series": [
            {
                "label": s.label,
                "colour": f"--series-{s.colour}",
                # 3 takes fewer bytes than 3.0.
                "values": [int(v) if v is not None and v == int(v) else v for v in s.values],
            }
            for s in series
        ],
        "isStacked": is_stacked,
        "isStepped": unit is not None,
        "isWhole": is_whole,
        "unit": unit,
        "least": 4 if is_whole else 0.01,
        "marks": marks,
    }
    current = ", ".join(f"{s.label} {s.values[-1] or 0:g}" for s in series)
    most = ", ".join(f"{s.label} {max(v or 0 for v in s.values):g}" for s in series)
    summary = f"{title} over the last {brief(max(60.0, at[-1] - at[0]))}: now {current}; at most {most}."
    return Chart(f"chart-{chart_id}", title, series, summary, json.dumps(data, separators=(",", ":")), unit)
