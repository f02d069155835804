"""Calls that name an invalid claim: a wrong or stale token, another worker's claim, a task that has ended."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest

from support.queue_actions import (
    add,
    claim_one,
    claimed,
    codes,
    complete,
    fail,
    held,
    late_results,
    register,
    status_of,
    task_of,
)
from support.stores import AnyStore
from windlass.model.errors import BadInput
from windlass.model.node import NodeVerdict, Placement
from windlass.model.task import MAX_RESULTS_PER_CALL, Claim, Finished, TaskStatus
from windlass.model.worker import MAX_CLAIMS_PER_HEARTBEAT, WorkerKind

# Over HTTP the same store functions decide.
pytestmark = pytest.mark.parametrize("store", ["memory", "postgres"], indirect=True)

Spoil = Callable[[AnyStore, Claim], Awaitable[tuple[str, Claim]]]
Use = Callable[[AnyStore, str, Claim], Awaitable[bool]]


async def wrong_token(store: AnyStore, claim: Claim) -> tuple[str, Claim]:
    return "w1", replace(claim, token=uuid4())


async def token_of_another_task(store: AnyStore, claim: Claim) -> tuple[str, Claim]:
    await add(store)
    return "w1", replace(await claim_one(store), task_id=claim.task_id)


async def stale_token(store: AnyStore, claim: Claim) -> tuple[str, Claim]:
    await store.release("w1", claim.task_id, claim.token, "released")
    assert (await claim_one(store)).task_id == claim.task_id
    return "w1", claim


async def token_of_an_attempt_that_another_worker_repeats(store: AnyStore, claim: Claim) -> tuple[str, Claim]:
    await store.release("w1", claim.task_id, claim.token, "released")
    assert (await claim_one(store, "w2")).task_id == claim.task_id
    return "w1", claim


async def claim_of_another_worker(store: AnyStore, claim: Claim) -> tuple[str, Claim]:
    return "w2", claim


async def cancelled_task(store: AnyStore, claim: Claim) -> tuple[str, Claim]:
    assert await store.cancel_task(claim.task_id, "no longer wanted")
    return "w1", claim


async def claim_of_another_workers_complete_task(store: AnyStore, claim: Claim) -> tuple[str, Claim]:
    assert await complete(store, claim) == []
    return "w2", claim


async def claim_of_another_workers_failed_task(store: AnyStore, claim: Claim) -> tuple[str, Claim]:
    assert await fail(store, claim, retry=False) is TaskStatus.FAILED
    return "w2", claim


async def finishes(store: AnyStore, worker_id: str, claim: Claim) -> bool:
    return not await complete(store, claim, worker_id, "1")


async def finishes_in_a_batch(store: AnyStore, worker_id: str, claim: Claim) -> bool:
    done = [Finished(claim.task_id, claim.token, "1"), Finished(999_999_999, uuid4(), None)]
    return claim.token not in (await store.finish_and_claim(worker_id, done, (), 0)).lost


async def fails(store: AnyStore, worker_id: str, claim: Claim) -> bool:
    return await fail(store, claim, worker_id) is not None


async def releases(store: AnyStore, worker_id: str, claim: Claim) -> bool:
    return await store.release(worker_id, claim.task_id, claim.token, "not mine")


async def reports_progress(store: AnyStore, worker_id: str, claim: Claim) -> bool:
    return claim.token not in (await store.heartbeat(worker_id, [held(claim, 0.7, "mine")])).lost


SPOILED = [
    wrong_token,
    token_of_another_task,
    stale_token,
    token_of_an_attempt_that_another_worker_repeats,
    claim_of_another_worker,
    cancelled_task,
    claim_of_another_workers_complete_task,
    claim_of_another_workers_failed_task,
]


@pytest.mark.parametrize("use", [finishes, finishes_in_a_batch, fails, releases, reports_progress])
@pytest.mark.parametrize("spoil", SPOILED)
async def test_invalid_claim_changes_no_task(store: AnyStore, clock: Any, spoil: Spoil, use: Use) -> None:
    claim = await claimed(store)
    await register(store, "w2")
    worker_id, spoiled = await spoil(store, claim)
    before = await task_of(store, claim)
    clock.advance(1)
    assert not await use(store, worker_id, spoiled)
    assert await task_of(store, claim) == before


@pytest.mark.parametrize("use", [fails, releases, reports_progress])
async def test_complete_task_cannot_be_failed_released_or_progressed(store: AnyStore, clock: Any, use: Use) -> None:
    claim = await claimed(store)
    await complete(store, claim, result="1")
    before = await task_of(store, claim)
    clock.advance(1)
    assert not await use(store, "w1", claim)
    assert await task_of(store, claim) == before


@pytest.mark.parametrize("use", [finishes, finishes_in_a_batch, fails, releases, reports_progress])
async def test_dispatcher_acts_for_the_nodes_of_its_fleet_only(store: AnyStore, use: Use) -> None:
    await register(store, "node", kind=WorkerKind.NODE)
    await register(store, "dispatcher", kind=WorkerKind.DISPATCHER)
    await register(store, "stranger", kind=WorkerKind.DISPATCHER, fleet="other")
    await register(store, "peer")
    await add(store)
    claim = await claim_one(store, "dispatcher")
    assert await store.place([Placement(claim.task_id, claim.token, "node")]) == {claim.token: NodeVerdict.PLACED}
    for other in ("stranger", "peer"):
        assert not await use(store, other, claim)
    assert await status_of(store, claim) is TaskStatus.RUNNING
    assert await use(store, "dispatcher", claim)


async def test_rejected_batch_is_one_count_and_one_event(store: AnyStore) -> None:
    await register(store, "w1")
    made_up = [Finished(1_000_000 + number, uuid4(), None) for number in range(MAX_RESULTS_PER_CALL)]
    result = await store.finish_and_claim("w1", made_up, ("q",), 1)
    assert set(result.lost) == {done.token for done in made_up}
    assert await late_results(store) == MAX_RESULTS_PER_CALL
    events = [event for event in await store.events(worker_id="w1") if event.code == "LATE_RESULT"]
    assert [(event.reason, event.task_id) for event in events] == [
        ("1000 results rejected: their claims are no longer valid", 1_000_000)
    ]
    assert events[0].detail == {"count": 1000, "task_ids": [1_000_000 + number for number in range(20)]}


async def test_late_results_are_counted_with_one_event_in_ten_seconds(store: AnyStore, clock: Any) -> None:
    await register(store, "w1", "w2")

    async def reject(worker_id: str) -> None:
        made_up = [Finished(1_000_000 + number, uuid4(), None) for number in range(2)]
        await store.finish_and_claim(worker_id, made_up, (), 0)
        assert await store.fail(worker_id, 2_000_000, uuid4(), "made up") is None

    async def events(worker_id: str) -> int:
        return (await codes(store, worker_id=worker_id)).count("LATE_RESULT")

    for _ in range(50):
        await reject("w1")
    assert (await late_results(store, "w1"), await events("w1")) == (150, 1)
    clock.advance(10)
    await reject("w1")
    await reject("w2")
    assert (await events("w1"), await events("w2")) == (1, 1)
    clock.advance(0.5)
    await reject("w1")
    assert (await late_results(store, "w1"), await events("w1")) == (156, 2)
    # A clock that is set back does not silence the worker until it has caught up.
    clock.advance(-3600)
    await reject("w1")
    assert await events("w1") == 3


async def test_too_many_results_are_refused(store: AnyStore) -> None:
    claim = await claimed(store)
    done = [Finished(claim.task_id, claim.token, None)] * (MAX_RESULTS_PER_CALL + 1)
    with pytest.raises(BadInput, match="at most 1000 results are accepted in one call, not 1001"):
        await store.finish_and_claim("w1", done, (), 0)
    assert await status_of(store, claim) is TaskStatus.RUNNING


async def test_too_many_claims_in_a_heartbeat_are_refused(store: AnyStore) -> None:
    claim = await claimed(store)
    with pytest.raises(BadInput, match="a heartbeat names at most 10000 claims, not 10001"):
        await store.heartbeat("w1", [held(claim)] * (MAX_CLAIMS_PER_HEARTBEAT + 1))
    assert "LATE_RESULT" not in await codes(store, worker_id="w1")
