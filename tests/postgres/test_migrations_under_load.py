"""Migrations while workers claim: short locks, retries, steps, and the way back."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from support.queue_sql import connected
from windlass.model.errors import DatabaseUnavailable, SchemaMismatch
from windlass.store import migration as module
from windlass.store.export_sql import script
from windlass.store.migration import LATEST_VERSION, MIGRATIONS, Migration, applied_migrations, migrate, rollback

LIMIT_S = 90.0
NEXT = LATEST_VERSION + 1
# Needs the whole table for a moment.
ADD_COLUMN = Migration(
    NEXT,
    "add_column",
    "alter table windlass.tasks add column colour text;\n-- rollback\nalter table windlass.tasks drop column colour;",
)
STEPWISE = Migration(
    NEXT,
    "stepwise",
    """
alter table windlass.tasks add column if not exists colour text;
alter table windlass.tasks alter column colour set default 'red';
-- step: batches
update windlass.tasks set colour = 'red'
where id in (select id from windlass.tasks where colour is null order by id limit 300 for update skip locked);
-- step: statement
create index concurrently if not exists tasks_colour on windlass.tasks (colour)
-- step: transaction
comment on column windlass.tasks.colour is 'filled';
""",
)
UNDOABLE_NOT = Migration(NEXT, "one_way", "create table windlass.one_way (id integer)")


def pretend(monkeypatch: pytest.MonkeyPatch, *migrations: Migration) -> None:
    monkeypatch.setattr(module, "MIGRATIONS", [*MIGRATIONS, *migrations])
    monkeypatch.setattr(module, "LATEST_VERSION", migrations[-1].version)


@pytest.fixture
async def dsn(empty_dsn: str) -> str:
    await migrate(empty_dsn)
    return empty_dsn


@asynccontextmanager
async def claims(dsn: str, waits_s: list[float]) -> AsyncIterator[None]:
    """A worker that enqueues, claims and completes as fast as it can. `waits_s` gets the duration of each round."""
    async with connected(dsn) as connection:
        await connection.execute("select windlass.register_worker('w', 'default', array['q'])")

        async def work() -> None:
            while True:
                started = time.monotonic()
                await connection.execute("select windlass.enqueue('q')")
                task = await connection.fetchrow("select task_id, token from windlass.claim_task('w', array['q'])")
                if task is not None:  # a batch may hold the row for a moment
                    await connection.execute("select windlass.complete_task('w', $1, $2, '1')", *task)
                waits_s.append(time.monotonic() - started)

        working = asyncio.create_task(work())
        try:
            yield
            if working.done():
                working.result()
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)


async def column_names(connection: Any) -> set[str]:
    rows = await connection.fetch(
        "select column_name from information_schema.columns where table_schema = 'windlass' and table_name = 'tasks'"
    )
    return {row[0] for row in rows}


async def test_migration_never_blocks_workers_beyond_its_limit(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report holds the table. The migration waits behind it, and workers behind the migration: briefly."""
    pretend(monkeypatch, ADD_COLUMN)
    monkeypatch.setattr(module, "TABLE_LOCK_TIMEOUT_S", 1)
    waits_s: list[float] = []
    async with connected(dsn) as report, connected(dsn) as watcher, claims(dsn, waits_s):
        holding = report.transaction()
        await holding.start()
        await report.fetchval("select count(*) from windlass.tasks")
        migrating = asyncio.create_task(migrate(dsn))
        # Wait until the migration has timed out and let workers continue three times.
        waited, was_waiting = 0, False
        async with asyncio.timeout(LIMIT_S):
            while waited < 3:
                is_waiting = await watcher.fetchval(
                    "select exists (select from pg_locks where relation = 'windlass.tasks'::regclass and not granted"
                    " and mode = 'AccessExclusiveLock')"
                )
                waited += was_waiting and not is_waiting
                was_waiting = is_waiting
                await asyncio.sleep(0.02)
        rounds = len(waits_s)
        assert not migrating.done()
        await holding.rollback()
        assert [migration.name for migration in await asyncio.wait_for(migrating, LIMIT_S)] == ["add_column"]
        assert "colour" in await column_names(watcher)
    assert rounds > 3, "workers went on between the attempts"
    # The lock's limit, and a generous allowance for a busy machine.
    assert max(waits_s) < 1 + 10
    assert sum(wait_s > 0.9 for wait_s in waits_s) <= 2 * waited + 4


