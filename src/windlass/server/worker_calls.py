"""The calls that workers make all the time (claim, finish, heartbeat, logs), on the shortest path.

Plain ASGI applications in place of routes: no dependency injection, and bodies are decoded by msgspec, with strict
types, straight into the types of ports/http.py. They run behind authentication and the request limits, which also turn
their errors into responses. `routes/worker_protocol.py` has the rest of the protocol, and documents these calls.
"""

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from windlass.model.auth import WorkerCaller
from windlass.model.errors import BadInput
from windlass.model.task import MAX_TASK_ID, Claim, ClaimResult
from windlass.model.worker import HeartbeatReply, HeartbeatReport
from windlass.model.worker_log import MAX_CALL_LINES, MAX_CHUNKS
from windlass.ports import http
from windlass.server.auth import check_worker
from windlass.server.context import WorkerApiContext
from windlass.server.errors import ApiError, forbidden
from windlass.server.heartbeat_groups import HeartbeatGroups
from windlass.server.request_body import decode_body
from windlass.server.route_table import MAX_SMALL_BODY_BYTES

# Queue names in an error message. A valid one has at most 63 characters.
MAX_SHOWN_QUEUES = 5
MAX_SHOWN_CHARACTERS = 64
# The age of a line as JSON: ten digits, a comma and a space.
MAX_AGE_BYTES = 12
_JSON = (b"content-type", b"application/json")
_AT = re.compile(r" - at `\$?(.*)`$")
_encode = msgspec.json.Encoder().encode
_decode_claim = msgspec.json.Decoder(http.ClaimCall).decode
_decode_finish = msgspec.json.Decoder(http.FinishCall).decode
_decode_heartbeat = msgspec.json.Decoder(http.HeartbeatCall).decode
_decode_logs = msgspec.json.Decoder(http.LogsCall).decode


# Decoding 30,000 results, or 300,000 empty queue names, takes 50 ms in which no other thread runs. So a large body is
# first decoded as a structure of undecoded items, which ends at the first item above the limit.


def _items_decoder(field: str, what: str, limit: int) -> Callable[[bytes], Sequence[msgspec.Raw]]:
    """Returns a function that finds the items of this array in a call, and raises BadInput for too many."""
    items = [(f"item_{number}", msgspec.Raw, msgspec.Raw()) for number in range(limit)]
    array = msgspec.defstruct("Items", items, array_like=True, forbid_unknown_fields=True, frozen=True)
    decode = msgspec.json.Decoder(msgspec.defstruct("Call", [(field, array, array())])).decode

    def find_items(body: bytes) -> Sequence[msgspec.Raw]:
        try:
            return msgspec.structs.astuple(getattr(decode(body), field))
        except msgspec.ValidationError as error:
            if "of at most length" in str(error):
                raise BadInput(f"a call has at most {limit:,} {what}.") from None
            raise

    return find_items


class _ChunkAges(msgspec.Struct):
    ages_ms: msgspec.Raw = msgspec.Raw()


_find_results = _items_decoder("finished", "results", http.MAX_FINISHED)
_find_chunks = _items_decoder("chunks", "chunks", MAX_CHUNKS)
_find_ages = msgspec.json.Decoder(_ChunkAges).decode


def worker_call_handlers(context: WorkerApiContext) -> dict[str, ASGIApp]:
    """By path, the ASGI applications that answer POST requests of authenticated callers."""
    store, max_payload_bytes = context.worker_store, context.max_payload_bytes
    groups = HeartbeatGroups(store)

    async def claim(worker: WorkerCaller, body: bytes) -> list[Claim]:
        call = await decode_body(_decode_claim, body)
        check_queues(worker, call.queues)
        return await store.claim(worker.worker_id, call.queues, min(call.limit, http.MAX_CLAIMS))

    async def finish(worker: WorkerCaller, body: bytes) -> ClaimResult:
        call = await decode_body(_finish_call, body)
        check_queues(worker, call.queues)
        if len(body) > max_payload_bytes:  # otherwise no result is larger either
            _check_results(call, max_payload_bytes)
        limit = min(call.limit, http.MAX_CLAIMS)
        return await store.finish_and_claim(worker.worker_id, call.finished, call.queues, limit)

    async def heartbeat(worker: WorkerCaller, body: bytes) -> HeartbeatReply:
        call = _decode_heartbeat(body)
        _check_count("claims", call.claims, http.MAX_HELD_CLAIMS)
        if len(body) > http.MAX_VITALS_BYTES:  # otherwise they are not larger either
            _check_vitals(call.vitals)
        first, last = call.first_task_id, call.last_task_id
        if not 0 <= first <= last <= MAX_TASK_ID:
            raise BadInput(f"first_task_id and last_task_id are 0 to {MAX_TASK_ID}, in this order.")
        return await groups.heartbeat(HeartbeatReport(worker.worker_id, call.claims, call.vitals, first, last))

    async def logs(worker: WorkerCaller, body: bytes) -> None:
        call = await decode_body(_logs_call, body)
        await store.append_logs(worker.worker_id, call.batch_id, call.chunks)

    return {
        http.CLAIM: _handler(claim),
        http.FINISH: _handler(finish),
        http.HEARTBEAT: _handler(heartbeat),
        http.LOGS: _handler(logs),
    }


