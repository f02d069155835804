"""Runs lookups of callers in the database: few at a time, and with a bounded wait.

Requests that wait for the same key share one lookup. A request joins a lookup only before it begins, so its answer is
never older than the request. A request that finds the queue full, or waits for too long, gets 503 with Retry-After.
A lookup whose clients have all disconnected is not begun. A lookup that has begun always ends, so that its answer is
cached; the store bounds its time.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from windlass.server.errors import unavailable

# Concurrent lookups of unknown tokens. A flood of them leaves most database connections to workers.
MAX_LOOKUPS = 2
# Lookups that wait. A healthy database answers them within about two seconds, and without one they occupy less than
# half of the connections of a server process.
MAX_WAITING_LOOKUPS = 2_000
# Share of them that requests of one address may use. Otherwise one host could keep all others from being looked up.
MAX_SHARE_OF_ADDRESS = 0.5
# From the request to the answer. As long as a new database connection may take, so that a reconnect helps the requests
# that wait for it. Far below the 45 s after which workers time out, so that an answer finds its client.
LOOKUP_WAIT_S = 10.0

Value = TypeVar("Value")


@dataclass(slots=True, eq=False)
class _Lookup(Generic[Value]):
    look_up: Callable[[], Awaitable[Value]]
    # The address of the first request, for which the lookup is counted.
    address: str
    result: "asyncio.Future[Value]"
    # One per request that waits: whether its client has disconnected.
    clients: list[Callable[[], bool]] = field(default_factory=list)


class LookupQueue(Generic[Value]):
    def __init__(self) -> None:
        # By key, in the order of arrival.
        self._waiting: dict[bytes, _Lookup[Value]] = {}
        self._waiting_of: Counter[str] = Counter()
        self._running: dict[bytes, asyncio.Task[None]] = {}

    async def get(
        self,
        key: bytes,
        look_up: Callable[[], Awaitable[Value]],
        address: str,
        has_left: Callable[[], bool] = lambda: False,
    ) -> Value:
        """The result of `look_up`, which begins after this call. Raises as it does, and ApiError 503.

        `has_left`: whether the client has disconnected.
        """
        lookup = self._waiting.get(key) or self._add(key, look_up, address)
        lookup.clients.append(has_left)
        self._start_next()
        try:
            async with asyncio.timeout(LOOKUP_WAIT_S):
                # The others that wait for this lookup do not end with this request.
                return await asyncio.shield(lookup.result)
        except TimeoutError:
            raise unavailable("the control plane's database did not identify the caller in time: retry") from None
        finally:
            lookup.clients.remove(has_left)
            if not lookup.clients and self._waiting.get(key) is lookup:
                self._remove(key)

    def _add(self, key: bytes, look_up: Callable[[], Awaitable[Value]], address: str) -> _Lookup[Value]:
        is_full = len(self._waiting) >= MAX_WAITING_LOOKUPS
        if is_full or self._waiting_of[address] >= MAX_WAITING_LOOKUPS * MAX_SHARE_OF_ADDRESS:
            raise unavailable("too many callers wait to be identified: retry")
        lookup = self._waiting[key] = _Lookup(look_up, address, asyncio.get_running_loop().create_future())
        self._waiting_of[address] += 1
        return lookup

    def _remove(self, key: bytes) -> _Lookup[Value]:
        lookup = self._waiting.pop(key)
        self._waiting_of[lookup.address] -= 1
        if not self._waiting_of[lookup.address]:
            del self._waiting_of[lookup.address]
        return lookup

    def _start_next(self) -> None:
        while len(self._running) < MAX_LOOKUPS:
            # A second lookup of the same key waits for the first, whose answer may be cached then.
            key = next((key for key in self._waiting if key not in self._running), None)
            if key is None:
                return
            lookup = self._remove(key)
            if all(has_left() for has_left in lookup.clients):
                lookup.result.set_exception(unavailable("the client has disconnected"))
            else:
                self._running[key] = asyncio.create_task(self._run(key, lookup))

    async def _run(self, key: bytes, lookup: _Lookup[Value]) -> None:
        try:
            value = await lookup.look_up()
        except Exception as error:
            if lookup.clients:  # asyncio logs an error that no one awaits
                lookup.result.set_exception(error)
        else:
            lookup.result.set_result(value)
        del self._running[key]
        self._start_next()
