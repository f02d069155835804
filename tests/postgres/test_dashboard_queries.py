"""Dashboard queries on PostgreSQL: pages, counts, charts, and that no query reads whole tables."""

from collections.abc import AsyncIterator
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from support.stores import PostgresStores
from windlass.control.unconfigured_fleets import CARETAKER
from windlass.cost.report import read_meter
from windlass.model.config import Retention
from windlass.model.errors import BadInput
from windlass.model.listing import Page, TaskList
from windlass.model.overview import MAX_QUEUES
from windlass.model.process import ProcessKind, ProcessRecord
from windlass.model.task import Finished, Task, TaskStatus, new_task
from windlass.model.worker import Registration, WorkerStatus
from windlass.store import dashboard_queries as reading
from windlass.store import fleets, overview, task_lists

Store = PostgresStores


@pytest.fixture
async def store(dsn: str, clock: Any) -> AsyncIterator[Store]:
    async with PostgresStores(dsn, virtual_now=clock) as store:
        yield store


@pytest.fixture
async def sql(dsn: str, store: Store, clock: Any) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(dsn)
    await connection.execute("select set_config('windlass.now', $1, false)", clock().isoformat())
    yield connection
    await connection.close()


async def add_fleet(sql: Any, name: str = "gpus", queues: str = "{a,b}", max_workers: int = 8) -> None:
    await sql.execute(
        "insert into windlass.fleets (name, queues, max_workers) values ($1, $2::text::text[], $3)",
        name, queues, max_workers,
    )  # fmt: skip


async def add_worker(sql: Any, slot: int, fleet: str = "gpus", **columns: Any) -> str:
    worker_id = f"{fleet}-{slot}-x"
    await sql.execute("insert into windlass.slots (fleet, slot) values ($1, $2) on conflict do nothing", fleet, slot)
    await sql.execute(
        "insert into windlass.workers (id, fleet, slot, status, queues, last_heartbeat) "
        "values ($1, $2, $3, 'active', '{a,b}', windlass.now())",
        worker_id, fleet, slot,
    )  # fmt: skip
    for name, value in columns.items():
        await sql.execute(f"update windlass.workers set {name} = $1 where id = $2", value, worker_id)  # noqa: S608
    return worker_id


async def everything(read: Any, **question: Any) -> list[Any]:
    """All rows, page by page, in a bounded number of calls."""
    rows: list[Any] = []
    page: Page[Any] = await read(**question)
    for _ in range(100):
        rows += page.rows
        if page.next_cursor is None:
            return rows
        page = await read(**question, cursor=page.next_cursor)
    raise AssertionError("the pages never end")


# ------------------------------------------------------------------------------------------------ overview


async def test_overview_has_queued_tasks_workers_and_burn_rate(store: Store, sql: Any, clock: Any) -> None:
    await add_fleet(sql)
    await add_fleet(sql, "idle", "{c}")
    priced = {"price_micros_per_hour": 200_000, "currency": "EUR", "billing_unit_s": 3600, "billed_since": clock()}
    await add_worker(sql, 0, **priced)
    await add_worker(sql, 1, **priced, status="terminating")
    await add_worker(sql, 2, last_heartbeat=clock() - timedelta(hours=1), paused=True)
    await add_worker(sql, 0, "idle", concurrency=4)
    await add_worker(sql, 1, "idle", kind="dispatcher", concurrency=8)
    await add_worker(sql, 2, "idle", last_heartbeat=clock() - timedelta(hours=1))
    await add_worker(sql, 3, "idle", kind="node", node='{"state": "dead"}')
    for queue, count in (("a", 3), ("b", 2), ("orphaned", 1)):
        for _ in range(count):
            await store.enqueue(new_task(queue))
    await store.enqueue(new_task("a", run_after=clock() + timedelta(hours=1)))
    await store.claim("gpus-0-x", ["a"], 1)
    await sql.execute(
        "insert into windlass.alerts (fleet, key, code, severity, reason) values"
        " ('gpus', 'HOLD', 'HOLD', 'warning', 'on hold'), (null, 'NO_LEADER', 'NO_LEADER', 'critical', 'no leader')"
    )
    clock.advance(30)
    seen = await store.overview()
    gpus, idle = seen.fleets
    assert (gpus.work.queued, gpus.work.scheduled, gpus.work.running) == (4, 1, 1)
    assert gpus.work.oldest_queued_age_s == 30
    assert gpus.workers[WorkerStatus.ACTIVE] == 2
    assert gpus.workers[WorkerStatus.TERMINATING] == 1
    assert (gpus.managed, gpus.paused, gpus.silent) == (3, 1, 1)
    # A busy worker, a terminating one, and a paused one without heartbeats.
    assert (gpus.idle, gpus.free_slots) == (0, 0)
    # Neither the dispatcher, nor the worker without heartbeats, nor the one whose Ray node is dead.
    assert (idle.idle, idle.free_slots) == (1, 4)
    assert idle.workers[WorkerStatus.ACTIVE] == 3, "a dispatcher runs no tasks itself"
    assert [(burn.currency, burn.micros_per_hour, burn.machines) for burn in gpus.burn] == [("EUR", 400_000, 2)]
    assert [alert.code for alert in gpus.alerts] == ["HOLD"]
    assert [alert.code for alert in seen.alerts] == ["NO_LEADER"]
    assert idle.work.queued == 0
    assert seen.queues["orphaned"].queued == 1
    assert seen.leader is None


