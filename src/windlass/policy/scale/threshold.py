"""threshold: hire when more than T tasks wait for each worker; let idle ones go when nothing waits for them.

    hire   max(1, min)                            if there is no worker and something waits
           max(min, ceil(queued / T)) - capacity  if queued / capacity > T
    spare  idle workers beyond those that the waiting tasks will fill

Starting workers count as capacity. From nobody, the first come first, and the rest when those are on their way.
"""

from math import ceil

from windlass.policy.scale.demand import Demand, ScalingDecision


def threshold(demand: Demand) -> ScalingDecision:
    queued, capacity, limit = demand.queue.queued, demand.capacity, demand.fleet.tasks_per_worker
    if capacity == 0:
        if queued == 0:
            return ScalingDecision("nothing waits and nobody is there")
        first = max(1, demand.fleet.min_workers)
        return ScalingDecision(
            f"{queued} waiting and nobody is there", hire=first, is_first_step=queued / first > limit
        )
    per_worker = queued / capacity
    if per_worker > limit:
        wanted = max(demand.fleet.min_workers, ceil(queued / limit))
        return ScalingDecision(
            f"{queued} waiting for {capacity} workers is {per_worker:.1f} each, above {limit:g}: {wanted} wanted",
            hire=max(0, wanted - capacity),
        )
    return ScalingDecision(
        f"{queued} waiting for {capacity} workers is {per_worker:.1f} each, at most {limit:g} is fine",
        spare=demand.unneeded,
        is_over_capacity=bool(demand.unneeded),
    )
