"""Creates and upgrades the database's schema, and checks that a program and its database fit together.

`schema/` is the current schema by subject; an empty database gets it as a whole. `migrations/` has the deltas from each
released version to the next. Both run under a lock. No statement blocks workers for longer than TABLE_LOCK_TIMEOUT_S;
`rollback` undoes migrations that say how.

Two version numbers: the orchestrator needs exactly its own schema version. Workers and clients use only the public
contract (docs/sql.md) and need a database that supports their contract version.
"""

import asyncio
import hashlib
import random
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from importlib import resources
from itertools import takewhile
from typing import Any, Literal, TypeVar

import asyncpg

from windlass.model.errors import DatabaseUnavailable, SchemaMismatch
from windlass.store.connection import connected

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
# A statement that needs a whole table waits this long for it. Workers wait behind it, so it is shorter than any lease.
# It is shorter than PostgreSQL's deadlock_timeout (1 s), too: a deadlock normally repeats the migration, not a worker.
TABLE_LOCK_TIMEOUT_S = 0.7
TABLE_LOCK_ATTEMPTS = 60
MAX_RETRY_PAUSE_S = 5.0
# Between two batches, for the transactions of others.
BATCH_PAUSE_S = 0.02
# A billion rows in batches of a thousand.
MAX_BATCHES = 1_000_000
_STEP = re.compile(r"^-- step: (transaction|batches|statement)$", re.MULTILINE)
_ROLLBACK = re.compile(r"^-- rollback$", re.MULTILINE)
_Result = TypeVar("_Result")
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
class Step:
    kind: Literal["transaction", "batches", "statement"]
    sql: str


@dataclass(frozen=True, slots=True)
class Migration:
    """One file. `-- step: KIND` begins a step, `-- rollback` the statements that undo it all (migrations/README.md)."""

    version: int
    name: str
    sql: str

    @property
    def checksum(self) -> str:
        return hashlib.sha256(self.sql.encode()).hexdigest()[:16]

    @property
    def forward(self) -> str:
        return _ROLLBACK.split(self.sql, maxsplit=1)[0]

    @property
    def undo(self) -> str | None:
        parts = _ROLLBACK.split(self.sql, maxsplit=1)
        return parts[1] if len(parts) > 1 else None

    @property
    def is_stepwise(self) -> bool:
        return _STEP.search(self.forward) is not None

    @property
    def steps(self) -> list[Step]:
        first, *rest = _STEP.split(self.forward)
        named = [("transaction", first), *zip(rest[::2], rest[1::2], strict=True)]
        return [Step(kind, sql) for kind, sql in named if sql.strip()]  # type: ignore[arg-type]

    @property
    def script(self) -> str:
        """All steps in one transaction, for a person who applies them by hand."""
        parts = []
        for step in self.steps if self.is_stepwise else ():
            if step.kind == "batches":
                body = step.sql.strip().rstrip(";")
                parts.append(f"do $batches$ begin loop\n{body};\nexit when not found;\nend loop; end $batches$;")
            else:
                parts.append(re.sub(r"\bconcurrently\b ?", "", step.sql).rstrip().rstrip(";") + ";")
        return "\n".join(parts) if parts else self.forward


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
    """Bring the database to LATEST_VERSION. Returns what was applied.

    Migrations of one step are applied in one transaction, all of them or none. Each step of the others is repeatable:
    after an interruption, a second call continues.
    """
    async with connected(dsn, "migrating", command_timeout_s=MIGRATE_TIMEOUT_S) as connection:
        done: list[Migration] = []
        # Every iteration applies at least one migration.
        for _ in range(len(MIGRATIONS) + 2):
            applied, stepwise = await _with_free_tables(connection, _apply_next)
            if stepwise is not None:
                for step in stepwise.steps:
                    await _run_step(connection, step)
                await _with_free_tables(connection, partial(_record, migration=stepwise))
                applied = [stepwise]
            if not applied:
                break
            done += applied
        return done


async def rollback(dsn: str, version: int) -> list[Migration]:
    """Undo the migrations above this version, newest first, in one transaction. Returns them.

    For the newer program, before the older one starts. Raises SchemaMismatch if one of them cannot be undone.
    """

    async def undo(connection: Any) -> list[Migration]:
        applied = await applied_migrations(connection)
        _check_upgradable(applied)
        known = {migration.version: migration for migration in MIGRATIONS}
        newer = sorted((number for number in applied if number > version), reverse=True)
        for number in newer:
            if number not in known or known[number].undo is None:
                raise SchemaMismatch(
                    f"migration {number:04} cannot be undone: restore a backup from before it, or keep this version."
                )
            await connection.execute(known[number].undo)
            await connection.execute("delete from windlass.migrations where version = $1", number)
        return [known[number] for number in newer]

    async with connected(dsn, "rolling back", command_timeout_s=MIGRATE_TIMEOUT_S) as connection:
        return await _with_free_tables(connection, undo)


