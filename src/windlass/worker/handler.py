"""The interface for authors of handlers: the running task, DoNotRetry, and how a handler is found by name."""

import importlib
import inspect
import math
import sys
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from windlass.model.errors import HandlerNotFound
from windlass.model.task import MAX_ERROR_CHARACTERS, MAX_NOTE_CHARACTERS, truncate_error
from windlass.worker.stack_frames import shorten_frames

# Called with the progress of an attempt (0 to 1) and a note.
ReportProgress = Callable[[float, str | None], None]


class DoNotRetry(Exception):
    """Raised by a handler whose task can never succeed: the task fails without further attempts."""


@dataclass(frozen=True, slots=True)
class RunningTask:
    """A task as its handler sees it, during one attempt."""

    id: int
    queue: str
    payload: Any
    attempt: int
    max_attempts: int
    # Unique to this attempt. Use it as an idempotency key for side effects.
    claim_token: str
    _report: ReportProgress = field(repr=False, compare=False)

    def progress(self, fraction: float, note: str | None = None) -> None:
        """Report progress (0 to 1) and a note. Cheap: call it in every iteration."""
        fraction = float(fraction)
        # NaN, for example from a diverged loss, is ignored: it is no reason to fail the attempt.
        if not math.isnan(fraction):
            self._report(min(max(fraction, 0.0), 1.0), None if note is None else str(note)[:MAX_NOTE_CHARACTERS])


Handler = Callable[[RunningTask], Any] | Callable[[RunningTask], Awaitable[Any]]


def format_exception(error: BaseException) -> str:
    """The traceback, truncated. It always contains the exception type and the start of the message.

    Where it is too long, frames of libraries are left out first.
    """
    parts = traceback.format_exception(error)
    if sum(map(len, parts)) > MAX_ERROR_CHARACTERS:
        parts = shorten_frames(parts)
    return truncate_error("".join(truncate_error(part, MAX_ERROR_CHARACTERS // 2) for part in parts))


def load_handler(spec: str) -> Handler:
    """Import `package.module:function`. Raises HandlerNotFound with a message that says what to do."""
    module_name, _, function_name = spec.partition(":")
    if not module_name or not function_name:
        raise HandlerNotFound(f"{spec!r} does not name a handler. Write package.module:function.")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise HandlerNotFound(f"cannot import handler {spec}: {error}. {_hint(module_name, error.name)}") from None
    except (Exception, SystemExit) as error:
        raise HandlerNotFound(
            f"cannot import handler {spec}: {type(error).__name__}: {error}. Fix the module first."
        ) from error
    for part in function_name.split("."):
        target = getattr(target, part, None)
    if target is None:
        raise HandlerNotFound(f"cannot find {function_name} in {module_name}. Check the name after the colon.")
    if not callable(target):
        raise HandlerNotFound(f"{spec} is not callable. A handler is a function that takes the task.")
    try:
        inspect.signature(target).bind(object())
    except TypeError:
        raise HandlerNotFound(f"{spec} does not take one argument. A handler takes the task.") from None
    except ValueError:
        pass  # a builtin without a signature
    return target  # type: ignore[no-any-return]


def _hint(module_name: str, missing: str | None) -> str:
    """What to do if the module, or a module that it imports, is missing."""
    if missing is not None and not f"{module_name}.".startswith(f"{missing}."):
        return f"Install {missing} in this environment."
    top, _, rest = module_name.partition(".")
    return f"Run from the folder that contains {top}{'/' if rest else '.py'}, or set --chdir (in a fleet: chdir)."
