"""Claiming: order, limits, schedules, and who may claim."""

import json
from datetime import timedelta
from typing import Any

import pytest

from support.queue_actions import add, claim_one, claimed, fail, late_results, register, status_of, task_of
from support.stores import AnyStore
from windlass.model.errors import BadInput, UnknownWorker
from windlass.model.task import Finished, TaskStatus
from windlass.policy.backoff import RETRY_FIRST_S


async def test_claim_returns_task_and_marks_it_running(store: AnyStore, clock: Any) -> None:
    await register(store, "w1")
    task_id = await add(store, payload={"a": 1}, priority=2, timeout_s=60, max_attempts=4)
    created_at = clock()
    clock.advance(5)
    claim = await claim_one(store)
    assert (claim.task_id, claim.queue, json.loads(claim.payload)) == (task_id, "q", {"a": 1})
    assert (claim.attempt, claim.max_attempts, claim.timeout_s) == (1, 4, 60)
    assert (claim.priority, claim.created_at) == (2, created_at)
    task = await task_of(store, task_id)
    assert (task.status, task.worker_id, task.started_at, task.attempts) == (TaskStatus.RUNNING, "w1", clock(), 1)


async def test_claims_go_first_in_first_out_within_priority(store: AnyStore) -> None:
    await register(store, "w1")
    low = [await add(store, priority=0), await add(store, priority=0)]
    high = [await add(store, priority=5), await add(store, priority=5)]
    least = await add(store, priority=-1)
    assert [(await claim_one(store)).task_id for _ in range(5)] == [*high, *low, least]


async def test_extreme_priorities_and_attempts_overflow_nothing(store: AnyStore) -> None:
    await register(store, "w1")
    least = await add(store, priority=-(2**31), max_attempts=2**31 - 1)
    middle = await add(store)
    most = await add(store, priority=2**31 - 1, max_attempts=2**31 - 1)
    claims = await store.claim("w1", ("q",), 3)
    assert [claim.task_id for claim in claims] == [most, middle, least]
    first, _, last = claims
    assert await fail(store, first) is TaskStatus.ERROR
    assert await store.release("w1", last.task_id, last.token, "not today", 0.0)
    assert await store.retry_task(most)
    assert [(await claim_one(store)).task_id for _ in range(2)] == [most, least]
    await store.deregister("w1", "done")
    assert await status_of(store, most) is TaskStatus.QUEUED


async def test_batch_of_claims_is_ordered_by_priority(store: AnyStore) -> None:
    await register(store, "w1")
    ids = [await add(store, priority=priority) for priority in (0, 3, 1, 3)]
    claims = await store.claim("w1", ("q",), 3)
    assert [claim.task_id for claim in claims] == [ids[1], ids[3], ids[2]]
    assert len({claim.token for claim in claims}) == 3


async def test_claim_returns_at_most_limit_and_available_tasks(store: AnyStore) -> None:
    await register(store, "w1")
    for _ in range(3):
        await add(store)
    assert await store.claim("w1", ("q",), 0) == []
    assert len(await store.claim("w1", ("q",), 2)) == 2
    assert len(await store.claim("w1", ("q",), 2)) == 1
    assert await store.claim("w1", ("q",), 2) == []


async def test_negative_limit_is_refused(store: AnyStore) -> None:
    await register(store, "w1")
    await add(store)
    with pytest.raises(BadInput):
        await store.claim("w1", ("q",), -1)
    with pytest.raises(BadInput):
        await store.tasks(limit=-1)
    with pytest.raises(BadInput):
        await store.events(limit=-1)


async def test_claim_takes_only_from_given_queues(store: AnyStore) -> None:
    await register(store, "w1")
    other = await add(store, "other")
    assert await store.claim("w1", ("q", "r")) == []
    assert await store.claim("w1", ()) == []
    assert (await claim_one(store, queues=("q", "other"))).task_id == other


async def test_queue_with_best_head_task_is_served_first(store: AnyStore) -> None:
    await register(store, "w1")
    second = await add(store, "b", priority=1)
    first = await add(store, "a", priority=7)
    third = await add(store, "a", priority=1)
    fourth = await add(store, "c")
    assert [(await claim_one(store, queues=("c", "b", "a"))).task_id for _ in range(4)] == [
        first,
        second,
        third,
        fourth,
    ]


async def test_one_claim_takes_from_several_queues(store: AnyStore) -> None:
    await register(store, "w1")
    ids = [await add(store, "a"), await add(store, "b"), await add(store, "b")]
    claims = await store.claim("w1", ("b", "a"), 10)
    assert [claim.task_id for claim in claims] == ids


async def test_queue_named_twice_is_claimed_once(store: AnyStore) -> None:
    await register(store, "w1")
    ids = [await add(store), await add(store)]
    claims = await store.claim("w1", ("q", "q"), 5)
    assert [claim.task_id for claim in claims] == ids


