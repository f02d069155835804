"""Retention and purging on a real PostgreSQL: bounded rounds that delete exactly the expired rows."""

from typing import Any

import pytest

from support.provider_fixtures import RETENTION
from support.queue_sql import FINISHED_LONG_AGO
from support.stores import PostgresStores
from windlass.model.task import TaskStatus
from windlass.model.worker import Registration
from windlass.store import tasks as task_store
from windlass.store import transport as transport_store
from windlass.store.transport import open_postgres_transport

SWEEP = "select windlass.sweep(3600, 3600, 3600, 3600, 3600, 3600, 10)"


async def test_sweep_rounds_are_bounded_and_exclusive(connection: Any, second_connection: Any) -> None:
    await connection.execute(FINISHED_LONG_AGO, 45)
    async with connection.transaction():
        assert await connection.fetchval(SWEEP) == 20
        assert await second_connection.fetchval(SWEEP) == 0
    assert await second_connection.fetchval(SWEEP) == 15
    assert await second_connection.fetchval(SWEEP) == 10
    assert await connection.fetchval(SWEEP) == 0


async def test_maintenance_of_workers_rarely_applies_retention(
    each_dsn: str, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = "select count(*) from windlass.tasks"
    async with open_postgres_transport(each_dsn, retention=RETENTION) as transport:
        await transport.register(Registration("w1", ("q",)))
        await connection.execute(FINISHED_LONG_AGO, 5)
        await transport.run_maintenance("w1")
        assert await connection.fetchval(finished) == 0
        await connection.execute(FINISHED_LONG_AGO, 5)
        await transport.run_maintenance("w1")
        assert await connection.fetchval(finished) == 5
        monkeypatch.setattr(transport_store, "SWEEP_INTERVAL_S", 0.0)
        await transport.run_maintenance("w1")
        assert await connection.fetchval(finished) == 0


async def test_purge_in_rounds_deletes_exactly_the_selection(
    connection: Any, store: PostgresStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_store, "PURGE_BATCH", 7)
    await connection.execute(FINISHED_LONG_AGO, 300)
    assert await store.purge("q", [TaskStatus.COMPLETE], 7200 + 150) == 50
    assert await store.purge("q", [TaskStatus.COMPLETE, TaskStatus.FAILED], 0) == 100
    assert await store.purge(None, [TaskStatus.FAILED], 0) == 50
    left = await connection.fetch("select distinct queue, status from windlass.tasks")
    assert [tuple(row) for row in left] == [("r", "complete")]
