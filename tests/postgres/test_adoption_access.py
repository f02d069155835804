"""Adopted tables: rights, row security, names that need quoting, checks, removal."""

import json
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest

from support.adopted_tables import (
    ALICE,
    BOB,
    GPU_TASKS,
    RENDERS,
    RENDERS_CONFIG,
    SUPABASE_CONFIG,
    AdoptedTable,
    adopted_renders,
    create_role,
    create_supabase_table,
    dsn_of,
    signed_in,
)
from support.catalog import catalog
from support.queue_sql import RoleDsn, connected
from windlass.model.adoption import AdoptedColumns, AdoptedStates, AdoptionConfig, AdoptionFinding
from windlass.model.errors import BadInput, WindlassError
from windlass.store import adoption
from windlass.store.adoption_checks import check_table
from windlass.store.adoption_script import apply_script
from windlass.store.export_sql import ROLES
from windlass.store.migration import migrate


@pytest.fixture
async def supabase(each_dsn: str, role_dsn: RoleDsn, connection: Any) -> str:
    await create_supabase_table(connection)
    assert not [finding for finding in await check_table(each_dsn, "jobs", SUPABASE_CONFIG) if finding.is_error]
    await adoption.apply(each_dsn, "jobs", SUPABASE_CONFIG)
    await connection.execute("select windlass.register_worker('w', 'default', '{jobs}')")
    return each_dsn


async def test_end_user_under_row_security_needs_no_right_on_windlass(supabase: str, connection: Any) -> None:
    async with signed_in(supabase, ALICE) as sql:
        insert = 'insert into public.jobs (user_id, input) values ($1, \'{"prompt": "cat"}\') returning id'
        key = await sql.fetchval(insert, ALICE)
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            async with sql.transaction():
                await sql.execute("select from windlass.tasks")
        for function in ("jobs_rows(array['x'])", "jobs_active()", "jobs_next(null, 1)"):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                async with sql.transaction():
                    await sql.execute(f"select windlass_adopt.{function}")
    (claim,) = await connection.fetch("select * from windlass.claim_tasks('w', '{jobs}', 5)")
    assert claim["payload"] == '{"prompt": "cat"}'
    async with signed_in(supabase, ALICE) as sql:
        assert await sql.fetchval("select status from public.jobs") == "processing"
        assert await sql.fetchval("select count(*) from windlass.my_tasks") == 1
    complete = "select windlass.complete_task('w', $1, $2, '{\"url\": \"s3://x\"}')"
    assert await connection.fetchval(complete, claim["task_id"], claim["token"])
    async with signed_in(supabase, BOB) as sql:
        assert await sql.fetchval("select count(*) from public.jobs") == 0
        assert await sql.fetchval("select count(*) from windlass.my_tasks") == 0
        assert await sql.execute("update public.jobs set status = 'queued' where id = $1", key) == "UPDATE 0"
    async with signed_in(supabase, ALICE) as sql:
        row = await sql.fetchrow("select status, output from public.jobs")
        assert tuple(row) == ("succeeded", '{"url": "s3://x"}')


async def test_end_user_cancels_and_retries(supabase: str, connection: Any) -> None:
    task = "select status, error_code, owner from windlass.tasks where adoption = 'jobs'"
    async with signed_in(supabase, ALICE) as sql:
        await sql.execute("insert into public.jobs (user_id, input) values ($1, '{}')", ALICE)
    async with signed_in(supabase, ALICE) as sql:
        await sql.execute("update public.jobs set status = 'canceled'")
    assert tuple(await connection.fetchrow(task)) == ("failed", "CANCELLED", f"jwt:{ALICE}")
    async with signed_in(supabase, ALICE) as sql:
        await sql.execute("update public.jobs set status = 'queued'")
    assert (await connection.fetchrow(task))["status"] == "queued"
    async with signed_in(supabase, ALICE) as sql:
        await sql.execute("delete from public.jobs")
    assert (await connection.fetchrow(task))["status"] == "failed"


