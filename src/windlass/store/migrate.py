"""Creates and upgrades the database's schema, and checks that a program and its database fit together.

`schema/` is the current schema by subject; an empty database gets it as a whole. `migrations/` has the deltas from each
released version to the next. Both run in one transaction under a lock; the schema only moves forward.

Two version numbers: the orchestrator needs exactly its own schema version. Workers and clients use only the public
contract (docs/sql.md) and need a database that supports their contract version.
"""

import hashlib
from dataclasses import dataclass
from importlib import resources
from typing import Any

from windlass.model.errors import SchemaMismatch
from windlass.store.connect import connected

# The version of the first release. Lower versions are of development builds, which have no upgrade path.
FIRST_VERSION = 10
# The public contract that this program uses. See windlass.contract_versions() in schema/01_foundation.sql.
CONTRACT_VERSION = 1
# Name of the row in windlass.migrations that says: created from schema/ at this version.
SCHEMA_NAME = "schema"
# An arbitrary number that all migrating programs agree on: "windlass" on a phone's keys.
LOCK_KEY = 94635277
# Building an index over a large table takes long. Waiting for another migration should not.
MIGRATE_TIMEOUT_S = 3600.0
LOCK_TIMEOUT_S = 60
# The owner of the schema, quoted, if that is another role than this user and this user is its member.
_OWNER = """
select quote_ident(r.rolname) from pg_namespace n join pg_roles r on r.oid = n.nspowner
where n.nspname = 'windlass' and r.rolname <> current_user and pg_has_role(r.oid, 'member')
"""
# Whether the roles have rights in this database. Roles belong to the server, which may have several databases.
_HAS_ROLES = """
select exists (
  select from pg_roles r
  where r.rolname = 'windlass_orchestrator' and has_schema_privilege(r.oid, 'windlass_internal', 'usage')
    and not r.rolsuper
)
"""


@dataclass(frozen=True, slots=True)
class Migration:
    version: int
    name: str
    sql: str

    @property
    def checksum(self) -> str:
        return hashlib.sha256(self.sql.encode()).hexdigest()[:16]


def _read_files(folder: str) -> list[tuple[str, str]]:
    files = resources.files("windlass.store").joinpath(folder).iterdir()
    return sorted((file.name, file.read_text()) for file in files if file.name.endswith(".sql"))


# Deltas since the first release, in order: NNNN_name.sql.
MIGRATIONS = [Migration(int(name[:4]), name[5:-4], sql) for name, sql in _read_files("migrations")]
LATEST_VERSION = max((migration.version for migration in MIGRATIONS), default=FIRST_VERSION)
# All of schema/, for an empty database.
SCHEMA = Migration(LATEST_VERSION, SCHEMA_NAME, "\n".join(sql for _, sql in _read_files("schema")))


def check_schema_version(version: int | None) -> None:
    """Raise SchemaMismatch unless the database has exactly this program's schema version."""
    if version is None:
        raise SchemaMismatch("the database has no windlass schema yet: run `windlass db migrate` once.")
    if version < FIRST_VERSION:
        raise SchemaMismatch(
            f"the database's schema is at version {version}, which a development build of windlass created and which "
            "cannot be upgraded: use a new database."
        )
    if version < LATEST_VERSION:
        raise SchemaMismatch(
            f"the database's schema is at version {version} and this program needs {LATEST_VERSION}: "
            "run `windlass db migrate`."
        )
    if version > LATEST_VERSION:
        raise SchemaMismatch(
            f"the database's schema is at version {version} and this program supports {LATEST_VERSION}: "
            "upgrade windlass on this machine."
        )


