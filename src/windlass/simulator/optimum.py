"""The clairvoyant bound: the least cost at which every task starts on arrival.

Billed by the second with one slot it is exact: a machine's idle gap costs min(gap, boot), which is concave, so feeding
the most recently used machine minimises the sum; machines boot before they are needed. Otherwise it is a lower bound:
boots are free, and whenever more slots are needed than the bought units cover, one more unit is bought.
"""

import heapq
import math

from windlass.simulator.trace import Trace


def optimal_billed_s(trace: Trace, slots: int, boot_s: float, billing_unit_s: int) -> float:
    """Machine seconds billed by the clairvoyant bound."""
    if billing_unit_s == 1 and slots == 1:
        return _exact_s(trace, boot_s)
    return _units_s(trace, slots, billing_unit_s)


def _exact_s(trace: Trace, boot_s: float) -> float:
    ends: list[float] = []
    idle: list[float] = []
    total = trace.work_s
    for arrival, duration in zip(trace.arrivals, trace.durations, strict=True):
        while ends and ends[0] <= arrival:
            idle.append(heapq.heappop(ends))
        gap_s = arrival - idle.pop() if idle else math.inf
        total += min(gap_s, boot_s)
        heapq.heappush(ends, arrival + duration)
    return total


def _units_s(trace: Trace, slots: int, unit_s: int) -> float:
    ends: list[float] = []
    covers: list[float] = []
    units = 0
    for arrival, duration in zip(trace.arrivals, trace.durations, strict=True):
        # Bought units end while tasks run: the ones that are still needed are bought again at that moment.
        while covers and covers[0] <= arrival:
            at = covers[0]
            while covers and covers[0] <= at:
                heapq.heappop(covers)
            while ends and ends[0] <= at:
                heapq.heappop(ends)
            units += _buy(covers, math.ceil(len(ends) / slots), at + unit_s)
        while ends and ends[0] <= arrival:
            heapq.heappop(ends)
        heapq.heappush(ends, arrival + duration)
        units += _buy(covers, math.ceil(len(ends) / slots), arrival + unit_s)
    while covers:
        at = heapq.heappop(covers)
        while ends and ends[0] <= at:
            heapq.heappop(ends)
        units += _buy(covers, math.ceil(len(ends) / slots), at + unit_s)
    return float(units * unit_s)


def _buy(covers: list[float], needed: int, ends_at: float) -> int:
    bought = max(0, needed - len(covers))
    for _ in range(bought):
        heapq.heappush(covers, ends_at)
    return bought
