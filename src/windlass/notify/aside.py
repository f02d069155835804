"""Calls that block, in a thread of their own: what a receiver takes its time for, or the resolver of its name, holds up
that receiver alone. In the loop's threads it would hold up cycles, whose providers are asked in them too."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_Value = TypeVar("_Value")


class Aside:
    """One call after the other. Whoever gives up waiting before its turn is not served any more."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"notify-{name}")

    async def call(self, function: Callable[[], _Value]) -> _Value:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)
