"""The past of a fleet as input of simulations: its tasks as a trace, and its machines as a world.

The world has the fleet's measured boots and their spread, refusals, crashes, billing and price. What the past does not
show is assumed, and `notes` say so.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from windlass.model.errors import BadInput
from windlass.model.fleet import FleetConfig
from windlass.model.history import MachineRecord, TaskHistory
from windlass.policy.scale.adaptive import UNKNOWN_BOOT_S, UNKNOWN_PROCESS_START_S
from windlass.policy.scale.adaptive_boot import estimate_boots
from windlass.simulator.engine import World
from windlass.simulator.runs import RunRequest, billed_by, spawn_timeout_s
from windlass.simulator.trace import Trace

# The spread of fewer boots is not estimated.
MIN_BOOTS_FOR_SPREAD = 5
# So many boots are drawn as they were measured, whatever their distribution. Fewer give a lognormal distribution.
MIN_BOOTS_TO_DRAW = 20
# Outliers beyond it would be drawn in most runs.
MAX_BOOT_SIGMA = 1.5
# A fleet that is refused more often could not have worked.
MAX_REFUSED_SHARE = 0.9
# Providers that bill by the hour, for a fleet that has not rented a machine yet.
HOURLY_PROVIDERS = ("hetzner",)
# The cheapest published policies that held the wait goal on all traces of docs/policies.md, by billing.
BEST_PUBLISHED = {"second": "delayed-off", "hour": "hetzner-recycler"}
PRICE_OF_WAITING = 1.0


@dataclass(frozen=True, slots=True)
class FleetPast:
    """`price_micros_per_hour` is that of the newest machine with a price; None if there is none."""

    trace: Trace
    world: World
    notes: tuple[str, ...] = ()
    price_micros_per_hour: int | None = None
    currency: str | None = None

    def cost_micros(self, machine_seconds: float) -> int | None:
        if self.price_micros_per_hour is None:
            return None
        return round(self.price_micros_per_hour * machine_seconds / 3600)


def fleet_past(
    name: str, config: FleetConfig, tasks: TaskHistory, machines: Sequence[MachineRecord], *, seed: int = 1
) -> FleetPast:
    """BadInput if there is no task."""
    if not tasks.arrivals_s:
        raise BadInput(f"fleet {name} has no finished task since {tasks.since:%Y-%m-%d %H:%M} UTC.")
    first = tasks.arrivals_s[0]
    # Rounded: the same history, read later, has arrivals in the same cycles.
    arrivals = tuple(round(at - first, 3) for at in tasks.arrivals_s)
    trace = Trace(name, arrivals, tuple(map(float, tasks.durations_s)), tuple(tasks.queues))
    notes = [f"{len(trace.arrivals)} tasks over {trace.span_s / 86400:.2f} days, each with its last attempt."]
    if tasks.is_cut:
        notes.append("There were more tasks: the oldest are left out.")
    boots = [machine.boot_s for machine in machines if machine.boot_s is not None]
    cancelled = [machine.cancelled_s for machine in machines if machine.cancelled_s is not None]
    boot_s, sigma, steps = _boots(config, boots, cancelled)
    if boots:
        notes.append(f"Boots of {boot_s:.3g} s on average, measured on {len(boots)} machines.")
        if steps:
            notes.append("Boots are drawn from those that were measured.")
        if cancelled:
            notes.append(f"{len(cancelled)} starts that were cancelled count as boots that take longer.")
    else:
        notes.append(f"No boot was measured: {boot_s:g} s is assumed.")
    priced = next((machine for machine in machines if machine.price_micros_per_hour), None)
    refused = sum(machine.is_refused for machine in machines)
    ready_s = math.fsum(machine.lived_s - (machine.boot_s or 0.0) for machine in machines if machine.boot_s is not None)
    crashed = sum(machine.is_crashed for machine in machines)
    if refused:
        notes.append(f"The provider refused {refused} of {len(machines)} machines.")
    if crashed:
        notes.append(f"{crashed} machines failed after they were ready.")
    world = World(
        slots=config.concurrency,
        boot_s=boot_s,
        boot_sigma=sigma,
        boot_steps=steps,
        billing_unit_s=_billing_unit_s(config, machines),
        crashes_per_hour=crashed * 3600.0 / ready_s if ready_s > 0 else 0.0,
        refused_share=min(refused / len(machines), MAX_REFUSED_SHARE) if machines else 0.0,
        is_free=config.is_of_this_host,
        seed=seed,
    )
    notes.append(f"Billed by the {billed_by(world.billing_unit_s)}.")
    return FleetPast(
        trace,
        world,
        tuple(notes),
        priced.price_micros_per_hour if priced is not None else None,
        priced.currency if priced is not None else None,
    )


def assumed_past(config: FleetConfig, trace: Trace, seed: int = 1) -> FleetPast:
    """Another trace in the world of a fleet whose machines are not known: only its settings are."""
    boot_s, _, _ = _boots(config, (), ())
    unit_s = _billing_unit_s(config, ())
    notes = (
        f"{len(trace.arrivals)} tasks over {trace.span_s / 86400:.2f} days.",
        f"Without --boot, boots of {boot_s:g} s are assumed; without --billing, billed by the {billed_by(unit_s)}.",
    )
    world = World(
        slots=config.concurrency,
        boot_s=boot_s,
        billing_unit_s=unit_s,
        is_free=config.is_of_this_host,
        seed=seed,
    )
    return FleetPast(trace, world, notes)


def _boots(
    config: FleetConfig, boots: Sequence[float], cancelled: Sequence[float]
) -> tuple[float, float, tuple[tuple[float, float], ...]]:
    """Mean, sigma of their logarithms, and the boots to draw from, by the same estimate as `adaptive`.

    `cancelled`: ages of starts that were cancelled. They would have taken longer.
    """
    if not boots:
        return UNKNOWN_PROCESS_START_S if config.is_of_this_host else UNKNOWN_BOOT_S, 0.0, ()
    estimate = estimate_boots(sorted(boots), cancelled, 0.0)
    if len(boots) < MIN_BOOTS_FOR_SPREAD or not estimate.steps:
        return round(estimate.mean_s, 3), 0.0, ()
    # The share of boots that take longer falls at each step by the share of boots that take this long. What is left
    # after the last step took at least that long.
    shares = [before - after for before, after in pairwise([1.0, *(longer for _, longer in estimate.steps)])]
    shares[-1] += estimate.steps[-1][1]
    logs = [math.log(max(boot_s, 0.01)) for boot_s, _ in estimate.steps]
    mean = math.fsum(share * value for share, value in zip(shares, logs, strict=True))
    spread = math.fsum(share * (value - mean) ** 2 for share, value in zip(shares, logs, strict=True))
    sigma = min(math.sqrt(spread), MAX_BOOT_SIGMA)
    return round(estimate.mean_s, 3), sigma, estimate.steps if len(boots) >= MIN_BOOTS_TO_DRAW else ()


def _billing_unit_s(config: FleetConfig, machines: Sequence[MachineRecord]) -> int:
    for machine in machines:
        if machine.billing_unit_s is not None:
            return machine.billing_unit_s
    return 3600 if config.provider in HOURLY_PROVIDERS else 1


def simulated_settings(config: FleetConfig, world: World) -> FleetConfig:
    """A simulated boot may take longer than the limit for real ones."""
    return config.model_copy(update={"spawn_timeout_s": spawn_timeout_s(world)})


def shadow_requests(config: FleetConfig, world: World, *, has_charts: bool = True) -> list[RunRequest]:
    """The running settings and two alternatives.

    The first alternative is `adaptive` with its default goal. The second is `adaptive` with a price of waiting, or the
    best published policies: where billing periods are long a price matters for short tasks only, and not at all where
    machines cost nothing.
    """
    config = simulated_settings(config, world)
    plain = {"policy": "adaptive", "wait_goal_s": None, "price_of_waiting": None}
    is_plain = (config.policy, config.wait_goal_s, config.price_of_waiting) == ("adaptive", None, None)
    is_priced = (config.policy, config.price_of_waiting) == ("adaptive", PRICE_OF_WAITING)
    is_hourly = world.billing_unit_s >= 3600

    def adaptive(label: str, **changes: float) -> RunRequest:
        settings = FleetConfig.model_validate(config.model_dump() | plain | changes)
        return _request("adaptive", settings, world, label, has_charts=has_charts)

    found = [_request(config.policy, config, world, f"running: {config.policy}", has_charts=has_charts)]
    if not is_plain:
        found.append(adaptive("adaptive"))
    if not (is_priced or is_hourly or world.is_free):
        found.append(adaptive(f"adaptive, price_of_waiting {PRICE_OF_WAITING:g}", price_of_waiting=PRICE_OF_WAITING))
    if len(found) < 3:
        published = BEST_PUBLISHED["hour" if is_hourly else "second"]
        found.append(_request(published, config, world, published, has_charts=has_charts))
    if len(found) < 3:
        found.append(_request("keda", config, world, "keda", has_charts=has_charts))
    return found[:3]


def _request(policy: str, config: FleetConfig, world: World, label: str, *, has_charts: bool) -> RunRequest:
    return RunRequest(policy, config, world, label, has_charts=has_charts)
