"""What a store promises (ports/transport.py, ports/store.py), checked over every implementation in virtual time."""

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from support.stores import AnyStore
from windlass.model.errors import BadInput, UnknownWorker
from windlass.model.task import Claim, Finished, NewTask, Task, TaskStatus, new_task
from windlass.model.worker import HeldClaim, RecoveredTasks, Registration, WorkerStatus
from windlass.policy.backoff import RETRY_CEILING_S, RETRY_FIRST_S, retry_delay_s

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


# ------------------------------------------------------------------------------------------------------ enqueueing


async def test_an_enqueued_task_waits_with_everything_it_was_given(store: AnyStore, clock: Any) -> None:
    task_id = await add(
        store, payload={"b": [1, "ü"], "a": None}, priority=-7, max_attempts=5, timeout_s=1.5, unique_key="k"
    )
    task = await task_of(store, task_id)
    assert json.loads(task.payload) == {"b": [1, "ü"], "a": None}
    assert (task.queue, task.status, task.priority) == ("q", TaskStatus.QUEUED, -7)
    assert (task.attempts, task.max_attempts, task.timeout_s, task.unique_key) == (0, 5, 1.5, "k")
    assert (task.created_at, task.started_at, task.finished_at, task.worker_id) == (clock(), None, None, None)
    assert (task.progress, task.error, task.error_code, task.result, task.run_after) == (None,) * 5


async def test_an_unknown_task_is_none(store: AnyStore) -> None:
    assert await store.task(999_999_999) is None


async def test_ids_grow(store: AnyStore) -> None:
    ids = [await add(store) for _ in range(3)]
    assert ids == sorted(set(ids))


async def test_a_key_that_is_already_there_gives_the_task_that_has_it_unchanged(store: AnyStore) -> None:
    first = await add(store, payload=1, unique_key="k")
    assert await add(store, payload=2, priority=9, unique_key="k") == first
    task = await task_of(store, first)
    assert (json.loads(task.payload), task.priority) == (1, 0)
    assert len(await store.tasks()) == 1


async def test_a_task_that_was_there_already_can_be_told_from_a_new_one(store: AnyStore) -> None:
    first, is_new = await store.enqueue_or_find(new_task("q", unique_key="k"))
    assert is_new
    assert await store.enqueue_or_find(new_task("q", 2, unique_key="k")) == (first, False)
    assert (await store.enqueue_or_find(new_task("q")))[1]
    claim = await claimed(store)
    assert claim.task_id == first
    assert await store.enqueue_or_find(new_task("q", unique_key="k")) == (first, False)


async def test_of_a_long_error_the_end_is_told_where_its_cause_stands(store: AnyStore) -> None:
    claim = await claimed(store)
    error = "Traceback (most recent call last):\n" + "  File x\n" * 2_000 + "OSError: no disk"
    await store.fail("w1", claim.task_id, claim.token, error)
    assert ((await task_of(store, claim.task_id)).error or "").endswith("OSError: no disk")
    (event,) = [event for event in await store.events(task_id=claim.task_id) if event.code == "TASK_ERROR"]
    assert event.reason.endswith("OSError: no disk")


async def test_a_key_is_unique_within_its_queue_only(store: AnyStore) -> None:
    assert await add(store, "q", unique_key="k") != await add(store, "r", unique_key="k")


async def test_a_key_stays_taken_after_its_task_completed(store: AnyStore) -> None:
    claim = await claimed(store, unique_key="k")
    await complete(store, claim)
    assert await add(store, unique_key="k") == claim.task_id
    assert await status_of(store, claim) is TaskStatus.COMPLETE


async def test_a_key_is_free_again_once_its_task_was_purged(store: AnyStore) -> None:
    claim = await claimed(store, unique_key="k")
    await complete(store, claim)
    await store.purge(None, [TaskStatus.COMPLETE], 0)
    assert await add(store, unique_key="k") != claim.task_id


async def test_many_are_enqueued_in_order(store: AnyStore) -> None:
    await register(store, "w1")
    assert await store.enqueue_many(new_task("q", number) for number in range(5)) == 5
    claims = await store.claim("w1", ("q",), 5)
    assert [json.loads(claim.payload) for claim in claims] == [0, 1, 2, 3, 4]


async def test_many_may_come_from_an_async_stream(store: AnyStore) -> None:
    async def stream() -> AsyncIterator[NewTask]:
        for number in range(3):
            yield new_task("q", number)

    assert await store.enqueue_many(stream()) == 3


async def test_many_may_be_none(store: AnyStore) -> None:
    assert await store.enqueue_many([]) == 0


async def test_many_pass_over_known_keys_and_count_the_new(store: AnyStore) -> None:
    first = await add(store, payload="old", unique_key="a")
    tasks = [new_task("q", "new", unique_key=key) for key in ("a", "b", "b", None, None)]
    assert await store.enqueue_many(tasks) == 3
    assert json.loads((await task_of(store, first)).payload) == "old"
    assert [task.unique_key for task in await store.tasks()] == [None, None, "b", "a"]
    # And once more on the same connection: the way there leaves nothing behind.
    assert await store.enqueue_many(tasks) == 2


BAD_TASKS = {
    "a queue's name that is none": NewTask("not a name"),
    "a payload that is not JSON": NewTask("q", payload="{'a': 1}"),
    "a payload that JSON cannot hold": NewTask("q", payload="NaN"),
    "a payload nested beyond all": NewTask("q", payload="[" * 100_000 + "]" * 100_000),
    "no attempts": NewTask("q", max_attempts=0),
    "no time": NewTask("q", timeout_s=0),
    "a time that is no number": NewTask("q", timeout_s=math.nan),
    "time without end": NewTask("q", timeout_s=math.inf),
    "a day that is in no calendar": NewTask("q", run_after=datetime(9999, 1, 1, tzinfo=UTC)),
    "a day before all calendars": NewTask("q", run_after=datetime(1, 12, 31, tzinfo=UTC)),
    "a key that is too long": NewTask("q", unique_key="k" * 201),
    "a key that is empty": NewTask("q", unique_key=""),
    "a priority out of range": NewTask("q", priority=2**31),
}


@pytest.mark.parametrize("bad", BAD_TASKS.values(), ids=BAD_TASKS.keys())
async def test_a_bad_task_is_refused_and_nothing_is_added(store: AnyStore, bad: NewTask) -> None:
    with pytest.raises(BadInput):
        await store.enqueue(bad)
    with pytest.raises(BadInput):
        await store.enqueue_many([NewTask("q"), bad])
    with pytest.raises(BadInput):
        await store.enqueue_many([NewTask("q", unique_key="u"), bad])
    assert await store.tasks() == []
    assert await add(store) > 0


async def test_a_number_of_more_digits_than_python_reads_is_a_payload(store: AnyStore) -> None:
    task_id = await store.enqueue(NewTask("q", payload="9" * 5_000))
    assert (await task_of(store, task_id)).payload == "9" * 5_000


# -------------------------------------------------------------------------------------------------------- claiming


async def test_a_claim_carries_the_task_and_marks_it_running(store: AnyStore, clock: Any) -> None:
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


async def test_several_claims_at_once_come_best_first(store: AnyStore) -> None:
    await register(store, "w1")
    ids = [await add(store, priority=priority) for priority in (0, 3, 1, 3)]
    claims = await store.claim("w1", ("q",), 3)
    assert [claim.task_id for claim in claims] == [ids[1], ids[3], ids[2]]
    assert len({claim.token for claim in claims}) == 3


async def test_no_more_is_claimed_than_asked_for_or_there(store: AnyStore) -> None:
    await register(store, "w1")
    for _ in range(3):
        await add(store)
    assert await store.claim("w1", ("q",), 0) == []
    assert len(await store.claim("w1", ("q",), 2)) == 2
    assert len(await store.claim("w1", ("q",), 2)) == 1
    assert await store.claim("w1", ("q",), 2) == []


async def test_a_negative_limit_is_refused(store: AnyStore) -> None:
    await register(store, "w1")
    await add(store)
    with pytest.raises(BadInput):
        await store.claim("w1", ("q",), -1)
    with pytest.raises(BadInput):
        await store.tasks(limit=-1)
    with pytest.raises(BadInput):
        await store.events(limit=-1)


async def test_only_the_queues_asked_for_are_claimed(store: AnyStore) -> None:
    await register(store, "w1")
    other = await add(store, "other")
    assert await store.claim("w1", ("q", "r")) == []
    assert await store.claim("w1", ()) == []
    assert (await claim_one(store, queues=("q", "other"))).task_id == other


