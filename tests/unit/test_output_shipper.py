"""Output that cannot be sent: an outage loses nothing, and a batch that is always refused does not stop the rest."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs

from windlass.model.errors import BadInput, ControlPlaneUnavailable, DatabaseUnavailable
from windlass.model.worker_log import LogChunk
from windlass.worker.output_buffer import OutputBuffer
from windlass.worker.output_shipper import MAX_REFUSALS, OutputShipper

LIMIT_S = 60.0


class LogTransport:
    """Keeps what it is sent, unless `refuse` raises."""

    def __init__(self, refuse: Callable[[int, str], None]) -> None:
        self._refuse = refuse
        self.calls: list[str] = []
        self.stored: list[str] = []
        self.dropped = 0
        self.has_last = threading.Event()

    async def append_logs(self, _worker_id: str, _batch_id: Any, chunks: list[LogChunk]) -> None:
        text = "\n".join(line for chunk in chunks for line in chunk.lines)
        self.calls.append(text)
        self._refuse(len(self.calls), text)
        self.stored.append(text)
        self.dropped += sum(chunk.dropped for chunk in chunks)
        if "last" in text:
            self.has_last.set()


async def shipped(monkeypatch: pytest.MonkeyPatch, refuse: Callable[[int, str], None]) -> LogTransport:
    """Send a line, and a second one after the first call, until the second is stored."""
    monkeypatch.setattr("windlass.retry.reconnect_delay_s", lambda *_: 0.01)
    transport, buffer = LogTransport(refuse), OutputBuffer()

    @asynccontextmanager
    async def open_transport() -> AsyncIterator[Any]:
        yield transport

    shipper = OutputShipper(open_transport, "w1", buffer, interval_s=0.01)
    buffer.add(b"first\n")
    shipper.start()
    async with asyncio.timeout(LIMIT_S):
        while not transport.calls:
            await asyncio.sleep(0.01)
        buffer.add(b"last\n")
        assert await asyncio.to_thread(transport.has_last.wait, LIMIT_S)
        await shipper.stop()
    return transport


@pytest.mark.parametrize(
    ("error", "calls"),
    [
        (RuntimeError("an error that no one expected"), MAX_REFUSALS),
        (DatabaseUnavailable("storing output: refused the statement", is_refusal=True), MAX_REFUSALS),
        (ControlPlaneUnavailable("storing output: refused the call", is_refusal=True), MAX_REFUSALS),
        (BadInput("storing output: too much"), 1),
    ],
    ids=["defect", "the database refuses", "the control plane's database refuses", "bad input"],
)
async def test_batch_that_is_always_refused_is_dropped(
    monkeypatch: pytest.MonkeyPatch, error: Exception, calls: int
) -> None:
    def refuse(_call: int, text: str) -> None:
        if "first" in text:
            raise error

    with capture_logs() as logs:
        transport = await shipped(monkeypatch, refuse)
    assert transport.calls == ["first"] * calls + ["last"]
    assert transport.stored == ["last"]
    assert transport.dropped == 1, "counted before the next line that is stored"
    assert [entry for entry in logs if entry["event"] == "drop output"] == [
        {"event": "drop output", "worker_id": "w1", "lines": 1, "error": str(error), "log_level": "warning"}
    ]


async def test_outage_loses_no_output(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(call: int, _text: str) -> None:
        if call <= 3 * MAX_REFUSALS:
            raise DatabaseUnavailable("away")

    transport = await shipped(monkeypatch, refuse)
    assert transport.stored == ["first", "last"]


async def test_stopping_worker_backs_off_during_outage() -> None:
    opened = threading.Event()
    opens = 0

    @asynccontextmanager
    async def open_transport() -> AsyncIterator[Any]:
        nonlocal opens
        opens += 1
        opened.set()
        raise DatabaseUnavailable("away")
        yield

    buffer = OutputBuffer()
    shipper = OutputShipper(open_transport, "w1", buffer, interval_s=0.01)
    buffer.add(b"first\n")
    shipper.start()
    async with asyncio.timeout(LIMIT_S):
        assert await asyncio.to_thread(opened.wait, LIMIT_S)
        before = opens
        await shipper.stop(timeout_s=1.0)
    assert opens - before < 20
