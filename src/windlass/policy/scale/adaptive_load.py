"""The load of a fleet as the `adaptive` policy sees it: plain numbers, without worker states or dates."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Expected duration before the first task is complete: short, so that a first burst of short tasks does not spawn a
# worker for each. Shorter where a worker costs a long billing period, longer where waiting has a price.
ASSUMED_DURATION_S = 10.0
ASSUMED_DURATION_LONG_UNIT_S = 8.0
ASSUMED_DURATION_WITH_PRICE_S = 15.0


def assumed_duration_s(*, has_long_units: bool, price: float | None) -> float:
    if has_long_units:
        return ASSUMED_DURATION_LONG_UNIT_S
    return ASSUMED_DURATION_WITH_PRICE_S if price else ASSUMED_DURATION_S


class IdleWorker(NamedTuple):
    idle_s: float
    # Until the end of its billing period. None: periods are short.
    billed_s: float | None = None
    # It may drain when this much of its billing period is left.
    window_s: float = 0.0


@dataclass(slots=True)
class FleetLoad:
    """The fleet at one moment. `durations_s` and `boots_s` are sorted samples of recent values."""

    now: float
    slots: int
    queued: int
    # Tasks that arrived since the last decision.
    arrived: int
    oldest_queued_age_s: float | None
    # Workers with at least one task, and how long each of their tasks has been running.
    busy: int
    running_ages_s: Sequence[float]
    # The most recently used first.
    idle: Sequence[IdleWorker]
    # Since each of the starting workers was spawned.
    starting_ages_s: Sequence[float]
    durations_s: Sequence[float]
    duration_mean_s: float | None
    boot_s: float
    assumed_duration_s: float = ASSUMED_DURATION_S
    billing_unit_s: int = 1
    max_workers: int = 100_000
    # Machines are processes of this host and cost nothing: no task has to wait for another's worker.
    is_free: bool = False

    @property
    def workers(self) -> int:
        return self.busy + len(self.idle) + len(self.starting_ages_s)

    @property
    def duration_s(self) -> float:
        """Expected duration of a queued task. Before one is complete: at least as long as tasks have run already."""
        if self.duration_mean_s is not None:
            return self.duration_mean_s
        ages = self.running_ages_s
        return max(self.assumed_duration_s, sum(ages) / len(ages)) if ages else self.assumed_duration_s

    def remaining_s(self, age_s: float, share: float) -> float:
        """Time after which this share of the tasks that ran as long as this one has ended.

        A task that ran longer than all known ones is expected to run as long again.
        """
        known = self.durations_s
        first = bisect_right(known, age_s)
        longer = len(known) - first
        if longer <= 0:
            return max(age_s, self.assumed_duration_s)
        return known[min(len(known) - 1, first + int(share * longer))] - age_s
