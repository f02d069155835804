"""Creating and upgrading the schema, and which programs a database accepts."""

import asyncio

import pytest

from support.queue_sql import connected
from support.stores import PostgresStores
from windlass.model.errors import DatabaseUnavailable, SchemaMismatch
from windlass.model.task import NewTask
from windlass.model.worker import Registration
from windlass.store import migration as module
from windlass.store.database import Database
from windlass.store.migration import (
    FIRST_VERSION,
    LATEST_VERSION,
    MIGRATIONS,
    SCHEMA,
    Migration,
    applied_migrations,
    migrate,
)

LIMIT_S = 60.0


async def versions(dsn: str) -> list[int]:
    async with connected(dsn) as connection:
        return list(await applied_migrations(connection))


async def objects(dsn: str) -> set[tuple[str, str]]:
    """All tables, views, indexes and functions outside the system schemas."""
    async with connected(dsn) as connection:
        rows = await connection.fetch(
            "select n.nspname, c.relname from pg_class c join pg_namespace n on n.oid = c.relnamespace"
            " where n.nspname !~ '^(pg_|information_schema)'"
            " union all"
            " select n.nspname, p.oid::regprocedure::text from pg_proc p join pg_namespace n on n.oid = p.pronamespace"
            " where n.nspname !~ '^(pg_|information_schema)'"
        )
        return {(row[0], row[1]) for row in rows}


def pretend_migrations(monkeypatch: pytest.MonkeyPatch, migrations: list[Migration]) -> None:
    """Act as a program with these deltas. An empty database still gets the present schema, and then the deltas."""
    monkeypatch.setattr(module, "MIGRATIONS", migrations)
    monkeypatch.setattr(module, "LATEST_VERSION", migrations[-1].version)


NEXT = Migration(LATEST_VERSION + 1, "next", "create table windlass.next (id integer)")
BROKEN = Migration(LATEST_VERSION + 2, "broken", "create table windlass.half (id integer); select 1 / 0")
NEW_CONTRACT = """
create or replace function windlass.contract_versions(out oldest integer, out newest integer)
language sql immutable parallel safe
as $$ select {}, {} $$
"""


def test_migrations_are_numbered_without_gaps() -> None:
    numbers = [migration.version for migration in MIGRATIONS]
    assert numbers == list(range(FIRST_VERSION + 1, FIRST_VERSION + 1 + len(MIGRATIONS)))
    assert max([FIRST_VERSION, *numbers]) == LATEST_VERSION


async def test_empty_database_gets_the_schema_and_its_version(empty_dsn: str) -> None:
    assert await migrate(empty_dsn) == [SCHEMA]
    assert await versions(empty_dsn) == [LATEST_VERSION]
    async with PostgresStores(empty_dsn, is_contract_sufficient=True) as store:
        assert await store.enqueue(NewTask("q")) == 1


async def test_migrating_again_changes_nothing(empty_dsn: str) -> None:
    await migrate(empty_dsn)
    before = await objects(empty_dsn)
    assert await migrate(empty_dsn) == []
    assert await objects(empty_dsn) == before


async def test_of_concurrent_migrations_one_applies_and_all_succeed(empty_dsn: str) -> None:
    applied = await asyncio.wait_for(asyncio.gather(*(migrate(empty_dsn) for _ in range(4))), LIMIT_S)
    assert sorted(len(migrations) for migrations in applied) == [0, 0, 0, 1]
    assert await versions(empty_dsn) == [LATEST_VERSION]


