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
    """`p95_wait_s`: the goal, if there is one."""

    settings: dict[str, float]
    searched: RunResult
    checked: RunResult
    p95_wait_s: float | None = None

    @property
    def is_held_searched(self) -> bool:
        """False: no candidate held the goal, and this one missed it least."""
        return self._is_held(self.searched)

    @property
    def is_held_checked(self) -> bool:
        return self._is_held(self.checked)

    @property
    def is_held(self) -> bool:
        return self.is_held_searched and self.is_held_checked

    @property
    def problem(self) -> str | None:
        """Which part misses the goal, and what to do. None: both hold it."""
        if not self.is_held_searched:
            return f"no settings hold a p95 wait of {self.p95_wait_s:g} s; these come closest."
        if not self.is_held_checked:
            return (
                f"these settings miss the goal on the part that the search has not seen: p95 wait "
                f"{self.checked.wait_p95_s:.0f} s, goal {self.p95_wait_s:g} s. Search a longer history, or a goal "
                "below the one that you need."
            )
        return None

    def _is_held(self, result: RunResult) -> bool:
        return self.p95_wait_s is None or result.wait_p95_s <= self.p95_wait_s


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
    _, _, settings, searched = min(found, key=lambda each: (each[0], each[1]))
    return TunedSettings(settings, searched, _run(unseen, base, world, settings), p95_wait_s)


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
