"""The worker transport over HTTP, for workers without a database. The protocol is in ports/http.py.

It has the same contract as the database transport. A missing answer, or one that is not from a control plane, raises
ControlPlaneUnavailable; the call may have taken effect, and repeating it is safe. Retries are the caller's decision,
but a Retry-After header delays the next call. A refused token means that the worker is terminated: a heartbeat then
returns status None, and other calls raise TokenRefused.
"""

import asyncio
import json
import random
import ssl
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar
from uuid import UUID

import msgspec

from windlass.model.errors import BadInput, ControlPlaneUnavailable, TokenRefused, UnknownWorker
from windlass.model.ray import RaySettings
from windlass.model.task import (
    MAX_NOTE_CHARACTERS,
    MAX_PAYLOAD_BYTES,
    Claim,
    ClaimResult,
    Finished,
    TaskStatus,
    storable,
    truncate_error,
)
from windlass.model.work_order import WorkOrder
from windlass.model.worker import (
    MAX_CLAIMS_PER_HEARTBEAT,
    HeartbeatReply,
    HeldClaim,
    RecoveredTasks,
    Registration,
    WorkerStatus,
)
from windlass.model.worker_log import LogChunk
from windlass.ports import http
from windlass.worker.http_client import HttpClient, HttpResponse, NoResponse

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from windlass.ports.transport import WorkerTransport

# Longer than the control plane's own database timeout.
ANSWER_TIMEOUT_S = 45.0
# Added to the time that a wait for work may take.
WAIT_MARGIN_S = 15.0
# Upper limit for a Retry-After header.
MAX_RETRY_AFTER_S = 10.0
# Largest answer: many claims with large payloads. Above it the worker asks for fewer tasks.
MAX_ANSWER_BYTES = 256 << 20
# Larger requests are compressed. Below it the time of a request hardly depends on its size.
MIN_GZIP_BYTES = 16 << 10
# A compressed request must be smaller than this share of the original: both sides pay for it.
MAX_GZIP_SHARE = 0.8
_GZIP_WBITS = 31
# JSON of a held claim without its note, and of a character of the note, at most.
_MAX_CLAIM_BYTES, _MAX_CHARACTER_BYTES = 150, 6
# Characters of an unexpected answer in error messages.
MAX_QUOTED = 200

_Value = TypeVar("_Value")
Decoder = msgspec.json.Decoder


@dataclass(frozen=True, slots=True)
class WorkerCredentials:
    """Address and token of a registered worker."""

    worker_id: str
    url: str
    token: str
    # Limit for the results in one call.
    max_payload_bytes: int = MAX_PAYLOAD_BYTES

    def __repr__(self) -> str:
        return f"WorkerCredentials(worker_id={self.worker_id!r}, url={self.url!r})"


def tls_context(url: str, ca_file: Path | None) -> ssl.SSLContext | bool:
    """How to verify the server. Create it once: reading certificates takes longer than a call."""
    if not url.startswith("https:"):
        return False
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise BadInput(f"cannot read the certificates in {ca_file}: {error}. Check ca_file.") from None


