"""Decides whether failed tasks are the fault of their worker, by comparing it with other workers.

A worker has a failure streak when several different tasks in a row failed on it. Other workers that completed tasks in
the same time are the comparison: their share of failed attempts gives the probability of such a streak by chance. If
that is at most `quarantine_max_chance`, the worker is at fault. A task that also failed on one of the others does not
count for the streak.

Without enough comparison, only a replacement can tell. After LONELY_FAILURES failures, or after UNDECIDED_S with fewer
(small queues have no long streaks), one worker at a time is replaced as a trial, at most once per TRIAL_INTERVAL_S: a
handler that fails everywhere then costs little. A task gets its attempts back for such a trial once.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from windlass.model.fleet import FleetConfig
from windlass.model.plural import plural
from windlass.model.snapshot import FailureStreak

QUARANTINED = "QUARANTINED"
# Different failed tasks in a row, without any success of other workers, that justify a trial or an alert.
LONELY_FAILURES = 10
# A shorter streak justifies a trial when it is this old.
UNDECIDED_S = 600.0
TRIAL_INTERVAL_S = 3600.0
# Task ids named in a reason. The event has all of them.
_MAX_NAMED_TASKS = 5


@dataclass(frozen=True, slots=True)
class QuarantineDecision:
    """A worker that must be replaced because tasks fail on it."""

    streak: FailureStreak
    reason: str
    # There is no comparison: the replacement shows whether the worker was at fault.
    is_trial: bool = False


def decide_quarantines(
    streaks: Iterable[FailureStreak], fleet: FleetConfig, last_trial_at: datetime | None, now: datetime
) -> dict[str, QuarantineDecision]:
    """Decisions by worker id. At most one of them is a trial."""
    found: dict[str, QuarantineDecision] = {}
    may_try = last_trial_at is None or (now - last_trial_at).total_seconds() >= TRIAL_INTERVAL_S
    for streak in streaks:
        reason = quarantine_reason(streak, fleet)
        if reason is not None:
            found[streak.worker_id] = QuarantineDecision(streak, reason)
        elif may_try and is_undecided(streak, fleet, now):
            trial = f"{describe_streak(streak)}: replaced as a trial"
            found[streak.worker_id] = QuarantineDecision(streak, trial, is_trial=True)
            may_try = False
    return found


def quarantine_reason(streak: FailureStreak, fleet: FleetConfig) -> str | None:
    """The evidence that the worker is at fault, or None."""
    length = len(_counted_failures(streak))
    if length < fleet.quarantine_min_failures or streak.others_completed == 0:
        return None
    # Laplace's rule of succession, so that a few successes are not taken for certainty.
    share = (streak.others_failed + 1) / (streak.others_completed + streak.others_failed + 2)
    return describe_streak(streak) if share**length <= fleet.quarantine_max_chance else None


def is_undecided(streak: FailureStreak, fleet: FleetConfig, now: datetime) -> bool:
    """Many tasks failed, there is too little comparison, and waiting will not bring more."""
    if len(streak.failed) >= LONELY_FAILURES and streak.others_completed == 0:
        return True
    is_old = (now - streak.since).total_seconds() >= UNDECIDED_S
    return is_old and len(_counted_failures(streak)) >= fleet.quarantine_min_failures


def describe_streak(streak: FailureStreak) -> str:
    failed = _counted_failures(streak)
    newest = ", ".join(str(task_id) for task_id in failed[-_MAX_NAMED_TASKS:])
    parts = [f"{len(failed)} different tasks in a row failed on it (newest: {newest})"]
    completed = [task_id for task_id in failed if task_id in streak.completed_by]
    if completed:
        examples = ", ".join(f"{id_} by {streak.completed_by[id_]}" for id_ in completed[-_MAX_NAMED_TASKS:])
        parts.append(f"other workers have completed {len(completed)} of them since ({examples})")
    parts.append(
        f"in the same time {plural(streak.others, 'other worker')} completed "
        f"{plural(streak.others_completed, 'task')} and failed {plural(streak.others_failed, 'attempt')}"
        if streak.others
        else "no other worker completed a task in the same time"
    )
    return "; ".join(parts)


def _counted_failures(streak: FailureStreak) -> tuple[int, ...]:
    """Failed tasks without those that also failed on a working worker."""
    return tuple(task_id for task_id in streak.failed if task_id not in streak.failed_elsewhere)