async def test_among_several_queues_the_one_whose_head_comes_first_is_served(store: AnyStore) -> None:
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


async def test_one_claim_may_take_from_several_queues(store: AnyStore) -> None:
    await register(store, "w1")
    ids = [await add(store, "a"), await add(store, "b"), await add(store, "b")]
    claims = await store.claim("w1", ("b", "a"), 10)
    assert [claim.task_id for claim in claims] == ids


async def test_a_queue_named_twice_is_served_once(store: AnyStore) -> None:
    await register(store, "w1")
    ids = [await add(store), await add(store)]
    claims = await store.claim("w1", ("q", "q"), 5)
    assert [claim.task_id for claim in claims] == ids


async def test_a_scheduled_task_is_claimed_when_its_time_has_come(store: AnyStore, clock: Any) -> None:
    await register(store, "w1")
    task_id = await add(store, run_after=clock() + timedelta(seconds=60))
    clock.advance(59.999999)
    assert await store.claim("w1", ("q",)) == []
    clock.advance(0.000001)
    assert (await claim_one(store)).task_id == task_id
    assert (await task_of(store, task_id)).run_after is None


async def test_a_task_that_became_due_takes_its_old_place(store: AnyStore, clock: Any) -> None:
    await register(store, "w1")
    scheduled = await add(store, run_after=clock() + timedelta(seconds=1))
    later = await add(store)
    clock.advance(1)
    assert [(await claim_one(store)).task_id for _ in range(2)] == [scheduled, later]


async def test_the_next_waiting_task_of_the_queues_is_known(store: AnyStore, clock: Any) -> None:
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


async def test_the_next_waiting_task_may_be_one_that_waits_for_its_retry(store: AnyStore, clock: Any) -> None:
    claim = await claimed(store)
    await fail(store, claim, jitter=0)
    assert await store.next_run_after(("q",)) == clock() + timedelta(seconds=RETRY_FIRST_S)
    await store.cancel_task(claim.task_id, "no more")
    assert await store.next_run_after(("q",)) is None


async def test_an_unregistered_worker_may_not_claim(store: AnyStore) -> None:
    await add(store)
    with pytest.raises(UnknownWorker):
        await store.claim("nobody", ("q",))
    with pytest.raises(UnknownWorker):
        await store.finish_and_claim("nobody", [], ("q",), 1)


async def test_a_paused_worker_gets_nothing_until_it_is_resumed(store: AnyStore) -> None:
    await register(store, "w1")
    await add(store)
    assert await store.set_paused(["w1"], True) == 1
    assert await store.claim("w1", ("q",)) == []
    assert await store.set_paused(["w1"], False) == 1
    assert await store.claim("w1", ("q",)) != []


async def test_a_terminating_worker_gets_nothing_but_may_finish(store: AnyStore) -> None:
    claim = await claimed(store)
    await add(store)
    await store.set_terminating(["w1"], "enough")
    assert await store.claim("w1", ("q",)) == []
    turn = await store.finish_and_claim("w1", [Finished(claim.task_id, claim.token, None)], ("q",), 1)
    assert (turn.claims, turn.lost) == ([], [])
    assert await status_of(store, claim) is TaskStatus.COMPLETE


async def test_a_worker_that_has_ended_is_told_so_when_it_claims(store: AnyStore) -> None:
    await register(store, "w1")
    task_id = await add(store)
    await store.deregister("w1", "done")
    with pytest.raises(UnknownWorker, match="w1 has ended"):
        await store.claim("w1", ("q",))
    with pytest.raises(UnknownWorker, match="w1 has ended"):
        await store.finish_and_claim("w1", [], ("q",), 1)
    assert await status_of(store, task_id) is TaskStatus.QUEUED


async def test_a_worker_that_has_ended_first_hears_that_its_results_are_lost(store: AnyStore) -> None:
    claim = await claimed(store)
    await store.deregister("w1", "done")
    turn = await store.finish_and_claim("w1", [Finished(claim.task_id, claim.token, "1")], ("q",), 1)
    assert (turn.claims, turn.lost) == ([], [claim.token])
    assert await late_results(store) == 1
    with pytest.raises(UnknownWorker):
        await store.finish_and_claim("w1", [], ("q",), 1)


async def test_a_spawning_worker_may_claim(store: AnyStore, hire: Any) -> None:
    await hire("h1", "gpus", 0)
    await add(store)
    assert await store.claim("h1", ("q",)) != []


async def test_the_first_claim_of_a_worker_is_remembered(store: AnyStore, clock: Any) -> None:
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


# ------------------------------------------------------------------------------------------------------- finishing


async def test_a_finished_task_is_complete_with_its_result(store: AnyStore, clock: Any) -> None:
    claim = await claimed(store)
    clock.advance(3)
    assert await complete(store, claim, result='{"url": "s3://x"}') == []
    task = await task_of(store, claim)
    assert (task.status, task.finished_at, task.worker_id) == (TaskStatus.COMPLETE, clock(), "w1")
    assert json.loads(task.result or "") == {"url": "s3://x"}


async def test_finishing_hands_out_the_next_in_the_same_turn(store: AnyStore) -> None:
    claim = await claimed(store)
    ids = [await add(store) for _ in range(3)]
    turn = await store.finish_and_claim("w1", [Finished(claim.task_id, claim.token, None)], ("q",), 2)
    assert [c.task_id for c in turn.claims] == ids[:2]
    assert turn.lost == []


async def test_a_worker_that_lost_its_claim_cannot_finish_the_task(store: AnyStore, clock: Any) -> None:
    claim = await claimed(store)
    await store.release("w1", claim.task_id, claim.token, "given back")
    before = await task_of(store, claim)
    clock.advance(1)
    assert await complete(store, claim, result="1") == [claim.token]
    assert await task_of(store, claim) == before
    assert await late_results(store) == 1
    assert await codes(store, task_id=claim.task_id) == ["TASK_RELEASED", "LATE_RESULT"]


async def test_a_task_given_back_with_a_delay_is_nobodys_until_then(store: AnyStore, clock: Any) -> None:
    claim = await claimed(store)
    assert await store.release("w1", claim.task_id, claim.token, "no place for it yet", 30.0)
    task = await task_of(store, claim)
    assert (task.status, task.attempts) == (TaskStatus.QUEUED, 0)
    assert await store.next_run_after(("q",)) == task.run_after is not None
    assert await store.claim("w1", ("q",), 1) == []
    clock.advance(31)
    assert [again.task_id for again in await store.claim("w1", ("q",), 1)] == [claim.task_id]


async def test_a_late_result_cannot_finish_the_attempt_of_another(store: AnyStore) -> None:
    old = await claimed(store)
    await store.release("w1", old.task_id, old.token, "given back")
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


async def test_repeating_an_accepted_finish_is_accepted_and_changes_nothing(store: AnyStore, clock: Any) -> None:
    claim = await claimed(store)
    await complete(store, claim, result="1")
    before = await task_of(store, claim)
    clock.advance(1)
    assert await complete(store, claim, result="2") == []
    assert await task_of(store, claim) == before
    assert await late_results(store) == 0


async def test_a_batch_reports_exactly_the_claims_that_were_lost(store: AnyStore) -> None:
    await register(store, "w1")
    for _ in range(4):
        await add(store)
    done, repeated, lost, cancelled = await store.claim("w1", ("q",), 4)
    await complete(store, repeated)
    await store.release("w1", lost.task_id, lost.token, "given back")
    await store.cancel_task(cancelled.task_id, "no longer wanted")
    stranger = Finished(999_999_999, uuid4(), None)
    batch = [Finished(c.task_id, c.token, None) for c in (done, repeated, lost, cancelled)]
    turn = await store.finish_and_claim("w1", [*batch, stranger], ("q",), 5)
    assert set(turn.lost) == {lost.token, cancelled.token, stranger.token}
    assert [claim.task_id for claim in turn.claims] == [lost.task_id]
    assert await status_of(store, done) is TaskStatus.COMPLETE
    assert await late_results(store) == 3


async def test_two_attempts_of_one_task_in_a_batch_are_told_apart(store: AnyStore) -> None:
    old = await claimed(store)
    await store.release("w1", old.task_id, old.token, "given back")
    new = await claim_one(store)
    batch = [Finished(c.task_id, c.token, json.dumps(c.attempt)) for c in (old, new)]
    turn = await store.finish_and_claim("w1", batch, (), 0)
    assert turn.lost == [old.token]
    assert await late_results(store) == 1
    assert await status_of(store, new) is TaskStatus.COMPLETE


