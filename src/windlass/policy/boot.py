"""How long a machine may take to start. Pure.

Two limits apply. A machine that makes no progress fails after `stall_s`. Progress is: the provider reports it as
running, it reports a step of its boot, it joins, its preparation begins. While the provider itself is at work on it
(allocation, image pull), only `total_s` applies, which also bounds a machine that reports progress without end.

Without a setting, `stall_s` is twice the 99th percentile of the fleet's measured boots as soon as there are some, and
a default of the provider before that. It is at most MAX_DEFAULTS times that default: after an outage of the control
plane a boot may look as long as the outage.

Where a billing period is long, waiting costs nothing until the period ends: only `total_s` applies. A machine that
takes longer is late. It is kept until shortly before its period ends, without counting as capacity: if it joins, it is
used.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

from windlass.model.fleet import FleetConfig
from windlass.model.machine import Machine, MachineState
from windlass.model.snapshot import BootTimes, WorkerView
from windlass.policy import billing

# Boots measured before they replace the default.
MIN_MEASURED = 3
MEASURED_FACTOR = 2.0
# The most that measured boots set, in defaults of the provider. Longer than any boot within the default's total limit.
MAX_DEFAULTS = 3.0
# The total limit, in stall limits.
TOTAL_FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class BootLimit:
    """Seconds without progress, and from the machine's creation to the first heartbeat."""

    stall_s: float
    total_s: float


def boot_limit(fleet: FleetConfig, boots: BootTimes) -> BootLimit:
    if fleet.spawn_timeout_s is not None:
        return BootLimit(fleet.spawn_timeout_s, TOTAL_FACTOR * fleet.spawn_timeout_s)
    default_s = fleet.default_spawn_timeout_s
    stall_s = default_s
    if boots.p99_s is not None and boots.count >= MIN_MEASURED:
        stall_s = max(MEASURED_FACTOR * boots.p99_s, fleet.min_spawn_timeout_s)
        stall_s = min(stall_s, MAX_DEFAULTS * default_s)
    # An image may have grown since the boots that were measured: a pull keeps the time of the default.
    return BootLimit(stall_s, TOTAL_FACTOR * max(stall_s, default_s))


def boot_timeout(worker: WorkerView, machine: Machine | None, limit: BootLimit, now: datetime) -> str | None:
    """Why a worker without a heartbeat is late, as the end of "Spawning timeout"; None if it is not."""
    begun_at = worker.machine_at or worker.created_at
    boot_s = (now - begun_at).total_seconds()
    if boot_s > limit.total_s:
        return f"({boot_s:.0f}s)"
    running_at = worker.running_at
    if running_at is None and machine is not None:
        if machine.state is not MachineState.RUNNING:
            return None
        running_at = now  # seen for the first time
    moments = (begun_at, running_at, worker.progress_at)
    stalled_s = (now - max(moment for moment in moments if moment is not None)).total_seconds()
    if stalled_s <= limit.stall_s:
        return None
    return f"({boot_s:.0f}s)" if stalled_s == boot_s else f"({boot_s:.0f}s, no progress for {stalled_s:.0f}s)"


def kept_until(worker: WorkerView, unit_s: int, now: datetime, cycle_s: float) -> datetime | None:
    """Until when a late machine is kept because it is billed anyway: shortly before its first period ends."""
    since = worker.bill.since if worker.bill is not None else worker.machine_at
    if since is None or not billing.is_worth_waiting(unit_s, cycle_s):
        return None
    window = billing.next_window(unit_s, since, now, cycle_s)
    is_first = window.boundary <= since + timedelta(seconds=unit_s)
    return window.opens if is_first and now < window.opens else None
