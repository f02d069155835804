"""One allowance of requests for everybody who shares a token, by the event loop's clock.

A request waits its turn, or is told at once that it would wait too long: nothing was sent then. Whoever goes goes in
the order of asking. The vendor's own count, where it says that little is left, slows us down: somebody else uses the
project too. A 429 stops everybody for a while, and for twice as long when it comes again.
"""

import asyncio
from collections.abc import Mapping

from windlass.model.errors import Throttled

# The vendor gives 3,600 requests an hour, one back every second. A tenth is left to people and other programs.
RATE_PER_S = 0.9
# What may go at once after a rest: a cycle's list and its ten hirings. The vendor allows bursts of thousands.
BURST = 20
# Below this much left of the vendor's allowance, we take half of what comes back.
LOW_REMAINING = 300
# A pause lets this many requests come back; longer each time it was not enough.
PAUSE_FIRST_S = 10.0
PAUSE_LONGEST_S = 300.0
_HOUR_S = 3600.0


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
            pause_s = _number(headers, "Retry-After") or PAUSE_FIRST_S * 2.0 ** min(self._refusals - 1, 30)
            self._paused_until = max(self._paused_until, now + min(pause_s, PAUSE_LONGEST_S))
            self._left = min(self._left, 1.0)
            return
        self._refusals = 0
        limit, remaining = _number(headers, "RateLimit-Limit"), _number(headers, "RateLimit-Remaining")
        rate_per_s = min(self._most_per_s, self._most_per_s * limit / _HOUR_S) if limit else self._most_per_s
        if remaining is not None and remaining < LOW_REMAINING:
            rate_per_s /= 2
            self._left = min(self._left, 1.0)
        self._rate_per_s = rate_per_s

    def _refilled(self) -> float:
        now = asyncio.get_running_loop().time()
        if self._as_of is not None:
            self._left = min(self._burst, self._left + max(0.0, now - self._as_of) * self._rate_per_s)
        self._as_of = now
        return now


def _number(headers: Mapping[str, str], name: str) -> float | None:
    try:
        number = float(headers[name])
    except (KeyError, ValueError):
        return None
    return number if 0 <= number < 1e9 else None
