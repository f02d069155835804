"""Runs async handlers in the worker's own event loop: for small, trusted functions, many at once.

Nothing isolates the worker from them. A handler that blocks delays all others; one that crashes the interpreter ends
the worker, and other workers get its tasks after the lease. Heartbeats continue on their own thread.
"""

import asyncio
import inspect
import types
from collections.abc import Generator
from contextvars import copy_context
from typing import Any

from windlass.model.errors import HandlerNotFound
from windlass.model.task import MAX_PAYLOAD_BYTES, Claim, parse_json
from windlass.model.worker_log import AttemptKey
from windlass.worker.attempt import outcome_of_error, outcome_of_result
from windlass.worker.executor import Outcome, bad_payload_failure, timeout_failure
from windlass.worker.handler import Handler, ReportProgress, RunningTask, load_handler
from windlass.worker.output_buffer import current_attempt


class InlineExecutor:
    def __init__(self, handler: str | Handler, *, max_result_bytes: int = MAX_PAYLOAD_BYTES) -> None:
        self._spec = handler
        self._handler: Handler | None = handler if callable(handler) else None
        self._max_result_bytes = max_result_bytes

    async def start(self) -> None:
        if isinstance(self._spec, str):
            self._handler = load_handler(self._spec)
        if not inspect.iscoroutinefunction(self._handler):
            raise HandlerNotFound(
                f"{self._spec} is not an async function, which --inline requires. Write `async def` or omit --inline."
            )

    async def run(self, claim: Claim, report: ReportProgress) -> Outcome:
        if self._handler is None:
            raise AssertionError("run() was called before start()")
        try:
            payload = parse_json(claim.payload)
        except ValueError as error:
            return bad_payload_failure(error)
        # Copied into the contexts of the handler, its tasks and its threads.
        current_attempt.set(AttemptKey(claim.task_id, claim.attempt))
        try:
            task = RunningTask(
                id=claim.task_id,
                queue=claim.queue,
                payload=payload,
                attempt=claim.attempt,
                max_attempts=claim.max_attempts,
                claim_token=str(claim.token),
                _report=report,
            )
            if claim.timeout_s is None:
                result = await _in_fresh_context(self._handler(task))
            else:
                async with asyncio.timeout(claim.timeout_s) as limit:
                    result = await _in_fresh_context(self._handler(task))
            return outcome_of_result(result, self._max_result_bytes)
        except BaseException as error:
            runner = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and runner is not None and runner.cancelling() > 0:
                raise  # the attempt was cancelled, not something that the handler awaited
            if isinstance(error, TimeoutError) and claim.timeout_s is not None and limit.expired():
                return timeout_failure(claim.timeout_s)
            return outcome_of_error(error)
        finally:
            current_attempt.set(None)

    async def close(self) -> None:
        pass


@types.coroutine
def _in_fresh_context(coroutine: Any) -> Generator[Any, Any, Any]:
    """Await in a copy of the context: one runner task runs many attempts, which must not see each other's variables."""
    context = copy_context()
    step: Any = coroutine.send
    argument: Any = None
    while True:
        try:
            awaited = context.run(step, argument)
        except StopIteration as end:
            return end.value
        try:
            step, argument = coroutine.send, (yield awaited)
        except BaseException as error:
            step, argument = coroutine.throw, error
