"""The task of one fleet: its errors never end the task of another."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from windlass.control.cycle import FleetCycle
from windlass.control.fleet_task import FleetTask
from windlass.control.summary import Summary
from windlass.model.errors import BadInput
from windlass.model.fleet import FleetConfig

LIMIT_S = 60.0
CYCLES = 3


class EmptyCycle:
    """A cycle of a fleet without workers. `settle` raises `settle_error`."""

    def __init__(self, name: str, settle_error: Exception | None = None) -> None:
        self.name = name
        self.config = FleetConfig(queues=("q",), poll_interval_s=0.05)
        self.runs = 0
        self._settle_error = settle_error
        self._wake = asyncio.Event()

    async def run(self, _wait_s: float, **_options: Any) -> Summary:
        self.runs += 1
        return Summary(
            self.name, is_leader=True, timestamp="2026-01-01T00:00:00+00:00", managed_workers=0, billed_machines=0
        )

    def clear_wake(self) -> None:
        self._wake.clear()

    def wake(self) -> None:
        self._wake.set()

    async def wait_for_wake(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def settle(self) -> None:
        if self._settle_error is not None:
            raise self._settle_error

    def abandon(self) -> None:
        pass

    async def close(self, _timeout_s: float) -> None:
        pass


def make_task(cycle: EmptyCycle, on_summary: Callable[[Summary], None]) -> FleetTask:
    return FleetTask(cast(FleetCycle, cycle), on_summary)


@pytest.mark.parametrize(
    "error",
    [BadInput("recording the outcomes: a value is refused"), RuntimeError("a defect")],
    ids=["refused", "defect"],
)
async def test_fleet_whose_end_fails_does_not_stop_others(error: Exception) -> None:
    failing, other = EmptyCycle("failing", error), EmptyCycle("other")
    goes_on = asyncio.Event()

    def receive(_summary: Summary) -> None:
        if runner.done() and other.runs >= CYCLES:
            goes_on.set()

    with capture_logs() as logs:
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
            ending, staying = make_task(failing, lambda _: None), make_task(other, receive)
            runner = ending.start(group)
            staying.start(group)
            ending.shut_down()
            await goes_on.wait()
            staying.stop()
    assert [(entry["event"], entry["fleet"]) for entry in logs] == [("record outcomes failed", "failing")]


async def test_listener_that_fails_does_not_stop_fleets() -> None:
    def fail(_summary: Summary) -> None:
        raise RuntimeError("a defect")

    cycle = EmptyCycle("failing")
    with capture_logs() as logs:
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
            task = make_task(cycle, fail)
            task.start(group)
            while cycle.runs < CYCLES:
                await asyncio.sleep(0.01)
            task.stop()
    assert {(entry["event"], entry["fleet"]) for entry in logs} == {("handle summary failed", "failing")}
