"""One allowance of requests for everybody who shares a credential, by the event loop's clock.

A request waits its turn, or is told that it would wait too long: nothing was sent then. What ends machines or looks at
them goes before what hires: a machine that is not deleted in time is paid for again, one that is hired later is not.
Among equals, whoever goes goes in the order of asking. A pause stops everybody, those who wait already too.
"""

import asyncio

from windlass.model.errors import LONG_PAUSE_S, Throttled

# A pause when the vendor does not say how long; twice as long each time it was not enough.
PAUSE_FIRST_S = 10.0
PAUSE_LONGEST_S = LONG_PAUSE_S
# What is left of a turn by the rounding of fractions.
_NO_TIME_S = 1e-6


class RateLimiter:
    def __init__(self, rate_per_s: float, burst: float) -> None:
        self._most_per_s = rate_per_s
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._left = float(burst)
        self._as_of: float | None = None
        self._paused_until = float("-inf")
        # As the vendor said, however long that is. What ends machines is asked for sooner: they are paid for.
        self._asked_until = float("-inf")
        self._refusals = 0
        # Those who wait, in the order of asking.
        self._urgent: list[object] = []
        self._others: list[object] = []

    async def wait(self, max_wait_s: float, *, is_urgent: bool = False) -> None:
        """Until one request may be sent. Raises Throttled instead of waiting longer than this: at once where that is
        known, later where a pause or more urgent requests came in between."""
        deadline = self._refilled() + max_wait_s + _NO_TIME_S
        me, lane = object(), self._urgent if is_urgent else self._others
        lane.append(me)
        try:
            # Every turn sleeps or ends, and none sleeps past the deadline.
            while True:
                now = self._refilled()
                before_me = lane.index(me) + (0 if is_urgent else len(self._urgent))
                wait_s = max((before_me + 1 - self._left) / self._rate_per_s, self._paused_until - now)
                if wait_s <= _NO_TIME_S:
                    self._left -= 1.0
                    return
                if now + wait_s > deadline:
                    raise Throttled(f"too many requests: the next could be sent in {wait_s:.0f} s", wait_s)
                await asyncio.sleep(wait_s)
        finally:
            lane.remove(me)

    def spare(self) -> int:
        """How many could go at once and leave half of a burst to whoever comes next."""
        now = self._refilled()
        waiting = len(self._urgent) + len(self._others)
        return 0 if now < self._paused_until else max(0, int(self._left - waiting - self._burst / 2))

    @property
    def pause_s(self) -> float:
        """What is left of a pause, as the vendor asked for it."""
        return max(0.0, max(self._paused_until, self._asked_until) - asyncio.get_running_loop().time())

    def _refused(self, retry_after_s: float | None) -> None:
        """The vendor sent a request away. Those that come while a pause lasts were sent before it: they are no reason
        for a longer one, unless the vendor asks for it."""
        now = self._refilled()
        if now >= self._paused_until:
            self._refusals += 1
            pause_s = retry_after_s or PAUSE_FIRST_S * 2.0 ** min(self._refusals - 1, 30)
        else:
            pause_s = retry_after_s or 0.0
        self._paused_until = max(self._paused_until, now + min(pause_s, PAUSE_LONGEST_S))
        self._asked_until = max(self._asked_until, now + (retry_after_s or 0.0))
        self._left = min(self._left, 1.0)

    def _accepted(self, rate_per_s: float, at_most: float = float("inf")) -> None:
        """The vendor took a request. From now on so many a second, of which so many may go at once now."""
        if self._refilled() >= self._paused_until:
            self._refusals = 0
        self._rate_per_s = rate_per_s
        self._left = min(self._left, at_most)

    def _refilled(self) -> float:
        now = asyncio.get_running_loop().time()
        if self._as_of is not None:
            self._left = min(self._burst, self._left + max(0.0, now - self._as_of) * self._rate_per_s)
        self._as_of = now
        return now
