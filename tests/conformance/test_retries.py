"""Failed attempts, back-off, released claims, retries and cancellation by hand."""

import re
from datetime import timedelta
from typing import Any

import pytest

from support.queue_actions import (
    add,
    claim_one,
    claimed,
    codes,
    complete,
    fail,
    finished_task,
    held,
    late_results,
    register,
    status_of,
    task_of,
)
from support.stores import AnyStore
from windlass.model.errors import BadInput
from windlass.model.task import TaskStatus
from windlass.policy.backoff import RETRY_CEILING_S, RETRY_FIRST_S, retry_delay_s


async def test_failed_attempt_is_retrying(store: AnyStore, clock: Any) -> None:
    claim = await claimed(store)
    started_at = clock()
    failed_at = clock.advance(2)
    assert await fail(store, claim, code="OOM", jitter=0.5) is TaskStatus.ERROR
    task = await task_of(store, claim)
    assert (task.status, task.error_code, task.error) == (TaskStatus.ERROR, "OOM", "it broke")
    assert (task.attempts, task.finished_at) == (1, failed_at)
    assert task.run_after == failed_at + timedelta(seconds=retry_delay_s(1, 0.5))
    (event,) = await store.events(task_id=task.id)
    assert (event.code, event.worker_id) == ("TASK_ERROR", "w1")
    assert event.reason == "attempt 1 of 3: it broke"
    assert event.detail == {
        "attempt": 1,
        "started_at": started_at.isoformat(),
        "error_code": "OOM",
        "error": "it broke",
    }
    assert await store.claim("w1", ("q",)) == []
    clock.advance(retry_delay_s(1, 0.5))
    again = await claim_one(store)
    assert (again.task_id, again.attempt) == (claim.task_id, 2)


async def test_task_without_attempts_left_becomes_failed(store: AnyStore, clock: Any) -> None:
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


async def test_failure_without_retry_is_final(store: AnyStore) -> None:
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


async def test_repeated_failure_report_is_accepted_unchanged(store: AnyStore, clock: Any) -> None:
    claim = await claimed(store)
    await fail(store, claim, jitter=0)
    before = await task_of(store, claim)
    clock.advance(1)
    assert await fail(store, claim, jitter=1) is TaskStatus.ERROR
    assert await task_of(store, claim) == before
    assert await late_results(store) == 0
    assert await codes(store, task_id=claim.task_id) == ["TASK_ERROR"]


async def test_success_clears_error_of_earlier_attempt(store: AnyStore, clock: Any) -> None:
    claim = await claimed(store)
    await fail(store, claim, jitter=0)
    clock.advance(RETRY_FIRST_S)
    await complete(store, await claim_one(store))
    task = await task_of(store, claim)
    assert (task.status, task.error, task.error_code, task.attempts) == (TaskStatus.COMPLETE, None, None, 2)


async def test_error_text_of_any_length_and_characters_is_stored(store: AnyStore) -> None:
    claim = await claimed(store)
    error = "TypeError: " + "x" * 9_000 + "NUL \x00, half a pair \udc80, the cause"
    await store.fail("w1", claim.task_id, claim.token, error)
    kept = (await task_of(store, claim)).error or ""
    assert re.fullmatch(r"TypeError: x{1989} \.\.\. x+NUL.*", kept)
    assert kept.endswith("NUL \\0, half a pair \\udc80, the cause")
    assert len(kept) == 8_000


async def test_released_task_is_queued_as_before_its_claim(store: AnyStore) -> None:
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


async def test_task_is_released_once(store: AnyStore) -> None:
    claim = await claimed(store)
    assert await store.release("w1", claim.task_id, claim.token, "first")
    assert not await store.release("w1", claim.task_id, claim.token, "second")
    assert not await store.release("w1", 999_999_999, claim.token, "unknown")
    assert (await task_of(store, claim)).attempts == 0


async def test_released_attempt_does_not_count(store: AnyStore) -> None:
    await register(store, "w1")
    await add(store, max_attempts=1)
    for _ in range(3):
        claim = await claim_one(store)
        assert claim.attempt == 1
        await store.release("w1", claim.task_id, claim.token, "not now")


async def test_retried_task_has_its_attempts_reset(store: AnyStore) -> None:
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


async def test_retrying_task_can_be_retried_at_once(store: AnyStore) -> None:
    claim = await claimed(store)
    await fail(store, claim)
    assert await store.retry_task(claim.task_id)
    assert (await claim_one(store)).task_id == claim.task_id


async def test_only_failed_and_retrying_tasks_can_be_retried(store: AnyStore) -> None:
    await register(store, "w1")
    queued = await add(store)
    assert not await store.retry_task(queued)
    claim = await claim_one(store)
    assert not await store.retry_task(queued)
    await complete(store, claim)
    assert not await store.retry_task(queued)
    assert not await store.retry_task(999_999_999)


async def test_retry_failed_is_bounded_per_call(store: AnyStore, clock: Any) -> None:
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


async def test_retry_failed_continues_where_last_call_ended(store: AnyStore, clock: Any) -> None:
    await register(store, "w1")
    old = await finished_task(store, is_failure=True)
    failed, times = [], []
    for _ in range(3):
        clock.advance(1)
        failed.append(await finished_task(store, is_failure=True))
        times.append(clock())
    first = await store.retry_failed("q", clock(), 2, failed_from=times[0])
    assert first == (failed[:2], times[1])
    # Other tasks may have failed at the same moment as the last one.
    assert await store.retry_failed("q", clock(), 2, failed_from=first.failed_to) == (failed[2:], times[2])
    assert await status_of(store, old) is TaskStatus.FAILED


async def test_task_failing_again_is_not_retried_forever(store: AnyStore, clock: Any) -> None:
    claim = await claimed(store, max_attempts=1)
    await fail(store, claim)
    began = clock()
    assert await store.retry_failed("q", began) == ([claim.task_id], began)
    clock.advance(1)
    await fail(store, await claim_one(store))
    assert await store.retry_failed("q", began) == ([], None)
    assert await status_of(store, claim) is TaskStatus.FAILED


@pytest.mark.parametrize("state", ["queued", "scheduled", "error"])
async def test_cancelled_queued_task_never_runs(store: AnyStore, clock: Any, state: str) -> None:
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


async def test_cancelled_running_task_loses_its_claim(store: AnyStore) -> None:
    claim = await claimed(store)
    assert await store.cancel_task(claim.task_id, "not wanted")
    pulse = await store.heartbeat("w1", [held(claim)])
    assert pulse.lost == {claim.token}
    assert await complete(store, claim) == [claim.token]
    assert await fail(store, claim) is None
    assert await status_of(store, claim) is TaskStatus.FAILED


async def test_finished_task_cannot_be_cancelled(store: AnyStore) -> None:
    claim = await claimed(store)
    await complete(store, claim)
    assert not await store.cancel_task(claim.task_id, "too late")
    assert not await store.cancel_task(999_999_999, "unknown")
    assert await status_of(store, claim) is TaskStatus.COMPLETE


async def test_cancelled_task_can_be_retried(store: AnyStore) -> None:
    claim = await claimed(store)
    await store.cancel_task(claim.task_id, "not wanted")
    assert await store.retry_task(claim.task_id)
    again = await claim_one(store)
    assert (again.task_id, again.attempt) == (claim.task_id, 1)
    assert await complete(store, claim) == [claim.token]
    assert await complete(store, again) == []
