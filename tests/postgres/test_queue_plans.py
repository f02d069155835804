"""Query plans of the calls of workers: their cost does not grow with the number of finished tasks."""

import json
from typing import Any

import asyncpg
import pytest

from support.queue_sql import eventually, task_reads
from support.stores import PostgresStores
from windlass.model.task import TaskStatus
from windlass.store import tasks as task_store

FINISHED, RUNNING, SCHEDULED, READY = 20_000, 2_000, 2_000, 200


FILL = f"""
insert into windlass.tasks (queue, status, finished_at, started_at, worker_id, claim_token)
select 'q', case n % 9 when 0 then 'failed' else 'complete' end,
  now() - case n % 9 when 0 then interval '2 hours' else '0' end, now(), 'w', gen_random_uuid()
from generate_series(1, {FINISHED}) as n;
insert into windlass.tasks (queue, status, started_at, worker_id, claim_token)
select 'q', 'running', now(), 'busy', gen_random_uuid() from generate_series(1, {RUNNING}) as n;
insert into windlass.tasks (queue, run_after)
select 'q', now() + interval '1 hour' from generate_series(1, {SCHEDULED});
insert into windlass.tasks (queue, priority)
select case n % 4 when 0 then 'r' else 'q' end, n % 3 from generate_series(1, {READY}) as n;
"""  # noqa: S608


async def make_every_worker_call(connection: Any) -> None:
    """Every call of a worker. All claims are finished, so that it can be repeated."""
    claims = await connection.fetch("select * from windlass.claim_tasks('w', '{q}', 2)")
    claims += await connection.fetch("select * from windlass.claim_tasks('w', '{q,r}', 2)")
    held = [{"task_id": c["task_id"], "token": str(c["token"]), "progress": 0.5, "note": "half"} for c in claims]
    await connection.fetch("select * from windlass.heartbeat('w', $1)", json.dumps(held))
    await connection.fetch(
        "select * from windlass_internal.record_heartbeats($1, $2, $3, $4, $5, $6, $7, $8, $9)",
        ["w", "idle"],
        ["{}", "{}"],
        [0, 0],
        [2**63 - 1, 2**63 - 1],
        ["w" for _ in claims],
        [claim["task_id"] for claim in claims],
        [claim["token"] for claim in claims],
        [0.6 for _ in claims],
        ["more" for _ in claims],
    )
    for claim in claims[:1]:
        await connection.fetch("select windlass.fail_task('w', $1, $2, 'failed')", claim["task_id"], claim["token"])
    for claim in claims[1:2]:
        await connection.fetch("select windlass.release_task('w', $1, $2, 'no')", claim["task_id"], claim["token"])
    for claim in claims[2:3]:
        await connection.fetch("select windlass.complete_task('w', $1, $2)", claim["task_id"], claim["token"])
    rest = claims[3:]
    await connection.fetch(
        "select * from windlass.finish_and_claim('w', $1, $2, $3, '{q}', 0)",
        [claim["task_id"] for claim in rest],
        [claim["token"] for claim in rest],
        [None for _ in rest],
    )
    await connection.fetch("select windlass.next_run_after('{q,r}')")


async def run_maintenance(connection: Any) -> None:
    """Maintenance with nothing to delete: completed tasks are kept for an hour, dead letters for a month."""
    await connection.fetch("select * from windlass.recover_lost_workers('w')")
    await connection.fetch("select windlass.sweep(3600, 2592000, 3600, 3600, 3600, 3600)")


@pytest.mark.parametrize("plans", ["auto", "force_generic_plan"])
async def test_worker_calls_read_no_finished_tasks(connection: Any, second_connection: Any, plans: str) -> None:
    """Plans are cached while the table is empty, when PostgreSQL prefers a sequential scan."""
    await connection.execute(f"set plan_cache_mode = {plans}")
    await connection.execute("select windlass.register_worker(id) from unnest('{w,busy,idle}'::text[]) as id")
    for _ in range(8):
        await make_every_worker_call(connection)
        await run_maintenance(connection)
    await second_connection.execute(FILL)
    async with connection.transaction():
        await make_every_worker_call(connection)
        read = await task_reads(connection)
        await run_maintenance(connection)
        read_with_maintenance = await task_reads(connection)
    assert read["seq_scan"] == 0
    assert 0 < read["idx_tup_fetch"] < 100
    # Maintenance is rare and may read running tasks, but no finished ones.
    assert read_with_maintenance["seq_scan"] == 0
    assert read_with_maintenance["idx_tup_fetch"] < 100 + RUNNING


@pytest.mark.parametrize("plans", ["auto", "force_generic_plan"])
async def test_worker_calls_use_no_sequential_scan_of_tasks(
    connection: Any, second_connection: Any, plans: str
) -> None:
    try:
        await connection.execute("load 'auto_explain'")
    except asyncpg.UndefinedFileError:
        pytest.skip("this PostgreSQL has no auto_explain; other tests count the rows read")
    explained: list[str] = []
    connection.add_log_listener(lambda _, message: explained.append(message.message))
    await connection.execute(f"set plan_cache_mode = {plans}")
    await connection.execute("select windlass.register_worker(id) from unnest('{w,busy,idle}'::text[]) as id")
    for _ in range(8):
        await make_every_worker_call(connection)
        await run_maintenance(connection)
    await second_connection.execute(FILL)
    await second_connection.execute("analyze windlass.tasks")
    for setting in ("log_min_duration = 0", "log_nested_statements = on", "log_level = notice"):
        await connection.execute(f"set auto_explain.{setting}")
    await make_every_worker_call(connection)
    await run_maintenance(connection)

    async def is_logged() -> bool:
        return any("windlass.sweep(" in text for text in explained)

    await eventually(is_logged, "the last plan is logged")
    claims = [text for text in explained if "Index Scan using tasks_ready" in text]
    assert claims
    assert not [text for text in explained if "Seq Scan on tasks" in text]


