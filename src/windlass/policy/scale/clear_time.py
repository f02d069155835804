"""clear-time: hire only when the queue would not clear soon by itself.

    free   = places of all workers, starting ones too, less the tasks that run on them
    hire   0                                    if free >= queued
           0                                    if queued / (free / median duration) < clear time
           ceil((queued - free) / concurrency)  otherwise
    spare  idle workers beyond those that the waiting tasks will fill

Without a free place nothing that waits is taken to clear, though running tasks end; with an unknown duration nothing is
known to clear it.
"""

from math import ceil, inf

from windlass.policy.scale.demand import Demand, ScalingDecision

# A median of nothing at all would divide by zero; below this a queue clears at once anyway.
_SHORTEST_S = 1e-3


def clear_time(demand: Demand) -> ScalingDecision:
    fleet, queued, free = demand.fleet, demand.queue.queued, demand.free_slots
    seen = f"{queued} waiting, {free} free place{'' if free == 1 else 's'}"
    if free >= queued:
        spare = demand.unneeded
        return ScalingDecision(f"{seen}: enough", spare=spare, is_over_capacity=bool(spare))
    left_s = clears_in_s(queued, free, demand.queue.duration_p50_s)
    if left_s < fleet.clear_time_s:
        return ScalingDecision(f"{queued} waiting, clears in {left_s:.0f} s, below {fleet.clear_time_s:g} s: no need")
    hire = ceil((queued - free) / fleet.concurrency)
    if free <= 0:
        seen = f"{queued} waiting, no place is free"
    else:
        seen += ", how long they take is not known" if left_s == inf else f", clears in {left_s:.0f} s"
    return ScalingDecision(f"{seen}: {hire} more wanted", hire=hire)


def clears_in_s(queued: int, free: int, duration_s: float | None) -> float:
    """How long so many that wait take on so many free places; infinite if that is not known."""
    if queued == 0:
        return 0.0
    if free <= 0 or duration_s is None:
        return inf
    return queued / (free / max(duration_s, _SHORTEST_S))
