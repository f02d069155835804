"""How long `adaptive` keeps idle workers.

Claims prefer the most recently used worker, so a worker's rank (1: the most recently used) says how often it is needed.
For each rank the last idle gaps are known, also those that began after its worker had drained. The idle timeout of a
rank is the one that would have cost least over these gaps: a gap that is kept costs its length, a gap that is cut costs
the timeout and a restart.

Where a steady load is served cheaper by a constant number of workers than it was in the last WINDOW_S, at least that
many are kept (the replay floor). With a price of waiting the floor is the number with the least machine seconds plus
priced waiting, and it is also spawned. Where billing periods are long, keeping costs nothing until the period ends, so
that the floor is spawned only.
"""

from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate, pairwise
from math import ceil, inf

from windlass.model.adaptive import AdaptiveMemory, ArrivalRecord
from windlass.policy.scale.adaptive_load import FleetLoad

# Ranks above it share the values of this one: their workers are needed in rare bursts only.
MAX_RANKS = 64
# Few, so that the timeouts follow the load of the day.
GAPS_PER_RANK = 16
# Added to a gap so that a worker is not drained in the very cycle in which it is needed again.
MARGIN_S = 10.0
# Gaps longer than this many restarts are never worth keeping.
MAX_KEPT_RESTARTS = 6.0
WINDOW_S = 1200.0
MAX_RECORDS = 240
# A floor needs this many cycles with arrivals, and this share of the window.
MIN_RECORDS = 8
MIN_WINDOW_SHARE = 0.25
# With a price of waiting a shorter part of the window is enough: waiting costs from the first minute.
MIN_PRICED_SPAN_S = 120.0
# Constant workers must be busy for at least this share, and hold the goal for all but LATE_SHARE of the tasks with
# GOAL_SHARE of its time.
MIN_UTILISATION = 0.5
GOAL_SHARE = 0.9
LATE_SHARE = 0.05


def observe(load: FleetLoad, memory: AdaptiveMemory) -> AdaptiveMemory:
    """The memory with the arrivals, the boots and the machine seconds since the last decision."""
    now = load.now
    passed_s = 0.0 if memory.at is None else max(0.0, now - memory.at)
    # Count workers that exist, not workers that were wanted: the provider may have refused them.
    started_s = sum(min(passed_s, age_s) for age_s in load.starting_ages_s)
    machine_s = memory.machine_s + (load.busy + len(load.idle)) * passed_s + started_s
    arrivals = memory.arrivals
    if load.arrived > 0:
        arrivals = (*arrivals, ArrivalRecord(now, load.arrived, round(machine_s, 3)))
    oldest = 0
    while oldest < len(arrivals) and arrivals[oldest].at < now - WINDOW_S:
        oldest += 1
    oldest = max(oldest, len(arrivals) - MAX_RECORDS)
    return replace(
        memory,
        at=now,
        machine_s=machine_s,
        arrivals=arrivals[oldest:] if oldest else arrivals,
        boots=memory.boots + load.booted,
    )


def learn_gaps(load: FleetLoad, memory: AdaptiveMemory, starting: int, restart_s: float) -> AdaptiveMemory:
    """The memory with the idle gaps that ended or began in this cycle. `starting`: needed workers that start."""
    needed = min(MAX_RANKS, load.busy + starting)
    known = max(len(memory.unneeded_since), max(memory.unneeded_since, default=0), memory.machines)
    highest = min(MAX_RANKS, max(needed, known, load.workers))
    since = memory.unneeded_since
    ended = [rank for rank in since if rank <= needed]
    begun = [rank for rank in range(needed + 1, highest + 1) if rank not in since]
    if not ended and not begun:
        return memory
    since, gaps, timeouts = dict(since), memory.gaps, memory.timeouts
    if ended:
        gaps, timeouts = dict(gaps), dict(timeouts)
        for rank in ended:
            gap_s = max(0.0, round(load.now - since.pop(rank), 3))
            gaps[rank] = (*gaps.get(rank, ()), gap_s)[-GAPS_PER_RANK:]
            timeouts[rank] = cheapest_timeout_s(gaps[rank], restart_s)
    for rank in begun:
        position = rank - load.busy - 1
        idle_s = load.idle[position].idle_s if 0 <= position < len(load.idle) else MARGIN_S / 2
        since[rank] = round(load.now - idle_s, 3)
    return replace(memory, unneeded_since=since, gaps=gaps, timeouts=timeouts)


def cheapest_timeout_s(gaps_s: tuple[float, ...], restart_s: float) -> float:
    """The idle timeout that would have cost least over these gaps."""
    ordered = sorted(gaps_s)
    sums = [0.0, *accumulate(ordered)]
    longest = MAX_KEPT_RESTARTS * restart_s
    best_cost, best_s = inf, 0.0
    for timeout_s in (0.0, *(gap_s + MARGIN_S for gap_s in ordered if gap_s <= longest), restart_s):
        kept = bisect_right(ordered, timeout_s)
        cost = sums[kept] + (len(ordered) - kept) * (timeout_s + restart_s)
        if cost < best_cost - 1e-9:
            best_cost, best_s = cost, timeout_s
    return best_s


