"""What the author of a handler sees: the task it was given, and how to say that trying again is useless."""

import importlib
import inspect
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from windlass.model.errors import HandlerNotFound

ProgressReport = Callable[[float, str | None], None]


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
    _report: ProgressReport = field(repr=False, compare=False)

    def progress(self, fraction: float, note: str | None = None) -> None:
        """Say how far the attempt has come, from 0 to 1, and what it is at. Cheap; call it as often as you like."""
        self._report(min(max(float(fraction), 0.0), 1.0), note)


Handler = Callable[[RunningTask], Any] | Callable[[RunningTask], Awaitable[Any]]


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
        hint = f"Run it from the folder that holds {module_name.split('.')[0]}.py, or set --chdir."
        if error.name != module_name and error.name != module_name.split(".")[0]:
            hint = f"Install {error.name} in this environment."
        raise HandlerNotFound(f"cannot import {spec} ({error}). {hint}") from None
    except Exception as error:
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