async def test_orchestrator_refuses_an_older_schema_until_it_is_migrated(
    empty_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await migrate(empty_dsn)
    before = await objects(empty_dsn)
    pretend_migrations(monkeypatch, [*MIGRATIONS, NEXT])
    with pytest.raises(SchemaMismatch) as refusal:
        await Database(empty_dsn).__aenter__()
    assert str(refusal.value) == (
        f"the database's schema is at version {LATEST_VERSION} and this program needs {NEXT.version}: "
        "run `windlass db migrate`."
    )
    assert await objects(empty_dsn) == before
    assert await migrate(empty_dsn) == [NEXT]
    assert await versions(empty_dsn) == [LATEST_VERSION, NEXT.version]
    async with Database(empty_dsn):
        pass


async def test_newer_schema_is_refused_by_orchestrator_and_migrate(
    empty_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await migrate(empty_dsn)
    with monkeypatch.context() as newer:
        pretend_migrations(newer, [*MIGRATIONS, NEXT])
        await migrate(empty_dsn)
    before = await objects(empty_dsn)
    sentence = (
        f"the database's schema is at version {NEXT.version} and this program supports {LATEST_VERSION}: "
        "upgrade windlass on this machine."
    )
    for refused in (Database(empty_dsn).__aenter__(), migrate(empty_dsn)):
        with pytest.raises(SchemaMismatch) as refusal:
            await refused
        assert str(refusal.value) == sentence
    assert await objects(empty_dsn) == before
    assert await versions(empty_dsn) == [LATEST_VERSION, NEXT.version]


@pytest.mark.parametrize("version", [LATEST_VERSION - 1, LATEST_VERSION + 1], ids=["older", "newer"])
async def test_worker_uses_another_schema_version_with_its_contract(
    empty_dsn: str, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways: the program is newer than the database, and the database is newer than the program."""
    await migrate(empty_dsn)
    async with connected(empty_dsn) as connection:
        await connection.execute("update windlass.migrations set version = $1", version)
    monkeypatch.setattr(module, "FIRST_VERSION", LATEST_VERSION - 1)
    with pytest.raises(SchemaMismatch):
        await Database(empty_dsn).__aenter__()
    async with PostgresStores(empty_dsn, is_contract_sufficient=True) as store:
        task_id = await store.enqueue(NewTask("q"))
        await store.register(Registration("w", ("q",)))
        assert [claim.task_id for claim in await store.claim("w", ("q",))] == [task_id]


@pytest.mark.parametrize(
    ("supported", "sentence"),
    [
        (
            (2, 3),
            "the database supports contract versions 2 to 3 and this program uses 1: upgrade windlass on this machine.",
        ),
        ((0, 0), "the database supports contract versions 0 to 0 and this program needs 1: run `windlass db migrate`."),
    ],
    ids=["contract dropped", "contract not yet supported"],
)
async def test_worker_refuses_a_database_without_its_contract_version(
    empty_dsn: str, supported: tuple[int, int], sentence: str
) -> None:
    await migrate(empty_dsn)
    async with connected(empty_dsn) as connection:
        await connection.execute(NEW_CONTRACT.format(*supported))
    with pytest.raises(SchemaMismatch) as refusal:
        await Database(empty_dsn, is_contract_sufficient=True).__aenter__()
    assert str(refusal.value) == sentence


async def test_schema_of_a_development_build_is_refused(empty_dsn: str) -> None:
    await migrate(empty_dsn)
    async with connected(empty_dsn) as connection:
        await connection.execute("update windlass.migrations set version = 9")
    sentence = (
        "the database's schema is at version 9, which a development build of windlass created and which cannot be "
        "upgraded: use a new database."
    )
    for refused in (
        Database(empty_dsn, is_contract_sufficient=True).__aenter__(),
        Database(empty_dsn).__aenter__(),
        migrate(empty_dsn),
    ):
        with pytest.raises(SchemaMismatch) as refusal:
            await refused
        assert str(refusal.value) == sentence


async def test_database_without_schema_is_refused(empty_dsn: str) -> None:
    for store in (Database(empty_dsn, is_contract_sufficient=True), Database(empty_dsn)):
        with pytest.raises(SchemaMismatch, match="no windlass schema yet: run `windlass db migrate` once"):
            await store.__aenter__()
    assert await objects(empty_dsn) == set()


async def test_schema_of_a_modified_program_is_not_migrated(empty_dsn: str) -> None:
    await migrate(empty_dsn)
    async with connected(empty_dsn) as connection:
        await connection.execute("update windlass.migrations set checksum = 'another'")
    before = await objects(empty_dsn)
    with pytest.raises(SchemaMismatch) as refusal:
        await migrate(empty_dsn)
    assert str(refusal.value) == (
        f"{LATEST_VERSION:04} schema in the database differs from this program's: "
        "a modified windlass created it; nothing was changed."
    )
    assert await objects(empty_dsn) == before


async def test_failing_schema_leaves_an_empty_database_empty(empty_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SCHEMA", Migration(LATEST_VERSION, "schema", f"{SCHEMA.sql}; select 1 / 0"))
    with pytest.raises(DatabaseUnavailable, match="migrating: .* refused the statement .division by zero."):
        await migrate(empty_dsn)
    assert await objects(empty_dsn) == set()


async def test_failing_migration_leaves_the_schema_unchanged(empty_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    await migrate(empty_dsn)
    before = await objects(empty_dsn)
    with monkeypatch.context() as broken:
        pretend_migrations(broken, [*MIGRATIONS, NEXT, BROKEN])
        with pytest.raises(DatabaseUnavailable, match="migrating: .* refused the statement .division by zero."):
            await migrate(empty_dsn)
    assert await objects(empty_dsn) == before
    assert await versions(empty_dsn) == [LATEST_VERSION]
    async with Database(empty_dsn):
        pass


async def test_objects_of_a_migration_are_closed_to_others(empty_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sql = "create table windlass.next (id integer); create function windlass.f() returns int language sql as 'select 1'"
    await migrate(empty_dsn)
    with monkeypatch.context() as next_release:
        pretend_migrations(next_release, [*MIGRATIONS, Migration(LATEST_VERSION + 1, "next", sql)])
        await migrate(empty_dsn)
    async with connected(empty_dsn) as connection:
        assert not await connection.fetchval("select has_function_privilege('public', 'windlass.f()', 'execute')")
        assert await connection.fetchval("select relrowsecurity from pg_class where oid = 'windlass.next'::regclass")


async def test_migration_waits_for_a_lock_only_until_its_timeout(
    empty_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOCK_TIMEOUT_S", 0.01)
    async with connected(empty_dsn) as connection, connection.transaction():
        await connection.execute("select pg_advisory_xact_lock($1)", module.LOCK_KEY)
        with pytest.raises(DatabaseUnavailable, match=r"migrating: .*lock timeout\)\. Try again\.$"):
            await migrate(empty_dsn)
    assert await objects(empty_dsn) == set()