async def test_many_judging_workers_read_the_workers_once_per_second(connection: Any) -> None:
    """Each worker judges at its own interval, and once reads all workers."""
    count = 200
    await connection.execute("select windlass.register_worker('w' || n) from generate_series(1, $1) as n", count)
    await connection.execute("select set_config('windlass.now', now()::text, false)")
    async with connection.transaction():
        for number in range(1, count + 1):
            judged = await connection.fetch("select * from windlass.recover_lost_workers($1)", f"w{number}")
            assert judged == []
        read = await connection.fetchval(
            "select seq_tup_read + idx_tup_fetch from pg_stat_xact_user_tables"
            " where schemaname = 'windlass' and relname = 'workers'"
        )
    assert count <= read < 10 * count


async def test_known_queues_reads_bounded_number_of_tasks(connection: Any, second_connection: Any) -> None:
    await second_connection.execute(FILL)
    await second_connection.execute("insert into windlass.tasks (queue) select 'q' from generate_series(1, 20000)")
    await second_connection.execute("insert into windlass.tasks (queue, run_after) values ('later', now())")
    await second_connection.execute("vacuum analyze windlass.tasks")
    async with connection.transaction():
        rows = await connection.fetch(task_store.QUERIES["known_queues"])
        read = await task_reads(connection)
    assert [row["queue"] for row in rows] == ["later", "q", "r"]
    assert read["seq_scan"] == 0
    assert read["idx_tup_fetch"] < RUNNING + 1_000 + 100


# Statistics of a queue that was almost empty when it was analyzed. Its pages stay, because the last one is in use.
DRAINED = """
alter table windlass.tasks set (autovacuum_enabled = off);
insert into windlass.tasks (queue) select 'q' from generate_series(1, 20000);
delete from windlass.tasks;
insert into windlass.tasks (queue, status, finished_at) values ('q', 'complete', now());
"""
CLAIMS = 1_000


async def test_calls_with_many_claims_look_each_up_after_the_queue_was_empty(
    connection: Any, second_connection: Any
) -> None:
    await second_connection.execute(DRAINED)
    await second_connection.execute("vacuum analyze windlass.tasks")
    await second_connection.execute("insert into windlass.tasks (queue) select 'q' from generate_series(1, $1)", CLAIMS)
    await second_connection.execute("insert into windlass.tasks (queue) select 'other' from generate_series(1, 10000)")
    await connection.execute("select windlass.register_worker('w')")
    await connection.execute("update windlass.workers set lease_s = 1")
    claims = await connection.fetch("select * from windlass.claim_tasks('w', '{q}', $1)", CLAIMS)
    assert len(claims) == CLAIMS
    await second_connection.execute(
        "update windlass.tasks set started_at = now() - interval '1 hour' where status = 'running'"
    )
    held = [{"task_id": c["task_id"], "token": str(c["token"]), "progress": 0.5} for c in claims[1:]]
    made_up = [{"task_id": c["task_id"], "token": "00000000-0000-0000-0000-000000000000"} for c in claims]
    await connection.execute("set statement_timeout = '60s'")

    async def tasks_read(call: str, *arguments: Any) -> int:
        async with connection.transaction():
            before = await task_reads(connection)
            await connection.fetch(call, *arguments)
            after = await task_reads(connection)
        return int(after["idx_tup_fetch"]) - int(before["idx_tup_fetch"])

    assert await tasks_read("select * from windlass.heartbeat('w', $1)", json.dumps([*held, *made_up])) < 8 * CLAIMS
    assert await second_connection.fetchval("select count(*) from windlass.tasks where progress = 0.5") == CLAIMS - 1
    finished = [[c["task_id"] for c in claims[1:]], [c["token"] for c in claims[1:]], ["1" for _ in claims[1:]]]
    assert (
        await tasks_read("select * from windlass.finish_and_claim('w', $1, $2, $3, '{q}', 0)", *finished) < 8 * CLAIMS
    )


@pytest.mark.parametrize("status", [TaskStatus.QUEUED, TaskStatus.RUNNING, TaskStatus.ERROR])
async def test_list_of_unfinished_tasks_reads_no_finished_ones(
    connection: Any, second_connection: Any, status: TaskStatus
) -> None:
    await second_connection.execute(FILL)
    await second_connection.execute("vacuum analyze windlass.tasks")
    async with connection.transaction():
        rows = await connection.fetch(
            task_store.QUERIES["unfinished_summaries"], "r", status, None, 50, status is TaskStatus.ERROR, 200
        )
        read = await task_reads(connection)
    assert {row["queue"] for row in rows} == ({"r"} if status is TaskStatus.QUEUED else set())
    assert read["seq_scan"] == 0
    assert read["idx_tup_fetch"] < RUNNING + SCHEDULED + READY + 100


async def test_search_of_finished_tasks_stops_and_continues(
    each_dsn: str, second_connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_store, "SCAN_LIMIT", 5_000)
    monkeypatch.setattr(task_store, "SEARCH_S", 0.0)
    await second_connection.execute("insert into windlass.tasks (queue) values ('rare')")
    await second_connection.execute(FILL)
    pages, before = [], None
    async with PostgresStores(each_dsn) as store:
        while True:
            page = await store.task_summaries(queue="rare", before_id=before)
            pages.append([task.id for task in page.rows])
            if page.next_cursor is None:
                break
            before = int(page.next_cursor)
    assert pages == [[], [], [], [], [1]]
