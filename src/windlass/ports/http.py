"""What workers and the control plane say to each other over HTTP: paths, messages, errors. Both ends read it from here.

Every call is a POST with a JSON body (but the order, which is a GET) and `Authorization: Bearer <token>`. A worker
names itself nowhere: its token says who it is. An answer that is no success is a Problem with one of the codes below;
one that is not came from somebody else on the way and counts as none.

Payloads, results and errors travel as text, never as JSON within JSON: what the store wrote arrives as it was written.
"""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from pydantic import Field

from windlass.model.task import Claim, Finished, TaskStatus
from windlass.model.worker import HeldClaim, RecoveredTasks, WorkerKind, WorkerStatus

ACTIVATE = "/internal/workers/{worker_id}/activate"
# Self-registration, with an API token of role worker.
SELF_REGISTER = "/internal/workers"
ORDER = "/internal/worker/order"
REGISTER = "/internal/worker/register"
CLAIM = "/internal/worker/claim"
FINISH = "/internal/worker/finish"
FAIL = "/internal/worker/fail"
RELEASE = "/internal/worker/release"
HEARTBEAT = "/internal/worker/heartbeat"
DEREGISTER = "/internal/worker/leave"
# By one that has joined and was never registered.
CANNOT_START = "/internal/worker/cannot-start"
NEXT_RUN_AFTER = "/internal/worker/next-run-after"
WAIT = "/internal/worker/wait"
RUN_MAINTENANCE = "/internal/worker/upkeep"

# Who waits for work is answered within this time, whatever it asked for: proxies cut what is silent for longer.
MAX_WAIT_S = 20.0
# A task that is given back is claimed again within this time.
MAX_DELAY_S = 3600.0
# Claims in one answer: more than any worker has places for, few enough to hold in memory.
MAX_CLAIMS = 2_000
# Of results finished in one call, beyond the first: a batch must fit into a body.
MAX_BATCH_BYTES = 1 << 20

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
DEFECT = "DEFECT"

PROBLEM_JSON = "application/problem+json"


@dataclass(frozen=True, slots=True)
class ErrorBody:
    """What is wrong, after RFC 9457: `detail` is the sentence, `code` is for programs."""

    title: str
    status: int
    code: str
    detail: str
    type: str = "about:blank"


Queues = Annotated[tuple[str, ...], Field(max_length=1_000)]


def max_body_bytes(max_payload_bytes: int) -> int:
    """Of a request: one result of the largest size, each character escaped, and a thousand of everything small."""
    return 2 * max(max_payload_bytes, MAX_BATCH_BYTES) + (4 << 20)


# ------------------------------------------------------------------------------------------------ what workers ask


@dataclass(frozen=True, slots=True)
class ActivateCall:
    """`token`: the worker token that the machine made up."""

    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class SelfRegisterCall:
    """`token`: the worker token that the worker made up for this name of its own."""

    token: str = field(repr=False)
    worker_id: str
    queues: Queues
    concurrency: int = 1
    lease_s: float = 30.0
    host: str | None = None
    pid: int | None = None
    version: str | None = None
    start_id: str | None = None


@dataclass(frozen=True, slots=True)
class RegisterCall:
    queues: Queues
    concurrency: int = 1
    lease_s: float = 30.0
    host: str | None = None
    pid: int | None = None
    version: str | None = None
    kind: WorkerKind = WorkerKind.WORKER
    # Of the program that calls: a worker that was started again under its name has another one, and holds nothing.
    start_id: str | None = None


@dataclass(frozen=True, slots=True)
class ClaimCall:
    queues: Queues
    limit: int = 1


@dataclass(frozen=True, slots=True)
class FinishCall:
    finished: tuple[Finished, ...] = ()
    queues: Queues = ()
    limit: int = 0


@dataclass(frozen=True, slots=True)
class FailCall:
    task_id: int
    token: UUID
    error: str
    code: str = "HANDLER_ERROR"
    retry: bool = True
    jitter: Annotated[float, Field(ge=0, le=1)] | None = None


@dataclass(frozen=True, slots=True)
class ReleaseCall:
    task_id: int
    token: UUID
    reason: str
    delay_s: Annotated[float, Field(ge=0, le=MAX_DELAY_S)] = 0.0


@dataclass(frozen=True, slots=True)
class HeartbeatCall:
    claims: tuple[HeldClaim, ...] = ()
    vitals: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DeregisterCall:
    reason: str


@dataclass(frozen=True, slots=True)
class CannotStartCall:
    reason: str


@dataclass(frozen=True, slots=True)
class NextRunAfterCall:
    queues: Queues


@dataclass(frozen=True, slots=True)
class WaitCall:
    """`cursor`: what the last wait for these queues answered. Without it, or with an old one, it ends at once."""

    queues: Queues
    timeout_s: float
    cursor: str | None = None


# ------------------------------------------------------------------------------------------------ what they are told


@dataclass(frozen=True, slots=True)
class Registered:
    status: WorkerStatus


@dataclass(frozen=True, slots=True)
class SelfRegisteredReply:
    status: WorkerStatus
    # Of a result.
    max_payload_bytes: int


@dataclass(frozen=True, slots=True)
class Recovered:
    recoveries: list[RecoveredTasks]


@dataclass(frozen=True, slots=True)
class Claimed:
    claims: list[Claim]


@dataclass(frozen=True, slots=True)
class Failed:
    status: TaskStatus | None


@dataclass(frozen=True, slots=True)
class Released:
    is_released: bool


@dataclass(frozen=True, slots=True)
class NextRunAfter:
    run_after: datetime | None


@dataclass(frozen=True, slots=True)
class Waited:
    cursor: str
