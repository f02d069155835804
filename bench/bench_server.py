"""The PostgreSQL server that all contenders share, configured as Windlass ships it: fsync and synchronous_commit on.

Each contender gets a database of its own. A database filled with tasks is built once and copied when needed.
"""

import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg

from windlass.store.embedded import EmbeddedPostgres


class BenchServer:
    def __init__(self, dsn: str, folder: Path, postgres_data: Path) -> None:
        self._dsn = dsn
        self.folder = folder
        self.postgres_data = postgres_data
        self._templates: set[str] = set()

    def dsn_of(self, database: str) -> str:
        return urlunsplit(urlsplit(self._dsn)._replace(path=f"/{database}"))

    async def template(self, name: str, build: Callable[[str], Awaitable[object]]) -> str:
        """Build the template database `name` on first use."""
        if name not in self._templates:
            await self._execute(f"create database {name} template template0")
            await build(self.dsn_of(name))
            async with connected(self.dsn_of(name)) as connection:
                await connection.execute("vacuum analyze")
            self._templates.add(name)
        return name

    @asynccontextmanager
    async def copy(self, template: str, name: str) -> AsyncIterator[str]:
        """Yield the address of a fresh copy of a template, dropped afterwards."""
        await self._execute(f"create database {name} template {template} strategy file_copy")
        try:
            yield self.dsn_of(name)
        finally:
            await self._execute(f"drop database {name} with (force)")

    async def checkpoint(self) -> None:
        """Flush dirty pages, so that no contender pays for the writes of its predecessor."""
        await self._execute("checkpoint")

    async def describe(self) -> str:
        async with connected(self._dsn) as connection:
            version = await connection.fetchval("show server_version")
            settings = [
                f"{name} {await connection.fetchval(f'show {name}')}"
                for name in ("fsync", "synchronous_commit", "full_page_writes", "shared_buffers", "max_wal_size")
            ]
        return f"PostgreSQL {version}; " + ", ".join(settings)

    async def _execute(self, sql: str) -> None:
        async with connected(self._dsn) as connection:
            await connection.execute(sql)


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(dsn)
    try:
        yield connection
    finally:
        await connection.close()


@contextmanager
def open_bench_server() -> Iterator[BenchServer]:
    with tempfile.TemporaryDirectory(prefix="windlass-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        # Started by root, the server runs as a user of its own, which must be able to reach its data.
        folder.chmod(0o755)
        with EmbeddedPostgres(folder / "data") as postgres:
            yield BenchServer(postgres.dsn, folder, folder / "data" / "postgres")
