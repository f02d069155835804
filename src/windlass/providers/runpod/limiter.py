"""What Runpod lets everybody with one key ask for.

The vendor counts by the minute, the hour and the day, and says with each answer what is left of each: we spread what is
left over the time until it is renewed, so nobody is turned away. A 429 stops everybody for as long as it says.
"""

import re
from collections.abc import Mapping

from windlass.providers.rate_limiter import RateLimiter

# Before the vendor has said anything, and where it never does. As published: 60 a minute, 3,000 an hour.
RATE_PER_S = 0.8
# What may go at once after a rest: a cycle's list and its ten hirings.
BURST = 20
# Of what is left of a window, what we take: people and other programs use the account too.
SHARE = 0.8
# However little is left: one request in so long is needed to hear of more.
SLOWEST_PER_S = 1 / 60
_WINDOW = re.compile(r'"[a-z]+";r=(\d{1,9});t=(\d{1,9})')


class RunpodLimiter(RateLimiter):
    def __init__(self, rate_per_s: float = RATE_PER_S, burst: float = BURST) -> None:
        super().__init__(rate_per_s, burst)

    def learn(self, status: int, headers: Mapping[str, str]) -> None:
        """What the vendor said about its own count with an answer."""
        if status == 429:
            text = headers.get("Retry-After", "")
            self._refused(float(text) if text.isdecimal() else None)
            return
        windows = [(int(left), int(renewed_s)) for left, renewed_s in _WINDOW.findall(headers.get("RateLimit", ""))]
        if not windows:
            self._accepted(self._most_per_s)
            return
        fair_per_s = min(left * SHARE / max(renewed_s, 1) for left, renewed_s in windows)
        rate_per_s = max(SLOWEST_PER_S, min(self._most_per_s, fair_per_s))
        self._accepted(rate_per_s, at_most=min(left for left, _ in windows) * SHARE)
