"""One Runpod account, as all fleets with its key use it: REST v2 over httpx, within its limits.

Every request has a time limit and passes the limiter. Only requests that change nothing are ever sent again: a creation
has no idempotency key, so one whose answer was lost would be paid for twice. The API lists all pods of the account at
once: those who ask at about the same time share an answer.
"""

import asyncio
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
from windlass.providers.runpod.catalog import Offer, Want, read_offers
from windlass.providers.runpod.errors import (
    RunpodError,
    RunpodErrorInfo,
    RunpodErrorKind,
    problem_of_answer,
    problem_of_error,
)
from windlass.providers.runpod.limiter import RunpodLimiter

# For a turn at the limiter. Whoever would wait longer is better asked for again by a later cycle.
MAX_WAIT_S = 25.0
CONNECT_TIMEOUT_S = 5.0
# httpx's time limit is for the next byte of an answer. An answer that trickles is given up after this much more.
TRICKLE_S = 10.0
# Of a question that changes nothing, and the pause before it is asked again; the next time, twice as long.
READ_TRIES = 3
READ_PAUSE_S = 0.5
# Prices seldom change, but what is left does, and is only a hint.
OFFERS_FRESH_S = 300.0
# What could not be had is asked for again after this time.
ASK_AGAIN_S = 60.0
MAX_CONNECTIONS = 16
log = structlog.get_logger(__name__)
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PodListing:
    """All pods of the account. What was there when it was asked for, by the loop's clock, is in it, unless the vendor's
    list was old."""

    pods: list[Json]
    began: float


