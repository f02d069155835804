"""The lifecycle of a worker: register, work, drain, exit.

A worker that is drained (SIGTERM, `terminating`) finishes its attempts within the drain time limit, releases the rest
and deregisters. One that is paused, or needs a GPU and sees none, finishes its attempts and claims nothing. One that
was declared lost cancels its attempts; if it was started by hand, it registers again under a new id. One that cannot
continue (its handler cannot be started, the database has an unknown schema) drains and raises the reason.

Claiming, attempts and delivery have their own modules; a session connects them with the heartbeat.
"""

import asyncio
import contextlib
import contextvars
import enum
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import uuid4

import structlog

from windlass.model.errors import BadInput, DatabaseUnavailable, SchemaMismatch, UnknownWorker, WindlassError
from windlass.model.worker import LIVE, SAME_SIGNAL_S, HeartbeatReply, WorkerKind, WorkerStatus
from windlass.ports.transport import WorkerTransport
from windlass.retry import retrying
from windlass.worker.attempts import Attempts
from windlass.worker.claiming import Claiming, ConcurrencyLimit, FixedConcurrency
from windlass.worker.delivery import Delivery, Outbox
from windlass.worker.executor import Executor
from windlass.worker.gpu import GpuReader
from windlass.worker.heartbeat import Heartbeat, OpenTransport
from windlass.worker.output_buffer import OutputBuffer
from windlass.worker.output_shipper import STOP_TIMEOUT_S, URGENT_STOP_TIMEOUT_S, OutputShipper
from windlass.worker.registration import RegistrationSettings
from windlass.worker.shutdown_state import FOREVER, ShutdownState
from windlass.worker.storage import StorageReader

_Value = TypeVar("_Value", HeartbeatReply, SchemaMismatch)
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings(RegistrationSettings):
    # For tasks without a time limit of their own.
    timeout_s: float | None = None
    # From the drain request until running tasks are released.
    drain_timeout_s: float = 600.0
    # How long a result is kept for a database that does not answer.
    delivery_timeout_s: float = 3600.0
    # Set for a spawned worker. A worker started by hand makes up its own.
    worker_id: str | None = None
    # Claim nothing while no GPU responds: the attempts would only fail.
    needs_gpu: bool = False
    # Mount point of shared storage whose usage is reported.
    storage_path: str | None = None
    kind: WorkerKind = WorkerKind.WORKER
    # Sent with each heartbeat, for people to read.
    remarks: Mapping[str, str] = field(default_factory=dict)


class ExitReason(enum.Enum):
    DRAINED = "drained"  # every task is finished or released
    LOST = "lost"  # declared lost or terminated by the control plane; its claims are gone


