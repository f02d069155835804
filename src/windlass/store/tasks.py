"""Tasks over PostgreSQL: enqueue, retry, cancel, read, delete. Implements ports/tasks.py."""

import itertools
import time
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Sequence
from contextlib import nullcontext, suppress
from datetime import datetime, timedelta
from typing import Any

import asyncpg

from windlass.model.event import QueueDepth
from windlass.model.listing import PREVIEW_CHARACTERS, ListedTask, Page
from windlass.model.task import NewTask, Retried, Task, TaskStatus
from windlass.ports.queries import SCAN_LIMIT, SEARCH_S
from windlass.store.database import BULK_TIMEOUT_S, DatabaseStore, row_count
from windlass.store.queries import read_queries
from windlass.store.rows import task_fields

QUERIES = read_queries("windlass.store", "queries.sql")
PURGE_BATCH = 5_000
# Tasks in one call of windlass.enqueue_many.
BATCH_TASKS = 1_000
# Two producers that enqueue the same unique keys in different orders can deadlock once. After this many deadlocks in a
# row the error goes to the caller.
MAX_STAGING_INSERTS = 5
# Columns of the table windlass.tasks and fields of NewTask alike.
COPY_COLUMNS = NewTask._fields


class PostgresTaskStore(DatabaseStore):
    _is_owner: bool | None = None

    async def enqueue(self, task: NewTask) -> int:
        async with self._database.connection("enqueueing a task") as connection:
            return await enqueue_on(connection, task)

    async def enqueue_or_find(self, task: NewTask) -> tuple[int, bool]:
        async with (
            self._database.connection("enqueueing a task") as connection,
            # Behind a pooler the connection is in a transaction already; a nested one would be a savepoint with its own
            # transaction id.
            nullcontext() if self._database.is_pooled else connection.transaction(),
        ):
            task_id = await enqueue_on(connection, task)
            return task_id, bool(await connection.fetchval("select windlass.is_new_task($1)", task_id))

    async def enqueue_many(self, tasks: Iterable[NewTask] | AsyncIterable[NewTask]) -> int:
        if not await self._may_copy():
            return await self._enqueue_by_function(tasks)
        if isinstance(tasks, AsyncIterable):
            # The stream may be larger than memory, and whether it has a unique key is unknown before its end.
            return await self._enqueue_by_staging(_numbered(tasks))
        rows = tasks if isinstance(tasks, list) else list(tasks)
        if any(row.unique_key is not None for row in rows):
            return await self._enqueue_by_staging((position, *row) for position, row in enumerate(rows))
        # Without unique keys the rows go straight into the table.
        async with self._database.connection("enqueueing tasks") as connection:
            status = await connection.copy_records_to_table(
                "tasks",
                schema_name="windlass",
                records=rows,
                columns=COPY_COLUMNS,
                timeout=BULK_TIMEOUT_S,
            )
        return row_count(status)

    async def _may_copy(self) -> bool:
        """Whether this user may write the table: the owner. COPY is the fastest way; other users call a function."""
        if self._is_owner is None:
            self._is_owner = bool(await self._database.fetchval("enqueueing tasks", QUERIES["may_insert_tasks"]))
        return self._is_owner

    async def _enqueue_by_function(self, tasks: Iterable[NewTask] | AsyncIterable[NewTask]) -> int:
        added = 0
        async with (
            self._database.connection("enqueueing tasks") as connection,
            nullcontext() if self._database.is_pooled else connection.transaction(),
        ):
            async for batch in _batches(tasks):
                columns = [list(column) for column in zip(*batch, strict=True)]
                added += await connection.fetchval(QUERIES["enqueue_many"], *columns, 2**31 - 1, timeout=BULK_TIMEOUT_S)
        return added

    async def _enqueue_by_staging(
        self, numbered_rows: Iterable[tuple[Any, ...]] | AsyncIterable[tuple[Any, ...]]
    ) -> int:
        async with self._database.connection("enqueueing tasks") as connection, connection.transaction():
            await connection.execute(
                "create temporary table windlass_staging on commit drop as"
                " select 0 as position, queue, payload, priority, run_after, max_attempts, timeout_s, unique_key"
                " from windlass.tasks with no data"
            )
            await connection.copy_records_to_table(
                "windlass_staging",
                records=numbered_rows,
                columns=("position", *COPY_COLUMNS),
                timeout=BULK_TIMEOUT_S,
            )
            return await _insert_from_staging(connection)

    async def retry_task(self, task_id: int) -> bool:
        return bool(await self._database.call("retrying a task", "windlass.retry_task", task_id))

    async def retry_failed(
        self,
        queue: str,
        failed_before: datetime,
        limit: int = 1000,
        *,
        failed_from: datetime | None = None,
        include_cancelled: bool = False,
    ) -> Retried:
        rows = await self._database.fetch(
            "retrying tasks",
            "select task_id, failed_at from windlass.retry_failed($1, $2, $3, $4, $5)",
            queue,
            limit,
            failed_before,
            include_cancelled,
            failed_from,
            timeout_s=BULK_TIMEOUT_S,
        )
        return Retried([row["task_id"] for row in rows], max((row["failed_at"] for row in rows), default=None))

    async def cancel_task(self, task_id: int, reason: str) -> bool:
        return bool(await self._database.call("cancelling a task", "windlass.cancel_task", task_id, reason))

    async def task(self, task_id: int) -> Task | None:
        row = await self._database.fetchrow("reading a task", QUERIES["task"], task_id)
        return Task(**task_fields(row)) if row is not None else None

    async def tasks(
        self,
        *,
        queue: str | None = None,
        status: TaskStatus | None = None,
        limit: int = 50,
        before_id: int | None = None,
    ) -> list[Task]:
        rows = await self._database.fetch("listing tasks", QUERIES["tasks"], queue, status, before_id, limit)
        return [Task(**task_fields(row)) for row in rows]

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
        is_unfinished = status in (TaskStatus.QUEUED, TaskStatus.RUNNING, TaskStatus.ERROR)
        is_search = not is_unfinished and (queue is not None or status is not None)
        query = QUERIES["unfinished_summaries" if is_unfinished else "task_summaries"]
        last = is_scheduled if is_unfinished else SCAN_LIMIT if is_search else limit
        more = () if is_unfinished else (is_cancelled,)
        rows: list[Any] = []
        end: int | None = None
        until = time.monotonic() + SEARCH_S
        async with self._database.connection("listing tasks") as connection:
            while True:
                wanted = limit - len(rows)
                rows += await connection.fetch(query, queue, status, before_id, wanted, last, PREVIEW_CHARACTERS, *more)
                if len(rows) == limit or not is_search:
                    break
                before_id = end = await connection.fetchval(QUERIES["task_summaries_end"], before_id, SCAN_LIMIT)
                if end is None or time.monotonic() >= until:
                    break
        found = tuple(ListedTask(**task_fields(row)) for row in rows)
        following = found[-1].id if found and len(found) == limit else end
        return Page(found, str(following) if following is not None else None)

    async def known_queues(self) -> list[str]:
        rows = await self._database.fetch("listing queues", QUERIES["known_queues"])
        return [row["queue"] for row in rows]

    async def has_recent_task(self, queue: str, newest: int) -> bool:
        """Whether one of the `newest` last tasks of all queues is in this queue."""
        return bool(await self._database.fetchval("reading a queue", QUERIES["has_recent_task"], queue, newest))

    async def is_queue_served(self, queue: str) -> bool:
        """Whether a fleet or a live worker serves this queue."""
        return bool(await self._database.fetchval("reading a queue's workers", QUERIES["is_queue_served"], queue))

    async def queue_depths(self) -> list[QueueDepth]:
        rows = await self._database.fetch("reading queue depths", QUERIES["queue_depths"])
        return [QueueDepth(**dict(row)) for row in rows]

    async def finished_since(self, since_s: float) -> dict[TaskStatus, int]:
        rows = await self._database.fetch("counting finished tasks", QUERIES["finished_since"], since_s)
        counts = {TaskStatus(row["status"]): row["count"] for row in rows}
        return {status: counts.get(status, 0) for status in (TaskStatus.COMPLETE, TaskStatus.FAILED)}

    async def purge(self, queue: str | None, statuses: Sequence[TaskStatus], older_than_s: float) -> int:
        deleted, until = 0, await self.now() - timedelta(seconds=older_than_s)
        # Where the last batch ended, so that tasks of other queues are skipped once and not in every batch.
        complete_from = failed_from = event_id = None
        # Bounded by the table: each batch is full or the last.
        for _ in itertools.count():
            gone = await self._database.fetchrow(
                "deleting finished tasks",
                "select * from windlass_internal.purge_tasks($1, $2, $3, $4, $5, $6, $7)",
                queue,
                list(statuses),
                until,
                complete_from,
                failed_from,
                PURGE_BATCH,
                event_id,
                timeout_s=BULK_TIMEOUT_S,
            )
            deleted, event_id = deleted + gone["count"], gone["event_id"]
            complete_from, failed_from = gone["complete_to"] or complete_from, gone["failed_to"] or failed_from
            if gone["count"] < PURGE_BATCH:
                break
        return deleted