def timeout_s(memory: AdaptiveMemory, rank: int, restart_s: float) -> float:
    """Before a rank has a gap: one restart, which costs at most twice the optimum."""
    return memory.timeouts.get(min(rank, MAX_RANKS), restart_s)


def floor_of_workers(load: FleetLoad, memory: AdaptiveMemory, goal_s: float, patience: float) -> int:
    """Constant workers that would have held the goal in the last window for less than was spent. 0: none.

    `patience`: silence that ends the floor, in multiples of the longest silence of the window.
    """
    records, duration_s, slots = memory.arrivals, load.duration_s, load.slots
    # Tasks longer than a boot are served as cheaply by a worker each.
    if len(records) < MIN_RECORDS or not load.durations_s or duration_s > load.boot_s:
        return 0
    first = records[0]
    span_s = load.now - first.at
    if span_s < MIN_WINDOW_SHARE * WINDOW_S:
        return 0
    if _is_silent(records, load.now, patience):
        return 0
    total = sum(record.tasks for record in records)
    work = total * duration_s / slots
    wait_s = GOAL_SHARE * goal_s
    spent_s = memory.machine_s - first.machine_s
    workers = max(1, ceil(work / (span_s + wait_s)))
    most = int(min(spent_s, work / MIN_UTILISATION) / span_s + 1e-6)
    while workers <= most:
        if _late_tasks(records, workers * slots, duration_s, wait_s) <= LATE_SHARE * total:
            return workers
        workers += 1
    return 0


def _is_silent(records: tuple[ArrivalRecord, ...], now: float, patience: float) -> bool:
    longest_s = max(later.at - earlier.at for earlier, later in pairwise(records))
    return now - records[-1].at > patience * longest_s + 2 * MARGIN_S


def cheapest_workers(load: FleetLoad, memory: AdaptiveMemory, price: float, patience: float) -> int:
    """Constant workers that would have cost least in the last window, with waiting at this price. 0: none.

    `patience`: as in floor_of_workers.
    """
    records, duration_s, slots = memory.arrivals, load.duration_s, load.slots
    if len(records) < MIN_RECORDS or not load.durations_s or duration_s > load.boot_s:
        return 0
    span_s = load.now - records[0].at
    if span_s < MIN_PRICED_SPAN_S or _is_silent(records, load.now, patience):
        return 0
    work = sum(record.tasks for record in records) * duration_s / slots
    if work < MIN_UTILISATION * span_s:
        return 0
    # Where billing periods are long, a worker must have saved its whole period in waiting (ski rental).
    charged_s = max(span_s, load.billing_unit_s)
    workers, best, best_cost = max(1, int(work / span_s)), 0, inf
    # The cost falls with every worker and then rises. Steps of a sixteenth bound the search for large fleets.
    while workers <= load.max_workers:
        cost = workers * charged_s + price * _waiting_s(records, workers * slots, duration_s)
        if cost >= best_cost:
            break
        best, best_cost = workers, cost
        workers += max(1, workers // 16)
    return best


def _waiting_s(records: tuple[ArrivalRecord, ...], slots: int, duration_s: float) -> float:
    """Seconds that the tasks of the window would wait on this many slots, by the backlog of work."""
    backlog_s, last, waiting_s = 0.0, records[0].at, 0.0
    for record in records:
        backlog_s = max(0.0, backlog_s - slots * (record.at - last))
        last = record.at
        added_s = record.tasks * duration_s
        over_s = backlog_s + added_s - slots * duration_s
        # Tasks beyond the free slots wait for the work before them.
        if over_s > 0:
            tasks = min(record.tasks, over_s / duration_s)
            waiting_s += tasks * (over_s - tasks * duration_s / 2) / slots
        backlog_s += added_s
    return waiting_s


def _late_tasks(records: tuple[ArrivalRecord, ...], slots: int, duration_s: float, wait_s: float) -> float:
    """Tasks of the window that would wait longer on this many slots, by the backlog of work."""
    backlog_s, last, late = 0.0, records[0].at, 0.0
    for record in records:
        backlog_s = max(0.0, backlog_s - slots * (record.at - last)) + record.tasks * duration_s
        last = record.at
        longest_s = backlog_s / slots - duration_s
        if longest_s > wait_s:
            late += min(record.tasks, (longest_s - wait_s) * slots / duration_s)
    return late


def is_worth_next_unit(load: FleetLoad, memory: AdaptiveMemory, rank: int, idle_s: float, price: float) -> bool:
    """Keep an idle worker for another billing period: a restart would cost the same period later, and a wait now."""
    gaps = [gap_s - idle_s for gap_s in memory.gaps.get(min(rank, MAX_RANKS), ()) if gap_s > idle_s]
    near = [gap_s for gap_s in gaps if gap_s < load.billing_unit_s]
    if price <= 0 or not near:
        return False
    chance = len(near) / (len(gaps) + 1)
    lost_s = (1 - chance) * load.billing_unit_s + sum(near) / (len(gaps) + 1)
    return lost_s < price * chance * load.boot_s
