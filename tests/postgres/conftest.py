from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from support.api_fixture import ApiFixture, open_api
from support.queue_sql import RoleDsn, connected
from support.stores import PostgresStores
from windlass.store.export_sql import GRANTS


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
    """The DSN of user `shop` (a producer) or `hand` (a worker). Applies grants.sql twice: it may be repeated."""
    await connection.execute(GRANTS)
    await connection.execute(GRANTS)
    await connection.execute("create role shop login in role windlass_producer")
    await connection.execute("create role hand login in role windlass_worker")
    try:
        yield lambda user: each_dsn.replace(f"{urlsplit(each_dsn).username}@", f"{user}@")
    finally:
        await connection.execute("drop owned by windlass_producer, windlass_worker")
        await connection.execute("drop role shop, hand, windlass_producer, windlass_worker")
