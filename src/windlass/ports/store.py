"""What Windlass needs from its database beyond a worker's part: producing, looking, tidying up.

One behavioural suite, tests/conformance/test_store.py, runs over every implementation.
"""

from collections.abc import AsyncIterable, Iterable, Sequence
from datetime import datetime
from typing import Protocol

from windlass.model.event import Event, QueueDepth
from windlass.model.task import NewTask, Retried, Task, TaskStatus, TaskSummary
from windlass.model.worker import RecoveredTasks, Worker
from windlass.ports.transport import WorkerTransport


class Store(WorkerTransport, Protocol):
    async def enqueue(self, task: NewTask) -> int:
        """Add a task and return its id. With a unique key that is already there: that task's id, unchanged."""

    async def enqueue_or_find(self, task: NewTask) -> tuple[int, bool]:
        """The same, and whether the task is new. Takes longer."""

    async def enqueue_many(self, tasks: Iterable[NewTask] | AsyncIterable[NewTask]) -> int:
        """Add many at once, all or none. Returns how many were new; known unique keys are passed over."""

    async def retry_task(self, task_id: int) -> bool:
        """Put a failed or waiting task back into the queue with fresh attempts. False if it was neither."""

    async def retry_failed(
        self,
        queue: str,
        failed_before: datetime,
        limit: int = 1000,
        *,
        failed_from: datetime | None = None,
        include_cancelled: bool = False,
    ) -> Retried:
        """The same for the oldest dead letters of a queue that failed by then; without ids when none is left.

        `failed_from`: where the last call came to (`failed_to`), so that what it passed over is not read again. Those
        that were cancelled did not fail: they are left alone unless they are asked for.
        """

    async def cancel_task(self, task_id: int, reason: str) -> bool:
        """End an unfinished task as failed, code CANCELLED; a running one loses its claim. False if finished."""

    async def task(self, task_id: int) -> Task | None: ...

    async def tasks(
        self,
        *,
        queue: str | None = None,
        status: TaskStatus | None = None,
        limit: int = 50,
        before_id: int | None = None,
    ) -> list[Task]:
        """Newest first; `before_id` continues after the last one seen."""

    async def task_summaries(
        self,
        *,
        queue: str | None = None,
        status: TaskStatus | None = None,
        limit: int = 50,
        before_id: int | None = None,
        is_scheduled: bool = False,
    ) -> list[TaskSummary]:
        """The same for lists: payloads and results, which may be a MiB each, stay where they are.

        `is_scheduled`: only those that wait for their time."""

    async def known_queues(self) -> list[str]:
        """Queues that hold something unfinished, are served by a worker, or had one of the newest tasks. Of thousands
        not all: names are made up by whoever enqueues."""

    async def worker(self, worker_id: str) -> Worker | None: ...

    async def workers(self, *, include_terminated: bool = False) -> list[Worker]: ...

    async def set_paused(self, worker_ids: Sequence[str], is_paused: bool) -> int:
        """Pause or resume live workers. Returns how many changed."""

    async def set_terminating(self, worker_ids: Sequence[str], reason: str) -> int:
        """Ask live workers to finish what they hold and leave. Returns how many were asked."""

    async def queue_depths(self) -> list[QueueDepth]: ...

    async def finished_since(self, since_s: float) -> dict[TaskStatus, int]:
        """How many tasks became complete or failed within the last `since_s` seconds."""

    async def events(
        self, *, task_id: int | None = None, worker_id: str | None = None, limit: int = 200
    ) -> list[Event]:
        """Oldest first; the newest `limit` of them."""

    async def purge(self, queue: str | None, statuses: Sequence[TaskStatus], older_than_s: float) -> int:
        """Delete finished tasks of these statuses that ended longer ago than that. Returns how many."""

    async def recover_lost_workers(self, judge_id: str) -> list[RecoveredTasks]:
        """Take the tasks of workers that were silent for longer than their lease, and of those that have ended.

        The silent are judged only if `judge_id` was itself heard without a gap for that long; hired ones, besides, only
        when nobody has led for twice their lease. They become `error`, those started by hand `terminated`.
        """

    async def sweep(self) -> int:
        """Apply retention until nothing is left to do, or a bounded time is over. Returns how many rows went."""

    async def now(self) -> datetime:
        """The database's time: the only time for leases, ages and bills."""
