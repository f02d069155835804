"""The request rate of one Runpod API key.

The vendor counts requests per minute, hour and day, and each response reports what is left of each window. The limiter
spreads that over the rest of the window, so that no request is rejected. A 429 pauses all requests for as long as it
asks.
"""

import re
from collections.abc import Mapping

from windlass.providers.rate_limiter import RateLimiter

# The rate until a response reports the windows. Published: 60 requests a minute, 3,000 an hour.
RATE_PER_S = 0.8
# Requests that may be sent at once when idle: the list of a cycle and its ten creations.
BURST = 20
# The share of what is left of a window that is used. People and other programs use the account too.
SHARE = 0.8
# The minimum, however little is left: a request is needed to learn of more.
MIN_RATE_PER_S = 1 / 60
_WINDOW = re.compile(r'"[a-z]+";r=(\d{1,9});t=(\d{1,9})')


class RunpodLimiter(RateLimiter):
    def __init__(self, rate_per_s: float = RATE_PER_S, burst: float = BURST) -> None:
        super().__init__(rate_per_s, burst)

    def record_response(self, status: int, headers: Mapping[str, str]) -> None:
        """Adjust the rate to the vendor's own counters, which each response reports."""
        if status == 429:
            text = headers.get("Retry-After", "")
            self._record_rejected(float(text) if text.isdecimal() else None)
            return
        windows = [(int(left), int(reset_s)) for left, reset_s in _WINDOW.findall(headers.get("RateLimit", ""))]
        if not windows:
            self._record_accepted(self._max_rate_per_s)
            return
        fair_per_s = min(left * SHARE / max(reset_s, 1) for left, reset_s in windows)
        rate_per_s = max(MIN_RATE_PER_S, min(self._max_rate_per_s, fair_per_s))
        self._record_accepted(rate_per_s, max_tokens=min(left for left, _ in windows) * SHARE)
