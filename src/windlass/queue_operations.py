"""Operations on all failed, or all queued, tasks of a queue.

Like in operations.py, each operation is one function over the store's ports, and the API, the dashboard and the command
line format its result. They work in batches, so that no transaction grows with the queue.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from windlass.model.auth import EVERYTHING, TokenScope
from windlass.model.plural import plural
from windlass.model.task import TaskStatus, TaskSummary, check_queue_name
from windlass.operations import CANCEL_REASON, OperationOutcome, OperationResult, check_queue_scope
from windlass.ports.tasks import TaskStore

# Failed tasks retried by one database call. It bounds the transaction.
RETRY_BATCH = 1_000
# Tasks that are listed, then cancelled, before the next ones are listed.
CANCEL_BATCH = 5_000
# One database connection per concurrent call.
MAX_CONCURRENT_CALLS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryFailedResult(OperationResult):
    task_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelQueuedResult(OperationResult):
    task_ids: tuple[int, ...] = ()


async def retry_failed_tasks(
    store: TaskStore,
    queue: str,
    *,
    limit: int | None = None,
    include_cancelled: bool = False,
    on_batch: Callable[[int], None] = lambda _count: None,
    scope: TokenScope = EVERYTHING,
) -> RetryFailedResult:
    """Requeue the failed tasks of a queue, oldest first, in batches. Tasks that fail after the start stay failed.

    `limit` None: all of them. `on_batch` is called with the size of each batch.
    """
    check_queue_scope(scope, check_queue_name(queue))
    failed_before, failed_from = await store.now(), None
    done: list[int] = []
    while limit is None or len(done) < limit:
        started_from = failed_from
        batch = RETRY_BATCH if limit is None else min(RETRY_BATCH, limit - len(done))
        # After the last batch the search starts again at the oldest task, for rows that others had locked.
        ids, failed_from = await store.retry_failed(
            queue, failed_before, batch, failed_from=started_from, include_cancelled=include_cancelled
        )
        if not ids and started_from is None:
            break
        done += ids
        on_batch(len(ids))
    if not done:
        message = f"no failed tasks to retry in {queue}"
        return RetryFailedResult(outcome=OperationOutcome.UNCHANGED, message=message)
    message = f"{plural(len(done), 'failed task')} of {queue} requeued"
    return RetryFailedResult(
        outcome=OperationOutcome.DONE, message=message, changed=len(done), task_ids=tuple(sorted(done))
    )


async def cancel_queued_tasks(
    store: TaskStore,
    queue: str,
    reason: str = CANCEL_REASON,
    *,
    on_batch: Callable[[int], None] = lambda _count: None,
    scope: TokenScope = EVERYTHING,
) -> CancelQueuedResult:
    """Cancel the queued and retrying tasks of a queue, newest first. Tasks that have started meanwhile are stopped."""
    check_queue_scope(scope, check_queue_name(queue))
    cancelled: list[int] = []
    semaphore = asyncio.Semaphore(MAX_CONCURRENT_CALLS)

    async def cancel_one(task: TaskSummary) -> None:
        async with semaphore:
            if await store.cancel_task(task.id, reason):
                cancelled.append(task.id)
        on_batch(1)

    for status in (TaskStatus.QUEUED, TaskStatus.ERROR):
        before: str | None = ""
        while before is not None:
            page = await store.task_summaries(
                queue=queue, status=status, limit=CANCEL_BATCH, before_id=int(before) if before else None
            )
            before = page.next_cursor
            async with asyncio.TaskGroup() as group:
                for task in page.rows:
                    group.create_task(cancel_one(task))
    if not cancelled:
        message = f"no queued or retrying tasks to cancel in {queue}"
        return CancelQueuedResult(outcome=OperationOutcome.UNCHANGED, message=message)
    message = f"{plural(len(cancelled), 'unfinished task')} of {queue} cancelled"
    return CancelQueuedResult(
        outcome=OperationOutcome.DONE, message=message, changed=len(cancelled), task_ids=tuple(sorted(cancelled))
    )
