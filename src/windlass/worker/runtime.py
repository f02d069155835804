"""A worker's life: register, claim, run, finish, and leave in good order.

One call both delivers what is finished and claims what is next. Results survive the database: a delivery is repeated
until it is answered, and the claim token makes the repetition harmless. A worker that is told to end (SIGTERM,
`terminating`) finishes what it holds within the drain limit and gives the rest back; one that is paused finishes and
claims nothing, and so does one that needs a GPU and sees none; one that was declared lost drops everything and, unless
it was hired, joins again under a new name. One whose handler can no longer be started gives its tasks back and leaves:
it would only use up their attempts. One whose database got another schema than this program knows finishes what it
holds and leaves.
"""

import asyncio
import contextlib
import contextvars
import enum
import os
import random
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Protocol, TypeVar
from uuid import UUID, uuid4

import structlog

from windlass.model.errors import (
    BadInput,
    DatabaseUnavailable,
    HandlerNotFound,
    SchemaMismatch,
    UnknownWorker,
    WindlassError,
)
from windlass.model.task import Claim, ClaimResult, Finished
from windlass.model.worker import LIVE, SAME_SIGNAL_S, HeartbeatReply, HeldClaim, Registration, WorkerKind, WorkerStatus
from windlass.policy.backoff import reconnect_delay_s
from windlass.ports.transport import WorkerTransport
from windlass.worker.executor import AttemptFailure, AttemptSuccess, Executor, NotBegun, Outcome
from windlass.worker.gpu import GpuReader
from windlass.worker.handler import kept_exception
from windlass.worker.heartbeat import Heartbeat, OpenTransport
from windlass.worker.storage import StorageReader

# An idle worker looks for work this often even when no notification comes.
POLL_INTERVAL_S = 5.0
# A task that becomes due is found within this time; below it, looking would be spinning.
POLL_MIN_INTERVAL_S = 0.05
# A cancelled attempt has ended by then, or is an inline handler that will not; leaving does not wait for that one.
CANCEL_TIMEOUT_S = 15.0
# Of results in one call: a second's worth on any good line, where everything at once would never get through.
MAX_DELIVERY_BYTES = 16 << 20
# What any line carries. Thousands of small results fit into it.
MIN_DELIVERY_BYTES = 64 << 10
FOREVER = float("inf")
NOT_FINISHED = "its worker could not finish it"
News = TypeVar("News", HeartbeatReply, SchemaMismatch)
log = structlog.get_logger(__name__)


class ConcurrencyLimit(Protocol):
    """The places of a worker, where they come and go or are others' too; `look_again` when there may be more."""

    def hold(self, count: int) -> None:
        """As many are taken: by attempts that have not ended, and while a claim is under way, by all it asks for."""

    def free(self) -> int:
        """How many more attempts may begin."""


class FixedConcurrency:
    def __init__(self, count: int) -> None:
        self._count = count
        self._held = 0

    def hold(self, count: int) -> None:
        self._held = count

    def free(self) -> int:
        return self._count - self._held


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
    # How long the first registration is tried: a machine that came from far does not go home for a restart of whoever
    # it registers with.
    registration_timeout_s: float = 0.0
    # Given to a worker that was hired; one started by hand makes its own.
    worker_id: str | None = None
    version: str | None = None
    # Without a GPU that answers it would only use up the attempts of what it claims.
    needs_gpu: bool = False
    # Storage that is shared with other machines, and watched.
    storage_path: str | None = None
    kind: WorkerKind = WorkerKind.WORKER
    # Identifies this start of the program when it registers more than once under the same worker id.
    start_id: str = field(default_factory=lambda: uuid4().hex)
    # Told with each heartbeat, for people to read.
    remarks: Mapping[str, str] = field(default_factory=dict)


class ExitReason(enum.Enum):
    LEFT = "left"  # drained: everything finished or given back
    LOST = "lost"  # declared lost or ended by others; its claims are gone


