"""Searches settings of `adaptive` for the least cost that holds a goal, on one part of a trace, and checks the rest.

The candidates are few, because the policy learns all else: wait goals, and prices of waiting. The winner is judged on
the part of the trace that the search has not seen.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from windlass.model.errors import BadInput
from windlass.model.fleet import FleetConfig
from windlass.simulator.engine import World
from windlass.simulator.measures import RunResult
from windlass.simulator.runs import RunRequest, run_policy
from windlass.simulator.trace import Trace

# Share of the trace's time on which settings are chosen.
SEARCH_SHARE = 0.6
# Wait goals that are tried, in boot times, and prices of waiting. None: the default goal, no price.
GOALS = (None, 0.25, 0.5, 2.0, 4.0)
PRICES = (None, 0.25, 1.0, 4.0)


@dataclass(frozen=True, slots=True)
class TunedSettings:
    settings: dict[str, float]
    searched: RunResult
    checked: RunResult
    # No candidate held the goal: this one missed it least.
    is_missed: bool = False


def tune(
    trace: Trace,
    base: FleetConfig,
    world: World,
    *,
    p95_wait_s: float | None,
    price: float | None,
    advance: Callable[[int], None] = lambda _: None,
) -> TunedSettings:
    """The cheapest settings that hold the p95 wait; with a price, those with the least cost plus priced waiting."""
    middle_s = trace.span_s * SEARCH_SHARE
    seen, unseen = trace.between(0.0, middle_s), trace.between(middle_s, trace.span_s + 1.0)
    if not seen.arrivals or not unseen.arrivals:
        raise BadInput(f"trace {trace.name} is too short to choose on one part and check on the other.")
    found: list[tuple[float, float, dict[str, float], RunResult]] = []
    for settings in candidates(world.boot_s, p95_wait_s, price):
        result = _run(seen, base, world, settings)
        missed_s = max(0.0, result.wait_p95_s - p95_wait_s) if p95_wait_s is not None else 0.0
        cost = result.machine_seconds_billed + (price or 0.0) * result.wait_total_s
        found.append((missed_s, cost, settings, result))
        advance(1)
    missed_s, _, settings, searched = min(found, key=lambda each: (each[0], each[1]))
    return TunedSettings(settings, searched, _run(unseen, base, world, settings), is_missed=missed_s > 0)


def candidates(boot_s: float, p95_wait_s: float | None, price: float | None) -> Iterator[dict[str, float]]:
    goals = [None if share is None else share * boot_s for share in GOALS]
    if p95_wait_s is not None:
        goals.append(p95_wait_s)
    for goal_s in goals:
        for candidate in PRICES if price is None else sorted({*(p for p in PRICES if p is not None), price}):
            settings: dict[str, float] = {}
            if goal_s is not None and goal_s > 0:
                settings["wait_goal_s"] = round(goal_s, 3)
            if candidate is not None:
                settings["price_of_waiting"] = candidate
            yield settings


def _run(trace: Trace, base: FleetConfig, world: World, settings: dict[str, float]) -> RunResult:
    config = FleetConfig.model_validate(base.model_dump() | {"policy": "adaptive"} | settings)
    return run_policy(RunRequest("adaptive", config, world), trace)


def fleet_section(name: str, settings: dict[str, float]) -> str:
    """The settings as a table of windlass.toml."""
    lines = [f"[fleets.{name}]", 'policy = "adaptive"', *(f"{key} = {value:g}" for key, value in settings.items())]
    return "\n".join(lines) + "\n"
