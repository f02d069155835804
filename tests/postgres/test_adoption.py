"""Adopted tables: what the owner of a row and Windlass do to it, on real PostgreSQL."""

import re
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from support.adopted_tables import ORCHESTRATOR_TABLES, RENDERS_CONFIG, AdoptedTable, adopted_renders
from support.queue_sql import connected
from windlass.model.adoption import AdoptionConfig
from windlass.store import adoption
from windlass.store.adoption_checks import check_table
from windlass.store.transport import open_postgres_transport


@pytest.fixture
async def renders(each_dsn: str) -> AsyncIterator[AdoptedTable]:
    async with adopted_renders(each_dsn) as table:
        yield table


# ------------------------------------------------------------------------------------------------------ the way in


async def test_row_and_task_are_added_in_one_transaction(renders: AdoptedTable) -> None:
    with pytest.raises(ZeroDivisionError):
        async with renders.sql.transaction():
            lost = await renders.add()
            assert await renders.task(lost)
            raise ZeroDivisionError
    assert await renders.task(lost) is None
    key = await renders.add("lighthouse", urgency=7)
    task = await renders.task(key)
    assert (task["queue"], task["status"], task["priority"]) == ("renders", "queued", 7)
    assert (task["payload"], task["max_attempts"]) == ('{"prompt": "lighthouse"}', 3)


async def test_only_queued_rows_become_tasks(renders: AdoptedTable) -> None:
    for state in ("done", "draft", "working"):
        assert await renders.task(await renders.add(state=state)) is None
    key = await renders.add(state="draft")
    await renders.set(key, state="waiting")
    assert (await renders.task(key))["status"] == "queued"


async def test_copied_rows_become_tasks(renders: AdoptedTable) -> None:
    records = [(f"p{n}",) for n in range(500)]
    await renders.sql.copy_records_to_table("renders", schema_name="public", records=records, columns=("prompt",))
    assert await renders.sql.fetchval("select count(*) from windlass.tasks where adoption = 'renders'") == 500


async def test_payload_that_is_too_large_refuses_the_row(renders: AdoptedTable) -> None:
    with pytest.raises(asyncpg.ProgramLimitExceededError, match="payload of this row has 1100"):
        await renders.add("x" * 1_100_000)


def documented_orchestrator_table() -> AdoptionConfig:
    page = (Path(__file__).parents[2] / "docs" / "adopt.md").read_text()
    (text,) = (block for block in re.findall(r"```toml\n(.*?)```", page, re.DOTALL) if '"Running"' in block)
    return AdoptionConfig(**tomllib.loads(text)["adopt"]["tasks"])


async def test_table_of_an_orchestrator_is_adopted_as_documented(each_dsn: str) -> None:
    config = documented_orchestrator_table()
    async with connected(each_dsn) as sql:
        await sql.execute(ORCHESTRATOR_TABLES)
        key = await sql.fetchval("insert into public.tasks (status) values ('Queued') returning id")
        assert not [found for found in await check_table(each_dsn, "tasks", config) if found.is_error]
        await adoption.apply(each_dsn, "tasks", config)
        assert [rows async for rows in adoption.backfill(each_dsn, "tasks")][-1] == 1
        await sql.execute("insert into public.tasks (status) values ('Complete'), ('Running'), ('Error'), (null)")
        await sql.execute("select windlass.register_worker('w', 'default', '{tasks}')")

        async def row() -> tuple[Any, ...]:
            found = await sql.fetchrow(
                "select status, attempts, worker_id, generation_started_at, generation_processed_at"
                " from public.tasks where id = $1",
                key,
            )
            status, attempts, worker, *times = found
            return (status, attempts, worker, *(time is not None for time in times))

        claim = "select * from windlass.claim_tasks('w', '{tasks}', 5)"
        (first,) = await sql.fetch(claim)
        assert await row() == ("Running", 1, None, True, False)
        await sql.fetchval("select windlass.fail_task('w', $1, $2, 'boom')", first["task_id"], first["token"])
        assert await row() == ("Error", 1, None, True, True)
        await sql.execute("update windlass.tasks set run_after = now() where status = 'error'")
        (second,) = await sql.fetch(claim)
        complete = "select windlass.complete_task('w', $1, $2, '{}')"
        assert await sql.fetchval(complete, second["task_id"], second["token"])
        assert await row() == ("Complete", 2, None, True, True)


