"""Pages of workers, tasks and log lines, as lists show them."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Generic, TypeVar

from windlass.model.task import Task, TaskStatus, TaskSummary
from windlass.model.worker import Worker

MAX_PAGE = 500
# Characters of a payload that lists show.
PREVIEW_CHARACTERS = 200

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Page(Generic[Row]):
    """Some rows of a list. `next_cursor` None: the list ends here."""

    rows: tuple[Row, ...]
    next_cursor: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRow(Worker):
    """A worker with its running tasks. cost/report.py computes the cost of its machine from `bill`."""

    terminating_at: datetime | None
    # None before its first heartbeat.
    heartbeat_age_s: float | None
    is_silent: bool
    running_tasks: int
    # The oldest running task.
    task_id: int | None
    task_queue: str | None
    task_started_at: datetime | None
    task_progress: float | None
    task_note: str | None
    # Restarts of its slot that are still stored.
    restarts: int
    is_slot_failed: bool


@dataclass(frozen=True, slots=True)
class HostRecord:
    """Machines of a fleet in one place, on one physical host where the provider tells it, and how they ended.

    A record of a whole place has no host."""

    fleet: str
    place: str | None
    host: str | None
    machines: int
    # Machines that the provider took away, or that stopped by themselves.
    lost: int
    failed_checks: int
    last_used_at: datetime

    @property
    def loss_rate(self) -> float:
        return self.lost / self.machines


class TaskList(StrEnum):
    """Tasks of one kind; each list has its own order."""

    QUEUED = "queued"  # ready, in the order in which they will be claimed
    SCHEDULED = "scheduled"  # run_after lies ahead, earliest first
    ERROR = "error"  # waiting for their retry, earliest first
    RUNNING = "running"  # newest first
    COMPLETE = "complete"  # last finished first
    FAILED = "failed"  # dead letters, newest first, without cancelled ones
    CANCELLED = "cancelled"  # newest first


@dataclass(frozen=True, slots=True)
class ListedTask(TaskSummary):
    # The first PREVIEW_CHARACTERS of its payload as JSON text. None: more than 64 kB as stored, and not read.
    payload_preview: str | None


@dataclass(frozen=True, slots=True)
class TaskRow(ListedTask):
    # When it became or becomes claimable: enqueued, reached its run_after, or was requeued.
    ready_at: datetime
    # Cost in the ledger; None if it ran only on workers without a price, or nothing is settled yet.
    cost_micros: int | None
    currency: str | None


@dataclass(frozen=True, slots=True)
class TaskDetail(Task):
    # See TaskRow.
    ready_at: datetime


@dataclass(frozen=True, slots=True)
class TaskError:
    """One failed attempt, with its task and worker as far as they are still stored."""

    id: int
    at: datetime
    task_id: int
    attempt: int
    error_code: str | None
    error: str | None
    # None: the task was purged.
    queue: str | None
    status: TaskStatus | None
    payload_preview: str | None
    worker_id: str | None
    # None: the worker was purged. The type of its machine names its GPU.
    fleet: str | None
    instance_type: str | None
    host: str | None


@dataclass(frozen=True, slots=True)
class ErrorCount:
    """Failed attempts with one error code, or on one worker."""

    name: str | None
    errors: int


@dataclass(frozen=True, slots=True)
class ErrorCounts:
    """Failed attempts in a range of time, the most frequent first. Counted among the newest MAX_COUNTED_ERRORS."""

    errors: int
    tasks: int
    by_worker: tuple[ErrorCount, ...]
    by_code: tuple[ErrorCount, ...]


@dataclass(frozen=True, slots=True)
class LogLine:
    id: int
    at: datetime
    level: str
    message: str
    worker_id: str | None
    cycle_id: int | None
    fields: Mapping[str, Any] | None