async def test_a_result_that_is_not_json_finishes_nothing(store: AnyStore) -> None:
    claim = await claimed(store)
    with pytest.raises(BadInput):
        await complete(store, claim, result="{")
    assert await status_of(store, claim) is TaskStatus.RUNNING


async def test_an_unregistered_worker_that_wants_more_finishes_nothing(store: AnyStore) -> None:
    claim = await claimed(store)
    with pytest.raises(UnknownWorker):
        await store.finish_and_claim("nobody", [Finished(claim.task_id, claim.token, None)], ("q",), 1)
    assert await status_of(store, claim) is TaskStatus.RUNNING


async def test_the_result_of_a_worker_nobody_knows_is_noted(store: AnyStore) -> None:
    assert await store.fail("nobody", 999_999_999, uuid4(), "it broke") is None
    (event,) = await store.events(worker_id="nobody")
    assert (event.code, event.task_id, event.fleet) == ("LATE_RESULT", 999_999_999, None)


async def test_only_one_of_many_results_is_accepted(store: AnyStore) -> None:
    claim = await claimed(store)
    assert await fail(store, claim, retry=False) is TaskStatus.FAILED
    assert await complete(store, claim) == [claim.token]
    assert await status_of(store, claim) is TaskStatus.FAILED


# --------------------------------------------------------------------------------------------------------- failing


async def test_a_failed_attempt_waits_for_its_retry(store: AnyStore, clock: Any) -> None:
    claim = await claimed(store)
    failed_at = clock.advance(2)
    assert await fail(store, claim, code="OOM", jitter=0.5) is TaskStatus.ERROR
    task = await task_of(store, claim)
    assert (task.status, task.error_code, task.error) == (TaskStatus.ERROR, "OOM", "it broke")
    assert (task.attempts, task.finished_at) == (1, failed_at)
    assert task.run_after == failed_at + timedelta(seconds=retry_delay_s(1, 0.5))
    (event,) = await store.events(task_id=task.id)
    assert (event.code, event.worker_id) == ("TASK_ERROR", "w1")
    assert event.reason == "attempt 1 of 3: it broke"
    assert event.detail == {"attempt": 1, "error_code": "OOM", "error": "it broke"}
    assert await store.claim("w1", ("q",)) == []
    clock.advance(retry_delay_s(1, 0.5))
    again = await claim_one(store)
    assert (again.task_id, again.attempt) == (claim.task_id, 2)


async def test_attempts_used_up_end_as_a_dead_letter(store: AnyStore, clock: Any) -> None:
    await register(store, "w1")
    task_id = await add(store, max_attempts=2)
    assert await fail(store, await claim_one(store), jitter=1) is TaskStatus.ERROR
    clock.advance(RETRY_CEILING_S)
    assert await fail(store, await claim_one(store)) is TaskStatus.FAILED
    task = await task_of(store, task_id)
    assert (task.status, task.attempts, task.run_after, task.finished_at) == (TaskStatus.FAILED, 2, None, clock())
    clock.advance(RETRY_CEILING_S)
    assert await store.claim("w1", ("q",)) == []
    assert await codes(store, task_id=task_id) == ["TASK_ERROR", "TASK_FAILED"]


async def test_a_failure_that_is_not_to_be_retried_is_final(store: AnyStore) -> None:
    claim = await claimed(store)
    assert await fail(store, claim, retry=False) is TaskStatus.FAILED
    assert await status_of(store, claim) is TaskStatus.FAILED


@pytest.mark.parametrize("jitter", [0.0, 0.25, 1 / 3, 1.0])
async def test_back_off_doubles_up_to_its_ceiling(store: AnyStore, clock: Any, jitter: float) -> None:
    await register(store, "w1")
    await add(store, max_attempts=12)
    for attempt in range(1, 11):
        claim = await claim_one(store)
        await fail(store, claim, jitter=jitter)
        run_after = (await task_of(store, claim)).run_after
        assert run_after is not None
        assert run_after == clock() + timedelta(seconds=retry_delay_s(attempt, jitter))
        clock.now = run_after


async def test_back_off_without_given_jitter_stays_within_its_bounds(store: AnyStore, clock: Any) -> None:
    await register(store, "w1")
    delays = set()
    for _ in range(5):
        await add(store)
        claim = await claim_one(store)
        await fail(store, claim)
        run_after = (await task_of(store, claim)).run_after
        assert run_after is not None
        delays.add((run_after - clock()).total_seconds())
    assert all(RETRY_FIRST_S / 2 <= delay_s <= RETRY_FIRST_S for delay_s in delays)
    assert len(delays) > 1


async def test_repeating_an_accepted_failure_is_accepted_and_changes_nothing(store: AnyStore, clock: Any) -> None:
    claim = await claimed(store)
    await fail(store, claim, jitter=0)
    before = await task_of(store, claim)
    clock.advance(1)
    assert await fail(store, claim, jitter=1) is TaskStatus.ERROR
    assert await task_of(store, claim) == before
    assert await late_results(store) == 0
    assert await codes(store, task_id=claim.task_id) == ["TASK_ERROR"]


async def test_a_success_clears_the_error_of_an_earlier_attempt(store: AnyStore, clock: Any) -> None:
    claim = await claimed(store)
    await fail(store, claim, jitter=0)
    clock.advance(RETRY_FIRST_S)
    await complete(store, await claim_one(store))
    task = await task_of(store, claim)
    assert (task.status, task.error, task.error_code, task.attempts) == (TaskStatus.COMPLETE, None, None, 2)


async def test_an_error_is_kept_whatever_characters_it_has_and_however_long_it_is(store: AnyStore) -> None:
    claim = await claimed(store)
    error = "TypeError: " + "x" * 9_000 + "NUL \x00, half a pair \udc80, the cause"
    await store.fail("w1", claim.task_id, claim.token, error)
    kept = (await task_of(store, claim)).error or ""
    assert re.fullmatch(r"TypeError: x{1989} \.\.\. x+NUL.*", kept)
    assert kept.endswith("NUL \\0, half a pair \\udc80, the cause")
    assert len(kept) == 8_000


# ------------------------------------------------------------------------------------- releasing, retrying, cancelling


async def test_a_released_task_is_as_if_never_taken(store: AnyStore) -> None:
    await register(store, "w1")
    first, second = await add(store), await add(store)
    before = await task_of(store, first)
    claim = await claim_one(store)
    await store.heartbeat("w1", [held(claim, 0.5, "half")])
    assert await store.release("w1", claim.task_id, claim.token, "going home")
    assert await task_of(store, first) == before
    assert [(await claim_one(store)).task_id for _ in range(2)] == [first, second]
    (event,) = await store.events(task_id=first)
    assert (event.code, event.reason, event.worker_id) == ("TASK_RELEASED", "going home", "w1")


async def test_a_task_is_released_once(store: AnyStore) -> None:
    claim = await claimed(store)
    assert await store.release("w1", claim.task_id, claim.token, "first")
    assert not await store.release("w1", claim.task_id, claim.token, "second")
    assert not await store.release("w1", 999_999_999, claim.token, "unknown")
    assert (await task_of(store, claim)).attempts == 0


async def test_a_released_attempt_does_not_count(store: AnyStore) -> None:
    await register(store, "w1")
    await add(store, max_attempts=1)
    for _ in range(3):
        claim = await claim_one(store)
        assert claim.attempt == 1
        await store.release("w1", claim.task_id, claim.token, "not now")


async def test_a_retried_task_has_all_its_attempts_again(store: AnyStore) -> None:
    claim = await claimed(store, max_attempts=1)
    await fail(store, claim)
    later = await add(store)
    assert await store.retry_task(claim.task_id)
    task = await task_of(store, claim)
    assert (task.status, task.attempts, task.worker_id, task.finished_at) == (TaskStatus.QUEUED, 0, None, None)
    again = await claim_one(store)
    assert (again.task_id, again.attempt) == (claim.task_id, 1)
    assert (await claim_one(store)).task_id == later
    assert await codes(store, task_id=claim.task_id) == ["TASK_FAILED", "TASK_RETRIED"]


async def test_a_waiting_task_can_be_retried_at_once(store: AnyStore) -> None:
    claim = await claimed(store)
    await fail(store, claim)
    assert await store.retry_task(claim.task_id)
    assert (await claim_one(store)).task_id == claim.task_id


