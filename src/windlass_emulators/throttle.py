"""The two ways in which vendors count requests: a refilling bucket, and fixed windows."""

from datetime import datetime, timedelta


class Bucket:
    """A token bucket: starts full with `capacity` requests and regains `capacity` in every `refill_s`."""

    def __init__(self, capacity: int, refill_s: float) -> None:
        self.capacity = capacity
        self._refill_s = refill_s
        self._left = float(capacity)
        self._as_of: datetime | None = None

    def take(self, now: datetime) -> bool:
        """Take one request. False: the bucket is empty."""
        self._refill(now)
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def drain(self, now: datetime) -> None:
        self._refill(now)
        self._left = 0.0

    def remaining(self, now: datetime) -> int:
        self._refill(now)
        return int(self._left)

    def full_at(self, now: datetime) -> datetime:
        self._refill(now)
        return now + timedelta(seconds=(self.capacity - self._left) / self.capacity * self._refill_s)

    def _refill(self, now: datetime) -> None:
        if self._as_of is not None and now > self._as_of:
            gained = (now - self._as_of).total_seconds() / self._refill_s * self.capacity
            self._left = min(float(self.capacity), self._left + gained)
        self._as_of = now if self._as_of is None else max(now, self._as_of)


class Window:
    """`quota` requests per window of `length_s`, aligned to the clock."""

    def __init__(self, name: str, quota: int, length_s: int) -> None:
        self.name = name
        self.quota = quota
        self.length_s = length_s
        self._used = 0
        self._number = -1

    def use(self, now: datetime) -> None:
        self._roll(now)
        self._used += 1

    def drain(self, now: datetime) -> None:
        self._roll(now)
        self._used = self.quota

    def remaining(self, now: datetime) -> int:
        self._roll(now)
        return max(0, self.quota - self._used)

    def resets_in_s(self, now: datetime) -> int:
        """Whole seconds until the next window, rounded up: at least 1."""
        return self.length_s - int(now.timestamp()) % self.length_s

    def _roll(self, now: datetime) -> None:
        number = int(now.timestamp()) // self.length_s
        if number != self._number:
            self._number, self._used = number, 0
