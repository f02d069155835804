"""What processes share through the database: records, counters and requests for cycles."""

import asyncio
from typing import Any
from uuid import uuid4

import pytest

from support.queue_sql import eventually
from support.stores import PostgresStores
from windlass.control.summary import Summary
from windlass.model.config import Config
from windlass.model.counters import CYCLES, HTTP_REQUESTS, CounterBuffer
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate, Standby
from windlass.model.process import PROCESS_TTL_S, ProcessKind, ProcessRecord, RayHeadAddress
from windlass.ports.processes import CYCLE_REQUEST_TTL_S, MAX_CYCLE_REQUESTS
from windlass.wiring.cycle_requests import answered_cycle_requests
from windlass.wiring.http_server import USER_CONNECTIONS, server_stores
from windlass.wiring.server_process import DatabaseControlPlane

# A call that waits for a connection of users gives up before.
LIMIT_S = 30.0


@pytest.fixture
async def store(dsn: str, clock: Any) -> Any:
    async with PostgresStores(dsn, virtual_now=clock) as opened:
        yield opened


def record(number: int = 0, **values: Any) -> ProcessRecord:
    return ProcessRecord(uuid4(), ProcessKind.SERVER, number, "here", 42, "1.0", **values)


async def test_process_is_listed_while_it_renews_its_record(store: PostgresStores, clock: Any) -> None:
    first, second = (
        record(url="http://127.0.0.1:8080"),
        record(1, ray_head=RayHeadAddress("10.0.0.5:6379", "2", "3.11")),
    )
    await store.record_process(first)
    clock.advance(PROCESS_TTL_S / 2)
    await store.record_process(second)
    assert await store.processes() == [second, first]
    clock.advance(PROCESS_TTL_S * 3 / 4)
    assert await store.processes() == [second]
    await store.remove_process(second.id)
    await store.remove_process(second.id)
    assert await store.processes() == []


async def test_counters_of_processes_add_up(store: PostgresStores) -> None:
    for amount in (2, 3):
        buffer = CounterBuffer()
        buffer.add(HTTP_REQUESTS, (), amount)
        buffer.add(CYCLES, ("gpus", "leader"))
        await store.add_counters(buffer.take())
        assert buffer.take() == []
    values = {(value.name, value.labels): value.value for value in await store.counters()}
    assert values == {(HTTP_REQUESTS.name, ()): 5.0, (CYCLES.name, ("gpus", "leader")): 2.0}


async def test_requested_cycle_is_answered_once(store: PostgresStores, clock: Any) -> None:
    request_id = await store.request_cycle()
    assert request_id is not None
    assert await store.cycle_answer(request_id) is None
    assert await store.open_cycle_requests() == [request_id]
    await store.answer_cycle_requests([request_id], [{"fleet": "gpus"}])
    await store.answer_cycle_requests([request_id], [{"fleet": "other"}])
    assert await store.cycle_answer(request_id) == [{"fleet": "gpus"}]
    assert await store.open_cycle_requests() == []
    await store.withdraw_cycle_request(request_id)
    assert await store.cycle_answer(request_id) is None


async def test_operation_on_a_server_wakes_the_fleet_of_the_control_process(dsn: str) -> None:
    woken: asyncio.Queue[str] = asyncio.Queue()

    async def cycle_now() -> list[Summary]:
        return []

    async with PostgresStores(dsn) as store, PostgresStores(dsn) as server:
        await server.observe(Candidate("ann", 60.0), "gpus", FleetConfig(max_workers=4))
        async with answered_cycle_requests(store, cycle_now, woken.put_nowait, asyncio.Event()):

            async def is_woken() -> bool:
                await server.request_workers("gpus", 1)
                return not woken.empty()

            await eventually(is_woken, "the fleet is woken")
        assert await woken.get() == "gpus"


async def test_number_of_open_cycle_requests_is_bounded(store: PostgresStores, clock: Any) -> None:
    for _ in range(MAX_CYCLE_REQUESTS):
        assert await store.request_cycle() is not None
    assert await store.request_cycle() is None
    clock.advance(CYCLE_REQUEST_TTL_S)
    assert await store.open_cycle_requests() == []
    assert await store.request_cycle() is not None


async def test_leases_of_a_dead_process_are_released(store: PostgresStores) -> None:
    dead, successor, other = Candidate("dead", 600.0), Candidate("successor", 600.0), Candidate("other", 600.0, "ray:x")
    term = await store.acquire_lease(dead)
    assert await store.acquire_lease(other) == 1
    assert isinstance(await store.acquire_lease(successor), Standby)
    await store.release_leases("dead")
    assert term == 1
    assert await store.acquire_lease(successor) == 2
    assert isinstance(await store.acquire_lease(Candidate("another", 600.0, "ray:x")), Standby)


async def test_readers_do_not_delay_probes_and_machines_that_join(dsn: str, store: PostgresStores) -> None:
    """A few slow searches of a viewer made every server unready, and a load balancer would have removed them all."""
    await store.record_process(record(ray_head=RayHeadAddress("10.0.0.5:6379", "2", "3.11")))
    config = Config(fleets={"a": FleetConfig(provider="local", exec="true")})
    async with server_stores(dsn) as (worker_store, user_store):
        control = DatabaseControlPlane(config, user_store, worker_store)
        pool = user_store._database.pool
        busy = [await pool.take() for _ in range(USER_CONNECTIONS)]
        async with asyncio.timeout(LIMIT_S):
            health = await control.health()
            head = await control.ray_head()
        for connection in busy:
            pool.give_back(connection)
    assert (health.has_leader, list(health.fleets)) == (False, ["a"])
    assert head is not None
    assert head.address == "10.0.0.5:6379"
