"""Sends the output of a worker through its transport, on a thread, event loop and connection of its own.

Nothing waits for it: neither tasks nor heartbeats. Output is sent about once per interval. While nothing can be sent,
it stays in the buffer, which is bounded; a call that failed is repeated with the same batch id, without a limit during
an outage. After MAX_REFUSALS other errors the batch is dropped: its lines are counted in the stored output, and a line
of the worker's log says so. The connection opens when there is output and closes after IDLE_S without any. `stop` sends
the rest, for at most STOP_TIMEOUT_S. A worker that is no longer known stops sending.
"""

import asyncio
import contextlib
import contextvars
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import structlog

from windlass.model.errors import BadInput, DatabaseUnavailable, SchemaMismatch, TokenRefused, UnknownWorker
from windlass.ports.transport import WorkerTransport
from windlass.retry import Backoff
from windlass.worker.heartbeat import OpenTransport
from windlass.worker.output_buffer import LogBatch, OutputBuffer

SEND_INTERVAL_S = 1.0
SEND_TIMEOUT_S = 15.0
# Batches that are sent without a pause in between.
MAX_BATCHES = 16
# Errors other than an outage after which a batch is dropped.
MAX_REFUSALS = 5
IDLE_S = 30.0
STOP_TIMEOUT_S = 5.0
# If the worker must exit at once.
URGENT_STOP_TIMEOUT_S = 0.5
# They end by themselves, or with an upgrade. OSError includes time-outs.
OUTAGES = (DatabaseUnavailable, SchemaMismatch, OSError)
log = structlog.get_logger(__name__)


class OutputShipper:
    def __init__(
        self, open_transport: OpenTransport, worker_id: str, buffer: OutputBuffer, interval_s: float = SEND_INTERVAL_S
    ) -> None:
        self._open_transport = open_transport
        self._worker_id = worker_id
        self._buffer = buffer
        self._interval_s = interval_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._stop_by = float("inf")
        # Taken from the buffer, and not stored for certain.
        self._batch: LogBatch | None = None
        self._refusals = 0
        self._backoff = Backoff()

    def start(self) -> None:
        run = contextvars.copy_context().run
        self._thread = threading.Thread(
            target=run, args=(asyncio.run, self._send_until_stopped()), name="windlass-output", daemon=True
        )
        self._thread.start()

    async def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Send what is in the buffer, if that is possible in time."""
        self._stop_by = time.monotonic() + timeout_s
        with contextlib.suppress(RuntimeError):  # the loop has just closed
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._stopping.set)
        # A thread of our own: handlers may block all threads of the loop's pool forever.
        waiter = ThreadPoolExecutor(1)
        joined = asyncio.get_running_loop().run_in_executor(waiter, self._thread.join, timeout_s + 1.0)
        waiter.shutdown(wait=False)
        await joined

    async def _send_until_stopped(self) -> None:
        self._loop = asyncio.get_running_loop()
        while not self._is_done():
            delay_s = self._interval_s
            if self._has_output():
                try:
                    async with self._open_transport() as transport:
                        await self._send_until_idle(transport)
                except (UnknownWorker, TokenRefused) as error:
                    log.info("stop output", worker_id=self._worker_id, error=str(error))
                    return
                except Exception as error:  # output waits in the buffer for the next attempt
                    delay_s = self._backoff.next_delay_s()
                    if self._backoff.failures == 1:
                        log.warning("send output failed", worker_id=self._worker_id, error=_words(error))
                    if not _is_outage(error):
                        self._count_refusal(error)
                    if self._stopping.is_set():
                        # `_pause` does not wait any more: a draining fleet would flood a control plane that restarts.
                        await asyncio.sleep(max(0.0, min(delay_s, self._stop_by - time.monotonic())))
            await self._pause(delay_s)

    def _has_output(self) -> bool:
        return self._batch is not None or not self._buffer.is_empty

    def _is_done(self) -> bool:
        return self._stopping.is_set() and (time.monotonic() >= self._stop_by or not self._has_output())

    async def _send_until_idle(self, transport: WorkerTransport) -> None:
        sent_at = time.monotonic()
        while not self._is_done() and time.monotonic() - sent_at < IDLE_S:
            for _ in range(MAX_BATCHES):
                self._batch = self._batch or self._buffer.take()
                if self._batch is None:
                    break
                await self._send(transport, self._batch)
                self._batch, self._refusals = None, 0
                sent_at = time.monotonic()
            await self._pause(self._interval_s)

    async def _send(self, transport: WorkerTransport, batch: LogBatch) -> None:
        # Masking and encoding take milliseconds, on this thread.
        chunks = batch.chunks(time.monotonic())
        try:
            async with asyncio.timeout(min(SEND_TIMEOUT_S, max(0.1, self._stop_by - time.monotonic()))):
                await transport.append_logs(self._worker_id, batch.id, chunks)
        except BadInput as error:
            # It would be refused again.
            self._drop(batch, error)
        self._backoff.reset()

    def _count_refusal(self, error: Exception) -> None:
        self._refusals += 1
        if self._batch is not None and self._refusals >= MAX_REFUSALS:
            self._drop(self._batch, error)
            self._batch, self._refusals = None, 0

    def _drop(self, batch: LogBatch, error: Exception) -> None:
        lines = self._buffer.count_lost(batch)
        log.warning("drop output", worker_id=self._worker_id, lines=lines, error=_words(error))

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()


def _is_outage(error: Exception) -> bool:
    return isinstance(error, OUTAGES) and not getattr(error, "is_refusal", False)


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
