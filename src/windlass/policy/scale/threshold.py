"""threshold: spawn when more than T = tasks_per_worker tasks are queued per worker; drain idle workers.

    spawn  max(1, min_workers)                            if there is no worker and a task is queued
           max(min_workers, ceil(queued / T)) - capacity  if queued / capacity > T
    drain  idle workers beyond those that the queued tasks will occupy

Starting workers count as capacity. Without workers, the first are spawned in one cycle and the rest in the next.
"""

from math import ceil

from windlass.policy.scale.demand import Demand, ScalingDecision


def threshold(demand: Demand) -> ScalingDecision:
    queued, capacity, limit = demand.queue.queued, demand.capacity, demand.fleet.tasks_per_worker
    if capacity == 0:
        if queued == 0:
            return ScalingDecision("queue empty, no workers")
        first = max(1, demand.fleet.min_workers)
        return ScalingDecision(
            f"{demand.queue.queued_text}, no workers", spawn=first, target=first, is_first_step=queued / first > limit
        )
    per_worker = queued / capacity
    reason = f"{demand.queue.queued_text}, {demand.workers_text}, {per_worker:.1f} queued per worker"
    if per_worker > limit:
        wanted = max(demand.fleet.min_workers, ceil(queued / limit))
        return ScalingDecision(
            f"{reason} exceeds tasks_per_worker {limit:g}, {wanted} wanted",
            spawn=max(0, wanted - capacity),
            target=wanted,
        )
    spare = demand.unneeded
    return ScalingDecision(
        f"{reason}, tasks_per_worker {limit:g}", target=capacity, spare=spare, is_over_capacity=bool(spare)
    )