def _handler(call: Callable[[WorkerCaller, bytes], Awaitable[Any]]) -> ASGIApp:
    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        worker = check_worker(scope["state"]["caller"])
        body = await _read_body(receive)
        if body is None:
            return  # the client has disconnected
        try:
            reply = _encode(await call(worker, body))
        except (msgspec.DecodeError, RecursionError) as error:  # ValidationError is a DecodeError
            raise ApiError(400, http.BAD_INPUT, _describe(error)) from None
        headers = [_JSON, (b"content-length", b"%d" % len(reply))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": reply})

    return handle


def check_queues(worker: WorkerCaller, queues: Sequence[str]) -> None:
    """Raise unless the worker serves all of these queues."""
    check_queue_count(queues)
    others = set(queues).difference(worker.queues)
    if others:
        shown = _shown(sorted(others))
        raise forbidden(f"worker {worker.worker_id} serves {_shown(worker.queues) or 'none'}, not {shown}")


def _shown(queues: Sequence[str]) -> str:
    """Some of the names, each cut: a caller may have sent anything."""
    more = f" and {len(queues) - MAX_SHOWN_QUEUES} more" if len(queues) > MAX_SHOWN_QUEUES else ""
    return ", ".join(queue[:MAX_SHOWN_CHARACTERS] for queue in queues[:MAX_SHOWN_QUEUES]) + more


def check_queue_count(queues: Sequence[str]) -> None:
    if len(queues) > http.MAX_QUEUES:
        raise BadInput(f"a call names at most {http.MAX_QUEUES:,} queues, not {len(queues):,}.")


def _finish_call(body: bytes) -> http.FinishCall:
    if len(body) > MAX_SMALL_BODY_BYTES and len(body) - sum(map(len, _find_results(body))) > MAX_SMALL_BODY_BYTES:
        message = f"a call has at most {MAX_SMALL_BODY_BYTES:,} bytes besides its results"
        raise ApiError(413, http.TOO_LARGE, message)
    call = _decode_finish(body)
    _check_count("results", call.finished, http.MAX_FINISHED)
    return call


def _logs_call(body: bytes) -> http.LogsCall:
    if len(body) > MAX_SMALL_BODY_BYTES:
        # Between two lines is `","`, and a line may be `,` itself.
        if body.translate(None, b" \t\r\n").count(b'","') > 2 * MAX_CALL_LINES:
            raise BadInput(f"a call has at most {MAX_CALL_LINES:,} lines.")
        ages_bytes = sum(len(_find_ages(chunk).ages_ms) for chunk in _find_chunks(body) if len(chunk))
        if ages_bytes > MAX_CALL_LINES * MAX_AGE_BYTES:
            raise BadInput(f"a call has at most {MAX_CALL_LINES:,} ages of lines.")
    call = _decode_logs(body)
    _check_count("chunks", call.chunks, MAX_CHUNKS)
    lines = sum(len(chunk.lines) for chunk in call.chunks)
    if lines > MAX_CALL_LINES:
        raise BadInput(f"a call has at most {MAX_CALL_LINES:,} lines, not {lines:,}.")
    if any(len(chunk.ages_ms) > len(chunk.lines) for chunk in call.chunks):
        raise BadInput("a chunk has at most one of ages_ms for each of its lines.")
    return call


def _check_count(what: str, items: Sequence[Any], limit: int) -> None:
    if len(items) > limit:
        raise BadInput(f"a call has at most {limit:,} {what}, not {len(items):,}.")


def _check_vitals(vitals: dict[str, Any]) -> None:
    try:
        http.check_vitals(vitals)
    except ValueError as error:
        raise BadInput(f"{error}.") from None


def _check_results(call: http.FinishCall, max_bytes: int) -> None:
    for done in call.finished:
        # A character has at most four bytes, so short results need not be encoded.
        if done.result is not None and 4 * len(done.result) > max_bytes:
            size_bytes = len(done.result.encode())
            if size_bytes > max_bytes:
                what = f"the result of task {done.task_id} has {size_bytes:,} bytes"
                raise BadInput(f"{what}; the limit is {max_bytes:,}.")


async def _read_body(receive: Receive) -> bytes | None:
    parts: list[bytes] = []
    while (message := await receive())["type"] == "http.request":
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)  # nearly always there is one part, which `join` returns as it is
    return None


def _describe(error: msgspec.DecodeError | RecursionError) -> str:
    """Names the field and the rule, in the words of the other routes."""
    if not isinstance(error, msgspec.ValidationError):
        return "invalid request: body: not valid JSON"
    message = str(error)
    found = _AT.search(message)
    if found is None and message.startswith("Expected `object`"):
        return "the body must be a JSON object, sent with Content-Type: application/json"
    field = re.sub(r"\[(.*?)\]", r".\1", found[1] if found else "")
    rule = _AT.sub("", message).replace("`", "")
    if rule.startswith("Object missing required field "):
        field, rule = f"{field}.{rule.rpartition(' ')[2]}", "required field is missing"
    return f"invalid request: body{field}: {rule}"