async def test_check_names_the_columns_to_write_instead_of_the_defaults(each_dsn: str) -> None:
    async with connected(each_dsn) as sql:
        await sql.execute(ORCHESTRATOR_TABLES)
    config = documented_orchestrator_table()
    found = await check_table(each_dsn, "tasks", AdoptionConfig())
    (advice,) = (each.advice for each in found if each.check == "columns" and each.is_error)
    dropped, _, columns = advice.partition(", or add [adopt.tasks.columns] without worker: ")
    assert dropped == "drop the foreign key"
    assert tomllib.loads(columns.replace(", ", "\n")) == config.columns.model_dump(exclude_unset=True)
    states = [each.message for each in found if each.check == "states"]
    assert len(states) == 1
    assert states[0].endswith("task_status has no value 'In Progress'; it has Queued, Running, Complete, Error, Failed")


# ----------------------------------------------------------------------------------------------------- the way back


async def test_progress_and_result_reach_the_row(renders: AdoptedTable) -> None:
    key = await renders.add()
    (claim,) = await renders.claim()
    row = await renders.row(key)
    assert (row["state"], row["tries"], row["host"], row["done"]) == ("working", 1, "w", None)
    assert row["begun"] is not None
    held = f'[{{"task_id": {claim["task_id"]}, "token": "{claim["token"]}", "progress": 0.5}}]'
    await renders.sql.execute("select * from windlass.heartbeat('w', $1)", held)
    assert (await renders.row(key))["done"] == 0.5
    assert await renders.complete(claim, '{"url": "s3://x"}')
    row = await renders.row(key)
    assert (row["state"], row["output"], row["done"]) == ("done", '{"url": "s3://x"}', 1)
    assert row["ended"] is not None
    assert await renders.differences() == []


async def test_row_and_task_change_in_one_transaction(renders: AdoptedTable) -> None:
    key = await renders.add()
    (claim,) = await renders.claim()
    async with connected(renders.dsn) as other:
        transaction = renders.sql.transaction()
        await transaction.start()
        assert await renders.complete(claim)
        assert await renders.state(key) == "done"
        assert await other.fetchval("select state from public.renders") == "working"
        await transaction.rollback()
    assert (await renders.state(key), (await renders.task(key))["status"]) == ("working", "running")


async def test_failed_attempts_reach_the_row(renders: AdoptedTable) -> None:
    key = await renders.add()
    for attempt in (1, 2, 3):
        await renders.sql.execute("update windlass.tasks set run_after = now() where run_after is not null")
        (claim,) = await renders.claim()
        await renders.fail(claim, f"boom {attempt}")
        row = await renders.row(key)
        assert (row["tries"], row["code"], row["problem"]) == (attempt, "HANDLER_ERROR", f"boom {attempt}")
        assert row["state"] == ("again" if attempt < 3 else "broken")


async def test_cancel_and_retry_in_windlass_reach_the_row(renders: AdoptedTable) -> None:
    key = await renders.add()
    task_id = (await renders.task(key))["id"]
    assert await renders.sql.fetchval("select windlass.cancel_task($1, 'not needed')", task_id)
    row = await renders.row(key)
    assert (row["state"], row["code"], row["problem"]) == ("stopped", "CANCELLED", "not needed")
    assert await renders.sql.fetchval("select windlass.retry_task($1)", task_id)
    assert await renders.state(key) == "waiting"


async def test_task_of_a_lost_worker_returns_its_row_to_the_queue(renders: AdoptedTable) -> None:
    key = await renders.add()
    await renders.claim()
    await renders.sql.execute("select windlass_internal.terminate_worker('w', 'gone')")
    row = await renders.row(key)
    assert (row["state"], row["host"], row["tries"]) == ("waiting", None, 1)


# --------------------------------------------------------------------------------------------------- the owner acts


