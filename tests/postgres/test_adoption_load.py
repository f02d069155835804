"""Adopted tables under load: concurrent writers, killed backfills, killed workers. Nothing is lost or run twice."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.adopted_tables import (
    ALICE,
    BOB,
    GPU_TASKS,
    SUPABASE_CONFIG,
    adopted_renders,
    create_supabase_table,
    signed_in,
)
from support.adopted_worker import BATCH
from support.command_line import CommandLine
from support.queue_sql import connected, connections
from windlass.model.adoption import AdoptionConfig
from windlass.store import adoption

WORKER = Path(__file__).parents[1] / "support" / "adopted_worker.py"
# Generous: on a quiet machine all of it takes less than half a minute.
LIMIT_S = 300.0
EXISTING, NEW = 60_000, 40_000
WRITERS = 4
SUPABASE_TOML = """
[adopt.jobs]
payload = "input"
[adopt.jobs.columns]
status = "status"
result = "output"
error = "error"
owner = "user_id"
[adopt.jobs.states]
queued = "queued"
running = "processing"
complete = "succeeded"
failed = "failed"
cancelled = "canceled"
"""
# Every run of a handler, and every time that a row becomes complete, by any writer.
RECORDS = """
create table public.runs (task_id bigint not null, worker_id text not null);
create table public.completions (id uuid not null);
create function public.record_completion() returns trigger language plpgsql security definer
as 'begin insert into public.completions values (new.id); return null; end';
create trigger record_completion after update on public.{table}
  for each row when (new.status = '{complete}' and old.status <> '{complete}')
  execute function public.record_completion()
"""
KILLED = ["first", "second"]
# A worker may run a task again that a killed one had claimed, and no other.
RUN_TWICE = """
select r.task_id, array_agg(r.worker_id) as workers, (
    select array_agg(e.code || coalesce(' ' || e.reason, '') order by e.id) from windlass.events e
    where e.task_id = r.task_id
  ) as events
