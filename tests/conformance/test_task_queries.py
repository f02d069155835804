"""Reading tasks, workers, events and queue depths."""

from dataclasses import asdict
from datetime import timedelta
from typing import Any

import pytest

from support.queue_actions import add, claim_one, claimed, codes, complete, fail, held, register
from support.stores import AnyStore
from windlass.model.listing import PREVIEW_CHARACTERS
from windlass.model.task import TaskStatus
from windlass.policy.backoff import RETRY_FIRST_S


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


async def test_summaries_have_the_beginning_of_the_payload_alone(store: AnyStore) -> None:
    await register(store, "w1")
    for queue in ("q", "q", "r"):
        await add(store, queue, {"large": "x" * 1000})
    await complete(store, await claim_one(store), result="1")
    statuses = [{"status": status} for status in TaskStatus]
    for options in ({}, {"queue": "q"}, *statuses, {"limit": 2}, {"before_id": 1}):
        summaries = (await store.task_summaries(**options)).rows
        assert [asdict(summary) for summary in summaries] == [
            {name: value for name, value in asdict(task).items() if name not in ("payload", "result")}
            | {"payload_preview": task.payload[:PREVIEW_CHARACTERS]}
            for task in await store.tasks(**options)
        ]


async def test_scheduled_tasks_are_listed_until_due(store: AnyStore, clock: Any) -> None:
    first, _, second = [
        await add(store, run_after=clock() + timedelta(hours=hours) if hours else None) for hours in (1, 0, 2)
    ]

    async def scheduled(limit: int = 50) -> list[int]:
        found = await store.task_summaries(status=TaskStatus.QUEUED, limit=limit, is_scheduled=True)
        return [task.id for task in found.rows]

    assert await scheduled() == [second, first]
    assert await scheduled(limit=1) == [second]
    clock.advance(3_601)
    assert await scheduled() == [second]


async def test_cancelled_tasks_are_listed_apart_from_failed_ones(store: AnyStore) -> None:
    await register(store, "w1")
    failed = await add(store)
    await fail(store, await claim_one(store), retry=False)
    cancelled = [await add(store) for _ in range(3)]
    for task_id in cancelled:
        await store.cancel_task(task_id, "not needed")

    async def listed(is_cancelled: bool | None, limit: int = 50) -> list[int]:
        found = await store.task_summaries(status=TaskStatus.FAILED, limit=limit, is_cancelled=is_cancelled)
        return [task.id for task in found.rows]

    newest_first = cancelled[::-1]
    assert await listed(None) == [*newest_first, failed]
    assert await listed(True) == newest_first
    assert await listed(True, limit=2) == newest_first[:2]
    assert await listed(False, limit=1) == [failed]


async def test_known_queues_have_tasks_or_workers(store: AnyStore, clock: Any) -> None:
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


async def test_workers_are_listed_oldest_first_without_terminated(store: AnyStore, clock: Any) -> None:
    for worker_id in ("b", "a", "c"):
        await register(store, worker_id)
        clock.advance(1)
    await store.deregister("a", "done")
    assert [worker.id for worker in await store.workers()] == ["b", "c"]
    assert [worker.id for worker in await store.workers(include_terminated=True)] == ["b", "a", "c"]
    assert await store.worker("unknown") is None


async def test_events_returns_newest_events_oldest_first(store: AnyStore, clock: Any) -> None:
    claim = await claimed(store)
    await store.release("w1", claim.task_id, claim.token, "released")
    clock.advance(1)
    await store.cancel_task(claim.task_id, "not wanted")
    assert await codes(store) == ["WORKER_REGISTERED", "TASK_RELEASED", "TASK_CANCELLED"]
    assert await codes(store, limit=2) == ["TASK_RELEASED", "TASK_CANCELLED"]
    assert await codes(store, task_id=claim.task_id, limit=1) == ["TASK_CANCELLED"]
    assert await codes(store, worker_id="w1") == ["WORKER_REGISTERED", "TASK_RELEASED"]
    assert await codes(store, task_id=claim.task_id, worker_id="w1") == ["TASK_RELEASED"]
    assert (await store.events())[-1].at == clock()


async def test_queue_depths_count_unfinished_tasks(store: AnyStore, clock: Any) -> None:
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
    "way", ["run_after reached", "released", "retried by hand", "its back-off ended", "worker lost"]
)
async def test_queued_age_counts_from_when_task_became_claimable(store: AnyStore, clock: Any, way: str) -> None:
    if way == "run_after reached":
        await add(store, run_after=clock() + timedelta(days=7))
        clock.advance(7 * 86_400)
    else:
        claim = await claimed(store)
        await store.heartbeat("w1", [held(claim, 0.5, "half")])
        clock.advance(600)
        if way == "released":
            await store.release("w1", claim.task_id, claim.token, "no room")
        elif way == "retried by hand":
            await fail(store, claim, retry=False)
            await store.retry_task(claim.task_id)
        elif way == "its back-off ended":
            await fail(store, claim, jitter=0.0)
            clock.advance(RETRY_FIRST_S)
            await register(store, "other")
            # The claim makes it ready and takes no task.
            await store.claim("other", ("q",), 0)
        else:
            await register(store, "w1", start_id="another")
    clock.advance(2)
    (depth,) = await store.queue_depths()
    assert (depth.queued, depth.oldest_queued_age_s) == (1, 2)


async def test_finished_since_counts_recent_tasks(store: AnyStore, clock: Any) -> None:
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


async def test_now_returns_store_time(store: AnyStore, clock: Any) -> None:
    assert await store.now() == clock()
    clock.advance(1.5)
    assert await store.now() == clock()
