"""The worker protocol over HTTP: paths, limits, error codes, and the messages that have no type in the model.

Calls are POST requests with a JSON body; reading the work order is a GET. Every call has `Authorization: Bearer
<token>`, and the token identifies the worker. Other bodies and replies are model types: Registration, Claim,
ClaimResult, HeartbeatReply, WorkOrder. An error reply without a code below comes from a proxy or another server.

Payloads, results and errors are text, never nested JSON: they arrive exactly as the store wrote them.
"""

import json
from dataclasses import dataclass, field
from typing import Annotated, Any
from uuid import UUID

from pydantic import AfterValidator, FailFast, Field

from windlass.model.task import MAX_ERROR_CHARACTERS, MAX_RESULTS_PER_CALL, MAX_TASK_ID, Finished
from windlass.model.worker import MAX_METADATA_BYTES, HeldClaim, Registration, WorkerStatus
from windlass.model.worker_log import MAX_BOOT_LOG_CHARACTERS, MAX_CALL_BYTES, MAX_CHUNKS, LogChunk

ACTIVATE = "/internal/workers/{worker_id}/activate"
# From a machine that has not joined yet, with its join token.
BOOT_STEP = "/internal/workers/{worker_id}/boot-step"
# With an API token of role worker.
SELF_REGISTER = "/internal/workers"
ORDER = "/internal/worker/order"
REGISTER = "/internal/worker/register"
CLAIM = "/internal/worker/claim"
FINISH = "/internal/worker/finish"
FAIL = "/internal/worker/fail"
RELEASE = "/internal/worker/release"
HEARTBEAT = "/internal/worker/heartbeat"
DEREGISTER = "/internal/worker/deregister"
# From a worker that was activated and will never register.
CANNOT_START = "/internal/worker/cannot-start"
NEXT_RUN_AFTER = "/internal/worker/next-run-after"
WAIT = "/internal/worker/wait"
RUN_MAINTENANCE = "/internal/worker/maintenance"
LOGS = "/internal/worker/logs"

# Upper limit for a wait for work: proxies close connections that are silent for longer.
MAX_WAIT_S = 20.0
# Upper limit for the delay of a released task.
MAX_DELAY_S = 3600.0
# Queues in one call.
MAX_QUEUES = 1_000
# Claims in one reply: more than any worker has slots, and few enough to hold in memory.
MAX_CLAIMS = 2_000
# Results in one call have at most this size together; a single result may be larger.
MAX_BATCH_BYTES = 1 << 20
# Results in one call: what the database accepts.
MAX_FINISHED = MAX_RESULTS_PER_CALL
# Claims in one heartbeat call. Their JSON has at most MAX_CLAIMS_BYTES, so that the call is small together with its
# vitals. A worker that holds more names them in several calls.
MAX_HELD_CLAIMS = 500
MAX_CLAIMS_BYTES = 56 << 10
MAX_VITALS_BYTES = MAX_METADATA_BYTES
# Longer reasons are cut: they are read by people, and a worker must not fail because of one.
MAX_REASON_CHARACTERS = MAX_ERROR_CHARACTERS
MAX_CURSOR_CHARACTERS = 100
MAX_CODE_CHARACTERS = 100
MAX_BOOT_STEP_CHARACTERS = 100
# The database accepts MAX_CALL_BYTES of JSON as it writes it, with a space after each comma and colon.
MAX_LOGS_BYTES = MAX_CALL_BYTES
# Requests with a large body may be compressed by `Content-Encoding: gzip`. A body that is larger than
# GZIP_RATIO_FREE_BYTES and more than MAX_GZIP_RATIO times its compressed size is refused: send it as it is.
MAX_GZIP_RATIO = 100
GZIP_RATIO_FREE_BYTES = 1 << 20

BAD_INPUT = "BAD_INPUT"
UNAUTHORIZED = "UNAUTHORIZED"
FORBIDDEN = "FORBIDDEN"
NOT_FOUND = "NOT_FOUND"
UNKNOWN_WORKER = "UNKNOWN_WORKER"
TOO_SLOW = "TOO_SLOW"
CONFLICT = "CONFLICT"
GONE = "GONE"
TOO_LARGE = "TOO_LARGE"
TOO_MANY = "TOO_MANY"
UNAVAILABLE = "UNAVAILABLE"
STATEMENT_REFUSED = "STATEMENT_REFUSED"
DEFECT = "DEFECT"

PROBLEM_JSON = "application/problem+json"


