"""Search in payloads and past errors, and the list of failed attempts, on PostgreSQL."""

from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from support.stores import PostgresStores
from windlass.model.listing import PREVIEW_CHARACTERS, TaskList
from windlass.model.task import Finished, TaskStatus, new_task
from windlass.model.worker import Registration
from windlass.store import task_lists

CUDA = "Traceback (most recent call last):\n  ...\ntorch.OutOfMemoryError: CUDA out of memory"


@pytest.fixture
async def store(dsn: str, clock: Any) -> AsyncIterator[PostgresStores]:
    async with PostgresStores(dsn, virtual_now=clock) as store:
        yield store


@pytest.fixture
async def sql(dsn: str, clock: Any) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(dsn)
    await connection.execute("select set_config('windlass.now', $1, false)", clock().isoformat())
    yield connection
    await connection.close()


async def run_task(store: PostgresStores, clock: Any, *errors: str | None, worker: str = "w1", **task: Any) -> int:
    """A task whose attempts end with these errors; None completes it."""
    queue = task.pop("queue", "renders")
    await store.register(Registration(worker, (queue,)))
    task_id = await store.enqueue(new_task(queue, **task))
    for error in errors:
        (claim,) = await store.claim(worker, [queue])
        assert claim.task_id == task_id
        if error is None:
            await store.finish_and_claim(worker, [Finished(claim.task_id, claim.token, "1")], [], 0)
        else:
            await store.fail(worker, claim.task_id, claim.token, error, jitter=0.0)
        clock.advance(60)
    return task_id


async def found(store: PostgresStores, search: str, **question: Any) -> list[int]:
    return [row.id for row in (await store.tasks_page(search=search, **question)).rows]


async def test_search_finds_payloads_and_errors_of_earlier_attempts(store: PostgresStores, clock: Any) -> None:
    retried = await run_task(store, clock, CUDA, None, payload={"prompt": "a Lighthouse"})
    failed = await run_task(store, clock, CUDA, "ValueError: bad seed", max_attempts=2)
    await run_task(store, clock, None, payload={"prompt": "a harbour"})
    queued = await store.enqueue(new_task("renders", {"prompt": "a lighthouse at night"}))
    assert (await store.task(retried)).error is None  # type: ignore[union-attr]
    assert await found(store, "cuda OUT") == [failed, retried]
    assert await found(store, "cuda out", which=TaskList.COMPLETE) == [retried]
    assert await found(store, "lighthouse") == [queued, retried]
    assert await found(store, "lighthouse", which=TaskList.QUEUED) == [queued]
    assert await found(store, "lighthouse", queue="other") == []
    assert await found(store, "harbor") == []
    for which in (None, TaskList.QUEUED, TaskList.COMPLETE):
        assert await found(store, "lighthouse", which=which, unsearched_queues=["renders"]) == []


async def test_manual_retry_keeps_past_errors_searchable(store: PostgresStores, clock: Any) -> None:
    task_id = await run_task(store, clock, CUDA, max_attempts=1)
    assert await store.retry_task(task_id)
    assert (await store.task(task_id)).attempts == 0  # type: ignore[union-attr]
    assert await found(store, "CUDA") == [task_id]


async def test_rows_preview_payloads_and_skip_large_ones(store: PostgresStores, sql: Any) -> None:
    short = await store.enqueue(new_task("a", {"prompt": "a lighthouse"}))
    long = await store.enqueue(new_task("a", {"prompt": "x" * 1_000}))
    # Random text does not compress, so its stored size is its size.
    await sql.execute(
        "insert into windlass.tasks (queue, payload)"
        " select 'a', to_jsonb(string_agg(md5(g::text), '')) from generate_series(1, 3000) as g"
    )
    previews = {row.id: row.payload_preview for row in (await store.tasks_page(queue="a")).rows}
    assert previews.pop(short) == '{"prompt": "a lighthouse"}'
    assert len(previews.pop(long) or "") == PREVIEW_CHARACTERS
    assert list(previews.values()) == [None]
    # Large payloads are not searched either.
    assert await found(store, "c4ca4238a0b923820dcc509a6f75849b") == []