async def test_only_failed_and_waiting_tasks_can_be_retried(store: AnyStore) -> None:
    await register(store, "w1")
    queued = await add(store)
    assert not await store.retry_task(queued)
    claim = await claim_one(store)
    assert not await store.retry_task(queued)
    await complete(store, claim)
    assert not await store.retry_task(queued)
    assert not await store.retry_task(999_999_999)


async def test_the_dead_letters_of_a_queue_are_retried_in_bounded_steps(store: AnyStore, clock: Any) -> None:
    await register(store, "w1")
    failed = [await finished_task(store, is_failure=True) for _ in range(3)]
    other = await finished_task(store, queue="r", is_failure=True)
    done = await finished_task(store)
    assert await store.retry_failed("q", clock(), 2) == (failed[:2], clock())
    assert await store.retry_failed("q", clock(), 2) == (failed[2:], clock())
    assert await store.retry_failed("q", clock(), 2) == ([], None)
    task = await task_of(store, failed[0])
    assert (task.status, task.attempts, task.worker_id, task.finished_at) == (TaskStatus.QUEUED, 0, None, None)
    assert await codes(store, task_id=failed[0]) == ["TASK_FAILED", "TASK_RETRIED"]
    assert (await status_of(store, other), await status_of(store, done)) == (TaskStatus.FAILED, TaskStatus.COMPLETE)
    with pytest.raises(BadInput):
        await store.retry_failed("q", clock(), -1)


async def test_each_round_of_retrying_dead_letters_goes_on_where_the_last_came_to(store: AnyStore, clock: Any) -> None:
    await register(store, "w1")
    old = await finished_task(store, is_failure=True)
    failed, times = [], []
    for _ in range(3):
        clock.advance(1)
        failed.append(await finished_task(store, is_failure=True))
        times.append(clock())
    first = await store.retry_failed("q", clock(), 2, failed_from=times[0])
    assert first == (failed[:2], times[1])
    # Others may have failed in the same moment as the last.
    assert await store.retry_failed("q", clock(), 2, failed_from=first.failed_to) == (failed[2:], times[2])
    assert await status_of(store, old) is TaskStatus.FAILED


async def test_a_dead_letter_that_fails_again_meanwhile_is_not_retried_for_ever(store: AnyStore, clock: Any) -> None:
    claim = await claimed(store, max_attempts=1)
    await fail(store, claim)
    began = clock()
    assert await store.retry_failed("q", began) == ([claim.task_id], began)
    clock.advance(1)
    await fail(store, await claim_one(store))
    assert await store.retry_failed("q", began) == ([], None)
    assert await status_of(store, claim) is TaskStatus.FAILED


@pytest.mark.parametrize("state", ["queued", "scheduled", "error"])
async def test_a_cancelled_task_that_waits_never_runs(store: AnyStore, clock: Any, state: str) -> None:
    await register(store, "w1")
    run_after = clock() + timedelta(seconds=1) if state == "scheduled" else None
    task_id = await add(store, run_after=run_after)
    if state == "error":
        await fail(store, await claim_one(store))
    assert await store.cancel_task(task_id, "not wanted")
    task = await task_of(store, task_id)
    assert (task.status, task.error_code, task.error) == (TaskStatus.FAILED, "CANCELLED", "not wanted")
    assert (task.run_after, task.finished_at) == (None, clock())
    clock.advance(RETRY_CEILING_S)
    assert await store.claim("w1", ("q",)) == []
    assert (await codes(store, task_id=task_id))[-1] == "TASK_CANCELLED"


async def test_a_cancelled_task_that_runs_loses_its_claim(store: AnyStore) -> None:
    claim = await claimed(store)
    assert await store.cancel_task(claim.task_id, "not wanted")
    pulse = await store.heartbeat("w1", [held(claim)])
    assert pulse.lost == {claim.token}
    assert await complete(store, claim) == [claim.token]
    assert await fail(store, claim) is None
    assert await status_of(store, claim) is TaskStatus.FAILED


async def test_a_finished_task_cannot_be_cancelled(store: AnyStore) -> None:
    claim = await claimed(store)
    await complete(store, claim)
    assert not await store.cancel_task(claim.task_id, "too late")
    assert not await store.cancel_task(999_999_999, "unknown")
    assert await status_of(store, claim) is TaskStatus.COMPLETE


async def test_a_cancelled_task_can_be_retried(store: AnyStore) -> None:
    claim = await claimed(store)
    await store.cancel_task(claim.task_id, "not wanted")
    assert await store.retry_task(claim.task_id)
    again = await claim_one(store)
    assert (again.task_id, again.attempt) == (claim.task_id, 1)
    assert await complete(store, claim) == [claim.token]
    assert await complete(store, again) == []


# --------------------------------------------------------------------------------------------- registering, leaving


async def test_a_worker_started_by_hand_is_active_at_once(store: AnyStore, clock: Any) -> None:
    registration = Registration(
        "w1", ("q", "r"), fleet="cpus", concurrency=3, lease_s=12.5, host="box", pid=7, version="1"
    )
    assert await store.register(registration) is WorkerStatus.ACTIVE
    worker = await store.worker("w1")
    assert worker is not None
    assert (worker.status, worker.slot, worker.fleet, worker.queues) == (WorkerStatus.ACTIVE, None, "cpus", ("q", "r"))
    assert (worker.concurrency, worker.lease_s) == (3, 12.5)
    assert (worker.host, worker.pid, worker.version) == ("box", 7, "1")
    assert (worker.created_at, worker.activated_at, worker.last_heartbeat) == (clock(), clock(), None)
    (event,) = await store.events(worker_id="w1")
    assert (event.code, event.fleet) == ("WORKER_REGISTERED", "cpus")
    assert event.reason == "registered on box, serving q, r"


async def test_a_hired_worker_keeps_its_row_when_it_registers(store: AnyStore, hire: Any, clock: Any) -> None:
    await hire("h1", "gpus", 3)
    hired_at = clock()
    clock.advance(40)
    registration = Registration("h1", ("q",), fleet="elsewhere", host="pod")
    assert await store.register(registration) is WorkerStatus.SPAWNING
    worker = await store.worker("h1")
    assert worker is not None
    assert (worker.fleet, worker.slot, worker.status) == ("gpus", 3, WorkerStatus.SPAWNING)
    assert (worker.queues, worker.host, worker.created_at) == (("q",), "pod", hired_at)
    (event,) = await store.events(worker_id="h1")
    assert event.fleet == "gpus"


async def test_registering_again_renews_what_the_worker_says_of_itself(store: AnyStore, clock: Any) -> None:
    await register(store, "w1", pid=1)
    created_at = clock()
    await store.heartbeat("w1")
    clock.advance(10)
    assert await store.register(Registration("w1", ("r",), pid=2)) is WorkerStatus.ACTIVE
    worker = await store.worker("w1")
    assert worker is not None
    assert (worker.queues, worker.pid, worker.created_at, worker.last_heartbeat) == (
        ("r",),
        2,
        created_at,
        created_at,
    )


@pytest.mark.parametrize("is_managed", [False, True], ids=["started by hand", "hired"])
@pytest.mark.parametrize(
    "starts", [("one", "two", "three"), (None, None, None)], ids=["starts with an id", "starts without an id"]
)
async def test_a_task_that_kills_a_worker_which_is_always_started_again_ends_as_a_dead_letter(
    store: AnyStore, hire: Any, clock: Any, starts: tuple[str | None, ...], is_managed: bool
) -> None:
    if is_managed:
        await hire("w1", "gpus", 0)
    poison = await add(store, max_attempts=2)
    for start_id, (attempts, status) in zip(
        starts, [(0, TaskStatus.QUEUED), (1, TaskStatus.QUEUED), (2, TaskStatus.FAILED)], strict=True
    ):
        # In a container, host and pid are the same again.
        await register(store, "w1", host="pod", pid=1, start_id=start_id)
        task = await task_of(store, poison)
        assert (task.attempts, task.status) == (attempts, status)
        await store.heartbeat("w1")
        await store.claim("w1", ("q",))
        clock.advance(10)
    assert (task.worker_id, task.error_code, task.error) == ("w1", "WORKER_LOST", "its worker restarted")
    assert await codes(store, task_id=poison) == ["TASK_REQUEUED", "TASK_FAILED"]


async def test_a_registration_that_comes_twice_takes_nothing_from_its_worker(store: AnyStore) -> None:
    claim = await claimed(store)
    await register(store, "w1")
    assert await complete(store, claim) == []


