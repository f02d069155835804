"""Every table, view and function of the schema, tried as every role, and end users as PostgREST serves them."""

import importlib.util
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from support.queue_sql import RoleDsn, connected, task_reads
from windlass.store.export_sql import ROLES

PLACE = Path(__file__).parent.parent.parent
SUPABASE = ("anon", "authenticated", "service_role")
VIEWS = {
    "active_workers_health",
    "boot_phases",
    "boot_times",
    "cost_estimates",
    "daily_costs",
    "health",
    "machine_hosts",
    "orchestrator_status",
    "recent_errors",
    "processing_rate",
    "task_costs",
    "terminations",
    "worker_counts",
    "worker_performance",
}
ANY_USER = {"now"}
PROGRAMS = ANY_USER | {"contract_versions", "schema_history"}
PRODUCER = PROGRAMS | {
    "cancel_task",
    "enqueue",
    "enqueue_many",
    "is_new_task",
    "queue_depth",
    "retry_failed",
    "retry_task",
    "task_details",
}
# What each role may call or read in the schema windlass. Everything else must be refused.
ALLOWED = {
    "windlass_producer": PRODUCER,
    "windlass_worker": PROGRAMS
    | {
        "activate_worker",
        "append_logs",
        "claim_task",
        "claim_tasks",
        "complete_task",
        "deregister_worker",
        "fail_task",
        "finish_and_claim",
        "heartbeat",
        "next_run_after",
        "recover_lost_workers",
        "register_worker",
        "release_task",
        "settle_rows",
        "sweep",
    },
    # component_name is part of the view health.
    "windlass_viewer": PROGRAMS | VIEWS | {"queue_depth"},
    "service_role": PRODUCER,
    "authenticated": ANY_USER | {"my_tasks", "submit_task"},
    "anon": set[str](),
}
USER_OF = {
    "windlass_producer": "shop",
    "windlass_worker": "hand",
    "windlass_viewer": "guest",
    "windlass_orchestrator": "conductor",
}
OBJECTS = """
select n.nspname as schema, p.proname as name, 'function' as kind,
  format('select * from %I.%I(%s)', n.nspname, p.proname, (
    select string_agg('null::' || format_type(t, null), ', ' order by o)
    from unnest(p.proargtypes::oid[]) with ordinality as a (t, o)
  )) as use
from pg_proc p join pg_namespace n on n.oid = p.pronamespace
where n.nspname in ('windlass', 'windlass_internal') and p.prorettype <> 'trigger'::regtype
union all
select n.nspname, c.relname, case c.relkind when 'v' then 'view' else 'table' end,
  format('select * from %I.%I limit 1', n.nspname, c.relname)
from pg_class c join pg_namespace n on n.oid = c.relnamespace
where n.nspname in ('windlass', 'windlass_internal') and c.relkind in ('r', 'p', 'v', 'm', 'f')
order by 1, 3, 2
"""

# The rights of a role to change these tables and views, or columns of them.
WRITE_RIGHTS = """
select o.name, r.name as privilege
from unnest($2::text[]) as o (name),
  unnest('{insert,update,delete,truncate,references,trigger}'::text[]) as r (name)
where case
  when r.name in ('insert', 'update', 'references') then has_any_column_privilege($1, o.name, r.name)
  else has_table_privilege($1, o.name, r.name)
end
"""


@pytest.fixture
async def roles(role_dsn: RoleDsn, connection: Any) -> RoleDsn:
    """Supabase's roles too, with what Supabase lets them inherit, and PostgREST's user."""
    for role in SUPABASE:
        if not await connection.fetchval("select exists (select from pg_roles where rolname = $1)", role):
            bypass = "bypassrls" if role == "service_role" else ""
            await connection.execute(f"create role {role} nologin noinherit {bypass}")
    if not await connection.fetchval("select exists (select from pg_roles where rolname = 'postgrest')"):
        await connection.execute("create role postgrest login noinherit")
    # Other tests on this server may have created it for one of them.
    await connection.execute(f"grant {', '.join(SUPABASE)} to postgrest")
    await connection.execute(ROLES)
    return role_dsn


