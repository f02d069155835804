"""Reads the output of a worker or a task for people, from one of its two sources.

The database has the output that workers send: with times, by attempt, and after the machine is gone. The host of a
local worker also has its log file, which is complete: it is preferred where it can be read, except for queues with
hidden parts of payloads, because only sent output is masked by them.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

from windlass.model.errors import BadInput
from windlass.model.task import TaskStatus
from windlass.model.worker import WorkerStatus
from windlass.model.worker_log import WorkerLogLine, WorkerLogPage
from windlass.ports.fleets import FleetQueries
from windlass.ports.tasks import TaskStore
from windlass.ports.worker_logs import WorkerLogQueries

FOLLOW_INTERVAL_S = 0.5
# Lines of one read while following.
FOLLOW_LINES = 1_000
# Output arrives later than the end of its attempt.
LATE_OUTPUT_S = 3.0


class LogStore(WorkerLogQueries, FleetQueries, TaskStore, Protocol):
    """The store as followers of output read it."""


async def read_worker_log(
    store: WorkerLogQueries, file_lines: AsyncIterator[str] | None, worker_id: str, lines: int
) -> WorkerLogPage:
    """The last lines. `file_lines`: of its log file, if that may be shown; it raises BadInput if this host has none.

    The page of a file has no cursor (0).
    """
    if file_lines is not None:
        try:
            return WorkerLogPage(tuple([WorkerLogLine(None, line, worker_id) async for line in file_lines]))
        except BadInput:
            pass
    return await store.worker_log(worker_id, lines)


async def follow_worker_log(store: LogStore, worker_id: str, cursor: int) -> AsyncIterator[WorkerLogLine]:
    """Lines after the cursor, until the worker has terminated."""
    while True:
        # Read before the lines: a terminated worker sends no more.
        worker = await store.worker(worker_id)
        page = await store.worker_log(worker_id, FOLLOW_LINES, after=cursor)
        cursor = page.cursor
        for line in page.lines:
            yield line
        if not page.lines:
            if worker is None or worker.status is WorkerStatus.TERMINATED:
                return
            await asyncio.sleep(FOLLOW_INTERVAL_S)


async def follow_task_log(
    store: LogStore, task_id: int, cursor: int, *, attempt: int | None = None
) -> AsyncIterator[WorkerLogLine]:
    """Lines after the cursor, until the task has finished; with `attempt`, until that attempt has ended."""
    while True:
        task = await store.task(task_id)
        is_over = task is None or task.status in (TaskStatus.COMPLETE, TaskStatus.FAILED)
        if task is not None and attempt is not None and not is_over:
            is_over = task.attempts > attempt or (task.attempts == attempt and task.status is not TaskStatus.RUNNING)
        if task is not None and task.finished_at is not None:
            is_over = is_over and (await store.now() - task.finished_at).total_seconds() > LATE_OUTPUT_S
        page = await store.task_log(task_id, FOLLOW_LINES, attempt=attempt, after=cursor)
        cursor = page.cursor
        for line in page.lines:
            yield line
        if not page.lines:
            if is_over:
                return
            await asyncio.sleep(FOLLOW_INTERVAL_S)
