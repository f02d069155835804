"""The page "What if": the running settings of a fleet and two alternatives, scored on its last week."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from markupsafe import Markup

from windlass.dashboard.rendering import PageContext, render
from windlass.simulator.measures import RunResult
from windlass.simulator.past import FleetPast

# Differences below this share are not worth a sentence.
NEARLY_EQUAL = 0.02
# A p95 wait up to this factor or this many seconds longer counts as the same.
LONGER_WAIT, LONGER_WAIT_S = 1.1, 10.0


@dataclass(frozen=True, slots=True)
class RunRow:
    result: RunResult
    cost_micros: int | None
    # Billed time compared with the running settings: -0.2 is a fifth less. None for the running settings.
    saved_share: float | None


def run_rows(results: Sequence[RunResult], past: FleetPast) -> list[RunRow]:
    """The first result is that of the running settings."""
    running_s = results[0].machine_seconds_billed
    return [
        RunRow(
            result,
            past.cost_micros(result.machine_seconds_billed),
            None if number == 0 or not running_s else result.machine_seconds_billed / running_s - 1.0,
        )
        for number, result in enumerate(results)
    ]


def verdict(results: Sequence[RunResult]) -> str:
    """One sentence about the cheapest alternative without longer waits; if all have longer waits, the cheapest."""
    running, *others = results
    longest_s = max(running.wait_p95_s * LONGER_WAIT, running.wait_p95_s + LONGER_WAIT_S)
    quick = [result for result in others if result.wait_p95_s <= longest_s]
    best = min(quick or others, key=lambda result: result.machine_seconds_billed)
    change = best.machine_seconds_billed / running.machine_seconds_billed - 1.0 if running.machine_seconds_billed else 0
    hours = (
        f"{best.machine_seconds_billed / 3600:.1f} instead of {running.machine_seconds_billed / 3600:.1f} machine hours"
    )
    waits = f"a p95 wait of {best.wait_p95_s:.0f} s instead of {running.wait_p95_s:.0f} s"
    if abs(change) < NEARLY_EQUAL:
        return f"{best.policy} would have cost about the same: {hours}, and {waits}."
    word = "less" if change < 0 else "more"
    return f"{best.policy} would have cost {abs(change) * 100:.0f} % {word}: {hours}, and {waits}."


def what_if_page(
    page_context: PageContext,
    *,
    fleet: str | None,
    fleets: Sequence[str],
    at: datetime | None = None,
    past: FleetPast | None = None,
    results: Sequence[RunResult] = (),
    charts: Sequence[str] = (),
    problem: str = "",
) -> str:
    """`charts`: SVG of the simulator, in which every label is escaped."""
    has_results = bool(results) and past is not None
    return render(
        "what_if.html",
        page_context,
        here="what-if",
        fleet=fleet,
        fleets=fleets,
        at=at,
        notes=past.notes if past is not None else (),
        currency=past.currency if past is not None else None,
        rows=run_rows(results, past) if has_results and past is not None else [],
        verdict=verdict(results) if has_results else "",
        charts=[Markup(chart) for chart in charts],  # noqa: S704
        problem=problem,
    )
