"""Runs CPU-bound work in a thread, one call at a time, with a timeout.

A thread cannot be stopped. A call that timed out keeps running, and the next call starts only after it has ended, so
there is never more than one running.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from windlass.server.errors import unavailable

# Includes the wait for earlier calls. A replay of the largest possible fleet takes a tenth of this.
TIMEOUT_S = 10.0

Result = TypeVar("Result")


class SerialExecutor:
    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._lock = asyncio.Lock()

    async def run(self, function: Callable[[], Result]) -> Result:
        """Return or raise what `function` does. Raises ApiError on timeout."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._lock.acquire()
                call = asyncio.ensure_future(asyncio.to_thread(function))
                call.add_done_callback(self._release)
                return await asyncio.shield(call)
        except TimeoutError:
            raise unavailable("the calculation took too long, or is queued behind others: retry later") from None

    def _release(self, call: "asyncio.Future[Result]") -> None:
        self._lock.release()
        if not call.cancelled():
            call.exception()  # the caller may be gone; an unread exception would be logged by asyncio
