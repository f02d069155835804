"""The heartbeat, over a line that misbehaves: nothing but stop() ends it, and nothing holds it up."""

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

PATIENCE_S = 20.0
PULSE = HeartbeatReply(WorkerStatus.ACTIVE, False, frozenset())


@dataclass
class Line:
    """A transport that does as it is told, and remembers when it was used."""

    opened_at: list[float] = field(default_factory=list)
    beats_at: list[float] = field(default_factory=list)
    upkeeps_at: list[float] = field(default_factory=list)
    # What goes wrong, first to last; None is a time when nothing does.
    on_open: list[Exception | None] = field(default_factory=list)
    on_beat: list[Exception | None] = field(default_factory=list)
    on_upkeep: list[Exception | None] = field(default_factory=list)
    mismatches: list[SchemaMismatch] = field(default_factory=list)
    beat_hangs: int = 0
    upkeep_hangs: bool = False

    @asynccontextmanager
    async def open(self) -> AsyncIterator[WorkerTransport]:
        self.opened_at.append(time.monotonic())
        _fail(self.on_open)
        yield cast(WorkerTransport, self)

    async def heartbeat(self, _worker_id: str, _claims: list[HeldClaim], _vitals: dict[str, Any]) -> HeartbeatReply:
        self.beats_at.append(time.monotonic())
        if self.beat_hangs:
            self.beat_hangs -= 1
            await asyncio.Event().wait()
        _fail(self.on_beat)
        return PULSE

    async def run_maintenance(self, _worker_id: str) -> list[RecoveredTasks]:
        self.upkeeps_at.append(time.monotonic())
        if self.upkeep_hangs:
            await asyncio.Event().wait()
        _fail(self.on_upkeep)
        return [RecoveredTasks("another", 1, 0)]


def _fail(script: list[Exception | None]) -> None:
    if script and (error := script.pop(0)) is not None:
        raise error


@asynccontextmanager
async def beating(
    line: Line, interval_s: float = 0.01, lease_s: float = 30.0, vitals: Callable[[], dict[str, Any]] = dict
) -> AsyncIterator[Heartbeat]:
    beat = Heartbeat(
        line.open,
        "w",
        interval_s=interval_s,
        lease_s=lease_s,
        held=list,
        vitals=vitals,
        on_pulse=lambda _: None,
        on_mismatch=line.mismatches.append,
    )
    beat.start()
    try:
        yield beat
        assert beat._thread.is_alive()
    finally:
        await beat.stop()
        assert not beat._thread.is_alive()


async def until(is_so: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.01)


async def test_what_is_bound_to_log_lines_when_it_starts_is_bound_to_those_of_its_thread() -> None:
    seen: list[dict[str, Any]] = []
    with structlog.contextvars.bound_contextvars(worker_id="w7"):
        async with beating(Line(), vitals=lambda: seen.append(structlog.contextvars.get_contextvars()) or {}):
            await until(lambda: seen, "no beat came")
    assert seen[0] == {"worker_id": "w7"}


@pytest.mark.parametrize(
    "error",
    [
        DatabaseUnavailable("gone"),
        BadInput("refused"),
        TimeoutError(),
        RuntimeError("a bug"),
        TypeError("another"),
        OSError("and a broken driver"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_whatever_goes_wrong_the_next_beat_comes(error: Exception) -> None:
    line = Line(on_open=[error, None], on_beat=[None, error, None, None])
    async with beating(line):
        await until(lambda: len(line.beats_at) >= 4, "four beats")


async def test_another_schema_is_reported_and_tried_again() -> None:
    error = SchemaMismatch("upgrade windlass on this machine.")
    line = Line(on_open=[DatabaseUnavailable("gone"), error, None])
    async with beating(line):
        await until(lambda: line.beats_at, "a beat after all")
    assert line.mismatches == [error]


async def test_stopping_needs_no_thread_that_handlers_could_have_taken() -> None:
    loop, gate = asyncio.get_running_loop(), threading.Event()
    pool = ThreadPoolExecutor(1)
    loop.set_default_executor(pool)
    taken = loop.run_in_executor(None, gate.wait)
    try:
        async with asyncio.timeout(PATIENCE_S), beating(Line()):
            pass
    finally:
        gate.set()
        await taken


async def test_a_vital_sign_that_cannot_be_read_does_not_end_the_heartbeat() -> None:
    looks = 0

    def vitals() -> dict[str, Any]:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise ValueError("the card fell off the bus")
        return {}

    line = Line()
    async with beating(line, vitals=vitals):
        await until(lambda: len(line.beats_at) >= 2, "two beats")


async def test_a_beat_that_hangs_is_given_up_after_half_a_lease_on_a_new_connection() -> None:
    line = Line(beat_hangs=1)
    async with beating(line, lease_s=0.4):
        await until(lambda: len(line.beats_at) >= 3, "beats after the one that hung")
    assert line.beats_at[1] - line.beats_at[0] >= 0.2
    assert len(line.opened_at) == 2


async def test_upkeep_that_hangs_holds_no_beat_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "UPKEEP_MIN_INTERVAL_S", 0.02)
    line = Line(upkeep_hangs=True)
    async with beating(line, lease_s=0.04):
        await until(lambda: line.upkeeps_at, "upkeep has begun")
        beats = len(line.beats_at)
        await until(lambda: len(line.beats_at) > beats + 5, "more beats")
    assert len(line.upkeeps_at) == 1


async def test_upkeep_that_fails_is_repeated_and_costs_no_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "UPKEEP_MIN_INTERVAL_S", 0.02)
    line = Line(on_upkeep=[DatabaseUnavailable("gone"), RuntimeError("a bug"), None])
    async with beating(line, lease_s=0.04):
        await until(lambda: len(line.upkeeps_at) >= 4, "upkeep goes on")
    assert len(line.opened_at) == 1


async def test_news_go_out_soon_but_no_more_than_once_a_second() -> None:
    line = Line()
    async with beating(line, interval_s=600) as beat:
        await until(lambda: line.beats_at, "the first beat")
        for _ in range(1000):
            beat.beat_soon()
        await until(lambda: len(line.beats_at) == 2, "a beat for the news")
    assert heartbeat.PROGRESS_INTERVAL_S <= line.beats_at[1] - line.beats_at[0] < 10


async def test_news_do_not_hurry_a_worker_that_cannot_reach_its_database() -> None:
    line = Line(on_open=[DatabaseUnavailable("gone")] * 100)
    async with beating(line, interval_s=5) as beat:

        def opened_again_and_again() -> bool:
            beat.beat_soon()
            return len(line.opened_at) >= 4

        await until(opened_again_and_again, "four attempts")
    # At least half of 0.1, 0.2 and 0.4 s.
    assert line.opened_at[3] - line.opened_at[0] >= 0.35


async def test_stopping_does_not_wait_for_the_next_beat() -> None:
    line = Line()
    began = time.monotonic()
    async with beating(line, interval_s=600) as beat:
        await until(lambda: line.beats_at, "the first beat")
        beat.beat_soon()
    async with beating(Line(), interval_s=600):
        pass  # stopped perhaps before its loop runs
    async with beating(Line(on_open=[DatabaseUnavailable("gone")] * 100), interval_s=600):
        pass
    assert time.monotonic() - began < 10
    assert "windlass-heartbeat" not in {thread.name for thread in threading.enumerate()}
