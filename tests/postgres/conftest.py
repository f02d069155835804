from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from support.api_fixture import ApiFixture, open_api
from support.queue_sql import RoleDsn, connected
from support.stores import PostgresStores
from windlass.store.export_sql import ROLES

# Users by role: a producer, a worker, an orchestrator, a viewer.
USERS = {
    "shop": "windlass_producer",
    "hand": "windlass_worker",
    "conductor": "windlass_orchestrator",
    "guest": "windlass_viewer",
}


@pytest.fixture
async def api(dsn: str, clock: Any) -> AsyncIterator[ApiFixture]:
    async with open_api(dsn, clock) as api:
        yield api


@pytest.fixture
async def connection(each_dsn: str) -> AsyncIterator[Any]:
    async with connected(each_dsn) as connection:
        yield connection


@pytest.fixture
async def second_connection(each_dsn: str) -> AsyncIterator[Any]:
    async with connected(each_dsn) as connection:
        yield connection


@pytest.fixture
async def store(each_dsn: str) -> AsyncIterator[PostgresStores]:
    async with PostgresStores(each_dsn) as store:
        yield store


@pytest.fixture
async def role_dsn(each_dsn: str, connection: Any) -> AsyncIterator[RoleDsn]:
    """The DSN of a user of `windlass db roles`. Applies the script twice: it may be repeated."""
    await connection.execute(ROLES)
    await connection.execute(ROLES)
    for user, role in USERS.items():
        # Roles belong to the server, and may be there from an earlier test.
        if not await connection.fetchval("select exists (select from pg_roles where rolname = $1)", user):
            await connection.execute(f"create role {user} login in role {role}")
    yield lambda user: each_dsn.replace(f"{urlsplit(each_dsn).username}@", f"{user}@")