async def test_migration_gives_up_with_a_sentence(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, ADD_COLUMN)
    monkeypatch.setattr(module, "TABLE_LOCK_TIMEOUT_S", 0.05)
    monkeypatch.setattr(module, "TABLE_LOCK_ATTEMPTS", 2)
    async with connected(dsn) as report, report.transaction():
        await report.fetchval("select count(*) from windlass.tasks")
        with pytest.raises(DatabaseUnavailable) as refusal:
            await migrate(dsn)
        assert "in use in all of 2 attempts, and nothing was changed. End long transactions" in str(refusal.value)
        assert "colour" not in await column_names(report)
    assert [migration.name for migration in await migrate(dsn)] == ["add_column"]


async def test_steps_run_one_by_one_while_workers_claim(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, STEPWISE)
    waits_s: list[float] = []
    async with connected(dsn) as connection, claims(dsn, waits_s):
        await connection.execute("select windlass.enqueue('other') from generate_series(1, 1000)")
        assert [migration.name for migration in await migrate(dsn)] == ["stepwise"]
        left = "select count(*) from windlass.tasks where colour is null and queue = 'other'"
        assert await connection.fetchval(left) == 0
        assert await connection.fetchval(
            "select indisvalid from pg_index where indexrelid = 'windlass.tasks_colour'::regclass"
        )
        assert max(await applied_migrations(connection)) == NEXT
    assert await migrate(dsn) == []
    assert waits_s


async def test_interrupted_steps_continue(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, STEPWISE)
    run = module._run_step
    seen: list[str] = []

    async def interrupted(connection: Any, step: module.Step) -> None:
        seen.append(step.kind)
        if seen == ["transaction", "batches", "statement"]:
            raise RuntimeError("the program was killed")
        await run(connection, step)

    monkeypatch.setattr(module, "_run_step", interrupted)
    with pytest.raises(RuntimeError):
        await migrate(dsn)
    async with connected(dsn) as connection:
        assert max(await applied_migrations(connection)) == LATEST_VERSION, "not recorded before its last step"
    assert [migration.name for migration in await migrate(dsn)] == ["stepwise"]


async def test_exported_script_applies_all_steps_at_once(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, STEPWISE)
    async with connected(dsn) as connection:
        await connection.execute("select windlass.enqueue('other') from generate_series(1, 700)")
        await connection.execute(script([STEPWISE], "1.0", from_version=LATEST_VERSION))
        assert await connection.fetchval("select count(*) from windlass.tasks where colour is null") == 0
        assert max(await applied_migrations(connection)) == NEXT
    assert await migrate(dsn) == []


async def test_rollback_undoes_a_migration_with_tasks_under_way(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waits_s: list[float] = []
    async with connected(dsn) as connection, claims(dsn, waits_s):
        before = await column_names(connection)
        with monkeypatch.context() as newer:
            pretend(newer, ADD_COLUMN)
            await migrate(dsn)
            assert await column_names(connection) - before == {"colour"}
            assert [migration.name for migration in await rollback(dsn, LATEST_VERSION)] == ["add_column"]
            assert await rollback(dsn, LATEST_VERSION) == []
        assert await column_names(connection) == before
        # The older program works again, and can be upgraded again.
        assert await migrate(dsn) == []
        async with module.connected(dsn, "checking") as older:
            module.check_schema_version(max(await applied_migrations(older)))
    assert waits_s


async def test_migration_without_a_way_back_is_refused(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, UNDOABLE_NOT)
    await migrate(dsn)
    with pytest.raises(SchemaMismatch, match=f"migration {NEXT:04} cannot be undone: restore a backup"):
        await rollback(dsn, LATEST_VERSION)
    async with connected(dsn) as connection:
        assert max(await applied_migrations(connection)) == NEXT
