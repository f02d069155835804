"""Whose fault it is that a task failed: the task's, or its worker's. Judged by how the same tasks, and others of the
same queues, fare on other workers.

A worker is suspected when several different tasks in a row have failed on it. The others are those who completed tasks
meanwhile: whoever completed none is no measure of anything, and may be as broken. Of their attempts a share fails, too;
if such a row would hardly ever happen to one of them, the worker is to blame. A task that failed on one of the others
as well speaks for the worker and is left out of the row.

With nobody to compare with, or too few, there is one way to know: put another in its place. That is tried when a long
row has failed, or a short one and nothing else for long (in a small queue no row is long), with one worker at a time
and once an hour, so that a handler that is broken everywhere costs little. A task is given its attempts back for such a
trial once: what fails on the next one too is not tried a third time.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from windlass.model.fleet import FleetConfig
from windlass.model.snapshot import FailureStreak

QUARANTINED = "QUARANTINED"
# Different tasks in a row that fail where nobody else completes any, before another worker is tried, or a person told.
LONELY_FAILURES = 10
# Or so long after the first of fewer, where it still has completed nothing.
UNDECIDED_S = 600.0
TRIED_AGAIN_S = 3600.0
# Of a list of tasks in a sentence. The event has them all.
_TOLD_TASKS = 5


@dataclass(frozen=True, slots=True)
class QuarantineDecision:
    """That a worker is to go for what failed on it, and why."""

    suspect: FailureStreak
    reason: str
    # There was nobody to compare it with: another is tried.
    is_trial: bool = False


def verdicts(
    failure_streaks: Iterable[FailureStreak], fleet: FleetConfig, tried_at: datetime | None, now: datetime
) -> dict[str, QuarantineDecision]:
    """By worker. `tried_at`: when one last went because there was no evidence."""
    found: dict[str, QuarantineDecision] = {}
    may_try = tried_at is None or (now - tried_at).total_seconds() >= TRIED_AGAIN_S
    for suspect in failure_streaks:
        reason = blame(suspect, fleet)
        if reason is not None:
            found[suspect.worker_id] = QuarantineDecision(suspect, reason)
        elif may_try and is_undecided(suspect, fleet, now):
            found[suspect.worker_id] = QuarantineDecision(
                suspect, f"{describe(suspect)}: another is tried", is_trial=True
            )
            may_try = False
    return found


def blame(suspect: FailureStreak, fleet: FleetConfig) -> str | None:
    """Why the worker is to blame for the tasks that failed on it, with the evidence; None if it is not."""
    row = _unexplained(suspect)
    if len(row) < fleet.quarantine_min_failures or suspect.others_completed == 0:
        return None
    return describe(suspect) if _chance(suspect, len(row)) <= fleet.quarantine_max_chance else None


def is_undecided(suspect: FailureStreak, fleet: FleetConfig, now: datetime) -> bool:
    """Much has failed on a worker that is not to blame by evidence, and time or others will not bring any."""
    if len(suspect.failed) >= LONELY_FAILURES and suspect.others_completed == 0:
        return True
    is_old = (now - suspect.since).total_seconds() >= UNDECIDED_S
    return is_old and len(_unexplained(suspect)) >= fleet.quarantine_min_failures


def describe(suspect: FailureStreak) -> str:
    row = _unexplained(suspect)
    told = ", ".join(str(task_id) for task_id in row[-_TOLD_TASKS:])
    parts = [f"{len(row)} different tasks in a row failed on it (the last: {told})"]
    cleared = [task_id for task_id in row if task_id in suspect.completed_by]
    if cleared:
        examples = ", ".join(f"{task_id} by {suspect.completed_by[task_id]}" for task_id in cleared[-_TOLD_TASKS:])
        parts.append(f"others completed {len(cleared)} of them since ({examples})")
    parts.append(
        f"meanwhile {suspect.others} other workers completed {suspect.others_completed} tasks and "
        f"{suspect.others_failed} attempts of theirs failed"
        if suspect.others
        else "nobody else completed any task meanwhile"
    )
    return "; ".join(parts)


def _unexplained(suspect: FailureStreak) -> tuple[int, ...]:
    """Tasks for whose failure nothing but the worker is known."""
    return tuple(task_id for task_id in suspect.failed if task_id not in suspect.failed_elsewhere)


def _chance(suspect: FailureStreak, length: int) -> float:
    """That so many attempts in a row fail on a worker like the others (their share by Laplace's rule of succession, so
    that a few successes are not taken for certainty)."""
    share = (suspect.others_failed + 1) / (suspect.others_completed + suspect.others_failed + 2)
    return float(share**length)