async def test_caller_cannot_set_the_clock_of_a_task(supabase: str) -> None:
    async with signed_in(supabase, ALICE) as sql:
        await sql.execute("select set_config('windlass.now', '2000-01-01', true)")
        with pytest.raises(asyncpg.InsufficientPrivilegeError, match="windlass.now"):
            await sql.execute("insert into public.jobs (user_id, input) values ($1, '{}')", ALICE)


OWNERS_OF_ADOPTION = {
    "renders_report": "windlass_owner",
    "renders_task_changed": "windlass_owner",
    **{f"renders_{name}": "shop_owner" for name in ("row_changed", "write", "rows", "next", "active")},
}


async def owners_of_adoption(sql: Any) -> dict[str, str]:
    """The owner of each function of an adoption that runs with its owner's rights."""
    owners = await sql.fetch(
        "select p.proname, r.rolname from pg_proc p join pg_roles r on r.oid = p.proowner"
        " where p.pronamespace = 'windlass_adopt'::regnamespace and p.prosecdef"
    )
    return {row["proname"]: row["rolname"] for row in owners}


async def complete_one(worker: Any) -> None:
    """Claim the only task of queue `renders` and complete it, as a worker with a secret."""
    secret = "wld_" + "7" * 64
    await worker.execute("select windlass.register_worker('h', 'default', '{renders}', p_secret => $1)", secret)
    (claim,) = await worker.fetch("select * from windlass.claim_tasks('h', '{renders}', 1, $1)", secret)
    complete = "select windlass.complete_task('h', $1, $2, '{}', $3)"
    assert await worker.fetchval(complete, claim["task_id"], claim["token"], secret)


async def test_each_function_runs_as_the_owner_of_what_it_writes(
    each_dsn: str, role_dsn: RoleDsn, connection: Any
) -> None:
    await create_role(connection, "shop_owner", "nologin")
    await create_role(connection, "deployer", "login in role windlass_owner, shop_owner")
    await connection.execute("create schema app authorization shop_owner; set role shop_owner")
    await connection.execute(RENDERS.replace("public.", "app."))
    await connection.execute("reset role")
    config = RENDERS_CONFIG.model_copy(update={"table": "app.renders"})
    dsn = dsn_of(each_dsn, "deployer")
    # No superuser: it may act as both owners and has no further right.
    assert not [finding for finding in await check_table(dsn, "renders", config) if finding.is_error]
    for _ in range(2):
        await adoption.apply(dsn, "renders", config)
    assert await owners_of_adoption(connection) == OWNERS_OF_ADOPTION
    assert not await connection.fetchval("select has_schema_privilege('shop_owner', 'windlass_adopt', 'create')")
    assert not await connection.fetchval("select has_table_privilege('windlass_owner', 'app.renders', 'update')")
    await connection.execute("set role shop_owner; insert into app.renders (prompt) values ('x'); reset role")
    async with connected(role_dsn("hand")) as worker:
        await complete_one(worker)
    assert await connection.fetchval("select state from app.renders") == "done"
    assert await adoption.remove(dsn, "renders") == 0
    assert not await connection.fetchval("select has_schema_privilege('shop_owner', 'windlass_adopt', 'usage')")


