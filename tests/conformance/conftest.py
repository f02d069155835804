"""Fixtures of the conformance suites: each kind of store, and each with worker calls over HTTP."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest

from support.http_transport_fixture import OverHttp, over_http
from support.memory_store.stores import MemoryStores
from support.postgres_servers import run_aside
from support.provider_fixtures import RETENTION, empty_tables, spawn_in_memory, spawn_in_postgres
from support.stores import AnyStore, PostgresStores
from windlass.store.doctor_checks import ORCHESTRATOR, dsn_with_role
from windlass.store.export_sql import ROLES
from windlass.store.migration import apply_roles


@pytest.fixture(scope="session")
def shared_dsn(embedded_server: Any) -> Iterator[str]:
    with embedded_server.migrated_database() as dsn:
        run_aside(apply_roles(dsn, ROLES))
        yield dsn


@pytest.fixture(params=["memory", "postgres", "memory over http", "postgres over http"])
async def store(request: pytest.FixtureRequest, clock: Any) -> AsyncIterator[Any]:
    kind, _, way = request.param.partition(" ")
    async with _store(kind, request, clock) as behind:
        if not way:
            yield behind
            return
        async with over_http(behind) as seen:
            yield seen


@asynccontextmanager
async def _store(kind: str, request: pytest.FixtureRequest, clock: Any) -> AsyncIterator[AnyStore]:
    if kind == "memory":
        yield MemoryStores(clock, RETENTION, Random(1))  # noqa: S311
        return
    dsn = request.getfixturevalue("shared_dsn")
    await empty_tables(dsn)
    # Without the owner's rights, as `windlass up` runs after `windlass db roles`.
    dsn = await dsn_with_role(dsn, ORCHESTRATOR)
    assert "role=windlass_orchestrator" in dsn
    async with PostgresStores(dsn, retention=RETENTION, virtual_now=clock) as postgres:
        yield postgres


@pytest.fixture
def spawn_worker(request: pytest.FixtureRequest, store: Any, clock: Any) -> Callable[[str, str, int], Awaitable[None]]:
    """Spawns a worker (id, fleet, slot) as an orchestrator does."""
    behind = store.behind if isinstance(store, OverHttp) else store

    async def spawn_worker(worker_id: str, fleet: str, slot: int) -> None:
        if isinstance(behind, MemoryStores):
            spawn_in_memory(behind, worker_id, fleet, slot)
        else:
            await spawn_in_postgres(request.getfixturevalue("shared_dsn"), clock(), worker_id, fleet, slot)

    return spawn_worker