class RunpodAccount:
    """`transport` is for a world without sockets."""

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
        self._lists = asyncio.Lock()
        # When each may be asked for again.
        self._exhausted: dict[Want, float] = {}
        # By cloud and number of GPUs.
        self._offers: dict[tuple[str, int], Mapping[str, Offer]] = {}
        self._offers_due: dict[tuple[str, int], float] = {}

    def be_patient(self, timeout_s: float) -> None:
        """Those who share it wait for an answer as long as the most patient of them."""
        self.timeout_s = max(self.timeout_s, timeout_s)

    # -------------------------------------------------------------------------------------------------- requests

    async def call(self, method: str, path: str, body: Json | None = None, *, max_wait_s: float = MAX_WAIT_S) -> Json:
        """One request, sent at most once. Raises Trouble, or Throttled: nothing was sent then."""
        response = await self._send(method, path, body, max_wait_s)
        try:
            return _read(response)
        except Exception as error:
            raise RunpodError(problem_of_error(error)) from error

    async def _send(self, method: str, path: str, body: Json | None, max_wait_s: float) -> httpx.Response:
        await self.limiter.wait(max_wait_s, is_urgent=method != "POST")
        try:
            async with asyncio.timeout(self.timeout_s + TRICKLE_S):
                timeout = httpx.Timeout(self.timeout_s, connect=min(CONNECT_TIMEOUT_S, self.timeout_s))
                response = await self._http().request(method, path, json=body, timeout=timeout)
            self.limiter.learn(response.status_code, response.headers)
        except Exception as error:
            raise RunpodError(problem_of_error(error)) from error
        if not response.is_success:
            raise RunpodError(problem_of_answer(response))
        return response

    async def read(self, path: str, *, max_wait_s: float = MAX_WAIT_S) -> Json:
        """A question, asked again if its answer does not come. Raises Trouble, or Throttled."""
        for attempt in range(1, READ_TRIES + 1):
            try:
                return await self.call("GET", path, max_wait_s=max_wait_s)
            except RunpodError as trouble:
                if trouble.problem.kind is not RunpodErrorKind.LOST or attempt == READ_TRIES:
                    raise
            await asyncio.sleep(READ_PAUSE_S * 2 ** (attempt - 1) * (0.5 + self._rng.random()))
        raise AssertionError("the last try returns or raises")

    def _http(self) -> httpx.AsyncClient:
        if self._client is None:
            self._client = httpx.AsyncClient(
                base_url=self._endpoint,
                headers={"Authorization": f"Bearer {self._key}", "User-Agent": "windlass"},
                limits=httpx.Limits(max_connections=MAX_CONNECTIONS),
                transport=self._transport,
            )
        return self._client

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    # ------------------------------------------------------------------------------------------------------ pods

    async def list_pods(self, since: float) -> PodListing:
        """All pods, by a list that was asked for then, by the loop's clock, or later. Raises Trouble, Throttled."""
        async with self._lists:
            if self._listing is not None and self._listing.began >= since:
                return self._listing
            began = asyncio.get_running_loop().time()
            answer = await self.read("/pods")
            pods = answer.get("pods")
            if not isinstance(pods, list) or not all(isinstance(pod, dict) and pod.get("id") for pod in pods):
                raise RunpodError(RunpodErrorInfo(RunpodErrorKind.LOST, "a list of pods that cannot be read"))
            self._listing = PodListing(pods, began)
            return self._listing

    def last_seen(self, pod_id: str) -> Json | None:
        """As it was in the last list, if it was in it."""
        pods = self._listing.pods if self._listing is not None else []
        return next((pod for pod in pods if str(pod["id"]) == pod_id), None)

    async def pod(self, pod_id: str) -> Json | None:
        """None if the vendor says that there is none, which it may say of a new one too."""
        try:
            pod = await self.read(f"/pods/{pod_id}")
        except RunpodError as trouble:
            if trouble.problem.kind is RunpodErrorKind.NOT_FOUND:
                return None
            raise
        return None if pod.get("status") == "TERMINATED" else pod

    async def delete_pod(self, pod_id: str) -> datetime | None:
        """Ask for its end. In which second that was answered, by the vendor's clock, if it says so. Raises as call."""
        response = await self._send("DELETE", f"/pods/{pod_id}", None, MAX_WAIT_S)
        try:
            moment = parsedate_to_datetime(response.headers["Date"])
        except (KeyError, ValueError):
            return None
        return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)

    # -------------------------------------------------------------------------------------------------- capacity

    def note_no_capacity(self, want: Want, for_s: float) -> None:
        self._exhausted[want] = asyncio.get_running_loop().time() + for_s

    def is_exhausted(self, want: Want) -> bool:
        return asyncio.get_running_loop().time() < self._exhausted.get(want, float("-inf"))

    async def offers(self, clouds: set[str], gpu_count: int, max_wait_s: float) -> dict[str, Mapping[str, Offer]]:
        """Prices and what seems to be left, by cloud and GPU type: the last known. What cannot be had says nothing."""
        loop = asyncio.get_running_loop()
        for cloud in sorted(clouds):
            if loop.time() >= self._offers_due.get((cloud, gpu_count), float("-inf")):
                # Those who ask at the same time do with what there is.
                self._offers_due[cloud, gpu_count] = loop.time() + ASK_AGAIN_S
                await self._ask_for_offers(cloud, gpu_count, max_wait_s)
        return {cloud: self._offers[cloud, gpu_count] for cloud in clouds if (cloud, gpu_count) in self._offers}

    async def _ask_for_offers(self, cloud: str, gpu_count: int, max_wait_s: float) -> None:
        path = f"/catalog/gpus?include=AVAILABILITY&product=POD&cloud={cloud}&count={gpu_count}"
        try:
            answer = await self.call("GET", path, max_wait_s=max_wait_s)
            self._offers[cloud, gpu_count] = read_offers(answer, cloud)
            self._offers_due[cloud, gpu_count] = asyncio.get_running_loop().time() + OFFERS_FRESH_S
        except (RunpodError, Throttled, KeyError, TypeError, ValueError, AttributeError) as error:
            log.info("prices and stock are not known", cloud=cloud, error=str(error) or type(error).__name__)


def _read(response: httpx.Response) -> Json:
    if not response.content:
        return {}
    answer = response.json()
    if not isinstance(answer, dict):
        raise TypeError("want an object")
    return answer
