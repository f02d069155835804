"""The lease of the Ray head: one cluster for all orchestrators of a database."""

import asyncio
from contextlib import AsyncExitStack
from random import Random

import pytest

from support.memory_store.stores import MemoryStores
from support.simulator.loop import virtual_now
from support.virtual_time import in_virtual_time
from windlass.model.config import Retention
from windlass.model.errors import ConfigError, WindlassError
from windlass.model.lease import Candidate
from windlass.model.node import HEAD_LEASE
from windlass.ray.head_lease import hold_head_lease

LEASE_S = 10.0


@pytest.fixture
def store() -> MemoryStores:
    return MemoryStores(virtual_now, Retention(), Random(1))  # noqa: S311


@in_virtual_time
async def test_second_head_is_refused_while_the_first_runs(store: MemoryStores) -> None:
    async with hold_head_lease(store, is_shared=False, lease_s=LEASE_S):
        with pytest.raises(ConfigError, match="another `windlass up` .* uses a Ray head.* Set the same RAY_ADDRESS"):
            async with hold_head_lease(store, is_shared=False, lease_s=LEASE_S):
                pytest.fail("two heads")
    # The lease was released, so there is nothing to wait for.
    async with asyncio.timeout(LEASE_S / 2), hold_head_lease(store, is_shared=False, lease_s=LEASE_S):
        pass


@in_virtual_time
async def test_external_head_is_shared_and_excludes_own_heads(store: MemoryStores) -> None:
    async with hold_head_lease(store, is_shared=True, lease_s=LEASE_S):
        async with hold_head_lease(store, is_shared=True, lease_s=LEASE_S):
            pass
        with pytest.raises(ConfigError, match="uses a Ray head, its own or by RAY_ADDRESS, and two heads"):
            async with hold_head_lease(store, is_shared=False, lease_s=LEASE_S):
                pytest.fail("two heads")
    async with asyncio.timeout(10 * LEASE_S), hold_head_lease(store, is_shared=False, lease_s=LEASE_S):
        with pytest.raises(ConfigError, match="another `windlass up` .* runs a Ray head of its own, and"):
            async with hold_head_lease(store, is_shared=True, lease_s=LEASE_S):
                pytest.fail("two heads")


@in_virtual_time
async def test_lease_of_a_killed_orchestrator_is_waited_for(store: MemoryStores) -> None:
    await store.acquire_lease(Candidate("killed", LEASE_S, HEAD_LEASE))
    async with asyncio.timeout(10 * LEASE_S), hold_head_lease(store, is_shared=False, lease_s=LEASE_S):
        pass


@in_virtual_time
async def test_losing_the_lease_ends_the_orchestrator(store: MemoryStores) -> None:
    with pytest.raises(WindlassError, match="lost the lease of the Ray head: another `windlass up` took over"):
        async with asyncio.timeout(10 * LEASE_S), hold_head_lease(store, is_shared=False, lease_s=LEASE_S):
            store.tables.leases.rows[HEAD_LEASE].holder = "another"
            store.tables.leases.rows[HEAD_LEASE].term += 1
            await asyncio.Event().wait()


@in_virtual_time
async def test_failed_renewal_is_not_reported_as_another_orchestrator(
    store: MemoryStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_candidate: Candidate) -> int:
        raise WindlassError("the database has another schema")

    with pytest.raises(WindlassError, match="cannot renew the lease of the Ray head: the database has another schema"):
        async with asyncio.timeout(10 * LEASE_S), hold_head_lease(store, is_shared=False, lease_s=LEASE_S):
            monkeypatch.setattr(store, "acquire_lease", fail)
            await asyncio.Event().wait()


@in_virtual_time
async def test_cancellation_from_outside_is_not_reported_as_a_lost_lease(store: MemoryStores) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(LEASE_S / 4), hold_head_lease(store, is_shared=False, lease_s=LEASE_S):
            await asyncio.Event().wait()


@in_virtual_time
async def test_losing_a_lease_that_another_task_acquired_ends_the_owner(store: MemoryStores) -> None:
    owner = asyncio.current_task()
    with pytest.raises(WindlassError, match="lost the lease of the Ray head"):
        async with asyncio.timeout(10 * LEASE_S), AsyncExitStack() as stack:
            lease = hold_head_lease(store, is_shared=True, lease_s=LEASE_S, owner=owner)
            await asyncio.create_task(stack.enter_async_context(lease))
            store.tables.leases.rows[HEAD_LEASE].term += 1
            await asyncio.Event().wait()
