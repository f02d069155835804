"""One project of Hetzner Cloud, as all fleets with its token use it: the vendor's SDK, in threads, within its limits.

Every request has a time limit and passes the limiter, so each is one call of the SDK that makes exactly one request:
pages are asked for one by one, and its retries are turned off. By itself the SDK would wait for ever; it would also
send a creation whose answer did not come again, up to five times, sleeping up to a minute between, past our limiter
and our time limits. Actions are never waited for with it either: what became of a server shows in the next list.
"""

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
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
from windlass.providers.hetzner.errors import HetznerError, HetznerErrorKind, problem_of
from windlass.providers.hetzner.limiter import HetznerLimiter

# For a turn at the limiter. Whoever would wait longer is better asked for again by a later cycle.
MAX_WAIT_S = 25.0
# Before something that collided is sent again; the next time, twice as long.
BUSY_PAUSE_S = 1.0
PAGE_SIZE = 50
# 5,000 of anything: far beyond any project's limit.
MAX_PAGES = 100
# More than the limiter lets be under way at once: a burst, and what comes back while the slowest of them is waited for.
# Slow creations must not hold up a list.
MAX_THREADS = 80
CONNECT_TIMEOUT_S = 5.0
# The SDK's time limit is for the next byte of an answer. An answer that trickles is given up after this much more.
TRICKLE_S = 10.0
# Prices change a few times a year.
PRICES_FRESH_S = 6 * 3600.0
# Whether there are some left changes all the time, and is only a hint.
HINTS_FRESH_S = 300.0
# What could not be had is asked for again after this time: hints, which are dispensable, and prices, which are not.
ASK_AGAIN_S = 60.0
ASK_PRICES_AGAIN_S = 10.0
log = structlog.get_logger(__name__)
T = TypeVar("T")


class ThreadRunner(Protocol):
    """Carries out a blocking call without blocking. Raises TimeoutError this long after the call has begun."""

    def __call__(self, call: Callable[[], T], timeout_s: float) -> Awaitable[T]: ...


class ApiPage(Protocol):
    """Of a list, as the SDK gives it."""

    @property
    def meta(self) -> Meta: ...


P = TypeVar("P", bound=ApiPage)


class _TimeoutAdapter(BaseAdapter):
    """Hears what the vendor says about its own count of our requests, which the SDK does not tell, and sets the time
    limit of each."""

    def __init__(self, inner: BaseAdapter, timeout_s: float) -> None:
        super().__init__()
        self._inner = inner
        self.timeout_s = timeout_s
        # Written by threads, read by the loop.
        self.heard: deque[tuple[int, Mapping[str, str]]] = deque(maxlen=MAX_THREADS)

    def send(self, request: requests.PreparedRequest, *arguments: Any, **options: Any) -> requests.Response:
        options["timeout"] = (min(CONNECT_TIMEOUT_S, self.timeout_s), self.timeout_s)
        response = self._inner.send(request, *arguments, **options)
        self.heard.append((response.status_code, response.headers))
        return response

    def close(self) -> None:
        self._inner.close()


