"""The heartbeat: on its own thread, event loop and connection, so that no work can hold it up.

Each beat names the claims held and how far they have come, and brings back what the worker must know: its status,
whether it is paused, which claims are gone. A database that cannot be reached is tried again, with growing pauses but
at least once an interval; the worker goes on meanwhile.
"""

import asyncio
import random
import threading
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import structlog

from windlass.model.errors import DatabaseUnavailable, WindlassError
from windlass.model.worker import HeldClaim, Pulse
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
    """`held` and `vitals` are called on the heartbeat's thread and must only copy; so is `on_pulse`."""

    def __init__(
        self,
        open_transport: OpenTransport,
        worker_id: str,
        *,
        interval_s: float,
        lease_s: float,
        held: Callable[[], list[HeldClaim]],
        vitals: Callable[[], dict[str, Any]],
        on_pulse: Callable[[Pulse], None],
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
        self._loop: asyncio.AbstractEventLoop | None = None
        self._hurry = asyncio.Event()
        self._is_stopped = False
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="windlass-heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def beat_soon(self) -> None:
        """There is news to tell. From any thread."""
        if self._loop is not None:
            self._call(self._hurry.set)

    async def stop(self) -> None:
        self._is_stopped = True
        self.beat_soon()
        await asyncio.to_thread(self._thread.join, STOP_TIMEOUT_S)

    def _call(self, function: Callable[[], None]) -> None:
        try:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(function)
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
            except (DatabaseUnavailable, TimeoutError) as error:
                self._failures += 1
                log.warning(
                    "heartbeat not delivered", worker_id=self._worker_id, error=str(error), failures=self._failures
                )
            except WindlassError as error:
                self._failures += 1
                log.error("heartbeat refused", worker_id=self._worker_id, error=str(error), failures=self._failures)
            await self._pause(min(reconnect_delay_s(self._failures, random.random()), self._interval_s))  # noqa: S311

    async def _beat_until_trouble(self, transport: WorkerTransport) -> None:
        next_upkeep = time.monotonic() + self._upkeep_interval_s * (0.5 + random.random())  # noqa: S311
        while not self._is_stopped:
            started = time.monotonic()
            # A beat that arrives late names the claims of long ago, and those taken since would count as unknown.
            async with asyncio.timeout(self._lease_s / 2):
                self._on_pulse(await transport.heartbeat(self._worker_id, self._held(), self._vitals()))
            self._failures = 0
            if started >= next_upkeep:
                next_upkeep = started + self._upkeep_interval_s
                for recovery in await transport.upkeep(self._worker_id):
                    log.warning(
                        "recovered the tasks of a lost worker",
                        lost_worker_id=recovery.worker_id,
                        requeued=recovery.tasks_requeued,
                        failed=recovery.tasks_failed,
                    )
            await self._pause(
                min(self._interval_s, max(next_upkeep - time.monotonic(), 0.0)), hurry=PROGRESS_INTERVAL_S
            )

    async def _pause(self, seconds: float, hurry: float = 0.0) -> None:
        """Wait that long, or until there is news, but then at least `hurry` seconds."""
        started = time.monotonic()
        try:
            await asyncio.wait_for(self._hurry.wait(), seconds)
        except TimeoutError:
            return
        if not self._is_stopped:
            await asyncio.sleep(max(min(hurry, seconds) - (time.monotonic() - started), 0.0))
        self._hurry.clear()