@pytest.mark.parametrize(
    ("before", "owner_sets", "task", "attempts"),
    [
        ("queued", "stopped", "failed", 0),
        ("queued", "draft", "failed", 0),
        # An old worker of the owner takes the row itself.
        ("queued", "working", "failed", 0),
        ("running", "stopped", "failed", 1),
        ("running", "broken", "failed", 1),
        ("running", "done", "failed", 1),
        ("error", "stopped", "failed", 1),
        ("running", "waiting", "queued", 0),
        ("error", "waiting", "queued", 0),
        ("failed", "waiting", "queued", 0),
        ("cancelled", "waiting", "queued", 0),
        ("complete", "waiting", "queued", 0),
        ("complete", "archived", "complete", 1),
        ("failed", "archived", "failed", 1),
    ],
)
async def test_owner_sets_the_status(
    renders: AdoptedTable, before: str, owner_sets: str, task: str, attempts: int
) -> None:
    key = await renders.add()
    claim = await renders.bring_to(key, before)
    await renders.set(key, state=owner_sets)
    after = await renders.task(key)
    assert (after["status"], after["attempts"]) == (task, attempts)
    assert await renders.state(key) == owner_sets, "the owner's status stays"
    assert (await renders.row(key))["tries"] == attempts
    if claim is not None and before == "running":
        assert not await renders.complete(claim), "the attempt has lost its claim"
    assert await renders.deferred() == 0
    assert await renders.differences() == []


@pytest.mark.parametrize("before", ["queued", "running", "error", "complete"])
async def test_deleted_row_withdraws_its_task(renders: AdoptedTable, before: str) -> None:
    key = await renders.add()
    await renders.bring_to(key, before)
    await renders.sql.execute("delete from public.renders")
    task = await renders.task(key)
    assert task["status"] == ("complete" if before == "complete" else "failed")
    assert before == "complete" or (task["error_code"], task["error"]) == ("CANCELLED", "its row was deleted")
    assert await renders.differences() == []
    # The same key again is another row.
    await renders.add("second", id=key)
    assert (await renders.task(key))["payload"] == '{"prompt": "second"}'
    (claim,) = await renders.claim()
    assert await renders.complete(claim)
    assert await renders.state(key) == "done"


async def test_truncated_table_withdraws_all_tasks(renders: AdoptedTable) -> None:
    for _ in range(5):
        await renders.add()
    await renders.claim(2)
    await renders.sql.execute("truncate public.renders")
    assert {row["status"] for row in await renders.sql.fetch("select status from windlass.tasks")} == {"failed"}


async def test_truncated_table_cancels_its_tasks_in_one_statement(renders: AdoptedTable) -> None:
    await renders.sql.execute(
        "create table public.statements (tasks bigint);"
        "create function public.note() returns trigger language plpgsql as $$"
        " begin insert into public.statements select count(*) from changed; return null; end $$;"
        "create trigger note after update on windlass.tasks referencing new table as changed"
        " for each statement execute function public.note()"
    )
    for _ in range(5):
        await renders.add()
    locked = await renders.add()
    async with connected(renders.dsn) as windlass, windlass.transaction():
        await windlass.execute("select from windlass.tasks where unique_key = $1 for update", str(locked))
        await renders.sql.execute("truncate public.renders")
        assert await renders.sql.fetchval("select count(*) from windlass.tasks where status = 'queued'") == 1
    assert [row["tasks"] for row in await renders.sql.fetch("select tasks from public.statements")] == [5]
    assert await renders.settle() == 1
    assert (await renders.task(locked))["error_code"] == "CANCELLED"
    cancelled = "select count(*) from windlass.events where code = 'TASK_CANCELLED'"
    assert await renders.sql.fetchval(cancelled) == 6


async def test_changed_key_moves_the_task(renders: AdoptedTable) -> None:
    key = await renders.add()
    await renders.set(key, id=key + 1000)
    assert (await renders.task(key))["status"] == "failed"
    assert (await renders.task(key + 1000))["status"] == "queued"


async def test_edited_payload_is_taken_over(renders: AdoptedTable) -> None:
    key = await renders.add("first")
    await renders.set(key, prompt="second", urgency=3)
    task = await renders.task(key)
    assert (task["payload"], task["priority"]) == ('{"prompt": "second"}', 3)
    (claim,) = await renders.claim()
    assert claim["payload"] == '{"prompt": "second"}'
    # The attempt that runs is not disturbed; the next one gets the new payload.
    await renders.set(key, prompt="third")
    assert await renders.fail(claim) == "error"
    await renders.sql.execute("select windlass.retry_task($1)", claim["task_id"])
    (claim,) = await renders.claim()
    assert claim["payload"] == '{"prompt": "third"}'
    await renders.set(key, prompt="fourth")
    assert await renders.complete(claim)
    row = await renders.row(key)
    assert (row["state"], row["prompt"]) == ("done", "fourth")
    # Columns that are no part of the task do not touch it.
    before = await renders.sql.fetchval("select xmin::text from windlass.tasks")
    await renders.set(key, views=9)
    assert await renders.sql.fetchval("select xmin::text from windlass.tasks") == before


