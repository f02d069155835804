"""Limits per caller: requests per second and at the same time, failed logins and refused requests per address.

Buckets are held in memory, for at most MAX_CALLERS callers, so that made-up addresses cannot fill it. With several
server processes, callers that use a good part of their limit are shared through the database about once a second, and
each process then grants them its share of the limit (`RateSharing`). So all processes together enforce about the limit.
"""

import asyncio
import contextlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from uuid import uuid4

from windlass.model.errors import WindlassError
from windlass.ports import http
from windlass.ports.auth import AuthStore
from windlass.server.errors import ApiError

MAX_CALLERS = 10_000
# Wrong tokens and login links from one address: this many at once, then one per FAILURE_INTERVAL_S.
MAX_FAILURES = 20
FAILURE_INTERVAL_S = 3.0
# Requests that are refused before their body is read, per caller or address. Further ones are answered late.
MAX_REFUSALS_PER_S = 50.0
# A worker's call counts as one, plus one for each of these bytes in its body: 64 MB per second at its limit.
BYTES_PER_REQUEST = 32 * 1024
# Calls of one worker that are handled at the same time: a worker claims, finishes, sends heartbeats and output, runs
# maintenance, and reports some failures.
MAX_CALLS_PER_WORKER = 8
# Calls of one worker that are not answered yet: handled, waiting for their turn, and waiting for work. A worker opens
# four connections. Each call keeps a connection, and one with a call is never closed for a new one.
MAX_OPEN_CALLS_PER_WORKER = 32
# The same for one token or session, which a person's programs may share.
MAX_OPEN_CALLS = 256
# Large bodies of one worker at the same time: a batch of results, and output.
MAX_LARGE_PER_WORKER = 2
SHARE_INTERVAL_S = 1.0
# Callers above this part of their limit are shared, and at most this many.
SHARED_PART = 0.1
MAX_SHARED_CALLERS = 200


class LeakyBuckets:
    """Per caller the time at which its bucket is empty again, which also tells how full it is now."""

    def __init__(self, kind: str, interval_s: float, burst_s: float, clock: Callable[[], float]) -> None:
        """`kind` distinguishes these callers from those of other buckets when they are shared."""
        self.kind = kind
        self._interval_s = interval_s
        self._burst_s = burst_s
        self._clock = clock
        self._empty_at: OrderedDict[str, float] = OrderedDict()
        # Events since the last `take_rates`, whether they fitted or not.
        self._events: dict[str, float] = {}
        self._counted_since = clock()
        # The part of the limit that this process grants, for callers that use others too.
        self._shares: Mapping[str, float] = {}

    def add(self, caller: str, events: float = 1.0, *, is_counted_when_full: bool) -> bool:
        """Count events. Returns False if they did not fit."""
        now = self._clock()
        counted = self._events.get(caller)
        if counted is not None:
            self._events[caller] = counted + events
        elif len(self._events) < MAX_CALLERS:
            self._events[caller] = events
        step_s = events * self._interval_s
        if self._shares:
            step_s /= self._shares.get(caller, 1.0)
        full_at = now + self._burst_s
        empty_at = max(self._empty_at.get(caller, now), now)
        # An event that is larger than the bucket fits into an empty one.
        has_room = empty_at + step_s <= full_at or (step_s > self._burst_s and empty_at <= now)
        if has_room or is_counted_when_full:
            self._empty_at[caller] = empty_at + step_s if has_room else full_at
            self._empty_at.move_to_end(caller)
            while len(self._empty_at) > MAX_CALLERS:
                self._empty_at.popitem(last=False)
        return has_room

    def has_room(self, caller: str) -> bool:
        """Whether one event would fit. Counts nothing."""
        now = self._clock()
        step_s = self._interval_s / self._shares.get(caller, 1.0)
        return max(self._empty_at.get(caller, now), now) + step_s <= now + self._burst_s

    def take_rates(self) -> dict[str, float]:
        """Events per second since the last call, of the callers above SHARED_PART of the limit."""
        now = self._clock()
        elapsed_s, events = max(now - self._counted_since, 1e-3), self._events
        self._events, self._counted_since = {}, now
        least = SHARED_PART / self._interval_s * elapsed_s
        return {caller: count / elapsed_s for caller, count in events.items() if count >= least}

    def set_shares(self, shares: Mapping[str, float]) -> None:
        self._shares = shares