class HetznerAccount:
    """`run` and `adapter` are for a world without threads or sockets."""

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
        self._ear = _TimeoutAdapter(adapter or HTTPAdapter(pool_maxsize=MAX_THREADS), timeout_s)
        self.api = _connect(token, endpoint, self._ear)
        self._pool: ThreadPoolExecutor | None = None
        self._users = 0
        self._run: ThreadRunner = run or self._run_in_thread
        # By choice, when it may be tried again.
        self._exhausted: dict[Choice, float] = {}
        self._prices: dict[str, PriceList] = {}
        self._prices_due = float("-inf")
        self._unavailable: dict[str, set[Choice]] = {}
        self._hints_due: dict[str, float] = {}
        self._asking = asyncio.Lock()

    def be_patient(self, timeout_s: float) -> None:
        """Those who share it wait for an answer as long as the most patient of them."""
        self._ear.timeout_s = max(self._ear.timeout_s, timeout_s)

    async def call(self, call: Callable[[], T], *, max_wait_s: float, is_urgent: bool = False) -> T:
        """One request. Raises whatever the SDK does, TimeoutError, or Throttled: nothing was sent then."""
        await self.limiter.wait(max_wait_s, is_urgent=is_urgent)
        try:
            return await self._run(call, self._ear.timeout_s + TRICKLE_S)
        finally:
            while self._ear.heard:
                self.limiter.learn(*self._ear.heard.popleft())

    async def ask(self, call: Callable[[], T], *, tries: int = 1, is_urgent: bool = False) -> T:
        """The same, for whoever waits. Sent again where the vendor says that it collided with something. Raises
        Trouble, or Throttled."""
        for attempt in range(1, tries + 1):
            try:
                return await self.call(call, max_wait_s=MAX_WAIT_S, is_urgent=is_urgent)
            except Throttled:
                raise
            except Exception as error:
                problem = problem_of(error)
                if problem.kind is not HetznerErrorKind.BUSY or attempt == tries:
                    raise HetznerError(problem) from error
            await asyncio.sleep(BUSY_PAUSE_S * attempt * (0.5 + self._rng.random()))
        raise AssertionError("the last try returns or raises")

    async def ask_for_all(self, ask_page: Callable[[int], P]) -> list[P]:
        """Every page of a list that may change meanwhile. Raises Trouble, or Throttled."""
        pages: list[P] = []
        number: int | None = 1
        while number is not None and number <= MAX_PAGES:
            page = await self.ask(partial(ask_page, number))
            pages.append(page)
            number = page.meta.pagination.next_page if page.meta and page.meta.pagination else None
        return pages

    async def _run_in_thread(self, call: Callable[[], T], timeout_s: float) -> T:
        """Also raises Throttled, where all threads were taken: nothing was sent then."""
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
                    raise Throttled("too many requests are waiting for their answers", BUSY_PAUSE_S) from None
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(job)
        finally:
            # Where nobody waits any more: what has not begun never does.
            job.cancel()

    # -------------------------------------------------------------------------------------------------- capacity

    def note_no_capacity(self, choice: Choice, for_s: float) -> None:
        self._exhausted[choice] = asyncio.get_running_loop().time() + for_s

    def exhausted(self) -> set[Choice]:
        now = asyncio.get_running_loop().time()
        self._exhausted = {choice: until for choice, until in self._exhausted.items() if until > now}
        return set(self._exhausted)

    async def unavailable(self, server_types: set[str], max_wait_s: float) -> set[Choice]:
        """Where the vendor says that there are none now. What cannot be had says nothing."""
        found: set[Choice] = set()
        for name in sorted(server_types):
            if asyncio.get_running_loop().time() >= self._hints_due.get(name, float("-inf")):
                await self._ask_for_hints(name, max_wait_s)
            found |= self._unavailable.get(name, set())
        return found

    async def _ask_for_hints(self, name: str, max_wait_s: float) -> None:
        # Those who ask at the same time do with what there is.
        self._hints_due[name] = asyncio.get_running_loop().time() + HINTS_FRESH_S
        try:
            page = await self.call(lambda: self.api.server_types.get_list(name=name), max_wait_s=max_wait_s)
            self._unavailable[name] = {
                Choice(name, str(where.location.name))
                for found in page.server_types
                for where in found.locations or ()
                if where.available is False
            }
        except Exception as error:
            self._hints_due[name] = asyncio.get_running_loop().time() + ASK_AGAIN_S
            log.info("where there are servers is not known", server_type=name, error=_said(error))

    # ---------------------------------------------------------------------------------------------------- prices

    async def prices(self, kind: str, max_wait_s: float) -> PriceList | None:
        """The last known; None as long as none are."""
        if asyncio.get_running_loop().time() >= self._prices_due and not self._asking.locked():
            async with self._asking:
                await self._ask_for_prices(max_wait_s)
        return self._prices.get(kind)

    async def _ask_for_prices(self, max_wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._prices_due = loop.time() + ASK_PRICES_AGAIN_S
        try:
            answer = await self.call(lambda: self.api.request("GET", "/pricing"), max_wait_s=max_wait_s, is_urgent=True)
            self._prices = {kind: read_prices(answer["pricing"], kind) for kind in ("net", "gross")}
            self._prices_due = loop.time() + PRICES_FRESH_S
        except Exception as error:
            log.warning("prices are not known", error=_said(error))

    # ------------------------------------------------------------------------------------------------------ users

    def join(self, fleet: str) -> None:
        """From now on a provider of this fleet uses it."""
        self._users += 1
        self.limiter.join(fleet)

    def leave(self, fleet: str) -> None:
        self._users -= 1
        self.limiter.leave(fleet)
        if self._users == 0:
            self.close()

    def close(self) -> None:
        """Without waiting for what is under way. Whoever asks again opens it again."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
        self._ear.close()


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, Throttled) else problem_of(error).words


def _connect(token: str, endpoint: str, adapter: BaseAdapter) -> hcloud.Client:
    client = hcloud.Client(token=token, api_endpoint=endpoint, application_name="windlass")
    # The SDK has no public way to either; tests/unit/test_hetzner_account.py fails if a newer one has moved them.
    client._client._retry_max_retries = 0
    for scheme in ("https://", "http://"):
        client._client._session.mount(scheme, adapter)
    return client
