"""A task's attempts, from what was written down when each of them ended, and from its row for the last."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from windlass.model.event import Event
from windlass.model.task import Task, TaskStatus


@dataclass(frozen=True, slots=True)
class AttemptView:
    number: int
    worker_id: str | None
    # None: it was not kept, as only the last attempt's is.
    started_at: datetime | None
    ended_at: datetime | None
    outcome: str
    error_code: str | None = None
    error: str | None = None


def attempts_of(task: Task, events: Sequence[Event]) -> list[AttemptView]:
    """Newest first. A retry by hand begins to count anew, so numbers may come twice."""
    found = [
        AttemptView(
            int(event.detail["attempt"]),
            event.worker_id,
            _start_of(task, event),
            event.at,
            "failed",
            event.detail.get("error_code"),
            event.detail.get("error"),
        )
        for event in events
        if event.detail is not None and "attempt" in event.detail
    ]
    if task.status is TaskStatus.RUNNING or task.status is TaskStatus.COMPLETE:
        outcome = "running" if task.status is TaskStatus.RUNNING else "complete"
        found.append(AttemptView(task.attempts, task.worker_id, task.started_at, task.finished_at, outcome))
    return found[::-1]


def _start_of(task: Task, event: Event) -> datetime | None:
    is_last = task.started_at is not None and task.finished_at == event.at
    return task.started_at if is_last else None
