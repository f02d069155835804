"""Enqueueing: ids, unique keys, bulk loads, and input that is refused."""

import json
import math
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest

from support.queue_actions import add, claimed, complete, register, status_of, task_of
from support.stores import AnyStore
from windlass.model.errors import BadInput
from windlass.model.task import NewTask, TaskStatus, new_task


async def test_enqueued_task_is_queued_with_all_its_fields(store: AnyStore, clock: Any) -> None:
    task_id = await add(
        store, payload={"b": [1, "ü"], "a": None}, priority=-7, max_attempts=5, timeout_s=1.5, unique_key="k"
    )
    task = await task_of(store, task_id)
    assert json.loads(task.payload) == {"b": [1, "ü"], "a": None}
    assert (task.queue, task.status, task.priority) == ("q", TaskStatus.QUEUED, -7)
    assert (task.attempts, task.max_attempts, task.timeout_s, task.unique_key) == (0, 5, 1.5, "k")
    assert (task.created_at, task.started_at, task.finished_at, task.worker_id) == (clock(), None, None, None)
    assert (task.progress, task.error, task.error_code, task.result, task.run_after) == (None,) * 5


async def test_unknown_task_is_none(store: AnyStore) -> None:
    assert await store.task(999_999_999) is None


async def test_task_ids_increase(store: AnyStore) -> None:
    ids = [await add(store) for _ in range(3)]
    assert ids == sorted(set(ids))


async def test_existing_unique_key_returns_unchanged_task(store: AnyStore) -> None:
    first = await add(store, payload=1, unique_key="k")
    assert await add(store, payload=2, priority=9, unique_key="k") == first
    task = await task_of(store, first)
    assert (json.loads(task.payload), task.priority) == (1, 0)
    assert len(await store.tasks()) == 1


async def test_enqueue_or_find_reports_whether_task_is_new(store: AnyStore) -> None:
    first, is_new = await store.enqueue_or_find(new_task("q", unique_key="k"))
    assert is_new
    assert await store.enqueue_or_find(new_task("q", 2, unique_key="k")) == (first, False)
    assert (await store.enqueue_or_find(new_task("q")))[1]
    claim = await claimed(store)
    assert claim.task_id == first
    assert await store.enqueue_or_find(new_task("q", unique_key="k")) == (first, False)


async def test_event_of_long_error_keeps_its_end(store: AnyStore) -> None:
    claim = await claimed(store)
    error = "Traceback (most recent call last):\n" + "  File x\n" * 2_000 + "OSError: no disk"
    await store.fail("w1", claim.task_id, claim.token, error)
    assert ((await task_of(store, claim.task_id)).error or "").endswith("OSError: no disk")
    (event,) = [event for event in await store.events(task_id=claim.task_id) if event.code == "TASK_ERROR"]
    assert event.reason.endswith("OSError: no disk")


async def test_unique_key_is_unique_within_its_queue(store: AnyStore) -> None:
    assert await add(store, "q", unique_key="k") != await add(store, "r", unique_key="k")


async def test_unique_key_stays_taken_after_completion(store: AnyStore) -> None:
    claim = await claimed(store, unique_key="k")
    await complete(store, claim)
    assert await add(store, unique_key="k") == claim.task_id
    assert await status_of(store, claim) is TaskStatus.COMPLETE


async def test_unique_key_is_free_after_purge(store: AnyStore) -> None:
    claim = await claimed(store, unique_key="k")
    await complete(store, claim)
    await store.purge(None, [TaskStatus.COMPLETE], 0)
    assert await add(store, unique_key="k") != claim.task_id


async def test_bulk_enqueue_keeps_order(store: AnyStore) -> None:
    await register(store, "w1")
    assert await store.enqueue_many(new_task("q", number) for number in range(5)) == 5
    claims = await store.claim("w1", ("q",), 5)
    assert [json.loads(claim.payload) for claim in claims] == [0, 1, 2, 3, 4]


async def test_bulk_enqueue_accepts_async_stream(store: AnyStore) -> None:
    async def stream() -> AsyncIterator[NewTask]:
        for number in range(3):
            yield new_task("q", number)

    assert await store.enqueue_many(stream()) == 3


async def test_bulk_enqueue_accepts_no_tasks(store: AnyStore) -> None:
    assert await store.enqueue_many([]) == 0


async def test_bulk_enqueue_skips_known_keys_and_counts_new_tasks(store: AnyStore) -> None:
    first = await add(store, payload="old", unique_key="a")
    tasks = [new_task("q", "new", unique_key=key) for key in ("a", "b", "b", None, None)]
    assert await store.enqueue_many(tasks) == 3
    assert json.loads((await task_of(store, first)).payload) == "old"
    assert [task.unique_key for task in await store.tasks()] == [None, None, "b", "a"]
    # Again on the same connection: the staging table of the first call is gone.
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
async def test_invalid_task_is_refused_and_nothing_is_added(store: AnyStore, bad: NewTask) -> None:
    with pytest.raises(BadInput):
        await store.enqueue(bad)
    with pytest.raises(BadInput):
        await store.enqueue_many([NewTask("q"), bad])
    with pytest.raises(BadInput):
        await store.enqueue_many([NewTask("q", unique_key="u"), bad])
    assert await store.tasks() == []
    assert await add(store) > 0


async def test_payload_may_have_numbers_python_cannot_parse(store: AnyStore) -> None:
    task_id = await store.enqueue(NewTask("q", payload="9" * 5_000))
    assert (await task_of(store, task_id)).payload == "9" * 5_000