async def test_overview_prefers_holder_of_orchestrator_lease(store: Store, sql: Any) -> None:
    take = "select windlass_internal.acquire_lease_term($1, $2, 60)"
    for lease, holder, reported in (("ray:x", "r", None), (CARETAKER, "c", "c"), ("orchestrator", "o", "o")):
        await sql.execute(take, lease, holder)
        leader = (await store.overview()).leader
        assert (leader.holder if leader is not None else None) == reported


async def test_wait_times_and_throughput_use_recent_tasks(store: Store, sql: Any, clock: Any) -> None:
    await add_fleet(sql)
    await store.register(Registration("hand", ("a",)))
    for wait_s in range(1, 21):
        await store.enqueue(new_task("a"))
        clock.advance(wait_s)
        (claim,) = await store.claim("hand", ["a"])
        clock.advance(1)
        await store.finish_and_claim("hand", [Finished(claim.task_id, claim.token, None)], [], 0)
    (gpus,) = [standing for standing in (await store.overview()).fleets if standing.fleet.name == "gpus"]
    assert gpus.work.wait_p50_s == pytest.approx(10.5)
    assert gpus.work.wait_p95_s == pytest.approx(19.05)
    assert gpus.work.duration_p50_s == pytest.approx(1.0)
    # The first of them started 229 s ago.
    assert gpus.work.completed_per_minute == pytest.approx(60 * 20 / 229)


async def test_throughput_is_measured_over_the_time_there_is(store: Store, sql: Any, clock: Any) -> None:
    """A fleet that has done 27 tasks in 45 s does 36 per minute, not 27 in five minutes."""
    await add_fleet(sql)
    await sql.execute(
        "insert into windlass.tasks (queue, status, attempts, started_at, finished_at)"
        " select 'a', 'complete', 1, windlass.now() - interval '45 s', windlass.now() - g * interval '1 s'"
        " from generate_series(1, 27) as g"
    )
    work = (await store.overview()).queues["a"]
    assert work.completed_per_minute == pytest.approx(36)
    assert work.current_per_minute == pytest.approx(36)
    # A moment is too short to measure a rate.
    await sql.execute("update windlass.tasks set started_at = windlass.now(), finished_at = windlass.now()")
    assert (await store.overview()).queues["a"].completed_per_minute == pytest.approx(54)
    # A chart shows that the work has ended.
    clock.advance(90)
    work = (await store.overview()).queues["a"]
    assert (work.completed_per_minute, work.current_per_minute) == (pytest.approx(18), 0)


async def test_overview_names_what_serves_each_queue(store: Store, sql: Any) -> None:
    await add_fleet(sql, queues="{a,b}")
    await add_worker(sql, 0)
    await add_worker(sql, 1, kind="dispatcher")
    await store.register(Registration("hand", ("by-hand", "a")))
    for queue in ("a", "by-hand", "nosuch"):
        await store.enqueue(new_task(queue))
    seen = await store.overview()
    queues = {name: seen.queue(name) for name in seen.queues}
    assert {name: (queue.fleets, queue.workers) for name, queue in queues.items()} == {
        "a": (("gpus",), 2),
        "b": (("gpus",), 1),
        "by-hand": ((), 1),
        "nosuch": ((), 0),
    }
    assert [name for name, queue in queues.items() if not queue.is_served] == ["nosuch"]


