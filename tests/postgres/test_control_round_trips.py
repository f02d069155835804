"""A cycle makes a constant number of database round trips, whatever the number of workers and their state changes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest

from support.stores import PostgresStores
from windlass.control.cycle import FleetCycle
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate
from windlass.model.machine import Machine, MachineRequest, MachineState, ProviderTraits
from windlass.model.worker import WorkerStatus


class Clock:
    def __init__(self) -> None:
        self.now = datetime(2030, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now


class CountingConnection:
    """A connection that counts its calls. Each is one round trip."""

    def __init__(self, connection: Any, store: "CountingStore") -> None:
        self._connection = connection
        self._store = store

    def __getattr__(self, name: str) -> Any:
        self._store.round_trips += name in ("execute", "executemany", "fetch", "fetchrow", "fetchval")
        return getattr(self._connection, name)


class CountingStore(PostgresStores):
    """Counts round trips, except those that set virtual time and asyncpg's queries about types."""

    round_trips = 0

    def __init__(self, dsn: str, **options: Any) -> None:
        super().__init__(dsn, **options)
        connect = self.database.connection

        @asynccontextmanager
        async def counted(doing: str) -> AsyncIterator[Any]:
            async with connect(doing) as connection:
                yield CountingConnection(connection, self)

        self.database.connection = counted  # type: ignore[method-assign]


class ImmediateProvider:
    """A provider whose machines are created and deleted at once."""

    traits = ProviderTraits()

    def __init__(self, price_micros_per_hour: int | None = None) -> None:
        self.machines: dict[str, Machine] = {}
        self._price = price_micros_per_hour

    async def create(self, request: MachineRequest) -> Machine:
        machine = Machine(
            f"m-{request.name}", request.name, MachineState.RUNNING, price_micros_per_hour=self._price, currency="EUR"
        )
        self.machines[machine.id] = machine
        return machine

    async def list_machines(self) -> tuple[Machine, ...]:
        return tuple(self.machines.values())

    async def delete(self, machine: Machine) -> None:
        self.machines.pop(machine.id, None)

    async def close(self) -> None:
        pass


async def round_trips_per_cycle(dsn: str, workers: int) -> list[int]:
    """Round trips of each cycle: spawn all, promote, keep, delete exited, respawn, promote, drain, terminate."""
    clock, provider = Clock(), ImmediateProvider()
    config = FleetConfig(
        min_workers=workers,
        max_workers=workers,
        max_changes_per_cycle=workers,
        heartbeat_timeout_s=30.0,
        min_spawns_for_rate=10_000,
    )
    counts = []
    async with CountingStore(dsn, virtual_now=clock) as store:
        candidate = Candidate("ann", 30.0)

        async def cycle(config: FleetConfig) -> None:
            store.round_trips = 0
            await FleetCycle("f", config, store, provider, candidate, Random(len(counts))).run()  # noqa: S311
            counts.append(store.round_trips)
            clock.now += timedelta(seconds=5)

        async def send_heartbeats() -> None:
            for worker in await store.workers():
                await store.heartbeat(worker.id, (), {"idle_s": 60.0})

        await cycle(config)
        assert len(provider.machines) == workers
        await send_heartbeats()
        await cycle(config)
        assert {worker.status for worker in await store.workers()} == {WorkerStatus.ACTIVE}
        await cycle(config)
        before = set(provider.machines)
        provider.machines = {
            id_: Machine(id_, machine.name, MachineState.EXITED) for id_, machine in provider.machines.items()
        }
        await cycle(config)
        assert provider.machines == {}
        await cycle(config)
        assert len(provider.machines) == workers
        assert before.isdisjoint(provider.machines)
        await send_heartbeats()
        await cycle(config)
        clock.now += timedelta(seconds=20)
        await send_heartbeats()
        idle_config = config.model_copy(update={"min_workers": 0, "idle_timeout_s": 1.0})
        for _ in range(3):
            await cycle(idle_config)
        assert provider.machines == {}
    return counts


@pytest.mark.timeout(180)
async def test_round_trips_of_a_cycle_do_not_grow_with_its_workers(embedded_server: Any) -> None:
    runs = []
    for workers in (1, 20, 1000):
        with embedded_server.migrated_database() as dsn:
            runs.append(await round_trips_per_cycle(dsn, workers))
    one, some, many = runs
    assert one == some
    # A large snapshot is sent when the database asks for it, which takes one round trip more.
    assert all(0 <= large - small <= 1 for large, small in zip(many, one, strict=True))
    # Acquire the lease, observe, commit the plan, record the outcomes.
    assert max(many) <= 4


async def test_settlement_needs_two_round_trips_when_due_and_none_otherwise(embedded_server: Any) -> None:
    workers, clock, provider = 20, Clock(), ImmediateProvider(price_micros_per_hour=6_000)
    config = FleetConfig(min_workers=workers, max_workers=workers, max_changes_per_cycle=workers)
    counts = []
    with embedded_server.migrated_database() as dsn:
        async with CountingStore(dsn, virtual_now=clock) as store:
            # The leader keeps its lease, as a running orchestrator does.
            fleet = FleetCycle("f", config, store, provider, Candidate("ann", 10_000.0), Random(0))  # noqa: S311
            for minutes in (0, 1, 1, 1, 57, 1, 1):
                clock.now += timedelta(minutes=minutes)
                for worker in await store.workers():
                    await store.heartbeat(worker.id)
                store.round_trips = 0
                await fleet.run()
                counts.append(store.round_trips)
            (cost,) = await store.costs("fleet", clock.now - timedelta(days=1))
            # One hour of each worker is settled. The hour that began since is not.
            assert cost.total_micros == workers * 6_000
    _spawned, _promoted, _steady, quiet, _stored_again, due, after = counts
    assert quiet == after
    assert due == quiet + 2