@pytest.mark.parametrize("is_superuser", [True, False])
async def test_adopted_table_works_after_roles_are_created(empty_dsn: str, is_superuser: bool) -> None:
    dsn = empty_dsn
    if not is_superuser:
        # As `postgres` of Supabase: it owns the database and all tables, and may create roles.
        async with connected(empty_dsn) as superuser:
            await create_role(superuser, "project_owner", "login createrole")
            await create_role(superuser, "windlass_owner", "nologin")
            await superuser.execute("grant windlass_owner to project_owner with admin option")
            await superuser.execute(
                f"alter database {urlsplit(empty_dsn).path[1:]} owner to project_owner;"
                "alter schema public owner to project_owner"
            )
        dsn = dsn_of(empty_dsn, "project_owner")
    await migrate(dsn)
    async with adopted_renders(dsn) as renders:
        keys = [await renders.add() for _ in range(3)]
        for _ in range(2):
            await renders.sql.execute(ROLES)
        assert not [finding for finding in await check_table(dsn, "renders", RENDERS_CONFIG) if finding.is_error]
        keys.append(await renders.add())
        claims = await renders.claim(3)
        assert await renders.complete(claims[0])
        async with connected(dsn) as owner, owner.transaction():
            await owner.execute("select from public.renders where id = $1 for update", keys[1])
            assert await renders.complete(claims[1])
        assert await renders.state(keys[1]) == "working"
        await adoption.apply(dsn, "renders", RENDERS_CONFIG)
        assert await renders.settle() == 1
        assert await renders.complete(claims[2])
        assert [await renders.state(key) for key in keys] == ["done", "done", "done", "waiting"]
        await renders.sql.execute("alter table public.renders disable trigger user")
        await renders.set(keys[3], state="stopped")
        await renders.sql.execute("alter table public.renders enable trigger user")
        assert await adoption.repair(dsn, "renders") == 1
        (compared,) = await adoption.compare(dsn, {"renders": RENDERS_CONFIG}) or []
        assert (compared.differences, compared.deferred, compared.is_outdated) == ({}, 0, False)
        await adoption.remove(dsn, "renders")
        functions = "select count(*) from pg_proc where pronamespace = 'windlass_adopt'::regnamespace"
        assert await renders.sql.fetchval(functions) == 0


async def test_table_of_another_owner_works_after_roles_are_created(empty_dsn: str) -> None:
    """Its functions that write Windlass's tables go to the new owner; the others stay with the table's owner."""
    await migrate(empty_dsn)
    async with connected(empty_dsn) as sql:
        await create_role(sql, "shop_owner", "nologin")
        await sql.execute("create schema app authorization shop_owner; set role shop_owner")
        await sql.execute(RENDERS.replace("public.", "app."))
        await sql.execute("insert into app.renders (prompt) values ('x'); reset role")
        config = RENDERS_CONFIG.model_copy(update={"table": "app.renders"})
        await adoption.apply(empty_dsn, "renders", config)
        await sql.execute(ROLES)
        assert await owners_of_adoption(sql) == OWNERS_OF_ADOPTION
        await sql.execute("set role shop_owner; update app.renders set urgency = 1; reset role")
        await create_role(sql, "hand", "login in role windlass_worker")
        async with connected(dsn_of(empty_dsn, "hand")) as worker:
            await complete_one(worker)
        assert await sql.fetchval("select state from app.renders") == "done"
        await adoption.remove(empty_dsn, "renders")


# Casts of the table's owner, which record the user they run as.
CASTS = """
create type app.mood as enum ('waiting', 'working', 'again', 'done', 'broken', 'stopped');
create function app.record_user(value app.mood) returns text language plpgsql as $$
begin
  perform set_config('app.users', concat_ws(' ', nullif(current_setting('app.users', true), ''), current_user), false);
  return format('%s', value);
end $$;
create function app.to_json(value app.mood) returns json language sql as 'select to_json(app.record_user(value))';
create cast (app.mood as text) with function app.record_user(app.mood);
create cast (app.mood as json) with function app.to_json(app.mood);
"""


