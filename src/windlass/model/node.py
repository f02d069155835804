"""Ray nodes: workers that claim no tasks and run what a dispatcher places on them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from uuid import UUID

# Amounts by Ray's names: CPU, GPU, memory (bytes), and custom resources.
Resources = Mapping[str, float]


class NodeState(StrEnum):
    ABSENT = "absent"  # Ray has never seen it
    ALIVE = "alive"
    DEAD = "dead"  # Ray saw it and declared it dead


@dataclass(frozen=True, slots=True)
class NodeView:
    """Ray's last report about a node, and since when the state has been the same.

    Unchanged reports are not written each time: `at` may lag by a sixth of the lease.
    """

    state: NodeState
    since: datetime
    at: datetime
    node_id: str | None = None
    total: Resources = field(default_factory=dict)
    used: Resources = field(default_factory=dict)
    # Cause of death.
    note: str | None = None


@dataclass(frozen=True, slots=True)
class AliveNode:
    """`slots`: how many tasks of its fleet it can run at the same time."""

    worker_id: str
    node_id: str
    total: Resources
    used: Resources
    slots: int = 1
    host: str | None = None
    # False: a node of a cluster that Windlass does not manage.
    is_managed: bool = True


@dataclass(frozen=True, slots=True)
class DeadNode:
    worker_id: str
    node_id: str
    death: str


@dataclass(frozen=True, slots=True)
class Placement:
    """A claimed task that is about to start on a node."""

    task_id: int
    token: UUID
    worker_id: str


class NodeVerdict(StrEnum):
    """Result of a placement."""

    PLACED = "placed"
    LOST = "lost"  # the claim is no longer valid
    BARRED = "barred"  # the node accepts no more tasks


# Lease of the process that runs the Ray head of this database. Fleet names are never empty, so it is unique.
HEAD_LEASE = "ray:"


def dispatcher_lease(fleet: str) -> str:
    """Lease of the fleet's dispatcher. The SQL functions for Ray use the same name."""
    return f"ray:{fleet}"
