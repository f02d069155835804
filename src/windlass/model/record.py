"""What the control loop has written down, for people who ask: fleets, and what each cycle saw and decided."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from windlass.model.action import Action
from windlass.model.snapshot import Hold, Snapshot


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
class CycleInFull:
    """A cycle with all it knew: planning again from this snapshot gives these actions."""

    cycle: Cycle
    snapshot: Snapshot
