"""Turns what a handler returns or raises into the outcome of an attempt. Nothing a handler raises escapes."""

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from windlass.model.errors import BadInput
from windlass.model.task import to_json, truncate_error
from windlass.worker.executor import AttemptFailure, AttemptSuccess, Outcome
from windlass.worker.handler import DoNotRetry, Handler, RunningTask, format_exception

_NO_RESULT = AttemptSuccess("null")


def run_handler(
    handler: Handler, task: RunningTask, max_result_bytes: int, wait_for: Callable[[Awaitable[Any]], Any]
) -> Outcome:
    """`wait_for` runs the awaitable that an async handler returns."""
    try:
        result: Any = handler(task)
        if inspect.isawaitable(result):
            result = wait_for(result)
        return outcome_of_result(result, max_result_bytes)
    except BaseException as error:
        return outcome_of_error(error)


def outcome_of_result(result: Any, max_result_bytes: int) -> Outcome:
    if result is None:
        return _NO_RESULT
    try:
        return AttemptSuccess(to_json(result, "the handler's result", max_result_bytes))
    except BadInput as error:
        return AttemptFailure("BAD_RESULT", truncate_error(str(error)))


def outcome_of_error(error: BaseException) -> AttemptFailure:
    if isinstance(error, DoNotRetry):
        reason = truncate_error(str(error)) or "the handler raised DoNotRetry"
        return AttemptFailure("DO_NOT_RETRY", reason, retry=False)
    if isinstance(error, MemoryError):
        return AttemptFailure("OUT_OF_MEMORY", format_exception(error))
    if isinstance(error, SystemExit):
        return AttemptFailure("HANDLER_ERROR", f"the handler called sys.exit({error.code!r})")
    return AttemptFailure("HANDLER_ERROR", format_exception(error))
