"""Rollouts: the replacement of a fleet's workers by workers of its current version.

A version is identified by a fingerprint of the code and settings that a worker was spawned with (wiring/fingerprint.py
computes it). `DeployRequest` is what a person asked for; `Rollout` is how far the planner is with it. A fleet of rented
machines returns to its `WorkingVersion` when a rollout was rolled back.
"""

import json
from collections.abc import Iterator
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
    # Abort the running rollout, even if an earlier request or `windlass up --watch` began it.
    is_aborted: bool = False


@dataclass(frozen=True, slots=True)
class Rollout:
    """The running rollout of a fleet, or its last one."""

    # Id of the request. A rollout that `windlass up --watch` began has the id of the rollout before it, or 0.
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
    # Hosts on which a check of the host failed for such a worker. These workers are not in `failed`.
    failed_hosts: tuple[str, ...] = ()
    # When a worker was last spawned or drained for it.
    changed_at: datetime | None = None
    ended_at: datetime | None = None
    # Why it was rolled back or aborted.
    reason: str | None = None
    # Names of the settings that differ from the last version that worked; `code` for files. Empty if that is unknown.
    changes: tuple[str, ...] = ()

    @property
    def is_running(self) -> bool:
        return self.status is RolloutStatus.RUNNING

    def rejects(self, fingerprint: str | None, reset_at: datetime | None) -> bool:
        """Whether the fleet must not spawn this version: it was rolled back, and the fleet was not restarted since."""
        is_reset = reset_at is not None and self.ended_at is not None and reset_at > self.ended_at
        return self.status is RolloutStatus.ROLLED_BACK and self.target == fingerprint and not is_reset


@dataclass(frozen=True, slots=True)
class WorkingVersion:
    """The last version that all workers of the fleet had, with one that passed its probe.

    `settings`: a JSON object, as in Snapshot.version_settings. It contains no value of `env`.
    """

    fingerprint: str
    settings: str


# Names beyond these say little. A change of the provider changes all of them.
MAX_CHANGES = 12


def changed_settings(before: str, after: str) -> tuple[str, ...]:
    """The names of settings that differ, as dotted paths; at most MAX_CHANGES."""
    one, other = dict(_flattened(json.loads(before))), dict(_flattened(json.loads(after)))
    names = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
    return tuple(names[:MAX_CHANGES])


def _flattened(settings: dict[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
