"""Background tasks that run for as long as a context is open.

A background task is meant to run until then. One that fails is logged when it fails: nothing else waits for it.
The client library imports this module, so structlog is imported where it is used.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def background_task(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work` until the context ends, then cancel it and wait for its end."""
    task = asyncio.create_task(work, name=getattr(work, "__qualname__", None))
    task.add_done_callback(_log_failure)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _log_failure(task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        import structlog

        structlog.get_logger(__name__).error("run background task failed", task=task.get_name(), exc_info=error)
