"""One Runpod account, shared by all fleets with its key: REST v2 over httpx, rate limited.

Every request has a time limit and passes the limiter. Only reads are repeated: a creation has no idempotency key, so
repeating one whose response was lost could create and bill a second pod. The API lists all pods of the account at once;
concurrent callers share a response.
"""

import asyncio
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
import structlog

from windlass.model.errors import Throttled
from windlass.model.runpod import RUNPOD_ENDPOINT
from windlass.providers.fingerprint import fingerprint
from windlass.providers.runpod.catalog import CapacityKey, Offer, offers_path, read_offers
from windlass.providers.runpod.errors import response_error, transport_error
from windlass.providers.runpod.limiter import RunpodLimiter
from windlass.providers.vendor_error import ErrorKind, VendorError

# Longest wait for the limiter. A request that would wait longer is left to a later cycle.
MAX_WAIT_S = 25.0
CONNECT_TIMEOUT_S = 5.0
# httpx's time limit is per read. A response that arrives in small pieces is abandoned this much later.
TRICKLE_S = 10.0
# Attempts of a read, and the pause before the second. The pause doubles each time.
READ_ATTEMPTS = 3
READ_PAUSE_S = 0.5
# Limits of a stream of log lines: silence, total time, and the wait for the limiter. A deletion waits for all of them,
# for 3 s at most; what was read until then is kept.
LOG_IDLE_S = 1.5
LOG_TIMEOUT_S = 2.3
LOG_MAX_WAIT_S = 0.5
MAX_LOG_LINE_CHARACTERS = 2_000
# Prices seldom change. Stock changes often and is only a hint.
OFFERS_FRESH_S = 300.0
# After a failed request.
OFFERS_RETRY_S = 60.0
MAX_CONNECTIONS = 16
log = structlog.get_logger(__name__)
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PodListing:
    """All pods of the account at `requested_at`, by the event loop's clock. The vendor's list may be older."""

    pods: list[Json]
    requested_at: float