@asynccontextmanager
async def acting_as(roles: RoleDsn, role: str, **claims: Any) -> AsyncIterator[Any]:
    """A session of a login user; for Supabase's roles a request of PostgREST, which sets role and claims."""
    if role not in SUPABASE:
        async with connected(roles(USER_OF[role])) as sql:
            yield sql
        return
    async with connected(roles("postgrest")) as sql, sql.transaction():
        await sql.execute(f"set local role {role}")
        await sql.execute("select set_config('request.jwt.claims', $1, true)", json.dumps(claims))
        yield sql


async def is_denied(sql: Any, statement: str) -> bool:
    """Whether the server refuses the statement for a missing right. Other errors mean that it was let in."""
    savepoint = sql.transaction()
    await savepoint.start()
    try:
        await sql.execute(statement)
    except asyncpg.InsufficientPrivilegeError as error:
        return str(error).startswith(("permission denied for", "must be owner"))
    except asyncpg.PostgresError:
        return False
    finally:
        await savepoint.rollback()
    return False


async def objects_of(connection: Any) -> list[Any]:
    # Qualified names in all statements, whatever the user's search_path.
    await connection.execute("set search_path = pg_catalog")
    objects: list[Any] = await connection.fetch(OBJECTS)
    assert len(objects) > 100
    return objects


@pytest.mark.parametrize("role", ALLOWED)
async def test_role_reaches_only_its_functions_and_views(roles: RoleDsn, connection: Any, role: str) -> None:
    objects = await objects_of(connection)
    async with acting_as(roles, role, sub="ann") as sql:
        reached = {f"{each['schema']}.{each['name']}" for each in objects if not await is_denied(sql, each["use"])}
    assert reached == {f"windlass.{name}" for name in ALLOWED[role]}


@pytest.mark.parametrize("role", [*ALLOWED, "windlass_orchestrator"])
async def test_no_role_but_the_owner_writes_a_table(roles: RoleDsn, connection: Any, role: str) -> None:
    relations = [each for each in await objects_of(connection) if each["kind"] != "function"]
    names = [f"{each['schema']}.{each['name']}" for each in relations]
    # PostgreSQL refuses to write most views before it looks at rights, so their rights are read.
    assert [tuple(row) for row in await connection.fetch(WRITE_RIGHTS, role, names)] == []
    async with acting_as(roles, role, sub="ann") as sql:
        for name in (name for name, each in zip(names, relations, strict=True) if each["kind"] == "table"):
            column = await connection.fetchval(
                "select quote_ident(attname) from pg_attribute where attrelid = $1::text::regclass and attnum = 1", name
            )
            for statement in (
                f"insert into {name} default values",
                f"update {name} set {column} = default",  # noqa: S608
                f"delete from {name}",  # noqa: S608
                f"truncate {name}",
                f"alter table {name} disable row level security",
            ):
                assert await is_denied(sql, statement), statement


async def test_right_to_write_a_view_is_noticed(roles: RoleDsn, connection: Any) -> None:
    names = ["windlass.queue_depth", "windlass_internal.tokens"]
    for name, right in (("windlass.queue_depth", "delete"), ("windlass_internal.tokens", "update (name)")):
        await connection.execute(f"grant {right} on {name} to windlass_orchestrator")
    found = await connection.fetch(WRITE_RIGHTS, "windlass_orchestrator", names)
    assert sorted(tuple(row) for row in found) == [
        ("windlass.queue_depth", "delete"),
        ("windlass_internal.tokens", "update"),
    ]