async def test_a_worker_that_has_ended_stays_ended(store: AnyStore) -> None:
    await register(store, "w1")
    await store.deregister("w1", "done")
    assert await store.register(Registration("w1", ("q",))) is WorkerStatus.TERMINATED
    assert await codes(store, worker_id="w1") == ["WORKER_REGISTERED", "WORKER_DEREGISTERED"]


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(Registration("w1", ("q",), fleet="no name"), id="a fleet's name that is none"),
        pytest.param(Registration("w1", ("q",), concurrency=0), id="no concurrency"),
        pytest.param(Registration("w1", ("q",), lease_s=0), id="no lease"),
        pytest.param(Registration("w1", ("q",), lease_s=math.inf), id="a lease without end"),
    ],
)
async def test_a_bad_registration_is_refused(store: AnyStore, bad: Registration) -> None:
    with pytest.raises(BadInput):
        await store.register(bad)
    assert await store.workers(include_terminated=True) == []


async def test_a_leaving_workers_tasks_go_back_to_the_queue(store: AnyStore, clock: Any) -> None:
    await register(store, "w1", "w2")
    ids = [await add(store), await add(store)]
    claims = await store.claim("w1", ("q",), 2)
    clock.advance(1)
    await store.deregister("w1", "going home")
    worker = await store.worker("w1")
    assert worker is not None
    assert (worker.status, worker.terminated_at) == (WorkerStatus.TERMINATED, clock())
    assert (worker.code, worker.reason) == ("DEREGISTERED", "going home")
    again = await store.claim("w2", ("q",), 2)
    assert [(claim.task_id, claim.attempt) for claim in again] == [(task_id, 1) for task_id in ids]
    assert await complete(store, claims[0]) == [claims[0].token]


async def test_a_hired_worker_that_leaves_is_ended_by_whoever_hired_it(store: AnyStore, hire: Any) -> None:
    await hire("h1", "gpus", 0)
    await add(store)
    claim = await claim_one(store, "h1")
    await store.deregister("h1", "going home")
    worker = await store.worker("h1")
    assert worker is not None
    assert (worker.status, worker.terminated_at) == (WorkerStatus.TERMINATING, None)
    assert (worker.code, worker.reason) == ("DEREGISTERED", "going home")
    assert await status_of(store, claim) is TaskStatus.QUEUED
    assert await store.claim("h1", ("q",)) == []


async def test_leaving_twice_or_unknown_does_nothing(store: AnyStore) -> None:
    await register(store, "w1")
    await store.deregister("w1", "first")
    await store.deregister("w1", "second")
    await store.deregister("nobody", "third")
    assert await codes(store, worker_id="w1") == ["WORKER_REGISTERED", "WORKER_DEREGISTERED"]
    assert await codes(store, worker_id="nobody") == []


async def test_a_worker_told_to_end_keeps_that_reason_when_it_leaves(store: AnyStore) -> None:
    await register(store, "w1")
    await store.set_terminating(["w1"], "too expensive")
    await store.deregister("w1", "drained")
    worker = await store.worker("w1")
    assert worker is not None
    assert (worker.code, worker.reason) == ("MANUAL", "too expensive")


# ------------------------------------------------------------------------------------------------------ heartbeats


async def test_a_heartbeat_is_kept_with_its_vitals(store: AnyStore, clock: Any) -> None:
    await register(store, "w1", pid=1)
    clock.advance(5)
    vitals = {"pid": 42, "vram_total_mb": 80_000, "vram_used_mb": 1_000, "gpu": "H200"}
    pulse = await store.heartbeat("w1", (), vitals)
    assert (pulse.status, pulse.is_paused, pulse.lost) == (WorkerStatus.ACTIVE, False, frozenset())
    await store.heartbeat("w1", (), {"vram_used_mb": 2_000, "load": 0.5})
    worker = await store.worker("w1")
    assert worker is not None
    assert (worker.last_heartbeat, worker.pid) == (clock(), 42)
    assert (worker.vram_total_mb, worker.vram_used_mb) == (80_000, 2_000)
    assert worker.metadata == {"gpu": "H200", "load": 0.5}


async def test_vitals_that_cannot_be_stored_are_refused(store: AnyStore) -> None:
    await register(store, "w1")
    for vitals in ({"pid": "many"}, {"load": float("nan")}):
        with pytest.raises(BadInput):
            await store.heartbeat("w1", (), vitals)
    worker = await store.worker("w1")
    assert worker is not None
    assert worker.last_heartbeat is None


async def test_a_heartbeat_tells_whether_the_worker_is_paused_or_to_end(store: AnyStore) -> None:
    await register(store, "w1")
    await store.set_paused(["w1"], True)
    assert (await store.heartbeat("w1")).is_paused
    await store.set_terminating(["w1"], "enough")
    pulse = await store.heartbeat("w1")
    assert (pulse.status, pulse.is_paused) == (WorkerStatus.TERMINATING, True)


async def test_a_heartbeat_tells_which_claims_are_lost(store: AnyStore) -> None:
    await register(store, "w1")
    for _ in range(4):
        await add(store)
    kept, released, cancelled, finished = await store.claim("w1", ("q",), 4)
    await store.release("w1", released.task_id, released.token, "given back")
    await store.cancel_task(cancelled.task_id, "not wanted")
    await complete(store, finished)
    stranger = HeldClaim(999_999_999, uuid4())
    pulse = await store.heartbeat("w1", [held(kept), held(released), held(cancelled), held(finished), stranger])
    assert pulse.lost == {released.token, cancelled.token, finished.token, stranger.token}


async def test_a_heartbeat_brings_progress(store: AnyStore) -> None:
    claim = await claimed(store)
    await store.heartbeat("w1", [held(claim, 0.25, "frame 1 of 4")])
    task = await task_of(store, claim)
    assert (task.progress, task.progress_note) == (0.25, "frame 1 of 4")
    await store.heartbeat("w1", [held(claim)])
    assert (await task_of(store, claim)).progress == 0.25
    await store.heartbeat("w1", [held(claim, 0.1)])
    task = await task_of(store, claim)
    assert task.progress == pytest.approx(0.1, abs=1e-6)
    assert task.progress_note is None


async def test_a_progress_note_may_be_any_text(store: AnyStore) -> None:
    claim = await claimed(store)
    await store.heartbeat("w1", [held(claim, 0.5, "NUL \x00, half a pair \udc80" + "x" * 600)])
    note = (await task_of(store, claim)).progress_note or ""
    assert note.startswith("NUL \\0, half a pair \\udc80x")
    assert len(note) == 500


async def test_progress_of_a_lost_claim_is_not_taken(store: AnyStore) -> None:
    old = await claimed(store)
    await store.release("w1", old.task_id, old.token, "given back")
    await register(store, "w2")
    new = await claim_one(store, "w2")
    await store.heartbeat("w1", [held(old, 0.9, "almost")])
    assert (await task_of(store, new)).progress is None


async def test_progress_starts_anew_with_each_attempt(store: AnyStore, clock: Any) -> None:
    claim = await claimed(store)
    await store.heartbeat("w1", [held(claim, 0.9, "almost")])
    await fail(store, claim, jitter=0)
    clock.advance(RETRY_FIRST_S)
    await claim_one(store)
    task = await task_of(store, claim)
    assert (task.progress, task.progress_note) == (None, None)


async def test_the_heartbeat_of_a_terminated_worker_touches_no_row(store: AnyStore, clock: Any) -> None:
    claim = await claimed(store)
    await store.deregister("w1", "done")
    before = await store.worker("w1")
    clock.advance(1)
    pulse = await store.heartbeat("w1", [held(claim, 0.5)], {"pid": 99})
    assert (pulse.status, pulse.is_paused, pulse.lost) == (WorkerStatus.TERMINATED, False, {claim.token})
    assert await store.worker("w1") == before
    assert (await task_of(store, claim)).progress is None


async def test_an_unknown_worker_learns_that_it_is_unknown(store: AnyStore) -> None:
    token = uuid4()
    pulse = await store.heartbeat("nobody", [HeldClaim(1, token)])
    assert (pulse.status, pulse.is_paused, pulse.lost) == (None, False, {token})
    assert await store.worker("nobody") is None


