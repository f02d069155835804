"""One run: a policy with its settings, on a trace, in a world. Takes the fast path where there is one."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from windlass.model.errors import BadInput
from windlass.model.fleet import FleetConfig
from windlass.model.provider_defaults import IGNORED_BY_ADAPTIVE, POLICY_SETTINGS, reason_without_effect
from windlass.simulator.baselines import BASELINES
from windlass.simulator.engine import ClaimOrder, Controller, SimulatedFleet, World
from windlass.simulator.fast_path import AdaptiveController
from windlass.simulator.full_path import PlanController
from windlass.simulator.measures import RunResult, measure
from windlass.simulator.optimum import optimal_billed_s
from windlass.simulator.trace import Trace

OPTIMUM = "optimum"
WINDLASS_POLICIES = ("adaptive", "threshold", "buffered", "clear-time")
# From this length of a billing period on, workers claim in the order of their billed time: schema/05_workers.sql.
LONG_UNIT_S = 600
# Points of a chart.
CHART_POINTS = 600
# Settings of a fleet that a run reads: of a baseline, and of Windlass's own policies.
BASELINE_SETTINGS = ("min_workers", "max_workers")
SIMULATED_SETTINGS = (
    *BASELINE_SETTINGS,
    *POLICY_SETTINGS,
    *IGNORED_BY_ADAPTIVE,
    "max_changes_per_cycle",
    "min_scaling_interval_s",
    "poll_interval_s",
    "spawn_timeout_s",
)
# Settings of which only the full path knows: `adaptive` takes it if one differs from the default.
FULL_PATH_SETTINGS = ("min_scaling_interval_s",)


@dataclass(frozen=True, slots=True)
class RunRequest:
    """`policy`: a policy of Windlass, a baseline, or `optimum`. `config` is read for Windlass's own policies."""

    policy: str
    config: FleetConfig
    world: World
    label: str = ""
    # Unset: the order of the product, or of the baseline.
    claim_order: ClaimOrder | None = None
    is_full: bool = False
    has_charts: bool = False


def run_policy(request: RunRequest, trace: Trace, on_cycle: Callable[[float], None] | None = None) -> RunResult:
    world, label = request.world, request.label or request.policy
    optimal_s = optimal_billed_s(trace, world.slots, world.boot_s, world.billing_unit_s)
    if not trace.arrivals:
        raise BadInput(f"trace {trace.name} has no tasks.")
    if request.policy == OPTIMUM:
        return _optimum(trace, world, optimal_s, label)
    controller, order = _controller(request, on_cycle)
    world = replace(world, claim_order=request.claim_order or order)
    end_s = max(at + duration for at, duration in zip(trace.arrivals, trace.durations, strict=True))
    fleet = SimulatedFleet(trace, world, sample_every_s=end_s / CHART_POINTS if request.has_charts else None)
    fleet.run(controller)
    return measure(fleet, label, optimal_s)


def reason_not_simulated(request: RunRequest, setting: str) -> str | None:
    """Why this run does not read a setting of a fleet; None if it reads it."""
    if setting == "concurrency":
        return "in a simulation: use --slots"
    if request.policy not in WINDLASS_POLICIES:
        return None if setting in BASELINE_SETTINGS else f"on {request.policy}, which has no settings but its limits"
    if setting not in SIMULATED_SETTINGS:
        return "in a simulation"
    config = request.config
    has_volume = config.runpod.network_volume_id is not None
    return reason_without_effect(
        config.provider, request.policy, setting, has_gpu=config.has_gpu, has_volume=has_volume
    )


def billed_by(unit_s: int) -> str:
    """A billing period in words."""
    return {1: "second", 3600: "hour"}.get(unit_s, f"{unit_s} s")


def _controller(request: RunRequest, on_cycle: Callable[[float], None] | None) -> tuple[Controller, ClaimOrder]:
    config, world = request.config, request.world
    if request.policy in WINDLASS_POLICIES:
        # Claims as the product makes them: worker/claim_race.py.
        order = ClaimOrder.BILLED if world.billing_unit_s >= LONG_UNIT_S else ClaimOrder.RECENT
        is_full = request.is_full or any(getattr(config, name) for name in FULL_PATH_SETTINGS)
        if request.policy == "adaptive" and not is_full:
            return AdaptiveController(config, on_cycle), order
        return PlanController(config, on_cycle), order
    if request.policy not in BASELINES:
        names = ", ".join((*WINDLASS_POLICIES, *BASELINES, OPTIMUM))
        raise BadInput(f"policy {request.policy!r} not found: choose one of {names}.")
    baseline = BASELINES[request.policy]
    limits = {"min_workers": config.min_workers, "max_workers": config.max_workers}
    return baseline.build(world.boot_s, limits), baseline.claim_order


def _optimum(trace: Trace, world: World, optimal_s: float, label: str) -> RunResult:
    return RunResult(
        policy=label,
        trace=trace.name,
        machine_seconds_billed=optimal_s,
        wait_mean_s=0.0,
        wait_p50_s=0.0,
        wait_p95_s=0.0,
        wait_p99_s=0.0,
        wait_total_s=0.0,
        machines_started=0,
        machines_peak=math.ceil(peak_concurrency(trace) / world.slots),
        utilisation=trace.work_s / (optimal_s * world.slots) if optimal_s else 0.0,
        tasks=len(trace.arrivals),
        optimal_seconds=optimal_s,
        cost_ratio=1.0,
        joint_ratio=1.0,
    )


def peak_concurrency(trace: Trace) -> int:
    """Tasks that run at the same time if all start on arrival."""
    events = [(at, 1) for at in trace.arrivals]
    events += [(at + duration, -1) for at, duration in zip(trace.arrivals, trace.durations, strict=True)]
    running = peak = 0
    for _, change in sorted(events):
        running += change
        peak = max(peak, running)
    return peak