async def test_cancelled_tasks_are_not_counted_as_failed(store: Store, sql: Any) -> None:
    failed, cancelled = [await store.enqueue(new_task("a")) for _ in range(2)]
    await sql.execute(
        "update windlass.tasks set status = 'failed', error_code = 'X', finished_at = now() where id = $1", failed
    )
    assert await store.cancel_task(cancelled, "not needed")
    await store.enqueue(new_task("a"))
    assert (await store.overview()).queues["a"].dead == 1
    assert [row.id for row in (await store.tasks_page(which=TaskList.FAILED)).rows] == [failed]
    assert [row.id for row in (await store.tasks_page(which=TaskList.CANCELLED)).rows] == [cancelled]
    found = await store.tasks_page(which=TaskList.CANCELLED, search=str(cancelled))
    assert [row.id for row in found.rows] == [cancelled]
    assert (await store.tasks_page(which=TaskList.FAILED, search=str(cancelled))).rows == ()


async def test_busy_queue_does_not_hide_quiet_one(
    store: Store, sql: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview, "RECENT_TASKS_OF_QUEUE", 20)
    await add_fleet(sql)
    for queue, count, every_ms, wait_s in (("a", 2500, 100, 1), ("b", 5, 50_000, 60)):
        await sql.execute(
            "insert into windlass.tasks (queue, status, attempts, created_at, started_at, finished_at)"
            " select $1, 'complete', 1, f.at - ($4 + 2) * interval '1 s', f.at - interval '2 s', f.at"
            " from generate_series(0, $2 - 1) as g"
            " cross join lateral (select windlass.now() - g * $3 * interval '1 ms' as at) as f",
            queue, count, every_ms, wait_s,
        )  # fmt: skip
    seen = await store.overview()
    assert (seen.queues["a"].wait_p50_s, seen.queues["b"].wait_p50_s) == (1, 60)
    # Since the first of them started.
    assert seen.queues["a"].completed_per_minute == pytest.approx(60 * 2500 / 251.9)
    assert seen.queues["b"].completed_per_minute == pytest.approx(60 * 5 / 202)
    (gpus,) = seen.fleets
    # Each row is weighted by completed tasks: nearly all waited for a second.
    assert (gpus.work.wait_p50_s, gpus.work.wait_p95_s) == (1, 1)
    assert gpus.work.completed_per_minute == pytest.approx(60 * 2500 / 251.9 + 60 * 5 / 202)
    # The same in the totals.
    assert (seen.total.wait_p50_s, seen.total.wait_p95_s, seen.total.duration_p50_s) == (1, 1, 2)
    assert seen.total.completed_per_minute == pytest.approx(gpus.work.completed_per_minute)
    monkeypatch.setattr(overview, "RECENT_TASKS", 100)
    assert (await store.overview()).queues["a"].completed_per_minute == pytest.approx(600, rel=0.02)


async def test_scheduled_time_does_not_count_as_wait(store: Store, sql: Any, clock: Any) -> None:
    await add_fleet(sql)
    await store.register(Registration("hand", ("a",)))
    await store.enqueue(new_task("a", run_after=clock() + timedelta(hours=1)))
    clock.advance(3600 + 7)
    (claim,) = await store.claim("hand", ["a"])
    await store.release("hand", claim.task_id, claim.token, "not now")
    clock.advance(3)
    assert (await store.overview()).queues["a"].oldest_queued_age_s == 3
    (claim,) = await store.claim("hand", ["a"])
    await store.finish_and_claim("hand", [Finished(claim.task_id, claim.token, None)], [], 0)
    assert (await store.overview()).queues["a"].wait_p50_s == 3


async def test_overview_omits_former_fleets(store: Store, sql: Any) -> None:
    await add_fleet(sql, "configured")
    await add_fleet(sql, "staffed")
    await add_fleet(sql, "over")
    await add_worker(sql, 0, "staffed")
    seen = await store.overview(frozenset({"configured"}))
    assert [standing.fleet.name for standing in seen.fleets] == ["configured", "staffed"]