async def test_casts_of_the_table_owner_get_no_rights_of_windlass(
    each_dsn: str, role_dsn: RoleDsn, connection: Any
) -> None:
    await create_role(connection, "shop_owner", "nologin")
    await connection.execute("create schema app authorization shop_owner; set role shop_owner")
    await connection.execute(CASTS)
    table = RENDERS.replace("public.", "app.").replace("state text not null", "state app.mood not null")
    await connection.execute(table.replace("prompt text", "prompt app.mood"))
    await connection.execute("reset role")
    await adoption.apply(each_dsn, "renders", RENDERS_CONFIG.model_copy(update={"table": "app.renders"}))
    await connection.execute("set role shop_owner")
    await connection.execute("insert into app.renders (prompt) values ('done')")
    await connection.execute("update app.renders set prompt = 'again'")
    await connection.execute("update app.renders set id = 7")
    await connection.execute("delete from app.renders where id = 1")
    await connection.execute("reset role; select windlass.register_worker('w', 'default', '{renders}')")
    (claim,) = await connection.fetch("select * from windlass.claim_tasks('w', '{renders}', 5)")
    assert claim["payload"] == '{"prompt": "again"}'
    users = await connection.fetchval("select current_setting('app.users')")
    assert set(users.split()) == {"shop_owner"}


@pytest.fixture
async def foreign_table(each_dsn: str, role_dsn: RoleDsn, connection: Any) -> Any:
    """app.renders of shop_owner, adopted, with the trigger app.hook() before each update. The connection is a
    superuser's."""
    await create_role(connection, "shop_owner", "nologin")
    await connection.execute("create schema app authorization shop_owner; set role shop_owner")
    await connection.execute(RENDERS.replace("public.", "app."))
    await connection.execute("create table app.users (name text); grant usage on schema app to public")
    await connection.execute(HOOK.format(""))
    await connection.execute(
        "create trigger hook before update on app.renders for each row execute function app.hook()"
    )
    await connection.execute("reset role")
    await adoption.apply(each_dsn, "renders", RENDERS_CONFIG.model_copy(update={"table": "app.renders"}))
    await connection.execute("select windlass.register_worker('w', 'default', '{renders}')")
    await connection.execute("set role shop_owner; insert into app.renders (prompt) values ('x'); reset role")
    return connection


HOOK = """
create or replace function app.hook() returns trigger language plpgsql as $$
begin
  {}
  insert into app.users values (current_user);
  return new;
end $$
"""
CLAIM = "select * from windlass.claim_tasks('w', '{renders}', 5)"


async def test_table_owner_cannot_alter_functions_to_run_as_windlass(foreign_table: Any) -> None:
    sql = foreign_table
    functions = await sql.fetch(
        "select p.oid::regprocedure::text as name from pg_proc p join pg_roles r on r.oid = p.proowner"
        " where p.pronamespace = 'windlass_adopt'::regnamespace and r.rolname = 'shop_owner'"
    )
    await sql.execute("set role shop_owner; grant all on app.renders, app.users to windlass_owner")
    for function in functions:
        await sql.execute(f"alter function {function['name']} security invoker")
    await sql.execute("reset role")
    assert len(await sql.fetch(CLAIM)) == 1
    assert await sql.fetchval("select count(*) from app.users") == 0
    reason = await sql.fetchval("select reason from windlass.deferred_rows")
    assert "no longer runs as its owner" in reason
    with pytest.raises(asyncpg.RaiseError, match="no longer runs as its owner"):
        await sql.fetch("select * from windlass_internal.compare_rows('renders')")
    assert await sql.fetchval("select windlass_internal.settle_rows(p_is_forced => true)") == 0
    assert await sql.fetchval("select count(*) from app.users") == 0


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("search_path", "app, pg_catalog"),
        ("windlass.now", "2050-01-01"),
        ("windlass.actor", "token:boss#1"),
        ("windlass.withdraws", "orders"),
    ],
)
async def test_trigger_of_table_owner_cannot_change_our_settings(foreign_table: Any, setting: str, value: str) -> None:
    sql = foreign_table
    read = "select coalesce(current_setting($1, true), '')"
    before = await sql.fetchval(read, setting)
    await sql.execute(HOOK.format(f"perform set_config('{setting}', '{value}', false);"))
    assert len(await sql.fetch(CLAIM)) == 1
    assert await sql.fetchval(read, setting) == before
    # The row is behind, with a reason that names the fix.
    assert await sql.fetchval("select state from app.renders") == "waiting"
    assert "give its function a SET clause" in await sql.fetchval("select reason from windlass.deferred_rows")
    assert await sql.fetchval("select windlass_internal.settle_rows(p_is_forced => true)") == 0
    assert await sql.fetchval(read, setting) == before
    await sql.execute(HOOK.format(f"perform set_config('{setting}', current_setting('{setting}', true), true);"))
    assert await sql.fetchval("select windlass_internal.settle_rows(p_is_forced => true)") == 1
    assert await sql.fetchval("select state from app.renders") == "working"


