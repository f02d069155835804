"""A worker's life: register, claim, run, finish, and leave in good order.

One call both delivers what is finished and claims what is next. Results survive the database: a delivery is repeated
until it is answered, and the claim token makes the repetition harmless. A worker that is told to end (SIGTERM,
`terminating`) finishes what it holds within the drain limit and gives the rest back; one that is paused finishes and
claims nothing; one that was declared lost drops everything and, unless it was hired, joins again under a new name.
"""

import asyncio
import contextlib
import enum
import os
import random
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar
from uuid import UUID, uuid4

import structlog

from windlass.model.errors import BadInput, DatabaseUnavailable, UnknownWorker
from windlass.model.task import Claim, Finished, Turn
from windlass.model.worker import LIVE, HeldClaim, Pulse, Registration, WorkerStatus
from windlass.policy.backoff import reconnect_delay_s
from windlass.ports.transport import WorkerTransport
from windlass.worker.executor import Executor, Failure, Outcome, Success
from windlass.worker.gpu import GpuReader
from windlass.worker.heartbeat import Heartbeat, OpenTransport

# An idle worker looks for work this often even when no notification comes.
POLL_INTERVAL_S = 5.0
# A task that becomes due is found within this time; below it, looking would be spinning.
POLL_MIN_INTERVAL_S = 0.05
FOREVER = float("inf")
Answer = TypeVar("Answer")
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    queues: tuple[str, ...]
    fleet: str = "default"
    concurrency: int = 1
    heartbeat_interval_s: float = 5.0
    lease_s: float = 30.0
    # For tasks that bring no limit of their own.
    timeout_s: float | None = None
    # From the wish to end until the tasks at hand are given back.
    drain_timeout_s: float = 600.0
    # How long a result is held for a database that does not answer.
    delivery_timeout_s: float = 3600.0
    # Given to a worker that was hired; one started by hand makes its own.
    worker_id: str | None = None
    version: str | None = None


class Ending(enum.Enum):
    LEFT = "left"  # drained: everything finished or given back
    LOST = "lost"  # declared lost or ended by others; its claims are gone


@dataclass(slots=True)
class _Orders:
    """What the worker was told from outside. `changed` is set with every change, and by ended attempts too."""

    changed: asyncio.Event = field(default_factory=asyncio.Event)
    is_draining: bool = False
    drain_deadline: float = FOREVER

    def drain(self, why: str, limit_s: float) -> None:
        if not self.is_draining or limit_s == 0:
            log.info("draining", why=why, limit_s=limit_s)
            self.is_draining = True
            self.drain_deadline = time.monotonic() + limit_s
            self.changed.set()


