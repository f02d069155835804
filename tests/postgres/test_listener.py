"""Many callers wait on one listening connection: each is woken by tasks of its queues, and misses none."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from support.queue_sql import connected
from support.stores import PostgresStores
from windlass.model.task import NewTask
from windlass.model.worker import Registration
from windlass.store import channel, listener

LIMIT_S = 20.0
FOREVER_S = 3600.0


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[PostgresStores]:
    async with PostgresStores(dsn) as store:
        yield store


async def start_waiting(store: PostgresStores, *queues: str) -> "asyncio.Task[None]":
    """A caller that has consumed all earlier notifications and waits."""
    await store.wait_for_work(queues, 0.01)
    task = asyncio.create_task(store.wait_for_work(queues, FOREVER_S))
    await asyncio.sleep(0)
    return task


async def test_task_wakes_all_callers_of_its_queue(store: PostgresStores) -> None:
    tasks = [await start_waiting(store, *queues) for queues in (("a",), ("a", "b"), ("b", "a"), ("b", "a", "c"))]
    await store.enqueue(NewTask("a"))
    await asyncio.wait_for(asyncio.gather(*tasks), LIMIT_S)


async def test_flood_of_forged_notifications_wakes_no_faster_than_the_limit(
    store: PostgresStores, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "WAKE_BURST", 5.0)
    monkeypatch.setattr(listener, "MAX_WAKES_PER_S", 20.0)
    await store.wait_for_work(("a",), 0.01)
    async with connected(dsn) as forger:

        async def flood() -> None:
            while True:
                await forger.execute("notify windlass_tasks, 'a'")

        flooding = asyncio.create_task(flood())
        began = time.monotonic()
        for _ in range(25):
            await asyncio.wait_for(store.wait_for_work(("a",), FOREVER_S), LIMIT_S)
        took_s = time.monotonic() - began
        flooding.cancel()
        await asyncio.wait([flooding])
    assert took_s >= 0.9, "25 wake-ups: a burst of 5, then 20 per second"
    assert await store.claim(await registered(store), ("a",)) == []


async def registered(store: PostgresStores) -> str:
    await store.register(Registration("w", ("a",)))
    return "w"


async def test_caller_of_another_queue_consumes_nothing(store: PostgresStores) -> None:
    unrelated, interested = await start_waiting(store, "z"), await start_waiting(store, "a")
    await store.enqueue(NewTask("a"))
    await asyncio.wait_for(interested, LIMIT_S)
    assert not unrelated.done()
    unrelated.cancel()


async def test_task_arriving_between_two_waits_is_not_missed(store: PostgresStores) -> None:
    await store.wait_for_work(("a",), 0.01)
    all_queues = await start_waiting(store, "a", "b")
    await store.enqueue(NewTask("a"))
    await asyncio.wait_for(all_queues, LIMIT_S)
    await asyncio.wait_for(store.wait_for_work(("a",), FOREVER_S), LIMIT_S)


async def test_concurrent_first_waits_share_one_connection(store: PostgresStores) -> None:
    names = [f"q{number}" for number in range(20)]
    tasks = [asyncio.create_task(store.wait_for_work((name,), FOREVER_S)) for name in names]
    # The first wait returns at once: tasks may have arrived before LISTEN.
    await asyncio.wait_for(asyncio.gather(*tasks), LIMIT_S)
    later = [await start_waiting(store, name) for name in names]
    await store.enqueue_many(NewTask(name) for name in names)
    await asyncio.wait_for(asyncio.gather(*later), LIMIT_S)


async def test_forgetting_remembered_queues_wakes_all_callers(
    store: PostgresStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "MAX_REMEMBERED", 10)
    unrelated = await start_waiting(store, "z")
    await store.enqueue_many(NewTask(f"q{number}") for number in range(20))
    await asyncio.wait_for(unrelated, LIMIT_S)


async def test_caller_cancelled_at_the_moment_of_arrival_ends(store: PostgresStores) -> None:
    """A wait that lost the cancellation would delay closing until the next notification."""
    task = await start_waiting(store, "a")
    await asyncio.sleep(0)
    # No public call makes an arrival and a cancellation coincide in one step of the event loop.
    store.database.listener._record_arrival("a")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_watch_goes_on_after_a_malformed_answer(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a server would look every caller up until it restarts."""
    monkeypatch.setattr(channel, "RETRY_PAUSE_S", 0.0)
    connect, attempts = channel.connect, 0

    async def fail_once(*arguments: Any, **options: Any) -> Any:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise asyncpg.ProtocolError("unexpected message")
        return await connect(*arguments, **options)

    monkeypatch.setattr(channel, "connect", fail_once)
    is_listening = asyncio.Event()

    def set_listening(value: bool) -> None:
        if value:
            is_listening.set()

    watching = asyncio.create_task(
        channel.watch_channel(dsn, "windlass_test", lambda _: None, set_listening, is_possible=True)
    )
    await asyncio.wait(
        {watching, asyncio.ensure_future(is_listening.wait())}, timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED
    )
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert is_listening.is_set()