class ControlPlaneClient:
    """HTTP calls to one control plane with one token."""

    def __init__(self, url: str, token: str, tls: ssl.SSLContext | bool) -> None:
        self._url = url
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._client = HttpClient(url, headers, tls, max_response_bytes=MAX_ANSWER_BYTES)
        self._not_before = float("-inf")
        # False once the control plane, or a proxy before it, has refused a compressed request.
        self._may_compress = True

    def set_token(self, token: str) -> None:
        self._client.set_header("Authorization", f"Bearer {token}")

    async def close(self) -> None:
        await self._client.close()

    async def call(
        self,
        doing: str,
        method: str,
        path: str,
        body: bytes | None = None,
        timeout_s: float = ANSWER_TIMEOUT_S,
        *,
        may_compress: bool = False,
    ) -> bytes:
        """Return the body of a successful answer, or raise the error it describes.

        `may_compress`: the route accepts compressed bodies.
        """
        wait_s = self._not_before - time.monotonic()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        compressed = compress_body(body) if may_compress and self._may_compress and body is not None else None
        try:
            if compressed is not None:
                response = await self._client.request(method, path, compressed, timeout_s, "gzip")
                self._may_compress = response.status != 415
            if compressed is None or not self._may_compress:
                response = await self._client.request(method, path, body, timeout_s)
        except (NoResponse, OSError) as error:
            reason = str(error) or type(error).__name__
            raise ControlPlaneUnavailable(
                f"{doing}: the control plane at {self._url} did not answer ({reason}). Check that it is running."
            ) from None
        if 200 <= response.status < 300:
            return response.body
        raise self._error(doing, response)

    def _error(self, doing: str, response: HttpResponse) -> Exception:
        code, message = _parse_problem(response)
        match code:
            case http.BAD_INPUT | http.TOO_LARGE | http.FORBIDDEN | http.NOT_FOUND:
                return BadInput(message)
            case http.UNKNOWN_WORKER:
                return UnknownWorker(message)
            case http.UNAUTHORIZED | http.GONE:
                return TokenRefused(f"{doing}: {message}")
        retry_after = response.header("retry-after")
        if retry_after.isdigit():
            # Jitter: other workers got the same answer at the same time.
            spread = 1.0 + 0.5 * random.random()  # noqa: S311
            self._not_before = time.monotonic() + min(float(retry_after), MAX_RETRY_AFTER_S) * spread
        return ControlPlaneUnavailable(
            f"{doing}: the control plane at {self._url} could not answer ({message})",
            is_refusal=code in (http.STATEMENT_REFUSED, http.DEFECT),
        )


def compress_body(body: bytes) -> bytes | None:
    """The body as gzip, or None if that is not worth it. Level 1: 10 ms of CPU for a megabyte of JSON."""
    if len(body) <= MIN_GZIP_BYTES:
        return None
    gzip = zlib.compressobj(1, zlib.DEFLATED, _GZIP_WBITS)
    compressed = gzip.compress(body) + gzip.flush()
    is_refused = len(body) > http.GZIP_RATIO_FREE_BYTES and len(body) > http.MAX_GZIP_RATIO * len(compressed)
    return None if is_refused or len(compressed) > MAX_GZIP_SHARE * len(body) else compressed


def _parse_problem(response: HttpResponse) -> tuple[str | None, str]:
    """Code and message of an error. The code is None if a proxy or another server answered."""
    try:
        problem = json.loads(response.body)
        return str(problem["code"]), str(problem["detail"])
    except (ValueError, LookupError, TypeError, RecursionError):
        text = response.body[: 4 * MAX_QUOTED].decode(errors="replace")
        return None, f"{response.status}: {text[:MAX_QUOTED]!r}"


