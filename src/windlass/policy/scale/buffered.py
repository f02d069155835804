"""buffered: one worker per queued or running task, plus a buffer of idle workers.

    tasks  = queued + running
    wanted = ceil(max(busy, ceil(tasks / concurrency)) * scale_up_multiplier) + idle_buffer, at least min_workers
    needed = wanted, at most max_workers
    spawn  needed - capacity                       if capacity < needed
    drain  capacity - needed of the idle workers   if needed <= capacity * scale_down_multiplier
           that the queued tasks will not occupy

Starting workers count as capacity. Between `scale_down_multiplier` and full capacity nothing changes, so that a load
that varies by one does not spawn and drain in turns.
"""

from math import ceil

from windlass.policy.scale.demand import Demand, ScalingDecision


def buffered(demand: Demand) -> ScalingDecision:
    fleet, queued, capacity = demand.fleet, demand.queue.queued, demand.capacity
    occupied = max(demand.busy, ceil((queued + demand.running) / fleet.concurrency))
    wanted = max(ceil(occupied * fleet.scale_up_multiplier) + fleet.idle_buffer, fleet.min_workers)
    needed = min(wanted, fleet.max_workers)
    reason = f"{demand.queue.queued_text}, {demand.workers_text}, {wanted} wanted"
    if fleet.idle_buffer:
        reason += f" with idle_buffer {fleet.idle_buffer}"
    if capacity < needed:
        return ScalingDecision(reason, spawn=needed - capacity, target=wanted)
    if needed < capacity and needed <= capacity * fleet.scale_down_multiplier:
        spare = demand.unneeded[: capacity - needed]
        return ScalingDecision(reason, target=wanted, spare=spare, is_over_capacity=True)
    return ScalingDecision(reason, target=wanted)
