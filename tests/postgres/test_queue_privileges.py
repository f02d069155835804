"""The roles of grants.sql: each suffices for its program and allows nothing more."""

import asyncio
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest

from support.queue_sql import FINISHED_LONG_AGO, LIMIT_S, RoleDsn, connected, register
from support.stores import PostgresStores
from windlass.model.errors import DatabaseUnavailable
from windlass.model.task import Finished, NewTask, TaskStatus
from windlass.model.worker import HeldClaim
from windlass.store.doctor_checks import check_may_control


@pytest.fixture
def unprivileged(each_server: Any, each_dsn: str) -> Iterator[str]:
    """The DSN of a user without any privilege."""
    each_server.execute("create role unprivileged login")
    try:
        yield each_dsn.replace(f"{urlsplit(each_dsn).username}@", "unprivileged@")
    finally:
        each_server.execute("drop role unprivileged")


async def test_user_without_privileges_gets_clear_error(unprivileged: str) -> None:
    with pytest.raises(
        DatabaseUnavailable, match=r"denied permission \(permission denied .*\)\. Grant it to this user"
    ):
        await PostgresStores(unprivileged).__aenter__()


async def test_control_plane_rejects_user_with_missing_privileges(each_dsn: str, role_dsn: RoleDsn) -> None:
    await check_may_control(each_dsn)
    with pytest.raises(DatabaseUnavailable, match="user hand cannot run the control plane: it lacks .* and .* more"):
        await check_may_control(role_dsn("hand"))


async def test_producer_role_suffices_and_allows_nothing_more(
    role_dsn: RoleDsn, connection: Any, store: PostgresStores
) -> None:
    await register(store, "w1")
    async with PostgresStores(role_dsn("shop")) as shop, connected(role_dsn("shop")) as sql:
        failed = await shop.enqueue(NewTask("q", '{"n": 1}', max_attempts=1, unique_key="k"))
        assert await shop.enqueue(NewTask("q", unique_key="k")) == failed
        (claim,) = await store.claim("w1", ("q",))
        await store.fail("w1", claim.task_id, claim.token, "failed")
        assert await shop.retry_task(failed)
        assert await shop.cancel_task(failed, "not wanted")
        assert (await shop.retry_failed("q", await shop.now(), include_cancelled=True)).ids == [failed]
        assert await shop.enqueue_many([NewTask("q")]) == 1
        assert await shop.enqueue_many([NewTask("q", unique_key=key) for key in ("k", "l")]) == 1
        await sql.execute("insert into windlass.tasks (queue, payload) values ('q', '5')")
        tasks = await shop.tasks()
        assert [task.payload for task in tasks] == ["5", "null", "null", '{"n": 1}']
        for refused in (
            "update windlass.tasks set payload = '6'",
            "delete from windlass.tasks",
            "select windlass.register_worker('mine')",
            "select windlass_internal.pause_fleet('default', true)",
            "select windlass_internal.terminate_worker('w1', 'x')",
        ):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await sql.execute(refused)


async def test_worker_role_suffices_and_allows_nothing_more(
    role_dsn: RoleDsn, connection: Any, store: PostgresStores
) -> None:
    await store.enqueue_many([NewTask("q")] * 6)
    await connection.execute("insert into windlass.fleets (name) values ('gpus')")
    await connection.execute("insert into windlass.slots (fleet, slot) values ('gpus', 0)")
    await connection.execute(
        "insert into windlass.workers (id, fleet, slot, status) values ('h1', 'gpus', 0, 'spawning')"
    )
    async with PostgresStores(role_dsn("hand")) as hand, connected(role_dsn("hand")) as sql:
        await register(hand, "w1", "lost", "h1")
        await sql.execute("select windlass.activate_worker('h1')")
        for worker_id in ("lost", "h1"):
            await hand.claim(worker_id, ("q",))
        failed, released, done = await hand.claim("w1", ("q",), 3)
        held = [HeldClaim(claim.task_id, claim.token, 0.5, "half") for claim in (failed, released, done)]
        assert (await hand.heartbeat("w1", held, {"pid": 7})).lost == frozenset()
        assert await hand.fail("w1", failed.task_id, failed.token, "failed") is TaskStatus.ERROR
        assert await hand.release("w1", released.task_id, released.token, "not now")
        result = await hand.finish_and_claim("w1", [Finished(done.task_id, done.token, "1")], ("q",), 1)
        assert (len(result.claims), result.lost) == (1, [])
        assert await hand.next_run_after(("q",)) is not None
        await asyncio.wait_for(hand.wait_for_work(("q",), 3600), LIMIT_S)
        await connection.execute(
            "update windlass.workers set last_heartbeat = now() - interval '1 hour' where id in ('lost', 'h1')"
        )
        await connection.execute("update windlass.workers set heartbeat_gapless_since = now() - interval '1 hour'")
        await connection.execute(FINISHED_LONG_AGO, 3)
        recovered = await hand.run_maintenance("w1")
        assert [(r.worker_id, r.tasks_requeued) for r in recovered] == [("h1", 1), ("lost", 1)]
        await connection.execute(
            "update windlass.tasks set finished_at = now() - interval '1 year' where worker_id is null"
        )
        assert await hand.sweep() == 3
        await hand.deregister("w1", "done")
        for refused in (
            "select windlass.enqueue('q')",
            "select windlass_internal.pause_fleet('default', true)",
            "delete from windlass.fleets",
            "select windlass_internal.acquire_lease_term('orchestrator', 'me', 60)",
        ):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await sql.execute(refused)


async def test_set_role_for_one_request_suffices(role_dsn: RoleDsn, connection: Any) -> None:
    """PostgREST (Supabase RPC) connects as a user without privileges and sets a role for each request."""
    await connection.execute("create role api nologin in role windlass_producer, windlass_worker")
    await connection.execute("create role authenticator login noinherit in role api")
    try:
        async with connected(role_dsn("authenticator")) as rpc:
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await rpc.execute("select windlass.enqueue('q')")
            async with rpc.transaction():
                await rpc.execute("set local role api")
                call = "select windlass.enqueue(p_queue => 'q', p_payload => '1'::json::jsonb)"
                task_id = await rpc.fetchval(call)
                await rpc.execute("select windlass.register_worker(p_worker_id => 'w', p_queues => '{q}')")
                claim = await rpc.fetchrow("select * from windlass.claim_task(p_worker_id => 'w', p_queues => '{q}')")
                assert claim["task_id"] == task_id
                finish = "select windlass.complete_task(p_worker_id => 'w', p_task_id => $1, p_token => $2)"
                assert await rpc.fetchval(finish, task_id, claim["token"])
    finally:
        await connection.execute("drop role authenticator, api")
