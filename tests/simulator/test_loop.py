"""Virtual time: it jumps, it does not depend on the world's, and it says when nobody will ever move again."""

import asyncio
import time

import pytest

from windlass.simulator.loop import EPOCH, Deadlock, Livelock, run, virtual_now
from windlass.simulator.processes import SimulatedProcess, start_detached, track_processes


def test_an_hour_of_sleep_takes_no_time() -> None:
    async def sleep() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    started = time.monotonic()
    assert run(sleep()) == pytest.approx(3600.0)
    assert time.monotonic() - started < 5


def test_whoever_sleeps_less_wakes_first() -> None:
    async def race() -> list[str]:
        woken: list[str] = []

        async def sleeper(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            woken.append(name)

        await asyncio.gather(sleeper("long", 2.0), sleeper("short", 1.0), sleeper("same", 2.0))
        return woken

    assert run(race()) == ["short", "long", "same"]


def test_moments_follow_the_loops_clock() -> None:
    async def look() -> float:
        await asyncio.sleep(1.5)
        return (virtual_now() - EPOCH).total_seconds()

    assert run(look()) == 1.5


def test_waiting_for_nobody_is_a_deadlock() -> None:
    async def wait() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run(wait())


def test_spinning_is_a_livelock() -> None:
    async def spin() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(Livelock):
        run(spin())


def test_a_killed_process_does_nothing_more_and_what_it_sent_arrives() -> None:
    async def tell() -> list[str]:
        track_processes(asyncio.get_running_loop())
        told: list[str] = []
        process = SimulatedProcess("p")

        async def deliver() -> None:
            await asyncio.sleep(2.0)
            told.append("delivered")

        async def child() -> None:
            await asyncio.sleep(3.0)
            told.append("child")

        async def main() -> None:
            start_detached(deliver())
            try:
                await asyncio.gather(child(), asyncio.sleep(3.0))
            finally:
                await process.checkpoint()
                told.append("a word from the grave")

        process.start(main())
        await asyncio.sleep(1.0)
        process.kill()
        await asyncio.sleep(10.0)
        return told

    assert run(tell()) == ["delivered"]


def test_a_frozen_process_goes_on_where_it_stood() -> None:
    async def tell() -> list[float]:
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

    assert run(tell()) == [0.0, 10.0, 11.0]