def check_vitals(vitals: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError if they are too large to be stored with a worker."""
    size_bytes = len(json.dumps(vitals, ensure_ascii=False).encode(errors="replace"))
    if size_bytes > MAX_VITALS_BYTES:
        raise ValueError(f"vitals have {size_bytes:,} bytes and at most {MAX_VITALS_BYTES:,} are accepted")
    return vitals


Reason = Annotated[str, AfterValidator(lambda reason: reason[:MAX_REASON_CHARACTERS])]
# Without FailFast, pydantic describes every wrong item: 20,000 of them in a small body took 80 ms.
QueueNames = Annotated[tuple[str, ...], FailFast()]


@dataclass(frozen=True, slots=True)
class ErrorBody:
    """An error reply (RFC 9457). `code` is for programs, `detail` for people."""

    title: str
    status: int
    code: str
    detail: str
    type: str = "about:blank"


def max_body_bytes(max_payload_bytes: int) -> int:
    """Upper limit for a call with results: one result of the maximum size with every character escaped,
    and 4 MiB for the rest."""
    return 2 * max(max_payload_bytes, MAX_BATCH_BYTES) + (4 << 20)


@dataclass(frozen=True, slots=True)
class ActivateCall:
    """`token`: the worker token, which the machine has generated."""

    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class BootStepCall:
    """`step`: what the machine's boot does now, in a few words."""

    step: Annotated[str, Field(min_length=1, max_length=MAX_BOOT_STEP_CHARACTERS, pattern=r"^[ -~]+$")]
    # The last lines that the boot printed.
    output: Annotated[str, Field(max_length=MAX_BOOT_LOG_CHARACTERS)] = ""
    # The boot ended in this step: the machine will not join.
    has_failed: bool = False


@dataclass(frozen=True, slots=True)
class SelfRegisterCall:
    """`token`: the worker token, which the worker has generated. The fleet and kind of the registration are ignored."""

    token: str = field(repr=False)
    registration: Registration


@dataclass(frozen=True, slots=True)
class SelfRegisterReply:
    status: WorkerStatus
    # Upper limit for a result.
    max_payload_bytes: int


@dataclass(frozen=True, slots=True)
class ClaimCall:
    queues: tuple[str, ...]
    limit: int = 1


@dataclass(frozen=True, slots=True)
class FinishCall:
    finished: Annotated[tuple[Finished, ...], Field(max_length=MAX_FINISHED)] = ()
    queues: tuple[str, ...] = ()
    limit: int = 0


@dataclass(frozen=True, slots=True)
class FailCall:
    task_id: int
    token: UUID
    error: str
    code: Annotated[str, Field(max_length=MAX_CODE_CHARACTERS)] = "HANDLER_ERROR"
    retry: bool = True
    jitter: Annotated[float, Field(ge=0, le=1)] | None = None


@dataclass(frozen=True, slots=True)
class ReleaseCall:
    task_id: int
    token: UUID
    reason: Reason
    delay_s: Annotated[float, Field(ge=0, le=MAX_DELAY_S)] = 0.0


@dataclass(frozen=True, slots=True)
class HeartbeatCall:
    """`claims`: all that the worker holds of the tasks from `first_task_id` to `last_task_id`.

    Claims of these tasks that are not named, and older than the lease, are released. A worker with more than
    MAX_HELD_CLAIMS divides its tasks into such ranges and sends a call for each; together they cover all ids.
    """

    claims: Annotated[tuple[HeldClaim, ...], Field(max_length=MAX_HELD_CLAIMS)] = ()
    vitals: Annotated[dict[str, Any], AfterValidator(check_vitals)] = field(default_factory=dict)
    first_task_id: Annotated[int, Field(ge=0, le=MAX_TASK_ID)] = 0
    last_task_id: Annotated[int, Field(ge=0, le=MAX_TASK_ID)] = MAX_TASK_ID


@dataclass(frozen=True, slots=True)
class ReasonCall:
    """Why a worker deregisters, or cannot start."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class LogsCall:
    """Output of the worker and its attempts. `batch_id` is new for each batch, and the same if a call is repeated."""

    batch_id: UUID
    chunks: Annotated[tuple[LogChunk, ...], Field(max_length=MAX_CHUNKS)]


@dataclass(frozen=True, slots=True)
class NextRunAfterCall:
    queues: QueueNames


@dataclass(frozen=True, slots=True)
class WaitCall:
    """`cursor`: the reply to the last wait for these queues. Without it, or with an old one, the reply is immediate."""

    queues: QueueNames
    timeout_s: float
    cursor: Annotated[str, Field(max_length=MAX_CURSOR_CHARACTERS)] | None = None
