"""The result of a run: what it cost and how long tasks waited."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from windlass.simulator.engine import FleetSample, SimulatedFleet


@dataclass(frozen=True, slots=True)
class RunResult:
    """The measured values of one policy on one trace. `samples` and `waits_s` are for charts."""

    policy: str
    trace: str
    machine_seconds_billed: float
    wait_mean_s: float
    wait_p50_s: float
    wait_p95_s: float
    wait_p99_s: float
    wait_total_s: float
    machines_started: int
    machines_peak: int
    utilisation: float
    tasks: int
    # Cost of the clairvoyant bound, and this run's cost divided by it.
    optimal_seconds: float = 0.0
    cost_ratio: float = 0.0
    # (billed + total waiting) / optimal.
    joint_ratio: float = 0.0
    refused: int = 0
    crashed: int = 0
    # Tasks that lost every attempt to a crash.
    failed: int = 0
    samples: tuple[FleetSample, ...] = field(default=(), repr=False)
    waits_s: tuple[float, ...] = field(default=(), repr=False)

    def to_plain(self) -> dict[str, Any]:
        """For --json: without the series of the charts."""
        plain = asdict(self)
        del plain["samples"], plain["waits_s"]
        return {name: round(value, 3) if isinstance(value, float) else value for name, value in plain.items()}


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value at this share of a sorted sequence, linearly interpolated."""
    if not ordered:
        return 0.0
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def measure(fleet: SimulatedFleet, policy: str, optimal_s: float) -> RunResult:
    waits, billed_s = sorted(fleet.waits), fleet.deleted_billed_s
    total_s = sum(waits)
    return RunResult(
        policy=policy,
        trace=fleet.trace.name,
        machine_seconds_billed=billed_s,
        wait_mean_s=total_s / len(waits),
        wait_p50_s=quantile(waits, 0.5),
        wait_p95_s=quantile(waits, 0.95),
        wait_p99_s=quantile(waits, 0.99),
        wait_total_s=total_s,
        machines_started=fleet.started,
        machines_peak=fleet.peak,
        utilisation=fleet.trace.work_s / (billed_s * fleet.world.slots) if billed_s else 0.0,
        tasks=len(waits),
        optimal_seconds=optimal_s,
        cost_ratio=billed_s / optimal_s if optimal_s else 0.0,
        joint_ratio=(billed_s + total_s) / optimal_s if optimal_s else 0.0,
        refused=fleet.refused,
        crashed=fleet.crashed,
        failed=fleet.failed,
        samples=tuple(fleet.samples),
        waits_s=tuple(waits) if fleet.samples else (),
    )


def total_result(label: str, parts: Sequence[RunResult]) -> RunResult:
    """The same run of several fleets as one result. The peak is the sum of the peaks: they may be at different times.

    The parts must have `waits_s`.
    """
    waits = sorted(wait_s for part in parts for wait_s in part.waits_s)
    billed_s = sum(part.machine_seconds_billed for part in parts)
    optimal_s = sum(part.optimal_seconds for part in parts)
    total_s = sum(part.wait_total_s for part in parts)
    used_s = sum(part.utilisation * part.machine_seconds_billed for part in parts)
    return RunResult(
        policy=label,
        trace=", ".join(part.trace for part in parts),
        machine_seconds_billed=billed_s,
        wait_mean_s=total_s / len(waits) if waits else 0.0,
        wait_p50_s=quantile(waits, 0.5),
        wait_p95_s=quantile(waits, 0.95),
        wait_p99_s=quantile(waits, 0.99),
        wait_total_s=total_s,
        machines_started=sum(part.machines_started for part in parts),
        machines_peak=sum(part.machines_peak for part in parts),
        utilisation=used_s / billed_s if billed_s else 0.0,
        tasks=sum(part.tasks for part in parts),
        optimal_seconds=optimal_s,
        cost_ratio=billed_s / optimal_s if optimal_s else 0.0,
        joint_ratio=(billed_s + total_s) / optimal_s if optimal_s else 0.0,
        refused=sum(part.refused for part in parts),
        crashed=sum(part.crashed for part in parts),
        failed=sum(part.failed for part in parts),
    )