async def test_fleet_of_workers_started_by_hand_is_told_from_one_without_cycles(store: Store, sql: Any) -> None:
    await store.register(Registration("hand", ("a",)))
    await add_fleet(sql, "planned")
    dispatcher = await add_worker(sql, 1, "planned", kind="dispatcher")
    await sql.execute("update windlass.workers set slot = null where id = $1", dispatcher)
    await store.register(Registration("other-hand", ("a",), fleet="planned"))
    await add_worker(sql, 0, "planned")

    async def shown(configured: set[str]) -> dict[str, tuple[int, bool]]:
        seen = await store.overview(frozenset(configured))
        return {each.fleet.name: (each.by_hand, each.is_by_hand) for each in seen.fleets}

    assert await shown({"planned"}) == {"default": (1, True), "planned": (1, False)}
    # `up` has it in its configuration: its first cycle is about to run.
    assert await shown({"default"}) == {"default": (1, False), "planned": (1, False)}


async def test_history_has_at_most_requested_points(store: Store, sql: Any, clock: Any) -> None:
    await add_fleet(sql)
    for count in range(60):
        await store.enqueue(new_task("a"))
        seen = await store.overview()
        await store.take_samples(seen)
        await store.take_samples(seen)  # a second sampler does no harm
        clock.advance(5)
        assert seen.fleets[0].work.queued == count + 1
    points = await store.history("gpus", 300, points=10)
    assert len(points) <= 11
    assert points[0].queued < points[-1].queued
    assert points[0].at < points[-1].at
    assert len(await store.history("gpus", 301, points=100_000)) == 60


async def test_long_history_uses_averages_and_newest_samples(store: Store, sql: Any, clock: Any) -> None:
    await add_fleet(sql)
    await store.enqueue(new_task("a"))
    for _ in range(200):
        await store.take_samples(await store.overview())
        clock.advance(30)
    averages = await sql.fetch("select at, queued from windlass.sample_averages order by at")
    # 100 minutes: the last interval of five minutes has not ended.
    assert len(averages) in (19, 20)
    assert all(row["queued"] == 1 for row in averages)
    assert {row["at"].minute % 5 for row in averages} == {0}
    await sql.execute("delete from windlass.samples where at < $1", clock() - timedelta(minutes=10))
    points = await store.history("gpus", 2 * 86_400, 576)
    assert len(points) in (20, 21)
    assert (points[-1].at - points[0].at).total_seconds() == pytest.approx(6_000, abs=600)
    await sql.execute("delete from windlass.samples")
    assert len(await store.history("gpus", 2 * 86_400, 576)) == len(averages)
    async with sql.transaction():
        scans = "select seq_scan from pg_stat_xact_user_tables where schemaname = 'windlass' and relname = 'samples'"
        before = await sql.fetchval(scans)
        await sql.execute("select windlass_internal.add_samples('[]', 30)")
        assert await sql.fetchval(scans) == before


async def test_retention_of_samples_and_processes(store: Store, sql: Any, clock: Any) -> None:
    await add_fleet(sql)
    await store.take_samples(await store.overview())
    # Enough fleets to write more samples in five minutes than one batch deletes.
    await sql.execute(
        "insert into windlass.samples (fleet, at, queued, running, spawning, active, terminating, error,"
        " completed_per_minute) select 'f' || n, windlass.now(), 0, 0, 0, 0, 0, 0, 0 from generate_series(1, 2500) as n"
    )
    await sql.execute(
        "insert into windlass.sessions (hash, is_link, role, expires_at)"
        " values ('\\x01', false, 'viewer', windlass.now() + '1 hour')"
    )
    gone, here = (
        ProcessRecord(uuid4(), ProcessKind.SERVER, 0, host, 1, "1.0", url="http://127.0.0.1:8080")
        for host in ("gone", "here")
    )
    await store.record_process(gone)
    clock.advance(Retention().samples_s + 1)
    await store.record_process(here)
    assert await store.purge_dashboard_rows() == 2_503
    assert await sql.fetchval("select count(*) from windlass.samples") == 0
    assert await sql.fetchval("select host from windlass.processes") == "here"
    await sql.execute(
        "insert into windlass.sample_averages (fleet, at, queued, running, spawning, active, terminating, error,"
        " completed_per_minute) select 'f', windlass.now() + n * interval '1 day', 0, 0, 0, 0, 0, 0, 0"
        " from generate_series(0, 1) as n"
    )
    clock.advance(Retention().sample_averages_s - Retention().samples_s)
    assert await store.purge_dashboard_rows() == 2
    assert await sql.fetchval("select count(*) from windlass.sample_averages") == 1


