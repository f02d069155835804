"""Migrations: forward only, all or nothing, one at a time, and a stranger's schema is left alone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest

from support.stores import PostgresStores
from windlass.model.errors import DatabaseUnavailable, SchemaMismatch
from windlass.model.task import NewTask
from windlass.store import migrate as module
from windlass.store.migrate import LATEST_VERSION, MIGRATIONS, Migration, applied_migrations, migrate

LIMIT_S = 60.0
ALL_VERSIONS = [migration.version for migration in MIGRATIONS]


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(dsn)
    try:
        yield connection
    finally:
        await connection.close()


async def versions(dsn: str) -> list[int]:
    async with connected(dsn) as connection:
        return list(await applied_migrations(connection))


async def objects(dsn: str) -> set[tuple[str, str]]:
    """All tables, views, indexes and functions that the system did not bring."""
    async with connected(dsn) as connection:
        rows = await connection.fetch(
            "select n.nspname, c.relname from pg_class c join pg_namespace n on n.oid = c.relnamespace"
            " where n.nspname !~ '^(pg_|information_schema)'"
            " union all"
            " select n.nspname, p.oid::regprocedure::text from pg_proc p join pg_namespace n on n.oid = p.pronamespace"
            " where n.nspname !~ '^(pg_|information_schema)'"
        )
        return {(row[0], row[1]) for row in rows}


def know(monkeypatch: pytest.MonkeyPatch, migrations: list[Migration]) -> None:
    """Be a program that brings these."""
    monkeypatch.setattr(module, "MIGRATIONS", migrations)
    monkeypatch.setattr(module, "LATEST_VERSION", migrations[-1].version)


NEXT = Migration(LATEST_VERSION + 1, "next", "create table windlass.next (id integer)")
BROKEN = Migration(LATEST_VERSION + 1, "broken", "create table windlass.half (id integer); select 1 / 0")


def test_migrations_are_numbered_without_gaps() -> None:
    assert list(range(1, LATEST_VERSION + 1)) == ALL_VERSIONS


async def test_a_fresh_database_gets_everything(empty_dsn: str) -> None:
    assert [migration.version for migration in await migrate(empty_dsn)] == ALL_VERSIONS
    assert await versions(empty_dsn) == ALL_VERSIONS
    async with PostgresStores(empty_dsn) as store:
        assert await store.enqueue(NewTask("q")) == 1


async def test_migrating_again_changes_nothing(empty_dsn: str) -> None:
    await migrate(empty_dsn)
    before = await objects(empty_dsn)
    assert await migrate(empty_dsn) == []
    assert await objects(empty_dsn) == before


async def test_of_two_that_migrate_at_once_one_applies_and_both_succeed(empty_dsn: str) -> None:
    applied = await asyncio.wait_for(asyncio.gather(*(migrate(empty_dsn) for _ in range(4))), LIMIT_S)
    assert sorted(len(migrations) for migrations in applied) == [0, 0, 0, len(MIGRATIONS)]
    assert await versions(empty_dsn) == ALL_VERSIONS


async def test_an_older_schema_is_refused_by_a_store_and_moved_by_migrating(
    empty_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        know(older, MIGRATIONS[:1])
        await migrate(empty_dsn)
    before = await objects(empty_dsn)
    with pytest.raises(SchemaMismatch) as refusal:
        await PostgresStores(empty_dsn).__aenter__()
    assert str(refusal.value) == (
        f"the database's schema is at version 1 and this program needs {LATEST_VERSION}: run `windlass db migrate`."
    )
    assert await objects(empty_dsn) == before
    assert [migration.version for migration in await migrate(empty_dsn)] == ALL_VERSIONS[1:]
    async with PostgresStores(empty_dsn):
        pass


async def test_a_newer_schema_is_refused_by_a_store_and_by_migrating(
    empty_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as newer:
        know(newer, [*MIGRATIONS, NEXT])
        await migrate(empty_dsn)
    before = await objects(empty_dsn)
    sentence = (
        f"the database's schema is at version {LATEST_VERSION + 1} and this program knows only {LATEST_VERSION}: "
        "upgrade windlass on this machine."
    )
    for refused in (PostgresStores(empty_dsn).__aenter__(), migrate(empty_dsn)):
        with pytest.raises(SchemaMismatch) as refusal:
            await refused
        assert str(refusal.value) == sentence
    assert await objects(empty_dsn) == before
    assert await versions(empty_dsn) == [*ALL_VERSIONS, NEXT.version]


async def test_a_database_without_schema_is_refused_by_a_store(empty_dsn: str) -> None:
    with pytest.raises(SchemaMismatch, match="no windlass schema yet: run `windlass db migrate` once"):
        await PostgresStores(empty_dsn).__aenter__()
    assert await objects(empty_dsn) == set()


async def test_a_schema_made_by_a_modified_windlass_is_left_alone(
    empty_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await migrate(empty_dsn)
    async with connected(empty_dsn) as connection:
        await connection.execute("update windlass.migrations set checksum = 'another' where version = 2")
    before = await objects(empty_dsn)
    know(monkeypatch, [*MIGRATIONS, NEXT])
    with pytest.raises(SchemaMismatch) as refusal:
        await migrate(empty_dsn)
    assert str(refusal.value) == (
        f"migration 0002 ({MIGRATIONS[1].name}) in the database differs from this program's: "
        "the schema was made by a modified windlass; nothing was changed."
    )
    assert await objects(empty_dsn) == before
    assert await versions(empty_dsn) == ALL_VERSIONS


async def test_a_failing_migration_leaves_nothing_behind_in_an_empty_database(
    empty_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    know(monkeypatch, [*MIGRATIONS, BROKEN])
    with pytest.raises(DatabaseUnavailable, match="migrating: .* refused .division by zero."):
        await migrate(empty_dsn)
    assert await objects(empty_dsn) == set()


async def test_a_failing_migration_leaves_the_old_schema_as_it_was(
    empty_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await migrate(empty_dsn)
    before = await objects(empty_dsn)
    with monkeypatch.context() as broken:
        know(broken, [*MIGRATIONS, NEXT, Migration(NEXT.version + 1, BROKEN.name, BROKEN.sql)])
        with pytest.raises(DatabaseUnavailable, match="migrating: .* refused .division by zero."):
            await migrate(empty_dsn)
    assert await objects(empty_dsn) == before
    assert await versions(empty_dsn) == ALL_VERSIONS
    async with PostgresStores(empty_dsn):
        pass


async def test_a_migration_does_not_wait_for_ever(empty_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOCK_TIMEOUT_S", 0.01)
    async with connected(empty_dsn) as connection, connection.transaction():
        await connection.execute("select pg_advisory_xact_lock($1)", module.LOCK_KEY)
        with pytest.raises(DatabaseUnavailable, match=r"migrating: .*lock timeout\): try again\.$"):
            await migrate(empty_dsn)
    assert await objects(empty_dsn) == set()
