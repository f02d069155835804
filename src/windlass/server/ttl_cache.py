"""Caches the results of a slow query for a short time, shared by all callers."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

# Bounds the memory. The dashboard asks far fewer different questions.
MAX_ENTRIES = 100

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class TtlCache(Generic[Key, Value]):
    """Values at most `ttl_s` old. One load runs at a time, so that any number of callers use one connection."""

    def __init__(
        self, load: Callable[[Key], Awaitable[Value]], ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._load = load
        self._ttl_s = ttl_s
        self._clock = clock
        self._lock = asyncio.Lock()
        self._entries: OrderedDict[Key, tuple[Value, float]] = OrderedDict()

    async def get(self, key: Key) -> Value:
        if (entry := self._fresh(key)) is not None:
            return entry[0]
        async with self._lock:
            if (entry := self._fresh(key)) is not None:  # loaded by the caller that held the lock before
                return entry[0]
            value = await self._load(key)
            self._entries[key] = value, self._clock() + self._ttl_s
            self._entries.move_to_end(key)
            while len(self._entries) > MAX_ENTRIES:
                self._entries.popitem(last=False)
            return value

    def _fresh(self, key: Key) -> tuple[Value, float] | None:
        entry = self._entries.get(key)
        return entry if entry is not None and self._clock() < entry[1] else None
