"""buffered: a worker for every task at hand or waiting, and a few idle ones ready for the next.

    tasks  = queued + running
    needed = ceil(max(busy workers, ceil(tasks / concurrency)) * up) + buffer, within min and max
    hire   needed - capacity                       if capacity < needed
    spare  capacity - needed of the idle workers   if needed <= capacity * down
           that the waiting tasks will not fill

Starting workers count as capacity. What lies between `down` and all of capacity is left alone, so that a load that
wavers by one does not hire and let go by turns.
"""

from math import ceil

from windlass.policy.scale.demand import Demand, ScalingDecision


def buffered(demand: Demand) -> ScalingDecision:
    fleet, queued, busy, capacity = demand.fleet, demand.queue.queued, demand.busy, demand.capacity
    at_work = max(busy, ceil((queued + demand.running) / fleet.concurrency))
    needed = ceil(at_work * fleet.scale_up_multiplier) + fleet.idle_buffer
    needed = min(max(needed, fleet.min_workers), fleet.max_workers)
    sentence = f"{queued} waiting, {busy} of {capacity} workers busy: {needed} needed"
    if fleet.idle_buffer:
        sentence += f" with {fleet.idle_buffer} kept idle"
    if capacity < needed:
        return ScalingDecision(sentence, hire=needed - capacity)
    if needed < capacity and needed <= capacity * fleet.scale_down_multiplier:
        return ScalingDecision(sentence, spare=demand.unneeded[: capacity - needed], is_over_capacity=True)
    return ScalingDecision(sentence)