async def test_row_that_a_completion_inserts_becomes_a_task(renders: AdoptedTable) -> None:
    await renders.sql.execute(
        "create function public.chain() returns trigger language plpgsql as $$ begin"
        " insert into renders (prompt) values ('next of ' || new.prompt); return null; end $$;"
        "create trigger chain after update on public.renders for each row"
        " when (new.state = 'done' and old.state <> 'done' and new.prompt = 'one') execute function public.chain()"
    )
    await renders.add("one")
    (claim,) = await renders.claim()
    assert await renders.complete(claim)
    (claim,) = await renders.claim()
    assert claim["payload"] == '{"prompt": "next of one"}'


async def test_rolled_back_change_of_the_owner_changes_nothing(renders: AdoptedTable) -> None:
    key = await renders.add()
    (claim,) = await renders.claim()
    transaction = renders.sql.transaction()
    await transaction.start()
    await renders.set(key, state="stopped")
    await transaction.rollback()
    assert await renders.complete(claim)
    assert await renders.state(key) == "done"


# ------------------------------------------------------------------------------------------------ locks and refusals


async def test_locked_row_does_not_stop_a_completion(renders: AdoptedTable) -> None:
    key = await renders.add()
    (claim,) = await renders.claim()
    async with connected(renders.dsn) as owner:
        async with owner.transaction():
            await owner.execute("select from public.renders for update")
            assert await renders.complete(claim)
            assert (await renders.task(key))["status"] == "complete"
            assert await renders.settle() == 0, "the row is still locked"
        assert await renders.state(key) == "working"
    assert await renders.settle() == 1
    row = await renders.row(key)
    assert (row["state"], row["output"], await renders.deferred()) == ("done", '{"ok": 1}', 0)


async def test_several_changes_of_a_locked_row_are_settled_at_once(renders: AdoptedTable) -> None:
    key = await renders.add()
    async with connected(renders.dsn) as owner, owner.transaction():
        await owner.execute("select from public.renders for update")
        (claim,) = await renders.claim()
        assert await renders.fail(claim, retry=False) == "failed"
    assert await renders.state(key) == "waiting"
    assert await renders.settle() >= 1
    assert (await renders.state(key), await renders.deferred()) == ("broken", 0)


async def test_owner_who_changed_a_locked_row_decides(renders: AdoptedTable) -> None:
    key = await renders.add()
    async with connected(renders.dsn) as owner, owner.transaction():
        await owner.execute("select from public.renders for update")
        await renders.claim()
        await owner.execute("update public.renders set state = 'stopped'")
    await renders.settle()
    assert (await renders.state(key), (await renders.task(key))["status"]) == ("stopped", "failed")
    assert await renders.deferred() == 0


@pytest.mark.parametrize(("owner_sets", "expected"), [("stopped", "failed"), ("waiting", "queued")])
async def test_locked_task_does_not_stop_the_owner(renders: AdoptedTable, owner_sets: str, expected: str) -> None:
    key = await renders.add()
    await renders.bring_to(key, "running" if owner_sets == "stopped" else "failed")
    async with connected(renders.dsn) as windlass:
        async with windlass.transaction():
            await windlass.execute("select from windlass.tasks for update")
            await renders.set(key, state=owner_sets)
            assert await renders.settle() == 0
        assert await renders.settle() == 1
    assert (await renders.state(key), (await renders.task(key))["status"]) == (owner_sets, expected)
    assert await renders.differences() == []


async def test_payload_edited_while_its_task_is_locked_is_taken_over(renders: AdoptedTable) -> None:
    key = await renders.add("first")
    async with connected(renders.dsn) as windlass:
        async with windlass.transaction():
            await windlass.execute("select from windlass.tasks for update")
            await renders.set(key, prompt="second")
        assert await renders.settle() == 1
    task = await renders.task(key)
    assert (task["status"], task["payload"]) == ("queued", '{"prompt": "second"}')


