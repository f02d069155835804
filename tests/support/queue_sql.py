"""Connections, waits and statements shared by the tests of the queue's SQL."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import asyncpg

from support.stores import PostgresStores
from windlass.model.worker import Registration

# Much longer than any step of these tests takes, even on a busy machine.
LIMIT_S = 30.0
POLL_S = 0.01
# Finished between two and three hours ago: half of them in queue q, half in r; a third failed, the others complete.
FINISHED_LONG_AGO = """
insert into windlass.tasks (queue, status, finished_at)
select case n % 2 when 0 then 'q' else 'r' end, case n % 3 when 0 then 'failed' else 'complete' end,
  now() - make_interval(secs => 7200 + n)
from generate_series(1, $1) as n
"""
# Returns the DSN of a user with a role of grants.sql.
RoleDsn = Callable[[str], str]


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(dsn)
    try:
        yield connection
    finally:
        connection.terminate()


@asynccontextmanager
async def connections(dsn: str, count: int) -> AsyncIterator[list[Any]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(connected(dsn)) for _ in range(count)]


async def eventually(condition: Callable[[], Awaitable[bool]], description: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not await condition():
        assert time.monotonic() < deadline, f"not within {LIMIT_S:g} s: {description}"
        await asyncio.sleep(POLL_S)


async def is_blocked(connection: Any) -> bool:
    """Whether exactly one session of this database waits for a lock."""
    blocked = await connection.fetchval(
        "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    )
    return bool(blocked == 1)


async def register(store: PostgresStores, *worker_ids: str) -> None:
    for worker_id in worker_ids:
        await store.register(Registration(worker_id, ("q",)))


async def task_reads(connection: Any) -> Any:
    """Sequential scans and rows fetched by index from windlass.tasks in the current transaction."""
    return await connection.fetchrow(
        "select seq_scan, idx_tup_fetch from pg_stat_xact_user_tables"
        " where schemaname = 'windlass' and relname = 'tasks'"
    )


@asynccontextmanager
async def stopped_before_locking(
    role_dsn: RoleDsn, connection: Any, second_connection: Any, call: str
) -> AsyncIterator[None]:
    """Runs a call. In the block, the call has its snapshot of the tasks and has locked none of them."""
    # A row-level policy applies to this user, but not to the owner or a superuser. It blocks at each row. So this user
    # has rights on all tables, and the function runs with them.
    await connection.execute(
        "create function public.block() returns boolean language plpgsql"
        " as 'begin perform pg_advisory_xact_lock_shared(7); return true; end';"
        "create policy block on windlass.tasks using (public.block());"
        "do $$ declare t text; begin"
        "  for t in select tablename from pg_tables where schemaname = 'windlass' and tablename <> 'tasks' loop"
        "    execute format('alter table windlass.%I disable row level security', t);"
        "  end loop;"
        "end $$;"
        "grant usage on schema windlass, windlass_internal to hand;"
        "grant all on all tables in schema windlass to hand;"
        "grant execute on all functions in schema windlass, windlass_internal to hand;"
        "alter function windlass.heartbeat security invoker;"
        "alter function windlass_internal.record_heartbeats security invoker;"
        "select pg_advisory_lock(7)"
    )
    async with connected(role_dsn("hand")) as worker:
        calling = asyncio.create_task(worker.fetch(call))
        await eventually(lambda: is_blocked(second_connection), "the call blocks")
        yield
        await connection.execute("select pg_advisory_unlock(7)")
        await asyncio.wait_for(calling, LIMIT_S)
