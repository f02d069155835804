"""What was looked up a moment ago, kept for whoever asks the same."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

# Different questions whose answers are kept: more than pages have tabs, few enough to weigh nothing.
MAX_KEPT = 100

Question = TypeVar("Question", bound=Hashable)
Answer = TypeVar("Answer")


class TtlCache(Generic[Question, Answer]):
    """Answers at most `fresh_s` old. One question is looked up at a time, so however many ask, it is one connection."""

    def __init__(
        self,
        look_up: Callable[[Question], Awaitable[Answer]],
        fresh_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look_up = look_up
        self._fresh_s = fresh_s
        self._clock = clock
        self._looking = asyncio.Lock()
        self._kept: OrderedDict[Question, tuple[Answer, float]] = OrderedDict()

    async def of(self, question: Question) -> Answer:
        if (known := self._known(question)) is not None:
            return known[0]
        async with self._looking:
            if (known := self._known(question)) is not None:  # whoever was before us asked the same
                return known[0]
            answer = await self._look_up(question)
            self._kept[question] = answer, self._clock() + self._fresh_s
            self._kept.move_to_end(question)
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
            return answer

    def _known(self, question: Question) -> tuple[Answer, float] | None:
        known = self._kept.get(question)
        return known if known is not None and self._clock() < known[1] else None
