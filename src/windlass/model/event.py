"""Events: every transition out of the plain path, with a code for machines and a reason in words."""

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


def check_reason(reason: str, name: str) -> None:
    """Raise BadInput for a reason that says nothing. `name`: what whoever gave it calls it."""
    if not reason.strip():
        raise BadInput(f"{name} is empty: say why in a few words, for whoever asks later, or leave it out.")


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """What one queue holds that is not finished."""

    queue: str
    queued: int
    scheduled: int
    retrying: int
    running: int
    oldest_queued_age_s: float | None
