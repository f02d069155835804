"""A worker: one incarnation of what claims and runs tasks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID, uuid4

from windlass.model.node import NodeView

# The fleet of those who name none.
DEFAULT_FLEET = "default"
# Tasks of one worker at the same time. Each of its heartbeats names all of them, and they are given back one by one.
MAX_CONCURRENCY = 10_000
# Of workers: far beyond any fleet, and few enough to be counted one by one in every cycle.
MAX_COUNT = 100_000
# `timeout` tells a program and then its whole group, and wrappers pass on a Ctrl-C that everybody has had: signals this
# soon after the first are one with it. Half of the second after which the local provider asks again, and means it.
SAME_SIGNAL_S = 0.5


class WorkerStatus(StrEnum):
    SPAWNING = "spawning"
    ACTIVE = "active"
    TERMINATING = "terminating"
    ERROR = "error"
    TERMINATED = "terminated"


class WorkerKind(StrEnum):
    WORKER = "worker"  # claims and runs tasks itself
    NODE = "node"  # runs what a dispatcher places on it
    DISPATCHER = "dispatcher"  # claims tasks and places them on nodes


# Of this program. A pid would not do: in a container it is the same again.
THIS_START = uuid4().hex

LIVE = (WorkerStatus.SPAWNING, WorkerStatus.ACTIVE, WorkerStatus.TERMINATING)


@dataclass(frozen=True, slots=True)
class Registration:
    """What a worker says of itself when it announces itself."""

    worker_id: str
    queues: tuple[str, ...]
    fleet: str = DEFAULT_FLEET
    concurrency: int = 1
    lease_s: float = 30.0
    host: str | None = None
    pid: int | None = None
    version: str | None = None
    kind: WorkerKind = WorkerKind.WORKER
    # Another one under the same name: a program that was started again, and holds nothing. None: every call is a start.
    start_id: str | None = THIS_START


@dataclass(frozen=True, slots=True)
class HeldClaim:
    """A claim named in a heartbeat, with how far its attempt has come (0 to 1) if the handler says so."""

    task_id: int
    token: UUID
    progress: float | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """The answer to a heartbeat. `status` is None for a worker the store does not know."""

    status: WorkerStatus | None
    is_paused: bool
    lost: frozenset[UUID]


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker as the store knows it."""

    id: str
    fleet: str
    slot: int | None
    status: WorkerStatus
    is_paused: bool
    queues: tuple[str, ...]
    concurrency: int
    lease_s: float
    created_at: datetime
    activated_at: datetime | None
    last_heartbeat: datetime | None
    first_claimed_at: datetime | None
    terminated_at: datetime | None
    code: str | None
    reason: str | None
    host: str | None
    pid: int | None
    version: str | None
    vram_total_mb: int | None
    vram_used_mb: int | None
    late_results: int
    metadata: Mapping[str, Any] = field(default_factory=dict)
    kind: WorkerKind = WorkerKind.WORKER
    # Of a node: what its engine last said of it.
    node: NodeView | None = None
    # Of one whose machine was hired: what it is and where, in its provider's words.
    machine_id: str | None = None
    instance_type: str | None = None
    place: str | None = None


@dataclass(frozen=True, slots=True)
class RecoveredTasks:
    """A worker that was found lost, and what became of its tasks."""

    worker_id: str
    tasks_requeued: int
    tasks_failed: int
