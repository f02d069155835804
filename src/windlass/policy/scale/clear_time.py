"""clear-time: spawn only if the queue would not clear soon by itself.

    free   = slots of all workers, including starting ones, minus running tasks
    spawn  0                                    if free >= queued
           0                                    if queued / (free / median duration) < clear_time_s
           ceil((queued - free) / concurrency)  otherwise
    drain  idle workers beyond those that the queued tasks will occupy

Without a free slot no queued task is assumed to clear, although running tasks end. Without a known duration none is.
"""

from math import ceil, inf

from windlass.model.plural import plural
from windlass.policy.scale.demand import Demand, ScalingDecision

# Avoids a division by zero. With shorter tasks a queue clears at once.
_MIN_DURATION_S = 1e-3


def clear_time(demand: Demand) -> ScalingDecision:
    fleet, queued, free = demand.fleet, demand.queue.queued, demand.free_slots
    reason = f"{demand.queue.queued_text}, {plural(free, 'free slot')}"
    if free >= queued:
        spare = demand.unneeded
        return ScalingDecision(reason, target=demand.capacity, spare=spare, is_over_capacity=bool(spare))
    left_s = clears_in_s(queued, free, demand.queue.duration_p50_s)
    if free > 0:
        reason += ", task duration unknown" if left_s == inf else f", clears in {left_s:.0f} s"
    if left_s < fleet.clear_time_s:
        return ScalingDecision(f"{reason}, within clear_time_s {fleet.clear_time_s:g}", target=demand.capacity)
    more = ceil((queued - free) / fleet.concurrency)
    target = demand.capacity + more
    return ScalingDecision(f"{reason}, target {target}", spawn=more, target=target)


def clears_in_s(queued: int, free: int, duration_s: float | None) -> float:
    """Seconds until this many queued tasks clear on this many free slots. Infinite if unknown."""
    if queued == 0:
        return 0.0
    if free <= 0 or duration_s is None:
        return inf
    return queued / (free / max(duration_s, _MIN_DURATION_S))
