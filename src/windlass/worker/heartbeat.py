"""The heartbeat of a worker, on its own thread, event loop and connection, so that no handler can delay it.

Each heartbeat lists the held claims with their progress and returns the worker's status, whether it is paused, and
which claims are lost. Only stop() ends it. Every error is retried with back-off, at least once per interval: a worker
without heartbeats would lose its tasks while it runs them. A schema mismatch is retried too and reported to
`on_mismatch`, because waiting does not fix it. Maintenance runs in parallel and never delays a heartbeat.
"""

import asyncio
import contextlib
import contextvars
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from typing import Any

import structlog

from windlass.model.errors import SchemaMismatch
from windlass.model.worker import HeartbeatReply, HeldClaim
from windlass.ports.transport import WorkerTransport
from windlass.retry import Backoff

# Progress does not wait for the next heartbeat, but causes at most one in this time.
PROGRESS_INTERVAL_S = 1.0
MAINTENANCE_MIN_INTERVAL_S = 1.0
MAINTENANCE_MAX_INTERVAL_S = 60.0
STOP_TIMEOUT_S = 10.0

OpenTransport = Callable[[], AbstractAsyncContextManager[WorkerTransport]]
log = structlog.get_logger(__name__)


class Heartbeat:
    """All callbacks run on the heartbeat's thread. `held_claims` and `vitals` must only copy."""

    def __init__(
        self,
        open_transport: OpenTransport,
        worker_id: str,
        *,
        interval_s: float,
        lease_s: float,
        held_claims: Callable[[], list[HeldClaim]],
        vitals: Callable[[], dict[str, Any]],
        on_reply: Callable[[HeartbeatReply], None],
        on_mismatch: Callable[[SchemaMismatch], None],
    ) -> None:
        self._open_transport = open_transport
        self._worker_id = worker_id
        self._interval_s = interval_s
        self._lease_s = lease_s
        # A lost worker is found at most half a lease after its lease expired.
        self._maintenance_interval_s = min(max(lease_s / 2, MAINTENANCE_MIN_INTERVAL_S), MAINTENANCE_MAX_INTERVAL_S)
        self._held_claims = held_claims
        self._vitals = vitals
        self._on_reply = on_reply
        self._on_mismatch = on_mismatch
        self._loop: asyncio.AbstractEventLoop | None = None
        # Interrupts a pause; the flags below say why.
        self._wake = asyncio.Event()
        self._has_progress = False
        self._is_stopped = False
        self._backoff = Backoff()

    def start(self) -> None:
        # The thread's log lines carry the context of the caller.
        run = contextvars.copy_context().run
        self._thread = threading.Thread(
            target=run, args=(asyncio.run, self._send_until_stopped()), name="windlass-heartbeat", daemon=True
        )
        self._thread.start()

    def send_soon(self) -> None:
        """Report progress before the next regular heartbeat. May be called from any thread."""
        if not self._has_progress:
            self._has_progress = True
            self._wake_up()

    async def stop(self) -> None:
        self._is_stopped = True
        self._wake_up()
        # A thread of our own: handlers may block all threads of the loop's pool forever.
        waiter = ThreadPoolExecutor(1)
        joined = asyncio.get_running_loop().run_in_executor(waiter, self._thread.join, STOP_TIMEOUT_S)
        waiter.shutdown(wait=False)
        await joined

    def _wake_up(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has just closed
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._wake.set)

    async def _send_until_stopped(self) -> None:
        self._loop = asyncio.get_running_loop()
        while not self._is_stopped:
            delay_s = 0.0
            try:
                async with self._open_transport() as transport:
                    await self._send_until_error(transport)
            except Exception as error:  # there must be a next heartbeat, whatever the error is
                delay_s = min(self._backoff.next_delay_s(), self._interval_s)
                log.warning(
                    "send heartbeat failed",
                    worker_id=self._worker_id,
                    error=str(error) or type(error).__name__,
                    failures=self._backoff.failures,
                )
                if isinstance(error, SchemaMismatch):
                    self._on_mismatch(error)
            await self._pause(delay_s)

    async def _send_until_error(self, transport: WorkerTransport) -> None:
        maintenance = asyncio.create_task(self._run_maintenance(transport))
        try:
            while not self._is_stopped:
                self._has_progress = False
                # A late heartbeat lists outdated claims: newer ones would count as unknown and be released.
                async with asyncio.timeout(self._lease_s / 2):
                    reply = await transport.heartbeat(self._worker_id, self._held_claims(), self._vitals())
                self._on_reply(reply)
                self._backoff.reset()
                await self._pause(self._interval_s, progress_after_s=PROGRESS_INTERVAL_S)
        finally:
            maintenance.cancel()
            await asyncio.gather(maintenance, return_exceptions=True)

    async def _run_maintenance(self, transport: WorkerTransport) -> None:
        """Recover the tasks of lost workers, which may have no orchestrator, and sometimes apply retention."""
        # A random delay: workers that were started together do not run it together.
        await asyncio.sleep(self._maintenance_interval_s * (0.5 + random.random()))  # noqa: S311
        while True:
            try:
                for recovery in await transport.run_maintenance(self._worker_id):
                    log.warning(
                        "recovered tasks of a lost worker",
                        lost_worker_id=recovery.worker_id,
                        requeued=recovery.tasks_requeued,
                        failed=recovery.tasks_failed,
                    )
            except Exception as error:  # the next round comes anyway
                log.warning(
                    "run maintenance failed", worker_id=self._worker_id, error=str(error) or type(error).__name__
                )
            await asyncio.sleep(self._maintenance_interval_s)

    async def _pause(self, seconds: float, *, progress_after_s: float | None = None) -> None:
        """Wait `seconds`, or with progress to report at most `progress_after_s`. stop() ends the wait."""
        started = time.monotonic()
        while not self._is_stopped:
            limit_s = min(seconds, progress_after_s) if self._has_progress and progress_after_s is not None else seconds
            remaining_s = started + limit_s - time.monotonic()
            if remaining_s <= 0:
                return
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(remaining_s):
                    await self._wake.wait()