async def test_names_of_table_owner_do_not_hide_a_changed_setting(foreign_table: Any) -> None:
    sql = foreign_table
    before = await sql.fetchval("show search_path")
    await sql.execute(
        "create function app.current_setting(text) returns text language sql as"
        f" $$ select $before${before}$before$::text $$;"
        "create function app.never(text[], text[]) returns boolean language sql as $$ select false $$;"
        "create operator app.<> (leftarg = text[], rightarg = text[], function = app.never)"
    )
    await sql.execute(HOOK.format("perform set_config('search_path', 'app, pg_catalog', false);"))
    assert len(await sql.fetch(CLAIM)) == 1
    assert await sql.fetchval("show search_path") == before
    assert "give its function a SET clause" in await sql.fetchval("select reason from windlass.deferred_rows")


async def test_trigger_of_table_owner_cannot_set_role(foreign_table: Any) -> None:
    await foreign_table.execute(HOOK.format("set role none;"))
    assert len(await foreign_table.fetch(CLAIM)) == 1
    assert "role" in await foreign_table.fetchval("select reason from windlass.deferred_rows")
    await foreign_table.execute(HOOK.format(""))
    assert await foreign_table.fetchval("select windlass_internal.settle_rows(p_is_forced => true)") == 1
    assert await foreign_table.fetchval("select name from app.users") == "shop_owner"


async def test_only_the_table_owner_may_report_rows(supabase: str) -> None:
    async with signed_in(supabase, ALICE) as sql:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await sql.execute(
                "select windlass_adopt.jobs_report('truncated', null, null, null, null, null, null, null, null)"
            )


# ------------------------------------------------------------------------------------------------------------- names


async def test_hostile_names_are_quoted(each_dsn: str, connection: Any) -> None:
    schema, table = 'we"ird. $windlass$ @table@', "ta'ble; drop schema windlass cascade; --\n%I"
    names = {
        "key": 'v_key"); --',
        "status": "p_status $$ $windlass_$",
        "attempts": "select",
        "worker": "r",
        "result": "new",
        "progress": "t",
        "payload": "in\"put\\'%",
    }
    sql = {setting: '"' + name.replace('"', '""') + '"' for setting, name in names.items()}
    place = '"{}"."{}"'.format(schema.replace('"', '""'), table.replace('"', '""'))
    states = {"queued": "it's \\queued", "running": "$windlass$", "complete": 'do"ne@q@', "failed": "x'); --"}
    await connection.execute('create schema "{}"'.format(schema.replace('"', '""')))
    await connection.execute(
        f"create table {place} ({sql['key']} text primary key, {sql['status']} text, {sql['attempts']} integer,"
        f" {sql['worker']} text, {sql['result']} jsonb, {sql['progress']} real, {sql['payload']} text)"
    )
    config = AdoptionConfig(
        table=place,
        key=names["key"],
        payload=(names["payload"],),
        columns=AdoptedColumns(
            **{setting: names[setting] for setting in ("status", "attempts", "worker", "result", "progress")}
        ),
        states=AdoptedStates(**states),
    )
    assert not [finding for finding in await check_table(each_dsn, "odd.name:1-x", config) if finding.is_error]
    await adoption.apply(each_dsn, "odd.name:1-x", config)
    columns = ", ".join(sql[setting] for setting in ("key", "status", "payload"))
    insert = f"insert into {place} ({columns}) values ($1, $2, $3)"  # noqa: S608
    key = "k'1\"; --\\ $windlass$"
    await connection.execute(insert, key, states["queued"], "hello")
    await connection.execute("select windlass.register_worker('w', 'default', '{odd.name:1-x}')")
    (claim,) = await connection.fetch("select * from windlass.claim_tasks('w', '{odd.name:1-x}', 1)")
    assert json.loads(claim["payload"]) == {names["payload"]: "hello"}
    await connection.execute("select windlass.complete_task('w', $1, $2, '[1]')", claim["task_id"], claim["token"])
    row = await connection.fetchrow(f"select * from {place}")  # noqa: S608
    assert (row[names["key"]], row[names["status"]], row[names["attempts"]]) == (key, states["complete"], 1)
    assert (row[names["worker"]], row[names["result"]], row[names["progress"]]) == ("w", "[1]", 1)
    (compared,) = await adoption.compare(each_dsn, {"odd.name:1-x": config})
    assert (compared.differences, compared.is_outdated) == ({}, False)
    await adoption.remove(each_dsn, "odd.name:1-x")


