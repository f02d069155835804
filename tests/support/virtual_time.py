"""Runs an async test in virtual time."""

from collections.abc import Callable, Coroutine
from typing import Any

from windlass.simulator.loop import run


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    def wrapped(*arguments: Any, **options: Any) -> None:
        run(test(*arguments, **options))

    wrapped.__name__, wrapped.__doc__ = test.__name__, test.__doc__
    return wrapped
