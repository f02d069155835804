"""Waiting for work."""

import asyncio

from support.queue_actions import (
    LIMIT_S,
    add,
    claim_one,
    claimed,
    fail,
)
from support.stores import AnyStore


async def waits(store: AnyStore, *queues: str, timeout_s: float = 3600.0) -> "asyncio.Task[None]":
    """A worker that found its queue empty and waits now: it has consumed all earlier signals."""
    for queue in queues:
        await store.wait_for_work((queue,), 0.01)
    return asyncio.create_task(store.wait_for_work(queues, timeout_s))


async def test_wait_ends_when_task_arrives(store: AnyStore) -> None:
    waiting = await waits(store, "q", "r")
    await add(store, "r")
    await asyncio.wait_for(waiting, LIMIT_S)


async def test_wait_ends_when_task_is_requeued(store: AnyStore) -> None:
    claim = await claimed(store)
    waiting = await waits(store, "q")
    await store.release("w1", claim.task_id, claim.token, "released")
    await asyncio.wait_for(waiting, LIMIT_S)
    claim = await claim_one(store)
    await fail(store, claim, retry=False)
    waiting = await waits(store, "q")
    await store.retry_task(claim.task_id)
    await asyncio.wait_for(waiting, LIMIT_S)


async def test_task_that_arrives_before_wait_is_not_missed(store: AnyStore) -> None:
    await (await waits(store, "q", timeout_s=0.01))
    await add(store)
    await asyncio.wait_for(store.wait_for_work(("q",), 3600.0), LIMIT_S)


async def test_wait_ends_at_timeout(store: AnyStore) -> None:
    waiting = await waits(store, "q", timeout_s=0.01)
    await add(store, "other")
    await asyncio.wait_for(waiting, LIMIT_S)