@pytest.mark.parametrize(
    ("key_type", "keys"),
    [
        ("smallint", ["7"]),
        ("integer", ["-5"]),
        ("uuid", ["A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11"]),
        ("varchar(20)", ["Straße"]),
    ],
)
async def test_keys_of_every_type(each_dsn: str, connection: Any, key_type: str, keys: list[str]) -> None:
    await connection.execute(f"create table public.things (id {key_type} primary key, status text, n integer)")
    insert = f"insert into public.things select k::{key_type}, 'Queued' from unnest($1::text[]) k"  # noqa: S608
    await connection.execute(insert, keys)
    config = AdoptionConfig(columns=AdoptedColumns())
    await adoption.apply(each_dsn, "things", config)
    assert [rows async for rows in adoption.backfill(each_dsn, "things")] == [1, 1]
    await connection.execute("select windlass.register_worker('w', 'default', '{things}')")
    (claim,) = await connection.fetch("select * from windlass.claim_tasks('w', '{things}', 5)")
    await connection.execute("select windlass.complete_task('w', $1, $2)", claim["task_id"], claim["token"])
    assert await connection.fetchval("select status from public.things") == "Complete"


# ------------------------------------------------------------------------------------------------- checks and scripts


@pytest.mark.parametrize(
    ("table", "change", "check", "advice"),
    [
        ("", {"table": "nothing.here"}, "table", "set adopt.renders.table"),
        ("", {"key": "prompt"}, "key", "name the primary key, or a column that is unique and not null"),
        ("", {"key": "absent"}, "columns", "change adopt.renders.key"),
        ("", {"payload": ("prompt", "absent")}, "columns", "change adopt.renders.payload (absent)"),
        ("", {"payload_sql": "r.prompt ||", "payload": None}, "payload", "correct the payload of adopt.renders"),
        ("", {"order_by": "begun"}, "order_by", "name a column without nulls"),
        ("alter table public.renders alter host set not null", {}, "columns", "drop not null"),
        ("alter table public.renders alter done type integer", {}, "columns", "use real or numeric"),
        ("alter table public.renders alter output type bytea using null", {}, "columns", "use jsonb"),
        ("alter table public.renders alter begun type text", {}, "columns", "leave out columns.started_at"),
        (
            "create table public.hosts (id text primary key);"
            "alter table public.renders add foreign key (host) references public.hosts",
            {},
            "columns",
            "drop the foreign key, or leave out columns.worker",
        ),
        (
            "create type public.mood as enum ('waiting', 'working', 'done');"
            "alter table public.renders alter state drop default,"
            " alter state type public.mood using state::public.mood",
            {},
            "states",
            "change the states, or add the value",
        ),
        (
            "alter table public.renders rename to base; create view public.renders as select * from public.base",
            {},
            "table",
            "name the table behind it",
        ),
        ("grant create on schema public to public", {}, "schema", "revoke create on schema public from public"),
        (
            "alter table public.renders add unique (prompt) deferrable initially deferred",
            {},
            "constraints",
            "make it initially immediate",
        ),
        (
            "create constraint trigger late after update on public.renders deferrable initially deferred"
            " for each row execute function windlass_internal.notify_tasks()",
            {},
            "constraints",
            "make it initially immediate",
        ),
    ],
)
async def test_check_explains_what_is_wrong(
    each_dsn: str, connection: Any, table: str, change: dict[str, Any], check: str, advice: str
) -> None:
    await connection.execute(RENDERS)
    await connection.execute(table or "select 1")
    found = await check_table(each_dsn, "renders", RENDERS_CONFIG.model_copy(update=change))
    assert [(each.check, each.is_error) for each in found if advice in each.advice] == [(check, True)], found