class WorkerRuntime:
    def __init__(
        self,
        settings: WorkerSettings,
        open_transport: OpenTransport,
        executor: Executor,
        concurrency_limit: ConcurrencyLimit | None = None,
        output: OutputBuffer | None = None,
    ) -> None:
        """`concurrency_limit` replaces the fixed limit of the settings. `output`: what the worker prints, to send."""
        self._output = output
        self._limit = concurrency_limit or FixedConcurrency(settings.concurrency)
        self._settings = settings
        self._open_transport = open_transport
        self._executor = executor
        self._gpu = GpuReader(is_needed=settings.needs_gpu, on_change=self._on_gpu_change)
        self._readers: list[GpuReader | StorageReader] = [self._gpu]
        if settings.storage_path is not None:
            self._readers.append(StorageReader(settings.storage_path))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._shutdown = ShutdownState()
        # Time of the first signal, on the event loop's clock.
        self._signalled_at: float | None = None

    @property
    def is_draining(self) -> bool:
        return self._shutdown.is_draining

    async def run(self) -> ExitReason:
        """Work until drained. Raises HandlerNotFound, SchemaMismatch or DatabaseUnavailable if it cannot continue."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, signal.Signals(number).name)
        try:
            return await self.work()
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def work(self) -> ExitReason:
        """Like `run`, for callers that handle signals themselves."""
        try:
            if not await self._start_executor():
                return ExitReason.DRAINED
            self._loop = asyncio.get_running_loop()
            for reader in self._readers:
                await asyncio.to_thread(reader.start)
            self._check_gpu()
            async with self._open_transport() as transport:
                return await self._run_sessions(transport)
        finally:
            for reader in self._readers:
                reader.stop()
            await self._executor.close()

    def drain(self, reason: str, limit_s: float | None = None) -> None:
        """Finish the running tasks within the limit (default: that of the settings), then exit. 0: exit at once."""
        self._shutdown.drain(reason, self._settings.drain_timeout_s if limit_s is None else limit_s)

    def recheck_capacity(self) -> None:
        """Call after the concurrency limit has risen."""
        self._shutdown.changed.set()

    def _may_claim(self) -> bool:
        return self._gpu.shows_gpu or not self._settings.needs_gpu

    def _on_gpu_change(self) -> None:
        """Runs on the reader's thread."""
        with contextlib.suppress(RuntimeError):  # the loop has just closed
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._check_gpu)

    def _check_gpu(self) -> None:
        if not self._may_claim():
            log.warning("stop claiming", reason="no GPU found", fleet=self._settings.fleet)
        self._shutdown.changed.set()

    def _on_signal(self, name: str) -> None:
        now = asyncio.get_running_loop().time()
        run = self._shutdown.context.run
        if self._signalled_at is None:
            self._signalled_at = now
            run(self.drain, name)
        elif now - self._signalled_at < SAME_SIGNAL_S:
            run(log.info, "ignored repeated signal", signal=name)
        else:
            run(self.drain, name, 0.0)

    async def _start_executor(self) -> bool:
        """Returns False if drained meanwhile: importing a handler may take minutes."""
        starting = asyncio.create_task(self._executor.start())
        draining = asyncio.create_task(self._shutdown.changed.wait())
        await asyncio.wait([starting, draining], return_when=asyncio.FIRST_COMPLETED)
        draining.cancel()
        if starting.done():
            await starting
            return True
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return False

    async def _run_sessions(self, transport: WorkerTransport) -> ExitReason:
        """One session, or for a worker started by hand another one under a new id whenever it was declared lost."""
        session = self._new_session(transport)
        if not await self._register(session, self._settings.registration_timeout_s):
            return ExitReason.DRAINED
        while True:
            exit_reason = await session.run()
            if exit_reason is ExitReason.DRAINED or self._settings.worker_id is not None:
                return exit_reason
            log.warning("register lost worker")
            session = self._new_session(transport)
            # The cause of the loss may last, so this is retried without a time limit.
            if self._shutdown.is_draining or not await self._register(session, FOREVER):
                return exit_reason

    def _new_session(self, transport: WorkerTransport) -> "_WorkerSession":
        return _WorkerSession(
            self._settings,
            self._shutdown,
            self._executor,
            self._readers,
            transport,
            self._open_transport,
            self._limit,
            self._may_claim,
            self._output,
        )

    async def _register(self, session: "_WorkerSession", timeout_s: float) -> bool:
        """Returns False if drained meanwhile. Raises DatabaseUnavailable after the time limit."""
        shutdown = self._shutdown
        try:
            await retrying(
                session.register,
                "register worker failed",
                timeout_s=timeout_s,
                is_stopped=lambda: shutdown.is_draining,
                pause=shutdown.pause,
            )
        except DatabaseUnavailable:
            if shutdown.is_draining:
                return False
            raise
        return True


