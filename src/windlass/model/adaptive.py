"""What the `adaptive` policy keeps from one cycle to the next. Plain values: stored as JSON with the planner state.

Times are seconds since 1970. The size is bounded: at most 20 minutes of arrivals and a few idle gaps for each rank.
"""

from dataclasses import dataclass, field
from typing import NamedTuple


class ArrivalRecord(NamedTuple):
    """Tasks that arrived in one cycle."""

    at: float
    tasks: int
    # The fleet's machine seconds up to this cycle: `AdaptiveMemory.machine_s`.
    machine_s: float


@dataclass(frozen=True, slots=True)
class AdaptiveMemory:
    # When the policy last decided, and with how many machines since.
    at: float | None = None
    machines: int = 0
    # Sum of machines times seconds since the memory began.
    machine_s: float = 0.0
    # Newest last.
    arrivals: tuple[ArrivalRecord, ...] = ()
    # Rank of a worker (1: the most recently used) to since when fewer workers than that have been needed.
    unneeded_since: dict[int, float] = field(default_factory=dict)
    # Rank to the lengths of its last idle gaps, newest last, and to the idle time after which it drains.
    gaps: dict[int, tuple[float, ...]] = field(default_factory=dict)
    timeouts: dict[int, float] = field(default_factory=dict)
    # Starting workers beyond those that tasks need, because boots vary. At most: some may have been refused.
    extra_starts: int = 0
    # Ages at which starts were cancelled, newest last: those boots would have taken longer.
    cancelled_boots_s: tuple[float, ...] = ()
    # Boots that have ended since the memory began, and the same number when each of these starts was cancelled. A
    # memory of an earlier release has no numbers: 0.
    boots: int = 0
    cancelled_at_boot: tuple[int, ...] = ()