async def test_check_reports_rights_row_security_and_triggers(
    each_dsn: str, role_dsn: RoleDsn, connection: Any
) -> None:
    await create_role(connection, "shop_owner", "nologin")
    await connection.execute(RENDERS)
    await connection.execute(
        "alter table public.renders owner to shop_owner; alter table public.renders enable row level security;"
        "alter table public.renders force row level security;"
        "create trigger audit after update on public.renders for each row"
        " execute function windlass_internal.notify_tasks()"
    )
    found = await check_table(role_dsn("shop"), "renders", RENDERS_CONFIG)
    by_check: dict[str, list[AdoptionFinding]] = {}
    for each in found:
        by_check.setdefault(each.check, []).append(each)
    assert [each.message for each in by_check["privileges"]] == [
        "this user may not act as shop_owner",
        "this user may not act as windlass_owner",
    ]
    assert by_check["row security"][0].is_error
    assert "audit" in by_check["triggers"][0].message


async def test_printed_script_can_be_applied_by_hand_and_repeated(each_dsn: str, connection: Any) -> None:
    await connection.execute(GPU_TASKS)
    for _ in range(2):
        await connection.execute(apply_script("tasks", AdoptionConfig()))
    await connection.execute("insert into public.tasks default values")
    assert await connection.fetchval("select count(*) from windlass.tasks where adoption = 'tasks'") == 1


async def test_one_table_is_adopted_once(each_dsn: str, connection: Any) -> None:
    await connection.execute(GPU_TASKS)
    await adoption.apply(each_dsn, "tasks", AdoptionConfig())
    with pytest.raises(WindlassError, match="already adopted by another name"):
        await adoption.apply(each_dsn, "again", AdoptionConfig(table="tasks"))
    with pytest.raises(WindlassError, match="adopts another table"):
        await adoption.apply(each_dsn, "tasks", AdoptionConfig(table="windlass.events"))


# ----------------------------------------------------------------------------------------------------------- removal

OBJECTS = """
select 'trigger ' || t.tgname || ' on ' || t.tgrelid::regclass from pg_trigger t where not t.tgisinternal
union all
select 'column ' || a.attname from pg_attribute a where a.attrelid = 'public.renders'::regclass
union all
select 'privileges ' || coalesce(c.relacl::text, '') from pg_class c where c.oid = 'public.renders'::regclass
union all
select 'depends ' || d.classid::regclass from pg_depend d
where d.refobjid = 'public.renders'::regclass and d.deptype = 'n'
order by 1
"""


