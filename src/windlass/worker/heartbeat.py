"""The heartbeat: on its own thread, event loop and connection, so that no work can hold it up.

Each beat names the claims held and how far they have come, and brings back what the worker must know: its status,
whether it is paused, which claims are gone. A database that cannot be reached is tried again, with growing pauses but
at least once an interval; the worker goes on meanwhile. Nothing but stop() ends it: a worker that works without a
heartbeat would lose its tasks while it runs them. A database whose schema is not this program's is tried again too, but
`on_mismatch` is told of it: no waiting mends that. Upkeep goes on beside it, and no beat waits for it.
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
from windlass.policy.backoff import reconnect_delay_s
from windlass.ports.transport import WorkerTransport

# News of progress do not wait for the next beat, but come no more often than this.
PROGRESS_INTERVAL_S = 1.0
UPKEEP_MIN_INTERVAL_S = 1.0
UPKEEP_MAX_INTERVAL_S = 60.0
STOP_TIMEOUT_S = 10.0

OpenTransport = Callable[[], AbstractAsyncContextManager[WorkerTransport]]
log = structlog.get_logger(__name__)


class Heartbeat:
    """All functions given are called on the heartbeat's thread; `held` and `vitals` must only copy."""

    def __init__(
        self,
        open_transport: OpenTransport,
        worker_id: str,
        *,
        interval_s: float,
        lease_s: float,
        held: Callable[[], list[HeldClaim]],
        vitals: Callable[[], dict[str, Any]],
        on_pulse: Callable[[HeartbeatReply], None],
        on_mismatch: Callable[[SchemaMismatch], None],
    ) -> None:
        self._open_transport = open_transport
        self._worker_id = worker_id
        self._interval_s = interval_s
        self._lease_s = lease_s
        # Often enough that a lost worker is found within half a lease more.
        self._upkeep_interval_s = min(max(lease_s / 2, UPKEEP_MIN_INTERVAL_S), UPKEEP_MAX_INTERVAL_S)
        self._held = held
        self._vitals = vitals
        self._on_pulse = on_pulse
        self._on_mismatch = on_mismatch
        self._loop: asyncio.AbstractEventLoop | None = None
        # Set for whatever shortens a pause; which of the two it was, the flags say.
        self._wake = asyncio.Event()
        self._has_news = False
        self._is_stopped = False
        self._failures = 0

    def start(self) -> None:
        # What is bound to log lines by now is bound to those of the thread too.
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._run,), name="windlass-heartbeat", daemon=True)
        self._thread.start()

    def beat_soon(self) -> None:
        """There is news to tell. From any thread."""
        if not self._has_news:
            self._has_news = True
            self._wake_up()

    async def stop(self) -> None:
        self._is_stopped = True
        self._wake_up()
        # Not in the loop's own threads: handlers may have taken all of them, for ever.
        waiter = ThreadPoolExecutor(1)
        joined = asyncio.get_running_loop().run_in_executor(waiter, self._thread.join, STOP_TIMEOUT_S)
        waiter.shutdown(wait=False)
        await joined

    def _wake_up(self) -> None:
        try:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._wake.set)
        except RuntimeError:
            pass  # the loop has just ended, and with it the need to tell

    def _run(self) -> None:
        asyncio.run(self._keep_beating())

    async def _keep_beating(self) -> None:
        self._loop = asyncio.get_running_loop()
        while not self._is_stopped:
            try:
                async with self._open_transport() as transport:
                    await self._beat_until_trouble(transport)
            except Exception as error:  # whatever it is, there must be a next beat
                self._failures += 1
                log.warning(
                    "heartbeat not delivered",
                    worker_id=self._worker_id,
                    error=str(error) or type(error).__name__,
                    failures=self._failures,
                )
                if isinstance(error, SchemaMismatch):
                    self._on_mismatch(error)
            await self._pause(min(reconnect_delay_s(self._failures, random.random()), self._interval_s))  # noqa: S311

    async def _beat_until_trouble(self, transport: WorkerTransport) -> None:
        run_maintenance = asyncio.create_task(self._keep_up(transport))
        try:
            while not self._is_stopped:
                self._has_news = False
                # A beat that arrives late names the claims of long ago, and those taken since would count as unknown.
                async with asyncio.timeout(self._lease_s / 2):
                    pulse = await transport.heartbeat(self._worker_id, self._held(), self._vitals())
                self._on_pulse(pulse)
                self._failures = 0
                await self._pause(self._interval_s, news_after_s=PROGRESS_INTERVAL_S)
        finally:
            run_maintenance.cancel()
            await asyncio.gather(run_maintenance, return_exceptions=True)

    async def _keep_up(self, transport: WorkerTransport) -> None:
        """What workers do for the queue: those that are lost may be nobody else's."""
        # Not all of those that were started together at the same time.
        await asyncio.sleep(self._upkeep_interval_s * (0.5 + random.random()))  # noqa: S311
        while True:
            try:
                for recovery in await transport.run_maintenance(self._worker_id):
                    log.warning(
                        "recovered the tasks of a lost worker",
                        lost_worker_id=recovery.worker_id,
                        requeued=recovery.tasks_requeued,
                        failed=recovery.tasks_failed,
                    )
            except Exception as error:  # the next round comes anyway
                log.warning("upkeep failed", worker_id=self._worker_id, error=str(error) or type(error).__name__)
            await asyncio.sleep(self._upkeep_interval_s)

    async def _pause(self, seconds: float, *, news_after_s: float | None = None) -> None:
        """Wait that long, with news only `news_after_s` if that is less, and no longer than until stop()."""
        started = time.monotonic()
        while not self._is_stopped:
            limit_s = min(seconds, news_after_s) if self._has_news and news_after_s is not None else seconds
            remaining_s = started + limit_s - time.monotonic()
            if remaining_s <= 0:
                return
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(remaining_s):
                    await self._wake.wait()