# ---------------------------------------------------------------------------------------------------------------- lists


async def test_workers_are_paged_by_fleet_and_slot(store: Store, sql: Any, clock: Any) -> None:
    await add_fleet(sql)
    await add_fleet(sql, "cpus")
    for slot in (3, 1, 2, 0):
        await add_worker(sql, slot)
    await add_worker(sql, 0, "cpus")
    await store.register(Registration("by-hand", ("a",), fleet="gpus"))
    rows = await everything(store.workers_page, limit=2)
    assert [row.id for row in rows] == [
        "cpus-0-x", "gpus-0-x", "gpus-1-x", "gpus-2-x", "gpus-3-x", "by-hand",
    ]  # fmt: skip
    assert [row.id for row in await everything(store.workers_page, fleet="cpus", limit=1)] == ["cpus-0-x"]
    for slot in (1, 2):
        await sql.execute(
            "update windlass.workers set status = 'terminated', terminated_at = $1 where id = $2",
            clock() + timedelta(seconds=slot), f"gpus-{slot}-x",
        )  # fmt: skip
    ended = await everything(store.workers_page, status=WorkerStatus.TERMINATED, limit=1)
    assert [row.id for row in ended] == ["gpus-2-x", "gpus-1-x"]
    assert len(await everything(store.workers_page, limit=3)) == 4


async def test_worker_row_has_running_tasks_and_cost(store: Store, sql: Any, clock: Any) -> None:
    await add_fleet(sql)
    since = clock() - timedelta(minutes=80)
    priced = {"price_micros_per_hour": 100_000, "currency": "EUR", "billing_unit_s": 3600, "billed_since": since}
    await add_worker(sql, 0, **priced, vram_total_mb=80, vram_used_mb=20)
    await sql.execute("update windlass.slots set restart_count = 2 where slot = 0")
    task_id = await store.enqueue(new_task("a"))
    await store.claim("gpus-0-x", ["a"])
    await sql.execute("update windlass.tasks set progress = 0.25, progress_note = 'frame 25'")
    clock.advance(12)
    row = await store.worker_row("gpus-0-x")
    assert row is not None
    assert (row.task_id, row.task_progress, row.task_note, row.running_tasks) == (task_id, 0.25, "frame 25", 1)
    assert (row.restarts, row.heartbeat_age_s, row.is_silent) == (2, 12, False)
    assert row.bill is not None
    meter = read_meter(row.bill, clock())
    assert (meter.cost_micros, meter.left_s) == (200_000, 40 * 60 - 12)
    assert await store.worker_row("unknown") is None


async def fill(store: Store, sql: Any, clock: Any) -> dict[str, list[int]]:
    """Tasks in each state, by the list that should contain them, in its order."""
    await add_fleet(sql)
    await store.register(Registration("hand", ("a", "b"), concurrency=100))
    low, high = [await store.enqueue(new_task("a", priority=priority)) for priority in (0, 5)]
    other = await store.enqueue(new_task("b", unique_key="order-17"))
    later = [await store.enqueue(new_task("a", run_after=clock() + timedelta(hours=hours))) for hours in (2, 1)]
    ids = {"queued": [high, low, other], "scheduled": [later[1], later[0]]}
    for name, status in (("error", "error"), ("running", "running"), ("complete", "complete"), ("failed", "failed")):
        ids[name] = []
        for number in range(3):
            task_id = await store.enqueue(new_task("b"))
            ids[name].append(task_id)
            clock.advance(1)
            await sql.execute(
                "update windlass.tasks set status = $2, run_after = $3, finished_at = $4, worker_id = 'hand',"
                " claim_token = gen_random_uuid(), started_at = created_at, error = $5, error_code = $6 where id = $1",
                task_id,
                status,
                clock() if status == "error" else None,
                clock() if status in ("complete", "failed") else None,
                f"Traceback\nValueError: broken {number}" if status == "failed" else None,
                "HANDLER_ERROR" if status == "failed" else None,
            )
    for name in ("running", "complete", "failed"):
        ids[name].reverse()
    cancelled = await store.enqueue(new_task("b"))
    await store.cancel_task(cancelled, "not needed")
    return {**ids, "cancelled": [cancelled]}