async def test_orchestrator_reaches_listed_functions_and_views_only(roles: RoleDsn, connection: Any) -> None:
    objects = await objects_of(connection)
    granted = {
        row["object"]
        for row in await connection.fetch("select * from windlass_internal.rights()")
        if row["role"] == "orchestrator"
    }
    # Each table has a view for it, without hashes.
    granted |= {f"windlass_internal.{each['name']}" for each in objects if each["kind"] == "table"}
    async with connected(roles("conductor")) as sql:
        for each in objects:
            name = f"{each['schema']}.{each['name']}"
            assert await is_denied(sql, each["use"]) is (name not in granted), name
            if each["kind"] == "function":
                continue
            for statement in (
                f"insert into {name} default values",
                f"delete from {name}",  # noqa: S608
                f"truncate {name}",
                f"alter table {name} disable row level security",
                f"select tableoid from {name} for update",  # noqa: S608
            ):
                # A view that cannot be written at all is refused with another error.
                refused = await is_denied(sql, statement)
                assert refused or each["kind"] == "view", statement
            assert not await sql.fetchval("select has_table_privilege($1, 'insert,update,delete,truncate')", name)


async def test_no_role_but_the_owner_has_a_right_on_a_table(roles: RoleDsn, connection: Any) -> None:
    granted = await connection.fetch(
        "select c.relname, a.grantee::regrole::text as grantee, a.privilege_type from pg_class c,"
        " aclexplode(coalesce(c.relacl, acldefault('r', c.relowner))) as a"
        " where c.relnamespace = 'windlass'::regnamespace and c.relkind in ('r', 'p') and a.grantee <> c.relowner"
        " union all"
        " select c.relname, a.grantee::regrole::text, a.privilege_type from pg_attribute t"
        " join pg_class c on c.oid = t.attrelid, aclexplode(t.attacl) as a"
        " where c.relnamespace = 'windlass'::regnamespace and c.relkind in ('r', 'p')"
    )
    assert granted == []
    assert not await connection.fetchval("select count(*) from pg_policies where schemaname like 'windlass%'")


async def test_role_of_viewers_reads_no_text_of_a_handler(roles: RoleDsn, connection: Any) -> None:
    """An error may quote its payload, whatever the queue's `redact` says."""
    task_id = await connection.fetchval("select windlass.enqueue('a', '\"a private prompt\"', p_max_attempts => 1)")
    await connection.execute("select windlass.register_worker('w1', 'default', '{a}')")
    token = await connection.fetchval("select token from windlass.claim_task('w1', '{a}')")
    chunk = json.dumps([{"lines": ["printed a private prompt"], "task_id": task_id, "attempt": 1}])
    assert await connection.fetchval("select windlass.append_logs('w1', gen_random_uuid(), $1)", chunk) == 1
    note = json.dumps([{"task_id": task_id, "token": str(token), "progress": 0.5, "note": "a private note"}])
    await connection.execute("select from windlass.heartbeat('w1', $1)", note)
    fail = "select windlass.fail_task('w1', $1, $2, 'cannot draw a private prompt')"
    assert await connection.fetchval(fail, task_id, token) == "failed"
    (error,) = await connection.fetch("select * from windlass.recent_errors")
    assert error["reason"] == "attempt 1 of 1: cannot draw a private prompt"
    async with acting_as(roles, "windlass_viewer") as sql:
        (error,) = await sql.fetch("select * from windlass.recent_errors")
    assert (error["code"], error["worker_id"], error["task_id"]) == ("TASK_FAILED", "w1", task_id)
    assert json.loads(error["detail"])["error_code"] == "HANDLER_ERROR"
    assert error["reason"] == "attempt 1 of 1: ********"
    assert "private" not in str(error)
    # With its last lines as diagnostics.
    await connection.execute("select windlass_internal.terminate_worker('w1', 'no longer needed')")
    assert "private" in await connection.fetchval("select diagnostics::text from windlass.worker_diagnostics")
    async with acting_as(roles, "windlass_viewer") as sql:
        for view in VIEWS | {"queue_depth"}:
            assert "private" not in str(await sql.fetch(f"table windlass.{view}")), view


async def test_views_of_the_control_plane_have_no_hashes(roles: RoleDsn, connection: Any) -> None:
    hashes = await connection.fetch(
        "select table_name, column_name from information_schema.columns"
        " where table_schema = 'windlass_internal' and (column_name like '%hash%' or data_type = 'bytea')"
    )
    assert hashes == []


