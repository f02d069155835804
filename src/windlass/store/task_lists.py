"""Lists of tasks and of failed attempts over PostgreSQL. Part of ports/queries.py.

A search examines blocks of rows in the order of the list until its page is full or SEARCH_S has passed, so its time is
bounded however many tasks there are. The cursor of its page continues after the last row that it examined.
"""

import time
from collections.abc import Sequence
from typing import Any

from windlass.model.listing import (
    PREVIEW_CHARACTERS,
    ErrorCount,
    ErrorCounts,
    Page,
    TaskDetail,
    TaskError,
    TaskList,
    TaskRow,
)
from windlass.model.task import CANCELLED, MAX_TASK_ID, TaskStatus
from windlass.ports.queries import MAX_COUNTED_ERRORS, SCAN_LIMIT, SEARCH_LIMIT, SEARCH_S
from windlass.store.cursors import AT_AND_ID, ID, PRIORITY_AND_ID, next_cursor, page_size, read_cursor, row_key
from windlass.store.database import DatabaseStore
from windlass.store.overview import overview_queues
from windlass.store.queries import read_queries
from windlass.store.rows import task_fields

QUERIES = read_queries("windlass.store", "task_lists.sql")


class PostgresTaskLists(DatabaseStore):
    async def running_tasks_of(self, worker_id: str, limit: int) -> list[TaskRow]:
        rows = await self._database.fetch("listing tasks", QUERIES["running_tasks_of"], worker_id, limit)
        return await self._task_rows([row["id"] for row in rows])

    async def tasks_page(
        self,
        *,
        queue: str | None = None,
        which: TaskList | None = None,
        search: str | None = None,
        unsearched_queues: Sequence[str] = (),
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page[TaskRow]:
        limit = page_size(limit)
        search = search.strip() or None if search is not None else None
        found: list[int] = []
        if search is not None and cursor is None:
            found = await self._exact_matches(search, queue, which)
        ids, following = await self._task_ids(queue, which, search, limit, cursor, unsearched_queues)
        return Page(tuple(await self._task_rows(list(dict.fromkeys([*found, *ids])))), following)

    async def task_in_full(self, task_id: int) -> TaskDetail | None:
        row = await self._database.fetchrow("reading a task", QUERIES["task_with_payload"], task_id)
        return TaskDetail(**task_fields(row)) if row is not None else None

    async def task_errors(
        self,
        *,
        since_s: float,
        queue: str | None = None,
        worker_id: str | None = None,
        search: str | None = None,
        unsearched_queues: Sequence[str] = (),
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page[TaskError]:
        limit = page_size(limit)
        search = search.strip() or None if search is not None else None
        after: tuple[Any, ...] = read_cursor(cursor, AT_AND_ID) or (None, None)
        is_search = queue is not None or worker_id is not None or search is not None
        scan = SEARCH_LIMIT if is_search else limit
        filters = (queue, worker_id, search)
        rows: list[Any] = []
        end = None
        until = time.monotonic() + SEARCH_S
        async with self._database.connection("listing errors") as connection:
            while True:
                wanted = limit - len(rows)
                rows += await connection.fetch(
                    QUERIES["task_errors"],
                    since_s,
                    *filters,
                    wanted,
                    scan,
                    *after,
                    PREVIEW_CHARACTERS,
                    unsearched_queues,
                )
                if len(rows) == limit or not is_search:
                    break
                end = await connection.fetchrow(QUERIES["task_errors_end"], since_s, scan, *after)
                if end is None or time.monotonic() >= until:
                    break
                after = row_key(end)
        return Page(tuple(map(_task_error, rows)), next_cursor(rows, limit, end, key=("at", "id")))

    async def task_error_counts(
        self,
        *,
        since_s: float,
        queue: str | None = None,
        worker_id: str | None = None,
        search: str | None = None,
        unsearched_queues: Sequence[str] = (),
    ) -> ErrorCounts:
        rows = await self._database.fetch(
            "counting errors",
            QUERIES["task_error_counts"],
            since_s,
            queue,
            worker_id,
            search.strip() or None if search is not None else None,
            MAX_COUNTED_ERRORS,
            unsearched_queues,
        )
        # `grouping` tells a group of rows without a worker from a group by error code.
        by_worker = [ErrorCount(row["worker_id"], row["errors"]) for row in rows if row["level"] == 1]
        by_code = [ErrorCount(row["error_code"], row["errors"]) for row in rows if row["level"] == 2]
        total = next((row for row in rows if row["level"] == 3), None)
        return ErrorCounts(
            errors=total["errors"] if total is not None else 0,
            tasks=total["tasks"] if total is not None else 0,
            by_worker=tuple(by_worker),
            by_code=tuple(by_code),
        )

    async def _task_rows(self, ids: Sequence[int]) -> list[TaskRow]:
        rows = await self._database.fetch("listing tasks", QUERIES["task_rows"], ids, PREVIEW_CHARACTERS)
        return [TaskRow(**task_fields(row)) for row in rows]

    async def _exact_matches(self, search: str, queue: str | None, which: TaskList | None) -> list[int]:
        """Tasks of the list whose id or whole unique key is the search text."""
        task_id = int(search) if search.isascii() and search.isdigit() and int(search) <= MAX_TASK_ID else None
        async with self._database.connection("listing tasks") as connection:
            queues = [queue] if queue is not None else (await overview_queues(connection))[0]
            rows = await connection.fetch(QUERIES["tasks_by_id_or_key"], search, queues, task_id)
        return [row["id"] for row in rows if queue in (None, row["queue"]) and which in (None, _list_of(row))]

    async def _task_ids(
        self,
        queue: str | None,
        which: TaskList | None,
        search: str | None,
        limit: int,
        cursor: str | None,
        unsearched: Sequence[str],
    ) -> tuple[list[int], str | None]:
        if which in (TaskList.QUEUED, TaskList.SCHEDULED, TaskList.ERROR):
            return await self._waiting_ids(queue, which, search, limit, cursor, unsearched)
        async with self._database.connection("listing tasks") as connection:
            if which is TaskList.RUNNING:
                (before,) = read_cursor(cursor, ID) or (None,)
                rows = await connection.fetch(QUERIES["tasks_running"], queue, search, before, limit, unsearched)
                return [row["id"] for row in rows], next_cursor(rows, limit)
            if which is None:
                after: tuple[Any, ...] = read_cursor(cursor, ID) or (None,)
                return await _searched(connection, "tasks_newest", queue, search, limit, after, (unsearched,))
            after = read_cursor(cursor, AT_AND_ID) or (None, None)
            is_cancelled = {TaskList.CANCELLED: True, TaskList.FAILED: False}.get(which)
            name = "tasks_complete" if which is TaskList.COMPLETE else "tasks_failed"
            return await _searched(connection, name, queue, search, limit, after, (is_cancelled, unsearched))

    async def _waiting_ids(
        self,
        queue: str | None,
        which: TaskList,
        search: str | None,
        limit: int,
        cursor: str | None,
        unsearched: Sequence[str],
    ) -> tuple[list[int], str | None]:
        after: tuple[Any, ...]
        status: tuple[TaskStatus, ...] = ()
        if which is TaskList.QUEUED:
            query = "tasks_queued"
            after = read_cursor(cursor, PRIORITY_AND_ID) or (None, None)
        else:
            query = "tasks_scheduled"
            after = read_cursor(cursor, AT_AND_ID) or (None, None)
            status = (TaskStatus.ERROR if which is TaskList.ERROR else TaskStatus.QUEUED,)
        scan = SEARCH_LIMIT if search is not None else limit
        rows: list[Any] = []
        end = None
        until = time.monotonic() + SEARCH_S
        async with (
            self._database.connection("listing tasks") as connection,
            connection.transaction(isolation="repeatable_read"),
        ):
            # One snapshot for both queries: workers claim tasks meanwhile.
            queues = [queue] if queue is not None else (await overview_queues(connection))[0]
            while True:
                wanted = limit - len(rows)
                found = await connection.fetch(
                    QUERIES[query], queues, search, wanted, scan, *after, *status, unsearched
                )
                if search is not None:
                    end = await connection.fetchrow(QUERIES[f"{query}_end"], queues, scan, *after, *status)
                # The next scan reads rows after `end` again: a queue that was not fully scanned may have earlier ones.
                rows += found if end is None else [row for row in found if _claim_order(row) <= _claim_order(end)]
                if len(rows) == limit or end is None or time.monotonic() >= until:
                    return [row["id"] for row in rows], next_cursor(rows, limit, end)
                after = row_key(end)


def _task_error(row: Any) -> TaskError:
    return TaskError(**{**row, "status": TaskStatus(row["status"]) if row["status"] is not None else None})


def _list_of(row: Any) -> TaskList:
    if row["status"] == TaskStatus.QUEUED and row["run_after"] is not None:
        return TaskList.SCHEDULED
    if row["status"] == TaskStatus.FAILED and row["error_code"] == CANCELLED:
        return TaskList.CANCELLED
    return TaskList(row["status"])


async def _searched(
    connection: Any,
    query: str,
    queue: str | None,
    search: str | None,
    limit: int,
    after: tuple[Any, ...],
    more: tuple[Any, ...],
) -> tuple[list[int], str | None]:
    """A page of ids. A search scans blocks of rows until the page is full or SEARCH_S has passed.

    `more`: of lists of finished tasks, whether only cancelled ones or only others are wanted; then the unsearched
    queues.
    """
    is_search = queue is not None or search is not None or (len(more) > 1 and more[0] is not None)
    scan = SEARCH_LIMIT if search is not None else SCAN_LIMIT if is_search else limit
    rows: list[Any] = []
    end = None
    until = time.monotonic() + SEARCH_S
    while True:
        rows += await connection.fetch(QUERIES[query], queue, search, limit - len(rows), scan, *after, *more)
        if len(rows) == limit or not is_search:
            break
        end = await connection.fetchrow(QUERIES[f"{query}_end"], scan, *after)
        if end is None or time.monotonic() >= until:
            break
        after = row_key(end)
    return [row["id"] for row in rows], next_cursor(rows, limit, end)


def _claim_order(row: Any) -> tuple[Any, ...]:
    """Sort key of a queued task: highest priority first. A scheduled task is sorted by its due time."""
    return (-row["priority"], row["id"]) if "priority" in row.keys() else (row["at"], row["id"])  # noqa: SIM118
