"""Stored fleets and cycles: the snapshot, decision and actions of each cycle, for commands and the dashboard."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from windlass.model.action import Action
from windlass.model.rollout import Rollout
from windlass.model.snapshot import Hold, Snapshot
from windlass.model.worker import WorkerStatus

# How late a cycle may be without a leader, and with one.
LATE_CYCLE_S = 5.0
SLOW_CYCLE_S = 60.0
# A cycle further in the future than this was planned before the database's clock was set back.
CLOCK_STEP_S = 1.0
# During a shutdown, cycles follow each other closely.
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
    """A fleet as of its last cycle. Its configuration is in windlass.toml."""

    name: str
    provider: str
    queues: tuple[str, ...]
    min_workers: int
    max_workers: int
    is_paused: bool
    # Workers that a person requested and that are not spawned yet.
    requested_workers: int
    hold: Hold | None
    # Slots that exceeded their restarts; `windlass restart` clears them.
    failed_slots: tuple[int, ...]
    created_at: datetime
    # When its last cycle ran, and the delay to the next one. None: no cycle yet; no next cycle.
    planned_at: datetime | None = None
    next_plan_in_s: float | None = None
    # Whether an orchestrator holds the lease now.
    is_led: bool = False
    # Fingerprint of its current code and settings, and its running or last rollout.
    fingerprint: str | None = None
    rollout: Rollout | None = None

    def without_orchestrator_s(self, now: datetime) -> float | None:
        """Seconds since the last cycle if the next one is overdue. None if it is not, or if there was none.

        Without a leader, a cycle that is half an interval late will not come. With one, it may be slow, or another
        orchestrator may be about to take over.
        """
        if self.planned_at is None:
            return None
        silent_s = (now - self.planned_at).total_seconds()
        if silent_s < -CLOCK_STEP_S and not self.is_led:
            # The database's clock was set back, and no leader has planned since.
            return 0.0
        if self.next_plan_in_s is None:
            late_s = WINDING_DOWN_S if self.is_led else 0.0
        else:
            late_s = self.next_plan_in_s + (SLOW_CYCLE_S if self.is_led else max(LATE_CYCLE_S, self.next_plan_in_s / 2))
        return silent_s if silent_s > late_s else None


@dataclass(frozen=True, slots=True)
class Cycle:
    """What one cycle decided and did. Cycles that repeat the last decision without actions are only counted."""

    id: int
    fleet: str
    term: int
    started_at: datetime
    # When its last outcome was recorded. None: it is still running, or its orchestrator died.
    finished_at: datetime | None
    decision: str
    actions: tuple[Action, ...]
    summary: Mapping[str, Any] | None
    repeats: int
    repeated_at: datetime | None


@dataclass(frozen=True, slots=True)
class CycleDetail:
    """A cycle with its snapshot: planning again from the snapshot gives the same actions."""

    cycle: Cycle
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer of `windlass explain` in a sentence or two, and the events behind it, oldest first."""

    answer: list[str]
    history: list[tuple[datetime, str]]