async def enqueue_on(connection: Any, task: NewTask) -> int:
    """Add a task on the caller's own asyncpg connection, inside the caller's transaction if there is one."""
    task_id: int = await connection.fetchval(
        # The payload travels as text: the caller's connection may have a jsonb codec that would encode it again.
        "select windlass.enqueue($1, $2::text::jsonb, $3, $4, $5, $6, $7, $8)",
        task.queue,
        task.payload,
        task.priority,
        task.run_after,
        task.max_attempts,
        task.timeout_s,
        task.unique_key,
        # new_task applied the producer's payload limit. The database's own limit is for SQL producers.
        2**31 - 1,
    )
    return task_id


async def _insert_from_staging(connection: Any) -> int:
    # Rows are inserted in the order they were handed in, which is the order of their ids. Another transaction that
    # inserts the same unique keys in another order can deadlock with this one. The loser rolls back to its savepoint,
    # keeps the staging table, and repeats the insert after the winner.
    async def insert() -> int:
        async with connection.transaction():
            return row_count(await connection.execute(QUERIES["insert_from_staging"], timeout=BULK_TIMEOUT_S))

    for _ in range(MAX_STAGING_INSERTS - 1):
        with suppress(asyncpg.DeadlockDetectedError):
            return await insert()
    return await insert()


async def _batches(tasks: Iterable[NewTask] | AsyncIterable[NewTask]) -> AsyncIterator[list[NewTask]]:
    batch: list[NewTask] = []
    if isinstance(tasks, AsyncIterable):
        async for task in tasks:
            batch.append(task)
            if len(batch) == BATCH_TASKS:
                yield batch
                batch = []
    else:
        rows = iter(tasks)
        while len(batch := list(itertools.islice(rows, BATCH_TASKS))) == BATCH_TASKS:
            yield batch
    if batch:
        yield batch


async def _numbered(tasks: AsyncIterable[NewTask]) -> AsyncIterator[tuple[Any, ...]]:
    position = 0
    async for task in tasks:
        yield position, *task
        position += 1