class FailedLoginLimiter(LeakyBuckets):
    """Answers 429 to an address that keeps sending wrong tokens or login links. Valid ones are never limited.

    `check` limits all attempts of such an address, where already the attempt is expensive.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__("failure", FAILURE_INTERVAL_S, MAX_FAILURES * FAILURE_INTERVAL_S, clock)

    def count(self, address: str) -> None:
        if not self.add(address, is_counted_when_full=True):
            raise _too_many_failures()

    def check(self, address: str) -> None:
        """Counts nothing."""
        if not self.has_room(address):
            raise _too_many_failures()


def _too_many_failures() -> ApiError:
    message = "too many wrong tokens or links from this address: wait before the next attempt"
    return ApiError(429, http.TOO_MANY, message, retry_after_s=int(FAILURE_INTERVAL_S))


class RequestRateLimiter(LeakyBuckets):
    """Answers 429 to a caller with more than `limit` requests per second. A burst of one second's worth is allowed."""

    def __init__(self, kind: str, limit: float, clock: Callable[[], float]) -> None:
        super().__init__(kind, 1.0 / limit, max(1.0, 1.0 / limit), clock)
        self._limit = limit

    def check(self, caller: str, requests: float = 1.0) -> None:
        if not self.add(caller, requests, is_counted_when_full=False):
            raise ApiError(429, http.TOO_MANY, f"more than {self._limit:g} requests per second", retry_after_s=1)


class ConcurrencyLimiter:
    """Answers 429 to a caller with too many requests of a kind at the same time."""

    def __init__(self, what: str) -> None:
        """`what`: the kind, for the error."""
        self._what = what
        self._counts: Counter[str] = Counter()

    def begin(self, caller: str, limit: int) -> None:
        """Unless this raises ApiError, `end` must follow."""
        if self._counts[caller] >= limit:
            raise ApiError(429, http.TOO_MANY, f"more than {limit} {self._what} at the same time", retry_after_s=1)
        self._counts[caller] += 1

    def end(self, caller: str) -> None:
        self._counts[caller] -= 1
        if not self._counts[caller]:
            del self._counts[caller]


class WorkerTurns:
    """At most MAX_CALLS_PER_WORKER calls of one worker are handled at the same time; further ones wait unread.

    So one worker, however many connections it opens, delays the calls of others by a few of its own only, and leaves
    database connections to them.
    """

    def __init__(self) -> None:
        # By worker, with the number of calls that are handled or wait.
        self._turns: dict[str, tuple[asyncio.Semaphore, int]] = {}

    async def begin(self, worker_id: str) -> None:
        """`end` must follow, unless this raises."""
        turn, calls = self._turns.get(worker_id) or (asyncio.Semaphore(MAX_CALLS_PER_WORKER), 0)
        self._turns[worker_id] = turn, calls + 1
        try:
            await turn.acquire()
        except BaseException:
            self._leave(worker_id)
            raise

    def end(self, worker_id: str) -> None:
        self._turns[worker_id][0].release()
        self._leave(worker_id)

    def _leave(self, worker_id: str) -> None:
        turn, calls = self._turns.pop(worker_id)
        if calls > 1:
            self._turns[worker_id] = turn, calls - 1


class RateSharing:
    """Shares the rates of heavy callers with the other server processes, so that they use one limit together."""

    def __init__(self, store: AuthStore, buckets: Iterable[LeakyBuckets]) -> None:
        self._store = store
        self._buckets = {each.kind: each for each in buckets}
        self._server_id = uuid4()
        self._has_shared = False

    async def run(self) -> None:
        while True:
            await asyncio.sleep(SHARE_INTERVAL_S)
            # Without the database each process uses the last shares; other calls report that it is unavailable.
            with contextlib.suppress(WindlassError):
                await self.share()

    async def share(self) -> None:
        rates = {
            (kind, caller): rate for kind, each in self._buckets.items() for caller, rate in each.take_rates().items()
        }
        heaviest = sorted(rates, key=lambda key: rates[key], reverse=True)[:MAX_SHARED_CALLERS]
        if not heaviest and not self._has_shared:
            return  # the usual case costs nothing
        totals = await self._store.share_rates(self._server_id, {key: rates[key] for key in heaviest})
        self._has_shared = bool(heaviest)
        for kind, each in self._buckets.items():
            each.set_shares(
                {
                    caller: min(1.0, rates[kind, caller] / total)
                    for (shared_kind, caller), total in totals.items()
                    if shared_kind == kind and total > rates[kind, caller]
                }
            )
