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


async def test_a_second_one_is_refused_for_as_long_as_the_first_goes_on(store: MemoryStores) -> None:
    async with sole_head(store, LEASE_S):
        with pytest.raises(ConfigError, match="another `windlass up` .* has a Ray head.* set RAY_ADDRESS to one head"):
            async with sole_head(store, LEASE_S):
                pytest.fail("two heads")
    async with asyncio.timeout(LEASE_S / 2), sole_head(store, LEASE_S):
        pass  # whoever ends in good order leaves nothing to wait for


def test_a_head_that_was_given_is_shared_and_excludes_one_of_our_own() -> None:
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


async def test_one_that_was_killed_is_waited_for_no_longer_than_its_lease(store: MemoryStores) -> None:
    await store.acquire_lease(Candidate("killed", LEASE_S, HEAD_LEASE))
    async with asyncio.timeout(10 * LEASE_S), sole_head(store, LEASE_S):
        pass


async def test_who_loses_the_right_stops(store: MemoryStores) -> None:
    with pytest.raises(WindlassError, match="another `windlass up` has a Ray head of its own, or .* since"):
        async with asyncio.timeout(10 * LEASE_S), sole_head(store, LEASE_S):
            store.tables.leases.rows[HEAD_LEASE].holder = "another"
            store.tables.leases.rows[HEAD_LEASE].term += 1
            await asyncio.Event().wait()


async def test_a_right_that_cannot_be_asked_for_any_more_is_not_taken_for_another_orchestrator(
    store: MemoryStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lead(_candidate: Candidate) -> int:
        raise WindlassError("the database has another schema")

    with pytest.raises(WindlassError, match=r"could not be renewed \(the database has another schema\)"):
        async with asyncio.timeout(10 * LEASE_S), sole_head(store, LEASE_S):
            monkeypatch.setattr(store, "acquire_lease", lead)
            await asyncio.Event().wait()


async def test_being_cancelled_by_others_is_not_taken_for_that(store: MemoryStores) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(LEASE_S / 4), sole_head(store, LEASE_S):
            await asyncio.Event().wait()


async def test_who_loses_a_right_that_another_of_its_tasks_took_stops(store: MemoryStores) -> None:
    owner = asyncio.current_task()
    with pytest.raises(WindlassError, match="another `windlass up` has a Ray head of its own, or .* since"):
        async with asyncio.timeout(10 * LEASE_S), AsyncExitStack() as stack:
            await asyncio.create_task(stack.enter_async_context(given_head(store, LEASE_S, owner)))
            store.tables.leases.rows[HEAD_LEASE].term += 1
            await asyncio.Event().wait()
