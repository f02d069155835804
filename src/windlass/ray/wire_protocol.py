"""The messages between a seat and its dispatcher. Pure.

A message is a line of JSON, the header. A header with a `size` is followed by a body of that many bytes: a payload, a
result, the text of an error, or printed lines.

    seat -> dispatcher
      {"seat": id, "loading": node id}                           loads the handler, which may take minutes
      {"seat": id, "started": node id}                           is ready for a task
      {"seat": id, "progress": token, "fraction": 0.5, "note": null}
      {"seat": id, "output": token, "dropped": 0, "size": 9}     body: lines that the attempt printed
      {"seat": id, "finished": token, "is_ok": true, "size": 9}  body: the result; is ready for another task
    dispatcher -> seat
      {"run": {...}, "size": 42}                                 run this task; body: its payload
      {"run": null}                                              no more tasks: exit
      {"ping": true}                                             the dispatcher is alive

A seat's id is random and known only to its dispatcher and, through Ray, to the seat. It is the seat's credential.
"""

import json
from datetime import datetime
from typing import Any
from uuid import UUID

from windlass.model.task import Claim
from windlass.model.worker_log import LogChunk
from windlass.worker.executor import AttemptFailure, AttemptSuccess, Outcome

# A progress note has at most 500 characters, each escaped to at most twelve bytes.
MAX_HEADER_BYTES = 1 << 14
# Error texts are cut to this size.
MAX_ERROR_BYTES = 1 << 16
# Limit of the lines in one message: more than a batch of output has, each byte of which may become three.
MAX_OUTPUT_BYTES = 1 << 20

PING = b'{"ping":true}\n'


def encode(header: dict[str, Any], body: bytes | None = None) -> bytes:
    if body is None:
        return json.dumps(header).encode() + b"\n"
    return json.dumps({**header, "size": len(body)}).encode() + b"\n" + body


def body_size(header: dict[str, Any], max_bytes: int) -> int | None:
    """Size of the body that follows; None: no body. Raises ValueError if it is invalid or too large."""
    size = header.get("size")
    if size is not None and not (isinstance(size, int) and 0 <= size <= max_bytes):
        raise ValueError(f"body size {size} is not between 0 and {max_bytes}")
    return size


def encode_loading(seat_id: str, node_id: str) -> bytes:
    return encode({"seat": seat_id, "loading": node_id})


def encode_started(seat_id: str, node_id: str) -> bytes:
    return encode({"seat": seat_id, "started": node_id})


def encode_progress(seat_id: str, token: UUID, fraction: float, note: str | None) -> bytes:
    return encode({"seat": seat_id, "progress": str(token), "fraction": fraction, "note": note})


def encode_output(seat_id: str, token: UUID, chunk: LogChunk) -> bytes:
    header = {"seat": seat_id, "output": str(token), "dropped": chunk.dropped}
    return encode(header, "".join(f"{line}\n" for line in chunk.lines).encode(errors="replace")[-MAX_OUTPUT_BYTES:])


def encode_finished(seat_id: str, token: UUID, outcome: Outcome) -> bytes:
    header: dict[str, Any] = {"seat": seat_id, "finished": str(token), "is_ok": isinstance(outcome, AttemptSuccess)}
    if isinstance(outcome, AttemptSuccess):
        return encode(header, None if outcome.result is None else outcome.result.encode())
    header |= {"code": outcome.code, "retry": outcome.retry}
    return encode(header, outcome.error.encode(errors="replace")[:MAX_ERROR_BYTES])


def decode_outcome(header: dict[str, Any], body: bytes | None) -> Outcome:
    if header["is_ok"]:
        return AttemptSuccess(None if body is None else body.decode())
    return AttemptFailure(str(header["code"]), (body or b"").decode(errors="replace"), retry=bool(header["retry"]))


def encode_run(claim: Claim | None) -> bytes:
    if claim is None:
        return encode({"run": None})
    # Not dataclasses.asdict, which takes six times as long.
    run = {
        "task_id": claim.task_id,
        "token": str(claim.token),
        "queue": claim.queue,
        "attempt": claim.attempt,
        "max_attempts": claim.max_attempts,
        "timeout_s": claim.timeout_s,
        "priority": claim.priority,
        "created_at": claim.created_at.isoformat(),
    }
    return encode({"run": run}, claim.payload.encode())


def decode_run(header: dict[str, Any], body: bytes | None) -> Claim | None:
    run = header["run"]
    if run is None:
        return None
    decoded = {
        "token": UUID(run["token"]),
        "payload": (body or b"").decode(),
        "created_at": datetime.fromisoformat(run["created_at"]),
    }
    return Claim(**{**run, **decoded})
