"""Where attempts are told to OpenTelemetry."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from windlass.model.config import Config

if TYPE_CHECKING:
    from windlass.worker.executor import Executor


@asynccontextmanager
async def attempts_traced(config: Config, version: str | None) -> "AsyncIterator[Callable[[Executor], Executor]]":
    """Makes of an executor one whose attempts are told, if that is configured. At the end what is left is sent."""
    if config.logs.traces_endpoint is None:
        yield lambda executor: executor
        return
    from windlass.tracing_spans import Traces
    from windlass.worker.traced_executor import TracedExecutor

    traces = Traces(config.logs.traces_endpoint, "windlass-worker", version or "")
    try:
        yield partial(TracedExecutor, note=traces.note)
    finally:
        await asyncio.to_thread(traces.close)
