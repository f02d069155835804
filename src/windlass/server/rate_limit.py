"""Limits per caller, held in memory: requests per second, and failed logins per address.

Both forget the least recently seen callers above MAX_CALLERS, so that made-up addresses cannot fill the memory.
"""

from collections import OrderedDict
from collections.abc import Callable

from windlass.ports import http
from windlass.server.errors import ApiError

MAX_CALLERS = 10_000
# Wrong tokens and login links from one address: this many at once, then one per FAILURE_INTERVAL_S.
MAX_FAILURES = 20
FAILURE_INTERVAL_S = 3.0


class _LeakyBuckets:
    """Per caller the time at which its bucket is empty again, which also tells how full it is now."""

    def __init__(self, interval_s: float, burst_s: float, clock: Callable[[], float]) -> None:
        self._interval_s = interval_s
        self._burst_s = burst_s
        self._clock = clock
        self._empty_at: OrderedDict[str, float] = OrderedDict()

    def add(self, caller: str, *, is_counted_when_full: bool) -> bool:
        """Count one event. Returns False if the bucket was full."""
        now = self._clock()
        empty_at = max(self._empty_at.get(caller, now), now) + self._interval_s
        has_room = empty_at <= now + self._burst_s
        if has_room or is_counted_when_full:
            self._empty_at[caller] = min(empty_at, now + self._burst_s)
            self._empty_at.move_to_end(caller)
            while len(self._empty_at) > MAX_CALLERS:
                self._empty_at.popitem(last=False)
        return has_room


class FailedLoginLimiter:
    """Answers 429 to an address that keeps sending wrong tokens or login links. Valid ones are never limited."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._buckets = _LeakyBuckets(FAILURE_INTERVAL_S, MAX_FAILURES * FAILURE_INTERVAL_S, clock)

    def add(self, address: str) -> None:
        if not self._buckets.add(address, is_counted_when_full=True):
            message = "too many wrong tokens or links from this address: wait before the next attempt"
            raise ApiError(429, http.TOO_MANY, message, retry_after_s=int(FAILURE_INTERVAL_S))


class RequestRateLimiter:
    """Answers 429 to a caller with more than `limit` requests per second. A burst of one second's worth is allowed."""

    def __init__(self, limit: float, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._buckets = _LeakyBuckets(1.0 / limit, max(1.0, 1.0 / limit), clock)

    def check(self, caller: str) -> None:
        if not self._buckets.add(caller, is_counted_when_full=False):
            raise ApiError(429, http.TOO_MANY, f"more than {self._limit:g} requests per second", retry_after_s=1)