async def test_each_task_list_has_its_tasks_in_order(store: Store, sql: Any, clock: Any) -> None:
    ids = await fill(store, sql, clock)
    for which in TaskList:
        rows = await everything(store.tasks_page, which=which, limit=1)
        assert [row.id for row in rows] == ids[which], which
        assert [row.id for row in await everything(store.tasks_page, which=which, queue="unknown")] == []
    newest = await everything(store.tasks_page, limit=2)
    assert [row.id for row in newest] == sorted((i for found in ids.values() for i in found), reverse=True)
    of_a = await everything(store.tasks_page, queue="a", limit=2)
    assert {row.queue for row in of_a} == {"a"}
    assert len(of_a) == 4


async def test_task_detail_has_time_it_became_claimable(store: Store, clock: Any) -> None:
    await store.register(Registration("hand", ("a",)))
    due = clock() + timedelta(seconds=60)
    task_id = await store.enqueue(new_task("a", {"b": 1}, run_after=due))
    clock.advance(90)
    await store.claim("hand", ["a"])
    found, known = await store.task_in_full(task_id), await store.task(task_id)
    assert found is not None
    assert known is not None
    assert {name: getattr(found, name) for name in Task.__dataclass_fields__} == asdict(known)
    assert found.ready_at == due
    assert await store.task_in_full(task_id + 1) is None


async def test_retrying_task_waits_for_the_end_of_its_back_off(store: Store, sql: Any, clock: Any) -> None:
    task_id = await store.enqueue(new_task("a"))
    due = clock() + timedelta(seconds=60)
    retry = "update windlass.tasks set status = 'error', attempts = 1, run_after = $2 where id = $1"
    await sql.execute(retry, task_id, due)
    clock.advance(90)
    (row,) = (await store.tasks_page(which=TaskList.ERROR)).rows
    detail = await store.task_in_full(task_id)
    assert detail is not None
    assert (row.ready_at, detail.ready_at) == (due, due)


async def test_tasks_are_found_by_id_key_code_and_error_text(store: Store, sql: Any, clock: Any) -> None:
    ids = await fill(store, sql, clock)

    async def found(search: str, **question: Any) -> list[int]:
        return [row.id for row in await everything(store.tasks_page, search=search, **question)]

    assert await found(str(ids["complete"][0])) == [ids["complete"][0]]
    assert await found(str(ids["complete"][0]), which=TaskList.FAILED) == []
    assert await found("order-17") == [ids["queued"][2]]
    assert await found("order-") == [ids["queued"][2]]
    assert await found("order-17", queue="a") == []
    assert await found("handler_error", which=TaskList.FAILED, limit=1) == ids["failed"]
    assert await found("BROKEN 1") == [ids["failed"][1]]
    assert await found("%") == []
    assert await found("9" * 30) == []


async def test_search_continues_at_its_cursor(
    store: Store, sql: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_lists, "SCAN_LIMIT", 4)
    needle = await store.enqueue(new_task("rare"))
    for _ in range(10):
        await store.enqueue(new_task("common"))
    # The search continues by itself for a limited time.
    assert [row.id for row in (await store.tasks_page(queue="rare", limit=1)).rows] == [needle]
    assert [row.id for row in (await store.tasks_page(queue="rare", limit=2)).rows] == [needle]
    monkeypatch.setattr(task_lists, "SEARCH_S", 0.0)
    first = await store.tasks_page(queue="rare", limit=1)
    assert first.rows == ()
    assert first.next_cursor is not None
    assert [row.id for row in await everything(store.tasks_page, queue="rare", limit=1)] == [needle]