class _TablesInUse(Exception):
    """A statement waited for a table longer than TABLE_LOCK_TIMEOUT_S, or in a circle with a worker's transaction.

    Its own transaction has changed nothing.
    """


async def _with_free_tables(connection: Any, work: Callable[[Any], Awaitable[_Result]]) -> _Result:
    """Do the work in a transaction, under the lock of migrations, as the schema's owner.

    A statement that needs a whole table waits at most TABLE_LOCK_TIMEOUT_S for it: all later statements of workers on
    that table wait behind it. Then everything is undone and repeated after a pause, in which they go on.
    """

    async def attempt() -> _Result:
        async with connection.transaction():
            await connection.execute(f"set local lock_timeout = '{LOCK_TIMEOUT_S}s'")
            await connection.execute(f"select pg_advisory_xact_lock({LOCK_KEY})")
            # Objects that a migration creates belong to the schema's owner, whose member this user may be.
            owner = await connection.fetchval(_OWNER)
            if owner is not None:
                await connection.execute(f"set local role {owner}")
            await connection.execute(f"set local lock_timeout = '{TABLE_LOCK_TIMEOUT_S}s'")
            try:
                return await work(connection)
            except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError) as error:
                raise _TablesInUse from error

    return await _retry(attempt)


async def _retry(attempt: Callable[[], Awaitable[_Result]]) -> _Result:
    rng = random.Random()  # noqa: S311 - spreads retries, protects nothing
    for number in range(1, TABLE_LOCK_ATTEMPTS + 1):
        try:
            return await attempt()
        except _TablesInUse:
            if number == TABLE_LOCK_ATTEMPTS:
                break
            await asyncio.sleep(min(number, MAX_RETRY_PAUSE_S) * rng.uniform(0.5, 1.5))
    raise DatabaseUnavailable(
        f"migrating: a table was in use in all of {TABLE_LOCK_ATTEMPTS} attempts, and nothing was changed. "
        "End long transactions (pg_stat_activity lists them), then retry."
    )


async def _apply_next(connection: Any) -> tuple[list[Migration], Migration | None]:
    """Apply all missing migrations up to the first with several steps, and return them; or return that one."""
    applied = await applied_migrations(connection)
    missing = missing_migrations(applied)
    if applied:
        _check_upgradable(applied)
    plain = list(takewhile(lambda migration: not migration.is_stepwise, missing))
    if missing and not plain:
        return [], missing[0]
    for migration in plain:
        await connection.execute(migration.forward)
        await _insert_row(connection, migration)
    if plain:
        await _update_roles(connection)
    return plain, None


async def _run_step(connection: Any, step: Step) -> None:
    if step.kind == "transaction":
        await _with_free_tables(connection, lambda open_: open_.execute(step.sql))
    elif step.kind == "batches":
        # Each batch is a transaction of its own, so that it locks few rows and only for a moment.
        for _ in range(MAX_BATCHES):
            tag = await _with_free_tables(connection, lambda open_: open_.execute(step.sql))
            if tag.endswith(" 0"):  # as in "UPDATE 0"
                return
            await asyncio.sleep(BATCH_PAUSE_S)
        raise DatabaseUnavailable(
            f"migrating: {MAX_BATCHES} batches did not change all rows. Run it again to continue."
        )
    else:
        # Outside of a transaction, such as `create index concurrently if not exists`: it never blocks writers.
        await connection.execute(step.sql)


async def _record(connection: Any, migration: Migration) -> None:
    await _insert_row(connection, migration)
    await _update_roles(connection)


async def _insert_row(connection: Any, migration: Migration) -> None:
    await connection.execute(
        # Another program may have run the same steps at the same time.
        "insert into windlass.migrations (version, name, checksum) values ($1, $2, $3) on conflict do nothing",
        migration.version,
        migration.name,
        migration.checksum,
    )


async def _update_roles(connection: Any) -> None:
    if await connection.fetchval(_HAS_ROLES):
        await connection.execute("select windlass_internal.apply_roles()")
    else:
        await connection.execute("select windlass_internal.secure_objects()")


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
