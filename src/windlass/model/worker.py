"""A worker: one incarnation of a program that claims and runs tasks, from spawn intent to terminated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any
from uuid import UUID

from pydantic import FailFast, Field

from windlass.model.cost import Bill
from windlass.model.node import NodeView
from windlass.model.task import MAX_TASK_ID, NAME_PATTERN

# Fleet of workers that name none.
DEFAULT_FLEET = "default"
# Tasks that one worker runs at the same time. Every heartbeat lists all of them, and they are released one by one.
MAX_CONCURRENCY = 10_000
# Over HTTP, a registration within these limits is accepted. A name in the domain name system has 253 characters.
MAX_HOST_CHARACTERS = 255
MAX_VERSION_CHARACTERS = 100
MAX_START_ID_CHARACTERS = 100
# A worker that is silent for its lease is lost. More than a day would hide that; in less than a second a healthy worker
# would be late.
MIN_LEASE_S = 1.0
MAX_LEASE_S = 86_400.0
# The limits as constraints of a pydantic field.
LEASE_LIMITS = {"ge": MIN_LEASE_S, "le": MAX_LEASE_S}
# Workers of one fleet: far beyond any real fleet, and few enough to count one by one in every cycle.
MAX_COUNT = 100_000
# Signals this soon after the first count as the same one. `timeout` signals a program and then its whole group, and
# wrappers forward a Ctrl-C that the whole group already got. Half of the second after which the local provider repeats
# its own signal.
SAME_SIGNAL_S = 0.5


class WorkerStatus(StrEnum):
    SPAWNING = "spawning"
    ACTIVE = "active"
    TERMINATING = "terminating"
    ERROR = "error"
    TERMINATED = "terminated"


# What a worker reports with its heartbeats, as JSON text. The database refuses more.
MAX_METADATA_BYTES = 4_096
# The database refuses a heartbeat with more claims.
MAX_CLAIMS_PER_HEARTBEAT = 10_000
LIVE = (WorkerStatus.SPAWNING, WorkerStatus.ACTIVE, WorkerStatus.TERMINATING)


class WorkerKind(StrEnum):
    WORKER = "worker"  # claims and runs tasks itself
    NODE = "node"  # runs tasks that a dispatcher places on it
    DISPATCHER = "dispatcher"  # claims tasks and places them on nodes


@dataclass(frozen=True, slots=True)
class Registration:
    """What a worker reports about itself when it registers."""

    worker_id: str
    queues: Annotated[tuple[Annotated[str, Field(pattern=NAME_PATTERN)], ...], FailFast()]
    fleet: str = DEFAULT_FLEET
    concurrency: Annotated[int, Field(ge=1, le=MAX_CONCURRENCY)] = 1
    lease_s: Annotated[float, Field(ge=MIN_LEASE_S, le=MAX_LEASE_S)] = 30.0
    host: Annotated[str, Field(max_length=MAX_HOST_CHARACTERS)] | None = None
    pid: int | None = None
    version: Annotated[str, Field(max_length=MAX_VERSION_CHARACTERS)] | None = None
    kind: WorkerKind = WorkerKind.WORKER
    # Identifies one start of the program. A registration under the same worker id with another start_id is a restart:
    # that program holds no claims, so its tasks are requeued. A pid does not work, because in a container it repeats.
    # None: every registration is a restart.
    start_id: Annotated[str, Field(max_length=MAX_START_ID_CHARACTERS)] | None = None


@dataclass(frozen=True, slots=True)
class HeldClaim:
    """A claim listed in a heartbeat, with the handler's progress (0 to 1) if it reports any."""

    task_id: int
    token: UUID
    progress: float | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class HeartbeatReport:
    """What a live worker reports. `vitals`: pid, vram_total_mb, vram_used_mb and values for its metadata.

    `claims` are all its claims on tasks from `first_task_id` to `last_task_id`. Other reports name the others.
    """

    worker_id: str
    claims: Sequence[HeldClaim] = ()
    vitals: Mapping[str, Any] = field(default_factory=dict)
    first_task_id: int = 0
    last_task_id: int = MAX_TASK_ID


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """The reply to a heartbeat. `status` None: unknown worker. `lost`: claims that are no longer valid."""

    status: WorkerStatus | None
    is_paused: bool
    lost: frozenset[UUID]
    # How long to wait before a claim that follows a notification, from 0 to 1, so that the worker with most billed time
    # left claims first. None: billing periods are short, and the most recently used worker claims first.
    claim_delay: float | None = None


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker as the database stores it."""

    id: str
    fleet: str
    # None: started by hand, not spawned by a fleet.
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
    # Why it ended: a code for programs and a sentence for people.
    code: str | None
    reason: str | None
    host: str | None
    pid: int | None
    version: str | None
    vram_total_mb: int | None
    vram_used_mb: int | None
    # Results that arrived after their claim was lost, and were ignored.
    late_results: int
    metadata: Mapping[str, Any] = field(default_factory=dict)
    kind: WorkerKind = WorkerKind.WORKER
    # For a node: Ray's last report about it.
    node: NodeView | None = None
    # For a spawned worker: its machine, in the provider's terms.
    machine_id: str | None = None
    instance_type: str | None = None
    place: str | None = None
    # The machine's address, and that of its physical host, as far as the provider reports them.
    address: str | None = None
    machine_host: str | None = None
    # Phases of the boot between created_at and first_claimed_at: the machine runs, is reachable, has joined. And the
    # last step that it reported before it joined.
    running_at: datetime | None = None
    reachable_at: datetime | None = None
    joined_at: datetime | None = None
    boot_step: str | None = None
    # None: the machine has no price.
    bill: Bill | None = None
    # Version of the code and settings it was spawned with. None: started by hand, or unknown.
    fingerprint: str | None = None

    @property
    def is_by_hand(self) -> bool:
        """Whether a person started it, and no fleet or dispatcher of one."""
        return self.slot is None and self.kind is WorkerKind.WORKER


@dataclass(frozen=True, slots=True)
class RecoveredTasks:
    """A worker that was found lost, and what happened to its tasks."""

    worker_id: str
    tasks_requeued: int
    tasks_failed: int
