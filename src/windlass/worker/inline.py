"""Handlers in the worker's own loop: for small, trusted, async functions, many at once.

Nothing protects the worker from them: one that blocks holds up its siblings, one that crashes the interpreter takes all
of them along (their tasks go to others when the lease runs out). Heartbeats have their own thread and go on.
"""

import asyncio
import inspect
import json
import traceback
from uuid import UUID

from windlass.model.errors import BadInput, HandlerNotFound
from windlass.model.task import MAX_PAYLOAD_BYTES, Claim, to_json
from windlass.worker.executor import Abandoned, Failure, Outcome, ReportProgress, Success, time_limit_failure
from windlass.worker.handler import DoNotRetry, Handler, RunningTask, load_handler


class InlineExecutor:
    def __init__(self, handler: str | Handler, *, max_result_bytes: int = MAX_PAYLOAD_BYTES) -> None:
        self._spec = handler
        self._handler: Handler | None = handler if callable(handler) else None
        self._max_result_bytes = max_result_bytes
        self._attempts: dict[UUID, asyncio.Task[None]] = {}
        self._verdicts: dict[UUID, Outcome] = {}

    async def start(self) -> None:
        if isinstance(self._spec, str):
            self._handler = load_handler(self._spec)
        if not inspect.iscoroutinefunction(self._handler):
            raise HandlerNotFound(
                f"{self._spec} is not an async function, and --inline runs only those: "
                "write `async def`, or leave --inline out."
            )

    async def run(self, claim: Claim, report: ReportProgress) -> Outcome:
        attempt = asyncio.current_task()
        if attempt is None or self._handler is None:
            raise AssertionError("an attempt runs in a task, after start()")
        self._attempts[claim.token] = attempt
        task = RunningTask(
            id=claim.task_id,
            queue=claim.queue,
            payload=json.loads(claim.payload),
            attempt=claim.attempt,
            max_attempts=claim.max_attempts,
            claim_token=str(claim.token),
            _report=report,
        )
        try:
            if claim.timeout_s is None:
                result = await self._handler(task)
            else:
                async with asyncio.timeout(claim.timeout_s) as limit:
                    result = await self._handler(task)
            return Success(to_json(result, "the handler's result", self._max_result_bytes))
        except DoNotRetry as error:
            return Failure("DO_NOT_RETRY", str(error) or "the handler said: do not retry", retry=False)
        except BadInput as error:
            return Failure("BAD_RESULT", str(error))
        except asyncio.CancelledError:
            if claim.token in self._verdicts:
                attempt.uncancel()
                return self._verdicts.pop(claim.token)
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) and claim.timeout_s is not None and limit.expired():
                return time_limit_failure(claim.timeout_s)
            return Failure("HANDLER_ERROR", traceback.format_exc())
        finally:
            del self._attempts[claim.token]

    def abort(self, token: UUID, reason: str) -> None:
        if token in self._attempts:
            self._verdicts[token] = Abandoned(reason)
            self._attempts[token].cancel()

    async def close(self) -> None:
        for token in list(self._attempts):
            self.abort(token, "the worker closed")