async def test_new_function_and_table_are_closed_at_once(roles: RoleDsn, connection: Any) -> None:
    await connection.execute(
        "set role windlass_owner; create table windlass.new_keys (value text);"
        "create function windlass.new_function() returns integer language sql as 'select 1';"
        "select windlass_internal.apply_roles(); reset role"
    )
    async with acting_as(roles, "windlass_worker") as sql:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await sql.fetch("select windlass.new_function()")
    hides = "select relrowsecurity from pg_class where oid = 'windlass.new_keys'::regclass"
    assert await connection.fetchval(hides)


async def test_new_column_and_table_are_hidden_from_the_control_plane(roles: RoleDsn, connection: Any) -> None:
    await connection.execute(
        "alter table windlass.workers add column new_key text; create table windlass.new_keys (value text);"
        "select windlass_internal.create_table_views(); select windlass_internal.apply_roles()"
    )
    shown = "select array_agg(column_name::text) from information_schema.columns where table_schema = $1"
    names = await connection.fetchval(f"{shown} and table_name = any ('{{workers,new_keys}}')", "windlass_internal")
    assert "machine_id" in names
    assert not {"new_key", "value"} & set(names)
    async with connected(roles("conductor")) as sql:
        assert await sql.fetch("select id from windlass_internal.workers") == []
        assert await is_denied(sql, "select from windlass.new_keys")


async def test_control_plane_hides_only_hashes_and_claim_tokens(connection: Any) -> None:
    """A column of a table is shown, or it is named here with those that no program may read."""
    hidden = await connection.fetch(
        "select c.table_name || '.' || c.column_name as name from information_schema.columns c"
        " join pg_tables t on t.schemaname = 'windlass' and t.tablename = c.table_name"
        " where c.table_schema = 'windlass' and not exists (select from information_schema.columns v"
        " where v.table_schema = 'windlass_internal' and (v.table_name, v.column_name) = (c.table_name, c.column_name))"
    )
    assert {row["name"] for row in hidden} == {
        "sessions.hash", "tasks.claim_token", "tokens.hash",
        "workers.join_token_hash", "workers.secret_hash", "workers.token_hash",
    }  # fmt: skip


def test_every_internal_object_that_programs_use_is_listed() -> None:
    """A function that is not listed, or a table, works for the owner, so other tests would not notice."""
    source = PLACE / "src" / "windlass"
    schema = "".join(file.read_text() for file in (source / "store" / "schema").glob("*.sql"))
    tables = set(re.findall(r"create (?:unlogged )?table windlass\.(\w+)", schema))
    # Scripts of the owner, one of which creates functions of the owner.
    scripts = {"roles.sql", "adoption_template.sql"}
    files = [*source.rglob("*.py"), *(file for file in (source / "store").glob("*.sql") if file.name not in scripts)]
    used = {file: set(re.findall(r"windlass_internal\.(\w+)", file.read_text())) for file in files}
    listed = (source / "store" / "schema" / "18_privileges.sql").read_text()
    # Only compared with, in a comment; for the owner.
    others = {"error_headline", "apply_roles", "adopted_state", "release_rows"}
    called = set[str]().union(*used.values()) - tables - others
    assert {name for name in called if not re.search(rf"windlass_internal\.{name}\b", listed)} == set()
    # Statements about tables are for the owner: migrations, COPY into tasks, and its staging table.
    direct = {
        (file.name, table)
        for file in files
        for table in re.findall(r"(?:from|join|into|update) windlass\.(\w+)\b(?!\()", file.read_text())
        if table in tables
    }
    assert direct == {
        ("migration.py", "migrations"),
        ("export_sql.py", "migrations"),
        ("export_sql.sql", "migrations"),
        ("queries.sql", "tasks"),
        ("tasks.py", "tasks"),
    }


async def test_every_table_has_row_level_security(connection: Any) -> None:
    open_tables = await connection.fetch(
        "select relname from pg_class where relnamespace = 'windlass'::regnamespace and relkind in ('r', 'p')"
        " and not relrowsecurity"
    )
    assert [row["relname"] for row in open_tables] == []


