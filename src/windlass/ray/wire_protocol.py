"""What a seat and its dispatcher say to each other over a connection. Pure.

Lines of JSON; one that announces a `size` is followed by as many bytes: a payload, a result, the words of an error.

    -> {"seat": id, "loading": node id}                          I load what runs attempts: more of me soon
    -> {"seat": id, "node": node id}                             here I am
    -> {"seat": id, "done": token, "is_ok": true, "size": 9}     the result follows, and: what is next?
    -> {"seat": id, "progress": token, "fraction": 0.5, "note": null}
    <- {"run": {...}, "size": 42}                                begin this: its payload follows
    <- {"run": null}                                             nothing more: end
    <- {"ping": true}                                            the dispatcher is there

A seat's id is random and known to its dispatcher and to whom Ray has handed it: whoever names another gets nothing.
"""

import json
from datetime import datetime
from typing import Any
from uuid import UUID

from windlass.model.task import Claim
from windlass.worker.executor import AttemptFailure, AttemptSuccess, Outcome

# Of a line. A note has at most 500 characters, each escaped to at most twelve.
MAX_LINE_BYTES = 1 << 14
# Of what follows a line, beyond the largest result: words of errors are cut to much less.
MAX_WORDS_BYTES = 1 << 16

PING = b'{"ping":true}\n'


def framed(said: dict[str, Any], body: bytes | None = None) -> bytes:
    if body is None:
        return json.dumps(said).encode() + b"\n"
    return json.dumps({**said, "size": len(body)}).encode() + b"\n" + body


def size_of(said: dict[str, Any], limit_bytes: int) -> int | None:
    """How many bytes follow; None: it announces nothing. Raises ValueError if they are too many."""
    size = said.get("size")
    if size is not None and not (isinstance(size, int) and 0 <= size <= limit_bytes):
        raise ValueError(f"{size} bytes are announced, and {limit_bytes} are the limit")
    return size


def loading(seat_id: str, node_id: str) -> bytes:
    return framed({"seat": seat_id, "loading": node_id})


def arrival(seat_id: str, node_id: str) -> bytes:
    return framed({"seat": seat_id, "node": node_id})


def progress(seat_id: str, token: UUID, fraction: float, note: str | None) -> bytes:
    return framed({"seat": seat_id, "progress": str(token), "fraction": fraction, "note": note})


def done(seat_id: str, token: UUID, outcome: Outcome) -> bytes:
    said: dict[str, Any] = {"seat": seat_id, "done": str(token), "is_ok": isinstance(outcome, AttemptSuccess)}
    if isinstance(outcome, AttemptSuccess):
        return framed(said, None if outcome.result is None else outcome.result.encode())
    said |= {"code": outcome.code, "retry": outcome.retry}
    return framed(said, outcome.error.encode(errors="replace")[:MAX_WORDS_BYTES])


def read_outcome(said: dict[str, Any], body: bytes | None) -> Outcome:
    if said["is_ok"]:
        return AttemptSuccess(None if body is None else body.decode())
    return AttemptFailure(str(said["code"]), (body or b"").decode(errors="replace"), retry=bool(said["retry"]))


def orders(claim: Claim | None) -> bytes:
    if claim is None:
        return framed({"run": None})
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
    return framed({"run": run}, claim.payload.encode())


def read_orders(said: dict[str, Any], body: bytes | None) -> Claim | None:
    run = said["run"]
    if run is None:
        return None
    own = {
        "token": UUID(run["token"]),
        "payload": (body or b"").decode(),
        "created_at": datetime.fromisoformat(run["created_at"]),
    }
    return Claim(**{**run, **own})
