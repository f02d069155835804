"""The worker's side of the queue over PostgreSQL, and the maintenance that workers run.

Implements ports/transport.py and MaintenanceStore of ports/tasks.py.
"""

import json
import random
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from windlass.model.errors import WindlassError
from windlass.model.task import MAX_NOTE_CHARACTERS, Claim, ClaimResult, Finished, TaskStatus, storable
from windlass.model.worker import HeartbeatReply, HeartbeatReport, HeldClaim, RecoveredTasks, Registration, WorkerStatus
from windlass.model.worker_log import LogChunk
from windlass.store.database import SETTLE_ROWS_LIMIT_S, Database, DatabaseStore

# Retention by a worker, or by a server for its workers: for queues without an orchestrator, which sweeps each minute.
# With every round of maintenance, 1,000 workers would make 67 sweeps per second of 13 statements each.
SWEEP_INTERVAL_S = 600.0
# Workers that one call of recover_lost_workers judges.
MAX_RECOVERED = 100


class WorkerSecret(DatabaseStore):
    def __init__(self, database: Database, secret: str | None = None) -> None:
        """`secret`: of the one worker that acts here. None: the caller is trusted and acts for any worker."""
        super().__init__(database)
        self._secret = secret


class PostgresMaintenance(WorkerSecret):
    async def recover_lost_workers(self, judge_id: str) -> list[RecoveredTasks]:
        arguments = (judge_id, MAX_RECOVERED, self._secret)
        rows = await self._database.call_rows("recovering lost workers", "windlass.recover_lost_workers", *arguments)
        return [RecoveredTasks(**dict(row)) for row in rows]

    async def sweep(self) -> int:
        kept = self._database.retention
        ages_s = (kept.complete_s, kept.failed_s, kept.events_s, kept.cycles_s, kept.logs_s, kept.charges_s)
        return await self._database.sweep("windlass.sweep", *ages_s)


class PostgresWorkSignal(DatabaseStore):
    async def wait_for_work(self, queues: Sequence[str], timeout_s: float) -> None:
        await self._database.listener.wait(queues, timeout_s)


class PostgresTransport(PostgresWorkSignal, WorkerSecret):
    def __init__(self, database: Database, secret: str | None = None) -> None:
        super().__init__(database, secret)
        self._maintenance = PostgresMaintenance(database, secret)
        self._swept_at = float("-inf")

    async def register(self, registration: Registration) -> WorkerStatus:
        r = registration
        about = (r.worker_id, r.fleet, list(r.queues), r.concurrency, r.lease_s, r.host, r.pid, r.version, r.kind)
        doing = "registering the worker"
        arguments = (*about, r.start_id, self._secret)
        return WorkerStatus(await self._database.call(doing, "windlass.register_worker", *arguments))

    async def claim(self, worker_id: str, queues: Sequence[str], limit: int = 1) -> list[Claim]:
        arguments = (worker_id, queues, limit, self._secret)
        rows = await self._database.call_rows("claiming tasks", "windlass.claim_tasks", *arguments)
        return _claims(rows)

    async def finish_and_claim(
        self, worker_id: str, finished: Sequence[Finished], queues: Sequence[str], limit: int
    ) -> ClaimResult:
        results = ([f.task_id for f in finished], [f.token for f in finished], [f.result for f in finished])
        arguments = (worker_id, *results, queues, limit, self._secret)
        rows = await self._database.call_rows("finishing tasks", "windlass.finish_and_claim", *arguments)
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
            "select windlass.fail_task($1, $2, $3, $4, $5, $6, coalesce($7, random()), $8)",
            worker_id,
            task_id,
            token,
            storable(error),
            code,
            retry,
            jitter,
            self._secret,
        )
        return TaskStatus(status) if status is not None else None

    async def release(self, worker_id: str, task_id: int, token: UUID, reason: str, delay_s: float = 0.0) -> bool:
        arguments = (worker_id, task_id, token, reason, delay_s, self._secret)
        return bool(await self._database.call("releasing a task", "windlass.release_task", *arguments))

    async def heartbeat(
        self, worker_id: str, claims: Sequence[HeldClaim] = (), vitals: Mapping[str, Any] | None = None
    ) -> HeartbeatReply:
        arguments = (
            worker_id,
            json.dumps([_claim_to_plain(claim) for claim in claims]),
            json.dumps(dict(vitals or {})),
            self._secret,
        )
        (row,) = await self._database.call_rows("sending a heartbeat", "windlass.heartbeat", *arguments)
        return _reply(row)

    async def heartbeat_many(
        self, heartbeats: Sequence[HeartbeatReport], *, waits: bool = False
    ) -> list[HeartbeatReply | None]:
        held = [(each.worker_id, claim) for each in heartbeats for claim in each.claims]
        rows = await self._database.call_rows(
            "sending heartbeats",
            "windlass_internal.record_heartbeats",
            [each.worker_id for each in heartbeats],
            [json.dumps(dict(each.vitals)) for each in heartbeats],
            [each.first_task_id for each in heartbeats],
            [each.last_task_id for each in heartbeats],
            [worker_id for worker_id, _ in held],
            [claim.task_id for _, claim in held],
            [claim.token for _, claim in held],
            [claim.progress for _, claim in held],
            [_note(claim) for _, claim in held],
            waits,
        )
        by_worker = {row["worker_id"]: _reply(row) for row in rows if row["status"] is not None}
        return [by_worker.get(each.worker_id) for each in heartbeats]

    async def deregister(self, worker_id: str, reason: str) -> None:
        arguments = (worker_id, reason, self._secret)
        await self._database.call("deregistering the worker", "windlass.deregister_worker", *arguments)

    async def run_maintenance(self, worker_id: str) -> list[RecoveredTasks]:
        recovered = await self._maintenance.recover_lost_workers(worker_id)
        if time.monotonic() - self._swept_at >= SWEEP_INTERVAL_S:
            await self._maintenance.sweep()
            # Workers that were started together do not sweep together.
            self._swept_at = time.monotonic() - random.random() * SWEEP_INTERVAL_S / 2  # noqa: S311
        try:
            await self._settle_rows(worker_id)
        except WindlassError as error:
            import structlog  # noqa: PLC0415 - takes 50 ms, which every command would pay

            log = structlog.get_logger(__name__)
            log.warning("settle rows of adopted tables failed", worker_id=worker_id, error=str(error))
        return recovered

    async def _settle_rows(self, worker_id: str) -> None:
        doing, function = "settling rows of adopted tables", "windlass.settle_rows"
        await self._database.call_within(SETTLE_ROWS_LIMIT_S, doing, function, worker_id, self._secret)

    async def append_logs(self, worker_id: str, batch_id: UUID, chunks: Sequence[LogChunk]) -> None:
        content = _encode_chunks(chunks)
        await self._database.call("storing output", "windlass.append_logs", worker_id, batch_id, content, self._secret)

    async def next_run_after(self, queues: Sequence[str]) -> datetime | None:
        due: datetime | None = await self._database.call("reading the next due time", "windlass.next_run_after", queues)
        return due


