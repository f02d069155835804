"""Adopted tables under load: concurrent writers, killed backfills, killed workers. Nothing is lost or run twice."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.adopted_tables import GPU_TASKS, adopted_renders
from support.command_line import CommandLine
from support.queue_sql import connected, connections
from windlass.model.adoption import AdoptionConfig
from windlass.store import adoption

WORKER = Path(__file__).parents[1] / "support" / "adopted_worker.py"
# Generous: on a quiet machine all of it takes less than half a minute.
LIMIT_S = 300.0
EXISTING, NEW = 60_000, 40_000
# Every time that a row becomes complete, by any writer.
COMPLETIONS = """
create table public.completions (id uuid not null);
create function public.record_completion() returns trigger language plpgsql
as 'begin insert into public.completions values (new.id); return null; end';
create trigger record_completion after update on public.tasks
  for each row when (new.status = 'Complete' and old.status <> 'Complete') execute function public.record_completion()
"""


@contextmanager
def workers(dsn: str, *names: str) -> Iterator[dict[str, "subprocess.Popen[bytes]"]]:
    started = {name: subprocess.Popen([sys.executable, str(WORKER), dsn, name, "tasks"]) for name in names}
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
async def test_100_000_rows_are_completed_once_despite_crashes(dsn: str, tmp_path: Path) -> None:
    (tmp_path / "windlass.toml").write_text("[adopt.tasks]\n")
    windlass = CommandLine(tmp_path, {"DATABASE_URL": dsn})
    async with connected(dsn) as sql, connections(dsn, 4) as writers:
        await sql.execute(GPU_TASKS)
        insert = (
            "insert into public.tasks (params) select jsonb_build_object('n', n) from generate_series(1, $1::integer) n"
        )
        await sql.execute(insert, EXISTING)
        await sql.execute(COMPLETIONS)
        assert windlass("db", "adopt", "tasks", "--apply").code == 0

        async def write(connection: Any) -> None:
            for _ in range(NEW // 4 // 100):
                await connection.execute(insert, 100)

        with workers(dsn, "first", "second") as first:
            writing = asyncio.gather(*map(write, writers))
            killed = windlass.start("db", "adopt", "tasks", "--backfill", stdout=subprocess.DEVNULL)
            await wait_for(sql, "select backfilled >= 5000 from windlass.adoptions", "the backfill begins")
            killed.kill()
            assert killed.wait() == -signal.SIGKILL
            assert await sql.fetchval("select backfilled_at is null from windlass.adoptions"), "it had finished before"
            os.kill(first["first"].pid, signal.SIGKILL)
            # Two at once continue where it ended.
            backfills = [windlass.start("db", "adopt", "tasks", "--backfill", stdout=subprocess.PIPE) for _ in range(2)]
            outputs = [await asyncio.to_thread(process.communicate) for process in backfills]
            assert [process.returncode for process in backfills] == [0, 0], outputs
            os.kill(first["second"].pid, signal.SIGKILL)
            await writing
        with workers(dsn, "third", "fourth"):
            done = "select count(*) = 100000 from public.tasks where status = 'Complete'"
            await wait_for(sql, done, "all rows are complete")

        assert await sql.fetchval("select backfilled from windlass.adoptions") >= EXISTING
        assert await sql.fetchval("select count(*) = count(distinct id) and count(*) = 100000 from public.completions")
        tasks = await sql.fetchrow(
            "select count(*) as count, count(*) filter (where status = 'complete') as complete,"
            " max(attempts) as attempts from windlass.tasks"
        )
        assert (tasks["count"], tasks["complete"]) == (100_000, 100_000)
        assert tasks["attempts"] <= 3
        assert await sql.fetchval("select count(*) from windlass.tasks where attempts > 1") > 0, "no worker had claims"
        assert await sql.fetchval("select count(*) from windlass.deferred_rows") == 0
        (compared,) = await adoption.compare(dsn, {"tasks": AdoptionConfig()})
        assert (compared.differences, compared.is_backfilled, compared.is_outdated) == ({}, True, False)


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
