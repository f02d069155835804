"""Virtual time jumps to the next timer and detects deadlocks and livelocks. Processes can be killed and frozen."""

import asyncio
import time

import pytest

from support.simulator.loop import EPOCH, Deadlock, Livelock, run, virtual_now
from support.simulator.processes import SimulatedProcess, start_detached, track_processes


def test_hour_of_sleep_takes_no_real_time() -> None:
    async def sleep() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    started = time.monotonic()
    assert run(sleep()) == pytest.approx(3600.0)
    assert time.monotonic() - started < 60


def test_shorter_sleep_ends_first() -> None:
    async def race() -> list[str]:
        woken: list[str] = []

        async def sleeper(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            woken.append(name)

        await asyncio.gather(sleeper("long", 2.0), sleeper("short", 1.0), sleeper("same", 2.0))
        return woken

    assert run(race()) == ["short", "long", "same"]


def test_virtual_now_follows_the_loop_clock() -> None:
    async def look() -> float:
        await asyncio.sleep(1.5)
        return (virtual_now() - EPOCH).total_seconds()

    assert run(look()) == 1.5


def test_waiting_without_a_timer_is_a_deadlock() -> None:
    async def wait() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run(wait())


def test_running_without_waiting_is_a_livelock() -> None:
    async def spin() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(Livelock):
        run(spin())


def test_killed_process_stops_and_its_requests_still_arrive() -> None:
    async def record() -> list[str]:
        track_processes(asyncio.get_running_loop())
        events: list[str] = []
        process = SimulatedProcess("p")

        async def deliver() -> None:
            await asyncio.sleep(2.0)
            events.append("delivered")

        async def child() -> None:
            await asyncio.sleep(3.0)
            events.append("child")

        async def main() -> None:
            start_detached(deliver())
            try:
                await asyncio.gather(child(), asyncio.sleep(3.0))
            finally:
                await process.checkpoint()
                events.append("after kill")

        process.start(main())
        await asyncio.sleep(1.0)
        process.kill()
        await asyncio.sleep(10.0)
        return events

    assert run(record()) == ["delivered"]


def test_frozen_process_continues_after_thaw() -> None:
    async def record() -> list[float]:
        track_processes(asyncio.get_running_loop())
        steps: list[float] = []
        process = SimulatedProcess("p")

        async def main() -> None:
            for _ in range(3):
                await process.checkpoint()
                steps.append(asyncio.get_running_loop().time())
                await asyncio.sleep(1.0)

        process.start(main())
        await asyncio.sleep(0.5)
        process.freeze()
        await asyncio.sleep(9.5)
        process.thaw()
        await asyncio.sleep(5.0)
        return steps

    assert run(record()) == [0.0, 10.0, 11.0]
