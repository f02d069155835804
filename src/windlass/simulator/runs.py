"""One run: a policy with its settings, on a trace, in a world. Takes the fast path where there is one.

A run in which queued tasks get no worker ends with BadInput, which names the setting that causes it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from windlass.model.errors import BadInput
from windlass.model.fleet import MAX_SECONDS, FleetConfig
from windlass.model.plural import plural
from windlass.model.provider_defaults import IGNORED_BY_ADAPTIVE, POLICY_SETTINGS, reason_without_effect
from windlass.policy.boot import TOTAL_FACTOR
from windlass.simulator.baselines import BASELINES
from windlass.simulator.engine import ClaimOrder, Controller, NoProgress, SimulatedFleet, World
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
# No boot of a run takes longer: one in a billion exceeds its mean by more than this many sigma. A spawn timeout above
# it changes nothing.
LONGEST_BOOT_SIGMAS = 6.0
# The spawn timeout of a run, unless one is set: at least this long, and this many boots.
MIN_SPAWN_TIMEOUT_S = 600.0
SPAWN_TIMEOUT_BOOTS = 20


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
    try:
        fleet.run(controller)
    except NoProgress as error:
        raise BadInput(_reason_of_no_progress(request, controller, error)) from None
    return measure(fleet, label, optimal_s)


def spawn_timeout_s(world: World) -> float:
    """A spawn timeout that no boot of this world reaches."""
    longest_s = max(SPAWN_TIMEOUT_BOOTS * world.boot_s, world.long_boot_s(LONGEST_BOOT_SIGMAS))
    return min(max(MIN_SPAWN_TIMEOUT_S, longest_s), MAX_SECONDS)


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
        if request.policy == "adaptive" and not (request.is_full or _has_full_path_settings(config, world)):
            return AdaptiveController(config, on_cycle), order
        return PlanController(_simulated_config(config, world), on_cycle), order
    if request.policy not in BASELINES:
        names = ", ".join((*WINDLASS_POLICIES, *BASELINES, OPTIMUM))
        raise BadInput(f"policy {request.policy!r} not found: choose one of {names}.")
    baseline = BASELINES[request.policy]
    limits = {"min_workers": config.min_workers, "max_workers": config.max_workers}
    return baseline.build(world.boot_s, limits), baseline.claim_order


def _has_full_path_settings(config: FleetConfig, world: World) -> bool:
    """Settings that only the full path reads have an effect on this run."""
    timeout_s = config.spawn_timeout_s
    can_time_out = timeout_s is not None and TOTAL_FACTOR * timeout_s < world.long_boot_s(LONGEST_BOOT_SIGMAS)
    return config.min_scaling_interval_s > 0 or can_time_out


def _simulated_config(config: FleetConfig, world: World) -> FleetConfig:
    """The settings without limits that a run does not have: it reports no failed attempt, and no boot unless asked to.

    A stuck timeout would fail a worker, whose machine cannot be deleted before its task has ended.
    """
    timeout_s = config.spawn_timeout_s if config.spawn_timeout_s is not None else spawn_timeout_s(world)
    return config.model_copy(update={"spawn_timeout_s": timeout_s, "stuck_timeout_s": None})


def _reason_of_no_progress(request: RunRequest, controller: Controller, error: NoProgress) -> str:
    config, world = request.config, request.world
    found = (
        f"cannot simulate {request.label or request.policy}: {plural(error.queued, 'queued task')} had no worker for "
        f"{error.stalled_s / 3600:.1f} hours of simulated time"
    )
    total_s = TOTAL_FACTOR * config.spawn_timeout_s if config.spawn_timeout_s is not None else math.inf
    if not error.requested:
        decision = f" The last decision was: {controller.decision}." if isinstance(controller, PlanController) else ""
        return f"{found}, because no machine was requested: raise max_workers ({config.max_workers}).{decision}"
    if error.refused == error.requested:
        return f"{found}, because all {error.refused} create calls were refused: lower --refused."
    if request.policy in WINDLASS_POLICIES and total_s < world.long_boot_s(LONGEST_BOOT_SIGMAS):
        return (
            f"{found}: a boot takes {world.boot_s:g} s, and a machine that is not ready after {total_s:g} s, twice "
            f"spawn_timeout_s, is deleted. Raise spawn_timeout_s ({config.spawn_timeout_s:g})."
        )
    return f"{found}: {error.requested} machines were requested and none was ready. Choose another policy."


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
