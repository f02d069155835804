"""The past of tasks and machines over PostgreSQL: reading it, and its retention. Implements ports/history.py.

Triggers write it when rows are deleted: schema/08_history.sql.
"""

from collections.abc import Sequence
from datetime import datetime

from windlass.model.history import MachineRecord, TaskHistory
from windlass.store.database import DatabaseStore
from windlass.store.transport import PostgresMaintenance

# Deleted tasks that are remembered, about 200 MB. Beyond it the oldest are dropped, whatever their age.
MAX_KEPT_TASKS = 20_000_000


class PostgresHistoryStore(DatabaseStore):
    async def task_history(self, queues: Sequence[str], since: datetime, until: datetime, limit: int) -> TaskHistory:
        rows = await self._database.call_rows(
            "reading the history of tasks",
            "windlass_internal.read_task_history",
            list(queues),
            since,
            until,
            limit,
        )
        tasks = sorted(
            (arrival_s, duration_s, row["queue"])
            for row in rows
            for arrival_s, duration_s in zip(row["arrivals_s"], row["durations_s"], strict=True)
        )
        arrivals_s, durations_s, names = zip(*tasks, strict=True) if tasks else ((), (), ())
        return TaskHistory(since, arrivals_s, durations_s, names, is_cut=len(tasks) >= limit)

    async def machine_history(self, fleet: str, since: datetime, until: datetime, limit: int) -> list[MachineRecord]:
        rows = await self._database.call_rows(
            "reading the history of machines", "windlass_internal.read_machine_history", fleet, since, until, limit
        )
        return [MachineRecord(*(row[name] for name in MachineRecord.__dataclass_fields__)) for row in rows]


class PostgresControlMaintenance(PostgresMaintenance):
    """Retention as the control plane applies it: that of workers, that of their output, and that of the history."""

    async def sweep(self) -> int:
        deleted = await super().sweep()
        kept = self._database.retention
        limits = (kept.worker_logs_s, kept.worker_logs_mb << 20, kept.worker_log_mb << 20)
        deleted += await self._database.sweep("windlass_internal.sweep_worker_logs", *limits)
        kept_s = kept.history_s
        return deleted + await self._database.sweep("windlass_internal.sweep_history", kept_s, float(MAX_KEPT_TASKS))
