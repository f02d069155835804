"""Calls that block, in a thread of their own: what a receiver takes its time for, or the resolver of its name, holds up
that receiver alone. In the loop's threads it would hold up cycles, whose providers are asked in them too.

A thread cannot be made to end. So whoever calls is let go when its time is over, and the next call waits, within its
own time, for the thread: however long a name is looked up, there is one thread, and nobody waits longer than said.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

_Value = TypeVar("_Value")


class SingleThreadRunner:
    """One call after the other. Whoever gives up waiting before its turn is not served any more."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"notify-{name}")
        self._turn = asyncio.Lock()
        # What the thread does, perhaps for somebody who waits no more.
        self._doing: asyncio.Future[Any] | None = None

    async def call(self, function: Callable[[], _Value], limit_s: float) -> _Value:
        """Raises TimeoutError when so much time has passed since its turn."""
        async with self._turn, asyncio.timeout(limit_s):
            if self._doing is not None:
                await asyncio.wait([self._doing])
            doing = self._doing = asyncio.get_running_loop().run_in_executor(self._thread, function)
            return await asyncio.shield(doing)