async def test_removal_leaves_no_trace_while_tasks_run(each_dsn: str, connection: Any) -> None:
    before = await catalog(each_dsn)
    await connection.execute(RENDERS)
    objects = await connection.fetch(OBJECTS)
    await connection.execute("drop table public.renders")
    async with adopted_renders(each_dsn) as renders:
        keys = [await renders.add() for _ in range(5)]
        claims = await renders.claim(3)
        assert await renders.complete(claims[0])
        assert await renders.fail(claims[1]) == "error"
        async with connected(each_dsn) as owner, owner.transaction():
            await owner.execute("select from public.renders where id = $1 for update", keys[4])
            # The rest waits until the owner's transaction has ended.
            await renders.sql.execute("select windlass_internal.release_rows('renders', 1000)")
        await adoption.remove(each_dsn, "renders")
        assert [await renders.state(key) for key in keys] == ["done", *["waiting"] * 4]
        assert [(await renders.row(key))["tries"] for key in keys] == [1, 0, 0, 0, 0]
        assert not await renders.complete(claims[2]), "the running attempt has lost its claim"
        await renders.set(keys[0], state="waiting")
        await renders.add()
        unfinished = "select count(*) from windlass.tasks where status in ('queued', 'running', 'error')"
        assert await renders.sql.fetchval(unfinished) == 0
        assert await connection.fetch(OBJECTS) == objects
        assert await catalog(each_dsn) == before
        rest = "select (select count(*) from windlass.adoptions) + (select count(*) from windlass.deferred_rows)"
        assert await renders.sql.fetchval(rest) == 0
        with pytest.raises(BadInput, match="renders is not adopted"):
            await adoption.remove(each_dsn, "renders")
        # And back again.
        await adoption.apply(each_dsn, "renders", RENDERS_CONFIG)
        assert [rows async for rows in adoption.backfill(each_dsn, "renders")][-1] == 6
        assert len(await renders.claim(10)) == 6


async def test_removal_after_the_table_was_dropped(each_dsn: str) -> None:
    async with adopted_renders(each_dsn) as renders:
        await renders.add()
        await renders.sql.execute("drop table public.renders")
        assert await adoption.remove(each_dsn, "renders") == 0
        assert await renders.sql.fetchval("select status from windlass.tasks") == "failed"


async def test_apply_again_changes_the_mapping(each_dsn: str) -> None:
    async with adopted_renders(each_dsn) as renders:
        first = await renders.add("first")
        config = RENDERS_CONFIG.model_copy(update={"queue": "fast", "payload": ("prompt", "views"), "max_attempts": 9})
        (compared,) = await adoption.compare(each_dsn, {"renders": config})
        assert compared.is_outdated
        await adoption.apply(each_dsn, "renders", config)
        second = await renders.add("second")
        assert ((await renders.task(first))["queue"], (await renders.task(second))["queue"]) == ("renders", "fast")
        task = await renders.task(second)
        assert (json.loads(task["payload"]), task["max_attempts"]) == ({"prompt": "second", "views": 0}, 9)


async def test_backfill_adopts_a_row_that_its_owner_has_locked(each_dsn: str, connection: Any) -> None:
    await connection.execute(RENDERS)
    await connection.execute("insert into public.renders (prompt) values ('a'), ('b'), ('c')")
    await adoption.apply(each_dsn, "renders", RENDERS_CONFIG)
    renders = AdoptedTable(each_dsn, connection)
    async with connected(each_dsn) as owner, owner.transaction():
        await owner.execute("update public.renders set views = 1 where id = 2")
        assert [rows async for rows in adoption.backfill(each_dsn, "renders")] == [3, 3]
        assert await renders.task(2) is None
    assert await renders.settle() == 1
    assert (await renders.task(2))["status"] == "queued"


async def test_backfill_follows_the_order_column(each_dsn: str, connection: Any) -> None:
    await connection.execute(GPU_TASKS)
    await connection.execute(
        "insert into public.tasks (created_at, params)"
        " select now() - make_interval(mins => n % 7, secs => n), to_jsonb(n) from generate_series(1, 2500) n"
    )
    config = AdoptionConfig(order_by="created_at", payload="params")
    await adoption.apply(each_dsn, "tasks", config)
    assert [rows async for rows in adoption.backfill(each_dsn, "tasks")] == [1000, 2000, 2500, 2500]
    assert [row["payload"] for row in await connection.fetch("select payload from windlass.tasks order by id")] == [
        row["params"] for row in await connection.fetch("select params from public.tasks order by created_at, id")
    ]