class WorkerRuntime:
    def __init__(self, settings: WorkerSettings, open_transport: OpenTransport, executor: Executor) -> None:
        self._settings = settings
        self._open_transport = open_transport
        self._executor = executor
        self._orders = _Orders()
        self._signals_seen = 0

    async def run(self) -> Ending:
        """Work until told to end. Raises HandlerNotFound or DatabaseUnavailable if it cannot begin."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, signal.Signals(number).name)
        gpu = GpuReader()
        try:
            await self._executor.start()
            gpu.start()
            async with self._open_transport() as transport:
                while True:
                    life = _Life(self._settings, self._orders, self._executor, gpu, transport, self._open_transport)
                    ending = await life.live()
                    if ending is Ending.LEFT or self._settings.worker_id is not None:
                        return ending
                    log.warning("declared lost; joining again under a new name")
        finally:
            gpu.stop()
            await self._executor.close()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def drain(self, why: str) -> None:
        """Finish what is at hand, then leave."""
        self._orders.drain(why, self._settings.drain_timeout_s)

    def _on_signal(self, name: str) -> None:
        self._signals_seen += 1
        # Whoever asks twice does not want to wait.
        self._orders.drain(name, self._settings.drain_timeout_s if self._signals_seen == 1 else 0.0)


@dataclass(slots=True)
class _Attempt:
    claim: Claim
    progress: float | None = None
    note: str | None = None


@dataclass(slots=True)
class _Outbox:
    """What has ended and is not yet delivered."""

    finished: list[Finished] = field(default_factory=list)
    failed: list[tuple[Claim, Failure]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.finished or self.failed)


class _Life:
    """One incarnation, from registration to its ending."""

    def __init__(
        self,
        settings: WorkerSettings,
        orders: _Orders,
        executor: Executor,
        gpu: GpuReader,
        transport: WorkerTransport,
        open_transport: OpenTransport,
    ) -> None:
        self._settings = settings
        self._orders = orders
        self._transport = transport
        self._executor = executor
        self._gpu = gpu
        self._id = settings.worker_id or f"{socket.gethostname()[:40]}-{os.getpid()}-{uuid4().hex[:6]}"
        # Every claim that is ours until the database has said otherwise: running, or ended and not yet delivered.
        self._held: dict[UUID, _Attempt] = {}
        self._running: set[UUID] = set()
        self._attempts: set[asyncio.Task[None]] = set()
        self._outbox = _Outbox()
        self._look_out: asyncio.Task[None] | None = None
        self._status: WorkerStatus | None = WorkerStatus.ACTIVE
        self._is_paused = False
        self._may_find_work = True
        loop = asyncio.get_running_loop()
        self._heartbeat = Heartbeat(
            open_transport,
            self._id,
            interval_s=settings.heartbeat_interval_s,
            lease_s=settings.lease_s,
            held=self._held_claims,
            vitals=self._vitals,
            on_pulse=lambda pulse: _call_from_thread(loop, self._on_pulse, pulse),
        )

    async def live(self) -> Ending:
        await self._register()
        self._heartbeat.start()
        try:
            ending = await self._work()
        finally:
            await self._heartbeat.stop()
            for task in (*self._attempts, *filter(None, [self._look_out])):
                task.cancel()
        if ending is Ending.LEFT:
            with contextlib.suppress(DatabaseUnavailable):  # then the lease runs out instead
                await self._transport.leave(self._id, "drained")
        log.info("worker ended", worker_id=self._id, ending=ending.value)
        return ending

    async def _register(self) -> None:
        settings = self._settings
        self._status = await self._transport.register(
            Registration(
                worker_id=self._id,
                queues=settings.queues,
                fleet=settings.fleet,
                concurrency=settings.concurrency,
                lease_s=settings.lease_s,
                host=socket.gethostname(),
                pid=os.getpid(),
                version=settings.version,
            )
        )
        log.info(
            "worker registered", worker_id=self._id, queues=list(settings.queues), concurrency=settings.concurrency
        )

    # ------------------------------------------------------------------------------------------------ the loop

    async def _work(self) -> Ending:
        while True:
            self._orders.changed.clear()
            if self._status not in LIVE:
                await self._abandon_all("the worker was ended by others")
                return Ending.LOST
            if time.monotonic() >= self._orders.drain_deadline:
                await self._give_back_all()
                return Ending.LEFT
            free = self._free_places()
            if self._outbox or (free and self._may_find_work):
                try:
                    await self._deliver_and_claim()
                except UnknownWorker:
                    self._status = None
            elif self._orders.is_draining and not self._running:
                return Ending.LEFT
            else:
                await self._wait_for_change(is_looking_for_work=free > 0)

    def _free_places(self) -> int:
        if self._orders.is_draining or self._is_paused:
            return 0
        return self._settings.concurrency - len(self._running)

    async def _wait_for_change(self, *, is_looking_for_work: bool) -> None:
        if is_looking_for_work and (self._look_out is None or self._look_out.done()):
            self._look_out = asyncio.create_task(self._notice_work())
        if self._orders.drain_deadline == FOREVER:
            await self._orders.changed.wait()
        else:
            with contextlib.suppress(TimeoutError):
                remaining_s = self._orders.drain_deadline - time.monotonic()
                await asyncio.wait_for(self._orders.changed.wait(), max(remaining_s, 0.0))

    async def _notice_work(self) -> None:
        """Ends when there may be work: a notification came, a waiting task is due, or the poll interval is over."""
        try:
            await self._transport.wait_for_work(self._settings.queues, await self._patience_s())
        except DatabaseUnavailable:
            await asyncio.sleep(POLL_INTERVAL_S * random.random())  # noqa: S311
        self._may_find_work = True
        self._orders.changed.set()

    async def _patience_s(self) -> float:
        due = await self._transport.next_run_after(self._settings.queues)
        if due is None:
            return POLL_INTERVAL_S
        return min(max((due - datetime.now(UTC)).total_seconds(), POLL_MIN_INTERVAL_S), POLL_INTERVAL_S)

    # ------------------------------------------------------------------------------------- attempts and results

    async def _deliver_and_claim(self) -> None:
        outbox, self._outbox = self._outbox, _Outbox()
        for claim, failure in outbox.failed:
            await self._until_answered(partial(self._report_failure, claim, failure))
        turn = await self._until_answered(partial(self._finish, outbox.finished))
        for token in turn.lost:
            log.warning("a result came too late: the claim was taken back", token=str(token))
        for claim in turn.claims:
            self._begin(claim)

    async def _finish(self, finished: list[Finished]) -> Turn:
        places = self._free_places()
        try:
            turn = await self._transport.finish_and_claim(self._id, finished, self._settings.queues, places)
        except BadInput as error:
            return await self._finish_one_by_one(finished, error)
        for item in finished:
            del self._held[item.token]
        # A full answer means that there may be more; a short one means that now there is none.
        self._may_find_work = places > 0 and len(turn.claims) == places
        return turn

    async def _finish_one_by_one(self, finished: list[Finished], error: BadInput) -> Turn:
        """The database refused a result. Find out whose, so that one bad result costs only its own attempt."""
        if len(finished) > 1:
            turns = [await self._finish([item]) for item in finished]
            return Turn([c for t in turns for c in t.claims], [token for t in turns for token in t.lost])
        for item in finished:
            await self._report_failure(self._held[item.token].claim, Failure("BAD_RESULT", str(error)))
        return Turn([], [])

    async def _report_failure(self, claim: Claim, failure: Failure) -> None:
        status = await self._transport.fail(
            self._id, claim.task_id, claim.token, failure.error, code=failure.code, retry=failure.retry
        )
        self._held.pop(claim.token, None)
        log.warning(
            "attempt failed", task_id=claim.task_id, attempt=claim.attempt, code=failure.code, status=status or "lost"
        )

    async def _until_answered(self, send: Callable[[], Awaitable[Answer]]) -> Answer:
        """Repeat until the database answers: results are what users waited for, and an outage does not cost them."""
        give_up_at = time.monotonic() + self._settings.delivery_timeout_s
        failures = 0
        while True:
            try:
                return await send()
            except DatabaseUnavailable as error:
                failures += 1
                task_ids = [a.claim.task_id for t, a in self._held.items() if t not in self._running]
                if time.monotonic() > min(give_up_at, self._orders.drain_deadline):
                    log.error("results could not be delivered", task_ids=task_ids, error=str(error))
                    raise
                log.warning("not delivered, trying again", task_ids=task_ids, error=str(error), failures=failures)
                await asyncio.sleep(reconnect_delay_s(failures, random.random()))  # noqa: S311

    def _begin(self, claim: Claim) -> None:
        if claim.timeout_s is None and self._settings.timeout_s is not None:
            claim = replace(claim, timeout_s=self._settings.timeout_s)
        self._held[claim.token] = _Attempt(claim)
        self._running.add(claim.token)
        attempt = asyncio.create_task(self._run(claim))
        self._attempts.add(attempt)
        attempt.add_done_callback(self._attempts.discard)

    async def _run(self, claim: Claim) -> None:
        def report(fraction: float, note: str | None) -> None:
            held = self._held[claim.token]
            held.progress, held.note = fraction, note
            self._heartbeat.beat_soon()

        self._file(claim, await self._executor.run(claim, report))

    def _file(self, claim: Claim, outcome: Outcome) -> None:
        self._running.discard(claim.token)
        if isinstance(outcome, Success):
            self._outbox.finished.append(Finished(claim.task_id, claim.token, outcome.result))
        elif isinstance(outcome, Failure):
            self._outbox.failed.append((claim, outcome))
        else:
            del self._held[claim.token]
            log.warning("attempt abandoned", task_id=claim.task_id, reason=outcome.reason)
        self._orders.changed.set()

    async def _abandon_all(self, reason: str) -> None:
        for token in list(self._running):
            self._executor.abort(token, reason)
        if self._attempts:
            await asyncio.wait(list(self._attempts))

    async def _give_back_all(self) -> None:
        claims = [self._held[token].claim for token in self._running]
        await self._abandon_all("the drain limit was reached")
        for claim in claims:
            log.warning("task given back", task_id=claim.task_id)
            await self._transport.release(
                self._id, claim.task_id, claim.token, "its worker had to leave before its end"
            )

    # --------------------------------------------------------------------------------- what the heartbeat brings

    def _held_claims(self) -> list[HeldClaim]:
        """On the heartbeat's thread: dict.copy is atomic."""
        return [HeldClaim(a.claim.task_id, token, a.progress, a.note) for token, a in self._held.copy().items()]

    def _vitals(self) -> dict[str, Any]:
        return {"pid": os.getpid(), **self._gpu.vitals()}

    def _on_pulse(self, pulse: Pulse) -> None:
        for token in pulse.lost & self._running:
            self._executor.abort(token, "its claim was taken back")
        if (pulse.status, pulse.is_paused) == (self._status, self._is_paused):
            return
        log.info("told by the store", status=pulse.status, is_paused=pulse.is_paused)
        self._status, self._is_paused = pulse.status, pulse.is_paused
        self._may_find_work = True
        if pulse.status is WorkerStatus.TERMINATING:
            self._orders.drain("terminating", self._settings.drain_timeout_s)
        self._orders.changed.set()


def _call_from_thread(loop: asyncio.AbstractEventLoop, function: Callable[[Pulse], None], pulse: Pulse) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has just ended
        loop.call_soon_threadsafe(function, pulse)