async def test_errors_are_listed_by_time_queue_worker_and_text(store: PostgresStores, clock: Any) -> None:
    await run_task(store, clock, CUDA, None, worker="old")
    clock.advance(3_600)
    first = await run_task(store, clock, CUDA, None, worker="w1", payload={"prompt": "a lighthouse"})
    second = await run_task(store, clock, CUDA, CUDA, "ValueError: bad seed", worker="w2")
    other = await run_task(store, clock, "KeyError: 'x'", None, worker="w3", queue="clips")

    async def listed(**question: Any) -> list[tuple[int, int, str | None]]:
        page = await store.task_errors(since_s=3_600, **question)
        return [(error.task_id, error.attempt, error.worker_id) for error in page.rows]

    of_second = [(second, number, "w2") for number in (3, 2, 1)]
    assert await listed() == [(other, 1, "w3"), *of_second, (first, 1, "w1")]
    assert await listed(search="CUDA") == [(second, 2, "w2"), (second, 1, "w2"), (first, 1, "w1")]
    assert await listed(search="CUDA", worker_id="w1") == [(first, 1, "w1")]
    assert await listed(queue="clips") == [(other, 1, "w3")]
    assert len((await store.task_errors(since_s=86_400, search="CUDA")).rows) == 4
    error = (await store.task_errors(since_s=3_600, worker_id="w1")).rows[0]
    assert (error.queue, error.status, error.error_code, error.error) == (
        "renders", TaskStatus.COMPLETE, "HANDLER_ERROR", CUDA,
    )  # fmt: skip
    assert error.payload_preview == '{"prompt": "a lighthouse"}'
    counts = await store.task_error_counts(since_s=3_600, search="CUDA")
    assert (counts.errors, counts.tasks) == (3, 2)
    assert [(count.name, count.errors) for count in counts.by_worker] == [("w2", 2), ("w1", 1)]
    assert [(count.name, count.errors) for count in counts.by_code] == [("HANDLER_ERROR", 3)]
    none = await store.task_error_counts(since_s=3_600, search="nothing like it")
    assert (none.errors, none.tasks, none.by_worker) == (0, 0, ())


@pytest.mark.parametrize("patience_s", [0.0, 60.0])
async def test_pages_of_errors_list_each_once(
    store: PostgresStores, sql: Any, monkeypatch: pytest.MonkeyPatch, patience_s: float
) -> None:
    monkeypatch.setattr(task_lists, "SEARCH_LIMIT", 4)
    monkeypatch.setattr(task_lists, "SEARCH_S", patience_s)
    await sql.execute(
        "insert into windlass.events (code, reason, task_id, worker_id, detail, at)"
        " select 'TASK_ERROR', 'x', g, 'w', jsonb_build_object('attempt', 1, 'error', 'number ' || g % 7),"
        "   windlass.now() - (g / 3) * interval '1 s'"
        " from generate_series(1, 40) as g"
    )
    for search, expected in ((None, 40), ("number 3", 6)):
        seen: list[int] = []
        cursor = None
        for _ in range(100):
            page = await store.task_errors(since_s=3_600, search=search, limit=3, cursor=cursor)
            seen += [error.task_id for error in page.rows]
            cursor = page.next_cursor
            if cursor is None:
                break
        assert len(seen) == len(set(seen)) == expected


async def test_searches_use_indexes_on_large_tables(store: PostgresStores, sql: Any) -> None:
    await sql.execute(
        "insert into windlass.events (code, reason, task_id, worker_id, detail, at)"
        " select case g % 100 when 0 then 'TASK_ERROR' else 'WORKER_ACTIVATED' end, 'x', g, 'w',"
        "   jsonb_build_object('attempt', 1, 'error', 'boom'), windlass.now() - g * interval '1 s'"
        " from generate_series(1, 30000) as g"
    )
    await sql.execute(
        "insert into windlass.tasks (queue, status, attempts, payload, started_at, finished_at)"
        " select 'a', 'complete', 2, jsonb_build_object('n', g), windlass.now(), windlass.now() - g * interval '1 ms'"
        " from generate_series(1, 30000) as g"
    )
    await sql.execute("vacuum analyze windlass.tasks")
    await sql.execute("vacuum analyze windlass.events")
    plans = {
        "tasks_newest": (None, "boom", 50, 5_000, None, []),
        "tasks_complete": (None, "boom", 50, 5_000, None, None, None, []),
        "task_errors": (3_600.0, None, None, "boom", 50, 5_000, None, None, 200, []),
        "task_errors_end": (3_600.0, 5_000, None, None),
        "task_error_counts": (3_600.0, None, None, "boom", 10_000, []),
    }
    for name, arguments in plans.items():
        plan = "\n".join(row[0] for row in await sql.fetch(f"explain {task_lists.QUERIES[name]}", *arguments))
        assert "Seq Scan on events" not in plan, f"{name}:\n{plan}"
        assert "Seq Scan on tasks" not in plan or name.startswith("task_error"), f"{name}:\n{plan}"
        assert ("events_errors" in plan) == name.startswith("task_error"), f"{name}:\n{plan}"
