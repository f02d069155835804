"""Tasks for producers and operators, and the maintenance of the queue.

One behavioural suite, tests/conformance, runs over every implementation. Every method raises DatabaseUnavailable when
no answer came.
"""

from collections.abc import AsyncIterable, Iterable, Sequence
from datetime import datetime
from typing import Protocol

from windlass.model.event import QueueDepth
from windlass.model.listing import ListedTask, Page
from windlass.model.task import NewTask, Retried, Task, TaskStatus
from windlass.model.worker import RecoveredTasks
from windlass.ports.clock import DatabaseClock


class TaskStore(DatabaseClock, Protocol):
    async def enqueue(self, task: NewTask) -> int:
        """Add a task and return its id. If its unique key exists: the id of that task, which is not changed."""

    async def enqueue_or_find(self, task: NewTask) -> tuple[int, bool]:
        """Enqueue, and return whether the task is new. Slower than `enqueue`."""

    async def enqueue_many(self, tasks: Iterable[NewTask] | AsyncIterable[NewTask]) -> int:
        """Add all tasks or none. Returns how many were new; tasks whose unique key exists are skipped."""

    async def retry_task(self, task_id: int) -> bool:
        """Requeue a failed or retrying task with its attempts reset. False if it is in another state."""

    async def retry_failed(
        self,
        queue: str,
        failed_before: datetime,
        limit: int = 1000,
        *,
        failed_from: datetime | None = None,
        include_cancelled: bool = False,
    ) -> Retried:
        """Retry the oldest failed tasks of a queue that failed by then. Returns no ids when none is left.

        `failed_from`: the `failed_to` of the last call, so that rows it skipped are not read again. Cancelled tasks are
        skipped unless `include_cancelled`.
        """

    async def cancel_task(self, task_id: int, reason: str) -> bool:
        """Fail an unfinished task with code CANCELLED; a running one loses its claim. False if it was finished."""

    async def task(self, task_id: int) -> Task | None: ...

    async def tasks(
        self,
        *,
        queue: str | None = None,
        status: TaskStatus | None = None,
        limit: int = 50,
        before_id: int | None = None,
    ) -> list[Task]:
        """Newest first. `before_id`: continue after this id."""

    async def task_summaries(
        self,
        *,
        queue: str | None = None,
        status: TaskStatus | None = None,
        limit: int = 50,
        before_id: int | None = None,
        is_scheduled: bool = False,
        is_cancelled: bool | None = None,
    ) -> Page[ListedTask]:
        """Like `tasks` with the beginning of the payload instead of payload and result, which may be a MiB each.

        `is_scheduled`: only future run_after. `is_cancelled`: of the failed tasks, only cancelled ones, or only others;
        None for both. The page's `next_cursor` is the next `before_id`. A search for finished
        tasks stops after SEARCH_S, so its page may be incomplete; a list of unfinished tasks reads no finished ones.
        """

    async def known_queues(self) -> list[str]:
        """Queues with an unfinished task, a worker that serves them, or one of the newest tasks.

        Incomplete if there are thousands: producers choose queue names freely.
        """

    async def queue_depths(self) -> list[QueueDepth]: ...

    async def finished_since(self, since_s: float) -> dict[TaskStatus, int]:
        """How many tasks became complete or failed within the last `since_s` seconds."""

    async def purge(self, queue: str | None, statuses: Sequence[TaskStatus], older_than_s: float) -> int:
        """Delete finished tasks of these statuses that finished longer ago than that. Returns how many.

        An event TASKS_PURGED has their number, also if it is interrupted after a part of them.
        """


class MaintenanceStore(DatabaseClock, Protocol):
    async def recover_lost_workers(self, judge_id: str) -> list[RecoveredTasks]:
        """Requeue the tasks of workers that were silent for longer than their lease, and of terminated workers.

        A silent worker is judged only if the worker `judge_id` itself had no heartbeat gap during that silence. Spawned
        workers are judged only when no orchestrator has held the lease for twice their lease. A silent spawned worker
        becomes `error`, one that was started by hand `terminated`.
        """

    async def sweep(self) -> int:
        """Apply retention until nothing is left or a time limit is reached. Returns the number of deleted rows."""
