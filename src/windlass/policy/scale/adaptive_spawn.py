"""How many workers `adaptive` spawns: those without which a task would miss its goal.

The queue is played forward, oldest task first, over the slots that become free: of idle workers now, of running tasks
when BELIEVED_SHARE of comparable tasks have ended, of starting workers when they are ready. A task that would start
after its goal, and later than a worker that is spawned now could start it, needs another worker.

A backlog of short tasks whose oldest has missed its goal gets fewer: as many as cost least together with the waiting
until it is cleared, while tasks go on arriving.

The work is bounded: at most MAX_PLAYED groups of tasks are played, however many are queued.
"""

from collections.abc import Iterator, Sequence
from heapq import heapify, heappush, heapreplace
from itertools import repeat
from math import ceil, sqrt

from windlass.model.adaptive import AdaptiveMemory
from windlass.policy.scale.adaptive_load import FleetLoad

# Completions are believed at this quantile. The median would miss a p95 goal when durations vary.
BELIEVED_SHARE = 0.9
MAX_PLAYED = 2_000
# A starting worker that is late is expected this much later than now, in boot times.
LATE_BOOT_SHARE = 0.1
# Before the first task is complete the number of workers grows at most by this factor per cycle.
RAMP_FACTOR = 2
# Tasks go on arriving at the rate of this time. Fewer than MIN_RATE_S say too little about it.
RATE_S = 300.0
MIN_RATE_S = 60.0
# What a second of waiting in a lost backlog is worth at least, in machine seconds, and the longest time in which it is
# to be cleared, in boot times. With a price of 1, or without the limit, one more of 58 loads missed its goal
# (docs/policies.md).
MIN_BACKLOG_PRICE = 4.0
MAX_CLEAR_BOOTS = 2 / 3


def spawns_needed(
    load: FleetLoad, memory: AdaptiveMemory, goal_s: float, late_slack_s: float, starting_ages_s: Sequence[float]
) -> int:
    """Workers to spawn now, if these starting ones will be ready when a boot takes as long as usual.

    `late_slack_s`: how much later than the first possible moment a task may start that misses its goal anyway.
    """
    # One more than allowed, so that the decision can say that max_workers is too low.
    limit = load.max_workers - load.workers + 1
    if not load.durations_s and not load.is_free:
        starting = len(load.starting_ages_s)
        # A doubling ramp: without a known duration every queued task may be short or long.
        allowed = max(1, RAMP_FACTOR * (load.busy + starting)) if load.workers else 1
        limit = min(limit, allowed - starting)
    if limit <= 0:
        return 0
    now, boot_s, slots = load.now, load.boot_s, load.slots
    durations = _interleaved(load.queued_durations_s)
    free_at = [now] * (len(load.idle) * slots + max(0, load.busy * slots - len(load.running_ages_s)))
    free_at += [now + left_s for left_s in load.running_remaining_s(BELIEVED_SHARE)]
    for age_s in starting_ages_s:
        ready_at = now + (boot_s - age_s if age_s < boot_s else LATE_BOOT_SHARE * boot_s)
        free_at += [ready_at] * slots
    heapify(free_at)

    new_at, spawned = now + boot_s, 0
    # Large queues are played in groups: each group is started by one slot and takes as long as its tasks together.
    group = max(1, ceil(load.queued / MAX_PLAYED))
    for arrived_at, count in _queued_arrivals(load, memory):
        due_at = arrived_at + goal_s
        # A task that misses its goal anyway is not worth a worker of its own.
        latest = new_at + late_slack_s if due_at < new_at else max(due_at, new_at)
        for _task in range(ceil(count / group)):
            duration_s = next(durations)
            if free_at and free_at[0] <= latest:
                heapreplace(free_at, free_at[0] + duration_s * group)
            elif spawned >= limit:
                return spawned
            else:
                spawned += 1
                # No other slot is free before new_at: the first slot of the new worker takes the task.
                for _ in range(slots - 1):
                    heappush(free_at, new_at)
                heappush(free_at, new_at + duration_s * group)
    return spawned


def clearing_workers(load: FleetLoad, memory: AdaptiveMemory, price: float) -> int | None:
    """New workers with which a backlog of short tasks costs least. None: the tasks are long, or not yet known.

    With n slots, tasks of d seconds, `rate` arrivals per second and a backlog of b tasks, the backlog is cleared in
    t = b / (n/d - rate), and its tasks wait b*t/2 together. Charge and priced waiting are least if t is the square
    root of 2*d*charge / (price*slots), for any b: a machine is charged a billing period, or its boot if that is longer.
    The tasks behind the backlog may miss their goal too, so that t is bounded.
    """
    duration_s, boot_s, slots = load.queued_mean_s, load.boot_s, load.slots
    recent = [record for record in memory.arrivals if record.at > load.now - RATE_S]
    # Tasks longer than a boot have a worker each.
    if not recent or not load.durations_s or not 0.0 < duration_s < boot_s:
        return None
    rate = sum(record.tasks for record in recent) / max(MIN_RATE_S, min(RATE_S, load.now - memory.arrivals[0].at))
    charge_s = max(boot_s, load.billing_unit_s)
    cheapest_s = sqrt(2 * duration_s * charge_s / (max(price, MIN_BACKLOG_PRICE) * slots))
    clear_s = min(cheapest_s, MAX_CLEAR_BOOTS * boot_s)
    # The backlog is estimated for the time at which a worker spawned now is ready: others complete tasks until then.
    # A slot whose task is expected to run longer than a boot completes none of them.
    ready = (load.busy + len(load.idle)) * slots - sum(left_s > boot_s for left_s in load.running_remaining_s(0.5))
    worked_s = ready * boot_s + slots * sum(min(age_s, boot_s) for age_s in load.starting_ages_s)
    backlog = max(0.0, load.queued + rate * boot_s - worked_s / duration_s)
    wanted = (rate + backlog / clear_s) * duration_s
    return max(0, ceil((wanted - ready) / slots) - len(load.starting_ages_s))


def _interleaved(parts: list[tuple[int, float]]) -> Iterator[float]:
    """Durations of the queued tasks without end, each queue as often as its share of them and evenly spread.

    The arrivals are known for all queues together only.
    """
    if len(parts) == 1:
        yield from repeat(parts[0][1])
    total, balances = sum(count for count, _ in parts), [0] * len(parts)
    while True:
        balances = [balance + count for balance, (count, _) in zip(balances, parts, strict=True)]
        chosen = max(range(len(parts)), key=balances.__getitem__)
        balances[chosen] -= total
        yield parts[chosen][1]


def _queued_arrivals(load: FleetLoad, memory: AdaptiveMemory) -> list[tuple[float, int]]:
    """When the queued tasks arrived, oldest first. Workers claim in order, so they are the newest arrivals."""
    left, found = load.queued, list[tuple[float, int]]()
    for record in reversed(memory.arrivals):
        if left <= 0:
            break
        count = min(left, record.tasks)
        found.append((record.at, count))
        left -= count
    if left > 0:
        # Retries, and tasks that arrived before the memory begins.
        age_s = load.oldest_queued_age_s or 0.0
        found.append((load.now - age_s, left))
    return found[::-1]
