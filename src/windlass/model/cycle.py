"""What the control loop has written down, for people who ask: fleets, and what each cycle saw and decided."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from windlass.model.action import Action
from windlass.model.snapshot import Hold, Snapshot
from windlass.model.worker import WorkerStatus

# A cycle may be late by so much where nobody leads, and by so much where somebody does.
LATE_CYCLE_S = 5.0
SLOW_CYCLE_S = 60.0
# While a fleet is wound down its cycles come thick and fast.
WINDING_DOWN_S = 15.0
# Keys of a cycle summary and of the status routes: what a cycle did, and what it observed.
ACTION_COUNTS = ("workers_promoted", "workers_failed", "workers_spawned", "workers_terminated", "tasks_reset")
COUNTED_STATUSES = (WorkerStatus.SPAWNING, WorkerStatus.ACTIVE, WorkerStatus.TERMINATING)
STATUS_COUNTS = (
    "queued_tasks",
    "running_tasks",
    *(f"{status}_workers" for status in COUNTED_STATUSES),
    "total_workers",
)


@dataclass(frozen=True, slots=True)
class Fleet:
    """A fleet as its last cycle left it. The configuration itself stands in windlass.toml."""

    name: str
    provider: str
    queues: tuple[str, ...]
    min_workers: int
    max_workers: int
    is_paused: bool
    # Workers a person asked for and nobody has hired yet.
    requested_workers: int
    hold: Hold | None
    # Slots whose restarts are used up; `windlass restart` frees them.
    failed_slots: tuple[int, ...]
    created_at: datetime
    # When its last cycle was, and how long after it the next one was due. None: there was none, or it was the last.
    planned_at: datetime | None = None
    next_plan_in_s: float | None = None
    # Whether some orchestrator leads this database now.
    is_led: bool = False

    def without_orchestrator_s(self, now: datetime) -> float | None:
        """For how long there has been no cycle, if there should have been one. None if all is well, or never was any.

        Where nobody leads, a cycle that is half an interval late is not going to come. Where somebody does, it may be
        slow, or about to be replaced.
        """
        if self.planned_at is None:
            return None
        silent_s = (now - self.planned_at).total_seconds()
        if self.next_plan_in_s is None:
            late_s = WINDING_DOWN_S if self.is_led else 0.0
        else:
            late_s = self.next_plan_in_s + (SLOW_CYCLE_S if self.is_led else max(LATE_CYCLE_S, self.next_plan_in_s / 2))
        return silent_s if silent_s > late_s else None


@dataclass(frozen=True, slots=True)
class Cycle:
    """What one cycle decided and did. Cycles that decided the same and did nothing are counted, not stored again."""

    id: int
    fleet: str
    term: int
    started_at: datetime
    # When its last outcome was written down. None: it is under way, or its orchestrator died in it.
    finished_at: datetime | None
    decision: str
    actions: tuple[Action, ...]
    summary: Mapping[str, Any] | None
    repeats: int
    repeated_at: datetime | None


@dataclass(frozen=True, slots=True)
class CycleDetail:
    """A cycle with all it knew: planning again from this snapshot gives these actions."""

    cycle: Cycle
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why something is as it is: the answer in a sentence or two, and what led to it, oldest first."""

    answer: list[str]
    history: list[tuple[datetime, str]]
