"""One Hetzner Cloud project, shared by all fleets with its token: the vendor's SDK in threads, rate limited.

Each call of the SDK sends exactly one request, has a time limit and passes the limiter. Pages are therefore requested
one by one, and the SDK's own retries are turned off. By default the SDK has no time limit and repeats an unanswered
creation up to five times, with pauses of up to a minute, outside our limiter. Actions are not awaited either: the next
list shows their outcome.
"""

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar

import hcloud
import requests
import structlog
from hcloud.core import Meta
from requests.adapters import BaseAdapter, HTTPAdapter

from windlass.model.errors import Throttled
from windlass.model.hetzner import HETZNER_ENDPOINT, Choice
from windlass.providers.fingerprint import fingerprint
from windlass.providers.hetzner.catalog import PriceList, read_prices
from windlass.providers.hetzner.errors import LimitKind, to_vendor_error
from windlass.providers.hetzner.limiter import HetznerLimiter
from windlass.providers.vendor_error import ErrorKind

# Longest wait for the limiter. A request that would wait longer is left to a later cycle.
MAX_WAIT_S = 25.0
# Pause before a request that collided with another action is repeated. It grows with each attempt.
BUSY_PAUSE_S = 1.0
PAGE_SIZE = 50
# 5,000 entries: far beyond the limits of any project.
MAX_PAGES = 100
# More requests than the limiter allows in flight: a burst, and those refilled while the slowest response is awaited.
# Slow creations must not delay a list.
MAX_THREADS = 80
CONNECT_TIMEOUT_S = 5.0
# The time limit of the SDK is per read. A response that arrives in small pieces is abandoned this much later.
TRICKLE_S = 10.0
# Prices change a few times a year.
PRICES_FRESH_S = 6 * 3600.0
# Stock changes all the time and is only a hint.
STOCK_FRESH_S = 300.0
# After a failed request: stock is dispensable, prices are not.
STOCK_RETRY_S = 60.0
PRICES_RETRY_S = 10.0
log = structlog.get_logger(__name__)
T = TypeVar("T")


class ThreadRunner(Protocol):
    """Runs a blocking call without blocking the loop. Raises TimeoutError this long after the call began."""

    def __call__(self, call: Callable[[], T], timeout_s: float) -> Awaitable[T]: ...


class ApiPage(Protocol):
    """One page of a list, as the SDK returns it."""

    @property
    def meta(self) -> Meta: ...


P = TypeVar("P", bound=ApiPage)


class _TimeoutAdapter(BaseAdapter):
    """Sets the time limit of every request and keeps the rate limit headers, which the SDK does not expose."""

    def __init__(self, inner: BaseAdapter, timeout_s: float) -> None:
        super().__init__()
        self._inner = inner
        self.timeout_s = timeout_s
        # Written by threads, read by the event loop.
        self.rate_headers: deque[tuple[int, Mapping[str, str]]] = deque(maxlen=MAX_THREADS)

    def send(self, request: requests.PreparedRequest, *arguments: Any, **options: Any) -> requests.Response:
        options["timeout"] = (min(CONNECT_TIMEOUT_S, self.timeout_s), self.timeout_s)
        response = self._inner.send(request, *arguments, **options)
        self.rate_headers.append((response.status_code, response.headers))
        return response

    def close(self) -> None:
        self._inner.close()


