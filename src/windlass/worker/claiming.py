"""Decides when a worker claims and how many tasks it asks for.

A worker claims when it has free slots and there may be work: after a notification, when a queued task becomes due,
after the poll interval, or while answers come back full. Results travel in the same call. Never holds more claims than
the concurrency limit allows, whatever had to be repeated.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Protocol

import structlog

from windlass.model.errors import DatabaseUnavailable
from windlass.model.task import Claim
from windlass.ports.transport import WorkerTransport
from windlass.worker.adaptive_batch import AdaptiveBatch
from windlass.worker.attempts import Attempts
from windlass.worker.claim_race import ClaimRace
from windlass.worker.delivery import Delivery

# An idle worker polls this often even when no notification comes.
POLL_INTERVAL_S = 5.0
# A task that becomes due is found within this time. Shorter intervals would be busy waiting.
POLL_MIN_INTERVAL_S = 0.05
log = structlog.get_logger(__name__)


class ConcurrencyLimit(Protocol):
    """How many attempts a worker may run. Where the limit changes, call `WorkerRuntime.recheck_capacity` after it."""

    def set_used(self, count: int) -> None:
        """Slots in use: attempts that have not ended plus tasks that a call in progress asks for."""

    def count_free(self) -> int:
        """How many more attempts may begin."""


class FixedConcurrency:
    def __init__(self, count: int) -> None:
        self._count = count
        self._used = 0

    def set_used(self, count: int) -> None:
        self._used = count

    def count_free(self) -> int:
        return self._count - self._used


class Claiming:
    def __init__(
        self,
        transport: WorkerTransport,
        queues: Sequence[str],
        limit: ConcurrencyLimit,
        attempts: Attempts,
        delivery: Delivery,
        *,
        concurrency: int,
        may_claim: Callable[[], bool],
        on_work: Callable[[], None],
    ) -> None:
        """`on_work` is called when there may be work again."""
        self._transport = transport
        self._queues = queues
        self._limit = limit
        self._attempts = attempts
        self._delivery = delivery
        self._may_claim = may_claim
        self._on_work = on_work
        # One call claims for at most half of the slots: the other half works while the database does.
        self._batch = AdaptiveBatch((concurrency + 1) // 2)
        # Tasks that the call in progress asks for.
        self._requested = 0
        self._may_find_work = True
        self._watcher: asyncio.Task[None] | None = None
        # Consecutive polls for a task that is due by our clock but not by the database's.
        self._early_polls = 0
        self._race = ClaimRace()

    @property
    def should_claim(self) -> bool:
        return self._may_find_work and self.count_free() > 0

    def count_free(self) -> int:
        return self._limit.count_free() if self._may_claim() else 0

    def expect_work(self) -> None:
        """Claim again without waiting for a notification."""
        self._may_find_work = True

    def set_delay(self, share: float | None) -> None:
        """What the reply to a heartbeat says: see ClaimRace."""
        self._race.set_share(share)

    def update_used_slots(self) -> None:
        self._limit.set_used(self._attempts.count + self._requested)

    async def exchange(self) -> None:
        """Deliver what the outbox holds, claim tasks for free slots in the same call, and begin them."""
        limit = 0 if self._delivery.must_go_alone else min(self.count_free(), self._batch.size)
        self._requested = limit
        self.update_used_slots()
        try:
            await self._delivery.report_failures_and_releases()
            self._attempts.begin(await self._claim(limit) or ())
        finally:
            # Only after the new attempts have begun: other runtimes may share the limit.
            self._requested = 0
            self.update_used_slots()

    async def _claim(self, limit: int) -> list[Claim] | None:
        if limit:
            # Before the call: the answer does not contain work that is announced while we wait for it.
            self._may_find_work = False
        claims: list[Claim] | None = None
        try:
            claims = await self._delivery.finish_and_claim(limit)
        except DatabaseUnavailable:
            if limit:
                self._batch.shrink()
            raise
        finally:
            # A full answer means that there may be more. A missing answer means nothing.
            if claims is None or 0 < limit == len(claims):
                self._may_find_work = True
        if limit:
            self._race.claimed(len(claims or ()), is_busy=self._attempts.count > 0)
        if claims is not None and self._batch.size == limit == len(claims):
            self._batch.grow()
        return claims

    def watch_for_work(self) -> None:
        """Start waiting for work in the background, unless that is under way."""
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._wait_for_work())

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()

    async def _wait_for_work(self) -> None:
        try:
            timeout_s, started = await self._poll_delay_s(), time.monotonic()
            await self._transport.wait_for_work(self._queues, timeout_s)
            if time.monotonic() - started < timeout_s:
                self._race.notified()
                if (delay_s := self._race.delay_s(is_busy=self._attempts.count > 0)) > 0:
                    await asyncio.sleep(delay_s)
        except (
            Exception
        ) as error:  # any error ends in a claim, which reports it; without one the worker would stay idle
            log.debug("wait for work failed", error=str(error))
            await asyncio.sleep(POLL_INTERVAL_S * random.random())  # noqa: S311
        self._may_find_work = True
        self._on_work()

    async def _poll_delay_s(self) -> float:
        due = await self._transport.next_run_after(self._queues)
        if due is None:
            return POLL_INTERVAL_S
        wait_s = (due - datetime.now(UTC)).total_seconds()
        # If our clock is ahead of the database's, a task looks due here and cannot be claimed yet: poll less and less.
        self._early_polls = self._early_polls + 1 if wait_s <= 0 else 0
        min_delay_s = POLL_MIN_INTERVAL_S * 2.0 ** min(self._early_polls, 10)
        return min(max(wait_s, min_delay_s), POLL_INTERVAL_S)
