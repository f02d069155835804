"""What the author of a handler sees: the task it was given, and how to say that trying again is useless."""

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

# How far an attempt has come, from 0 to 1, and what it is at.
ReportProgress = Callable[[float, str | None], None]


class DoNotRetry(Exception):
    """Raised by a handler: the task can never succeed, so it goes to the dead letters at once."""


@dataclass(frozen=True, slots=True)
class RunningTask:
    """A task as its handler sees it, during one attempt."""

    id: int
    queue: str
    payload: Any
    attempt: int
    max_attempts: int
    # Names this attempt and no other: hand it to what must not happen twice.
    claim_token: str
    _report: ReportProgress = field(repr=False, compare=False)

    def progress(self, fraction: float, note: str | None = None) -> None:
        """Say how far the attempt has come, from 0 to 1, and what it is at. Cheap; call it as often as you like."""
        fraction = float(fraction)
        # A loss that became NaN says nothing about how far the attempt has come, and is no reason to end it.
        if not math.isnan(fraction):
            self._report(min(max(fraction, 0.0), 1.0), None if note is None else str(note)[:MAX_NOTE_CHARACTERS])


Handler = Callable[[RunningTask], Any] | Callable[[RunningTask], Awaitable[Any]]


def kept_exception(error: BaseException) -> str:
    """Its traceback, as far as it is kept. Its type stands in it, however long its message or deep its stack."""
    parts = traceback.format_exception(error)
    return truncate_error("".join(truncate_error(part, MAX_ERROR_CHARACTERS // 2) for part in parts))


def load_handler(spec: str) -> Handler:
    """The callable named by `package.module:function`. Raises HandlerNotFound with what to do."""
    module_name, _, function_name = spec.partition(":")
    if not module_name or not function_name:
        raise HandlerNotFound(f"{spec!r} does not name a handler: write package.module:function.")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise HandlerNotFound(f"cannot import {spec} ({error}). {_hint(module_name, error.name)}") from None
    except (Exception, SystemExit) as error:
        raise HandlerNotFound(
            f"cannot import {spec}: {type(error).__name__}: {error}. Fix the module first."
        ) from error
    for part in function_name.split("."):
        target = getattr(target, part, None)
    if target is None:
        raise HandlerNotFound(f"cannot find {function_name} in {module_name}: check the name after the colon.")
    if not callable(target):
        raise HandlerNotFound(f"{spec} is not callable: a handler is a function that takes the task.")
    try:
        inspect.signature(target).bind(object())
    except TypeError:
        raise HandlerNotFound(f"{spec} does not take one argument: a handler is a function of the task.") from None
    except ValueError:
        pass  # builtins without a signature: the first call will tell
    return target  # type: ignore[no-any-return]


def _hint(module_name: str, missing: str | None) -> str:
    """What to do: the module itself is missing, or one that it imports."""
    if missing is not None and not f"{module_name}.".startswith(f"{missing}."):
        return f"Install {missing} in this environment."
    top, _, rest = module_name.partition(".")
    return f"Run it from the folder that holds {top}{'/' if rest else '.py'}, or set --chdir (chdir of its fleet)."
