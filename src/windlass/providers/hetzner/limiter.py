"""The request rate of one Hetzner Cloud token.

If the vendor's own counter runs low, another program uses the project too, and the rate is halved.
"""

from collections import Counter
from collections.abc import Mapping

from windlass.providers.rate_limiter import RateLimiter

# The vendor allows 3,600 requests an hour and refills one per second. A tenth is left to people and other programs.
RATE_PER_S = 0.9
# Requests that may be sent at once when idle: a list, prices and the first creations, so that a small fleet does not
# wait. Few enough that no minute has more than sixty. (The vendor allows bursts of thousands.)
BURST = 5
# Below this many remaining requests, use only half of the refill rate.
LOW_REMAINING = 300
_HOUR_S = 3600.0


class HetznerLimiter(RateLimiter):
    def __init__(self, rate_per_s: float = RATE_PER_S, burst: float = BURST) -> None:
        super().__init__(rate_per_s, burst)
        # Number of provider objects per fleet. A fleet has two while its settings change.
        self._fleets: Counter[str] = Counter()

    @property
    def fleet_count(self) -> int:
        return max(1, len(+self._fleets))

    def add_user(self, fleet: str) -> None:
        self._fleets[fleet] += 1

    def remove_user(self, fleet: str) -> None:
        self._fleets[fleet] -= 1

    def record_response(self, status: int, headers: Mapping[str, str]) -> None:
        """Adjust the rate to the vendor's own counter, which each response reports."""
        if status == 429:
            self._record_rejected(_number(headers, "Retry-After"))
            return
        limit, remaining = _number(headers, "RateLimit-Limit"), _number(headers, "RateLimit-Remaining")
        rate_per_s = min(self._max_rate_per_s, self._max_rate_per_s * limit / _HOUR_S) if limit else None
        if remaining is not None and remaining < LOW_REMAINING:
            self._record_accepted((rate_per_s or self._max_rate_per_s) / 2, max_tokens=1.0)
        else:
            self._record_accepted(rate_per_s or self._max_rate_per_s)


def _number(headers: Mapping[str, str], name: str) -> float | None:
    try:
        number = float(headers[name])
    except (KeyError, ValueError):
        return None
    return number if 0 <= number < 1e9 else None
