"""Runs blocking calls of one notifier in a thread of its own, so that a slow receiver or name lookup delays no other.

In the loop's default threads a blocked call would delay cycles, whose provider calls run there too. A thread cannot be
interrupted: a caller that times out returns, and the next call waits for the thread within its own time limit. There is
never more than one thread per notifier.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

_Value = TypeVar("_Value")


class SingleThreadRunner:
    """Runs one call at a time. A call whose caller has timed out before its turn is not run."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"notify-{name}")
        self._turn = asyncio.Lock()
        # The call in the thread. Its caller may have timed out.
        self._running: asyncio.Future[Any] | None = None

    async def call(self, function: Callable[[], _Value], limit_s: float) -> _Value:
        """Raises TimeoutError after `limit_s`, counted from its turn."""
        async with self._turn, asyncio.timeout(limit_s):
            if self._running is not None:
                await asyncio.wait([self._running])
            running = self._running = asyncio.get_running_loop().run_in_executor(self._thread, function)
            return await asyncio.shield(running)
