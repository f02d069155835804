"""The same set-up for both stores: short retention, spawned workers.

Tests over PostgreSQL share one database and empty its tables, which is hundreds of times faster than a new database.
"""

from datetime import datetime

import asyncpg

from support.memory_store.fleets import SlotRow
from support.memory_store.stores import MemoryStores
from support.memory_store.workers import MemoryWorker
from windlass.model.config import Retention
from windlass.model.worker import WorkerKind, WorkerStatus

RETENTION = Retention(complete_s=3600, failed_s=7200, events_s=10_800, worker_logs_mb=2, worker_log_mb=1)
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
delete from windlass.clock;
"""


async def empty_tables(dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(EMPTY_TABLES)
    finally:
        await connection.close()


async def spawn_in_postgres(
    dsn: str, now: datetime, worker_id: str, fleet: str, slot: int, kind: WorkerKind = WorkerKind.WORKER
) -> None:
    """What an orchestrator will do: fleet, slot and worker exist before the machine does."""
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute("insert into windlass.fleets (name) values ($1) on conflict do nothing", fleet)
        await connection.execute(
            "insert into windlass.slots (fleet, slot) values ($1, $2) on conflict do nothing", fleet, slot
        )
        await connection.execute(
            "insert into windlass.workers (id, fleet, slot, status, queues, created_at, kind)"
            " values ($1, $2, $3, 'spawning', '{q}', $4, $5)",
            worker_id,
            fleet,
            slot,
            now,
            kind,
        )
    finally:
        await connection.close()


def spawn_in_memory(
    store: MemoryStores, worker_id: str, fleet: str, slot: int, kind: WorkerKind = WorkerKind.WORKER
) -> None:
    """The same as spawn_in_postgres."""
    now = store.tables.now()
    store.tables.fleet(fleet).slots.setdefault(slot, SlotRow())
    row = MemoryWorker(worker_id, fleet, slot, WorkerStatus.SPAWNING, created_at=now, queues=("q",), kind=kind)
    store.tables.workers.add(row)


def set_status_in_memory(store: MemoryStores, worker_id: str, status: WorkerStatus) -> None:
    """Set a worker's status as plain SQL would: nothing else changes, and only legal transitions are accepted."""
    worker = store.tables.workers.rows[worker_id]
    if status is WorkerStatus.TERMINATED and worker.status is not status:
        store.tables.terminate(worker)
    elif worker.status is not status:
        worker.move(status)
