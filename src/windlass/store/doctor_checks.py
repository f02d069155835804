"""Facts about the database and this user's privileges, for `windlass doctor` and `windlass up`. Changes nothing."""

import time
from dataclasses import dataclass
from typing import Any

from windlass.model.errors import DatabaseUnavailable, SchemaMismatch
from windlass.store.connection import connected, receives_notifications
from windlass.store.fleets import QUERIES as FLEET_QUERIES
from windlass.store.migration import applied_migrations, check_contract
from windlass.store.tasks import QUERIES

# A notification on a healthy connection takes milliseconds.
LISTEN_TIMEOUT_S = 5.0
ORCHESTRATOR = "windlass_orchestrator"
WORKER = "windlass_worker"


@dataclass(frozen=True, slots=True)
class DatabaseCheck:
    database: str
    user: str
    server_version: str
    server_version_number: int  # 140005 is 14.5
    is_pooled: bool
    schema_version: int | None
    may_create_schema: bool
    # Whether workers and clients of this program can use the database, also if the schema version differs.
    supports_contract: bool
    # Privileges that producers and workers need and this user lacks: "update on tasks".
    missing_privileges: list[str]
    # How far the database's clock is ahead of this machine's. Negative: behind.
    clock_difference_s: float
    # The round trip to the server explains up to this much of it.
    clock_uncertainty_s: float
    can_listen: bool


async def examine(dsn: str) -> DatabaseCheck:
    async with connected(dsn, "examining the database") as connection:
        # One transaction, so that a pooler assigns one server connection.
        async with connection.transaction(readonly=True):
            asked_at = time.time()
            facts = await connection.fetchrow(QUERIES["server_facts"])
            answered_at = time.time()
            is_pooled = facts["backend_pid"] != connection.get_server_pid()
            missing = await connection.fetch(QUERIES["missing_privileges"])
            has_usage = not any(row["missing"].startswith("usage") for row in missing)
            applied = await applied_migrations(connection) if has_usage else {}
            supports_contract = bool(applied) and await _supports_contract(connection)
        return DatabaseCheck(
            database=facts["database"],
            user=facts["user"],
            server_version=facts["server_version"],
            server_version_number=facts["server_version_number"],
            is_pooled=is_pooled,
            schema_version=max(applied, default=None),
            supports_contract=supports_contract,
            may_create_schema=facts["may_create_schema"],
            missing_privileges=[row["missing"] for row in missing],
            clock_difference_s=facts["now"].timestamp() - (asked_at + answered_at) / 2,
            clock_uncertainty_s=(answered_at - asked_at) / 2,
            # Behind a pooler it may succeed by chance, and would leave a LISTEN on a connection of other clients.
            can_listen=not is_pooled and await receives_notifications(connection, LISTEN_TIMEOUT_S),
        )


async def managed_workers_and_leader(dsn: str) -> tuple[bool, str | None]:
    """Whether a fleet has workers that are not terminated, and the holder of the orchestrators' lease.

    Works with any schema version, or none.
    """
    async with connected(dsn, "searching for workers") as connection:
        if await connection.fetchval("select to_regclass('windlass_internal.workers')") is None:
            return False, None
        leader: str | None = await connection.fetchval(FLEET_QUERIES["leader"])
        return bool(await connection.fetchval(QUERIES["has_managed_workers"])), leader


async def check_may_control(dsn: str) -> None:
    """Raise DatabaseUnavailable if this user lacks a privilege of the control plane, which would retry without end."""
    async with connected(dsn, "checking this user's privileges") as connection:
        rows = await connection.fetch(QUERIES["missing_control_privileges"])
        if rows:
            user = await connection.fetchval("select current_user")
            more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
            raise DatabaseUnavailable(
                f"the database user {user} cannot run the control plane: it lacks "
                f"{', '.join(row['missing'] for row in rows[:3])}{more}. Set DATABASE_URL to a user with "
                "the role windlass_orchestrator (`windlass db roles`), or to the schema's owner."
            )


async def user_with_owner_rights(dsn: str) -> str | None:
    """The user of this DSN, if the control plane would run with the rights of the schema's owner."""
    async with connected(dsn, "checking this user's privileges") as connection:
        user: str | None = await connection.fetchval(QUERIES["owner_rights"])
        return user


async def dsn_with_role(dsn: str, role: str) -> str:
    """The DSN with which this user acts as `role` and without its further rights, if that is possible.

    Not behind a transaction-mode pooler, which accepts no setting of a connection: connect as a user of that role.
    """
    async with connected(dsn, "connecting") as connection, connection.transaction(readonly=True):
        backend_pid = await connection.fetchval("select pg_backend_pid()")
        if backend_pid != connection.get_server_pid() or not await connection.fetchval(QUERIES["role_to_set"], role):
            return dsn
    return f"{dsn}{'&' if '?' in dsn else '?'}role={role}"


async def _supports_contract(connection: Any) -> bool:
    try:
        await check_contract(connection)
    except SchemaMismatch:
        return False
    return True
