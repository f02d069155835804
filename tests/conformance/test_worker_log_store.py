"""Output of workers: storing, reading, attempts, limits, retention; and diagnostics at a worker's end."""

from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from support.provider_fixtures import RETENTION
from support.queue_actions import add, claim_one, claimed, complete, fail, register
from support.stores import AnyStore
from windlass.model.errors import BadInput, UnknownWorker
from windlass.model.task import Claim
from windlass.model.worker_log import MAX_CHUNKS, LogChunk, LogSource, WorkerLogPage
from windlass.policy.backoff import RETRY_FIRST_S


async def send(store: AnyStore, *lines: str, worker: str = "w1", claim: Claim | None = None, **more: Any) -> None:
    about = {"task_id": claim.task_id, "attempt": claim.attempt} if claim is not None else {}
    await store.append_logs(worker, uuid4(), [LogChunk(lines, **{**about, **more})])


def texts(page: WorkerLogPage) -> list[str]:
    return [line.text for line in page.lines]


async def test_lines_are_read_with_their_times(store: AnyStore, clock: Any) -> None:
    await register(store, "w1")
    await send(store, "first", "second", ages_ms=(2_500, 0))
    page = await store.worker_log("w1", 10)
    assert [(line.text, line.at) for line in page.lines] == [
        ("first", clock() - timedelta(seconds=2.5)),
        ("second", clock()),
    ]
    assert all(line.worker_id == "w1" and line.task_id is None for line in page.lines)


async def test_tail_has_the_last_lines_and_cursor_continues(store: AnyStore, clock: Any) -> None:
    await register(store, "w1")
    for number in range(5):
        await send(store, f"{number}a", f"{number}b")
        clock.advance(1)
    page = await store.worker_log("w1", 3)
    assert texts(page) == ["3b", "4a", "4b"]
    assert texts(await store.worker_log("w1", 3, after=page.cursor)) == []
    await send(store, "5a", "5b")
    following = await store.worker_log("w1", 1, after=page.cursor)
    assert texts(following) == ["5a", "5b"], "a continued page is not cut inside a chunk"
    assert (await store.worker_log("w1", 1, after=following.cursor)).cursor == following.cursor


async def test_each_attempt_has_its_own_lines(store: AnyStore, clock: Any) -> None:
    await register(store, "w1")
    await add(store)
    other = await claimed_other(store)
    first = await claim_one(store)
    await send(store, "first try", claim=first)
    await send(store, "other task", claim=other)
    await send(store, "the worker itself")
    await fail(store, first, jitter=0)
    clock.advance(RETRY_FIRST_S)
    await register(store, "w2")
    second = await claim_one(store, "w2")
    assert (second.task_id, second.attempt) == (first.task_id, 2)
    await send(store, "second try", worker="w2", claim=second)
    # Lines of the failed attempt that arrive late are still its own.
    await send(store, "late", claim=first)
    assert texts(await store.task_log(first.task_id, 10, attempt=1)) == ["first try", "late"]
    assert texts(await store.task_log(first.task_id, 10, attempt=2)) == ["second try"]
    assert texts(await store.task_log(first.task_id, 10)) == ["first try", "second try", "late"]
    assert texts(await store.task_log(other.task_id, 10)) == ["other task"]
    assert len(texts(await store.worker_log("w1", 10))) == 4


async def claimed_other(store: AnyStore) -> Claim:
    (claim,) = await store.claim("w1", ("q",), 1)
    await add(store)
    return claim


async def test_worker_cannot_add_lines_to_tasks_of_others(store: AnyStore) -> None:
    claim = await claimed(store)
    await register(store, "w2")
    await send(store, "forged", worker="w2", claim=claim)
    await send(store, "made up", worker="w2", task_id=999_999_999, attempt=1)
    assert texts(await store.task_log(claim.task_id, 10)) == []
    assert texts(await store.task_log(999_999_999, 10)) == []
    assert texts(await store.worker_log("w2", 10)) == ["forged", "made up"], "kept as its own"


async def test_repeated_batch_is_stored_once(store: AnyStore) -> None:
    await register(store, "w1")
    batch = uuid4()
    for _ in range(3):
        await store.append_logs("w1", batch, [LogChunk(("once",))])
    assert texts(await store.worker_log("w1", 10)) == ["once"]


async def test_dropped_lines_are_reported_where_they_are_missing(store: AnyStore) -> None:
    claim = await claimed(store)
    await send(store, "before", claim=claim)
    await send(store, "after", claim=claim, dropped=1_234)
    page = await store.task_log(claim.task_id, 10)
    assert [(line.text, line.dropped) for line in page.lines] == [
        ("before", 0),
        ("[1,234 lines dropped: more output than the limits allow]", 1_234),
        ("after", 0),
    ]


async def test_lines_may_have_any_text(store: AnyStore) -> None:
    await register(store, "w1")
    await send(store, "NUL \x00, half a pair \udc80, two\nlines", "", "ü 🙂 \x1b[31mred\x1b[0m")
    first, second, third = texts(await store.worker_log("w1", 10))
    assert first == "NUL \\0, half a pair \\udc80, two lines"
    assert (second, third) == ("", "ü 🙂 \x1b[31mred\x1b[0m")
    await send(store, "only NUL \x00", "a backslash: \\u0000")
    assert texts(await store.worker_log("w1", 2)) == ["only NUL \\0", "a backslash: \\u0000"]


async def test_too_much_in_one_call_is_refused(store: AnyStore) -> None:
    await register(store, "w1")
    with pytest.raises(BadInput):
        await store.append_logs("w1", uuid4(), [LogChunk(("x",))] * (MAX_CHUNKS + 1))
    with pytest.raises(BadInput):
        await store.append_logs("w1", uuid4(), [LogChunk(("x" * 2_000_000,))])
    assert texts(await store.worker_log("w1", 10)) == []


