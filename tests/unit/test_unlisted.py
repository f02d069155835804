"""What is said of a provider that does not list its machines."""

import asyncio
from random import Random

from structlog.testing import capture_logs

from windlass.control.cycle import UNLISTED_TOLD_S, FleetCycle
from windlass.model.errors import Unavailable
from windlass.model.fleet import FleetConfig
from windlass.model.machine import Machine, MachineRequest, Preparation, ProviderTraits
from windlass.ports.control import Candidate
from windlass.ports.provider import OnHostKey
from windlass.sim.loop import run, virtual_now
from windlass.store.memory_control import MemoryControlStore


class Away:
    """Has no machines, and cannot be reached while there is a problem."""

    traits = ProviderTraits()

    def __init__(self) -> None:
        self.problem: str | None = None

    async def create(self, request: MachineRequest) -> Machine:
        raise AssertionError(f"nobody asked for {request.name}")

    async def list_machines(self) -> tuple[Machine, ...]:
        if self.problem is not None:
            raise Unavailable(self.problem)
        return ()

    async def delete(self, machine: Machine) -> None:
        raise AssertionError(f"there is no {machine.name}")

    async def prepare(self, machine: Machine, host_key: str | None, on_host_key: OnHostKey) -> Preparation:
        return Preparation()

    async def close(self) -> None: ...


def test_the_same_trouble_with_a_list_is_said_once_and_then_every_minute() -> None:
    provider = Away()

    async def said_after(problem: str | None, cycles: int, cycle: FleetCycle) -> list[str]:
        provider.problem = problem
        with capture_logs() as lines:
            for _ in range(cycles):
                await cycle.run(5.0)
                await asyncio.sleep(5.0)
        return [line["error"] for line in lines if line["event"] == "machines unknown"]

    async def live() -> None:
        fleet = FleetConfig(queues=("red",), poll_interval_s=5)
        cycle = FleetCycle(
            "red",
            fleet,
            MemoryControlStore(virtual_now),
            provider,
            Candidate("ann", 30.0),
            Random(1),  # noqa: S311
        )
        minute = int(UNLISTED_TOLD_S / 5)
        assert await said_after("refused", minute, cycle) == ["refused"]
        assert await said_after("refused", minute, cycle) == ["refused"]
        assert await said_after("no answer", 3, cycle) == ["no answer"]
        assert await said_after(None, 1, cycle) == []
        assert await said_after("no answer", 3, cycle) == ["no answer"]
        await cycle.close()

    run(live())