async def test_result_that_the_table_refuses_is_kept(renders: AdoptedTable) -> None:
    await renders.sql.execute("alter table public.renders add constraint small check (length(output::text) < 20)")
    key = await renders.add()
    (claim,) = await renders.claim()
    result = '{"url": "a long address"}'
    assert await renders.complete(claim, result)
    task = await renders.task(key)
    assert (task["status"], task["result"]) == ("complete", result)
    assert await renders.state(key) == "working"
    events = await renders.sql.fetch("select code, reason from windlass.events where task_id = $1", task["id"])
    assert [event["code"] for event in events] == ["ROW_REJECTED"]
    assert 'violates check constraint "small"' in events[0]["reason"]
    assert await renders.settle() == 0
    # Retention keeps a result that its row does not have yet.
    await renders.sql.execute("update windlass.tasks set finished_at = now() - interval '1 year'")
    await renders.sql.execute("select windlass.sweep(1, 1, 1, 1, 1, 1)")
    assert await renders.task(key)
    (compared,) = await adoption.compare(renders.dsn, {"renders": RENDERS_CONFIG})
    assert (compared.deferred, compared.differences) == (1, {})
    assert "small" in str(compared.deferred_reason)
    await renders.sql.execute("alter table public.renders drop constraint small")
    assert await adoption.repair(renders.dsn, "renders") == 1
    row = await renders.row(key)
    assert (row["state"], row["output"]) == ("done", result)


async def test_refused_row_of_a_batch_leaves_the_others_written(renders: AdoptedTable) -> None:
    await renders.sql.execute("alter table public.renders add constraint no_two check (tries = 0 or prompt <> 'two')")
    keys = [await renders.add(prompt) for prompt in ("one", "two", "three")]
    assert len(await renders.claim(3)) == 3
    assert [await renders.state(key) for key in keys] == ["working", "waiting", "working"]


async def test_maintenance_of_workers_settles_rows(renders: AdoptedTable) -> None:
    key = await renders.add()
    async with connected(renders.dsn) as owner, owner.transaction():
        await owner.execute("select from public.renders for update")
        await renders.claim()
    await renders.sql.execute("select * from windlass.heartbeat('w')")
    async with open_postgres_transport(renders.dsn) as transport:
        await transport.run_maintenance("w")
    assert await renders.state(key) == "working"


# ------------------------------------------------------------------------------------------------ compare and repair


async def test_differences_are_found_and_repaired(renders: AdoptedTable) -> None:
    keys = {
        name: await renders.add(name) for name in ("none", "gone", "stopped", "again", "finished", "behind", "same")
    }
    by_prompt = {claim["payload"]: claim for claim in await renders.claim(7)}

    def claim_of(name: str) -> Any:
        return by_prompt[f'{{"prompt": "{name}"}}']

    await renders.fail(claim_of("again"), retry=False)
    await renders.complete(claim_of("finished"))
    await renders.sql.execute("alter table public.renders disable trigger user")
    await renders.sql.execute("alter table windlass.tasks disable trigger adopt_renders")
    missing = await renders.add("missing")
    await renders.sql.execute("delete from public.renders where id = $1", keys["gone"])
    await renders.set(keys["stopped"], state="stopped")
    await renders.set(keys["again"], state="waiting")
    await renders.set(keys["finished"], state="waiting")
    await renders.complete(claim_of("behind"))
    await renders.sql.execute("alter table public.renders enable trigger user")
    await renders.sql.execute("alter table windlass.tasks enable trigger adopt_renders")

    (compared,) = await adoption.compare(renders.dsn, {})
    assert compared.differences == {"no row": 2, "no task": 1, "status": 3}
    assert await adoption.repair(renders.dsn, "renders") == 6
    assert await renders.differences() == []
    (compared,) = await adoption.compare(renders.dsn, {})
    assert (compared.differences, compared.deferred) == ({}, 0)
    statuses = {name: (await renders.task(key))["status"] for name, key in keys.items()}
    assert statuses == {
        "none": "running",
        "gone": "failed",
        "stopped": "failed",
        "again": "queued",
        "finished": "complete",
        "behind": "complete",
        "same": "running",
    }
    assert (await renders.task(missing))["status"] == "queued"
    assert (await renders.state(keys["finished"]), await renders.state(keys["behind"])) == ("done", "done")