async def check_contract(connection: Any) -> None:
    """Raise SchemaMismatch unless the database supports this program's version of the public contract."""
    applied = await applied_migrations(connection)
    if max(applied, default=0) < FIRST_VERSION:
        check_schema_version(max(applied, default=None))
    oldest, newest = await connection.fetchrow("select oldest, newest from windlass.contract_versions()")
    if newest < CONTRACT_VERSION:
        raise SchemaMismatch(
            f"the database supports contract versions {oldest} to {newest} and this program needs {CONTRACT_VERSION}: "
            "run `windlass db migrate`."
        )
    if oldest > CONTRACT_VERSION:
        raise SchemaMismatch(
            f"the database supports contract versions {oldest} to {newest} and this program uses {CONTRACT_VERSION}: "
            "upgrade windlass on this machine."
        )


async def applied_migrations(connection: Any) -> dict[int, Any]:
    """The rows of windlass.migrations by version; empty without a schema."""
    # The view is for users who may not read the table. Schemas of development builds do not have it.
    history, table = await connection.fetchrow(
        "select to_regclass('windlass.schema_history')::text, to_regclass('windlass.migrations')::text"
    )
    if table is None:
        return {}
    columns = "version, name, checksum, applied_at"
    rows = await connection.fetch(f"select {columns} from {history or table} order by version")  # noqa: S608
    return {row["version"]: row for row in rows}


async def is_schema_current(dsn: str) -> bool:
    """Whether `migrate` would change nothing. A user without the owner's rights may ask."""
    async with connected(dsn, "reading the schema's version") as connection:
        applied = await applied_migrations(connection)
        if applied:
            _check_upgradable(applied)
        return not missing_migrations(applied)


def missing_migrations(applied: dict[int, Any]) -> list[Migration]:
    """What brings a database with these rows to LATEST_VERSION: all of schema/ if it is empty, else deltas."""
    if not applied:
        return [SCHEMA]
    return [migration for migration in MIGRATIONS if migration.version > max(applied)]


async def migrate(dsn: str) -> list[Migration]:
    """Bring the database to LATEST_VERSION. Returns what was applied; applies all of it or nothing."""
    async with connected(dsn, "migrating", command_timeout_s=MIGRATE_TIMEOUT_S) as connection, connection.transaction():
        await connection.execute(f"set local lock_timeout = '{LOCK_TIMEOUT_S}s'")
        await connection.execute(f"select pg_advisory_xact_lock({LOCK_KEY})")
        # Objects that a migration creates belong to the schema's owner, whose member this user may be.
        owner = await connection.fetchval(_OWNER)
        if owner is not None:
            await connection.execute(f"set local role {owner}")
        applied = await applied_migrations(connection)
        missing = missing_migrations(applied)
        if applied:
            _check_upgradable(applied)
        for migration in missing:
            await connection.execute(migration.sql)
            await connection.execute(
                "insert into windlass.migrations (version, name, checksum) values ($1, $2, $3)",
                migration.version,
                migration.name,
                migration.checksum,
            )
        if missing and await connection.fetchval(_HAS_ROLES):
            await connection.execute("select windlass_internal.apply_roles()")
        return missing


async def apply_roles(dsn: str, script: str) -> None:
    """Run the script of `windlass db roles`. Raises SchemaMismatch if the schema is not this program's."""
    async with connected(dsn, "creating roles", command_timeout_s=MIGRATE_TIMEOUT_S) as connection:
        check_schema_version(max(await applied_migrations(connection), default=None))
        await connection.execute(script)


def _check_upgradable(applied: dict[int, Any]) -> None:
    """Raise SchemaMismatch if the database is newer, of a development build, or was created by a modified program."""
    version = max(applied)
    if not FIRST_VERSION <= version <= LATEST_VERSION:
        check_schema_version(version)
    for migration in (SCHEMA, *MIGRATIONS):
        row = applied.get(migration.version)
        if row is not None and row["name"] == migration.name and row["checksum"] != migration.checksum:
            raise SchemaMismatch(
                f"{migration.version:04} {migration.name} in the database differs from this program's: "
                "a modified windlass created it; nothing was changed."
            )