@pytest.mark.parametrize("which", [TaskList.QUEUED, TaskList.SCHEDULED])
@pytest.mark.parametrize("queue", [None, "b"])
@pytest.mark.parametrize("patience_s", [0.0, 60.0])
async def test_search_of_queued_tasks_finds_each_once_in_order(
    store: Store, clock: Any, monkeypatch: pytest.MonkeyPatch, which: TaskList, queue: str | None, patience_s: float
) -> None:
    """However many tasks of other queues come before and after it."""
    monkeypatch.setattr(task_lists, "SEARCH_LIMIT", 4)
    monkeypatch.setattr(task_lists, "SEARCH_S", patience_s)
    start = datetime(2040, 1, 1, tzinfo=UTC)
    wanted: list[int] = []
    for number in range(30):
        name = "b" if queue is not None or number % 5 else "a"
        is_wanted = number in (0, 3, 11, 12, 25, 29)
        due = {} if which is TaskList.QUEUED else {"run_after": start + timedelta(minutes=number // 2)}
        task = new_task(name, unique_key=f"needle-{number}" if is_wanted else None, priority=-(number // 10), **due)
        task_id = await store.enqueue(task)
        wanted += [task_id] if is_wanted else []
    for limit in (1, 2, 10):
        found = await everything(store.tasks_page, which=which, queue=queue, search="needle", limit=limit)
        assert [row.id for row in found] == wanted, limit


async def test_events_and_cycles_are_listed_newest_first(store: Store, sql: Any, clock: Any) -> None:
    for number in range(5):
        await sql.execute(
            "select windlass_internal.add_event($1, 'x', $2, 'w', null)",
            f"CODE_{number % 2}",
            "gpus" if number < 4 else "cpus",
        )
        await sql.execute(
            "insert into windlass.cycles (fleet, term, started_at, snapshot, plan, decision)"
            " values ('gpus', 1, windlass.now(), '{}', '[]', $1)",
            f"decision {number}",
        )
    events = await everything(store.events_page, limit=2)
    assert [event.id for event in events] == [5, 4, 3, 2, 1]
    assert [event.id for event in await everything(store.events_page, code="CODE_0", fleet="gpus", limit=1)] == [3, 1]
    assert [event.id for event in await store.events_after(3, 10)] == [4, 5]
    assert [cycle.decision for cycle in await everything(store.cycles_page, fleet="gpus", limit=2)] == [
        f"decision {number}" for number in (4, 3, 2, 1, 0)
    ]
    assert (await store.overview()).last_event_id == 5


async def test_changes_leave_out_cycles_that_only_repeat_a_decision(store: Store, sql: Any, clock: Any) -> None:
    await add_fleet(sql)
    await sql.execute("select windlass_internal.acquire_lease('orchestrator', 'me', 3600)")
    (term,) = await sql.fetchrow("select term from windlass.leases where name = 'orchestrator'")
    for decision in (
        *("steady: 3 queued", "steady: 4 queued", "spawn 2: 9 queued", "spawn 3: 12 queued", "steady: 0 queued"),
        *("hold: failure rate 5 of 5", "hold: failure rate 6 of 6", "steady: 1 queued"),
    ):
        clock.advance(10)
        actions = '[{"kind": "alert", "code": "X", "reason": "y"}]' if decision.startswith("spawn") else "[]"
        await sql.execute(
            "select windlass_internal.commit_plan('orchestrator', 'me', $1, 'gpus',"
            " json_build_object('now', $4::timestamptz), $2::jsonb, '{}', $3, '[]')",
            term, actions, decision, clock(),
        )  # fmt: skip
    changes = [cycle.decision for cycle in await everything(store.cycles_page, is_changes_only=True, limit=2)]
    assert changes[::-1] == [
        "steady: 3 queued",
        "spawn 2: 9 queued",
        "spawn 3: 12 queued",
        "steady: 0 queued",
        "hold: failure rate 5 of 5",
        "steady: 1 queued",
    ]
    assert len(await everything(store.cycles_page, fleet="gpus")) == 8
    since = await store.cycles_page(fleet="gpus", is_changes_only=True, since=clock() - timedelta(seconds=25))
    assert [cycle.decision for cycle in since.rows] == ["steady: 1 queued", "hold: failure rate 5 of 5"]
    await sql.execute(
        "insert into windlass.cycles (fleet, term, started_at, snapshot, plan, decision, is_change)"
        " select 'gpus', 1, windlass.now(), '{}', '[]', 'steady', false from generate_series(1, 20000)"
    )
    await sql.execute("vacuum analyze windlass.cycles")
    query = reading.QUERIES["changes_page"]
    plan = "\n".join(row[0] for row in await sql.fetch(f"explain {query}", None, None, 50, None))
    assert "cycles_changes" in plan, plan


@pytest.mark.parametrize("cursor", ["x", "W10", "WzFd" * 2, "é", "bnVsbA", "WyJhIiwgMSwgImIiXQ", "WzFlNDBd"])
async def test_invalid_cursor_is_refused(store: Store, cursor: str) -> None:
    with pytest.raises(BadInput, match=r"invalid cursor"):
        await store.tasks_page(cursor=cursor)


# ------------------------------------------------------------------------------------------------------ query plans


async def test_no_list_reads_the_whole_table(store: Store, sql: Any, dsn: str) -> None:
    """With statistics of a large table PostgreSQL must use an index for every frequent query."""
    await sql.execute(
        "insert into windlass.tasks (queue, status, attempts, started_at, finished_at)"
        " select 'a', 'complete', 1, windlass.now(), windlass.now() - g * interval '1 ms'"
        " from generate_series(1, 30000) as g"
    )
    await sql.execute(
        "insert into windlass.tasks (queue, priority) select 'a', g % 3 from generate_series(1, 20000) as g"
    )
    await sql.execute("vacuum analyze windlass.tasks")
    plans = {
        "tasks_newest": (None, None, 50, 50, None, []),
        "tasks_running": (None, None, None, 50, []),
        "tasks_complete": (None, None, 50, 50, None, None, None, []),
        "tasks_failed": (None, None, 50, 50, None, None, False, []),
        "tasks_queued": (["a"], None, 50, 50, None, None, []),
        "tasks_scheduled": (["a"], None, 50, 50, None, None, "error", []),
        "recent_completions": (20_000, 500, 300.0, 30.0),
        "running_by_queue": (),
    }
    for name, arguments in plans.items():
        query = {**reading.QUERIES, **task_lists.QUERIES}[name]
        plan = "\n".join(row[0] for row in await sql.fetch(f"explain {query}", *arguments))
        assert "Seq Scan on tasks" not in plan, f"{name}:\n{plan}"
    (first,) = await sql.fetchrow("select min(id) from windlass.tasks where status = 'queued' and priority = 2")
    plan = "\n".join(
        row[0]
        for row in await sql.fetch(f"explain (analyze, timing off) {fleets.QUERIES['tasks_ahead']}", first, 10_001)
    )
    # It is the next task, and none of the thousands after it is read.
    assert "Rows Removed by Filter" not in plan, plan
    assert "Seq Scan on tasks" not in plan, plan


async def test_queued_tasks_are_counted_up_to_a_limit(store: Store, sql: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "COUNT_LIMIT", 10)
    await sql.execute("insert into windlass.tasks (queue) select 'a' from generate_series(1, 25)")
    assert (await store.overview()).queues["a"].queued == 10
    assert len(await everything(store.tasks_page, which=TaskList.QUEUED, limit=10)) == 25


async def test_unserved_queues_are_listed_up_to_a_limit(store: Store, sql: Any) -> None:
    await add_fleet(sql, queues="{zz-served}")
    await sql.execute("insert into windlass.tasks (queue) select 'made-up-' || g from generate_series(1, 1500) as g")
    seen = await store.overview()
    assert len(seen.queues) == MAX_QUEUES + 1
    assert seen.queues["zz-served"].queued == 0
    assert seen.has_more_queues
    assert len(await store.known_queues()) <= 2_001
    assert len((await store.tasks_page(which=TaskList.QUEUED, limit=500)).rows) == MAX_QUEUES
    # Each is found by its name.
    hidden = next(name for name in (f"made-up-{n}" for n in range(1, 1501)) if name not in seen.queues)
    assert len((await store.tasks_page(queue=hidden, which=TaskList.QUEUED)).rows) == 1
    await sql.execute("delete from windlass.tasks where queue <> 'made-up-1'")
    assert not (await store.overview()).has_more_queues


async def test_statuses_have_the_types_of_the_model(store: Store, sql: Any, clock: Any) -> None:
    await fill(store, sql, clock)
    assert {row.status for row in await everything(store.tasks_page)} == set(TaskStatus)
