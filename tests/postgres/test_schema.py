"""schema/ and migrations/ give the same database, and the public contract does not change by accident."""

import gzip
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from support.catalog import catalog
from windlass.store.migration import MIGRATIONS, SCHEMA

BASELINE = Path(__file__).parent / "schema_baseline.sql.gz"

# The public functions of contract version 1: docs/sql.md explains them.
PUBLIC_FUNCTIONS = """
activate_worker(p_worker_id text, p_secret text DEFAULT NULL::text) -> text
append_logs(p_worker_id text, p_batch_id uuid, p_chunks jsonb, p_secret text DEFAULT NULL::text) -> integer
cancel_task(p_task_id bigint, p_reason text DEFAULT 'cancelled by hand'::text) -> boolean
claim_task(p_worker_id text, p_queues text[], p_secret text DEFAULT NULL::text) -> SETOF windlass.claim
claim_tasks(p_worker_id text, p_queues text[], p_limit integer DEFAULT 1,
  p_secret text DEFAULT NULL::text) -> SETOF windlass.claim
complete_task(p_worker_id text, p_task_id bigint, p_token uuid, p_result jsonb DEFAULT NULL::jsonb,
  p_secret text DEFAULT NULL::text) -> boolean
contract_versions(OUT oldest integer, OUT newest integer) -> record
deregister_worker(p_worker_id text, p_reason text DEFAULT 'deregistered'::text,
  p_secret text DEFAULT NULL::text) -> void
enqueue(p_queue text, p_payload jsonb DEFAULT 'null'::jsonb, p_priority integer DEFAULT 0,
  p_run_after timestamp with time zone DEFAULT NULL::timestamp with time zone, p_max_attempts integer DEFAULT 3,
  p_timeout_s double precision DEFAULT NULL::double precision, p_unique_key text DEFAULT NULL::text,
  p_max_payload_bytes integer DEFAULT 1048576) -> bigint
enqueue_many(p_queues text[], p_payloads jsonb[], p_priorities integer[] DEFAULT NULL::integer[],
  p_run_after timestamp with time zone[] DEFAULT NULL::timestamp with time zone[],
  p_max_attempts integer[] DEFAULT NULL::integer[], p_timeouts_s double precision[] DEFAULT NULL::double precision[],
  p_unique_keys text[] DEFAULT NULL::text[], p_max_payload_bytes integer DEFAULT 1048576) -> integer
is_new_task(p_task_id bigint) -> boolean
submit_task(p_queue text, p_payload jsonb DEFAULT 'null'::jsonb, p_unique_key text DEFAULT NULL::text) -> bigint
fail_task(p_worker_id text, p_task_id bigint, p_token uuid, p_error text, p_code text DEFAULT 'HANDLER_ERROR'::text,
  p_retry boolean DEFAULT true, p_jitter double precision DEFAULT random(),
  p_secret text DEFAULT NULL::text) -> text
finish_and_claim(p_worker_id text, p_task_ids bigint[], p_tokens uuid[], p_results jsonb[], p_queues text[],
  p_limit integer DEFAULT 1, p_secret text DEFAULT NULL::text) -> SETOF windlass.claim
heartbeat(p_worker_id text, p_claims jsonb DEFAULT '[]'::jsonb, p_vitals jsonb DEFAULT '{}'::jsonb,
  p_secret text DEFAULT NULL::text, OUT status text, OUT paused boolean, OUT lost uuid[]) -> record
next_run_after(p_queues text[]) -> timestamp with time zone
now() -> timestamp with time zone
recover_lost_workers(p_judge_id text, p_limit integer DEFAULT 100, p_secret text DEFAULT NULL::text) ->
  TABLE(worker_id text, tasks_requeued integer, tasks_failed integer)
register_worker(p_worker_id text, p_fleet text DEFAULT 'default'::text, p_queues text[] DEFAULT '{}'::text[],
  p_concurrency integer DEFAULT 1, p_lease_s double precision DEFAULT 30, p_host text DEFAULT NULL::text,
  p_pid integer DEFAULT NULL::integer, p_version text DEFAULT NULL::text, p_kind text DEFAULT 'worker'::text,
  p_start_id text DEFAULT NULL::text, p_secret text DEFAULT NULL::text) -> text
release_task(p_worker_id text, p_task_id bigint, p_token uuid, p_reason text,
  p_delay_s double precision DEFAULT 0, p_secret text DEFAULT NULL::text) -> boolean
retry_failed(p_queue text, p_limit integer DEFAULT 1000,
  p_failed_before timestamp with time zone DEFAULT windlass.now(), p_include_cancelled boolean DEFAULT false,
  p_failed_from timestamp with time zone DEFAULT NULL::timestamp with time zone) ->
  TABLE(task_id bigint, failed_at timestamp with time zone)
retry_task(p_task_id bigint) -> boolean
settle_rows(p_worker_id text, p_secret text DEFAULT NULL::text) -> integer
sweep(p_complete_s double precision, p_failed_s double precision, p_events_s double precision,
  p_cycles_s double precision, p_logs_s double precision, p_charges_s double precision,
  p_limit integer DEFAULT 1000) -> integer
"""
CLAIM_TYPE = (
    "task_id bigint, token uuid, queue text, payload jsonb, attempt integer, max_attempts integer,"
    " timeout_s double precision, priority integer, created_at timestamp with time zone, is_lost boolean"
)
WHAT_TO_DO = (
    "The public contract changed. Workers and clients of earlier releases call these functions: keep the old one, add"
    " the new one as NAME_v2, raise `newest` of windlass.contract_versions() and CONTRACT_VERSION, and extend this list"
    " and docs/sql.md."
)


