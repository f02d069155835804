"""One token bucket for all requests with the same credential, by the event loop's clock.

A request waits for its turn, or fails with Throttled if it would wait too long; nothing was sent then. Urgent requests
(deletions and lists) go before creations: a machine that is deleted late is billed for longer, one that is created late
is not. Within each class requests go in the order of arrival. A pause that the vendor asks for stops all requests,
including those that already wait.
"""

import asyncio

from windlass.model.errors import LONG_PAUSE_S, Throttled

# The pause after a 429 without Retry-After. It doubles with each further 429 after a pause.
FIRST_PAUSE_S = 10.0
MAX_PAUSE_S = LONG_PAUSE_S
# Tolerance for floating-point rounding.
_EPSILON_S = 1e-6


class RateLimiter:
    def __init__(self, rate_per_s: float, burst: float) -> None:
        self._max_rate_per_s = rate_per_s
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._tokens = float(burst)
        self._refilled_at: float | None = None
        self._paused_until = float("-inf")
        # The pause that the vendor asked for, without MAX_PAUSE_S. Deletions resume sooner: their machines are billed.
        self._vendor_pause_until = float("-inf")
        self._rejections = 0
        # Waiting requests in the order of arrival.
        self._urgent: list[object] = []
        self._normal: list[object] = []

    async def wait(self, max_wait_s: float, *, is_urgent: bool = False) -> None:
        """Wait until one request may be sent. Raises Throttled instead of waiting longer than `max_wait_s`: at once if
        that is already certain, or later if a pause or more urgent requests arrive meanwhile."""
        deadline = self._refill() + max_wait_s + _EPSILON_S
        ticket, lane = object(), self._urgent if is_urgent else self._normal
        lane.append(ticket)
        try:
            # Each iteration sleeps or ends, and none sleeps past the deadline.
            while True:
                now = self._refill()
                ahead = lane.index(ticket) + (0 if is_urgent else len(self._urgent))
                wait_s = max((ahead + 1 - self._tokens) / self._rate_per_s, self._paused_until - now)
                if wait_s <= _EPSILON_S:
                    self._tokens -= 1.0
                    return
                if now + wait_s > deadline:
                    raise Throttled(f"request rate limit reached, next request in {wait_s:.0f} s", wait_s)
                await asyncio.sleep(wait_s)
        finally:
            lane.remove(ticket)

    def spare_requests(self) -> int:
        """How many requests could be sent now and leave half of the burst for others."""
        now = self._refill()
        waiting = len(self._urgent) + len(self._normal)
        return 0 if now < self._paused_until else max(0, int(self._tokens - waiting - self._burst / 2))

    @property
    def pause_s(self) -> float:
        """The rest of the current pause, as the vendor asked for it."""
        return max(0.0, max(self._paused_until, self._vendor_pause_until) - asyncio.get_running_loop().time())

    def _record_rejected(self, retry_after_s: float | None) -> None:
        """The vendor answered 429. One that arrives during a pause answers a request sent before the pause. It extends
        the pause only if the vendor asks for that."""
        now = self._refill()
        if now >= self._paused_until:
            self._rejections += 1
            pause_s = retry_after_s or FIRST_PAUSE_S * 2.0 ** min(self._rejections - 1, 30)
        else:
            pause_s = retry_after_s or 0.0
        self._paused_until = max(self._paused_until, now + min(pause_s, MAX_PAUSE_S))
        self._vendor_pause_until = max(self._vendor_pause_until, now + (retry_after_s or 0.0))
        self._tokens = min(self._tokens, 1.0)

    def _record_accepted(self, rate_per_s: float, max_tokens: float = float("inf")) -> None:
        """The vendor accepted a request. Continue at this rate, with at most this many requests at once."""
        if self._refill() >= self._paused_until:
            self._rejections = 0
        self._rate_per_s = rate_per_s
        self._tokens = min(self._tokens, max_tokens)

    def _refill(self) -> float:
        """Add the tokens earned since the last call. Returns the current time."""
        now = asyncio.get_running_loop().time()
        if self._refilled_at is not None:
            self._tokens = min(self._burst, self._tokens + max(0.0, now - self._refilled_at) * self._rate_per_s)
        self._refilled_at = now
        return now