class _WorkerSession:
    """One worker id, from registration to exit."""

    def __init__(
        self,
        settings: WorkerSettings,
        shutdown: ShutdownState,
        executor: Executor,
        readers: Sequence[GpuReader | StorageReader],
        transport: WorkerTransport,
        open_transport: OpenTransport,
        limit: ConcurrencyLimit,
        may_claim: Callable[[], bool],
        output: OutputBuffer | None,
    ) -> None:
        self._settings = settings
        self._shutdown = shutdown
        self._readers = readers
        self._transport = transport
        self._is_machine_fit = may_claim
        self._id = settings.worker_id or f"{socket.gethostname()[:40]}-{os.getpid()}-{uuid4().hex[:6]}"
        self._status: WorkerStatus | None = WorkerStatus.ACTIVE
        self._is_paused = False
        self._fatal_error: WindlassError | None = None
        self._outbox = Outbox()
        loop = asyncio.get_running_loop()
        self._heartbeat = Heartbeat(
            open_transport,
            self._id,
            interval_s=settings.heartbeat_interval_s,
            lease_s=settings.lease_s,
            held_claims=self._outbox.held_claims,
            vitals=self._vitals,
            on_reply=lambda reply: _call_from_thread(loop, self._on_heartbeat_reply, reply),
            on_mismatch=lambda error: _call_from_thread(loop, self._drain_for_error, error),
        )
        self._output = output
        self._shipper = OutputShipper(open_transport, self._id, output) if output is not None else None
        self._attempts = Attempts(
            executor,
            self._outbox,
            output=output,
            default_timeout_s=settings.timeout_s,
            on_progress=self._heartbeat.send_soon,
            on_end=self._on_attempt_end,
            on_handler_lost=self._drain_for_error,
        )
        self._delivery = Delivery(
            transport,
            self._id,
            settings.queues,
            self._outbox,
            lease_s=settings.lease_s,
            timeout_s=settings.delivery_timeout_s,
            pause=shutdown.pause,
        )
        self._claiming = Claiming(
            transport,
            settings.queues,
            limit,
            self._attempts,
            self._delivery,
            concurrency=settings.concurrency,
            may_claim=self._may_claim,
            on_work=shutdown.changed.set,
        )

    async def register(self) -> None:
        settings = self._settings
        # Every log line from now on carries the id.
        structlog.contextvars.bind_contextvars(worker_id=self._id)
        self._shutdown.context = contextvars.copy_context()
        self._status = await self._transport.register(settings.registration(self._id, settings.kind))
        log.info("registered worker", queues=list(settings.queues), concurrency=settings.concurrency)
        self._drain_if_terminating()

    async def run(self) -> ExitReason:
        self._heartbeat.start()
        if self._shipper is not None:
            self._shipper.start()
        try:
            exit_reason = await self._work()
        finally:
            await self._heartbeat.stop()
            await self._attempts.cancel_all()
            self._claiming.close()
            # Before it deregisters: then the control plane deletes the machine.
            if self._shipper is not None and self._output is not None:
                self._output.close()
                is_urgent = self._shutdown.is_urgent.is_set()
                await self._shipper.stop(URGENT_STOP_TIMEOUT_S if is_urgent else STOP_TIMEOUT_S)
        if exit_reason is ExitReason.DRAINED:
            with contextlib.suppress(DatabaseUnavailable):  # then the lease expires instead
                await self._transport.deregister(self._id, "drained")
        log.info("stopped worker", exit_reason=exit_reason.value)
        if self._fatal_error is not None:
            raise self._fatal_error
        return exit_reason

    async def _work(self) -> ExitReason:
        shutdown = self._shutdown
        while True:
            shutdown.changed.clear()
            if self._status not in LIVE:
                log.warning("stop terminated worker", running=self._attempts.count)
                await self._attempts.cancel_all()
                with contextlib.suppress(WindlassError):  # the claims are gone anyway
                    await self._delivery.deliver_all()
                return ExitReason.LOST
            if time.monotonic() >= shutdown.deadline:
                await self._attempts.cancel_all()
                if not self._must_wait_for_delivery():
                    await self._delivery.deliver_all()
                    return ExitReason.DRAINED
                await self._exchange()
            elif self._outbox or self._claiming.should_claim:
                await self._exchange()
            elif shutdown.is_draining and not self._attempts.count:
                return ExitReason.DRAINED
            else:
                if self._claiming.count_free() > 0:
                    self._claiming.watch_for_work()
                await self._wait_for_change()

    async def _exchange(self) -> None:
        """Deliver and claim. An outage of the database must not cost the results."""
        try:
            await self._claiming.exchange()
        except UnknownWorker as error:
            # The worker was terminated or purged. This reports it even if no heartbeat gets through.
            log.warning("stop unknown worker", error=str(error))
            self._status = None
        except BadInput:
            raise
        except SchemaMismatch as error:
            self._drain_for_error(error)
            await self._delivery.back_off(error)
        except Exception as error:  # also errors that no driver should raise: finished work is worth another try
            await self._delivery.back_off(error)

    def _must_wait_for_delivery(self) -> bool:
        """Whether to stay after the drain deadline: finished work should not be done again.

        A worker does not stay for releases, which an expired lease does as well, nor for an unknown schema.
        """
        if self._shutdown.is_urgent.is_set() or isinstance(self._fatal_error, SchemaMismatch):
            return False
        return self._outbox.has_outcomes

    async def _wait_for_change(self) -> None:
        changed, deadline = self._shutdown.changed, self._shutdown.deadline
        if deadline == FOREVER:
            await changed.wait()
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(deadline - time.monotonic(), 0.0)):
                await changed.wait()

    def _may_claim(self) -> bool:
        return not self._shutdown.is_draining and not self._is_paused and self._is_machine_fit()

    def _on_attempt_end(self) -> None:
        self._claiming.update_used_slots()
        self._shutdown.changed.set()

    def _drain_for_error(self, error: WindlassError) -> None:
        """Drain, then raise the first such error."""
        self._fatal_error = self._fatal_error or error
        self._shutdown.drain(str(error), self._settings.drain_timeout_s)

    def _drain_if_terminating(self) -> None:
        if self._status is WorkerStatus.TERMINATING:
            self._shutdown.drain("terminating", self._settings.drain_timeout_s)

    def _vitals(self) -> dict[str, Any]:
        # The control loop drains the workers with the longest idle time first.
        vitals: dict[str, Any] = {
            "pid": os.getpid(),
            "idle_s": round(self._attempts.idle_s, 1),
            **self._settings.remarks,
        }
        for reader in self._readers:
            vitals |= reader.vitals()
        return vitals

    def _on_heartbeat_reply(self, reply: HeartbeatReply) -> None:
        self._attempts.cancel(reply.lost)
        self._claiming.set_delay(reply.claim_delay)
        if (reply.status, reply.is_paused) == (self._status, self._is_paused):
            return
        log.info("change status", status=reply.status, is_paused=reply.is_paused)
        self._status, self._is_paused = reply.status, reply.is_paused
        self._claiming.expect_work()
        self._drain_if_terminating()
        self._shutdown.changed.set()


def _call_from_thread(loop: asyncio.AbstractEventLoop, function: Callable[[_Value], None], value: _Value) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has just closed
        loop.call_soon_threadsafe(function, value)