class HetznerAccount:
    """`run` and `adapter` replace threads and sockets in tests."""

    def __init__(
        self,
        token: str,
        *,
        endpoint: str = HETZNER_ENDPOINT,
        timeout_s: float = 20.0,
        limiter: HetznerLimiter | None = None,
        run: ThreadRunner | None = None,
        adapter: BaseAdapter | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._rng = rng or random.Random()  # noqa: S311
        self.limiter = limiter or HetznerLimiter()
        self.key_hash = fingerprint(endpoint, token)
        self._adapter = _TimeoutAdapter(adapter or HTTPAdapter(pool_maxsize=MAX_THREADS), timeout_s)
        self.api = _connect(token, endpoint, self._adapter)
        self._pool: ThreadPoolExecutor | None = None
        self._users = 0
        self._run: ThreadRunner = run or self._run_in_thread
        # When a choice without capacity may be tried again.
        self._exhausted: dict[Choice, float] = {}
        # Server types of which the project may have no more: when to retry, and the vendor's message.
        self._limited_types: dict[str, tuple[float, str]] = {}
        # "shared" or "dedicated", as far as the vendor reported it.
        self._cpu_types: dict[str, str] = {}
        self._prices: dict[str, PriceList] = {}
        self._prices_due = float("-inf")
        self._prices_lock = asyncio.Lock()
        self._out_of_stock: dict[str, set[Choice]] = {}
        self._stock_due: dict[str, float] = {}

    @property
    def timeout_s(self) -> float:
        return self._adapter.timeout_s

    def raise_timeout(self, timeout_s: float) -> None:
        """Fleets that share the account share the longest of their time limits."""
        self._adapter.timeout_s = max(self._adapter.timeout_s, timeout_s)

    async def send(self, call: Callable[[], T], *, max_wait_s: float, is_urgent: bool = False) -> T:
        """Send one request. Raises what the SDK raises, TimeoutError, or Throttled if nothing was sent."""
        await self.limiter.wait(max_wait_s, is_urgent=is_urgent)
        try:
            return await self._run(call, self._adapter.timeout_s + TRICKLE_S)
        finally:
            while self._adapter.rate_headers:
                self.limiter.record_response(*self._adapter.rate_headers.popleft())

    async def request(self, call: Callable[[], T], *, attempts: int = 1, is_urgent: bool = False) -> T:
        """Send a request, and repeat it if it collided with another action. Raises VendorError or Throttled."""
        for attempt in range(1, attempts + 1):
            try:
                return await self.send(call, max_wait_s=MAX_WAIT_S, is_urgent=is_urgent)
            except Throttled:
                raise
            except Exception as error:
                failure = to_vendor_error(error)
                if failure.kind is not ErrorKind.BUSY or attempt == attempts:
                    raise failure from error
            await asyncio.sleep(BUSY_PAUSE_S * attempt * (0.5 + self._rng.random()))
        raise AssertionError("the last attempt returns or raises")

    async def request_all_pages(self, get_page: Callable[[int], P]) -> list[P]:
        """All pages of a list, which may change meanwhile. Raises VendorError or Throttled."""
        pages: list[P] = []
        number: int | None = 1
        while number is not None and number <= MAX_PAGES:
            page = await self.request(partial(get_page, number))
            pages.append(page)
            number = page.meta.pagination.next_page if page.meta and page.meta.pagination else None
        return pages

    async def _run_in_thread(self, call: Callable[[], T], timeout_s: float) -> T:
        """Raises Throttled if no thread became free: nothing was sent then."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="hetzner")
        loop, begun = asyncio.get_running_loop(), asyncio.Event()

        def begin() -> T:
            loop.call_soon_threadsafe(begun.set)
            return call()

        job = self._pool.submit(begin)
        try:
            try:
                async with asyncio.timeout(MAX_WAIT_S):
                    await begun.wait()
            except TimeoutError:
                if job.cancel():
                    raise Throttled("too many requests in flight", BUSY_PAUSE_S) from None
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(job)
        finally:
            # If the caller was cancelled, a call that has not begun must never begin.
            job.cancel()

    # -------------------------------------------------------------------------------------------------- capacity

    def record_no_capacity(self, choice: Choice, for_s: float) -> None:
        self._exhausted[choice] = asyncio.get_running_loop().time() + for_s

    def exhausted(self) -> set[Choice]:
        """Choices that had no capacity recently."""
        now = asyncio.get_running_loop().time()
        self._exhausted = {choice: until for choice, until in self._exhausted.items() if until > now}
        return set(self._exhausted)

    def record_limit(self, kind: LimitKind, server_types: Collection[str], message: str, for_s: float) -> None:
        """A limit of the project is reached. `server_types`: those that were asked for, and others of the fleet."""
        until = asyncio.get_running_loop().time() + for_s
        for name in server_types:
            if kind is not LimitKind.DEDICATED_CORES or self.is_dedicated(name):
                self._limited_types[name] = (until, message)

    def limited(self) -> dict[str, str]:
        """Server types that a limit of the project excludes, with the vendor's message."""
        now = asyncio.get_running_loop().time()
        self._limited_types = {name: entry for name, entry in self._limited_types.items() if entry[0] > now}
        return {name: message for name, (_, message) in self._limited_types.items()}

    def forget_limits(self) -> None:
        self._limited_types.clear()

    def is_dedicated(self, server_type: str) -> bool:
        """Whether its cores count towards the limit of dedicated cores."""
        return self._cpu_types.get(server_type, "dedicated" if server_type.startswith("ccx") else "") == "dedicated"

    async def out_of_stock(self, server_types: set[str], max_wait_s: float) -> set[Choice]:
        """Choices that the vendor reports as unavailable. Unknown counts as available."""
        loop, found = asyncio.get_running_loop(), set[Choice]()
        for name in sorted(server_types):
            if loop.time() >= self._stock_due.get(name, float("-inf")):
                # Set before the request: concurrent callers use the previous value.
                self._stock_due[name] = loop.time() + STOCK_FRESH_S
                try:
                    page = await self.send(partial(self.api.server_types.get_list, name=name), max_wait_s=max_wait_s)
                    self._cpu_types |= {str(each.name): str(each.cpu_type) for each in page.server_types}
                    self._out_of_stock[name] = {
                        Choice(name, str(place.location.name))
                        for server_type in page.server_types
                        for place in server_type.locations or ()
                        if place.available is False
                    }
                except Exception as error:
                    self._stock_due[name] = loop.time() + STOCK_RETRY_S
                    log.info("list server types failed", server_type=name, error=_message(error))
            found |= self._out_of_stock.get(name, set())
        return found

    async def prices(self, kind: str, max_wait_s: float) -> PriceList | None:
        """The last known prices. None until they were read once."""
        loop = asyncio.get_running_loop()
        if loop.time() >= self._prices_due and not self._prices_lock.locked():
            async with self._prices_lock:
                self._prices_due = loop.time() + PRICES_RETRY_S
                try:
                    response = await self.send(
                        lambda: self.api.request("GET", "/pricing"), max_wait_s=max_wait_s, is_urgent=True
                    )
                    self._prices = {name: read_prices(response["pricing"], name) for name in ("net", "gross")}
                    self._prices_due = loop.time() + PRICES_FRESH_S
                except Exception as error:
                    log.warning("list prices failed", error=_message(error))
        return self._prices.get(kind)

    # ------------------------------------------------------------------------------------------------------ users

    def add_user(self, fleet: str) -> None:
        """A provider of this fleet uses the account from now on."""
        self._users += 1
        self.limiter.add_user(fleet)

    def remove_user(self, fleet: str) -> None:
        """Closes the account with its last user."""
        self._users -= 1
        self.limiter.remove_user(fleet)
        if self._users == 0:
            self.close()

    def close(self) -> None:
        """Does not wait for requests in flight. A later request opens the account again."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
        self._adapter.close()


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, Throttled) else str(to_vendor_error(error))


def _connect(token: str, endpoint: str, adapter: BaseAdapter) -> hcloud.Client:
    client = hcloud.Client(token=token, api_endpoint=endpoint, application_name="windlass")
    # The SDK has no public access to these; tests/unit/test_hetzner_account.py fails if a newer version moves them.
    client._client._retry_max_retries = 0
    for scheme in ("https://", "http://"):
        client._client._session.mount(scheme, adapter)
    return client