@dataclass(slots=True)
class _ShutdownState:
    """What the worker was told from outside. `changed` is set with every change, and by ended attempts too."""

    changed: asyncio.Event = field(default_factory=asyncio.Event)
    # Told to leave without waiting for anything.
    is_urgent: asyncio.Event = field(default_factory=asyncio.Event)
    is_draining: bool = False
    drain_deadline: float = FOREVER
    # Whose order it is, for log lines: a signal comes from outside of everything.
    context: contextvars.Context = field(default_factory=contextvars.copy_context)

    def drain(self, why: str, limit_s: float) -> None:
        if not self.is_draining or limit_s == 0:
            log.info("draining", why=why, limit_s=limit_s)
            self.is_draining = True
            self.drain_deadline = time.monotonic() + limit_s
            self.changed.set()
        if limit_s == 0:
            self.is_urgent.set()

    async def pause(self, seconds: float) -> None:
        """Wait that long, unless it is urgent to leave."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.is_urgent.wait()


class WorkerRuntime:
    def __init__(
        self,
        settings: WorkerSettings,
        open_transport: OpenTransport,
        executor: Executor,
        places: ConcurrencyLimit | None = None,
    ) -> None:
        """`places`: those of its settings, unless others are given."""
        self._places = places or FixedConcurrency(settings.concurrency)
        self._settings = settings
        self._open_transport = open_transport
        self._executor = executor
        self._gpu = GpuReader(is_needed=settings.needs_gpu, on_change=self._on_gpu_change)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._readers: list[GpuReader | StorageReader] = [self._gpu]
        if settings.storage_path is not None:
            self._readers.append(StorageReader(settings.storage_path))
        self._orders = _ShutdownState()
        # When the first signal came, by the loop's clock.
        self._told_at: float | None = None

    async def run(self) -> ExitReason:
        """Work until told to end. Raises HandlerNotFound, SchemaMismatch or DatabaseUnavailable if it cannot go on."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, signal.Signals(number).name)
        try:
            return await self.work()
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def work(self) -> ExitReason:
        """The same for whoever hears signals itself."""
        try:
            if not await self._start_executor():
                return ExitReason.LEFT
            self._loop = asyncio.get_running_loop()
            for reader in self._readers:
                await asyncio.to_thread(reader.start)
            self._tell_of_gpu()
            async with self._open_transport() as transport:
                return await self._live_on(transport)
        finally:
            for reader in self._readers:
                reader.stop()
            await self._executor.close()

    def drain(self, why: str, limit_s: float | None = None) -> None:
        """Finish what is at hand, then leave. Within the limit, or the one of the settings."""
        self._orders.drain(why, self._settings.drain_timeout_s if limit_s is None else limit_s)

    def look_again(self) -> None:
        """There may be more places than there were."""
        self._orders.changed.set()

    def _may_claim(self) -> bool:
        return self._gpu.shows_gpu or not self._settings.needs_gpu

    def _on_gpu_change(self) -> None:
        """On the reader's thread."""
        with contextlib.suppress(RuntimeError):  # the loop has just ended
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._tell_of_gpu)

    def _tell_of_gpu(self) -> None:
        if not self._may_claim():
            log.warning("claiming nothing: workers of this fleet need a GPU, and this machine shows none")
        self.look_again()

    def _on_signal(self, name: str) -> None:
        now = asyncio.get_running_loop().time()
        if self._told_at is None:
            self._told_at = now
            self._orders.context.run(self._orders.drain, name, self._settings.drain_timeout_s)
        elif now - self._told_at < SAME_SIGNAL_S:
            self._orders.context.run(log.info, "draining already: this soon, a signal is the same again", why=name)
        else:
            # Whoever asks twice does not want to wait.
            self._orders.context.run(self._orders.drain, name, 0.0)

    async def _start_executor(self) -> bool:
        """False when told to end meanwhile: importing a handler may take minutes."""
        starting = asyncio.create_task(self._executor.start())
        told = asyncio.create_task(self._orders.changed.wait())
        await asyncio.wait([starting, told], return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        if starting.done():
            await starting
            return True
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return False

    async def _live_on(self, transport: WorkerTransport) -> ExitReason:
        life = self._new_life(transport)
        if not await self._has_registered(life):
            return ExitReason.LEFT
        while True:
            exit_reason = await life.live()
            if exit_reason is ExitReason.LEFT or self._settings.worker_id is not None:
                return exit_reason
            log.warning("declared lost; joining again under a new name")
            life = self._new_life(transport)
            if not await self._has_joined_again(life):
                return exit_reason

    def _new_life(self, transport: WorkerTransport) -> "_WorkerSession":
        return _WorkerSession(
            self._settings,
            self._orders,
            self._executor,
            self._readers,
            transport,
            self._open_transport,
            self._places,
            self._may_claim,
        )

    async def _has_registered(self, life: "_WorkerSession") -> bool:
        """False when told to end meanwhile. Raises DatabaseUnavailable when the time for it is over."""
        give_up_at = time.monotonic() + self._settings.registration_timeout_s
        failures = 0
        while True:
            try:
                await life.register()
            except DatabaseUnavailable as error:
                failures += 1
                if self._orders.is_draining:
                    return False
                if time.monotonic() >= give_up_at:
                    raise
                log.warning("not registered, trying again", error=str(error), failures=failures)
                await self._orders.pause(reconnect_delay_s(failures, random.random()))  # noqa: S311
            else:
                return True

    async def _has_joined_again(self, life: "_WorkerSession") -> bool:
        """What made us lost may last: this is tried until it works, or until we are told to end."""
        failures = 0
        while not self._orders.is_draining:
            try:
                await life.register()
            except DatabaseUnavailable as error:
                failures += 1
                log.warning("not registered, trying again", error=str(error), failures=failures)
                await self._orders.pause(reconnect_delay_s(failures, random.random()))  # noqa: S311
            else:
                return True
        return False


@dataclass(slots=True)
class _Attempt:
    claim: Claim
    progress: float | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class _Release:
    claim: Claim
    why: str = NOT_FINISHED
    delay_s: float = 0.0


@dataclass(slots=True)
class _Outbox:
    """What has ended and is not yet delivered. Only what the database has answered leaves it."""

    finished: list[Finished] = field(default_factory=list)
    failed: list[tuple[Claim, AttemptFailure]] = field(default_factory=list)
    given_back: list["_Release"] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.finished or self.failed or self.given_back)


