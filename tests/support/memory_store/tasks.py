"""Task rows, and the table with its indexes by queue, by worker and by finish time.

Workers, events and costs are updated by tables.py.
"""

import heapq
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from itertools import islice
from operator import attrgetter
from random import Random
from uuid import UUID

from windlass.model.actor import current_actor
from windlass.model.event import QueueDepth
from windlass.model.task import CANCELLED, Claim, NewTask, Task, TaskStatus, TaskSummary

# The bound of windlass.claim_tasks: one call makes at most this many due tasks ready.
MAX_DUE_PER_CLAIM = 1000


_SUMMARY_VALUES = attrgetter(*(field.name for field in fields(TaskSummary)))
_TASK_VALUES = attrgetter(*(field.name for field in fields(Task)))


@dataclass(slots=True)
class MemoryTask:
    id: int
    queue: str
    payload: str
    priority: int
    run_after: datetime | None
    max_attempts: int
    timeout_s: float | None
    unique_key: str | None
    created_at: datetime
    ready_at: datetime | None = None
    status: TaskStatus = TaskStatus.QUEUED
    attempts: int = 0
    started_at: datetime | None = None
    finished_at: datetime | None = None
    token: UUID | None = None
    worker_id: str | None = None
    progress: float | None = None
    progress_note: str | None = None
    error_code: str | None = None
    error: str | None = None
    owner: str | None = None
    result: str | None = None

    def is_held_by(self, token: UUID) -> bool:
        return self.status is TaskStatus.RUNNING and self.token == token

    def could_be_claimed_since(self) -> datetime:
        """Since when a ready or due task could be claimed."""
        return max(at for at in (self.created_at, self.ready_at, self.run_after) if at is not None)

    def is_ready(self) -> bool:
        return self.status is TaskStatus.QUEUED and self.run_after is None

    def as_summary(self) -> TaskSummary:
        return TaskSummary(*_SUMMARY_VALUES(self))

    def as_task(self) -> Task:
        return Task(*_TASK_VALUES(self))

    def as_claim(self) -> Claim:
        assert self.token is not None
        return Claim(
            task_id=self.id,
            token=self.token,
            queue=self.queue,
            payload=self.payload,
            attempt=self.attempts,
            max_attempts=self.max_attempts,
            timeout_s=self.timeout_s,
            priority=self.priority,
            created_at=self.created_at,
        )


@dataclass(slots=True)
class Queue:
    """The unfinished tasks of one queue. Heap entries may be outdated; the row decides."""

    unfinished: dict[int, MemoryTask] = field(default_factory=dict)
    ready: list[tuple[int, int]] = field(default_factory=list)  # (-priority, id)
    waiting: list[tuple[datetime, int]] = field(default_factory=list)  # (run_after, id)

    def place(self, row: MemoryTask) -> None:
        """Add a task to the ready heap, or to the heap of scheduled and retrying tasks."""
        self.unfinished[row.id] = row
        if row.run_after is None:
            heapq.heappush(self.ready, (-row.priority, row.id))
        else:
            heapq.heappush(self.waiting, (row.run_after, row.id))

    def head(self) -> MemoryTask | None:
        """The next task to claim."""
        while self.ready:
            row = self.unfinished.get(self.ready[0][1])
            if row is not None and row.is_ready():
                return row
            heapq.heappop(self.ready)
        return None

    def next_waiting(self) -> MemoryTask | None:
        """The scheduled or retrying task with the earliest due time, past or future."""
        while self.waiting:
            run_after, task_id = self.waiting[0]
            row = self.unfinished.get(task_id)
            if row is not None and row.run_after == run_after:
                return row
            heapq.heappop(self.waiting)
        return None

    def depth(self, name: str, now: datetime) -> QueueDepth:
        rows = self.unfinished.values()
        queued = [row for row in rows if row.status is TaskStatus.QUEUED]
        due = [row for row in queued if row.run_after is None or row.run_after <= now]
        oldest = min((row.could_be_claimed_since() for row in due), default=None)
        return QueueDepth(
            queue=name,
            queued=len(due),
            scheduled=len(queued) - len(due),
            retrying=sum(row.status is TaskStatus.ERROR for row in rows),
            running=sum(row.status is TaskStatus.RUNNING for row in rows),
            oldest_queued_age_s=(now - oldest).total_seconds() if oldest is not None else None,
        )


