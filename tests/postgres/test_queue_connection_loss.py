"""Errors of an unavailable or unsuitable database, and recovery once it is available again."""

import asyncio
from typing import Any
from uuid import UUID

import pytest

from support.queue_sql import LIMIT_S, connected, eventually, is_blocked, register
from support.stores import PostgresStores
from windlass.model.errors import DatabaseUnavailable, SchemaMismatch
from windlass.model.task import Finished, NewTask, TaskStatus
from windlass.model.worker import Registration


async def every_call(store: PostgresStores) -> list[BaseException | None]:
    """The exception of each call of a worker; None for a call that succeeds."""
    token = UUID(int=1)
    calls = (
        store.enqueue(NewTask("q")),
        store.enqueue_many([NewTask("q")]),
        store.register(Registration("w1", ("q",))),
        store.claim("w1", ("q",)),
        store.finish_and_claim("w1", [Finished(1, token, None)], ("q",), 1),
        store.fail("w1", 1, token, "failed"),
        store.release("w1", 1, token, "no"),
        store.heartbeat("w1"),
        store.run_maintenance("w1"),
        store.next_run_after(("q",)),
        store.tasks(),
        store.deregister("w1", "done"),
    )
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    return [outcome if isinstance(outcome, BaseException) else None for outcome in outcomes]


async def test_store_works_again_after_server_crash(each_server: Any, each_dsn: str) -> None:
    """While the server is down, every call raises DatabaseUnavailable. After its start the same store works."""
    async with PostgresStores(each_dsn) as store, connected(each_dsn) as connection, connected(each_dsn) as observer:
        await register(store, "w1")
        task_id = await store.enqueue(NewTask("q"))
        (claim,) = await store.claim("w1", ("q",))
        await connection.execute("begin; select from windlass.tasks for update")
        under_way = asyncio.create_task(store.cancel_task(task_id, "not wanted"))
        await eventually(lambda: is_blocked(observer), "cancel_task blocks")
        each_server.crash()
        try:
            with pytest.raises(DatabaseUnavailable, match="cancelling a task: the database at"):
                await asyncio.wait_for(under_way, LIMIT_S)
            outcomes = await every_call(store)
            assert [type(outcome) for outcome in outcomes] == [DatabaseUnavailable] * len(outcomes)
            with pytest.raises(
                DatabaseUnavailable, match=r"connecting: .*cannot be reached.*Check that it is running\."
            ):
                await PostgresStores(each_dsn).__aenter__()
        finally:
            await asyncio.to_thread(each_server.start)

        async def works() -> bool:
            try:
                result = await store.finish_and_claim("w1", [Finished(claim.task_id, claim.token, "1")], ("q",), 1)
            except DatabaseUnavailable:
                return False
            return result.lost == []

        await eventually(works, "the store works again")
        assert [task.status for task in await store.tasks()] == [TaskStatus.COMPLETE]


async def test_broken_connection_is_replaced(each_dsn: str) -> None:
    async with PostgresStores(each_dsn, max_connections=1) as store, connected(each_dsn) as connection:
        await store.enqueue(NewTask("q"))
        await connection.fetch(
            "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() and pid <> $1",
            await connection.fetchval("select pg_backend_pid()"),
        )

        async def works() -> bool:
            try:
                return bool(await store.enqueue(NewTask("q")))
            except DatabaseUnavailable:
                return False

        await eventually(works, "the store reconnects")


async def test_connections_set_application_name_unless_dsn_does(each_dsn: str) -> None:
    for dsn, name in ((each_dsn, "windlass"), (f"{each_dsn}&application_name=shop", "shop")):
        async with PostgresStores(dsn) as store, store.database.connection("reading settings") as connection:
            assert await connection.fetchval("select current_setting('application_name')") == name


async def test_read_only_server_raises_database_unavailable(each_dsn: str) -> None:
    async with PostgresStores(f"{each_dsn}&default_transaction_read_only=on") as store:
        with pytest.raises(
            DatabaseUnavailable, match=r"failed temporarily \(cannot execute INSERT .*\)\. Try again\.$"
        ):
            await store.enqueue(NewTask("q"))


async def test_changed_schema_raises_schema_mismatch(connection: Any, each_dsn: str) -> None:
    async with PostgresStores(each_dsn) as store:
        await connection.execute("drop function windlass.retry_task(bigint)")
        with pytest.raises(SchemaMismatch, match=r"does not match this program \(function .*\)\. Run `windlass db"):
            await store.retry_task(1)
        await connection.execute(
            "create function windlass.retry_task(bigint) returns boolean language plpgsql as"
            " 'begin raise exception ''out of order''; end'"
        )
        with pytest.raises(
            DatabaseUnavailable, match=r"refused the statement \(out of order\)\. Run `windlass doctor`"
        ):
            await store.retry_task(1)


async def test_call_without_answer_times_out(connection: Any, each_dsn: str) -> None:
    async with PostgresStores(each_dsn, command_timeout_s=10.0) as store:
        await register(store, "w1")
        async with connection.transaction():
            await connection.execute("lock table windlass.tasks")
            with pytest.raises(DatabaseUnavailable, match="did not answer in time"):
                await store.claim("w1", ("q",))


async def test_missing_database_is_named_in_error(each_server: Any) -> None:
    with pytest.raises(DatabaseUnavailable, match='connecting: database "nowhere" does not exist'):
        await PostgresStores(each_server.dsn_of("nowhere")).__aenter__()