class HttpTransport:
    def __init__(self, credentials: WorkerCredentials, tls: ssl.SSLContext | bool) -> None:
        self._credentials = credentials
        self._plane = ControlPlaneClient(credentials.url, credentials.token, tls)
        # Cursor of the last wait, by queues.
        self._cursors: dict[tuple[str, ...], str] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._plane.close()

    async def register(self, registration: Registration) -> WorkerStatus:
        self._check_worker(registration.worker_id)
        try:
            return await self._post("registering the worker", http.REGISTER, registration, _WORKER_STATUS)
        except TokenRefused:
            return WorkerStatus.TERMINATED

    async def claim(self, worker_id: str, queues: Sequence[str], limit: int = 1) -> list[Claim]:
        self._check_worker(worker_id)
        return await self._post("claiming tasks", http.CLAIM, http.ClaimCall(tuple(queues), limit), _CLAIMS)

    async def finish_and_claim(
        self, worker_id: str, finished: Sequence[Finished], queues: Sequence[str], limit: int
    ) -> ClaimResult:
        self._check_worker(worker_id)
        *first, last = _batches(finished, max(self._credentials.max_payload_bytes, http.MAX_BATCH_BYTES))
        lost: list[UUID] = []
        for batch in first:
            lost += (await self._finish(http.FinishCall(tuple(batch)))).lost
        result = await self._finish(http.FinishCall(tuple(last), tuple(queues), limit))
        return replace(result, lost=lost + result.lost) if lost else result

    async def _finish(self, call: http.FinishCall) -> ClaimResult:
        doing = "finishing tasks"
        body = encode_call(doing, call)
        return parse_answer(
            doing, _CLAIM_RESULT, await self._plane.call(doing, "POST", http.FINISH, body, may_compress=True)
        )

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
        self._check_worker(worker_id)
        # Cut as the database would: a request with a longer one is too large.
        call = http.FailCall(task_id, token, truncate_error(storable(error)), code, retry, jitter)
        return await self._post("reporting a failed attempt", http.FAIL, call, _TASK_STATUS)

    async def release(self, worker_id: str, task_id: int, token: UUID, reason: str, delay_s: float = 0.0) -> bool:
        self._check_worker(worker_id)
        call = http.ReleaseCall(task_id, token, reason, delay_s)
        return await self._post("releasing a task", http.RELEASE, call, _IS_RELEASED)

    async def heartbeat(
        self, worker_id: str, claims: Sequence[HeldClaim] = (), vitals: Mapping[str, Any] | None = None
    ) -> HeartbeatReply:
        self._check_worker(worker_id)
        lost: frozenset[UUID] = frozenset()
        try:
            for call in _heartbeat_calls(claims, dict(vitals or {})):
                reply = await self._post("sending a heartbeat", http.HEARTBEAT, call, _HEARTBEAT_REPLY)
                lost |= reply.lost
        except TokenRefused:
            return HeartbeatReply(status=None, is_paused=False, lost=frozenset(claim.token for claim in claims))
        return replace(reply, lost=lost)

    async def deregister(self, worker_id: str, reason: str) -> None:
        self._check_worker(worker_id)
        try:
            await self._send("deregistering the worker", http.DEREGISTER, http.ReasonCall(reason))
        except TokenRefused:
            return  # it is terminated already

    async def run_maintenance(self, worker_id: str) -> list[RecoveredTasks]:
        """The control loop recovers only spawned workers, but others may serve the same queues."""
        self._check_worker(worker_id)
        doing = "running maintenance"
        return parse_answer(doing, _RECOVERED, await self._plane.call(doing, "POST", http.RUN_MAINTENANCE))

    async def append_logs(self, worker_id: str, batch_id: UUID, chunks: Sequence[LogChunk]) -> None:
        self._check_worker(worker_id)
        doing = "sending output"
        storable_chunks = (replace(chunk, lines=tuple(map(storable, chunk.lines))) for chunk in chunks)
        body = encode_call(doing, http.LogsCall(batch_id, tuple(storable_chunks)))
        await self._plane.call(doing, "POST", http.LOGS, body, may_compress=True)

    async def next_run_after(self, queues: Sequence[str]) -> datetime | None:
        call = http.NextRunAfterCall(tuple(queues))
        return await self._post("reading the next due time", http.NEXT_RUN_AFTER, call, _RUN_AFTER)

    async def wait_for_work(self, queues: Sequence[str], timeout_s: float) -> None:
        names = tuple(queues)
        wait_s = min(timeout_s, http.MAX_WAIT_S)
        call = http.WaitCall(names, wait_s, self._cursors.get(names))
        content = await self._send("waiting for work", http.WAIT, call, wait_s + WAIT_MARGIN_S)
        self._cursors[names] = parse_answer("waiting for work", _CURSOR, content)

    async def report_start_failure(self, reason: str) -> None:
        """Report why this worker will never register."""
        await self._send("reporting the start failure", http.CANNOT_START, http.ReasonCall(storable(reason)))

    async def order(self) -> WorkOrder:
        doing = "reading the work order"
        return parse_answer(doing, WORK_ORDER, await self._plane.call(doing, "GET", http.ORDER))

    def _check_worker(self, worker_id: str) -> None:
        if worker_id != self._credentials.worker_id:
            raise UnknownWorker(f"worker {worker_id} cannot use the token of worker {self._credentials.worker_id}.")

    async def _post(self, doing: str, path: str, call: "DataclassInstance", answer: Decoder[_Value]) -> _Value:
        return parse_answer(doing, answer, await self._send(doing, path, call))

    async def _send(
        self, doing: str, path: str, call: "DataclassInstance", timeout_s: float = ANSWER_TIMEOUT_S
    ) -> bytes:
        return await self._plane.call(doing, "POST", path, encode_call(doing, call), timeout_s)


