"""Handlers in the worker's own loop: for small, trusted, async functions, many at once.

Nothing protects the worker from them: one that blocks holds up its siblings, one that crashes the interpreter takes all
of them along (their tasks go to others when the lease runs out). Heartbeats have their own thread and go on.
"""

import asyncio
import inspect
import json
import types
from collections.abc import Generator
from contextvars import copy_context
from typing import Any

from windlass.model.errors import BadInput, HandlerNotFound
from windlass.model.task import MAX_PAYLOAD_BYTES, Claim, to_json, truncate_error
from windlass.worker.executor import AttemptFailure, AttemptSuccess, Outcome, time_limit_failure, unreadable_payload
from windlass.worker.handler import DoNotRetry, Handler, ReportProgress, RunningTask, kept_exception, load_handler

_NO_RESULT = AttemptSuccess("null")


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
                f"{self._spec} is not an async function, and --inline runs only those: "
                "write `async def`, or leave --inline out."
            )

    async def run(self, claim: Claim, report: ReportProgress) -> Outcome:
        if self._handler is None:
            raise AssertionError("an attempt runs after start()")
        try:
            payload = json.loads(claim.payload)
        except (ValueError, RecursionError) as error:
            return unreadable_payload(error)
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
            return self._accept(result)
        except DoNotRetry as error:
            return AttemptFailure(
                "DO_NOT_RETRY", truncate_error(str(error)) or "the handler said: do not retry", retry=False
            )
        except SystemExit as error:
            return AttemptFailure("HANDLER_ERROR", f"the handler called sys.exit({error.code!r})")
        except BaseException as error:
            if _is_cancelled(error):
                raise
            if isinstance(error, TimeoutError) and claim.timeout_s is not None and limit.expired():
                return time_limit_failure(claim.timeout_s)
            return AttemptFailure("HANDLER_ERROR", kept_exception(error))

    async def close(self) -> None:
        pass

    def _accept(self, result: object) -> Outcome:
        if result is None:
            return _NO_RESULT
        try:
            return AttemptSuccess(to_json(result, "the handler's result", self._max_result_bytes))
        except BadInput as error:
            return AttemptFailure("BAD_RESULT", str(error))


def _is_cancelled(error: BaseException) -> bool:
    """Whether we were, and not something that the handler awaited."""
    attempt = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and attempt is not None and attempt.cancelling() > 0


@types.coroutine
def _in_fresh_context(coroutine: Any) -> Generator[Any, Any, Any]:
    """Await it so that context variables it sets are gone afterwards: a hand runs many attempts in one task."""
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
