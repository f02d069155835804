"""Providers that return no machine list, and the interval of volume checks."""

import asyncio
from random import Random

from structlog.testing import capture_logs

from support.memory_store.stores import MemoryStores
from support.simulator.loop import run, virtual_now
from windlass.control.cycle import LISTING_LOG_INTERVAL_S, FleetCycle
from windlass.model.errors import Unavailable
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate
from windlass.model.machine import Machine, MachineRequest, Preparation, ProviderTraits, Volume
from windlass.ports.provider import OnHostKey


class Away:
    """Lists no machines, or fails while `problem` is set."""

    traits = ProviderTraits()

    def __init__(self) -> None:
        self.problem: str | None = None

    async def create(self, request: MachineRequest) -> Machine:
        raise AssertionError(f"unexpected request {request.name}")

    async def list_machines(self) -> tuple[Machine, ...]:
        if self.problem is not None:
            raise Unavailable(self.problem)
        return ()

    async def delete(self, machine: Machine) -> None:
        raise AssertionError(f"there is no {machine.name}")

    async def prepare(self, machine: Machine, host_key: str | None, on_host_key: OnHostKey) -> Preparation:
        return Preparation()

    async def close(self) -> None: ...


def test_repeated_list_error_is_logged_once_per_minute() -> None:
    provider = Away()

    async def said_after(problem: str | None, cycles: int, cycle: FleetCycle) -> list[str]:
        provider.problem = problem
        with capture_logs() as lines:
            for _ in range(cycles):
                await cycle.run(5.0)
                await asyncio.sleep(5.0)
        return [line["error"] for line in lines if line["event"] == "list machines failed"]

    async def live() -> None:
        fleet = FleetConfig(queues=("red",), poll_interval_s=5)
        cycle = FleetCycle(
            "red",
            fleet,
            MemoryStores(virtual_now),
            provider,
            Candidate("ann", 30.0),
            Random(1),  # noqa: S311
        )
        minute = int(LISTING_LOG_INTERVAL_S / 5)
        assert await said_after("refused", minute, cycle) == ["refused"]
        assert await said_after("refused", minute, cycle) == ["refused"]
        assert await said_after("no answer", 3, cycle) == ["no answer"]
        assert await said_after(None, 1, cycle) == []
        assert await said_after("no answer", 3, cycle) == ["no answer"]
        await cycle.close()

    run(live())


class Sharing(Away):
    """A provider with a shared volume."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0

    async def volume(self) -> Volume:
        self.looks += 1
        if self.problem is not None:
            raise Unavailable(self.problem)
        return Volume("v1", 100)

    async def grow_volume(self, volume_id: str, size_gb: int) -> Volume:
        raise AssertionError(f"{volume_id} has {size_gb} GB already")


def test_volume_check_interval_spans_orchestrators() -> None:
    async def live() -> None:
        store, provider = MemoryStores(virtual_now), Sharing()
        fleet = FleetConfig(queues=("red",), poll_interval_s=5, storage_check_interval_cycles=4)

        async def looks_in(cycles: int) -> int:
            before = provider.looks
            for _ in range(cycles):
                # Each cycle is a separate process, as with `windlass cycle`.
                cycle = FleetCycle("red", fleet, store, provider, Candidate("ann", 30.0), Random(1))  # noqa: S311
                await cycle.run()
                await asyncio.sleep(5.0)
            return provider.looks - before

        assert await looks_in(12) == 3
        provider.problem = "not found (404)"
        assert await looks_in(3) == 3, "what cannot be known is looked at again in the next cycle"
        provider.problem = None
        assert await looks_in(4) == 1

    run(live())