async def test_a_claim_its_worker_never_received_is_released_after_a_lease(store: AnyStore, clock: Any) -> None:
    await register(store, "w1", lease_s=30)
    ids = [await add(store), await add(store)]
    received, _never_received = await store.claim("w1", ("q",), 2)
    clock.advance(30)
    await store.heartbeat("w1", [held(received)])
    assert await status_of(store, ids[1]) is TaskStatus.RUNNING
    clock.advance(0.000001)
    await store.heartbeat("w1", [held(received)])
    assert await status_of(store, ids[0]) is TaskStatus.RUNNING
    task = await task_of(store, ids[1])
    assert (task.status, task.attempts) == (TaskStatus.QUEUED, 0)
    assert await codes(store, task_id=ids[1]) == ["TASK_RELEASED"]


# ---------------------------------------------------------------------------------------------------- lost workers


async def beat(store: AnyStore, clock: Any, worker_id: str, duration_s: float, every_s: float = 5.0) -> None:
    """Heartbeats without a gap, from now until `duration_s` later."""
    await store.heartbeat(worker_id)
    for _ in range(round(duration_s / every_s)):
        clock.advance(every_s)
        await store.heartbeat(worker_id)


async def test_the_tasks_of_a_lost_worker_go_to_others(store: AnyStore, clock: Any) -> None:
    await register(store, "lost", "judge", lease_s=30)
    task_id = await add(store)
    claim = await claim_one(store, "lost")
    await store.heartbeat("lost", [held(claim, 0.5, "half")])
    await beat(store, clock, "judge", 30)
    assert await store.recover_lost_workers("judge") == []
    clock.advance(1)
    assert await store.recover_lost_workers("judge") == [RecoveredTasks("lost", tasks_requeued=1, tasks_failed=0)]
    task = await task_of(store, task_id)
    assert (task.status, task.attempts, task.worker_id) == (TaskStatus.QUEUED, 1, None)
    assert (task.error_code, task.error) == ("WORKER_LOST", "worker lost was lost")
    assert (task.started_at, task.progress, task.progress_note) == (None, None, None)
    worker = await store.worker("lost")
    assert worker is not None
    assert (worker.status, worker.terminated_at) == (WorkerStatus.TERMINATED, clock())
    assert (worker.code, worker.reason) == ("STALE_HEARTBEAT", "no heartbeat for 31 s")
    assert (await claim_one(store, "judge")).attempt == 2
    assert await complete(store, claim, "lost") == [claim.token]
    assert await codes(store, worker_id="lost") == [
        "WORKER_REGISTERED",
        "WORKER_LOST",
        "TASK_REQUEUED",
        "LATE_RESULT",
    ]
    assert await store.recover_lost_workers("judge") == []


async def test_a_task_that_kills_its_workers_ends_as_a_dead_letter(store: AnyStore, clock: Any) -> None:
    await register(store, "judge", "fine")
    poison = await add(store, max_attempts=2)
    for victim in ("first", "second"):
        await register(store, victim)
        await claim_one(store, victim)
        for _ in range(8):
            clock.advance(5)
            await store.heartbeat("judge")
            await store.heartbeat("fine")
        (recovery,) = await store.recover_lost_workers("judge")
        assert recovery.worker_id == victim
    assert (recovery.tasks_requeued, recovery.tasks_failed) == (0, 1)
    task = await task_of(store, poison)
    assert (task.status, task.attempts, task.worker_id) == (TaskStatus.FAILED, 2, "second")
    assert (task.error_code, task.finished_at) == ("WORKER_LOST", clock())
    assert await codes(store, task_id=poison) == ["TASK_REQUEUED", "TASK_FAILED"]


async def test_a_worker_that_never_beat_is_judged_by_its_age(store: AnyStore, clock: Any) -> None:
    await register(store, "silent", "judge")
    await beat(store, clock, "judge", 30)
    assert await store.recover_lost_workers("judge") == []
    clock.advance(0.5)
    assert await store.recover_lost_workers("judge") == [RecoveredTasks("silent", 0, 0)]
    worker = await store.worker("silent")
    assert worker is not None
    assert worker.reason == "no heartbeat for 31 s"


async def test_nobody_judges_by_a_longer_lease_than_it_was_itself_heard(store: AnyStore, clock: Any) -> None:
    await register(store, "patient", lease_s=60)
    await store.heartbeat("patient")
    clock.advance(61)
    await register(store, "judge", lease_s=30)
    await beat(store, clock, "judge", 55)
    assert await store.recover_lost_workers("judge") == []
    await beat(store, clock, "judge", 5)
    assert [recovery.worker_id for recovery in await store.recover_lost_workers("judge")] == ["patient"]


async def test_a_beat_that_is_a_little_late_is_no_gap(store: AnyStore, clock: Any) -> None:
    """Three beats fit into a lease; one may take four tenths of it."""
    await register(store, "lost", "judge", lease_s=30)
    await beat(store, clock, "judge", 60, every_s=12)
    assert [recovery.worker_id for recovery in await store.recover_lost_workers("judge")] == ["lost"]
    await register(store, "other", lease_s=30)
    clock.advance(12.000001)
    await store.heartbeat("judge")
    await beat(store, clock, "judge", 20)
    assert await store.recover_lost_workers("judge") == []


@pytest.mark.parametrize("share", [0.41, 0.7, 0.9, 1.0], ids=lambda share: f"{share:.0%} of a lease")
async def test_after_an_outage_shorter_than_a_lease_nobody_is_condemned(
    store: AnyStore, clock: Any, share: float
) -> None:
    """All were silenced; the judge is back first, and the other comes back within its time."""
    await register(store, "judge", "other", lease_s=30)
    await beat(store, clock, "judge", 60)
    await store.heartbeat("other")
    clock.advance(30 * share)
    await store.heartbeat("judge")
    await beat(store, clock, "judge", 25)
    assert await store.recover_lost_workers("judge") == []
    await store.heartbeat("other")
    await beat(store, clock, "judge", 10)
    assert await store.recover_lost_workers("judge") == []


async def test_a_judge_with_a_longer_lease_allows_for_the_outages_it_would_not_notice(
    store: AnyStore, clock: Any
) -> None:
    """It beats every 20 s: an outage of as much leaves no gap in its beats, but one in those of the other."""
    await register(store, "judge", lease_s=60)
    await register(store, "short", lease_s=30)
    await beat(store, clock, "judge", 60, every_s=20)
    await store.heartbeat("short")
    await beat(store, clock, "judge", 40, every_s=20)
    assert await store.recover_lost_workers("judge") == []
    clock.advance(2.000001)
    assert [recovery.worker_id for recovery in await store.recover_lost_workers("judge")] == ["short"]


async def test_a_judge_with_a_shorter_lease_judges_by_that_of_the_silent(store: AnyStore, clock: Any) -> None:
    await register(store, "judge", lease_s=10)
    await register(store, "long", lease_s=60)
    await store.heartbeat("long")
    await beat(store, clock, "judge", 60, every_s=2)
    assert await store.recover_lost_workers("judge") == []
    clock.advance(1)
    assert [recovery.worker_id for recovery in await store.recover_lost_workers("judge")] == ["long"]


async def test_who_is_itself_silent_does_not_judge(store: AnyStore, clock: Any) -> None:
    await register(store, "lost", "judge", lease_s=30)
    await beat(store, clock, "judge", 60)
    clock.advance(12.000001)
    assert await store.recover_lost_workers("judge") == []


async def test_after_an_outage_that_silenced_all_nobody_is_condemned(store: AnyStore, clock: Any) -> None:
    await register(store, "judge", "other", lease_s=30)
    for worker_id in ("judge", "other"):
        await store.heartbeat(worker_id)
    await beat(store, clock, "judge", 20)
    clock.advance(3600)
    assert await store.recover_lost_workers("judge") == []
    await store.heartbeat("judge")
    assert await store.recover_lost_workers("judge") == []
    await store.heartbeat("other")
    await beat(store, clock, "judge", 30)
    assert await store.recover_lost_workers("judge") == []
    clock.advance(1)
    assert [recovery.worker_id for recovery in await store.recover_lost_workers("judge")] == ["other"]


async def test_who_is_unknown_silent_or_ended_cannot_judge(store: AnyStore, clock: Any) -> None:
    await register(store, "lost", "silent", "left")
    await beat(store, clock, "left", 60)
    await store.deregister("left", "done")
    for judge in ("nobody", "silent", "left"):
        assert await store.recover_lost_workers(judge) == []


async def test_a_terminating_worker_that_fell_silent_is_lost_too(store: AnyStore, clock: Any) -> None:
    await register(store, "lost", "judge")
    await store.set_terminating(["lost"], "enough")
    await beat(store, clock, "judge", 60)
    assert [recovery.worker_id for recovery in await store.recover_lost_workers("judge")] == ["lost"]


