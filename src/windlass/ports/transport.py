"""What a worker needs from the world to claim, finish and stay alive.

The contract, whoever implements it (a store now, HTTP to a control plane later):
- A claim is valid until it is finished, failed, released, taken back or cancelled. `finish_and_claim` and `fail` with
  a claim that is no longer valid change nothing and are counted; repeating an accepted one is accepted again, so a
  caller that did not get its answer may simply ask again.
- `claim`s go first in, first out within priority, per queue, and only to a worker that is registered, spawning or
  active, and not paused. One that is paused or terminating gets none. One that is not registered, or has ended (error,
  terminated), gets UnknownWorker from `claim` and from a `finish_and_claim` that wants tasks; with results to deliver,
  an ended one first hears that they are lost. So a worker learns of its end without a heartbeat.
- Attempts are counted when claimed. `release` gives one back uncounted.
- Every method raises DatabaseUnavailable when the answer did not arrive; what was asked may then have happened. An
  answer to `claim` or `finish_and_claim` arrives within half of the worker's lease or counts as not arrived: after a
  whole one the heartbeat gives back what the worker does not know of.
- Opening raises SchemaMismatch when the other side is of another version than this program: asking again is useless,
  and a worker that hears it finishes what it holds and leaves. Any other method may raise it too.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Protocol, Self
from uuid import UUID

from windlass.model.task import Claim, ClaimResult, Finished, TaskStatus
from windlass.model.worker import HeartbeatReply, HeldClaim, RecoveredTasks, Registration, WorkerStatus


class WorkerTransport(Protocol):
    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def register(self, registration: Registration) -> WorkerStatus:
        """Announce a worker. One that was hired keeps its row; one started by hand is active at once."""

    async def claim(self, worker_id: str, queues: Sequence[str], limit: int = 1) -> list[Claim]:
        """Up to `limit` tasks, best first. Empty for a worker that may not claim now; UnknownWorker for none."""

    async def finish_and_claim(
        self, worker_id: str, finished: Sequence[Finished], queues: Sequence[str], limit: int
    ) -> ClaimResult:
        """Complete what is done and claim up to `limit` more, in one round trip."""

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
        """The attempt failed. Returns `error` or `failed`, or None if the claim was lost."""

    async def release(self, worker_id: str, task_id: int, token: UUID, reason: str, delay_s: float = 0.0) -> bool:
        """Give a claimed task back as if never taken; nobody gets it before the delay. False if the claim was lost."""

    async def heartbeat(
        self, worker_id: str, claims: Sequence[HeldClaim] = (), vitals: Mapping[str, Any] | None = None
    ) -> HeartbeatReply:
        """The worker lives and holds these claims. Other claims in its name, older than its lease, are released."""

    async def deregister(self, worker_id: str, reason: str) -> None:
        """The worker ends. What it still holds goes back to the queue."""

    async def run_maintenance(self, worker_id: str) -> list[RecoveredTasks]:
        """What workers do for the queue: recover the tasks of lost ones, and apply retention for a bounded time."""

    async def next_run_after(self, queues: Sequence[str]) -> datetime | None:
        """When the next waiting task of these queues is due."""

    async def wait_for_work(self, queues: Sequence[str], timeout_s: float) -> None:
        """Return when there may be work in one of these queues, or when the time is up. A hint, never a promise."""
