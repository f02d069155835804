"""Rollouts: the replacement of a fleet's workers by workers of its current version.

A version is identified by a fingerprint of the code and settings that a worker was spawned with (wiring/fingerprint.py
computes it). `DeployRequest` is what a person asked for; `Rollout` is how far the planner is with it.
"""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum


class RolloutStatus(StrEnum):
    RUNNING = "running"
    COMPLETE = "complete"
    ROLLED_BACK = "rolled_back"  # the new version failed; the fleet spawns none of it until a person acts
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class DeployRequest:
    """The last `windlass deploy` of a fleet. Each request has a higher id than the one before."""

    id: int
    # New workers in addition to the old ones, within max_workers; old workers that may be missing. Both zero: the
    # planner surges by one worker, or replaces one at a time while no slot is free.
    surge: int = 0
    max_unavailable: int = 0
    # Old workers are replaced at once, even if their billing period has just begun.
    is_immediate: bool = False
    # Stop the running rollout, even if an earlier request or `windlass up --watch` began it.
    is_aborted: bool = False


@dataclass(frozen=True, slots=True)
class Rollout:
    """The running rollout of a fleet, or its last one."""

    # Of the request. A rollout that `windlass up --watch` began has the id of the rollout before it, or 0.
    id: int
    # Fingerprint of the new version.
    target: str
    surge: int
    max_unavailable: int
    is_immediate: bool
    started_at: datetime
    status: RolloutStatus = RolloutStatus.RUNNING
    # Slots of new workers that run in addition to the old ones. An old worker drains for each that passes its probe.
    surged: tuple[int, ...] = ()
    # Slots of new workers that replace an old one that has drained, until they pass their probe.
    replacing: tuple[int, ...] = ()
    # Old workers that have drained and whose replacement is not spawned yet.
    owed: int = 0
    # Ids of workers of the new version that failed before they had proven to work.
    failed: tuple[str, ...] = ()
    # When a worker was last spawned or drained for it.
    changed_at: datetime | None = None
    ended_at: datetime | None = None
    # Why it was rolled back or aborted.
    reason: str | None = None

    @property
    def is_running(self) -> bool:
        return self.status is RolloutStatus.RUNNING
