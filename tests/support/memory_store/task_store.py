"""Tasks for producers and operators, in memory. Implements ports/tasks.py."""

from collections.abc import AsyncIterable, Iterable, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from itertools import islice

from support.memory_store.constraints import check_limit, check_new
from support.memory_store.interval import interval
from support.memory_store.tables import TableStore
from windlass.model.event import QueueDepth
from windlass.model.listing import PREVIEW_CHARACTERS, ListedTask, Page
from windlass.model.task import CANCELLED, NewTask, Retried, Task, TaskStatus


class MemoryTaskStore(TableStore):
    async def enqueue(self, task: NewTask) -> int:
        check_new("enqueueing a task", task)
        known = self._tasks.known(task)
        return known if known is not None else self._add(task)

    async def enqueue_or_find(self, task: NewTask) -> tuple[int, bool]:
        newest = self._tasks.last_id
        task_id = await self.enqueue(task)
        return task_id, task_id > newest

    async def enqueue_many(self, tasks: Iterable[NewTask] | AsyncIterable[NewTask]) -> int:
        checked = [task async for task in tasks] if isinstance(tasks, AsyncIterable) else list(tasks)
        for task in checked:
            check_new("enqueueing tasks", task)
        count = 0
        for task in checked:
            if self._tasks.known(task) is None:
                self._add(task)
                count += 1
        return count

    def _add(self, task: NewTask) -> int:
        task_id = self._tasks.add(task, self._clock())
        self._tables.notifications.notify(task.queue)
        return task_id

    async def retry_task(self, task_id: int) -> bool:
        row = self._tasks.rows.get(task_id)
        if row is None or row.status not in (TaskStatus.ERROR, TaskStatus.FAILED):
            return False
        row.attempts = 0
        self._tasks.put_back(row, self._clock())
        self._add_event("TASK_RETRIED", "retried on request", task_id=task_id)
        self._tables.notifications.notify(row.queue)
        return True

    async def retry_failed(
        self,
        queue: str,
        failed_before: datetime,
        limit: int = 1000,
        *,
        failed_from: datetime | None = None,
        include_cancelled: bool = False,
    ) -> Retried:
        check_limit("retrying tasks", limit)
        failed = self._tasks.ended_before(TaskStatus.FAILED, failed_before + timedelta.resolution)
        own = (
            (row.id, row.finished_at)
            for row in failed
            if row.queue == queue
            and (failed_from is None or (row.finished_at is not None and row.finished_at >= failed_from))
            and (include_cancelled or row.error_code != "CANCELLED")
        )
        dead = list(islice(own, limit))
        for task_id, _ in dead:
            await self.retry_task(task_id)
        return Retried(sorted(task_id for task_id, _ in dead), dead[-1][1] if dead else None)

    async def cancel_task(self, task_id: int, reason: str) -> bool:
        row = self._tasks.rows.get(task_id)
        if row is None or row.status in (TaskStatus.COMPLETE, TaskStatus.FAILED):
            return False
        self._tables.end(row, TaskStatus.FAILED, code="CANCELLED", error=reason)
        row.token = None
        self._add_event("TASK_CANCELLED", reason, worker_id=row.worker_id, task_id=task_id)
        return True

    async def task(self, task_id: int) -> Task | None:
        row = self._tasks.rows.get(task_id)
        return row.as_task() if row is not None else None

    async def tasks(
        self,
        *,
        queue: str | None = None,
        status: TaskStatus | None = None,
        limit: int = 50,
        before_id: int | None = None,
    ) -> list[Task]:
        check_limit("listing tasks", limit)
        rows = self._tasks.newest_first(before_id)
        matching = (row.as_task() for row in rows if queue in (None, row.queue) and status in (None, row.status))
        return list(islice(matching, limit))

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
        scanned = limit if not is_scheduled and is_cancelled is None else self._tasks.last_id
        tasks = await self.tasks(queue=queue, status=status, limit=scanned, before_id=before_id)
        now = await self.now()
        found = [task for task in tasks if not is_scheduled or (task.run_after is not None and task.run_after > now)]
        if is_cancelled is not None:
            found = [
                task
                for task in found
                if task.status is not TaskStatus.FAILED or (task.error_code == CANCELLED) is is_cancelled
            ]
        rows = tuple(
            ListedTask(
                **asdict(self._tasks.rows[task.id].as_summary()), payload_preview=task.payload[:PREVIEW_CHARACTERS]
            )
            for task in found[:limit]
        )
        return Page(rows, str(rows[-1].id) if rows and len(rows) == limit else None)

    async def known_queues(self) -> list[str]:
        held = {row.queue for row in self._tasks.rows.values()}
        served = {queue for worker in self._workers.not_terminated.values() for queue in worker.queues}
        return sorted(held | served)

    async def queue_depths(self) -> list[QueueDepth]:
        now = self._clock()
        return [queue.depth(name, now) for name, queue in sorted(self._tasks.queues.items()) if queue.unfinished]

    async def finished_since(self, since_s: float) -> dict[TaskStatus, int]:
        after = self._clock() - interval(since_s)
        return {status: self._tasks.count_ended_after(status, after) for status in self._tasks.finished}

    async def purge(self, queue: str | None, statuses: Sequence[TaskStatus], older_than_s: float) -> int:
        # `ended_before` excludes its bound; a task of exactly this age is deleted too.
        before = self._clock() - interval(older_than_s) + timedelta.resolution
        finished = [status for status in self._tasks.finished if status in statuses]
        ended = [row for status in finished for row in self._tasks.ended_before(status, before)]
        old = [row for row in ended if queue in (None, row.queue)]
        for row in old:
            self._tasks.delete(row)
        if old:
            reason = (
                f"{len(old)} {' and '.join(statuses)} tasks of {f'queue {queue}' if queue else 'all queues'} deleted"
            )
            self._add_event("TASKS_PURGED", reason, detail={"count": len(old), "queue": queue, "statuses": [*statuses]})
        return len(old)
