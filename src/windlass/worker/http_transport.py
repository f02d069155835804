"""The transport of workers that have no database: the control plane's HTTP face, ports/http.py.

The same contract as over the database. No answer, or one that is not the control plane's own, raises
ControlPlaneUnavailable: what was asked may then have happened, and asking again is safe. Who asks again, and after
which pause, is the caller's to decide; when the control plane asked to be left alone, it is. A token that is refused
means that this worker is over: a heartbeat tells so as of any worker nobody knows, everything else raises TokenRefused.
"""

import asyncio
import json
import random
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar
from uuid import UUID

import httpx
from pydantic import TypeAdapter, ValidationError

from windlass.model.errors import BadInput, ControlPlaneUnavailable, TokenRefused, UnknownWorker
from windlass.model.task import MAX_PAYLOAD_BYTES, Claim, ClaimResult, Finished, TaskStatus, storable
from windlass.model.work_order import WorkOrder
from windlass.model.worker import HeartbeatReply, HeldClaim, RecoveredTasks, Registration, WorkerStatus
from windlass.ports import http

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from windlass.ports.transport import WorkerTransport

CONNECT_TIMEOUT_S = 10.0
# Longer than the control plane gives its database.
ANSWER_TIMEOUT_S = 45.0
# Beyond what was asked to be waited for: the way there and back.
WAIT_MARGIN_S = 15.0
# Shorter than the control plane keeps one: it is we who close it, and none is closed under a request.
KEEP_ALIVE_S = 30.0
# The loop, its look-out and one more.
MAX_CONNECTIONS = 4
# However long the control plane asks us to stay away.
MAX_RETRY_AFTER_S = 10.0
# What is kept of an answer that is not the control plane's.
MAX_SHOWN = 200

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class WorkerCredentials:
    """What a worker that has joined needs to call: where, and as whom."""

    worker_id: str
    url: str
    token: str
    ca_file: Path | None = None
    # Of results that are finished in one call.
    max_payload_bytes: int = MAX_PAYLOAD_BYTES

    def __repr__(self) -> str:
        return f"Membership(worker_id={self.worker_id!r}, url={self.url!r})"


def tls_context(url: str, ca_file: Path | None) -> ssl.SSLContext | bool:
    """How to check who answers. Made once: reading certificates takes longer than a call."""
    if not url.startswith("https:"):
        return False
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise BadInput(f"the certificates in {ca_file} cannot be read ({error}): check ca_file.") from None


class ControlPlane:
    """Calls to one control plane with one token, in the words of ports/http.py."""

    def __init__(
        self, url: str, token: str, tls: ssl.SSLContext | bool, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self._url = url
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
            timeout=httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=MAX_CONNECTIONS, keepalive_expiry=KEEP_ALIVE_S),
            verify=tls,
            transport=transport,
            # A proxy in the environment is meant for the handler, which may have brought it.
            trust_env=False,
        )
        self._not_before = float("-inf")

    def act_with(self, token: str) -> None:
        """From the next call on, with another token."""
        self._client.headers["Authorization"] = f"Bearer {token}"

    async def close(self) -> None:
        await self._client.aclose()

    async def call(
        self, doing: str, method: str, path: str, body: bytes | None = None, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> bytes:
        """The answer to a call, or the error that it carries."""
        await self._stay_away()
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
        try:
            response = await self._client.request(method, path, content=body, timeout=timeout)
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, ssl.SSLError, OSError) as error:
            what = str(error) or type(error).__name__
            raise ControlPlaneUnavailable(
                f"{doing}: the control plane at {self._url} did not answer ({what}): is it running?"
            ) from None
        if response.is_success:
            return response.content
        raise self._error(doing, response)

    async def _stay_away(self) -> None:
        wait_s = self._not_before - time.monotonic()
        if wait_s > 0:
            await asyncio.sleep(wait_s)

    def _error(self, doing: str, response: httpx.Response) -> Exception:
        code, message = _told(response)
        said = f"{doing}: {message}"
        match code:
            case http.BAD_INPUT | http.TOO_LARGE | http.FORBIDDEN | http.NOT_FOUND:
                return BadInput(message)
            case http.UNKNOWN_WORKER:
                return UnknownWorker(message)
            case http.UNAUTHORIZED | http.GONE:
                return TokenRefused(said)
        retry_after = response.headers.get("retry-after", "")
        if retry_after.isdigit():
            # Not all of those who were told the same at the same time.
            spread = 1.0 + 0.5 * random.random()  # noqa: S311
            self._not_before = time.monotonic() + min(float(retry_after), MAX_RETRY_AFTER_S) * spread
        return ControlPlaneUnavailable(f"{doing}: the control plane at {self._url} could not answer ({message})")


