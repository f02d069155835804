"""Scheduled changes of an emulated cloud. Nothing here waits or reads a clock."""

import heapq
import itertools
from collections.abc import Callable
from datetime import datetime, timedelta


class Timeline:
    """Runs scheduled changes in order, each at its own time, however late `advance` is called.

    `set_now` receives every point in time before the changes of that time run.
    """

    def __init__(self, now: datetime, set_now: Callable[[datetime], None]) -> None:
        self.now = now
        self._set_now = set_now
        # (time, sequence number, change). The number keeps changes of the same time in the order they were scheduled.
        self._entries: list[tuple[datetime, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def advance(self, now: datetime) -> None:
        while self._entries and self._entries[0][0] <= now:
            at, _, change = heapq.heappop(self._entries)
            self._move_to(at)
            change()
        self._move_to(now)

    def next_due(self) -> datetime | None:
        return self._entries[0][0] if self._entries else None

    def later(self, delay_s: float, change: Callable[[], None]) -> None:
        """Schedule a change. Without a delay it runs at once."""
        if delay_s <= 0:
            change()
        else:
            heapq.heappush(self._entries, (self.now + timedelta(seconds=delay_s), next(self._numbers), change))

    def _move_to(self, moment: datetime) -> None:
        self.now = max(self.now, moment)
        self._set_now(self.now)
