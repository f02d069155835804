"""Adopted tables over PostgreSQL: apply, backfill, compare, repair, remove (schema/12_adoption.sql).

Scripts that change triggers need a lock on a table that programs use. They give up after less than a second, so that no
program waits long or becomes the victim of a deadlock, and are repeated a limited number of times.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from typing import Any

import asyncpg

from windlass.model.adoption import AdoptionComparison, AdoptionConfig
from windlass.model.errors import BadInput, DatabaseUnavailable
from windlass.store.adoption_script import apply_script, checksum, remove_script
from windlass.store.connection import connected
from windlass.store.database import BULK_TIMEOUT_S
from windlass.store.queries import read_queries

QUERIES = read_queries("windlass.store", "adoption.sql")
# Rows in one transaction of a backfill: a tenth of a second, so locks are short and a crash loses little.
BATCH_ROWS = 1_000
# Each waits up to 0.8 s for its lock, and up to a second before the next.
MAX_LOCK_ATTEMPTS = 20
LOCK_PAUSE_S = 1.0
# More than any table has batches; the loop ends with the last row.
MAX_BATCHES = 100_000_000


async def apply(dsn: str, name: str, config: AdoptionConfig) -> None:
    """Install the triggers. Safe to repeat, also with another configuration of the same table."""
    async with connected(dsn, "adopting the table", command_timeout_s=BULK_TIMEOUT_S) as connection:
        await _execute_when_unlocked(connection, apply_script(name, config))


async def backfill(dsn: str, name: str) -> AsyncIterator[int]:
    """Adopt rows that were queued before, in batches. Yields the number so far after each."""
    async with connected(dsn, "adopting existing rows", command_timeout_s=BULK_TIMEOUT_S) as connection:
        for _ in range(MAX_BATCHES):
            batch = await connection.fetchrow(
                "select backfilled, is_finished from windlass_internal.backfill_rows($1, $2)", name, BATCH_ROWS
            )
            yield batch["backfilled"]
            if batch["is_finished"]:
                return


async def remove(dsn: str, name: str) -> int:
    """Remove the triggers and functions. Returns the number of rows that were given back to their owner."""
    released = 0
    async with connected(dsn, "removing the adoption", command_timeout_s=BULK_TIMEOUT_S) as connection:
        adoption = await connection.fetchrow(QUERIES["adoption"], name)
        if adoption is None:
            raise BadInput(f"{name} is not adopted: there is nothing to remove.")
        for _ in range(MAX_BATCHES):
            # Most rows before the lock on the table, in short transactions. The script releases the rest.
            batch = await connection.fetchrow(
                "select withdrawn, queued from windlass_internal.release_rows($1, $2)", name, BATCH_ROWS
            )
            released += batch["queued"]
            if batch["withdrawn"] < BATCH_ROWS:
                break
        script = remove_script(name, adoption["table_schema"], adoption["table_name"])
        await _execute_when_unlocked(connection, script)
    return released


async def compare(dsn: str, adoptions: Mapping[str, AdoptionConfig]) -> list[AdoptionComparison] | None:
    """All adopted tables of the database. None if this user may not compare them: a producer, a worker, a viewer."""
    async with connected(dsn, "comparing adopted tables", command_timeout_s=BULK_TIMEOUT_S) as connection:
        if not await connection.fetchval("select has_schema_privilege('windlass_internal', 'usage')"):
            return None
        return [
            await _compare_one(connection, row, adoptions.get(row["name"]))
            for row in await connection.fetch(QUERIES["adoptions"])
        ]


async def _compare_one(
    connection: Any, adoption: Mapping[str, Any], config: AdoptionConfig | None
) -> AdoptionComparison:
    name = adoption["name"]
    differences = await connection.fetch(QUERIES["differences"], name)
    deferred = await connection.fetchrow(QUERIES["deferred"], name)
    return AdoptionComparison(
        name=name,
        differences={row["difference"]: row["count"] for row in differences},
        deferred=deferred["count"],
        deferred_reason=deferred["reason"],
        is_backfilled=adoption["backfilled_at"] is not None,
        is_outdated=config is None or checksum(name, config) != adoption["checksum"],
    )


async def repair(dsn: str, name: str) -> int:
    """Settle all differences and deferred rows that can be settled now. Returns how many were."""
    repaired = 0
    async with connected(dsn, "repairing an adopted table", command_timeout_s=BULK_TIMEOUT_S) as connection:
        await connection.fetchval("select windlass_internal.defer_differences($1)", name)
        for _ in range(MAX_BATCHES):
            settled = await connection.fetchval("select windlass_internal.settle_rows($1, $2, true)", name, BATCH_ROWS)
            repaired += settled
            # Rows that are locked or refused stay, and would be found again without end.
            if settled == 0:
                break
    return repaired


async def _execute_when_unlocked(connection: Any, script: str) -> None:
    for _ in range(MAX_LOCK_ATTEMPTS):
        try:
            await connection.execute(script)
        except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError):
            await connection.execute("rollback")
            await asyncio.sleep(LOCK_PAUSE_S * random.random())  # noqa: S311
        except BaseException:
            if connection.is_in_transaction():
                await connection.execute("rollback")
            raise
        else:
            return
    raise DatabaseUnavailable(
        "other transactions hold locks on the table all the time. Try again when long transactions have ended."
    )
