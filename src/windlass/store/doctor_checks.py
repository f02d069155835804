"""What kind of database this is and what this user may do in it. Looks, changes nothing: `windlass doctor` asks."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import asyncpg

from windlass.model.errors import DatabaseUnavailable
from windlass.store.connect import connected
from windlass.store.migrate import applied_migrations
from windlass.store.tasks import QUERIES

# A notification on a healthy connection takes milliseconds.
LISTEN_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class DatabaseCheck:
    database: str
    user: str
    server_version: str
    server_version_number: int  # 140005 is 14.5
    is_pooled: bool
    schema_version: int | None
    may_create_schema: bool
    # What this user lacks of what producers and workers need: "update on tasks".
    missing_privileges: list[str]
    # How far the database's clock is ahead of this machine's; negative if behind.
    clock_difference_s: float
    # How much of that may be the way to the server and back.
    clock_uncertainty_s: float
    can_listen: bool


async def examine(dsn: str) -> DatabaseCheck:
    async with connected(dsn, "examining the database") as connection:
        # One transaction, so that a pooler gives us one server for all of it.
        async with connection.transaction(readonly=True):
            asked_at = time.time()
            facts = await connection.fetchrow(QUERIES["server_facts"])
            answered_at = time.time()
            is_pooled = facts["backend_pid"] != connection.get_server_pid()
            missing = await connection.fetch(QUERIES["missing_privileges"])
            may_look = not any(row["missing"].startswith("usage") for row in missing)
            applied = await applied_migrations(connection) if may_look else {}
        return DatabaseCheck(
            database=facts["database"],
            user=facts["user"],
            server_version=facts["server_version"],
            server_version_number=facts["server_version_number"],
            is_pooled=is_pooled,
            schema_version=max(applied, default=None),
            may_create_schema=facts["may_create_schema"],
            missing_privileges=[row["missing"] for row in missing],
            clock_difference_s=facts["now"].timestamp() - (asked_at + answered_at) / 2,
            clock_uncertainty_s=(answered_at - asked_at) / 2,
            # Behind a pooler it may succeed by chance, and would leave a LISTEN on a connection that others get.
            can_listen=not is_pooled and await _can_listen(connection),
        )


async def has_managed_workers(dsn: str) -> bool:
    """Whether there are workers that a fleet hired and that have not ended. Of a schema of any version, or none."""
    async with connected(dsn, "looking for workers") as connection:
        if await connection.fetchval("select to_regclass('windlass.workers')") is None:
            return False
        return bool(await connection.fetchval(QUERIES["has_managed_workers"]))


async def check_may_control(dsn: str) -> None:
    """Raise DatabaseUnavailable if this user may not do all that the control loop does: it would try for ever."""
    async with connected(dsn, "looking at this user's rights") as connection:
        rows = await connection.fetch(QUERIES["missing_control_privileges"])
        if rows:
            user = await connection.fetchval("select current_user")
            more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
            raise DatabaseUnavailable(
                f"the database's user {user} may not run the control loop: it lacks "
                f"{', '.join(row['missing'] for row in rows[:3])}{more}: name the schema's owner in DATABASE_URL."
            )


async def _can_listen(connection: Any) -> bool:
    """Whether a notification to ourselves arrives."""
    channel = f"windlass_examine_{uuid4().hex}"
    seen = asyncio.Event()

    def on_notification(*_: object) -> None:
        seen.set()

    try:
        await connection.add_listener(channel, on_notification)
        await connection.execute(f"notify {channel}")
        async with asyncio.timeout(LISTEN_TIMEOUT_S):
            await seen.wait()
        await connection.remove_listener(channel, on_notification)
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
        return False
    return True
