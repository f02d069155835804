"""Nodes: workers that claim nothing, and run what a dispatcher places on them through an engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from uuid import UUID

# Amounts by the engine's names: CPU, GPU, memory (bytes), and whatever else nodes were started with.
Resources = Mapping[str, float]


class NodeState(StrEnum):
    ABSENT = "absent"  # its engine has never seen it
    ALIVE = "alive"
    DEAD = "dead"  # its engine saw it, and has given it up


@dataclass(frozen=True, slots=True)
class NodeView:
    """What its engine said of a node, when, and since when it has said so. What is said again is not written down each
    time: `at` may be behind by a sixth of the time after which silence counts."""

    state: NodeState
    since: datetime
    at: datetime
    node_id: str | None = None
    total: Resources = field(default_factory=dict)
    used: Resources = field(default_factory=dict)
    # How it died.
    note: str | None = None


@dataclass(frozen=True, slots=True)
class AliveNode:
    """`places`: tasks of its fleet that it can run at the same time."""

    worker_id: str
    node_id: str
    total: Resources
    used: Resources
    places: int = 1
    host: str | None = None
    # False: a node of a cluster that is not ours.
    is_managed: bool = True


@dataclass(frozen=True, slots=True)
class DeadNode:
    worker_id: str
    node_id: str
    death: str


@dataclass(frozen=True, slots=True)
class Placement:
    """That a claimed task is about to start on a node."""

    task_id: int
    token: UUID
    worker_id: str


class NodeVerdict(StrEnum):
    """What becomes of a placement."""

    PLACED = "placed"
    LOST = "lost"  # the claim is no longer valid
    BARRED = "barred"  # that node gets no more tasks


# Its holder keeps a head for the database. No fleet has an empty name.
HEAD_LEASE = "ray:"


def dispatcher_lease(fleet: str) -> str:
    """Its holder acts for the fleet's engine. The same name: migrations/0008_ray.sql."""
    return f"ray:{fleet}"
