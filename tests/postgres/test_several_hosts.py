"""A URL with several hosts reaches the server that works, however the others fail."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from support.stores import PostgresStores
from windlass.model.errors import DatabaseUnavailable
from windlass.model.task import NewTask
from windlass.store.connection import connect

LIMIT_S = 30.0


@asynccontextmanager
async def failing_host(kind: str) -> AsyncIterator[int]:
    """The port of a host that has failed in some way."""

    async def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A proxy or load balancer in front of a dead server.
        writer.close()

    async def be_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A host without power: nothing comes back, not even an error.
        await reader.read(-1)
        writer.close()

    if kind == "refuses":
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        yield port
        return
    server = await asyncio.start_server(close if kind == "closes" else be_silent, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def with_first_host(dsn: str, port: int) -> str:
    """The URL of a database with a further host before its own."""
    parts = urlsplit(dsn)
    given = parse_qs(parts.query)
    query = f"host=127.0.0.1,{given['host'][0]}&port={port},{given['port'][0]}&target_session_attrs=read-write"
    return parts._replace(query=f"{query}&sslmode=disable").geturl()


@pytest.mark.parametrize("kind", ["refuses", "closes", "is silent"])
async def test_next_host_is_used_when_first_fails(dsn: str, kind: str) -> None:
    async with (
        failing_host(kind) as port,
        asyncio.timeout(LIMIT_S),
        PostgresStores(with_first_host(dsn, port)) as store,
    ):
        assert await store.enqueue(NewTask("q")) > 0


async def test_standby_is_skipped_for_read_write_sessions(dsn: str) -> None:
    # A database that is read-only by default answers like a standby.
    connection = await connect(dsn)
    name = await connection.fetchval("select current_database()")
    await connection.execute(f"alter database {name} set default_transaction_read_only = on")
    await connection.close()
    given = parse_qs(urlsplit(dsn).query)
    host, port = given["host"][0], given["port"][0]
    both = (
        urlsplit(dsn)._replace(query=f"host={host},{host}&port={port},{port}&target_session_attrs=read-write").geturl()
    )
    with pytest.raises(DatabaseUnavailable, match="cannot be reached"):
        await PostgresStores(both).__aenter__()


async def test_error_names_every_host(unused_tcp_port_factory: Any) -> None:
    first, second = unused_tcp_port_factory(), unused_tcp_port_factory()
    dsn = f"postgresql://postgres@/app?host=127.0.0.1,127.0.0.1&port={first},{second}&target_session_attrs=read-write"
    with pytest.raises(DatabaseUnavailable, match=f"the database at 127.0.0.1:{first} or 127.0.0.1:{second} cannot be"):
        await PostgresStores(dsn).__aenter__()