async def test_unknown_and_terminated_workers_are_refused(store: AnyStore) -> None:
    await register(store, "w1")
    await send(store, "alive")
    await store.deregister("w1", "done")
    for worker in ("w1", "unknown"):
        with pytest.raises(UnknownWorker):
            await send(store, "late", worker=worker)
    assert texts(await store.worker_log("w1", 10)) == ["alive"], "readable after its end"


async def test_output_of_one_worker_is_bounded(store: AnyStore, clock: Any) -> None:
    await register(store, "w1")
    await register(store, "w2")
    await send(store, "of another", worker="w2")
    max_bytes = RETENTION.worker_log_mb << 20
    await store.sweep()  # applies the settings
    line, calls = "x" * 1_000, 0
    while calls * 100 * 1_000 < 1.5 * max_bytes:
        await send(store, *[line] * 100)
        calls += 1
        clock.advance(5)
    page = await store.worker_log("w1", 10_000)
    kept = [line for line in page.lines if not line.dropped]
    assert 0.5 * max_bytes < 1_000 * len(kept) <= max_bytes
    assert kept[-1].at == clock() - timedelta(seconds=5), "the newest lines are kept"
    assert page.lines[0].dropped == calls * 100 - len(kept) or len(kept) == 10_000
    assert texts(await store.worker_log("w2", 10)) == ["of another"]


async def test_output_per_minute_is_bounded(store: AnyStore, clock: Any) -> None:
    await register(store, "w1")
    for _ in range(24):
        await send(store, *["x" * 900] * 1_000)
    await store.deregister("w1", "done")
    diagnostics = await store.diagnostics("w1")
    assert diagnostics is not None
    assert 5_000 < diagnostics["dropped_lines"] < 9_000


async def test_old_output_is_deleted(store: AnyStore, clock: Any) -> None:
    await register(store, "w1")
    await send(store, "old")
    clock.advance(RETENTION.worker_logs_s / 2 + 1)
    await send(store, "new")
    clock.advance(RETENTION.worker_logs_s / 2)
    await store.sweep()
    page = await store.worker_log("w1", 10)
    assert texts(page) == ["[1 older line deleted: limits of the worker, or retention]", "new"]


async def test_deleted_boot_output_is_not_missing_from_output(store: AnyStore, clock: Any, spawn_worker: Any) -> None:
    await spawn_worker("boot-0", "f", 0)
    behind = getattr(store, "behind", store)
    await behind.report_boot_step("boot-0", "starting", "line 1\nline 2")
    clock.advance(RETENTION.worker_logs_s / 2 + 1)
    await behind.heartbeat("boot-0")
    await send(behind, "new", worker="boot-0")
    clock.advance(RETENTION.worker_logs_s / 2)
    await store.sweep()
    assert texts(await store.worker_log("boot-0", 10)) == ["new"]


async def test_all_output_together_is_bounded(store: AnyStore, clock: Any) -> None:
    await store.sweep()
    for number in range(4):
        await register(store, f"w{number}")
        for _ in range(8):
            await send(store, *["x" * 999] * 100, worker=f"w{number}")
        clock.advance(1)
    await store.sweep()
    kept = [len((await store.worker_log(f"w{number}", 10_000)).lines) for number in range(4)]
    assert kept[3] == kept[2] == 800, "the newest"
    assert kept[0] <= 1, "only the note that lines were deleted"
    assert 1.7 * (1 << 20) < 1_000 * sum(kept) < RETENTION.worker_logs_mb << 20


async def test_boot_output_is_replaced_until_the_first_heartbeat(store: AnyStore, spawn_worker: Any) -> None:
    await spawn_worker("boot-0", "f", 0)
    behind = getattr(store, "behind", store)
    await behind.report_boot_step("boot-0", "starting", "line 1")
    await behind.report_boot_step("boot-0", "installing", "line 1\nline 2")
    await behind.report_boot_step("boot-0", "waiting")
    page = await store.worker_log("boot-0", 10)
    assert [(line.text, line.source) for line in page.lines] == [
        ("line 1", LogSource.BOOT),
        ("line 2", LogSource.BOOT),
    ]
    await behind.heartbeat("boot-0")
    await behind.report_boot_step("boot-0", "forged", "too late")
    assert texts(await store.worker_log("boot-0", 10)) == ["line 1", "line 2"]


async def test_diagnostics_are_kept_at_the_end_of_a_worker(store: AnyStore) -> None:
    claim = await claimed(store)
    await store.heartbeat("w1", (), {"load": 0.5})
    await send(store, *(f"line {number}" for number in range(40)), "the \x1blast", claim=claim)
    assert await store.diagnostics("w1") is None
    await complete(store, claim)
    await add(store)
    failed = await claim_one(store)
    await fail(store, failed, code="OUT_OF_MEMORY")
    await store.deregister("w1", "drained")
    diagnostics = await store.diagnostics("w1")
    assert diagnostics is not None
    assert diagnostics["last_lines"] == [*(f"line {number}" for number in range(21, 40)), "the last"]
    assert diagnostics["vitals"] == {"load": 0.5}
    error = diagnostics["last_error"]
    assert (error["code"], error["task_id"], error["attempt"]) == ("OUT_OF_MEMORY", failed.task_id, 1)
    assert (diagnostics["code"], diagnostics["reason"], diagnostics["status_before"]) == (
        "DEREGISTERED",
        "drained",
        "active",
    )