@asynccontextmanager
async def open_postgres_transport(
    dsn: str, *, secret: str | None = None, **options: Any
) -> AsyncIterator[PostgresTransport]:
    """A worker's transport with its own Database. `options` are those of Database."""
    async with Database(dsn, is_contract_sufficient=True, **options) as database:
        yield PostgresTransport(database, secret)


def _claims(rows: Iterable[Any]) -> list[Claim]:
    """From rows of type windlass.claim: its columns are the fields of Claim, followed by is_lost."""
    claims = [Claim(*row[:-1]) for row in rows if not row[-1]]
    # UPDATE ... RETURNING promises no order.
    claims.sort(key=lambda claim: (-claim.priority, claim.task_id))
    return claims


def _claim_to_plain(claim: HeldClaim) -> dict[str, Any]:
    plain: dict[str, Any] = {"task_id": claim.task_id, "token": str(claim.token)}
    if claim.progress is not None:
        plain |= {"progress": claim.progress, "note": _note(claim)}
    return plain


def _encode_chunks(chunks: Sequence[LogChunk]) -> str:
    """Almost all lines are storable as they are: looking at each of 20,000 takes longer than encoding them."""
    with suppress(UnicodeEncodeError):
        content = msgspec.json.encode(chunks)
        if b"\\u0000" not in content:
            return content.decode()
    lines = (tuple(map(storable, chunk.lines)) for chunk in chunks)
    return msgspec.json.encode([replace(c, lines=each) for c, each in zip(chunks, lines, strict=True)]).decode()


def _note(claim: HeldClaim) -> str | None:
    # Cut first: making a long text storable takes longer.
    return storable(claim.note[:MAX_NOTE_CHARACTERS])[:MAX_NOTE_CHARACTERS] if claim.note is not None else None


def _reply(row: Any) -> HeartbeatReply:
    status = WorkerStatus(row["status"]) if row["status"] != "unknown" else None
    # `windlass.heartbeat` has no claim_delay: workers of machines with long billing periods send theirs over HTTP.
    return HeartbeatReply(status, row["paused"], frozenset(row["lost"]), row.get("claim_delay"))
