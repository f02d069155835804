"""The worker's side of the queue: register, claim, finish, fail, heartbeat.

The contract of every implementation, a database or HTTP to a control plane:
- A claim is valid until it is finished, failed, released, requeued or cancelled. `finish_and_claim` and `fail` with an
  invalid claim change nothing and are counted as late results. Repeating an accepted call is accepted again, so a
  caller that missed the answer can repeat it.
- Claims are first in, first out within a priority, per queue. Only a registered worker that is spawning or active and
  not paused gets tasks. A paused or terminating worker gets none.
- `claim`, and `finish_and_claim` with a limit above 0, raise UnknownWorker for a worker that is not registered or has
  ended (error, terminated). With results to deliver, an ended worker first learns that their claims are lost. So a
  worker learns of its end without a heartbeat.
- An attempt is counted when its task is claimed. `release` takes the count back.
- Every method raises DatabaseUnavailable when no answer came; the call may have taken effect. An answer to `claim` or
  `finish_and_claim` that takes longer than half of the worker's lease counts as missing: after a whole lease, a
  heartbeat releases claims that the worker does not list.
- Opening a transport raises SchemaMismatch if the other side has another version. Retrying does not help: the worker
  finishes its tasks and exits. Any other method may raise it too.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol
from uuid import UUID

from windlass.model.task import Claim, ClaimResult, Finished, TaskStatus
from windlass.model.worker import HeartbeatReply, HeartbeatReport, HeldClaim, RecoveredTasks, Registration, WorkerStatus
from windlass.model.worker_log import LogChunk


class WorkSignal(Protocol):
    async def wait_for_work(self, queues: Sequence[str], timeout_s: float) -> None:
        """Return when one of these queues may have work, or after the timeout. A hint, not a promise."""


class WorkerTransport(WorkSignal, Protocol):
    async def register(self, registration: Registration) -> WorkerStatus:
        """Register a worker. A spawned worker keeps its row; one started by hand is active at once."""

    async def claim(self, worker_id: str, queues: Sequence[str], limit: int = 1) -> list[Claim]:
        """Up to `limit` tasks, highest priority first. Empty for a worker that may not claim now."""

    async def finish_and_claim(
        self, worker_id: str, finished: Sequence[Finished], queues: Sequence[str], limit: int
    ) -> ClaimResult:
        """Complete finished tasks and claim up to `limit` more, in one round trip."""

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
        """Report a failed attempt. Returns `error` or `failed`, or None if the claim was lost."""

    async def release(self, worker_id: str, task_id: int, token: UUID, reason: str, delay_s: float = 0.0) -> bool:
        """Requeue a claimed task after the delay, without counting the attempt. False if the claim was lost."""

    async def heartbeat(
        self, worker_id: str, claims: Sequence[HeldClaim] = (), vitals: Mapping[str, Any] | None = None
    ) -> HeartbeatReply:
        """Report that the worker lives and holds these claims. Its other claims, older than its lease, are released."""

    async def deregister(self, worker_id: str, reason: str) -> None:
        """End the worker. Tasks that it still holds are requeued."""

    async def run_maintenance(self, worker_id: str) -> list[RecoveredTasks]:
        """Recover the tasks of lost workers, and now and then apply retention for a bounded time."""

    async def append_logs(self, worker_id: str, batch_id: UUID, chunks: Sequence[LogChunk]) -> None:
        """Store output of the worker. A repeated call with the same batch id changes nothing.

        Lines of an attempt that the worker never had are stored as its own. BadInput for more than MAX_CHUNKS chunks or
        MAX_CALL_BYTES. Raises UnknownWorker for a worker that is not registered or has terminated.
        """

    async def next_run_after(self, queues: Sequence[str]) -> datetime | None:
        """When the next scheduled or retrying task of these queues is due."""


class HeartbeatStore(Protocol):
    """Heartbeats of many workers in one call, for a server that receives them."""

    async def heartbeat_many(
        self, heartbeats: Sequence[HeartbeatReport], *, waits: bool = False
    ) -> list[HeartbeatReply | None]:
        """Call `heartbeat` for each worker, in their order. Every worker occurs once.

        None: the worker's row is locked and nothing was recorded. With `waits` the call waits for locked rows, which
        are at most one then. Raises BadInput if one of them is invalid, and then records none.
        """
