"""One allowance of requests for everybody who shares a key, by the event loop's clock.

A request waits its turn, or is told at once that it would wait too long: nothing was sent then. The vendor counts by
the minute, the hour and the day, and says with each answer what is left of each: we spread what is left over the time
until it is renewed, so nobody is turned away. A 429 stops everybody for as long as it says.
"""

import asyncio
import re
from collections.abc import Mapping

from windlass.model.errors import Throttled

# Before the vendor has said anything, and where it never does. As published: 60 a minute, 3,000 an hour.
RATE_PER_S = 0.8
# What may go at once after a rest: a cycle's list and its ten hirings.
BURST = 20
# Of what is left of a window, what we take: people and other programs use the account too.
SHARE = 0.8
# A pause when the vendor does not say how long; longer each time it was not enough.
PAUSE_FIRST_S = 10.0
PAUSE_LONGEST_S = 300.0
# However little is left: one request in so long is needed to hear of more.
SLOWEST_PER_S = 1 / 60
_WINDOW = re.compile(r'"[a-z]+";r=(\d{1,9});t=(\d{1,9})')


class Limiter:
    def __init__(self, rate_per_s: float = RATE_PER_S, burst: float = BURST) -> None:
        self._most_per_s = rate_per_s
        self._rate_per_s = rate_per_s
        self._burst = burst
        # Below zero: so many have been promised and wait their turn.
        self._left = float(burst)
        self._as_of: float | None = None
        self._paused_until = float("-inf")
        self._refusals = 0

    async def wait(self, max_wait_s: float) -> None:
        """Until one request may be sent. Raises Throttled instead of waiting longer than this."""
        now = self._refilled()
        turn_s = max(0.0, (1.0 - self._left) / self._rate_per_s)
        wait_s = max(turn_s, self._paused_until - now)
        if wait_s > max_wait_s:
            raise Throttled(f"too many requests: the next could be sent in {wait_s:.0f} s", wait_s)
        self._left -= 1.0
        if wait_s <= 0:
            return
        try:
            await asyncio.sleep(wait_s)
        except asyncio.CancelledError:
            self._left += 1.0
            raise

    def spare(self) -> int:
        """How many could go at once and leave half of a burst to whoever comes next."""
        now = self._refilled()
        return 0 if now < self._paused_until else max(0, int(self._left - self._burst / 2))

    @property
    def pause_s(self) -> float:
        return max(0.0, self._paused_until - asyncio.get_running_loop().time())

    def learn(self, status: int, headers: Mapping[str, str]) -> None:
        """What the vendor said about its own count with an answer."""
        now = self._refilled()
        if status == 429:
            self._refusals += 1
            text = headers.get("Retry-After", "")
            pause_s = float(text) if text.isdecimal() else PAUSE_FIRST_S * 2.0 ** min(self._refusals - 1, 30)
            self._paused_until = max(self._paused_until, now + min(pause_s, PAUSE_LONGEST_S))
            self._left = min(self._left, 1.0)
            return
        self._refusals = 0
        windows = [(int(left), int(renewed_s)) for left, renewed_s in _WINDOW.findall(headers.get("RateLimit", ""))]
        if not windows:
            self._rate_per_s = self._most_per_s
            return
        fair_per_s = min(left * SHARE / max(renewed_s, 1) for left, renewed_s in windows)
        self._rate_per_s = max(SLOWEST_PER_S, min(self._most_per_s, fair_per_s))
        self._left = min(self._left, min(left for left, _ in windows) * SHARE)

    def _refilled(self) -> float:
        now = asyncio.get_running_loop().time()
        if self._as_of is not None:
            self._left = min(self._burst, self._left + max(0.0, now - self._as_of) * self._rate_per_s)
        self._as_of = now
        return now