@pytest.mark.parametrize("status", [WorkerStatus.SPAWNING, WorkerStatus.TERMINATING])
async def test_where_nobody_leads_a_lost_hired_worker_loses_its_tasks_and_waits_for_the_control_loop(
    store: AnyStore, hire: Any, clock: Any, status: WorkerStatus
) -> None:
    await hire("h1", "gpus", 0)
    await register(store, "h1", "judge")
    await add(store)
    claim = await claim_one(store, "h1")
    await store.heartbeat("h1", [held(claim)])
    if status is WorkerStatus.TERMINATING:
        await store.set_terminating(["h1"], "enough")
    await beat(store, clock, "judge", 30)
    assert await store.recover_lost_workers("judge") == []
    clock.advance(1)
    assert await store.recover_lost_workers("judge") == [RecoveredTasks("h1", tasks_requeued=1, tasks_failed=0)]
    assert await status_of(store, claim) is TaskStatus.QUEUED
    worker = await store.worker("h1")
    assert worker is not None
    assert (worker.status, worker.code, worker.reason) == (
        WorkerStatus.ERROR,
        "STALE_HEARTBEAT",
        "no heartbeat for 31 s",
    )
    with pytest.raises(UnknownWorker, match="h1 has ended"):
        await store.claim("h1", ("q",))
    assert await codes(store, worker_id="h1") == [
        "WORKER_REGISTERED",
        *(["WORKER_TERMINATING"] if status is WorkerStatus.TERMINATING else []),
        "WORKER_LOST",
        "TASK_REQUEUED",
        "WORKER_ERROR",
    ]
    assert await store.recover_lost_workers("judge") == []


async def test_a_hired_worker_that_was_never_heard_may_still_be_booting(store: AnyStore, hire: Any, clock: Any) -> None:
    await hire("h1", "gpus", 0)
    await register(store, "judge")
    await beat(store, clock, "judge", 600)
    assert await store.recover_lost_workers("judge") == []


async def test_upkeep_recovers_and_sweeps(store: AnyStore, clock: Any) -> None:
    claim = await claimed(store, "judge")
    await complete(store, claim, "judge")
    left_behind = await claimed(store, "lost")
    await beat(store, clock, "judge", 7200, every_s=10)
    assert await store.run_maintenance("judge") == [RecoveredTasks("lost", tasks_requeued=1, tasks_failed=0)]
    assert await store.task(claim.task_id) is None
    assert await status_of(store, left_behind) is TaskStatus.QUEUED


# --------------------------------------------------------------------------------------------------- pause and end


async def test_pausing_counts_the_workers_that_changed(store: AnyStore) -> None:
    await register(store, "w1", "w2", "w3")
    await store.deregister("w3", "done")
    assert await store.set_paused(["w1", "w2", "w3", "nobody", "w1"], True) == 2
    assert await store.set_paused(["w1", "w2"], True) == 0
    assert await store.set_paused(["w2"], False) == 1
    assert [(worker.id, worker.is_paused) for worker in await store.workers()] == [("w1", True), ("w2", False)]
    assert await codes(store, worker_id="w2") == ["WORKER_REGISTERED", "WORKER_PAUSED", "WORKER_RESUMED"]


async def test_asking_workers_to_end_counts_those_that_were_asked(store: AnyStore) -> None:
    await register(store, "w1", "w2", "w3")
    await store.deregister("w3", "done")
    assert await store.set_terminating(["w1", "w2", "w3", "nobody", "w1"], "enough") == 2
    assert await store.set_terminating(["w1"], "again") == 0
    worker = await store.worker("w1")
    assert worker is not None
    assert (worker.status, worker.code, worker.reason) == (WorkerStatus.TERMINATING, "MANUAL", "enough")
    assert await codes(store, worker_id="w1") == ["WORKER_REGISTERED", "WORKER_TERMINATING"]


# --------------------------------------------------------------------------------------------------------- looking


async def test_tasks_are_listed_newest_first_in_pages(store: AnyStore) -> None:
    ids = [await add(store) for _ in range(5)]
    first = await store.tasks(limit=2)
    second = await store.tasks(limit=2, before_id=first[-1].id)
    third = await store.tasks(limit=2, before_id=second[-1].id)
    assert [task.id for task in [*first, *second, *third]] == ids[::-1]
    assert await store.tasks(before_id=third[-1].id) == []
    assert await store.tasks(limit=0) == []


async def test_tasks_are_listed_by_queue_and_status(store: AnyStore) -> None:
    await register(store, "w1")
    running, queued, other = await add(store), await add(store), await add(store, "r")
    await claim_one(store)
    assert [task.id for task in await store.tasks(queue="q")] == [queued, running]
    assert [task.id for task in await store.tasks(status=TaskStatus.QUEUED)] == [other, queued]
    assert [task.id for task in await store.tasks(queue="q", status=TaskStatus.RUNNING)] == [running]
    assert await store.tasks(queue="none") == []


async def test_summaries_are_the_tasks_without_what_is_large(store: AnyStore) -> None:
    await register(store, "w1")
    for queue in ("q", "q", "r"):
        await add(store, queue, {"large": "x" * 100})
    await complete(store, await claim_one(store), result="1")
    for options in ({}, {"queue": "q"}, {"status": TaskStatus.COMPLETE}, {"limit": 2}, {"before_id": 1}):
        summaries = await store.task_summaries(**options)
        assert [asdict(summary) for summary in summaries] == [
            {name: value for name, value in asdict(task).items() if name not in ("payload", "result")}
            for task in await store.tasks(**options)
        ]


async def test_tasks_that_wait_for_their_time_are_listed_until_it_has_come(store: AnyStore, clock: Any) -> None:
    first, _, second = [
        await add(store, run_after=clock() + timedelta(hours=hours) if hours else None) for hours in (1, 0, 2)
    ]

    async def scheduled(limit: int = 50) -> list[int]:
        found = await store.task_summaries(status=TaskStatus.QUEUED, limit=limit, is_scheduled=True)
        return [task.id for task in found]

    assert await scheduled() == [second, first]
    assert await scheduled(limit=1) == [second]
    clock.advance(3_601)
    assert await scheduled() == [second]


async def test_queues_are_known_by_what_waits_runs_or_is_served(store: AnyStore, clock: Any) -> None:
    assert await store.known_queues() == []
    await register(store, "w1")
    assert await store.known_queues() == ["q"]
    ready, running, ended, later = "a", "b", "c", "other"
    for queue in (ready, ready, running, ended):
        await add(store, queue)
    await add(store, later, run_after=clock() + timedelta(hours=1))
    await claim_one(store, queues=(running,))
    await complete(store, await claim_one(store, queues=(ended,)))
    await store.deregister("w1", "done")
    assert await store.known_queues() == [ready, running, ended, later]


async def test_workers_are_listed_oldest_first_without_the_ended(store: AnyStore, clock: Any) -> None:
    for worker_id in ("b", "a", "c"):
        await register(store, worker_id)
        clock.advance(1)
    await store.deregister("a", "done")
    assert [worker.id for worker in await store.workers()] == ["b", "c"]
    assert [worker.id for worker in await store.workers(include_terminated=True)] == ["b", "a", "c"]
    assert await store.worker("nobody") is None


async def test_events_come_oldest_first_and_the_newest_of_them(store: AnyStore, clock: Any) -> None:
    claim = await claimed(store)
    await store.release("w1", claim.task_id, claim.token, "given back")
    clock.advance(1)
    await store.cancel_task(claim.task_id, "not wanted")
    assert await codes(store) == ["WORKER_REGISTERED", "TASK_RELEASED", "TASK_CANCELLED"]
    assert await codes(store, limit=2) == ["TASK_RELEASED", "TASK_CANCELLED"]
    assert await codes(store, task_id=claim.task_id, limit=1) == ["TASK_CANCELLED"]
    assert await codes(store, worker_id="w1") == ["WORKER_REGISTERED", "TASK_RELEASED"]
    assert await codes(store, task_id=claim.task_id, worker_id="w1") == ["TASK_RELEASED"]
    assert (await store.events())[-1].at == clock()


