"""Purging finished tasks, and retention."""

from typing import Any

import pytest

from support.queue_actions import add, claimed, complete, finished_task, late_results, register, status_of
from support.stores import AnyStore
from windlass.model.actor import acting_as
from windlass.model.task import Finished, NewTask, TaskStatus


async def test_purge_deletes_old_finished_tasks(store: AnyStore, clock: Any) -> None:
    await register(store, "w1")
    old = await finished_task(store)
    clock.advance(60)
    young = await finished_task(store)
    assert await store.purge(None, [TaskStatus.COMPLETE], 60) == 1
    assert await store.task(old) is None
    assert await store.purge(None, [TaskStatus.COMPLETE], 0.000001) == 0
    assert await store.purge(None, [TaskStatus.COMPLETE], 0) == 1
    assert await store.task(young) is None


async def test_purge_keeps_other_queues_and_statuses(store: AnyStore) -> None:
    await register(store, "w1")
    complete_q, complete_r = await finished_task(store, "q"), await finished_task(store, "r")
    failed_q = await finished_task(store, "q", is_failure=True)
    queued = await add(store, "q")
    assert await store.purge("q", [TaskStatus.COMPLETE, TaskStatus.QUEUED], 0) == 1
    assert await store.task(complete_q) is None
    assert [task.id for task in await store.tasks()] == [queued, failed_q, complete_r]
    assert await store.purge(None, [TaskStatus.FAILED, TaskStatus.COMPLETE], 0) == 2
    assert await store.purge(None, [], 0) == 0


async def test_purge_is_one_event_with_what_it_deleted(store: AnyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    # The database deletes in rounds.
    monkeypatch.setattr("windlass.store.tasks.PURGE_BATCH", 2)
    await register(store, "w1")
    for _ in range(5):
        await finished_task(store, "q")
    await finished_task(store, "r", is_failure=True)
    with acting_as("user:ann@here"):
        assert await store.purge("q", [TaskStatus.COMPLETE], 0) == 5
        assert await store.purge("q", [TaskStatus.COMPLETE], 0) == 0
    with acting_as("user:bob@here"):
        assert await store.purge(None, [TaskStatus.COMPLETE, TaskStatus.FAILED], 0) == 1
    events = [event for event in await store.events() if event.code == "TASKS_PURGED"]
    assert [(event.actor, event.reason) for event in events] == [
        ("user:ann@here", "5 complete tasks of queue q deleted"),
        ("user:bob@here", "1 complete and failed tasks of all queues deleted"),
    ]
    details = [event.detail or {} for event in events]
    assert [(detail["count"], detail["queue"], detail["statuses"]) for detail in details] == [
        (5, "q", ["complete"]),
        (1, None, ["complete", "failed"]),
    ]


async def test_sweep_applies_retention_of_each_kind(store: AnyStore, clock: Any) -> None:
    """Retention here: complete tasks 1 h, failed tasks 2 h, events 3 h, ended workers the longest of these."""
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


async def test_retried_task_no_longer_counts_as_finished(store: AnyStore, clock: Any) -> None:
    await register(store, "w1")
    task_id = await finished_task(store, is_failure=True)
    await store.retry_task(task_id)
    assert await store.finished_since(60) == {TaskStatus.COMPLETE: 0, TaskStatus.FAILED: 0}
    assert await store.purge(None, [TaskStatus.FAILED], 0) == 0
    clock.advance(7201)
    assert await store.sweep() == 0
    assert await status_of(store, task_id) is TaskStatus.QUEUED


@pytest.mark.parametrize("count", [1_000, 2_500])
async def test_sweep_continues_until_nothing_is_left(store: AnyStore, clock: Any, count: int) -> None:
    await register(store, "w1")
    await store.enqueue_many(NewTask("q") for _ in range(count))
    while claims := await store.claim("w1", ("q",), 1_000):
        await store.finish_and_claim("w1", [Finished(c.task_id, c.token, None) for c in claims], (), 0)
    clock.advance(3601)
    assert await store.sweep() == count
    assert await store.sweep() == 0


async def test_late_result_of_purged_task_changes_nothing(store: AnyStore, clock: Any) -> None:
    claim = await claimed(store)
    await complete(store, claim)
    clock.advance(3601)
    await store.sweep()
    assert await complete(store, claim) == [claim.token]
    assert await late_results(store) == 1
