"""Many wait on one listening connection: all whom a task concerns are told, nobody eats another's news."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from support.stores import PostgresStores
from windlass.model.task import NewTask
from windlass.store import listener as module

LIMIT_S = 20.0
FOREVER_S = 3600.0


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[PostgresStores]:
    async with PostgresStores(dsn) as store:
        yield store


async def waiting(store: PostgresStores, *queues: str) -> "asyncio.Task[None]":
    """Somebody who has heard all there was, and waits."""
    await store.wait_for_work(queues, 0.01)
    task = asyncio.create_task(store.wait_for_work(queues, FOREVER_S))
    await asyncio.sleep(0)
    return task


async def test_all_who_wait_for_a_queue_are_told(store: PostgresStores) -> None:
    tasks = [await waiting(store, *queues) for queues in (("a",), ("a", "b"), ("b", "a"), ("b", "a", "c"))]
    await store.enqueue(NewTask("a"))
    await asyncio.wait_for(asyncio.gather(*tasks), LIMIT_S)


async def test_one_who_waits_for_another_queue_takes_nothing_away(store: PostgresStores) -> None:
    stranger, concerned = await waiting(store, "z"), await waiting(store, "a")
    await store.enqueue(NewTask("a"))
    await asyncio.wait_for(concerned, LIMIT_S)
    assert not stranger.done()
    stranger.cancel()


async def test_what_arrives_while_another_waits_is_not_missed(store: PostgresStores) -> None:
    await store.wait_for_work(("a",), 0.01)
    all_queues = await waiting(store, "a", "b")
    await store.enqueue(NewTask("a"))
    await asyncio.wait_for(all_queues, LIMIT_S)
    await asyncio.wait_for(store.wait_for_work(("a",), FOREVER_S), LIMIT_S)


async def test_many_who_begin_at_once_share_one_connection(store: PostgresStores) -> None:
    names = [f"q{number}" for number in range(20)]
    tasks = [asyncio.create_task(store.wait_for_work((name,), FOREVER_S)) for name in names]
    # The first look is free: whatever was there before anybody listened is found by it.
    await asyncio.wait_for(asyncio.gather(*tasks), LIMIT_S)
    later = [await waiting(store, name) for name in names]
    await store.enqueue_many(NewTask(name) for name in names)
    await asyncio.wait_for(asyncio.gather(*later), LIMIT_S)


async def test_what_is_remembered_is_bounded_and_forgetting_is_a_hint_too_many(
    store: PostgresStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_REMEMBERED", 10)
    stranger = await waiting(store, "z")
    await store.enqueue_many(NewTask(f"q{number}") for number in range(20))
    await asyncio.wait_for(stranger, LIMIT_S)


async def test_who_is_told_to_end_at_the_moment_of_an_arrival_ends(store: PostgresStores) -> None:
    """A wait that swallowed it would go on for as long as the next one takes, and whoever closes would wait for it."""
    task = await waiting(store, "a")
    await asyncio.sleep(0)
    store.database.listener._record_arrival("a")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