@dataclass(slots=True)
class _AdaptiveBatch:
    """How much one call carries: half as much after one that was not answered, a little more after each full one."""

    most: int
    least: int = 1
    size: int = 0

    def __post_init__(self) -> None:
        self.size = self.most

    def shrink(self) -> None:
        self.size = max(self.size // 2, self.least)

    def grow(self) -> None:
        # Slowly: what was too much once is asked for again, and costs a lease of waiting if it still is.
        self.size = min(self.size + max(self.size // 8, 1), self.most)


class _WorkerSession:
    """One incarnation, from registration to its ending."""

    def __init__(
        self,
        settings: WorkerSettings,
        orders: _ShutdownState,
        executor: Executor,
        readers: Sequence[GpuReader | StorageReader],
        transport: WorkerTransport,
        open_transport: OpenTransport,
        places: ConcurrencyLimit,
        may_claim: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._places = places
        self._may_claim = may_claim
        # Places that a claim under way is for.
        self._asked = 0
        # One call claims for at most half of the places: the other half works while the database does.
        self._claim_limit = _AdaptiveBatch((settings.concurrency + 1) // 2)
        self._delivery_bytes = _AdaptiveBatch(MAX_DELIVERY_BYTES, MIN_DELIVERY_BYTES)
        self._orders = orders
        self._transport = transport
        self._executor = executor
        self._readers = readers
        self._id = settings.worker_id or f"{socket.gethostname()[:40]}-{os.getpid()}-{uuid4().hex[:6]}"
        # Every claim that is ours until the database has said otherwise: running, or ended and not yet delivered.
        self._held: dict[UUID, _Attempt] = {}
        # The attempts that have not ended, and which hand is at each; None for those that still wait in `_ready`.
        self._running: dict[UUID, asyncio.Task[None] | None] = {}
        self._ready: deque[_Attempt] = deque()
        self._hands: set[asyncio.Task[None]] = set()
        self._is_relief_called = False
        self._outbox = _Outbox()
        # Hands that did not end when they were cancelled; nobody waits for them again.
        self._stubborn: set[asyncio.Task[None]] = set()
        self._cannot_go_on: WindlassError | None = None
        self._look_out: asyncio.Task[None] | None = None
        self._looks_in_vain = 0
        self._unanswered = 0
        self._unanswered_since = 0.0
        self._status: WorkerStatus | None = WorkerStatus.ACTIVE
        self._is_paused = False
        self._may_find_work = True
        self._idle_since = time.monotonic()
        loop = asyncio.get_running_loop()
        self._heartbeat = Heartbeat(
            open_transport,
            self._id,
            interval_s=settings.heartbeat_interval_s,
            lease_s=settings.lease_s,
            held=self._held_claims,
            vitals=self._vitals,
            on_pulse=lambda pulse: _call_from_thread(loop, self._on_pulse, pulse),
            on_mismatch=lambda error: _call_from_thread(loop, self._give_up, error),
        )

    async def live(self) -> ExitReason:
        self._heartbeat.start()
        try:
            exit_reason = await self._work()
        finally:
            await self._heartbeat.stop()
            await self._end_attempts()
            if self._look_out is not None:
                self._look_out.cancel()
        if exit_reason is ExitReason.LEFT:
            with contextlib.suppress(DatabaseUnavailable):  # then the lease runs out instead
                await self._transport.deregister(self._id, "drained")
        log.info("worker ended", worker_id=self._id, exit_reason=exit_reason.value)
        if self._cannot_go_on is not None:
            raise self._cannot_go_on
        return exit_reason

    async def register(self) -> None:
        settings = self._settings
        # In every line from now on.
        structlog.contextvars.bind_contextvars(worker_id=self._id)
        self._orders.context = contextvars.copy_context()
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
                kind=settings.kind,
                start_id=settings.start_id,
            )
        )
        log.info(
            "worker registered", worker_id=self._id, queues=list(settings.queues), concurrency=settings.concurrency
        )
        self._drain_if_terminating()

    # ------------------------------------------------------------------------------------------------ the loop

    async def _work(self) -> ExitReason:
        while True:
            self._orders.changed.clear()
            if self._status not in LIVE:
                log.warning("ended by others", worker_id=self._id, running=len(self._running))
                await self._end_attempts()
                with contextlib.suppress(WindlassError):  # the claims are gone anyway
                    await self._deliver_all()
                return ExitReason.LOST
            if time.monotonic() >= self._orders.drain_deadline:
                await self._end_attempts()
                if not self._keeps_results():
                    await self._deliver_all()
                    return ExitReason.LEFT
                await self._take_turn()
                continue
            free = self._free_places()
            if self._outbox or (free and self._may_find_work):
                await self._take_turn()
            elif self._orders.is_draining and not self._running:
                return ExitReason.LEFT
            else:
                await self._wait_for_change(is_looking_for_work=free > 0)

    def _keeps_results(self) -> bool:
        """Whether it stays for what it has to deliver, although its time is up: work that is done is not done again.
        For giving back alone nobody stays, as the lease does that too; nor where the schema is another."""
        if self._orders.is_urgent.is_set() or isinstance(self._cannot_go_on, SchemaMismatch):
            return False
        return bool(self._outbox.finished or self._outbox.failed)

    def _free_places(self) -> int:
        if self._orders.is_draining or self._is_paused or not self._may_claim():
            return 0
        return self._places.free()

    def _hold_places(self) -> None:
        self._places.hold(len(self._running) + self._asked)

    async def _wait_for_change(self, *, is_looking_for_work: bool) -> None:
        if is_looking_for_work and (self._look_out is None or self._look_out.done()):
            self._look_out = asyncio.create_task(self._notice_work())
        if self._orders.drain_deadline == FOREVER:
            await self._orders.changed.wait()
        else:
            with contextlib.suppress(TimeoutError):
                remaining_s = self._orders.drain_deadline - time.monotonic()
                async with asyncio.timeout(max(remaining_s, 0.0)):
                    await self._orders.changed.wait()

    async def _notice_work(self) -> None:
        """Ends when there may be work: a notification came, a waiting task is due, or the poll interval is over."""
        try:
            await self._transport.wait_for_work(self._settings.queues, await self._patience_s())
        except Exception as error:  # whatever it is, claiming says it aloud; without a look-out nobody would claim
            log.debug("looking out for work failed", error=str(error))
            await asyncio.sleep(POLL_INTERVAL_S * random.random())  # noqa: S311
        self._may_find_work = True
        self._orders.changed.set()

    async def _patience_s(self) -> float:
        due = await self._transport.next_run_after(self._settings.queues)
        if due is None:
            return POLL_INTERVAL_S
        wait_s = (due - datetime.now(UTC)).total_seconds()
        # What is due by our clock and not yet by the database's would be asked for again and again.
        self._looks_in_vain = self._looks_in_vain + 1 if wait_s <= 0 else 0
        least_s = POLL_MIN_INTERVAL_S * 2.0 ** min(self._looks_in_vain, 10)
        return min(max(wait_s, least_s), POLL_INTERVAL_S)

    # ------------------------------------------------------------------------------------- attempts and results

    async def _take_turn(self) -> None:
        """Deliver and claim. Results are what users waited for, and an outage of the database does not cost them."""
        # After a call without an answer results go alone: nothing then grows old while they are on their way.
        is_results_first = bool(self._unanswered and self._outbox)
        self._asked = 0 if is_results_first else min(self._free_places(), self._claim_limit.size)
        self._hold_places()
        try:
            turn = await self._deliver(self._asked)
            self._begin(turn.claims)
            self._unanswered = 0
        except UnknownWorker as error:
            # Ended by others, or forgotten: we hear of it here too, in case no heartbeat gets through.
            log.warning("no longer a worker", error=str(error))
            self._status = None
        except BadInput:
            raise
        except SchemaMismatch as error:
            self._give_up(error)
            await self._bear_with(error)
        except Exception as error:  # also what no driver should say: the work at hand is worth another try
            await self._bear_with(error)
        finally:
            self._asked = 0
            self._hold_places()

    async def _bear_with(self, error: Exception) -> None:
        if self._unanswered == 0:
            self._unanswered_since = time.monotonic()
        self._unanswered += 1
        undelivered = [held.claim.task_id for token, held in self._held.items() if token not in self._running]
        if undelivered and time.monotonic() - self._unanswered_since > self._settings.delivery_timeout_s:
            log.error("results could not be delivered", task_ids=undelivered, error=str(error))
            raise error
        log.warning("no answer, trying again", undelivered=undelivered, error=str(error), failures=self._unanswered)
        await self._orders.pause(reconnect_delay_s(self._unanswered, random.random()))  # noqa: S311

    async def _deliver(self, places: int) -> ClaimResult:
        """Empty the outbox as far as one call carries it, and claim as many tasks as there are places."""
        await self._report_failures()
        finished = self._next_delivery()
        is_rest_left = len(finished) < len(self._outbox.finished)
        if not finished and not places:
            return ClaimResult([], [])
        turn: ClaimResult | None = None
        if places:
            # Before asking: what is announced while we wait is not in the answer, and must not be forgotten after it.
            self._may_find_work = False
        try:
            turn = await self._finish_and_claim(finished, places)
        except BadInput:
            if not finished:
                raise
            return await self._finish_singly(finished)
        except DatabaseUnavailable:
            if finished:
                self._delivery_bytes.shrink()
            if places:
                self._claim_limit.shrink()
            raise
        finally:
            # No answer says nothing, and a full one means that there may be more; a short one: now there is none.
            if turn is None or 0 < places == len(turn.claims):
                self._may_find_work = True
        if is_rest_left:
            self._delivery_bytes.grow()
        if self._claim_limit.size == places == len(turn.claims):
            self._claim_limit.grow()
        self._settle(finished, turn)
        return turn

    async def _report_failures(self) -> None:
        """And give back what is to be given back."""
        while self._outbox.failed:
            await self._report_failure(*self._outbox.failed[0])
            del self._outbox.failed[0]
        while self._outbox.given_back:
            await self._give_back(self._outbox.given_back[0])
            del self._outbox.given_back[0]

    def _next_delivery(self) -> list[Finished]:
        """Those that have waited longest: at least one, if there are any, and as many as fit into a call."""
        room = self._delivery_bytes.size
        batch: list[Finished] = []
        for item in self._outbox.finished:
            # Characters for bytes: exact ones would cost a copy of each, and a few times as much still gets through.
            room -= len(item.result or "")
            if batch and room < 0:
                break
            batch.append(item)
        return batch

    async def _finish_and_claim(self, finished: Sequence[Finished], places: int) -> ClaimResult:
        """Claims that come later than half a lease count as not come: after a whole one others may have them."""
        if not places:
            return await self._transport.finish_and_claim(self._id, finished, self._settings.queues, 0)
        limit_s = self._settings.lease_s / 2
        deadline = time.monotonic() + limit_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                turn = await self._transport.finish_and_claim(self._id, finished, self._settings.queues, places)
            # Reading a large answer, or a handler that holds up the loop, keeps the clock of the loop from striking.
            if time.monotonic() < deadline:
                return turn
        raise DatabaseUnavailable(
            f"claiming tasks: no answer within {limit_s:g} s, half of the lease: is the database or the way to it slow?"
        )

    async def _deliver_all(self) -> None:
        while self._outbox:  # each round delivers or raises; a refused result comes back once, as a failure
            await self._deliver(0)

    async def _finish_singly(self, finished: Sequence[Finished]) -> ClaimResult:
        """The database refused a result. Find out whose, so that one bad result costs only its own attempt."""
        for item in finished:
            try:
                turn = await self._transport.finish_and_claim(self._id, [item], self._settings.queues, 0)
            except BadInput as error:
                self._outbox.finished.remove(item)
                self._outbox.failed.append((self._held[item.token].claim, AttemptFailure("BAD_RESULT", str(error))))
            else:
                self._settle([item], turn)
        return ClaimResult([], [])

    def _settle(self, finished: Sequence[Finished], turn: ClaimResult) -> None:
        # New ones are added at the end, so those that were delivered stand at the front.
        del self._outbox.finished[: len(finished)]
        for item in finished:
            del self._held[item.token]
        for token in turn.lost:
            log.warning("a result came too late: the claim was taken back", token=str(token))

    async def _report_failure(self, claim: Claim, failure: AttemptFailure) -> None:
        status = await self._transport.fail(
            self._id, claim.task_id, claim.token, failure.error, code=failure.code, retry=failure.retry
        )
        del self._held[claim.token]
        log.warning(
            "attempt failed",
            task_id=claim.task_id,
            attempt=claim.attempt,
            code=failure.code,
            status=status or "lost",
            error=failure.error.strip().rpartition("\n")[2],
        )

    async def _give_back(self, given_back: _Release) -> None:
        claim, why = given_back.claim, given_back.why
        # For a claim that was taken from us this touches no row.
        is_given_back = await self._transport.release(self._id, claim.task_id, claim.token, why, given_back.delay_s)
        del self._held[claim.token]
        log.warning("attempt ended before its time", task_id=claim.task_id, is_given_back=is_given_back, why=why)

    def _begin(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            if claim.timeout_s is None and self._settings.timeout_s is not None:
                claim = replace(claim, timeout_s=self._settings.timeout_s)  # noqa: PLW2901
            held = self._held[claim.token] = _Attempt(claim)
            self._running[claim.token] = None
            self._ready.append(held)
        if claims:
            self._call_hand()

    def _call_hand(self) -> None:
        self._is_relief_called = True
        hand = asyncio.create_task(self._work_off())
        self._hands.add(hand)
        hand.add_done_callback(self._hands.discard)

    async def _work_off(self) -> None:
        """A hand: runs what is ready, one attempt after the other for as long as none makes it wait.

        Another hand is always called before, and goes on where this one has to wait. So all that is ready runs at the
        same time, but hundreds of small attempts do not cost a task of the event loop each.
        """
        hand = asyncio.current_task()
        self._is_relief_called = False
        while self._ready:
            held = self._ready.popleft()
            if self._ready and not self._is_relief_called:
                self._call_hand()
            self._running[held.claim.token] = hand
            await self._run(held)
            if hand is None or hand.cancelling():
                # Whatever is left of the cancellation must not hit the next attempt.
                if self._ready and not self._is_relief_called:
                    self._call_hand()
                return

    async def _run(self, held: _Attempt) -> None:
        claim = held.claim

        def report(fraction: float, note: str | None) -> None:
            held.progress, held.note = fraction, note
            self._heartbeat.beat_soon()

        try:
            self._file(claim, await self._executor.run(claim, report))
        except asyncio.CancelledError:
            self._outbox.given_back.append(_Release(claim))
        except NotBegun as error:
            self._outbox.given_back.append(_Release(claim, str(error) or NOT_FINISHED, error.delay_s))
        except HandlerNotFound as error:
            self._outbox.given_back.append(_Release(claim))
            self._give_up(error)
        except Exception as error:
            # Ours, not the handler's. It must end all the same: a claim that is held is beaten for, for ever.
            self._file(claim, AttemptFailure("WORKER_ERROR", kept_exception(error)))
        del self._running[claim.token]
        self._hold_places()
        self._idle_since = time.monotonic()
        self._orders.changed.set()

    def _give_up(self, error: WindlassError) -> None:
        """We cannot go on: what runs may finish, then we leave and say why."""
        self._cannot_go_on = self._cannot_go_on or error
        self._orders.drain(str(error), self._settings.drain_timeout_s)

    def _cancel(self, token: UUID) -> None:
        hand = self._running[token]
        if hand is not None:
            hand.cancel()
            return
        held = self._held[token]
        self._ready.remove(held)
        del self._running[token]
        self._hold_places()
        self._outbox.given_back.append(_Release(held.claim))
        self._orders.changed.set()

    def _file(self, claim: Claim, outcome: Outcome) -> None:
        if isinstance(outcome, AttemptSuccess):
            self._outbox.finished.append(Finished(claim.task_id, claim.token, outcome.result))
        else:
            self._outbox.failed.append((claim, outcome))

    async def _end_attempts(self) -> None:
        """Whatever still runs is cancelled and then waits in the outbox to be given back."""
        for token in list(self._running):
            self._cancel(token)
        if hands := {hand for hand in self._running.values() if hand is not None} - self._stubborn:
            _, self._stubborn = await asyncio.wait(hands, timeout=CANCEL_TIMEOUT_S)

    # --------------------------------------------------------------------------------- what the heartbeat brings

    def _held_claims(self) -> list[HeldClaim]:
        """On the heartbeat's thread: dict.copy is atomic."""
        return [HeldClaim(a.claim.task_id, token, a.progress, a.note) for token, a in self._held.copy().items()]

    def _vitals(self) -> dict[str, Any]:
        # For how long it has had nothing to do; the control loop lets the most idle go first.
        idle_s = 0.0 if self._running else round(time.monotonic() - self._idle_since, 1)
        vitals: dict[str, Any] = {"pid": os.getpid(), "idle_s": idle_s, **self._settings.remarks}
        for reader in self._readers:
            vitals |= reader.vitals()
        return vitals

    def _on_pulse(self, pulse: HeartbeatReply) -> None:
        for token in pulse.lost & self._running.keys():
            self._cancel(token)
        if (pulse.status, pulse.is_paused) == (self._status, self._is_paused):
            return
        log.info("told by the store", status=pulse.status, is_paused=pulse.is_paused)
        self._status, self._is_paused = pulse.status, pulse.is_paused
        self._may_find_work = True
        self._drain_if_terminating()
        self._orders.changed.set()

    def _drain_if_terminating(self) -> None:
        if self._status is WorkerStatus.TERMINATING:
            self._orders.drain("terminating", self._settings.drain_timeout_s)


def _call_from_thread(loop: asyncio.AbstractEventLoop, function: Callable[[News], None], news: News) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has just ended
        loop.call_soon_threadsafe(function, news)
