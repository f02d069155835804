"""Runs an async test in virtual time."""

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

from support.simulator.loop import run


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def wrapped(*arguments: Any, **options: Any) -> None:
        run(test(*arguments, **options))

    return wrapped
