"""Events: every transition except the normal path of a task, with a code for programs and a reason for people."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from windlass.model.errors import BadInput


@dataclass(frozen=True, slots=True)
class Event:
    id: int
    at: datetime
    code: str
    reason: str
    fleet: str | None
    worker_id: str | None
    task_id: int | None
    detail: Mapping[str, Any] | None
    # The person or program whose request caused it. None: the control loop or a worker.
    actor: str | None = None
    # Queue of the task. None without a task, and after the task was purged.
    queue: str | None = None


def check_reason(reason: str, name: str) -> None:
    """Raise BadInput for an empty reason. `name`: the option or field that held it."""
    if not reason.strip():
        raise BadInput(f"{name} is empty: give a reason in a few words, or leave it out.")


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """Unfinished tasks of one queue."""

    queue: str
    queued: int
    scheduled: int
    retrying: int
    running: int
    oldest_queued_age_s: float | None
