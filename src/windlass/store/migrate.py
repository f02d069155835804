"""Numbered plain SQL files, applied in order, in one transaction, under a lock.

A database holds the version of the last file applied and the checksum of each. A program that is newer or older than
its database says so and changes nothing; only `windlass db migrate` (and `up`) moves the schema, and only forward.
"""

import hashlib
from dataclasses import dataclass
from importlib import resources
from typing import Any

from windlass.model.errors import SchemaMismatch
from windlass.store.connect import connected

# Any number will do as long as all migrating programs agree on it; this one spells "windlass" on a phone's keys.
LOCK_KEY = 94635277
# Building an index over a large table takes its time; a lock held by another migration should not take this long.
MIGRATE_TIMEOUT_S = 3600.0
LOCK_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class Migration:
    version: int
    name: str
    sql: str

    @property
    def checksum(self) -> str:
        return hashlib.sha256(self.sql.encode()).hexdigest()[:16]


def _read_migrations() -> list[Migration]:
    files = [f for f in resources.files("windlass.store").joinpath("migrations").iterdir() if f.name.endswith(".sql")]
    migrations = [Migration(int(f.name[:4]), f.name[5:-4], f.read_text()) for f in files]
    return sorted(migrations, key=lambda migration: migration.version)


MIGRATIONS = _read_migrations()
LATEST_VERSION = MIGRATIONS[-1].version


def check_schema_version(version: int | None) -> None:
    """Raise SchemaMismatch unless the database is exactly as new as this program."""
    if version is None:
        raise SchemaMismatch("the database has no windlass schema yet: run `windlass db migrate` once.")
    if version < LATEST_VERSION:
        raise SchemaMismatch(
            f"the database's schema is at version {version} and this program needs {LATEST_VERSION}: "
            "run `windlass db migrate`."
        )
    if version > LATEST_VERSION:
        raise SchemaMismatch(
            f"the database's schema is at version {version} and this program knows only {LATEST_VERSION}: "
            "upgrade windlass on this machine."
        )


async def applied_migrations(connection: Any) -> dict[int, Any]:
    """Version to row (name, checksum, applied_at) of what the database has; empty without a schema."""
    if await connection.fetchval("select to_regclass('windlass.migrations') is null"):
        return {}
    rows = await connection.fetch(
        "select version, name, checksum, applied_at from windlass.migrations order by version"
    )
    return {row["version"]: row for row in rows}


async def migrate(dsn: str) -> list[Migration]:
    """Bring the database to this program's version. Returns what was applied; all of it or nothing."""
    async with connected(dsn, "migrating", command_timeout_s=MIGRATE_TIMEOUT_S) as connection, connection.transaction():
        await connection.execute(f"set local lock_timeout = '{LOCK_TIMEOUT_S}s'")
        await connection.execute(f"select pg_advisory_xact_lock({LOCK_KEY})")
        applied = await applied_migrations(connection)
        _refuse_strangers(applied)
        missing = [m for m in MIGRATIONS if m.version not in applied]
        for migration in missing:
            await connection.execute(migration.sql)
            await connection.execute(
                "insert into windlass.migrations (version, name, checksum) values ($1, $2, $3)",
                migration.version,
                migration.name,
                migration.checksum,
            )
        return missing


def _refuse_strangers(applied: dict[int, Any]) -> None:
    if applied and max(applied) > LATEST_VERSION:
        check_schema_version(max(applied))
    for migration in MIGRATIONS:
        row = applied.get(migration.version)
        if row is not None and row["checksum"] != migration.checksum:
            raise SchemaMismatch(
                f"migration {migration.version:04} ({migration.name}) in the database differs from this program's: "
                "the schema was made by a modified windlass; nothing was changed."
            )
