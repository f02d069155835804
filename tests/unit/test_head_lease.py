"""One Ray head of our own for a database, whoever else would keep one."""

import asyncio
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from random import Random

import pytest

from windlass.model.config import Retention
from windlass.model.errors import ConfigError, WindlassError
from windlass.model.lease import Candidate
from windlass.model.node import HEAD_LEASE
from windlass.ray.head_lease import given_head, sole_head
from windlass.simulator.loop import run, virtual_now
from windlass.store.memory.stores import MemoryStores

LEASE_S = 0.4


@pytest.fixture
def store() -> MemoryStores:
    return MemoryStores(lambda: datetime.now(UTC), Retention(), Random(1))  # noqa: S311


async def test_second_head_is_refused_while_first_holds_the_lease(store: MemoryStores) -> None:
    async with sole_head(store, LEASE_S):
        with pytest.raises(ConfigError, match="another `windlass up` .* has a Ray head.* set RAY_ADDRESS to one head"):
            async with sole_head(store, LEASE_S):
                pytest.fail("two heads")
    async with asyncio.timeout(LEASE_S / 2), sole_head(store, LEASE_S):
        pass  # whoever ends in good order leaves nothing to wait for


def test_given_head_is_shared_and_excludes_own_head() -> None:
    store = MemoryStores(virtual_now, Retention(), Random(1))  # noqa: S311

    async def both_ways() -> None:
        async with given_head(store, LEASE_S):
            async with given_head(store, LEASE_S):
                pass
            with pytest.raises(ConfigError, match="has a Ray head, its own or by RAY_ADDRESS, and two heads"):
                async with sole_head(store, LEASE_S):
                    pytest.fail("two heads")
        async with asyncio.timeout(10 * LEASE_S), sole_head(store, LEASE_S):
            with pytest.raises(ConfigError, match="another `windlass up` .* keeps a Ray head of its own, and"):
                async with given_head(store, LEASE_S):
                    pytest.fail("two heads")

    run(both_ways())


async def test_lease_of_killed_holder_expires(store: MemoryStores) -> None:
    await store.acquire_lease(Candidate("killed", LEASE_S, HEAD_LEASE))
    async with asyncio.timeout(10 * LEASE_S), sole_head(store, LEASE_S):
        pass


async def test_holder_stops_when_lease_is_lost(store: MemoryStores) -> None:
    with pytest.raises(WindlassError, match="another `windlass up` has a Ray head of its own, or .* since"):
        async with asyncio.timeout(10 * LEASE_S), sole_head(store, LEASE_S):
            store.tables.leases.rows[HEAD_LEASE].holder = "another"
            store.tables.leases.rows[HEAD_LEASE].term += 1
            await asyncio.Event().wait()


async def test_failed_renewal_is_not_reported_as_another_orchestrator(
    store: MemoryStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lead(_candidate: Candidate) -> int:
        raise WindlassError("the database has another schema")

    with pytest.raises(WindlassError, match=r"could not be renewed \(the database has another schema\)"):
        async with asyncio.timeout(10 * LEASE_S), sole_head(store, LEASE_S):
            monkeypatch.setattr(store, "acquire_lease", lead)
            await asyncio.Event().wait()


async def test_cancellation_is_not_reported_as_lost_lease(store: MemoryStores) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(LEASE_S / 4), sole_head(store, LEASE_S):
            await asyncio.Event().wait()


async def test_owner_task_stops_when_lease_taken_by_other_task_is_lost(store: MemoryStores) -> None:
    owner = asyncio.current_task()
    with pytest.raises(WindlassError, match="another `windlass up` has a Ray head of its own, or .* since"):
        async with asyncio.timeout(10 * LEASE_S), AsyncExitStack() as stack:
            await asyncio.create_task(stack.enter_async_context(given_head(store, LEASE_S, owner)))
            store.tables.leases.rows[HEAD_LEASE].term += 1
            await asyncio.Event().wait()
