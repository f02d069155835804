"""What Hetzner lets everybody with one token ask for.

The vendor's own count, where it says that little is left, slows us down: somebody else uses the project too.
"""

from collections import Counter
from collections.abc import Mapping

from windlass.providers.rate_limiter import RateLimiter

# The vendor gives 3,600 requests an hour, one back every second. A tenth is left to people and other programs.
RATE_PER_S = 0.9
# What may go at once after a rest: a list, prices, and the first hirings, so that a small fleet does not wait. Few, so
# that no minute has more than sixty. (The vendor allows bursts of thousands.)
BURST = 5
# Below this much left of the vendor's allowance, we take half of what comes back.
LOW_REMAINING = 300
_HOUR_S = 3600.0


class HetznerLimiter(RateLimiter):
    def __init__(self, rate_per_s: float = RATE_PER_S, burst: float = BURST) -> None:
        super().__init__(rate_per_s, burst)
        # The fleets that share it, each as often as there are providers of it: while settings change, two.
        self._fleets: Counter[str] = Counter()

    @property
    def fleets(self) -> int:
        return max(1, len(+self._fleets))

    def join(self, fleet: str) -> None:
        self._fleets[fleet] += 1

    def leave(self, fleet: str) -> None:
        self._fleets[fleet] -= 1

    def learn(self, status: int, headers: Mapping[str, str]) -> None:
        """What the vendor said about its own count with an answer."""
        if status == 429:
            self._refused(_number(headers, "Retry-After"))
            return
        limit, remaining = _number(headers, "RateLimit-Limit"), _number(headers, "RateLimit-Remaining")
        rate_per_s = min(self._most_per_s, self._most_per_s * limit / _HOUR_S) if limit else self._most_per_s
        if remaining is not None and remaining < LOW_REMAINING:
            self._accepted(rate_per_s / 2, at_most=1.0)
        else:
            self._accepted(rate_per_s)


def _number(headers: Mapping[str, str], name: str) -> float | None:
    try:
        number = float(headers[name])
    except (KeyError, ValueError):
        return None
    return number if 0 <= number < 1e9 else None