async def test_row_level_security_hides_rows_after_a_mistaken_grant(roles: RoleDsn, connection: Any) -> None:
    await connection.execute("select windlass.enqueue('q')")
    await connection.execute("grant all on all tables in schema windlass to windlass_viewer, authenticated, anon")
    async with acting_as(roles, "windlass_viewer") as sql:
        assert await sql.fetchval("select count(*) from windlass.tasks") == 0
        assert await sql.execute("update windlass.tasks set payload = '1'") == "UPDATE 0"
        with pytest.raises(asyncpg.InsufficientPrivilegeError, match="row-level security|denied for function"):
            await sql.execute("insert into windlass.tasks (queue) values ('q')")
    async with acting_as(roles, "authenticated", sub="ann") as sql:
        assert await sql.fetchval("select count(*) from windlass.tasks") == 0


async def test_functions_with_the_owners_rights_pin_their_search_path(roles: RoleDsn, connection: Any) -> None:
    rows = await connection.fetch(
        "select p.oid::regprocedure::text as name, prosecdef,"
        " coalesce(array_to_string(proconfig, ' '), '') as settings,"
        " (select bool_or(has_function_privilege(r, p.oid, 'execute')) from unnest($1::text[]) as r) as is_granted,"
        " windlass_internal.is_plain(n.nspname || '.' || proname) as is_plain"
        " from pg_proc p join pg_namespace n on n.oid = pronamespace"
        " where nspname in ('windlass', 'windlass_internal')",
        [*ALLOWED, "windlass_orchestrator"],
    )
    for row in rows:
        if row["prosecdef"]:
            assert "search_path=pg_catalog, pg_temp" in row["settings"], row["name"]
        if row["is_granted"]:
            assert row["prosecdef"] is not row["is_plain"], row["name"]
    assert not await connection.fetchval(
        "select bool_or(has_function_privilege('public', p.oid, 'execute')) from pg_proc p"
        " where pronamespace in ('windlass'::regnamespace, 'windlass_internal'::regnamespace)"
    )


async def test_the_owner_role_owns_everything_and_is_no_superuser(roles: RoleDsn, connection: Any) -> None:
    owners = await connection.fetch(
        "select distinct owner::regrole::text from ("
        " select relowner as owner, relnamespace as namespace from pg_class where relkind in ('r', 'v')"
        " union all select proowner, pronamespace from pg_proc union all select nspowner, oid from pg_namespace"
        ") as o where namespace in ('windlass'::regnamespace, 'windlass_internal'::regnamespace)"
    )
    assert [row["owner"] for row in owners] == ["windlass_owner"]
    assert not await connection.fetchval("select rolsuper from pg_roles where rolname = 'windlass_owner'")


async def test_end_user_submits_and_reads_own_tasks_only(roles: RoleDsn, connection: Any) -> None:
    await connection.execute("insert into windlass.open_queues (queue, max_unfinished) values ('renders', 2)")
    submit = "select windlass.submit_task($1, $2, $3)"
    async with acting_as(roles, "authenticated", sub="ann") as sql:
        mine = await sql.fetchval(submit, "renders", '{"prompt": "a lighthouse"}', "k")
        assert await sql.fetchval(submit, "renders", "1", "k") == mine
    async with acting_as(roles, "authenticated", sub="bob") as sql:
        his = await sql.fetchval(submit, "renders", "2", "k")
        assert his != mine
        assert [row["id"] for row in await sql.fetch("select * from windlass.my_tasks")] == [his]
        # A filter that shows what it sees must not see rows of others.
        await sql.execute(
            "create function pg_temp.spy(bigint) returns boolean cost 0.0001 language plpgsql"
            " as $$ begin raise notice '%', $1; return true; end $$"
        )
        seen: list[str] = []
        sql.add_log_listener(lambda _, message: seen.append(message.message))
        await sql.fetch("select * from windlass.my_tasks where pg_temp.spy(id)")
        assert seen == [str(his)]
    async with acting_as(roles, "authenticated", sub="ann") as sql:
        (row,) = await sql.fetch("select * from windlass.my_tasks")
        assert (row["id"], row["status"], row["payload"]) == (mine, "queued", '{"prompt": "a lighthouse"}')
    owners = await connection.fetch("select owner from windlass.tasks order by id")
    assert [row["owner"] for row in owners] == ["jwt:ann", "jwt:bob"]


