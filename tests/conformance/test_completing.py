"""Completing tasks: results, stale claims, repeated calls."""

import json
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
    late_results,
    register,
    status_of,
    task_of,
)
from support.stores import AnyStore
from windlass.model.errors import BadInput, UnknownWorker
from windlass.model.task import Finished, TaskStatus


async def test_finished_task_is_complete_with_result(store: AnyStore, clock: Any) -> None:
    claim = await claimed(store)
    clock.advance(3)
    assert await complete(store, claim, result='{"url": "s3://x"}') == []
    task = await task_of(store, claim)
    assert (task.status, task.finished_at, task.worker_id) == (TaskStatus.COMPLETE, clock(), "w1")
    assert json.loads(task.result or "") == {"url": "s3://x"}


async def test_finish_and_claim_returns_next_task(store: AnyStore) -> None:
    claim = await claimed(store)
    ids = [await add(store) for _ in range(3)]
    turn = await store.finish_and_claim("w1", [Finished(claim.task_id, claim.token, None)], ("q",), 2)
    assert [c.task_id for c in turn.claims] == ids[:2]
    assert turn.lost == []


async def test_stale_claim_cannot_complete_task(store: AnyStore, clock: Any) -> None:
    claim = await claimed(store)
    await store.release("w1", claim.task_id, claim.token, "released")
    before = await task_of(store, claim)
    clock.advance(1)
    assert await complete(store, claim, result="1") == [claim.token]
    assert await task_of(store, claim) == before
    assert await late_results(store) == 1
    assert await codes(store, task_id=claim.task_id) == ["TASK_RELEASED", "LATE_RESULT"]


async def test_task_released_with_delay_is_not_claimable_before(store: AnyStore, clock: Any) -> None:
    claim = await claimed(store)
    assert await store.release("w1", claim.task_id, claim.token, "no place for it yet", 30.0)
    task = await task_of(store, claim)
    assert (task.status, task.attempts) == (TaskStatus.QUEUED, 0)
    assert await store.next_run_after(("q",)) == task.run_after is not None
    assert await store.claim("w1", ("q",), 1) == []
    clock.advance(31)
    assert [again.task_id for again in await store.claim("w1", ("q",), 1)] == [claim.task_id]


async def test_late_result_cannot_complete_later_attempt(store: AnyStore) -> None:
    old = await claimed(store)
    await store.release("w1", old.task_id, old.token, "released")
    await register(store, "w2")
    new = await claim_one(store, "w2")
    assert new.task_id == old.task_id
    assert new.token != old.token
    assert await complete(store, old) == [old.token]
    assert await fail(store, old) is None
    assert not await store.release("w1", old.task_id, old.token, "again")
    task = await task_of(store, new)
    assert (task.status, task.worker_id) == (TaskStatus.RUNNING, "w2")
    assert await complete(store, new, "w2") == []
    assert await late_results(store, "w1") == 2
    assert await late_results(store, "w2") == 0


async def test_repeated_completion_is_accepted_unchanged(store: AnyStore, clock: Any) -> None:
    claim = await claimed(store)
    await complete(store, claim, result="1")
    before = await task_of(store, claim)
    clock.advance(1)
    assert await complete(store, claim, result="2") == []
    assert await task_of(store, claim) == before
    assert await late_results(store) == 0


async def test_batch_reports_exactly_the_lost_claims(store: AnyStore) -> None:
    await register(store, "w1")
    for _ in range(4):
        await add(store)
    done, repeated, lost, cancelled = await store.claim("w1", ("q",), 4)
    await complete(store, repeated)
    await store.release("w1", lost.task_id, lost.token, "released")
    await store.cancel_task(cancelled.task_id, "no longer wanted")
    stranger = Finished(999_999_999, uuid4(), None)
    batch = [Finished(c.task_id, c.token, None) for c in (done, repeated, lost, cancelled)]
    turn = await store.finish_and_claim("w1", [*batch, stranger], ("q",), 5)
    assert set(turn.lost) == {lost.token, cancelled.token, stranger.token}
    assert [claim.task_id for claim in turn.claims] == [lost.task_id]
    assert await status_of(store, done) is TaskStatus.COMPLETE
    assert await late_results(store) == 3


async def test_batch_distinguishes_two_attempts_of_one_task(store: AnyStore) -> None:
    old = await claimed(store)
    await store.release("w1", old.task_id, old.token, "released")
    new = await claim_one(store)
    batch = [Finished(c.task_id, c.token, json.dumps(c.attempt)) for c in (old, new)]
    turn = await store.finish_and_claim("w1", batch, (), 0)
    assert turn.lost == [old.token]
    assert await late_results(store) == 1
    assert await status_of(store, new) is TaskStatus.COMPLETE


async def test_result_that_is_not_json_completes_nothing(store: AnyStore) -> None:
    claim = await claimed(store)
    with pytest.raises(BadInput):
        await complete(store, claim, result="{")
    assert await status_of(store, claim) is TaskStatus.RUNNING


async def test_unregistered_worker_with_a_limit_completes_nothing(store: AnyStore) -> None:
    claim = await claimed(store)
    with pytest.raises(UnknownWorker):
        await store.finish_and_claim("unknown", [Finished(claim.task_id, claim.token, None)], ("q",), 1)
    assert await status_of(store, claim) is TaskStatus.RUNNING


async def test_late_result_of_unknown_worker_leaves_no_event(store: AnyStore) -> None:
    assert await store.fail("unknown", 999_999_999, uuid4(), "it broke") is None
    assert await store.events(worker_id="unknown") == []


async def test_only_one_of_many_results_is_accepted(store: AnyStore) -> None:
    claim = await claimed(store)
    assert await fail(store, claim, retry=False) is TaskStatus.FAILED
    assert await complete(store, claim) == [claim.token]
    assert await status_of(store, claim) is TaskStatus.FAILED
