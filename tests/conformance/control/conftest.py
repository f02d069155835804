"""Fixtures of the control store suite: one store of each kind, a virtual clock, a leader."""

from collections.abc import AsyncIterator, Iterator
from random import Random
from typing import Any

import asyncpg
import pytest

from support.control_actions import EMPTY, RETENTION, ControlStores, Leader, SetStatus, VirtualClock, execute
from support.provider_fixtures import set_status_in_memory
from support.stores import PostgresStores
from windlass.model.errors import BadInput
from windlass.model.worker import WorkerStatus
from windlass.store.memory.stores import MemoryStores


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture(scope="session")
def shared_dsn(embedded_server: Any) -> Iterator[str]:
    with embedded_server.migrated_database() as dsn:
        yield dsn


@pytest.fixture(params=["memory", "postgres"])
async def store(request: pytest.FixtureRequest, clock: VirtualClock) -> AsyncIterator[ControlStores]:
    if request.param == "memory":
        yield MemoryStores(clock, RETENTION, Random(1))  # noqa: S311
        return
    dsn = request.getfixturevalue("shared_dsn")
    await execute(dsn, EMPTY)
    async with PostgresStores(dsn, retention=RETENTION, virtual_now=clock) as postgres:
        yield postgres


@pytest.fixture
def set_status(request: pytest.FixtureRequest, store: ControlStores) -> SetStatus:
    """Set the status directly in the table, as an operator with psql might."""

    async def set_status(worker_id: str, status: WorkerStatus) -> None:
        if isinstance(store, MemoryStores):
            set_status_in_memory(store, worker_id, status)
            return
        try:
            sql = "update windlass.workers set status = $2 where id = $1"
            await execute(request.getfixturevalue("shared_dsn"), sql, worker_id, status)
        except asyncpg.CheckViolationError as error:
            raise BadInput(str(error)) from None

    return set_status


@pytest.fixture
async def ann(store: ControlStores) -> Leader:
    leader = Leader(store)
    await leader.observe()
    return leader
