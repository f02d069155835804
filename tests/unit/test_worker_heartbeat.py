"""The heartbeat over a transport that fails: only stop() ends it, and nothing delays it."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import structlog

from windlass.model.errors import BadInput, DatabaseUnavailable, SchemaMismatch
from windlass.model.worker import HeartbeatReply, HeldClaim, RecoveredTasks, WorkerStatus
from windlass.ports.transport import WorkerTransport
from windlass.worker import heartbeat
from windlass.worker.heartbeat import Heartbeat

TIMEOUT_S = 60.0
# How long a heartbeat hangs before it times out: half of a lease.
HANGING_S = 10.0
REPLY = HeartbeatReply(WorkerStatus.ACTIVE, False, frozenset())


@dataclass
class ScriptedTransport:
    """A transport that fails on script and records the time of each call."""

    opened_at: list[float] = field(default_factory=list)
    heartbeats_at: list[float] = field(default_factory=list)
    maintenance_at: list[float] = field(default_factory=list)
    # Errors of successive calls; None is a call that succeeds.
    on_open: list[Exception | None] = field(default_factory=list)
    on_heartbeat: list[Exception | None] = field(default_factory=list)
    on_maintenance: list[Exception | None] = field(default_factory=list)
    mismatches: list[SchemaMismatch] = field(default_factory=list)
    hanging_heartbeats: int = 0
    is_maintenance_hanging: bool = False

    @asynccontextmanager
    async def open(self) -> AsyncIterator[WorkerTransport]:
        self.opened_at.append(time.monotonic())
        _fail(self.on_open)
        yield cast(WorkerTransport, self)

    async def heartbeat(self, _worker_id: str, _claims: list[HeldClaim], _vitals: dict[str, Any]) -> HeartbeatReply:
        self.heartbeats_at.append(time.monotonic())
        if self.hanging_heartbeats:
            self.hanging_heartbeats -= 1
            await asyncio.Event().wait()
        _fail(self.on_heartbeat)
        return REPLY

    async def run_maintenance(self, _worker_id: str) -> list[RecoveredTasks]:
        self.maintenance_at.append(time.monotonic())
        if self.is_maintenance_hanging:
            await asyncio.Event().wait()
        _fail(self.on_maintenance)
        return [RecoveredTasks("another", 1, 0)]


def _fail(script: list[Exception | None]) -> None:
    if script and (error := script.pop(0)) is not None:
        raise error


@asynccontextmanager
async def running_heartbeat(
    transport: ScriptedTransport,
    interval_s: float = 0.01,
    lease_s: float = 30.0,
    vitals: Callable[[], dict[str, Any]] = dict,
) -> AsyncIterator[Heartbeat]:
    heart = Heartbeat(
        transport.open,
        "w",
        interval_s=interval_s,
        lease_s=lease_s,
        held_claims=list,
        vitals=vitals,
        on_reply=lambda _: None,
        on_mismatch=transport.mismatches.append,
    )
    heart.start()
    try:
        yield heart
        assert is_thread_running()
    finally:
        await heart.stop()
        assert not is_thread_running()


def is_thread_running() -> bool:
    return "windlass-heartbeat" in {thread.name for thread in threading.enumerate()}


async def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"timed out: {what}"
        await asyncio.sleep(0.01)


async def test_heartbeat_thread_inherits_log_context() -> None:
    seen: list[dict[str, Any]] = []
    with structlog.contextvars.bound_contextvars(worker_id="w7"):
        async with running_heartbeat(
            ScriptedTransport(), vitals=lambda: seen.append(structlog.contextvars.get_contextvars()) or {}
        ):
            await wait_until(lambda: seen, "first heartbeat")
    assert seen[0] == {"worker_id": "w7"}


@pytest.mark.parametrize(
    "error",
    [
        DatabaseUnavailable("gone"),
        BadInput("refused"),
        TimeoutError(),
        RuntimeError("a defect"),
        TypeError("another"),
        OSError("a driver error"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_next_heartbeat_follows_any_error(error: Exception) -> None:
    transport = ScriptedTransport(on_open=[error, None], on_heartbeat=[None, error, None, None])
    async with running_heartbeat(transport):
        await wait_until(lambda: len(transport.heartbeats_at) >= 4, "four heartbeats")


async def test_schema_mismatch_is_reported_and_retried() -> None:
    error = SchemaMismatch("upgrade windlass on this machine.")
    transport = ScriptedTransport(on_open=[DatabaseUnavailable("gone"), error, None])
    async with running_heartbeat(transport):
        await wait_until(lambda: transport.heartbeats_at, "a heartbeat")
    assert transport.mismatches == [error]


async def test_stop_works_while_thread_pool_is_exhausted() -> None:
    loop, may_end = asyncio.get_running_loop(), threading.Event()
    pool = ThreadPoolExecutor(1)
    loop.set_default_executor(pool)
    blocked = loop.run_in_executor(None, may_end.wait)
    try:
        async with asyncio.timeout(TIMEOUT_S), running_heartbeat(ScriptedTransport()):
            pass
    finally:
        may_end.set()
        await blocked


async def test_error_in_vitals_does_not_end_heartbeat() -> None:
    calls = 0

    def vitals() -> dict[str, Any]:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ValueError("the GPU fell off the bus")
        return {}

    transport = ScriptedTransport()
    async with running_heartbeat(transport, vitals=vitals):
        await wait_until(lambda: len(transport.heartbeats_at) >= 2, "two heartbeats")


async def test_hanging_heartbeat_times_out_and_reconnects() -> None:
    transport = ScriptedTransport(hanging_heartbeats=1)
    async with running_heartbeat(transport, lease_s=2 * HANGING_S):
        await wait_until(lambda: len(transport.heartbeats_at) >= 3, "heartbeats after the hanging one")
    assert transport.heartbeats_at[1] - transport.heartbeats_at[0] >= HANGING_S
    # The others did not time out.
    assert len(transport.opened_at) == 2


async def test_hanging_maintenance_does_not_delay_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "MAINTENANCE_MAX_INTERVAL_S", 0.02)
    transport = ScriptedTransport(is_maintenance_hanging=True)
    async with running_heartbeat(transport):
        await wait_until(lambda: transport.maintenance_at, "maintenance started")
        count = len(transport.heartbeats_at)
        await wait_until(lambda: len(transport.heartbeats_at) > count + 5, "more heartbeats")
    assert len(transport.maintenance_at) == 1


async def test_failed_maintenance_is_retried_without_reconnect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "MAINTENANCE_MAX_INTERVAL_S", 0.02)
    transport = ScriptedTransport(on_maintenance=[DatabaseUnavailable("gone"), RuntimeError("a defect"), None])
    async with running_heartbeat(transport):
        await wait_until(lambda: len(transport.maintenance_at) >= 4, "maintenance is retried")
    assert len(transport.opened_at) == 1


async def test_progress_is_sent_at_most_once_per_second() -> None:
    transport = ScriptedTransport()
    async with running_heartbeat(transport, interval_s=600) as heart:
        await wait_until(lambda: transport.heartbeats_at, "first heartbeat")
        for _ in range(1000):
            heart.send_soon()
        await wait_until(lambda: len(transport.heartbeats_at) == 2, "heartbeat with progress")
    assert heartbeat.PROGRESS_INTERVAL_S <= transport.heartbeats_at[1] - transport.heartbeats_at[0] < 60


async def test_progress_does_not_shorten_back_off() -> None:
    transport = ScriptedTransport(on_open=[DatabaseUnavailable("gone")] * 100)
    async with running_heartbeat(transport, interval_s=5) as heart:

        def has_reconnected() -> bool:
            heart.send_soon()
            return len(transport.opened_at) >= 4

        await wait_until(has_reconnected, "four connections")
    # At least half of 0.1, 0.2 and 0.4 s: jitter removes up to half of a delay.
    assert transport.opened_at[3] - transport.opened_at[0] >= 0.35


async def test_stop_does_not_wait_for_next_heartbeat() -> None:
    transport = ScriptedTransport()
    began = time.monotonic()
    async with running_heartbeat(transport, interval_s=600) as heart:
        await wait_until(lambda: transport.heartbeats_at, "first heartbeat")
        heart.send_soon()
    async with running_heartbeat(ScriptedTransport(), interval_s=600):
        pass  # may stop before its loop runs
    async with running_heartbeat(ScriptedTransport(on_open=[DatabaseUnavailable("gone")] * 100), interval_s=600):
        pass
    assert time.monotonic() - began < 60
