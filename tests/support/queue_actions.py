"""Steps that the conformance tests of the queue share: register, enqueue, claim, complete, fail."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from support.stores import AnyStore
from windlass.model.task import Claim, Finished, Task, TaskStatus, new_task
from windlass.model.worker import HeldClaim, Registration

# What a condition that needs real time (a notification) may take before it counts as absent.
LIMIT_S = 20.0


async def register(store: AnyStore, *worker_ids: str, lease_s: float = 30.0, **fields: Any) -> None:
    for worker_id in worker_ids:
        await store.register(Registration(worker_id, ("q",), lease_s=lease_s, **{"start_id": "first", **fields}))


async def add(store: AnyStore, queue: str = "q", payload: Any = None, **fields: Any) -> int:
    return await store.enqueue(new_task(queue, payload, **fields))


async def claim_one(store: AnyStore, worker_id: str = "w1", queues: Sequence[str] = ("q",)) -> Claim:
    (claim,) = await store.claim(worker_id, queues)
    return claim


async def claimed(store: AnyStore, worker_id: str = "w1", **fields: Any) -> Claim:
    """A new task, in the hands of a worker."""
    await register(store, worker_id)
    await add(store, **fields)
    return await claim_one(store, worker_id)


async def complete(store: AnyStore, claim: Claim, worker_id: str = "w1", result: str | None = None) -> list[UUID]:
    """Returns what was lost."""
    turn = await store.finish_and_claim(worker_id, [Finished(claim.task_id, claim.token, result)], (), 0)
    return turn.lost


async def fail(store: AnyStore, claim: Claim, worker_id: str = "w1", **fields: Any) -> TaskStatus | None:
    return await store.fail(worker_id, claim.task_id, claim.token, "it broke", **fields)


async def task_of(store: AnyStore, claim_or_id: Claim | int) -> Task:
    task = await store.task(claim_or_id if isinstance(claim_or_id, int) else claim_or_id.task_id)
    assert task is not None
    return task


async def status_of(store: AnyStore, claim_or_id: Claim | int) -> TaskStatus:
    return (await task_of(store, claim_or_id)).status


async def late_results(store: AnyStore, worker_id: str = "w1") -> int:
    worker = await store.worker(worker_id)
    assert worker is not None
    return worker.late_results


async def codes(store: AnyStore, **filters: Any) -> list[str]:
    return [event.code for event in await store.events(**filters)]


def held(claim: Claim, progress: float | None = None, note: str | None = None) -> HeldClaim:
    return HeldClaim(claim.task_id, claim.token, progress, note)


async def finished_task(store: AnyStore, queue: str = "q", *, is_failure: bool = False) -> int:
    await add(store, queue)
    claim = await claim_one(store, queues=(queue,))
    await (fail(store, claim, retry=False) if is_failure else complete(store, claim))
    return claim.task_id