# msgspec's own encoder would silently turn NaN into null.
_ENCODER = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def encode_call(doing: str, call: "DataclassInstance") -> bytes:
    try:
        return _ENCODER.encode(msgspec.to_builtins(call, builtin_types=(bytes, datetime))).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise BadInput(f"{doing}: a value cannot be sent ({error}).") from None


def parse_answer(doing: str, kind: Decoder[_Value], content: bytes) -> _Value:
    try:
        return kind.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ControlPlaneUnavailable(
            f"{doing}: the answer is not from a control plane of this version. Check the URL and the versions."
        ) from None


def _batches(finished: Sequence[Finished], max_bytes: int) -> Iterator[list[Finished]]:
    """At least one batch, maybe empty. Each is within the size, or has one result that exceeds it."""
    batch: list[Finished] = []
    size_bytes = 0
    for item in finished:
        # Characters, not bytes: the limit of the server leaves room for multi-byte characters.
        length = len(item.result or "")
        if batch and size_bytes + length > max_bytes:
            yield batch
            batch, size_bytes = [], 0
        batch.append(item)
        size_bytes += length
    yield batch


def _heartbeat_calls(claims: Sequence[HeldClaim], vitals: dict[str, Any]) -> Iterator[http.HeartbeatCall]:
    """At least one call. Together they cover all tasks, each its own: claims of one task are in one call."""
    if len(claims) > MAX_CLAIMS_PER_HEARTBEAT:
        raise BadInput(f"a heartbeat names at most {MAX_CLAIMS_PER_HEARTBEAT} claims, not {len(claims)}.")
    batch: list[HeldClaim] = []
    size_bytes = first_task_id = 0
    for claim in sorted(claims, key=attrgetter("task_id")):
        note = storable(claim.note[:MAX_NOTE_CHARACTERS])[:MAX_NOTE_CHARACTERS] if claim.note is not None else None
        claim_bytes = _MAX_CLAIM_BYTES + _MAX_CHARACTER_BYTES * len(note or "")
        if batch and size_bytes + claim_bytes > http.MAX_CLAIMS_BYTES and claim.task_id != batch[-1].task_id:
            yield http.HeartbeatCall(tuple(batch), vitals, first_task_id, batch[-1].task_id)
            batch, size_bytes, first_task_id, vitals = [], 0, batch[-1].task_id + 1, {}
        batch.append(replace(claim, note=note))
        size_bytes += claim_bytes
    yield http.HeartbeatCall(tuple(batch), vitals, first_task_id)


def _decode_ray_settings(kind: type[RaySettings], value: object) -> RaySettings:
    return kind.model_validate(value)


WORK_ORDER = Decoder(WorkOrder, dec_hook=_decode_ray_settings)
_WORKER_STATUS = Decoder(WorkerStatus)
_CLAIMS = Decoder(list[Claim])
_CLAIM_RESULT = Decoder(ClaimResult)
_TASK_STATUS: Decoder[TaskStatus | None] = Decoder(TaskStatus | None)
_IS_RELEASED = Decoder(bool)
_HEARTBEAT_REPLY = Decoder(HeartbeatReply)
_RECOVERED = Decoder(list[RecoveredTasks])
_RUN_AFTER: Decoder[datetime | None] = Decoder(datetime | None)
_CURSOR = Decoder(str)


if TYPE_CHECKING:
    # mypy checks every signature against the protocol.
    _: type[WorkerTransport] = HttpTransport
