"""The same small world around both stores: short retention, hired workers.

Tests over PostgreSQL share one database and empty its tables, which is hundreds of times faster than a new database.
"""

from datetime import datetime

import asyncpg

from windlass.model.config import Retention

RETENTION = Retention(complete_s=3600, failed_s=7200, events_s=10_800)
EMPTY_TABLES = """
delete from windlass.tasks;
delete from windlass.events;
delete from windlass.workers;
delete from windlass.slots;
delete from windlass.fleets;
delete from windlass.attempt_spans;
delete from windlass.charges;
delete from windlass.spending;
delete from windlass.sessions;
delete from windlass.tokens;
delete from windlass.leases;
"""


async def empty_tables(dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(EMPTY_TABLES)
    finally:
        await connection.close()


async def hire_in_postgres(dsn: str, now: datetime, worker_id: str, fleet: str, slot: int) -> None:
    """What an orchestrator will do: fleet, slot and worker exist before the machine does."""
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute("insert into windlass.fleets (name) values ($1) on conflict do nothing", fleet)
        await connection.execute(
            "insert into windlass.slots (fleet, slot) values ($1, $2) on conflict do nothing", fleet, slot
        )
        await connection.execute(
            "insert into windlass.workers (id, fleet, slot, status, created_at) values ($1, $2, $3, 'spawning', $4)",
            worker_id,
            fleet,
            slot,
            now,
        )
    finally:
        await connection.close()
