"""The worker's side of the queue over PostgreSQL, and the maintenance that workers run.

Implements ports/transport.py and MaintenanceStore of ports/tasks.py.
"""

import json
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

from windlass.model.task import Claim, ClaimResult, Finished, TaskStatus, storable
from windlass.model.worker import HeartbeatReply, HeldClaim, RecoveredTasks, Registration, WorkerStatus
from windlass.store.database import Database, DatabaseStore

if TYPE_CHECKING:
    from windlass.ports.tasks import MaintenanceStore
    from windlass.ports.transport import WorkerTransport


class PostgresMaintenance(DatabaseStore):
    async def recover_lost_workers(self, judge_id: str) -> list[RecoveredTasks]:
        rows = await self._database.fetch(
            "recovering lost workers", "select * from windlass.recover_lost_workers($1)", judge_id
        )
        return [RecoveredTasks(**dict(row)) for row in rows]

    async def sweep(self) -> int:
        kept = self._database.retention
        return await self._database.sweep(
            "select windlass.sweep($1, $2, $3, $4, $5, $6, $7)",
            kept.complete_s,
            kept.failed_s,
            kept.events_s,
            kept.cycles_s,
            kept.logs_s,
            kept.charges_s,
        )


class PostgresWorkSignal(DatabaseStore):
    async def wait_for_work(self, queues: Sequence[str], timeout_s: float) -> None:
        await self._database.listener.wait(queues, timeout_s)


class PostgresTransport(PostgresWorkSignal):
    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._maintenance = PostgresMaintenance(database)

    async def register(self, registration: Registration) -> WorkerStatus:
        r = registration
        status = await self._database.fetchval(
            "registering the worker",
            "select windlass.register_worker($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)",
            r.worker_id,
            r.fleet,
            list(r.queues),
            r.concurrency,
            r.lease_s,
            r.host,
            r.pid,
            r.version,
            r.kind,
            r.start_id,
        )
        return WorkerStatus(status)

    async def claim(self, worker_id: str, queues: Sequence[str], limit: int = 1) -> list[Claim]:
        rows = await self._database.fetch(
            "claiming tasks", "select * from windlass.claim_tasks($1, $2, $3)", worker_id, queues, limit
        )
        return _claims(rows)

    async def finish_and_claim(
        self, worker_id: str, finished: Sequence[Finished], queues: Sequence[str], limit: int
    ) -> ClaimResult:
        rows = await self._database.fetch(
            "finishing tasks",
            "select * from windlass.finish_and_claim($1, $2, $3, $4, $5, $6)",
            worker_id,
            [f.task_id for f in finished],
            [f.token for f in finished],
            [f.result for f in finished],
            queues,
            limit,
        )
        return ClaimResult(claims=_claims(rows), lost=[row["token"] for row in rows if row["is_lost"]])

    async def fail(
        self,
        worker_id: str,
        task_id: int,
        token: UUID,
        error: str,
        *,
        code: str = "HANDLER_ERROR",
        retry: bool = True,
        jitter: float | None = None,
    ) -> TaskStatus | None:
        status = await self._database.fetchval(
            "reporting a failed attempt",
            "select windlass.fail_task($1, $2, $3, $4, $5, $6, coalesce($7, random()))",
            worker_id,
            task_id,
            token,
            storable(error),
            code,
            retry,
            jitter,
        )
        return TaskStatus(status) if status is not None else None

    async def release(self, worker_id: str, task_id: int, token: UUID, reason: str, delay_s: float = 0.0) -> bool:
        return bool(
            await self._database.fetchval(
                "releasing a task",
                "select windlass.release_task($1, $2, $3, $4, $5)",
                worker_id,
                task_id,
                token,
                reason,
                delay_s,
            )
        )

    async def heartbeat(
        self, worker_id: str, claims: Sequence[HeldClaim] = (), vitals: Mapping[str, Any] | None = None
    ) -> HeartbeatReply:
        row = await self._database.fetchrow(
            "sending a heartbeat",
            "select * from windlass.heartbeat($1, $2, $3)",
            worker_id,
            json.dumps([_claim_to_plain(claim) for claim in claims]),
            json.dumps(dict(vitals or {})),
        )
        status = WorkerStatus(row["status"]) if row["status"] != "unknown" else None
        return HeartbeatReply(status=status, is_paused=row["paused"], lost=frozenset(row["lost"]))

    async def deregister(self, worker_id: str, reason: str) -> None:
        await self._database.execute(
            "deregistering the worker", "select windlass.deregister_worker($1, $2)", worker_id, reason
        )

    async def run_maintenance(self, worker_id: str) -> list[RecoveredTasks]:
        recovered = await self._maintenance.recover_lost_workers(worker_id)
        await self._maintenance.sweep()
        return recovered

    async def next_run_after(self, queues: Sequence[str]) -> datetime | None:
        due: datetime | None = await self._database.fetchval(
            "reading the next run_after", "select windlass.next_run_after($1)", queues
        )
        return due


@asynccontextmanager
async def open_postgres_transport(dsn: str, **options: Any) -> AsyncIterator[PostgresTransport]:
    """A worker's transport with its own Database. `options` are those of Database."""
    async with Database(dsn, is_contract_sufficient=True, **options) as database:
        yield PostgresTransport(database)


def _claims(rows: Iterable[Any]) -> list[Claim]:
    """From rows of type windlass.claim: its columns are the fields of Claim, followed by is_lost."""
    claims = [Claim(*row[:-1]) for row in rows if not row[-1]]
    # UPDATE ... RETURNING promises no order.
    claims.sort(key=lambda claim: (-claim.priority, claim.task_id))
    return claims


def _claim_to_plain(claim: HeldClaim) -> dict[str, Any]:
    plain: dict[str, Any] = {"task_id": claim.task_id, "token": str(claim.token)}
    if claim.progress is not None:
        plain |= {"progress": claim.progress, "note": storable(claim.note) if claim.note is not None else None}
    return plain


if TYPE_CHECKING:
    # mypy compares every signature with the port's.
    _: type[WorkerTransport] = PostgresTransport
    __: type[MaintenanceStore] = PostgresMaintenance
