"""Events: every transition out of the plain path, with a code for machines and a reason in words."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any


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


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """What one queue holds that is not finished."""

    queue: str
    queued: int
    scheduled: int
    waiting_for_retry: int
    running: int
    oldest_queued_age_s: float | None