def _told(response: httpx.Response) -> tuple[str | None, str]:
    """Code and message of an error. Without a code it came from somebody on the way: a proxy, another server."""
    try:
        problem = response.json()
        return str(problem["code"]), str(problem["detail"])
    except (ValueError, LookupError, TypeError):
        return None, f"{response.status_code}: {response.text[:MAX_SHOWN]!r}"


class HttpTransport:
    """`transport`, if given, carries the requests instead of the network: tests speak to an application in memory."""

    def __init__(
        self,
        credentials: WorkerCredentials,
        tls: ssl.SSLContext | bool,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._membership = credentials
        self._plane = ControlPlane(credentials.url, credentials.token, tls, transport)
        # What the last wait for these queues answered.
        self._cursors: dict[tuple[str, ...], str] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._plane.close()

    async def register(self, registration: Registration) -> WorkerStatus:
        self._check_name(registration.worker_id)
        r = registration
        call = http.RegisterCall(r.queues, r.concurrency, r.lease_s, r.host, r.pid, r.version, r.kind, r.start_id)
        try:
            registered = await self._post("registering the worker", http.REGISTER, call, _REGISTERED)
        except TokenRefused:
            return WorkerStatus.TERMINATED
        return registered.status

    async def claim(self, worker_id: str, queues: Sequence[str], limit: int = 1) -> list[Claim]:
        self._check_name(worker_id)
        call = http.ClaimCall(tuple(queues), limit)
        claimed = await self._post("claiming tasks", http.CLAIM, call, _CLAIMED)
        return claimed.claims

    async def finish_and_claim(
        self, worker_id: str, finished: Sequence[Finished], queues: Sequence[str], limit: int
    ) -> ClaimResult:
        self._check_name(worker_id)
        *first, last = _batches(finished, max(self._membership.max_payload_bytes, http.MAX_BATCH_BYTES))
        lost: list[UUID] = []
        for batch in first:
            lost += (await self._finish(http.FinishCall(tuple(batch)))).lost
        turn = await self._finish(http.FinishCall(tuple(last), tuple(queues), limit))
        return replace(turn, lost=lost + turn.lost)

    async def _finish(self, call: http.FinishCall) -> ClaimResult:
        return await self._post("finishing tasks", http.FINISH, call, _TURN)

    async def fail(
        self,
        worker_id: str,
        task_id: int,
        token: UUID,
        error: str,
        *,
        code: str = "HANDLER_ERROR",
        retry: bool = True,
        jitter: float | None = None,
    ) -> TaskStatus | None:
        self._check_name(worker_id)
        call = http.FailCall(task_id, token, storable(error), code, retry, jitter)
        failed = await self._post("reporting a failed attempt", http.FAIL, call, _FAILED)
        return failed.status

    async def release(self, worker_id: str, task_id: int, token: UUID, reason: str, delay_s: float = 0.0) -> bool:
        self._check_name(worker_id)
        call = http.ReleaseCall(task_id, token, reason, delay_s)
        released = await self._post("giving a task back", http.RELEASE, call, _RELEASED)
        return released.is_released

    async def heartbeat(
        self, worker_id: str, claims: Sequence[HeldClaim] = (), vitals: Mapping[str, Any] | None = None
    ) -> HeartbeatReply:
        self._check_name(worker_id)
        told = (claim if claim.note is None else replace(claim, note=storable(claim.note)) for claim in claims)
        call = http.HeartbeatCall(tuple(told), dict(vitals or {}))
        try:
            return await self._post("sending a heartbeat", http.HEARTBEAT, call, _PULSE)
        except TokenRefused:
            return HeartbeatReply(status=None, is_paused=False, lost=frozenset(claim.token for claim in claims))

    async def deregister(self, worker_id: str, reason: str) -> None:
        self._check_name(worker_id)
        try:
            await self._send("signing off", http.DEREGISTER, http.DeregisterCall(reason))
        except TokenRefused:
            return  # it is gone already

    async def run_maintenance(self, worker_id: str) -> list[RecoveredTasks]:
        """As workers with a database do. The control loop judges those it hired; others may serve the same queues."""
        self._check_name(worker_id)
        doing = "looking after other workers"
        return read_answer(doing, _RECOVERED, await self._plane.call(doing, "POST", http.RUN_MAINTENANCE)).recoveries

    async def next_run_after(self, queues: Sequence[str]) -> datetime | None:
        call = http.NextRunAfterCall(tuple(queues))
        answer = await self._post("looking for waiting tasks", http.NEXT_RUN_AFTER, call, _NEXT_RUN_AFTER)
        return answer.run_after

    async def wait_for_work(self, queues: Sequence[str], timeout_s: float) -> None:
        names = tuple(queues)
        patience_s = min(timeout_s, http.MAX_WAIT_S)
        call = http.WaitCall(names, patience_s, self._cursors.get(names))
        content = await self._send("waiting for work", http.WAIT, call, patience_s + WAIT_MARGIN_S)
        self._cursors[names] = read_answer("waiting for work", _WAITED, content).cursor

    async def cannot_start(self, reason: str) -> None:
        """Tell why this worker will never register."""
        await self._send("telling why it cannot start", http.CANNOT_START, http.CannotStartCall(storable(reason)))

    async def order(self) -> WorkOrder:
        """What this worker is to do."""
        doing = "asking for the work order"
        return read_answer(doing, ORDER, await self._plane.call(doing, "GET", http.ORDER))

    def _check_name(self, worker_id: str) -> None:
        if worker_id != self._membership.worker_id:
            raise UnknownWorker(f"worker {worker_id} cannot act with the token of {self._membership.worker_id}.")

    async def _post(self, doing: str, path: str, call: "DataclassInstance", answer: TypeAdapter[_Value]) -> _Value:
        return read_answer(doing, answer, await self._send(doing, path, call))

    async def _send(
        self, doing: str, path: str, call: "DataclassInstance", timeout_s: float = ANSWER_TIMEOUT_S
    ) -> bytes:
        return await self._plane.call(doing, "POST", path, write(doing, call), timeout_s)


def write(doing: str, call: "DataclassInstance") -> bytes:
    """As JSON of the standard library: pydantic's would turn what is not a number into null without a word."""
    try:
        text = json.dumps(asdict(call), allow_nan=False, ensure_ascii=False, separators=(",", ":"), default=_plain)
        return text.encode()
    except (TypeError, ValueError) as error:
        raise BadInput(f"{doing}: a value cannot be sent ({error}).") from None


def _plain(value: object) -> str:
    if isinstance(value, UUID):
        return str(value)
    raise TypeError(f"{type(value).__name__} is nothing that JSON can hold")


def read_answer(doing: str, kind: TypeAdapter[_Value], content: bytes) -> _Value:
    try:
        return kind.validate_json(content)
    except ValidationError:
        raise ControlPlaneUnavailable(f"{doing}: what answered is not a control plane of this version.") from None


def _batches(finished: Sequence[Finished], max_bytes: int) -> Iterator[list[Finished]]:
    """At least one, perhaps empty; each within the size, or of one result that is beyond it."""
    batch: list[Finished] = []
    size_bytes = 0
    for done in finished:
        # Characters, not bytes: what the network carries of them may be more, and the limit there has room for it.
        length = len(done.result or "")
        if batch and size_bytes + length > max_bytes:
            yield batch
            batch, size_bytes = [], 0
        batch.append(done)
        size_bytes += length
    yield batch


ORDER = TypeAdapter(WorkOrder)
_REGISTERED = TypeAdapter(http.Registered)
_CLAIMED = TypeAdapter(http.Claimed)
_TURN = TypeAdapter(ClaimResult)
_FAILED = TypeAdapter(http.Failed)
_RELEASED = TypeAdapter(http.Released)
_PULSE = TypeAdapter(HeartbeatReply)
_RECOVERED = TypeAdapter(http.Recovered)
_NEXT_RUN_AFTER = TypeAdapter(http.NextRunAfter)
_WAITED = TypeAdapter(http.Waited)


if TYPE_CHECKING:
    # mypy compares every signature with the contract's.
    _: type[WorkerTransport] = HttpTransport