async def execute(dsn: str, *statements: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        for statement in statements:
            await connection.execute(statement)
    finally:
        await connection.close()


async def fetch(dsn: str, query: str) -> list[Any]:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute("set search_path = pg_catalog")
        return list(await connection.fetch(query))
    finally:
        await connection.close()


async def test_baseline_and_migrations_give_the_same_catalog_as_schema(each_server: Any, empty_dsn: str) -> None:
    baseline = gzip.decompress(BASELINE.read_bytes()).decode()
    await execute(empty_dsn, baseline, *(migration.sql for migration in MIGRATIONS))
    with each_server.database() as fresh_dsn:
        await execute(fresh_dsn, SCHEMA.sql)
        fresh = await catalog(fresh_dsn)
    assert len(fresh) > 400, "the catalog query misses objects"
    assert await catalog(empty_dsn) == fresh, (
        "schema/ differs from the baseline plus migrations/. After a release: add a delta to migrations/. Before the"
        " first release: run `python tools/schema_baseline.py`."
    )


@pytest.mark.parametrize(
    "deviation",
    [
        "alter table windlass.tasks add column extra integer",
        "alter table windlass.tasks alter column priority set default 1",
        "alter table windlass.leases alter column ttl_s set default 7",
        "alter table windlass.tasks disable row level security",
        "alter function windlass.enqueue security invoker",
        "alter function windlass.enqueue reset search_path",
        "alter table windlass.slots drop constraint slots_status_check",
        "alter table windlass.workers set (fillfactor = 90)",
        "drop index windlass.tasks_ready",
        "create or replace function windlass.claim_task(p_worker_id text, p_queues text[], p_secret text default null)"
        " returns setof windlass.claim"
        " language sql as $$ select * from windlass.claim_tasks(p_worker_id, p_queues, 2) $$",
        "drop view windlass.task_costs",
        "drop trigger notify_tasks on windlass.tasks",
        "alter domain windlass.task_key drop constraint task_key_check",
        "alter type windlass.claim add attribute extra integer",
        "grant usage on schema windlass to public",
        "grant select on windlass.tasks to public",
        "grant execute on function windlass_internal.add_event to public",
    ],
)
async def test_catalog_comparison_detects_a_deviation(dsn: str, deviation: str) -> None:
    before = await catalog(dsn)
    await execute(dsn, deviation)
    assert await catalog(dsn) != before


async def test_public_functions_are_those_of_the_contract(dsn: str) -> None:
    rows = await fetch(
        dsn,
        "select proname || '(' || pg_get_function_arguments(oid) || ') -> ' || pg_get_function_result(oid) as signature"
        " from pg_proc where pronamespace = 'windlass'::regnamespace",
    )
    pinned = PUBLIC_FUNCTIONS.replace(",\n  ", ", ").replace("->\n  ", "-> ").strip().splitlines()
    assert sorted(row["signature"] for row in rows) == sorted(pinned), WHAT_TO_DO


async def test_claim_type_is_that_of_the_contract(dsn: str) -> None:
    rows = await fetch(
        dsn,
        "select attname || ' ' || format_type(atttypid, atttypmod) as attribute from pg_attribute"
        " where attrelid = 'windlass.claim'::regclass order by attnum",
    )
    assert ", ".join(row["attribute"] for row in rows) == CLAIM_TYPE, WHAT_TO_DO


async def test_internal_functions_are_closed_to_public(dsn: str) -> None:
    rows = await fetch(
        dsn,
        "select p.oid::regprocedure::text as function from pg_proc p"
        " where p.pronamespace = 'windlass_internal'::regnamespace"
        " and (p.proacl is null or exists (select from aclexplode(p.proacl) a where a.grantee = 0))",
    )
    assert [row["function"] for row in rows] == []
