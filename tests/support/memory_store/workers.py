"""Worker rows, legal status transitions, and which workers are lost."""

import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Any

from support.memory_store.interval import interval
from windlass.model.cost import Bill, Span
from windlass.model.errors import BadInput
from windlass.model.node import NodeView
from windlass.model.worker import MAX_METADATA_BYTES, Registration, Worker, WorkerKind, WorkerStatus

MAX_FAILED_TASKS = 100
# The same as windlass_internal.max_heartbeat_gap_s: a longer silence, in leases, is a gap.
MAX_HEARTBEAT_GAP = 0.4
# Peers judge spawned workers once no orchestrator has held the lease for this many of their leases.
LEADERLESS_LEASES = 2

LEGAL_MOVES = {
    WorkerStatus.SPAWNING: frozenset(WorkerStatus) - {WorkerStatus.SPAWNING},
    WorkerStatus.ACTIVE: frozenset({WorkerStatus.TERMINATING, WorkerStatus.ERROR, WorkerStatus.TERMINATED}),
    WorkerStatus.TERMINATING: frozenset({WorkerStatus.ERROR, WorkerStatus.TERMINATED}),
    WorkerStatus.ERROR: frozenset({WorkerStatus.TERMINATED}),
    WorkerStatus.TERMINATED: frozenset(),
}

_NUMBERED_VITALS = ("pid", "vram_total_mb", "vram_used_mb")
_MAX_METADATA_LEVELS = 20


@dataclass(slots=True)
class SpawnedWorker:
    """The columns of a worker that only the control loop writes."""

    terminating_at: datetime | None = None
    provider: str | None = None
    machine_id: str | None = None
    instance_type: str | None = None
    place: str | None = None
    machine_at: datetime | None = None
    creation: str | None = None
    preparing_at: datetime | None = None
    prepared_at: datetime | None = None
    prepare_code: str | None = None
    prepare_reason: str | None = None
    host_key: str | None = None
    failed_at: datetime | None = None
    is_proven: bool = False
    vram_at: datetime | None = None
    vram_lost_at: datetime | None = None
    bill: Bill | None = None
    settle_at: datetime | None = None
    machine_created_at: datetime | None = None
    address: str | None = None
    machine_host: str | None = None
    running_at: datetime | None = None
    reachable_at: datetime | None = None
    joined_at: datetime | None = None
    boot_step: str | None = None
    boot_step_at: datetime | None = None
    fingerprint: str | None = None
    boot_steps: list[tuple[str, datetime]] = field(default_factory=list)
    spans: dict[tuple[datetime, int], Span] = field(default_factory=dict)


@dataclass(slots=True)
class Credentials:
    # None for a self-registered worker.
    join_token_hash: bytes | None = None
    join_expires_at: datetime = datetime.min
    token_hash: bytes | None = None
    # The API token with which it registered itself.
    api_token_hash: bytes | None = None


_SPAWNED_FIELDS = {field.name for field in fields(SpawnedWorker)}
_WORKER_VALUES = attrgetter(
    *(f"spawned.{field.name}" if field.name in _SPAWNED_FIELDS else field.name for field in fields(Worker))
)


@dataclass(slots=True)
class MemoryWorker:
    id: str
    fleet: str
    slot: int | None
    status: WorkerStatus
    created_at: datetime
    queues: tuple[str, ...] = ()
    concurrency: int = 1
    lease_s: float = 30.0
    is_paused: bool = False
    activated_at: datetime | None = None
    last_heartbeat: datetime | None = None
    heartbeat_gapless_since: datetime | None = None
    first_claimed_at: datetime | None = None
    terminated_at: datetime | None = None
    code: str | None = None
    reason: str | None = None
    host: str | None = None
    pid: int | None = None
    start_id: str | None = None
    version: str | None = None
    vram_total_mb: int | None = None
    vram_used_mb: int | None = None
    late_results: int = 0
    late_event_at: datetime | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    failed_tasks: list[int] = field(default_factory=list)
    failing_since: datetime | None = None
    kind: WorkerKind = WorkerKind.WORKER
    node: NodeView | None = None
    spawned: SpawnedWorker = field(default_factory=SpawnedWorker)
    credentials: Credentials | None = None

    @property
    def lease(self) -> timedelta:
        return interval(self.lease_s)

    @property
    def max_heartbeat_gap(self) -> timedelta:
        return interval(MAX_HEARTBEAT_GAP * self.lease_s)

    @property
    def age_order(self) -> tuple[datetime, str]:
        return self.created_at, self.id

    @property
    def is_up(self) -> bool:
        return self.status in (WorkerStatus.ACTIVE, WorkerStatus.TERMINATING)

    @property
    def is_staying(self) -> bool:
        return self.status in (WorkerStatus.SPAWNING, WorkerStatus.ACTIVE)

    def last_seen_at(self) -> datetime:
        return self.last_heartbeat or self.created_at

    def move(self, status: WorkerStatus) -> None:
        if status not in LEGAL_MOVES[self.status]:
            raise BadInput(f"worker {self.id} cannot change from {self.status} to {status}")
        self.status = status

    def set_end_reason(self, code: str, reason: str) -> None:
        """Set code and reason, unless they are set already."""
        self.code = self.code if self.code is not None else code
        self.reason = self.reason if self.reason is not None else reason

    def apply_registration(self, registration: Registration) -> None:
        if self.slot is None:  # otherwise its order decides
            self.queues, self.concurrency = registration.queues, registration.concurrency
            self.lease_s = registration.lease_s
        self.host, self.pid, self.version = registration.host, registration.pid, registration.version
        self.start_id = registration.start_id

    def record_heartbeat(self, now: datetime) -> None:
        if self.last_heartbeat is None or now - self.last_heartbeat > self.max_heartbeat_gap:
            self.heartbeat_gapless_since = now
        self.last_heartbeat = now

    def apply_vitals(self, vitals: Mapping[str, Any], now: datetime) -> None:
        numbers, rest = parse_vitals(vitals)
        total_mb = numbers.get("vram_total_mb")
        if total_mb == 0 and self.vram_total_mb:
            self.spawned.vram_lost_at = now
        elif total_mb:
            self.spawned.vram_lost_at = None
        for name, value in numbers.items():
            setattr(self, name, value)
        merged = self.metadata | rest
        self.metadata = merged if json_bytes(merged) <= MAX_METADATA_BYTES else rest
        if "vram_total_mb" in vitals:
            self.spawned.vram_at = now

    def record_failure(self, task_id: int, now: datetime) -> None:
        new = [] if task_id in self.failed_tasks else [task_id]
        self.failed_tasks = [*self.failed_tasks, *new][-MAX_FAILED_TASKS:]
        self.failing_since = self.failing_since or now

    def forget_failures(self) -> None:
        self.failed_tasks, self.failing_since = [], None

    def as_worker(self) -> Worker:
        return replace(Worker(*_WORKER_VALUES(self)), metadata=dict(self.metadata))