@pytest.mark.parametrize(
    ("claims", "arguments", "refusal"),
    [
        pytest.param({"sub": "ann"}, ("payroll", "1", None), "not open to end users", id="a closed queue"),
        pytest.param({}, ("renders", "1", None), "sign in", id="not signed in"),
        pytest.param({"sub": ""}, ("renders", "1", None), "sign in", id="without a name"),
        pytest.param(
            {"sub": "ann"}, ("renders", json.dumps("x" * 70_000), None), "at most 65536", id="a large payload"
        ),
        pytest.param({"sub": "ann"}, ("renders", "1", "k" * 91), "1 to 90 characters", id="a long key"),
    ],
)
async def test_end_user_cannot_submit(
    roles: RoleDsn, connection: Any, claims: dict[str, str], arguments: tuple[Any, ...], refusal: str
) -> None:
    await connection.execute("insert into windlass.open_queues (queue) values ('renders')")
    async with acting_as(roles, "authenticated", **claims) as sql:
        with pytest.raises(asyncpg.PostgresError, match=refusal):
            await sql.fetchval("select windlass.submit_task($1, $2, $3)", *arguments)


async def test_unfinished_tasks_of_an_end_user_are_limited(roles: RoleDsn, connection: Any) -> None:
    await connection.execute("insert into windlass.open_queues (queue, max_unfinished) values ('renders', 2)")
    async with acting_as(roles, "authenticated", sub="ann") as sql:
        for _ in range(2):
            await sql.fetchval("select windlass.submit_task('renders')")
        with pytest.raises(asyncpg.ProgramLimitExceededError, match="2 unfinished tasks"):
            await sql.fetchval("select windlass.submit_task('renders')")


async def test_unique_keys_of_end_users_are_never_the_same(roles: RoleDsn, connection: Any) -> None:
    await connection.execute("insert into windlass.open_queues (queue) values ('renders')")
    ids = set()
    for sub, key in (("ann", "b c"), ("ann b", "c")):
        async with acting_as(roles, "authenticated", sub=sub) as sql:
            ids.add(await sql.fetchval("select windlass.submit_task('renders', '1', $1)", key))
    assert len(ids) == 2


async def test_limit_of_an_end_user_reads_no_finished_tasks(roles: RoleDsn, connection: Any) -> None:
    await connection.execute("insert into windlass.open_queues (queue) values ('renders')")
    await connection.execute(
        "insert into windlass.tasks (queue, status, finished_at, owner)"
        " select 'renders', 'complete', now(), 'jwt:ann' from generate_series(1, 5000)"
    )
    await connection.execute("analyze windlass.tasks")
    async with acting_as(roles, "authenticated", sub="ann") as sql, sql.transaction():
        await sql.fetchval("select windlass.submit_task('renders', '1', 'k')")
        read = await task_reads(sql)
    assert (read["seq_scan"], read["idx_tup_fetch"]) == (0, 0)


async def test_without_claims_there_are_no_own_tasks(roles: RoleDsn, connection: Any) -> None:
    await connection.execute("select windlass.enqueue('q')")
    async with acting_as(roles, "authenticated") as sql:
        assert await sql.fetch("select * from windlass.my_tasks") == []


async def test_security_page_has_the_table_of_roles(roles: RoleDsn, connection: Any) -> None:
    spec = importlib.util.spec_from_file_location("database_roles", PLACE / "tools" / "database_roles.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    page = (PLACE / "docs" / "security.md").read_text()
    is_current = tool.with_table(page, await tool.table_of_roles(connection)) == page
    assert is_current, "run: python tools/database_roles.py"
