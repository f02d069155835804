"""One attempt in this very process: whatever a handler does, an outcome comes of it."""

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from windlass.model.errors import BadInput
from windlass.model.task import to_json, truncate_error
from windlass.worker.executor import AttemptFailure, AttemptSuccess, Outcome
from windlass.worker.handler import DoNotRetry, Handler, RunningTask, kept_exception

_NO_RESULT = AttemptSuccess("null")


def run_handler(
    handler: Handler, task: RunningTask, max_result_bytes: int, wait_for: Callable[[Awaitable[Any]], Any]
) -> Outcome:
    """`wait_for` runs what an async handler returned."""
    try:
        result: Any = handler(task)
        if result is None:
            return _NO_RESULT
        if inspect.isawaitable(result):
            result = wait_for(result)
        return _accept(result, max_result_bytes)
    except DoNotRetry as error:
        said = str(error) or "the handler said: do not retry"
        return AttemptFailure("DO_NOT_RETRY", truncate_error(said), retry=False)
    except MemoryError as error:
        return AttemptFailure("OUT_OF_MEMORY", kept_exception(error))
    except SystemExit as error:
        return AttemptFailure("HANDLER_ERROR", f"the handler called sys.exit({error.code!r})")
    except BaseException as error:
        return AttemptFailure("HANDLER_ERROR", kept_exception(error))


def _accept(result: Any, max_result_bytes: int) -> Outcome:
    if result is None:
        return _NO_RESULT
    try:
        return AttemptSuccess(to_json(result, "the handler's result", max_result_bytes))
    except BadInput as error:
        return AttemptFailure("BAD_RESULT", truncate_error(str(error)))