def parse_vitals(vitals: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, Any]]:
    """The values that have columns, and the others. Raises BadInput."""
    try:
        # Through JSON and back: a copy that holds only JSON values.
        rest = json.loads(json.dumps(dict(vitals), allow_nan=False))
        size_bytes = json_bytes(rest)
        numbers = {name: int(str(value)) for name in _NUMBERED_VITALS if (value := rest.pop(name, None)) is not None}
    except ValueError as error:
        raise BadInput(f"sending a heartbeat: the vitals cannot be stored ({error}).") from None
    if any(not -(2**31) <= number < 2**31 for number in numbers.values()):
        raise BadInput("sending a heartbeat: a number is out of range.")
    if levels_of(rest) > _MAX_METADATA_LEVELS:
        raise BadInput(f"sending a heartbeat: vitals have at most {_MAX_METADATA_LEVELS} levels.")
    if size_bytes > MAX_METADATA_BYTES:
        raise BadInput(f"sending a heartbeat: vitals have at most {MAX_METADATA_BYTES} bytes, not {size_bytes}.")
    return numbers, rest


def levels_of(value: Any) -> int:
    """How deeply a JSON value is nested: 0 for a number."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(levels_of, inner), default=-1)


def json_bytes(value: Any) -> int:
    return len(json.dumps(value, ensure_ascii=False).encode())


class WorkerTable:
    def __init__(self) -> None:
        self.rows: dict[str, MemoryWorker] = {}
        self.not_terminated: dict[str, MemoryWorker] = {}
        # In order of termination.
        self.terminated: OrderedDict[str, MemoryWorker] = OrderedDict()

    def add(self, row: MemoryWorker) -> None:
        self.rows[row.id] = self.not_terminated[row.id] = row

    def terminate(self, row: MemoryWorker, now: datetime) -> None:
        row.move(WorkerStatus.TERMINATED)
        row.terminated_at = now
        del self.not_terminated[row.id]
        self.terminated[row.id] = row

    def forget(self, row: MemoryWorker) -> None:
        """Delete a terminated worker."""
        del self.terminated[row.id], self.rows[row.id]

    def get(self, worker_id: str | None) -> MemoryWorker | None:
        return self.rows.get(worker_id) if worker_id is not None else None

    def among(self, statuses: Iterable[WorkerStatus], worker_id: str) -> MemoryWorker | None:
        """The worker, if it has one of these statuses."""
        row = self.rows.get(worker_id)
        return row if row is not None and row.status in statuses else None

    def named(self, worker_ids: Sequence[str]) -> list[MemoryWorker]:
        """The existing workers among these, each once."""
        return [self.rows[worker_id] for worker_id in dict.fromkeys(worker_ids) if worker_id in self.rows]

    def spawned_in(self, fleet: str) -> list[MemoryWorker]:
        return [row for row in self.not_terminated.values() if row.fleet == fleet and row.slot is not None]

    def nodes_of(self, fleet: str) -> list[MemoryWorker]:
        return [row for row in self.not_terminated.values() if (row.fleet, row.kind) == (fleet, WorkerKind.NODE)]


def lost(
    judge: MemoryWorker, workers: Iterable[MemoryWorker], leaderless_s: float, now: datetime
) -> list[MemoryWorker]:
    """Workers that this judge may declare lost: it had no heartbeat gap itself while they were silent."""
    if not judge.is_up or judge.last_heartbeat is None or judge.heartbeat_gapless_since is None:
        return []
    if judge.last_heartbeat < now - judge.max_heartbeat_gap:
        return []
    gapless_s = (now - judge.heartbeat_gapless_since).total_seconds()

    def is_lost(worker: MemoryWorker) -> bool:
        allowed_s = worker.lease_s + MAX_HEARTBEAT_GAP * max(judge.lease_s - worker.lease_s, 0.0)
        return (
            (worker.is_up or (worker.status is WorkerStatus.SPAWNING and worker.last_heartbeat is not None))
            and (worker.slot is None or leaderless_s > LEADERLESS_LEASES * worker.lease_s)
            and allowed_s <= gapless_s
            and worker.last_seen_at() < now - interval(allowed_s)
        )

    return sorted(filter(is_lost, workers), key=lambda worker: worker.id)
