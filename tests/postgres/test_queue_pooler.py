"""Workers and producers behind pgbouncer in transaction mode, with fewer server connections than clients."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.postgres_servers import transaction_pooler
from support.queue_sql import LIMIT_S, POLL_S
from support.stores import PostgresStores
from windlass.model.errors import BadInput, TooSlow
from windlass.model.task import Finished, NewTask, TaskStatus
from windlass.model.worker import HeldClaim, Registration, WorkerStatus
from windlass.store import listener


@pytest.fixture
def pgbouncer(each_server: Any, each_dsn: str, reachable_path: Path) -> Iterator[str]:
    with transaction_pooler(each_server, each_dsn, reachable_path, pool_size=2) as dsn:
        yield dsn


async def work_until_empty(dsn: str, worker_id: str) -> list[int]:
    """Register, then claim, send a heartbeat and complete until the queue is empty, then deregister."""
    finished: list[int] = []
    async with PostgresStores(dsn) as store:
        await store.register(Registration(worker_id, ("q",)))
        claims = await store.claim(worker_id, ("q",), 2)
        while claims:
            reply = await store.heartbeat(worker_id, [HeldClaim(c.task_id, c.token, 0.5, "half") for c in claims])
            assert (reply.status, reply.lost) == (WorkerStatus.ACTIVE, frozenset())
            result = await store.finish_and_claim(
                worker_id, [Finished(c.task_id, c.token, "1") for c in claims], ("q",), 2
            )
            assert result.lost == []
            finished += [claim.task_id for claim in claims]
            claims = result.claims
        await store.deregister(worker_id, "done")
    return finished


async def test_workers_complete_all_tasks_behind_pooler(pgbouncer: str, each_dsn: str) -> None:
    async with PostgresStores(each_dsn) as direct, PostgresStores(pgbouncer) as pooled:
        assert (direct.database.is_pooled, pooled.database.is_pooled) == (False, True)
        assert await pooled.enqueue_many([NewTask("q")] * 40) == 40
        assert await pooled.enqueue_many([NewTask("q", unique_key=str(n % 20)) for n in range(40)]) == 20
        done = await asyncio.gather(*(work_until_empty(pgbouncer, f"w{number}") for number in range(6)))
        assert sorted(id_ for ids in done for id_ in ids) == sorted(task.id for task in await pooled.tasks(limit=100))
        assert await direct.finished_since(3600) == {TaskStatus.COMPLETE: 60, TaskStatus.FAILED: 0}
        assert await pooled.purge(None, [TaskStatus.COMPLETE], 0) == 60


async def test_waiting_for_work_polls_behind_pooler(pgbouncer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "POLL_WITHOUT_LISTEN_S", POLL_S)
    async with PostgresStores(pgbouncer) as store:
        # A listener would return from the first wait only.
        for _ in range(3):
            await asyncio.wait_for(store.wait_for_work(("q",), 3600), LIMIT_S)


async def test_calls_behind_pooler_have_lock_and_idle_timeouts(pgbouncer: str, each_dsn: str) -> None:
    limits = "select current_setting('lock_timeout'), current_setting('idle_in_transaction_session_timeout')"
    async with PostgresStores(pgbouncer) as pooled, PostgresStores(each_dsn) as direct:
        async with pooled.database.connection("reading settings") as connection:
            assert tuple(await connection.fetchrow(limits)) == ("20s", "20s")
        async with direct.database.connection("reading settings") as connection:
            assert tuple(await connection.fetchrow(limits)) == ("0", "0")


async def test_slow_statement_is_cancelled_and_raises_too_slow(pgbouncer: str, each_dsn: str) -> None:
    async def sleep_on(dsn: str) -> None:
        async with PostgresStores(dsn, max_connections=1, statement_timeout_s=10) as store:
            with pytest.raises(TooSlow, match="^sleeping: not done within 10 s"):
                async with store.database.connection("sleeping") as connection:
                    await connection.execute("select pg_sleep(120)")
            assert await store.enqueue(NewTask("q")) > 0

    await asyncio.gather(sleep_on(pgbouncer), sleep_on(each_dsn))


async def test_failed_call_behind_pooler_does_not_break_the_next(pgbouncer: str) -> None:
    async with PostgresStores(pgbouncer, max_connections=1) as store:
        for bad in (NewTask("no name"), NewTask("q", payload="{")):
            with pytest.raises(BadInput):
                await store.enqueue(bad)
            with pytest.raises(BadInput):
                await store.enqueue_many([NewTask("q", unique_key="u"), bad])
        assert await store.tasks() == []
        assert await store.enqueue(NewTask("q")) > 0