from public.runs as r
group by r.task_id
having count(*) filter (where r.worker_id = any ($1)) > 1 or count(*) filter (where r.worker_id <> all ($1)) > 1
limit 10
"""


@dataclass(frozen=True)
class LoadedTable:
    name: str
    config: AdoptionConfig
    toml: str
    complete: str
    create: Callable[[Any], Awaitable[None]]
    # Inserts the given number of rows. Users of the last do so in the way of the app.
    insert: str
    users: tuple[str, ...]


async def create_gpu_tasks(sql: Any) -> None:
    await sql.execute(GPU_TASKS)


TABLES = [
    LoadedTable(
        "tasks",
        AdoptionConfig(),
        "[adopt.tasks]\n",
        "Complete",
        create_gpu_tasks,
        "insert into public.tasks (params) select jsonb_build_object('n', n) from generate_series(1, $1::integer) n",
        (),
    ),
    LoadedTable(
        "jobs",
        SUPABASE_CONFIG,
        SUPABASE_TOML,
        "succeeded",
        create_supabase_table,
        "insert into public.jobs (user_id, input)"
        " select $2, jsonb_build_object('n', n) from generate_series(1, $1::integer) n",
        (ALICE, BOB),
    ),
]


@contextmanager
def workers(dsn: str, queue: str, *names: str) -> Iterator[dict[str, "subprocess.Popen[bytes]"]]:
    started = {name: subprocess.Popen([sys.executable, str(WORKER), dsn, name, queue]) for name in names}
    try:
        yield started
    finally:
        for process in started.values():
            process.kill()
            process.wait()


async def wait_for(sql: Any, query: str, description: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not await sql.fetchval(query):
        assert time.monotonic() < deadline, f"not within {LIMIT_S:g} s: {description}"
        await asyncio.sleep(0.1)


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("table", TABLES, ids=["GPU orchestrator", "Supabase with row security"])
async def test_100_000_rows_are_run_and_completed_once_despite_crashes(
    dsn: str, tmp_path: Path, table: LoadedTable
) -> None:
    (tmp_path / "windlass.toml").write_text(table.toml)
    windlass = CommandLine(tmp_path, {"DATABASE_URL": dsn})
    async with connected(dsn) as sql:
        await table.create(sql)
        for user in table.users or (None,):
            await sql.execute(table.insert, EXISTING // (len(table.users) or 1), *([user] if user else []))
        await sql.execute(RECORDS.format(table=table.name, complete=table.complete))
        assert windlass("db", "adopt", table.name, "--apply").code == 0

        async def write(number: int) -> None:
            for _ in range(NEW // WRITERS // 100):
                if table.users:
                    user = table.users[number % len(table.users)]
                    async with signed_in(dsn, user) as app:
                        await app.execute(table.insert, 100, user)
                else:
                    await writers[number].execute(table.insert, 100)

        async with connections(dsn, WRITERS) as writers:
            with workers(dsn, table.name, *KILLED, "third", "fourth") as started:
                writing = asyncio.gather(*map(write, range(WRITERS)))
                backfill = ("db", "adopt", table.name, "--backfill")
                killed = windlass.start(*backfill, stdout=subprocess.DEVNULL)
                await wait_for(sql, "select backfilled >= 5000 from windlass.adoptions", "the backfill begins")
                killed.kill()
                assert killed.wait() == -signal.SIGKILL
                assert await sql.fetchval("select backfilled_at is null from windlass.adoptions"), "it had finished"
                for name in KILLED:
                    os.kill(started[name].pid, signal.SIGKILL)
                # Two at once continue where it ended.
                backfills = [windlass.start(*backfill, stdout=subprocess.PIPE) for _ in range(2)]
                outputs = [await asyncio.to_thread(process.communicate) for process in backfills]
                assert [process.returncode for process in backfills] == [0, 0], outputs
                await writing
                done = f"select count(*) = 100000 from public.{table.name} where status = '{table.complete}'"  # noqa: S608
                await wait_for(sql, done, "all rows are complete")

        assert await sql.fetchval("select backfilled from windlass.adoptions") >= EXISTING
        assert await sql.fetchval("select count(*) = count(distinct id) and count(*) = 100000 from public.completions")
        assert await sql.fetchval("select count(distinct task_id) from public.runs") == 100_000
        assert [dict(row) for row in await sql.fetch(RUN_TWICE, KILLED)] == []
        tasks = await sql.fetchrow(
            "select count(*) as count, count(*) filter (where status = 'complete') as complete,"
            " max(attempts) as attempts, count(*) filter (where attempts > 1) as repeated from windlass.tasks"
        )
        assert (tasks["count"], tasks["complete"], tasks["attempts"]) == (100_000, 100_000, 2)
        assert 0 < tasks["repeated"] <= len(KILLED) * BATCH, "what the killed workers had claimed"
        assert await sql.fetchval("select count(*) from windlass.deferred_rows") == 0
        (compared,) = await adoption.compare(dsn, {table.name: table.config})
        assert (compared.differences, compared.is_backfilled, compared.is_outdated) == ({}, True, False)
        for user in table.users:
            async with signed_in(dsn, user) as app:
                seen = f"select count(*) from public.{table.name}"  # noqa: S608
                assert await app.fetchval(seen) == 100_000 / len(table.users)


@pytest.mark.timeout(2 * LIMIT_S)
async def test_owners_and_workers_in_any_order_never_deadlock(each_dsn: str) -> None:
    rows, rounds, seed = 200, 60, 20
    async with adopted_renders(each_dsn) as renders, connections(each_dsn, 8) as sessions:
        await renders.sql.execute(
            "insert into public.renders (prompt) select n::text from generate_series(1, $1) n", rows
        )

        async def own(sql: Any, chance: random.Random) -> None:
            """Change several rows in one transaction, in a random order."""
            for _ in range(rounds):
                async with sql.transaction():
                    # One owner at a time may hold a row, so that owners do not deadlock with each other.
                    locked = "select id from public.renders order by random() limit 10 for update skip locked"
                    keys = [row["id"] for row in await sql.fetch(locked)]
                    chance.shuffle(keys)
                    for key in keys:
                        state = chance.choice(["stopped", "waiting", "waiting", "draft"])
                        await sql.execute("update public.renders set state = $2 where id = $1", key, state)
                        await sql.execute("update public.renders set prompt = prompt || '.' where id = $1", key)

        async def work(sql: Any, chance: random.Random, worker_id: str) -> None:
            """Complete or fail several tasks in one transaction, in a random order."""
            await sql.execute("select windlass.register_worker($1, 'default', '{renders}')", worker_id)
            for _ in range(rounds):
                claims = await sql.fetch("select * from windlass.claim_tasks($1, '{renders}', 10)", worker_id)
                chance.shuffle(claims)
                async with sql.transaction():
                    for claim in claims:
                        call = chance.choice(
                            ["windlass.complete_task($1, $2, $3)", "windlass.fail_task($1, $2, $3, 'boom')"]
                        )
                        await sql.execute(f"select {call}", worker_id, claim["task_id"], claim["token"])
                await sql.execute("select windlass_internal.settle_rows()")

        await asyncio.gather(
            *(own(sql, random.Random(seed + n)) for n, sql in enumerate(sessions[:4])),  # noqa: S311
            *(work(sql, random.Random(seed - n), f"w{n}") for n, sql in enumerate(sessions[4:], 1)),  # noqa: S311
        )
        deadlocks = "select deadlocks from pg_stat_database where datname = current_database()"
        await renders.sql.execute("select pg_stat_clear_snapshot()")
        assert await renders.sql.fetchval(deadlocks) == 0
        for _ in range(10):
            await renders.settle()
        assert (await renders.deferred(), await renders.differences()) == (0, [])
