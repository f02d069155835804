"""Preparations in the control loop: they run in the background, once at a time, and their results are recorded."""

import asyncio
from datetime import datetime, timedelta
from random import Random
from typing import Any

import pytest

from windlass.control.cycle import FleetCycle, run_once
from windlass.model.errors import NotPrepared
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate
from windlass.model.machine import Machine, MachineRequest, MachineState, Preparation, ProviderTraits
from windlass.model.task import NewTask
from windlass.ports.provider import OnHostKey
from windlass.simulator.loop import run, virtual_now
from windlass.store.memory.stores import MemoryStores

FLEET = FleetConfig(queues=("red",), max_workers=2, poll_interval_s=5, heartbeat_interval_s=5, spawn_timeout_s=600)


class SlowProvider:
    """Machines run at once. A preparation takes two minutes and then succeeds or raises `error`."""

    traits = ProviderTraits(has_prepare_step=True)

    def __init__(self, error: Exception | None = None) -> None:
        self.machines: dict[str, Machine] = {}
        self.error = error
        self.prepared: list[tuple[str, str | None]] = []

    async def create(self, request: MachineRequest) -> Machine:
        machine = Machine(f"m-{request.name}", request.name, MachineState.RUNNING)
        self.machines[machine.id] = machine
        return machine

    async def list_machines(self) -> tuple[Machine, ...]:
        return tuple(self.machines.values())

    async def delete(self, machine: Machine) -> datetime | None:
        self.machines.pop(machine.id, None)
        return None

    async def prepare(self, machine: Machine, host_key: str | None, on_host_key: OnHostKey) -> Preparation:
        self.prepared.append((machine.name, host_key))
        if host_key is None:
            await on_host_key("its key")
        await asyncio.sleep(120)
        if self.error is not None:
            raise self.error
        return Preparation("its key")

    async def close(self) -> None: ...


def cycle_of(store: MemoryStores, provider: SlowProvider, holder: str = "ann", fleet: str = "red") -> FleetCycle:
    config = FLEET.model_copy(update={"queues": (fleet,)})
    return FleetCycle(fleet, config, store, provider, Candidate(holder, 30.0), Random(1))  # noqa: S311


async def spawn_one(store: MemoryStores, provider: SlowProvider) -> FleetCycle:
    await store.enqueue(NewTask("red"))
    cycle = cycle_of(store, provider)
    await cycle.run(5.0)
    assert len(provider.machines) == 1
    return cycle


def event_codes(events: object) -> list[str]:
    return [event.code for event in events if event.worker_id is not None]  # type: ignore[attr-defined]


def test_preparation_delays_no_cycle_and_its_end_starts_one() -> None:
    async def scenario() -> None:
        store, provider = MemoryStores(virtual_now), SlowProvider()
        cycle = await spawn_one(store, provider)
        loop = asyncio.get_running_loop()
        began = loop.time()
        for _ in range(3):
            await cycle.run(5.0)
            await cycle.run(None)
        await cycle.settle()
        await asyncio.sleep(0)
        assert loop.time() == began, "no cycle waited"
        assert len(provider.prepared) == 1
        await cycle.wait_for_wake(600)
        assert loop.time() - began == pytest.approx(120, abs=1)
        await cycle.run(5.0)
        assert event_codes(await store.events(limit=100)) == ["WORKER_SPAWNED", "MACHINE_PREPARING", "MACHINE_PREPARED"]
        await cycle.run(5.0)
        assert len(provider.prepared) == 1

    run(scenario())


def test_failed_preparation_terminates_the_worker_with_its_code() -> None:
    async def scenario() -> None:
        store = MemoryStores(virtual_now)
        provider = SlowProvider(NotPrepared("DISK_FULL", "preparing it: the disk is full", "df says so", "its key"))
        cycle = await spawn_one(store, provider)
        await cycle.run(5.0)
        await cycle.settle(includes_preparations=True)
        await cycle.run(5.0)
        codes = event_codes(await store.events(limit=100))
        assert codes[:5] == [
            "WORKER_SPAWNED", "MACHINE_PREPARING", "PREPARATION_FAILED", "WORKER_ERROR", "WORKER_TERMINATED",
        ]  # fmt: skip

    run(scenario())


def test_preparation_with_unknown_result_is_repeated() -> None:
    async def scenario() -> None:
        store, provider = MemoryStores(virtual_now), SlowProvider(RuntimeError("a defect in the provider"))
        cycle = await spawn_one(store, provider)
        for _ in range(2):
            await cycle.run(5.0)
            await cycle.settle(includes_preparations=True)
        assert len(provider.prepared) == 2
        assert "PREPARATION_UNCLEAR" in event_codes(await store.events(limit=100))

    run(scenario())


def test_new_leader_resumes_an_unfinished_preparation() -> None:
    async def scenario() -> None:
        store, provider = MemoryStores(virtual_now), SlowProvider()
        cycle = await spawn_one(store, provider)
        await cycle.run(5.0)
        await asyncio.sleep(1)
        cycle.abandon()
        await asyncio.sleep(31)
        began = virtual_now()
        other = cycle_of(store, provider, "bob")
        await other.run(5.0)
        await other.settle(includes_preparations=True)
        assert len(provider.prepared) == 2
        assert virtual_now() - began < timedelta(seconds=130)
        assert [host_key for _, host_key in provider.prepared] == [None, "its key"], "the stored host key is used"
        assert event_codes(await store.events(limit=100)) == ["WORKER_SPAWNED", "MACHINE_PREPARING", "MACHINE_PREPARED"]

    run(scenario())


def test_fleets_are_prepared_concurrently_in_a_single_cycle() -> None:
    async def scenario() -> None:
        store, providers = (
            MemoryStores(virtual_now),
            {fleet: SlowProvider() for fleet in ("red", "blue", "green")},
        )
        for _ in range(2):
            for fleet in providers:
                await store.enqueue(NewTask(fleet))
            began = virtual_now()
            await run_once([cycle_of(store, provider, fleet=fleet) for fleet, provider in providers.items()])
        assert [len(provider.prepared) for provider in providers.values()] == [1, 1, 1]
        # Each takes two minutes.
        assert virtual_now() - began == pytest.approx(timedelta(seconds=120), abs=timedelta(seconds=5))
        assert event_codes(await store.events(limit=100)).count("MACHINE_PREPARED") == 3

    run(scenario())


def test_failing_fleet_does_not_stop_preparation_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        store, providers = MemoryStores(virtual_now), {fleet: SlowProvider() for fleet in ("red", "blue")}
        observe = store.observe

        async def observe_blue(candidate: Candidate, fleet: str, config: FleetConfig) -> Any:
            if fleet == "red":
                raise ValueError("state of red is unreadable")
            return await observe(candidate, fleet, config)

        monkeypatch.setattr(store, "observe", observe_blue)
        for _ in range(2):
            await store.enqueue(NewTask("blue"))
            with pytest.raises(ValueError, match="of red"):
                await run_once([cycle_of(store, provider, fleet=fleet) for fleet, provider in providers.items()])
        assert event_codes(await store.events(limit=100)).count("MACHINE_PREPARED") == 1

    run(scenario())