class TaskTable:
    def __init__(self) -> None:
        self.last_id = 0
        self.rows: dict[int, MemoryTask] = {}
        self.queues: defaultdict[str, Queue] = defaultdict(Queue)
        # Running tasks by worker.
        self.running: defaultdict[str, dict[int, MemoryTask]] = defaultdict(dict)
        # In order of finish time, oldest first: retention and statistics read one end only.
        self.finished: dict[TaskStatus, OrderedDict[int, MemoryTask]] = {
            TaskStatus.COMPLETE: OrderedDict(),
            TaskStatus.FAILED: OrderedDict(),
        }
        self._unique: dict[tuple[str, str], int] = {}

    def known(self, task: NewTask) -> int | None:
        """The id of the task with the same unique key."""
        return self._unique.get((task.queue, task.unique_key)) if task.unique_key is not None else None

    def add(self, task: NewTask, now: datetime) -> int:
        self.last_id += 1
        row = MemoryTask(
            id=self.last_id,
            queue=task.queue,
            payload=task.payload,
            priority=task.priority,
            run_after=task.run_after,
            max_attempts=task.max_attempts,
            timeout_s=task.timeout_s,
            unique_key=task.unique_key,
            created_at=now,
            owner=current_actor(),
        )
        self.rows[row.id] = row
        if task.unique_key is not None:
            self._unique[task.queue, task.unique_key] = row.id
        self.queues[row.queue].place(row)
        return row.id

    def take(self, queues: Sequence[str], limit: int, now: datetime) -> list[MemoryTask]:
        """Take ready and due tasks in claim order and mark them running. The caller starts each with `start`."""
        for row in islice(self._due(queues, now), MAX_DUE_PER_CLAIM):
            self.make_ready(row, row.could_be_claimed_since())
        heads = [(head, name) for name in dict.fromkeys(queues) if (head := self.queues[name].head()) is not None]
        heads.sort(key=lambda pair: (-pair[0].priority, pair[0].id))
        return list(islice(self._take_in_turn(name for _, name in heads), limit))

    def _due(self, queues: Sequence[str], now: datetime) -> Iterator[MemoryTask]:
        """Due tasks. The caller must move each out of the heap before it takes the next."""
        for name in queues:
            queue = self.queues[name]
            while (row := queue.next_waiting()) is not None and row.run_after is not None and row.run_after <= now:
                yield row

    def _take_in_turn(self, names: Iterable[str]) -> Iterator[MemoryTask]:
        for name in names:
            queue = self.queues[name]
            while (row := queue.head()) is not None:
                # Marked at once, so that a second heap entry of the same task is ignored.
                row.status = TaskStatus.RUNNING
                yield row

    def start(self, row: MemoryTask, worker_id: str, chance: Random, now: datetime) -> None:
        row.worker_id = worker_id
        row.token = UUID(int=chance.getrandbits(128), version=4)
        row.attempts += 1
        row.started_at = now
        row.finished_at = row.progress = row.progress_note = None
        self.running[worker_id][row.id] = row

    def hand_over(self, row: MemoryTask, worker_id: str, now: datetime) -> None:
        """Move a running task from its dispatcher to the node on which it starts."""
        del self.running[row.worker_id or ""][row.id]
        self.running[worker_id][row.id] = row
        row.worker_id, row.started_at = worker_id, now

    def stop(self, row: MemoryTask) -> bool:
        """Remove a task from the running ones. The caller sets its new status. False if it was not running."""
        return row.worker_id is not None and self.running[row.worker_id].pop(row.id, None) is not None

    def make_ready(self, row: MemoryTask, ready_at: datetime, run_after: datetime | None = None) -> None:
        row.status, row.ready_at, row.run_after = TaskStatus.QUEUED, ready_at, run_after
        self.queues[row.queue].place(row)

    def schedule_retry(self, row: MemoryTask, run_after: datetime, now: datetime) -> None:
        row.status, row.run_after, row.finished_at = TaskStatus.ERROR, run_after, now
        self.queues[row.queue].place(row)

    def end(self, row: MemoryTask, status: TaskStatus, now: datetime) -> None:
        row.status, row.run_after, row.finished_at = status, None, now
        del self.queues[row.queue].unfinished[row.id]
        self.finished[status][row.id] = row

    def put_back(self, row: MemoryTask, now: datetime, run_after: datetime | None = None) -> None:
        """Requeue a task and clear its last attempt. The caller adjusts the attempt count."""
        self.finished[TaskStatus.FAILED].pop(row.id, None)
        row.token = row.worker_id = row.started_at = row.finished_at = row.progress = row.progress_note = None
        self.make_ready(row, now, run_after)

    def delete(self, row: MemoryTask) -> None:
        del self.rows[row.id], self.finished[row.status][row.id]
        if row.unique_key is not None:
            del self._unique[row.queue, row.unique_key]

    def held(self, task_id: int, token: UUID) -> MemoryTask | None:
        """The task, if this claim is valid."""
        row = self.rows.get(task_id)
        return row if row is not None and row.is_held_by(token) else None

    def run_by(self, worker_id: str) -> list[MemoryTask]:
        """By id."""
        return sorted(self.running[worker_id].values(), key=lambda row: row.id)

    def newest_first(self, before_id: int | None) -> Iterator[MemoryTask]:
        newest_id = self.last_id if before_id is None else min(self.last_id, before_id - 1)
        rows = (self.rows.get(task_id) for task_id in range(newest_id, 0, -1))
        return (row for row in rows if row is not None)

    def ended_before(self, status: TaskStatus, before: datetime) -> Iterator[MemoryTask]:
        """Oldest first."""
        for row in self.finished[status].values():
            if _finish_time(row) >= before:
                return
            yield row

    def count_ended_after(self, status: TaskStatus, after: datetime) -> int:
        count = 0
        for row in reversed(self.finished[status].values()):
            if _finish_time(row) <= after:
                break
            # Cancelled tasks are no failures.
            count += row.error_code != CANCELLED
        return count


def _finish_time(row: MemoryTask) -> datetime:
    assert row.finished_at is not None
    return row.finished_at
