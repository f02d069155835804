"""The load of a fleet as the `adaptive` policy sees it: plain numbers, without worker states or dates."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from windlass.model.snapshot import QueueDurations
from windlass.policy.scale.adaptive_boot import BootEstimate

# Expected duration before the first task is complete: short, so that a first burst of short tasks does not spawn a
# worker for each. Shorter where a worker costs a long billing period, longer where waiting has a price.
ASSUMED_DURATION_S = 10.0
ASSUMED_DURATION_LONG_UNIT_S = 8.0
ASSUMED_DURATION_WITH_PRICE_S = 15.0
# This share of the known durations, the longest, counts as outliers: two of 200. A running task that is older than all
# others is overdue.
OUTLIER_SHARE = 0.01
# A queue with fewer known durations is expected to be like all queues of the fleet together.
MIN_QUEUE_DURATIONS = 8


def assumed_duration_s(*, has_long_units: bool, price: float | None) -> float:
    if has_long_units:
        return ASSUMED_DURATION_LONG_UNIT_S
    return ASSUMED_DURATION_WITH_PRICE_S if price else ASSUMED_DURATION_S


def robust_mean_s(ordered_s: Sequence[float], mean_s: float) -> float:
    """The mean of a sorted sample, with its longest OUTLIER_SHARE as long as the longest of the others.

    One task of a day among 200 of ten seconds must not look like 200 tasks of seven minutes.
    """
    outliers = int(OUTLIER_SHARE * len(ordered_s))
    if not outliers:
        return mean_s
    longest_s = ordered_s[-outliers - 1]
    return mean_s - sum(value - longest_s for value in ordered_s[-outliers:]) / len(ordered_s)


class IdleWorker(NamedTuple):
    idle_s: float
    # Until the end of its billing period. None: periods are short.
    billed_s: float | None = None
    # It may drain when this much of its billing period is left.
    window_s: float = 0.0


@dataclass(slots=True)
class FleetLoad:
    """The fleet at one moment. `durations_s` is a sorted sample of recent values."""

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
    boots: BootEstimate
    assumed_duration_s: float = ASSUMED_DURATION_S
    billing_unit_s: int = 1
    max_workers: int = 100_000
    # Workers that became ready since the last decision.
    booted: int = 0
    # Starting workers that may be cancelled in this cycle.
    max_cancelled: int = 0
    # Machines are processes of this host and cost nothing: no task has to wait for another's worker.
    is_free: bool = False
    # A fleet with several queues: the queue of each running task, in the order of `running_ages_s`, and the queues.
    running_queues: Sequence[str | None] = ()
    queues: Sequence[QueueDurations] = ()

    @property
    def workers(self) -> int:
        return self.busy + len(self.idle) + len(self.starting_ages_s)

    @property
    def boot_s(self) -> float:
        return self.boots.median_s

    @property
    def duration_s(self) -> float:
        """Expected duration of a queued task. Before one is complete: at least as long as tasks have run already."""
        if self.duration_mean_s is not None:
            return robust_mean_s(self.durations_s, self.duration_mean_s)
        ages = self.running_ages_s
        return max(self.assumed_duration_s, sum(ages) / len(ages)) if ages else self.assumed_duration_s

    @property
    def queued_durations_s(self) -> list[tuple[int, float]]:
        """Queued tasks and their expected duration, by queue. Queues with few known durations are one entry."""
        known = [
            (queue.queued, robust_mean_s(queue.durations_s, queue.duration_mean_s))
            for queue in self.queues
            if queue.duration_mean_s is not None and len(queue.durations_s) >= MIN_QUEUE_DURATIONS and queue.queued
        ]
        others = max(0, self.queued - sum(count for count, _ in known))
        return [*known, (others, self.duration_s)] if others or not known else known

    @property
    def queued_mean_s(self) -> float:
        """Expected duration of the queued tasks, averaged over their queues."""
        parts = self.queued_durations_s
        total = sum(count for count, _ in parts)
        return sum(count * duration_s for count, duration_s in parts) / total if len(parts) > 1 else parts[0][1]

    def running_remaining_s(self, share: float) -> list[float]:
        """`remaining_s` of each running task, by the durations of its queue."""
        known = {
            queue.name: queue.durations_s for queue in self.queues if len(queue.durations_s) >= MIN_QUEUE_DURATIONS
        }
        if not known:
            return [self.remaining_s(age_s, share) for age_s in self.running_ages_s]
        names = [*self.running_queues, *[None] * (len(self.running_ages_s) - len(self.running_queues))]
        return [
            self._remaining_s(known.get(name or "", self.durations_s), age_s, share)
            for age_s, name in zip(self.running_ages_s, names, strict=True)
        ]

    def remaining_s(self, age_s: float, share: float) -> float:
        """Time after which this share of the tasks that ran as long as this one has ended.

        A task that ran longer than all known ones is expected to run as long again.
        """
        return self._remaining_s(self.durations_s, age_s, share)

    def _remaining_s(self, known: Sequence[float], age_s: float, share: float) -> float:
        first = bisect_right(known, age_s)
        longer = len(known) - first
        if longer <= 0:
            return max(age_s, self.assumed_duration_s)
        return known[min(len(known) - 1, first + int(share * longer))] - age_s


def count_overdue(load: FleetLoad) -> FleetLoad:
    """The load with the overdue running tasks counted among the known durations.

    Otherwise a few tasks that failed within seconds would hide that all others have been running for hours. Tasks of a
    usual age say nothing that the known durations do not say.
    """
    found = _with_overdue(load.durations_s, load.duration_mean_s, load.running_ages_s)
    if found is not None:
        load = replace(load, durations_s=found[0], duration_mean_s=found[1])
    if load.queues and load.running_queues:
        ages_s: dict[str | None, list[float]] = {}
        for name, age_s in zip(load.running_queues, load.running_ages_s, strict=True):
            ages_s.setdefault(name, []).append(age_s)
        queues = list(load.queues)
        for position, queue in enumerate(queues):
            found = _with_overdue(queue.durations_s, queue.duration_mean_s, ages_s.get(queue.name, ()))
            if found is not None:
                queues[position] = replace(queue, durations_s=found[0], duration_mean_s=found[1])
        load = replace(load, queues=queues)
    return load


def _with_overdue(
    known_s: Sequence[float], mean_s: float | None, ages_s: Sequence[float]
) -> tuple[tuple[float, ...], float] | None:
    """The sample with each overdue task as if it ran as long again, and its mean. None: no task is overdue."""
    if not known_s or mean_s is None or not ages_s:
        return None
    limit_s = known_s[len(known_s) - int(OUTLIER_SHARE * len(known_s)) - 1]
    if max(ages_s) <= limit_s:
        return None
    added_s = [2 * age_s for age_s in ages_s if age_s > limit_s]
    count = len(known_s) + len(added_s)
    return tuple(sorted([*known_s, *added_s])), (mean_s * len(known_s) + sum(added_s)) / count