async def test_queue_depths_count_what_is_not_finished(store: AnyStore, clock: Any) -> None:
    await register(store, "w1")
    assert await store.queue_depths() == []
    for _ in range(4):
        await add(store, "a")
    clock.advance(10)
    await add(store, "b", run_after=clock() + timedelta(seconds=60))
    finished, failed, _running = await store.claim("w1", ("a",), 3)
    await complete(store, finished)
    await fail(store, failed, jitter=0)
    a, b = await store.queue_depths()
    assert (a.queue, a.queued, a.scheduled, a.retrying, a.running) == ("a", 1, 0, 1, 1)
    assert a.oldest_queued_age_s == 10
    assert (b.queue, b.queued, b.scheduled, b.retrying, b.running) == ("b", 0, 1, 0, 0)
    assert b.oldest_queued_age_s is None
    clock.advance(60)
    a, b = await store.queue_depths()
    assert (b.queued, b.scheduled, b.oldest_queued_age_s) == (1, 0, 0)
    assert (a.queued, a.retrying) == (1, 1)


@pytest.mark.parametrize(
    "way", ["its time came", "given back", "retried by hand", "its back-off is over", "worker lost"]
)
async def test_a_task_is_as_old_as_the_time_since_which_it_could_have_been_claimed(
    store: AnyStore, clock: Any, way: str
) -> None:
    if way == "its time came":
        await add(store, run_after=clock() + timedelta(days=7))
        clock.advance(7 * 86_400)
    else:
        claim = await claimed(store)
        await store.heartbeat("w1", [held(claim, 0.5, "half")])
        clock.advance(600)
        if way == "given back":
            await store.release("w1", claim.task_id, claim.token, "no room")
        elif way == "retried by hand":
            await fail(store, claim, retry=False)
            await store.retry_task(claim.task_id)
        elif way == "its back-off is over":
            await fail(store, claim, jitter=0.0)
            clock.advance(RETRY_FIRST_S)
            await register(store, "other")
            # Whoever asks makes it ready; nobody takes it.
            await store.claim("other", ("q",), 0)
        else:
            await register(store, "w1", start_id="another")
    clock.advance(2)
    (depth,) = await store.queue_depths()
    assert (depth.queued, depth.oldest_queued_age_s) == (1, 2)


async def test_finished_tasks_are_counted_by_how_long_ago(store: AnyStore, clock: Any) -> None:
    await register(store, "w1")
    for age_s, is_failure in ((100, False), (50, True), (50, False), (10, False)):
        clock.advance(100 - age_s - (clock() - clock().replace(minute=0, second=0)).total_seconds())
        await add(store)
        claim = await claim_one(store)
        if is_failure:
            await fail(store, claim, retry=False)
        else:
            await complete(store, claim)
    clock.advance(10)
    assert await store.finished_since(50) == {TaskStatus.COMPLETE: 1, TaskStatus.FAILED: 0}
    assert await store.finished_since(51) == {TaskStatus.COMPLETE: 2, TaskStatus.FAILED: 1}
    assert await store.finished_since(1000) == {TaskStatus.COMPLETE: 3, TaskStatus.FAILED: 1}


async def test_the_store_tells_its_time(store: AnyStore, clock: Any) -> None:
    assert await store.now() == clock()
    clock.advance(1.5)
    assert await store.now() == clock()


# ------------------------------------------------------------------------------------------------------ tidying up


async def finished_task(store: AnyStore, queue: str = "q", *, is_failure: bool = False) -> int:
    await add(store, queue)
    claim = await claim_one(store, queues=(queue,))
    await (fail(store, claim, retry=False) if is_failure else complete(store, claim))
    return claim.task_id


async def test_purging_deletes_finished_tasks_that_are_old_enough(store: AnyStore, clock: Any) -> None:
    await register(store, "w1")
    old = await finished_task(store)
    clock.advance(60)
    young = await finished_task(store)
    assert await store.purge(None, [TaskStatus.COMPLETE], 60) == 1
    assert await store.task(old) is None
    assert await store.purge(None, [TaskStatus.COMPLETE], 0.000001) == 0
    assert await store.purge(None, [TaskStatus.COMPLETE], 0) == 1
    assert await store.task(young) is None


async def test_purging_keeps_other_queues_and_statuses(store: AnyStore) -> None:
    await register(store, "w1")
    complete_q, complete_r = await finished_task(store, "q"), await finished_task(store, "r")
    failed_q = await finished_task(store, "q", is_failure=True)
    queued = await add(store, "q")
    assert await store.purge("q", [TaskStatus.COMPLETE, TaskStatus.QUEUED], 0) == 1
    assert await store.task(complete_q) is None
    assert [task.id for task in await store.tasks()] == [queued, failed_q, complete_r]
    assert await store.purge(None, [TaskStatus.FAILED, TaskStatus.COMPLETE], 0) == 2
    assert await store.purge(None, [], 0) == 0


async def test_sweeping_applies_the_retention_of_each_kind(store: AnyStore, clock: Any) -> None:
    """Here completed tasks are kept for 1 h, failed ones for 2 h, events for 3 h and ended workers as long as all."""
    await register(store, "w1")
    done, failed, waiting = await finished_task(store), await finished_task(store, is_failure=True), await add(store)
    await store.deregister("w1", "done")
    assert await store.sweep() == 0
    clock.advance(3600)
    assert await store.sweep() == 0
    clock.advance(1)
    assert await store.sweep() == 1
    assert await store.task(done) is None
    clock.advance(3600)
    assert await store.sweep() == 1
    assert await store.task(failed) is None
    assert len(await store.events()) == 3
    clock.advance(3600)
    assert await store.sweep() == 4
    assert await store.events() == []
    assert await store.events(worker_id="w1") == []
    assert await store.worker("w1") is None
    assert await store.sweep() == 0
    assert await status_of(store, waiting) is TaskStatus.QUEUED


async def test_a_retried_task_no_longer_counts_as_finished(store: AnyStore, clock: Any) -> None:
    await register(store, "w1")
    task_id = await finished_task(store, is_failure=True)
    await store.retry_task(task_id)
    assert await store.finished_since(60) == {TaskStatus.COMPLETE: 0, TaskStatus.FAILED: 0}
    assert await store.purge(None, [TaskStatus.FAILED], 0) == 0
    clock.advance(7201)
    assert await store.sweep() == 0
    assert await status_of(store, task_id) is TaskStatus.QUEUED


@pytest.mark.parametrize("count", [1_000, 2_500])
async def test_sweeping_goes_on_until_nothing_is_left(store: AnyStore, clock: Any, count: int) -> None:
    await register(store, "w1")
    await store.enqueue_many(NewTask("q") for _ in range(count))
    while claims := await store.claim("w1", ("q",), count):
        await store.finish_and_claim("w1", [Finished(c.task_id, c.token, None) for c in claims], (), 0)
    clock.advance(3601)
    assert await store.sweep() == count
    assert await store.sweep() == 0


async def test_the_late_result_of_a_swept_task_changes_nothing(store: AnyStore, clock: Any) -> None:
    claim = await claimed(store)
    await complete(store, claim)
    clock.advance(3601)
    await store.sweep()
    assert await complete(store, claim) == [claim.token]
    assert await late_results(store) == 1


# --------------------------------------------------------------------------------------------------------- waiting


async def waits(store: AnyStore, *queues: str, timeout_s: float = 3600.0) -> "asyncio.Task[None]":
    """A worker that has seen an empty queue and now waits: all earlier hints are used up."""
    for queue in queues:
        await store.wait_for_work((queue,), 0.01)
    return asyncio.create_task(store.wait_for_work(queues, timeout_s))


async def test_waiting_ends_when_work_arrives(store: AnyStore) -> None:
    waiting = await waits(store, "q", "r")
    await add(store, "r")
    await asyncio.wait_for(waiting, LIMIT_S)


async def test_waiting_ends_when_work_comes_back(store: AnyStore) -> None:
    claim = await claimed(store)
    waiting = await waits(store, "q")
    await store.release("w1", claim.task_id, claim.token, "given back")
    await asyncio.wait_for(waiting, LIMIT_S)
    claim = await claim_one(store)
    await fail(store, claim, retry=False)
    waiting = await waits(store, "q")
    await store.retry_task(claim.task_id)
    await asyncio.wait_for(waiting, LIMIT_S)


async def test_what_arrives_before_the_wait_is_not_missed(store: AnyStore) -> None:
    await (await waits(store, "q", timeout_s=0.01))
    await add(store)
    await asyncio.wait_for(store.wait_for_work(("q",), 3600.0), LIMIT_S)


async def test_waiting_ends_when_the_time_is_up(store: AnyStore) -> None:
    waiting = await waits(store, "q", timeout_s=0.01)
    await add(store, "other")
    await asyncio.wait_for(waiting, LIMIT_S)