async def test_scheduled_task_is_claimable_when_due(store: AnyStore, clock: Any) -> None:
    await register(store, "w1")
    task_id = await add(store, run_after=clock() + timedelta(seconds=60))
    clock.advance(59.999999)
    assert await store.claim("w1", ("q",)) == []
    clock.advance(0.000001)
    assert (await claim_one(store)).task_id == task_id
    assert (await task_of(store, task_id)).run_after is None


async def test_due_task_is_claimed_in_order_of_its_id(store: AnyStore, clock: Any) -> None:
    await register(store, "w1")
    scheduled = await add(store, run_after=clock() + timedelta(seconds=1))
    later = await add(store)
    clock.advance(1)
    assert [(await claim_one(store)).task_id for _ in range(2)] == [scheduled, later]


async def test_next_run_after_is_earliest_scheduled_time(store: AnyStore, clock: Any) -> None:
    await register(store, "w1")
    assert await store.next_run_after(("q", "r")) is None
    await add(store, "q")
    assert await store.next_run_after(("q", "r")) is None
    late, soon = clock() + timedelta(seconds=90), clock() + timedelta(seconds=30)
    await add(store, "q", run_after=late)
    await add(store, "r", run_after=soon)
    assert await store.next_run_after(("q",)) == late
    assert await store.next_run_after(("q", "r")) == soon
    assert await store.next_run_after(()) is None
    clock.advance(30)
    await store.claim("w1", ("r",))
    assert await store.next_run_after(("q", "r")) == late


async def test_next_run_after_includes_retrying_tasks(store: AnyStore, clock: Any) -> None:
    claim = await claimed(store)
    await fail(store, claim, jitter=0)
    assert await store.next_run_after(("q",)) == clock() + timedelta(seconds=RETRY_FIRST_S)
    await store.cancel_task(claim.task_id, "no more")
    assert await store.next_run_after(("q",)) is None


async def test_unregistered_worker_cannot_claim(store: AnyStore) -> None:
    await add(store)
    with pytest.raises(UnknownWorker):
        await store.claim("unknown", ("q",))
    with pytest.raises(UnknownWorker):
        await store.finish_and_claim("unknown", [], ("q",), 1)


async def test_paused_worker_gets_no_tasks_until_resumed(store: AnyStore) -> None:
    await register(store, "w1")
    await add(store)
    assert await store.set_paused(["w1"], True) == 1
    assert await store.claim("w1", ("q",)) == []
    assert await store.set_paused(["w1"], False) == 1
    assert await store.claim("w1", ("q",)) != []


async def test_terminating_worker_can_finish_but_not_claim(store: AnyStore) -> None:
    claim = await claimed(store)
    await add(store)
    await store.set_terminating(["w1"], "enough")
    assert await store.claim("w1", ("q",)) == []
    turn = await store.finish_and_claim("w1", [Finished(claim.task_id, claim.token, None)], ("q",), 1)
    assert (turn.claims, turn.lost) == ([], [])
    assert await status_of(store, claim) is TaskStatus.COMPLETE


async def test_claim_of_ended_worker_raises_unknown_worker(store: AnyStore) -> None:
    await register(store, "w1")
    task_id = await add(store)
    await store.deregister("w1", "done")
    with pytest.raises(UnknownWorker, match="w1 has terminated"):
        await store.claim("w1", ("q",))
    with pytest.raises(UnknownWorker, match="w1 has terminated"):
        await store.finish_and_claim("w1", [], ("q",), 1)
    assert await status_of(store, task_id) is TaskStatus.QUEUED


async def test_ended_worker_learns_that_results_are_lost(store: AnyStore) -> None:
    claim = await claimed(store)
    await store.deregister("w1", "done")
    turn = await store.finish_and_claim("w1", [Finished(claim.task_id, claim.token, "1")], ("q",), 1)
    assert (turn.claims, turn.lost) == ([], [claim.token])
    assert await late_results(store) == 1
    with pytest.raises(UnknownWorker):
        await store.finish_and_claim("w1", [], ("q",), 1)


async def test_spawning_worker_can_claim(store: AnyStore, spawn_worker: Any) -> None:
    await spawn_worker("h1", "gpus", 0)
    await add(store)
    assert await store.claim("h1", ("q",)) != []


async def test_first_claim_time_of_worker_is_recorded(store: AnyStore, clock: Any) -> None:
    await register(store, "w1")
    await store.claim("w1", ("q",))
    worker = await store.worker("w1")
    assert worker is not None
    assert worker.first_claimed_at is None
    await add(store)
    await add(store)
    first = clock.advance(1)
    await claim_one(store)
    clock.advance(1)
    await claim_one(store)
    worker = await store.worker("w1")
    assert worker is not None
    assert worker.first_claimed_at == first
