"""Boot times as `adaptive` expects them, and how many workers it starts so that enough are ready in time.

Where boots vary, a goal of about one boot time would be missed by every third task that needs a new worker. Tasks that
run long make a second or third start cheap in comparison: the first worker that is ready takes the task, and the other
starts are cancelled. A cancelled start is remembered as a boot that takes at least as long, because the boots that are
seen to their end are otherwise the shortest ones (a Kaplan-Meier estimate).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, comb

# This share of the tasks that wait for a boot may miss the goal. Others find a free worker, so that fewer miss it.
LATE_SHARE = 0.06
# Fewer known boots say too little about their spread.
MIN_BOOTS = 8
# A goal that most boots miss is not held by more starts.
MIN_IN_TIME_SHARE = 0.5
# Starts for one task cost about a boot each: only tasks of at least this many boot times are worth it.
MIN_TASK_BOOTS = 3.0
# More tasks at once need proportionally as many starts as this number.
EXACT_TASKS = 12
# At most this many starts for each worker that tasks need. With 2 the goal was missed on two of five traces.
MAX_STARTS_PER_WORKER = 3


@dataclass(frozen=True, slots=True)
class BootEstimate:
    """`boots`: how many were seen to their end."""

    median_s: float
    mean_s: float
    boots: int = 0
    # (boot time, share of boots that take longer), ascending.
    steps: tuple[tuple[float, float], ...] = ()

    def share_within(self, seconds: float) -> float:
        """Share of boots that take at most this long."""
        longer = 1.0
        for boot_s, share in self.steps:
            if boot_s > seconds:
                break
            longer = share
        return 1.0 - longer


def estimate_boots(boots_s: Sequence[float], cancelled_s: Sequence[float], unknown_s: float) -> BootEstimate:
    """From sorted boot times, and the ages at which starts were cancelled."""
    count = len(boots_s)
    if not count:
        return BootEstimate(unknown_s, unknown_s)
    if not cancelled_s and boots_s[0] == boots_s[-1]:
        return BootEstimate(boots_s[0], boots_s[0], count)
    # A start that was cancelled at the age at which another was ready lasted longer.
    events = sorted([*((boot_s, 0) for boot_s in boots_s), *((age_s, 1) for age_s in cancelled_s)])
    left, longer, mean_s, last_s, median_s = len(events), 1.0, 0.0, 0.0, boots_s[-1]
    steps = list[tuple[float, float]]()
    for at_s, is_cancelled in events:
        mean_s += longer * (at_s - last_s)
        last_s = at_s
        if not is_cancelled:
            if longer > 0.5 >= longer * (1 - 1 / left):
                median_s = at_s
            longer *= 1 - 1 / left
            steps.append((at_s, longer))
        left -= 1
    return BootEstimate(median_s, mean_s, count, tuple(steps))


def in_time_share(estimate: BootEstimate, goal_s: float, duration_s: float) -> float:
    """Share of boots that are ready within the goal. 1: no reason to start more workers than tasks need."""
    if estimate.boots < MIN_BOOTS or not estimate.steps or duration_s < MIN_TASK_BOOTS * estimate.median_s:
        return 1.0
    share = round(estimate.share_within(goal_s), 2)
    return share if MIN_IN_TIME_SHARE <= share < 1 - LATE_SHARE else 1.0


def starts_for(workers: int, share: float) -> int:
    """Workers to start so that this many are ready in time, each with this probability, for all but LATE_SHARE.

    At most MAX_STARTS_PER_WORKER for each, even if more tasks are late then.
    """
    if workers <= 0 or share >= 1.0:
        return max(0, workers)
    if workers > EXACT_TASKS:
        return ceil(workers * _starts(EXACT_TASKS, share) / EXACT_TASKS)
    return _starts(workers, share)


def ready_in_time(starts: int, share: float) -> int:
    """Workers that this many starts make ready in time: the inverse of starts_for."""
    if share >= 1.0:
        return starts
    if starts > _starts(EXACT_TASKS, share):
        return int(starts * EXACT_TASKS / _starts(EXACT_TASKS, share))
    return max((workers for workers in range(EXACT_TASKS + 1) if starts_for(workers, share) <= starts), default=0)


@lru_cache(maxsize=4096)
def _starts(workers: int, share: float) -> int:
    for starts in range(workers, workers * MAX_STARTS_PER_WORKER):
        missing = sum(
            (workers - ready) * comb(starts, ready) * share**ready * (1 - share) ** (starts - ready)
            for ready in range(workers)
        )
        if missing <= LATE_SHARE * workers:
            return starts
    return workers * MAX_STARTS_PER_WORKER
