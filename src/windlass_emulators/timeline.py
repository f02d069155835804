"""What happens by itself as time passes. Nothing here waits and nothing reads a clock."""

import heapq
import itertools
from collections.abc import Callable
from datetime import datetime, timedelta


class Timeline:
    """`advance` carries out what is due, in order, each at its own moment, however late it is called. `on_moment` is
    told of every moment before anything happens in it."""

    def __init__(self, now: datetime, on_moment: Callable[[datetime], None]) -> None:
        self.now = now
        self._on_moment = on_moment
        self._entries: list[tuple[datetime, int, Callable[[], None]]] = []
        # Of two at the same moment, the one that was planned first.
        self._numbers = itertools.count()

    def advance(self, now: datetime) -> None:
        while self._entries and self._entries[0][0] <= now:
            at, _, happen = heapq.heappop(self._entries)
            self._move_to(at)
            happen()
        self._move_to(now)

    def next_due(self) -> datetime | None:
        return self._entries[0][0] if self._entries else None

    def later(self, delay_s: float, happen: Callable[[], None]) -> None:
        """At once if there is no delay."""
        if delay_s <= 0:
            happen()
        else:
            heapq.heappush(self._entries, (self.now + timedelta(seconds=delay_s), next(self._numbers), happen))

    def _move_to(self, moment: datetime) -> None:
        self.now = max(self.now, moment)
        self._on_moment(self.now)
