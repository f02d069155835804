"""One attempt in this very process: whatever a handler does, an outcome comes of it."""

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from windlass.model.errors import BadInput
from windlass.model.task import kept_error, to_json
from windlass.worker.executor import Failure, Outcome, Success
from windlass.worker.handler import DoNotRetry, Handler, RunningTask, kept_exception

_NO_RESULT = Success("null")


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
        return Failure("DO_NOT_RETRY", kept_error(said), retry=False)
    except MemoryError as error:
        return Failure("OUT_OF_MEMORY", kept_exception(error))
    except SystemExit as error:
        return Failure("HANDLER_ERROR", f"the handler called sys.exit({error.code!r})")
    except BaseException as error:
        return Failure("HANDLER_ERROR", kept_exception(error))


def _accept(result: Any, max_result_bytes: int) -> Outcome:
    if result is None:
        return _NO_RESULT
    try:
        return Success(to_json(result, "the handler's result", max_result_bytes))
    except BadInput as error:
        return Failure("BAD_RESULT", kept_error(str(error)))
