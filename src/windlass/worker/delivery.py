"""The outbox of a worker and its delivery to the database.

A claim is held from the moment it arrives until the database has answered for its outcome, so no outage loses a
result. Deliveries are repeated until answered; the claim token makes a repetition harmless. A batch that gets no
answer is halved. A result that the database refuses fails only its own attempt. Delivery gives up, by raising, when
outcomes have waited longer than the delivery time limit.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from uuid import UUID

import structlog

from windlass.model.error_text import error_headline
from windlass.model.errors import BadInput, DatabaseUnavailable
from windlass.model.redaction import mask_known
from windlass.model.task import MAX_RESULTS_PER_CALL, Claim, ClaimResult, Finished
from windlass.model.worker import HeldClaim
from windlass.ports.transport import WorkerTransport
from windlass.retry import Backoff
from windlass.worker.adaptive_batch import AdaptiveBatch
from windlass.worker.executor import AttemptFailure

# Upper limit for the results in one call: about a second on a good line. Larger calls might never get through.
MAX_DELIVERY_BYTES = 16 << 20
# Lower limit after halving: any line carries this much, and it holds thousands of small results.
MIN_DELIVERY_BYTES = 64 << 10
NOT_FINISHED = "the worker could not finish the attempt"
log = structlog.get_logger(__name__)


@dataclass(slots=True)
class HeldAttempt:
    """A claim that this worker holds, with the progress its handler reported last."""

    claim: Claim
    progress: float | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Release:
    claim: Claim
    reason: str
    delay_s: float


class Outbox:
    """The claims that this worker holds: running, or ended and waiting for delivery."""

    def __init__(self) -> None:
        self._held: dict[UUID, HeldAttempt] = {}
        self.finished: list[Finished] = []
        self.failed: list[tuple[Claim, AttemptFailure]] = []
        self.released: list[Release] = []

    def __bool__(self) -> bool:
        return bool(self.finished or self.failed or self.released)

    @property
    def has_outcomes(self) -> bool:
        """Whether results or failures wait. Releases do not count: an expired lease has the same effect."""
        return bool(self.finished or self.failed)

    def hold(self, claim: Claim) -> HeldAttempt:
        held = self._held[claim.token] = HeldAttempt(claim)
        return held

    def attempt(self, token: UUID) -> HeldAttempt:
        return self._held[token]

    def add_result(self, claim: Claim, result: str | None) -> None:
        self.finished.append(Finished(claim.task_id, claim.token, result))

    def add_failure(self, claim: Claim, failure: AttemptFailure) -> None:
        self.failed.append((claim, failure))

    def add_release(self, claim: Claim, reason: str = NOT_FINISHED, delay_s: float = 0.0) -> None:
        self.released.append(Release(claim, reason, delay_s))

    def forget(self, token: UUID) -> None:
        """The database has answered for this claim."""
        del self._held[token]

    def held_claims(self) -> list[HeldClaim]:
        """May be called from any thread: dict.copy is atomic."""
        return [HeldClaim(a.claim.task_id, token, a.progress, a.note) for token, a in self._held.copy().items()]

    def undelivered_task_ids(self) -> list[int]:
        failed = [claim.task_id for claim, _ in self.failed]
        return [item.task_id for item in self.finished] + failed + [item.claim.task_id for item in self.released]


class Delivery:
    def __init__(
        self,
        transport: WorkerTransport,
        worker_id: str,
        queues: Sequence[str],
        outbox: Outbox,
        *,
        lease_s: float,
        timeout_s: float,
        pause: Callable[[float], Awaitable[None]],
    ) -> None:
        """`timeout_s`: how long outcomes wait for a database that does not answer. `pause` waits between retries."""
        self._transport = transport
        self._worker_id = worker_id
        self._queues = queues
        self._outbox = outbox
        self._lease_s = lease_s
        self._timeout_s = timeout_s
        self._pause = pause
        self._batch_bytes = AdaptiveBatch(MAX_DELIVERY_BYTES, MIN_DELIVERY_BYTES)
        # Calls without an answer since `_failing_since`.
        self._backoff = Backoff()
        self._failing_since = 0.0

    @property
    def must_go_alone(self) -> bool:
        """Whether the next call must not claim: after an unanswered call, claims would age while results travel."""
        return bool(self._backoff.failures and self._outbox)

    async def report_failures_and_releases(self) -> None:
        outbox = self._outbox
        while outbox.failed:
            claim, failure = outbox.failed[0]
            # A handler's error may quote a key of its environment, and every viewer can read it.
            error = mask_known(failure.error)
            status = await self._transport.fail(
                self._worker_id, claim.task_id, claim.token, error, code=failure.code, retry=failure.retry
            )
            del outbox.failed[0]
            outbox.forget(claim.token)
            log.warning(
                "fail attempt",
                task_id=claim.task_id,
                attempt=claim.attempt,
                code=failure.code,
                status=status or "lost",
                error=error_headline(error),
            )
        while outbox.released:
            release = outbox.released[0]
            claim = release.claim
            # Releasing a claim that was taken back changes no row.
            is_released = await self._transport.release(
                self._worker_id, claim.task_id, claim.token, release.reason, release.delay_s
            )
            del outbox.released[0]
            outbox.forget(claim.token)
            log.warning("release attempt", task_id=claim.task_id, is_released=is_released, reason=release.reason)

    async def finish_and_claim(self, limit: int) -> list[Claim] | None:
        """Deliver the results that fit into one call and claim up to `limit` tasks.

        Returns None if the database refused a result: the results were then delivered one by one and nothing was
        claimed. Raises DatabaseUnavailable if no answer came.
        """
        finished = self._next_batch()
        is_rest_left = len(finished) < len(self._outbox.finished)
        claims: list[Claim] | None = []
        if finished or limit:
            try:
                result = await self._call(finished, limit)
            except BadInput:
                if not finished:
                    raise
                await self._finish_one_by_one(finished)
                claims = None
            except DatabaseUnavailable:
                if finished:
                    self._batch_bytes.shrink()
                raise
            else:
                if is_rest_left:
                    self._batch_bytes.grow()
                self._settle(finished, result)
                claims = result.claims
        self._backoff.reset()
        return claims

    async def deliver_all(self) -> None:
        # Each round delivers or raises. A refused result comes back once, as a failure.
        while self._outbox:
            await self.report_failures_and_releases()
            await self.finish_and_claim(0)

    async def back_off(self, error: Exception) -> None:
        """Wait before the next try. Raises `error` if outcomes have waited longer than the time limit."""
        if self._backoff.failures == 0:
            self._failing_since = time.monotonic()
        delay_s = self._backoff.next_delay_s()
        undelivered = self._outbox.undelivered_task_ids()
        if undelivered and time.monotonic() - self._failing_since > self._timeout_s:
            log.error("deliver results timed out", undelivered=undelivered, timeout_s=self._timeout_s, error=str(error))
            raise error
        log.warning(
            "deliver results failed", undelivered=undelivered, error=str(error), failures=self._backoff.failures
        )
        await self._pause(delay_s)

    def _next_batch(self) -> list[Finished]:
        """The oldest results that fit into one call, at least one if there are any."""
        room = self._batch_bytes.size
        batch: list[Finished] = []
        for item in self._outbox.finished:
            # Characters stand for bytes: counting bytes would copy each result, and a few times the limit still passes.
            room -= len(item.result or "")
            if (batch and room < 0) or len(batch) == MAX_RESULTS_PER_CALL:
                break
            batch.append(item)
        return batch

    async def _call(self, finished: Sequence[Finished], limit: int) -> ClaimResult:
        """Claims that arrive after half a lease count as lost: after a whole lease they may belong to others."""
        if not limit:
            return await self._transport.finish_and_claim(self._worker_id, finished, self._queues, 0)
        limit_s = self._lease_s / 2
        deadline = time.monotonic() + limit_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                result = await self._transport.finish_and_claim(self._worker_id, finished, self._queues, limit)
            # Parsing a large answer, or a handler that blocks, can delay the event loop's timeout.
            if time.monotonic() < deadline:
                return result
        raise DatabaseUnavailable(
            f"claiming tasks: no answer within {limit_s:g} s (half of the lease). "
            "Check the load of the database and the network to it."
        )

    async def _finish_one_by_one(self, finished: Sequence[Finished]) -> None:
        for item in finished:
            try:
                result = await self._transport.finish_and_claim(self._worker_id, [item], self._queues, 0)
            except BadInput as error:
                self._outbox.finished.remove(item)
                claim = self._outbox.attempt(item.token).claim
                self._outbox.add_failure(claim, AttemptFailure("BAD_RESULT", str(error)))
            else:
                self._settle([item], result)

    def _settle(self, finished: Sequence[Finished], result: ClaimResult) -> None:
        # Results are appended, so the delivered ones are at the front.
        del self._outbox.finished[: len(finished)]
        for item in finished:
            self._outbox.forget(item.token)
        for token in result.lost:
            log.warning("reject result", reason="claim lost", token=str(token))
