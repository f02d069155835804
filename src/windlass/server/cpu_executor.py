"""Thinking that takes a while, beside the loop that answers everybody: one thing at a time, and within a time.

Nobody can stop a thread. What did not end in time goes on until it does, and only then is it another's turn: however
many ask, it is never more than one.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from windlass.server.errors import unavailable

# From asking to the answer, others' turns included. The largest fleet there can be takes a tenth of it.
LIMIT_S = 10.0

Thought = TypeVar("Thought")


class SerialExecutor:
    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._turn = asyncio.Lock()

    async def about(self, think: Callable[[], Thought]) -> Thought:
        """What `think` returns or raises; an ApiError if that takes too long."""
        try:
            async with asyncio.timeout(self._limit_s):
                await self._turn.acquire()
                thought = asyncio.ensure_future(asyncio.to_thread(think))
                thought.add_done_callback(self._end_turn)
                return await asyncio.shield(thought)
        except TimeoutError:
            raise unavailable("this takes too long to work out now, or others are before it: ask again.") from None

    def _end_turn(self, thought: "asyncio.Future[Thought]") -> None:
        self._turn.release()
        if not thought.cancelled():
            thought.exception()  # whoever asked may be gone: it is nobody's news then