class RunpodAccount:
    """`transport` replaces sockets in tests."""

    def __init__(
        self,
        key: str,
        *,
        endpoint: str = RUNPOD_ENDPOINT,
        timeout_s: float = 20.0,
        limiter: RunpodLimiter | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._key = key
        self.key_hash = fingerprint(endpoint, key)
        self._endpoint = endpoint
        self._transport = transport
        self._rng = rng or random.Random()  # noqa: S311
        self.timeout_s = timeout_s
        self.limiter = limiter or RunpodLimiter()
        self._client: httpx.AsyncClient | None = None
        self._listing: PodListing | None = None
        self._listing_lock = asyncio.Lock()
        # When each may be tried again.
        self._exhausted: dict[CapacityKey, float] = {}
        # By cloud and number of GPUs.
        self._offers: dict[tuple[str, int], Mapping[str, Offer]] = {}
        self._offers_due: dict[tuple[str, int], float] = {}

    def raise_timeout(self, timeout_s: float) -> None:
        """Fleets that share the account share the longest of their time limits."""
        self.timeout_s = max(self.timeout_s, timeout_s)

    # -------------------------------------------------------------------------------------------------- requests

    async def request(self, method: str, path: str, body: Json | None = None, max_wait_s: float = MAX_WAIT_S) -> Json:
        """Send a request once. Raises VendorError, or Throttled if nothing was sent."""
        response = await self._send(method, path, body, max_wait_s)
        try:
            content = response.json() if response.content else {}
        except Exception as error:
            raise transport_error(error) from error
        if not isinstance(content, dict):
            raise VendorError(ErrorKind.LOST, "unreadable response (not an object)")
        return content

    async def _send(self, method: str, path: str, body: Json | None, max_wait_s: float) -> httpx.Response:
        await self.limiter.wait(max_wait_s, is_urgent=method != "POST")
        try:
            async with asyncio.timeout(self.timeout_s + TRICKLE_S):
                timeout = httpx.Timeout(self.timeout_s, connect=min(CONNECT_TIMEOUT_S, self.timeout_s))
                response = await self._open_client().request(method, path, json=body, timeout=timeout)
            self.limiter.record_response(response.status_code, response.headers)
        except Exception as error:
            raise transport_error(error) from error
        if not response.is_success:
            raise response_error(response, is_creation=(method, path) == ("POST", "/pods"))
        return response

    def _open_client(self) -> httpx.AsyncClient:
        if self._client is None:
            self._client = httpx.AsyncClient(
                base_url=self._endpoint,
                headers={"Authorization": f"Bearer {self._key}", "User-Agent": "windlass"},
                limits=httpx.Limits(max_connections=MAX_CONNECTIONS),
                transport=self._transport,
            )
        return self._client

    async def read(self, path: str) -> Json:
        """A GET request, repeated if it was not sent or its response is lost. Raises VendorError or Throttled."""
        for attempt in range(1, READ_ATTEMPTS + 1):
            try:
                return await self.request("GET", path)
            except VendorError as error:
                if error.kind not in (ErrorKind.LOST, ErrorKind.UNSENT) or attempt == READ_ATTEMPTS:
                    raise
            await asyncio.sleep(READ_PAUSE_S * 2 ** (attempt - 1) * (0.5 + self._rng.random()))
        raise AssertionError("the last attempt returns or raises")

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    # ------------------------------------------------------------------------------------------------------ pods

    async def list_pods(self, since: float) -> PodListing:
        """A list requested at `since` or later, by the event loop's clock. Raises VendorError or Throttled."""
        async with self._listing_lock:
            if self._listing is not None and self._listing.requested_at >= since:
                return self._listing
            requested_at = asyncio.get_running_loop().time()
            pods = (await self.read("/pods")).get("pods")
            if not isinstance(pods, list) or not all(isinstance(pod, dict) and pod.get("id") for pod in pods):
                raise VendorError(ErrorKind.LOST, "unreadable list of pods")
            self._listing = PodListing(pods, requested_at)
            return self._listing

    def last_listed(self, pod_id: str) -> Json | None:
        """The pod as in the last list, if it was in it."""
        pods = self._listing.pods if self._listing is not None else []
        return next((pod for pod in pods if str(pod["id"]) == pod_id), None)

    async def get_pod(self, pod_id: str) -> Json | None:
        """None if the vendor answers "not found", which it may do for a new pod too."""
        try:
            pod = await self.read(f"/pods/{pod_id}")
        except VendorError as error:
            if error.kind is ErrorKind.NOT_FOUND:
                return None
            raise
        return None if pod.get("status") == "TERMINATED" else pod

    async def delete_pod(self, pod_id: str) -> datetime | None:
        """Request a deletion. Returns the second of the response by the vendor's clock, if it has a date. Raises like
        `request`."""
        response = await self._send("DELETE", f"/pods/{pod_id}", None, MAX_WAIT_S)
        try:
            date = parsedate_to_datetime(response.headers["Date"])
        except (KeyError, ValueError):
            return None
        return date if date.tzinfo is not None else date.replace(tzinfo=UTC)

    async def pod_log(self, pod_id: str, lines: int) -> list[str]:
        """The last lines of the pod's program and its host. Raises VendorError, or Throttled if nothing was sent.

        The vendor sends them as a stream that stays open, so reading ends LOG_IDLE_S after the last line.
        """
        await self.limiter.wait(LOG_MAX_WAIT_S)
        found: list[str] = []
        try:
            # A stream without any line is silent from the start.
            timeout = httpx.Timeout(LOG_IDLE_S, connect=CONNECT_TIMEOUT_S)
            async with (
                asyncio.timeout(LOG_TIMEOUT_S),
                self._open_client().stream("GET", f"/pods/{pod_id}/logs?tail={lines}", timeout=timeout) as response,
            ):
                self.limiter.record_response(response.status_code, response.headers)
                if not response.is_success:
                    await response.aread()
                    raise response_error(response)
                async for event in response.aiter_lines():
                    if event.startswith("data:"):
                        found.append(_log_line(event.removeprefix("data:")))
                    if len(found) >= lines:
                        break
        except (httpx.ReadTimeout, TimeoutError):
            pass
        except httpx.HTTPError as error:
            raise transport_error(error) from error
        return found

    # -------------------------------------------------------------------------------------------------- capacity

    def record_no_capacity(self, key: CapacityKey, for_s: float) -> None:
        self._exhausted[key] = asyncio.get_running_loop().time() + for_s

    def is_exhausted(self, key: CapacityKey) -> bool:
        return asyncio.get_running_loop().time() < self._exhausted.get(key, float("-inf"))

    async def offers(self, clouds: set[str], gpu_count: int) -> dict[str, Mapping[str, Offer]]:
        """The last known prices and stock, by cloud and GPU type. They are hints, so this never waits for the limiter.
        A cloud whose offers are unknown is missing."""
        loop = asyncio.get_running_loop()
        for cloud in sorted(clouds):
            key = (cloud, gpu_count)
            if loop.time() < self._offers_due.get(key, float("-inf")):
                continue
            # Set before the request: concurrent callers use the previous value.
            self._offers_due[key] = loop.time() + OFFERS_RETRY_S
            try:
                self._offers[key] = read_offers(
                    await self.request("GET", offers_path(cloud, gpu_count), max_wait_s=0.0), cloud
                )
                self._offers_due[key] = loop.time() + OFFERS_FRESH_S
            except (VendorError, Throttled, KeyError, TypeError, ValueError, AttributeError) as error:
                log.info("list gpu offers failed", cloud=cloud, error=str(error) or type(error).__name__)
        return {cloud: self._offers[cloud, gpu_count] for cloud in clouds if (cloud, gpu_count) in self._offers}


def _log_line(data: str) -> str:
    """The text of an event. Lines about the pod itself, not of its program, begin with "system:"."""
    try:
        event = json.loads(data)
        text = str(event["line"])[:MAX_LOG_LINE_CHARACTERS]
        return text if event.get("source") != "system" else f"system: {text}"
    except (ValueError, LookupError, TypeError, AttributeError):
        return data.strip()[:MAX_LOG_LINE_CHARACTERS]
