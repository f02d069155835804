"""The roles of `windlass db roles`: each suffices for its program and allows nothing more."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest

from support.queue_sql import FINISHED_LONG_AGO, LIMIT_S, RoleDsn, connected, register
from support.stores import PostgresStores
from windlass.model.auth import hash_of
from windlass.model.errors import BadInput, DatabaseUnavailable, UnknownWorker
from windlass.model.task import Finished, NewTask, TaskStatus
from windlass.model.worker import HeldClaim, Registration, WorkerKind
from windlass.store.doctor_checks import ORCHESTRATOR, check_may_control, dsn_with_role, user_with_owner_rights

SECRET = "wld_" + "1" * 64
OTHER_SECRET = "wld_" + "2" * 64


@pytest.fixture
def unprivileged(each_server: Any, each_dsn: str) -> Iterator[str]:
    """The DSN of a user without any privilege."""
    each_server.execute("create role unprivileged login")
    try:
        yield each_dsn.replace(f"{urlsplit(each_dsn).username}@", "unprivileged@")
    finally:
        each_server.execute("drop role unprivileged")


@pytest.fixture
async def hand(role_dsn: RoleDsn) -> AsyncIterator[PostgresStores]:
    """A program with the role windlass_worker, and a secret."""
    async with PostgresStores(role_dsn("hand"), secret=SECRET, is_contract_sufficient=True) as hand:
        yield hand


@pytest.fixture
async def thief(role_dsn: RoleDsn) -> AsyncIterator[PostgresStores]:
    """Another program with the same role and another secret."""
    async with PostgresStores(role_dsn("hand"), secret=OTHER_SECRET, is_contract_sufficient=True) as thief:
        yield thief


async def spawn(connection: Any, worker_id: str, secret: str | None = SECRET) -> None:
    await connection.execute("insert into windlass.fleets (name) values ('gpus') on conflict do nothing")
    await connection.execute("insert into windlass.slots (fleet, slot) values ('gpus', 0)")
    await connection.execute(
        "insert into windlass.workers (id, fleet, slot, status, queues, secret_hash)"
        " values ($1, 'gpus', 0, 'spawning', '{q}', $2)",
        worker_id,
        hash_of(secret) if secret is not None else None,
    )


async def test_user_without_privileges_gets_clear_error(unprivileged: str) -> None:
    with pytest.raises(
        DatabaseUnavailable, match=r"denied permission \(permission denied .*\)\. Grant it to this user"
    ):
        await PostgresStores(unprivileged).__aenter__()


async def test_control_plane_rejects_user_with_missing_privileges(each_dsn: str, role_dsn: RoleDsn) -> None:
    await check_may_control(each_dsn)
    await check_may_control(role_dsn("conductor"))
    with pytest.raises(DatabaseUnavailable, match="user hand cannot run the control plane: it lacks usage on schema"):
        await check_may_control(role_dsn("hand"))


async def test_owner_gives_up_its_rights_once_roles_exist(each_dsn: str, role_dsn: RoleDsn) -> None:
    assert await user_with_owner_rights(each_dsn) is not None
    dsn = await dsn_with_role(each_dsn, ORCHESTRATOR)
    assert await user_with_owner_rights(dsn) is None
    assert await user_with_owner_rights(role_dsn("conductor")) is None
    await check_may_control(dsn)
    async with connected(dsn) as sql:
        assert await sql.fetchval("select current_user") == "windlass_orchestrator"
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await sql.execute("alter table windlass.tasks disable row level security")
    assert await dsn_with_role(role_dsn("hand"), ORCHESTRATOR) == role_dsn("hand")


async def test_orchestrator_writes_through_functions_only(role_dsn: RoleDsn, store: PostgresStores) -> None:
    await register(store, "w1")
    async with connected(role_dsn("conductor")) as sql:
        await sql.execute("select windlass_internal.pause_workers('{w1}', true)")
        for refused in (
            "update windlass.workers set status = 'terminated'",
            "delete from windlass.events",
            "insert into windlass.tasks (queue) values ('q')",
            "select secret_hash from windlass.workers",
            "select token_hash from windlass.workers",
            "select id from windlass.workers",
            "insert into windlass.tokens (name, role, hash) values ('mine', 'admin', sha256('wlt_'))",
            "update windlass.tokens set role = 'admin'",
            "delete from windlass_internal.events",
            "update windlass_internal.tasks set status = 'complete'",
            "drop table windlass.tasks",
            "select windlass_internal.apply_roles()",
        ):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await sql.execute(refused)


async def test_producer_role_suffices_and_allows_nothing_more(role_dsn: RoleDsn, store: PostgresStores) -> None:
    await register(store, "w1")
    async with (
        PostgresStores(role_dsn("shop"), is_contract_sufficient=True) as shop,
        connected(role_dsn("shop")) as sql,
    ):
        failed = await shop.enqueue(NewTask("q", '{"n": 1}', max_attempts=1, unique_key="k"))
        assert await shop.enqueue_or_find(NewTask("q", unique_key="k")) == (failed, False)
        (claim,) = await store.claim("w1", ("q",))
        await store.fail("w1", claim.task_id, claim.token, "failed")
        assert await shop.retry_task(failed)
        assert await shop.cancel_task(failed, "not wanted")
        assert (await shop.retry_failed("q", await shop.now(), include_cancelled=True)).ids == [failed]
        assert await shop.enqueue_many([NewTask("q")]) == 1
        assert await shop.enqueue_many([NewTask("q", unique_key=key) for key in ("k", "l")]) == 1

        async def stream() -> AsyncIterator[NewTask]:
            for number in range(1_500):
                yield NewTask("q", str(number))

        assert await shop.enqueue_many(stream()) == 1_500
        tasks = await shop.tasks(limit=2_000)
        assert [task.payload for task in tasks[-4:]] == ["0", "null", "null", '{"n": 1}']
        assert (await shop.task_summaries(limit=1)).rows[0].queue == "q"
        for refused in (
            "insert into windlass.tasks (queue, payload) values ('q', '5')",
            "insert into windlass.events (code, reason) values ('ALERT', 'forged')",
            "insert into windlass.attempt_spans values ('w1', 1, 'q', now() - interval '1 h', now())",
            "update windlass.tasks set status = 'complete'",
            "select claim_token from windlass.tasks",
            "delete from windlass.tasks",
            "select windlass.register_worker('mine')",
            "select windlass_internal.pause_fleet('default', true)",
            "select windlass_internal.terminate_worker('w1', 'x')",
        ):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await sql.execute(refused)


async def test_worker_role_suffices_and_allows_nothing_more(
    role_dsn: RoleDsn, hand: PostgresStores, connection: Any, store: PostgresStores
) -> None:
    await store.enqueue_many([NewTask("q")] * 6)
    await spawn(connection, "h1")
    async with connected(role_dsn("hand")) as sql:
        await register(hand, "w1", "lost", "h1")
        await sql.execute("select windlass.activate_worker('h1', $1)", SECRET)
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
        recovered = await hand.run_maintenance("w1")
        assert [(r.worker_id, r.tasks_requeued) for r in recovered] == [("h1", 1), ("lost", 1)]
        await hand.deregister("w1", "done")
        for refused in (
            # Reproductions of the penetration test's finding H3, and D5.
            "insert into windlass.workers (id, fleet, status, token_hash, joined_at)"
            " values ('steal', 'gpus', 'active', sha256('wlw_'), now())",
            "update windlass.tasks set payload = '{\"pwned\": 1}', status = 'queued'",
            "update windlass.workers set lease_s = 86400, token_hash = sha256('wlw_')",
            "delete from windlass.tasks",
            "delete from windlass.events",
            "delete from windlass.cycles",
            "insert into windlass.fleets (name) values ('mine')",
            "select token_hash from windlass.workers",
            "select payload from windlass.tasks",
            "select * from windlass.task_details",
            "select windlass.enqueue('q')",
            "select windlass_internal.pause_fleet('default', true)",
            "delete from windlass.fleets",
            "select windlass_internal.acquire_lease_term('orchestrator', 'me', 60)",
            "select windlass_internal.add_event('ALERT', 'forged', null, null, null)",
        ):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await sql.execute(refused)


async def test_worker_cannot_act_as_another_worker(
    hand: PostgresStores, thief: PostgresStores, connection: Any, store: PostgresStores
) -> None:
    await spawn(connection, "h1", SECRET)
    await register(hand, "w1", "h1")
    await register(thief, "t1")
    task_id = await store.enqueue(NewTask("q"))
    (claim,) = await hand.claim("w1", ("q",))
    for worker_id in ("w1", "h1"):
        with pytest.raises(UnknownWorker):
            await thief.claim(worker_id, ("q",))
        with pytest.raises(UnknownWorker):
            await thief.heartbeat(worker_id, [HeldClaim(task_id, claim.token, 0.9, "forged")])
        with pytest.raises(UnknownWorker):
            await thief.finish_and_claim(worker_id, [Finished(task_id, claim.token, '"forged"')], ("q",), 0)
        with pytest.raises(UnknownWorker):
            await thief.fail(worker_id, task_id, claim.token, "forged")
        with pytest.raises(UnknownWorker):
            await thief.release(worker_id, task_id, claim.token, "forged")
        with pytest.raises(UnknownWorker):
            await thief.deregister(worker_id, "forged")
        with pytest.raises(UnknownWorker):
            await thief.recover_lost_workers(worker_id)
        with pytest.raises(BadInput, match="belongs to another worker"):
            await register(thief, worker_id)
    # In its own name, with a leaked claim token: the claim is not its own.
    assert (await thief.finish_and_claim("t1", [Finished(task_id, claim.token, "1")], ("q",), 0)).lost == [claim.token]
    assert (await thief.heartbeat("t1", [HeldClaim(task_id, claim.token, 0.9)])).lost == {claim.token}
    assert await thief.fail("t1", task_id, claim.token, "forged") is None
    task = await store.task(task_id)
    assert task is not None
    assert (task.status, task.worker_id, task.progress) == (TaskStatus.RUNNING, "w1", None)
    assert (await hand.finish_and_claim("w1", [Finished(task_id, claim.token, "1")], ("q",), 0)).lost == []


async def test_worker_needs_its_secret(role_dsn: RoleDsn, hand: PostgresStores, connection: Any) -> None:
    await register(hand, "w1")
    await spawn(connection, "h1", None)  # its machine joins over HTTP
    async with connected(role_dsn("hand")) as sql:
        for refused in (
            "select windlass.register_worker('w2')",
            "select * from windlass.claim_task('w1', '{q}')",
            "select * from windlass.claim_tasks('w1', '{q}')",
            "select * from windlass.finish_and_claim('w1', null, null, null, '{q}')",
            "select windlass.complete_task('w1', 1, gen_random_uuid())",
            "select windlass.fail_task('w1', 1, gen_random_uuid(), 'forged')",
            "select windlass.release_task('w1', 1, gen_random_uuid(), 'forged')",
            "select * from windlass.heartbeat('w1')",
            "select windlass.activate_worker('w1')",
            "select * from windlass.recover_lost_workers('w1')",
            "select windlass.deregister_worker('w1')",
            "select windlass.append_logs('w1', gen_random_uuid(), '[]')",
            "select windlass.settle_rows('w1')",
        ):
            with pytest.raises(asyncpg.InsufficientPrivilegeError, match="secret"):
                await sql.execute(refused)
        with pytest.raises(asyncpg.NoDataFoundError):
            await sql.execute("select * from windlass.claim_task('h1', '{q}', $1)", SECRET)
        with pytest.raises(asyncpg.InvalidParameterValueError, match="belongs to another worker"):
            await sql.execute("select windlass.register_worker('h1', p_secret => $1)", SECRET)
        with pytest.raises(asyncpg.InvalidParameterValueError, match="32 to 200 characters"):
            await sql.execute("select windlass.register_worker('w3', p_secret => 'short')")


async def test_worker_cannot_register_as_another_kind(hand: PostgresStores, connection: Any) -> None:
    await spawn(connection, "h1")
    for kind in (WorkerKind.DISPATCHER, WorkerKind.NODE):
        with pytest.raises(DatabaseUnavailable, match="only the control plane registers"):
            await hand.register(Registration("w1", ("q",), kind=kind))
        await hand.register(Registration("h1", ("q",), kind=kind, lease_s=86_400, concurrency=9))
    row = await connection.fetchrow("select kind, lease_s, concurrency from windlass.workers where id = 'h1'")
    assert tuple(row) == ("worker", 30.0, 1)


async def test_worker_cannot_create_a_fleet(hand: PostgresStores, connection: Any) -> None:
    with pytest.raises(BadInput, match="fleet mine not found"):
        await hand.register(Registration("w1", ("q",), fleet="mine"))
    assert not await connection.fetchval("select exists (select from windlass.fleets where name = 'mine')")


async def test_known_worker_cannot_create_a_fleet(hand: PostgresStores, connection: Any) -> None:
    await spawn(connection, "h1")
    for fleet in ("mine", "default"):
        await hand.register(Registration("h1", ("q",), fleet=fleet, host=f"host-{fleet}"))
        assert await connection.fetchval("select host from windlass.workers where id = 'h1'") == f"host-{fleet}"
    assert [row["name"] for row in await connection.fetch("select name from windlass.fleets")] == ["gpus"]


@pytest.mark.parametrize("kind", [WorkerKind.DISPATCHER, WorkerKind.NODE])
async def test_worker_cannot_take_over_an_expired_id_of_another_kind(
    hand: PostgresStores, store: PostgresStores, connection: Any, kind: WorkerKind
) -> None:
    await store.register(Registration("d1", ("q",), kind=kind))
    await connection.execute("update windlass.workers set created_at = now() - interval '1 hour'")
    with pytest.raises(BadInput, match="belongs to another worker"):
        await register(hand, "d1")


async def test_worker_claims_only_from_its_queues(hand: PostgresStores, connection: Any, store: PostgresStores) -> None:
    await spawn(connection, "h1")
    await hand.register(Registration("h1", ("secret",)))
    await store.enqueue(NewTask("secret", '"payroll"'))
    with pytest.raises(BadInput, match="did not register for"):
        await hand.claim("h1", ("secret",))


async def test_silent_worker_started_by_hand_can_be_replaced(
    hand: PostgresStores, thief: PostgresStores, connection: Any
) -> None:
    """A service that restarts under its id has a new secret, unless it kept the old one."""
    await register(hand, "w1")
    await hand.heartbeat("w1")
    with pytest.raises(BadInput):
        await register(thief, "w1")
    await connection.execute("update windlass.workers set last_heartbeat = now() - interval '1 minute'")
    await register(thief, "w1")
    await thief.heartbeat("w1")
    with pytest.raises(UnknownWorker):
        await hand.heartbeat("w1")


async def test_worker_cannot_delete_what_retention_keeps(
    role_dsn: RoleDsn, connection: Any, store: PostgresStores
) -> None:
    await connection.execute(FINISHED_LONG_AGO, 3)
    async with connected(role_dsn("hand")) as sql:
        assert await sql.fetchval("select windlass.sweep(0, 0, 0, 0, 0, 0)") == 0
    assert await store.database.sweep("windlass.sweep", 3600, 3600, 3600, 3600, 3600, 3600) == 3
    await connection.execute(FINISHED_LONG_AGO, 3)
    async with connected(role_dsn("hand")) as sql:
        assert await sql.fetchval("select windlass.sweep(0, 0, 0, 0, 0, 0)") == 3


@pytest.mark.parametrize(
    ("user", "call"),
    [
        ("hand", "select windlass.sweep(0, 0, 0, 0, 0, 0)"),
        ("hand", f"select * from windlass.heartbeat('w1', p_secret => '{SECRET}')"),  # noqa: S608
        ("hand", f"select * from windlass.recover_lost_workers('w1', p_secret => '{SECRET}')"),  # noqa: S608
        ("hand", f"select windlass.register_worker('w1', p_secret => '{SECRET}')"),
        ("shop", "select windlass.enqueue('q')"),
        ("shop", "select windlass.cancel_task(1)"),
        ("shop", "select windlass.retry_task(1)"),
    ],
)
async def test_only_trusted_users_set_the_clock(role_dsn: RoleDsn, user: str, call: str) -> None:
    async with connected(role_dsn(user)) as sql:
        await sql.execute("set windlass.now = '2099-01-01'")
        with pytest.raises(asyncpg.InsufficientPrivilegeError, match="may not set windlass.now"):
            await sql.execute(call)


async def test_producer_cannot_act_in_the_name_of_a_person(role_dsn: RoleDsn, connection: Any) -> None:
    async with connected(role_dsn("shop")) as sql:
        await sql.execute("set windlass.actor = 'token:admin'")
        task_id = await sql.fetchval("select windlass.enqueue('q')")
        await sql.execute("select windlass.cancel_task($1)", task_id)
    assert await connection.fetchval("select owner from windlass.tasks") == "database:shop"
    actors = await connection.fetch("select actor from windlass.events where task_id = $1", task_id)
    assert [row["actor"] for row in actors] == ["database:shop"]


async def test_functions_ignore_the_search_path_of_the_caller(role_dsn: RoleDsn, connection: Any) -> None:
    """A function with the owner's rights must not call what the caller put in the way."""
    await connection.execute("create schema evil authorization shop")
    async with connected(role_dsn("shop")) as sql:
        for name, arguments, result in (
            ("octet_length", "text", "integer"),
            ("nullif_", "text", "text"),
            ("coalesce_", "text", "text"),
            ("sha256", "bytea", "bytea"),
            ("statement_timestamp", "", "timestamptz"),
        ):
            await sql.execute(
                f"create function evil.{name}({arguments}) returns {result} language plpgsql"
                " as $$ begin raise exception 'called as %', current_user; end $$"
            )
        await sql.execute("create domain pg_temp.text as varchar check (false)")
        await sql.execute("set search_path = evil, pg_temp, pg_catalog")
        assert await sql.fetchval("select windlass.enqueue('q', '1')")


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
                registration = "windlass.register_worker(p_worker_id => 'w', p_queues => '{q}', p_secret => $1)"
                await rpc.execute(f"select {registration}", SECRET)
                claim = await rpc.fetchrow(
                    "select * from windlass.claim_task(p_worker_id => 'w', p_queues => '{q}', p_secret => $1)", SECRET
                )
                assert claim["task_id"] == task_id
                finish = "windlass.complete_task(p_worker_id => 'w', p_task_id => $1, p_token => $2, p_secret => $3)"
                assert await rpc.fetchval(f"select {finish}", task_id, claim["token"], SECRET)
    finally:
        await connection.execute("drop role authenticator, api")
