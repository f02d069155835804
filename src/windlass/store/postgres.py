"""The store over asyncpg.

Safe behind a transaction-mode pooler: one is noticed when the pool opens, and then every call is one transaction,
nothing is prepared on the server and LISTEN is replaced by polling.

Every call has a time limit. A call whose answer did not arrive raises DatabaseUnavailable, and what was asked may
have happened: the functions in the database are made so that asking again is safe.
"""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from datetime import datetime, timedelta
from typing import Any, Self
from uuid import UUID

import asyncpg

from windlass.model.config import Retention
from windlass.model.errors import BadInput, DatabaseUnavailable, TooSlow, UnknownWorker
from windlass.model.event import Event, QueueDepth
from windlass.model.node import NodeState, NodeView
from windlass.model.task import Claim, ClaimResult, Finished, NewTask, Retried, Task, TaskStatus, TaskSummary, storable
from windlass.model.worker import (
    HeartbeatReply,
    HeldClaim,
    RecoveredTasks,
    Registration,
    Worker,
    WorkerKind,
    WorkerStatus,
)
from windlass.store.connect import (
    COMMAND_TIMEOUT_S,
    CONNECT_TIMEOUT_S,
    CONNECTION_ERRORS,
    CUT_OFF,
    connect,
    connected,
    refused,
    unavailable,
    words,
)
from windlass.store.listener import Listener
from windlass.store.migrate import applied_migrations, check_schema_version
from windlass.store.pool import ConnectionPool
from windlass.store.queries import read_queries

# Bulk work is paid by the row and may take longer.
BULK_TIMEOUT_S = 600.0
PURGE_BATCH = 5_000
# One deadlock is two producers with the same keys; as many in a row are a crowd, and the caller hears of it.
MAX_STAGING_INSERTS = 5
# As many as sweep() deletes of each kind at the most: fewer altogether mean that it found no more.
SWEEP_BATCH = 1_000
# Retention goes on for this long at a time: enough for hundreds of thousands of rows, and no call that never ends.
SWEEP_TIMEOUT_S = 10.0
# Behind a pooler every call is a transaction of several steps: whoever stops between two of them holds its locks no
# longer than this.
POOLED_LIMITS = "set local lock_timeout = '20s'; set local idle_in_transaction_session_timeout = '20s'"
# asyncio reads into 256 KiB, which the allocator takes from the system and gives back for every answer. That takes
# longer than reading it.
READ_BYTES = 1 << 16
# Columns of the table and fields of NewTask alike.
COPY_COLUMNS = NewTask._fields


QUERIES = read_queries("windlass.store", "queries.sql")


class PostgresStore:
    def __init__(
        self,
        dsn: str,
        *,
        retention: Retention | None = None,
        max_connections: int = 4,
        command_timeout_s: float = COMMAND_TIMEOUT_S,
        statement_timeout_s: float | None = None,
        virtual_now: Callable[[], datetime] | None = None,
    ) -> None:
        """`statement_timeout_s`: after this time the server breaks a statement off, and TooSlow is raised.

        `virtual_now`, if given, is the database's time for every call: tests drive real PostgreSQL with it.
        """
        self._dsn = dsn
        self._retention = retention or Retention()
        self._command_timeout_s = command_timeout_s
        self._statement_timeout_s = statement_timeout_s
        self._virtual_now = virtual_now
        self._connections = ConnectionPool(self._connect, limit=max_connections, timeout_s=CONNECT_TIMEOUT_S)
        self._is_pooled = False
        self._listener: Listener | None = None

    async def __aenter__(self) -> Self:
        check_schema_version(await self._look_around())
        self._listener = Listener(self._dsn, is_possible=not self._is_pooled)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._listener is not None:
            await self._listener.close()
        await self._connections.close()

    async def _connect(self) -> Any:
        connection = await connect(self._dsn, command_timeout_s=self._command_timeout_s, is_caching=not self._is_pooled)
        transport: Any = getattr(connection, "_transport", None)
        if hasattr(transport, "max_size"):
            transport.max_size = READ_BYTES
        if self._statement_timeout_s is not None and not self._is_pooled:
            await connection.execute(_break_off_after(self._statement_timeout_s))
        return connection

    async def _look_around(self) -> int | None:
        """The schema's version, and on the way whether a pooler stands between us and the server."""
        async with connected(self._dsn, "connecting") as connection, connection.transaction():
            # A pooler hands out a process id of its own for cancelling; the server's backend has another.
            backend_pid = await connection.fetchval("select pg_backend_pid()")
            self._is_pooled = backend_pid != connection.get_server_pid()
            applied = await applied_migrations(connection)
            return max(applied, default=None)

    def _pooled_limits(self) -> str:
        if self._statement_timeout_s is None:
            return POOLED_LIMITS
        return f"{POOLED_LIMITS}; {_break_off_after(self._statement_timeout_s, 'local')}"

    def _unavailable(self, doing: str, error: BaseException) -> DatabaseUnavailable:
        if isinstance(error, asyncpg.QueryCanceledError) and self._statement_timeout_s is not None:
            return TooSlow(f"{doing}: not done within {self._statement_timeout_s:g} s.")
        return unavailable(doing, self._dsn, error)

    @asynccontextmanager
    async def _connection(self, doing: str) -> AsyncIterator[Any]:
        assert self._listener is not None, "the store is used inside `async with`"  # noqa: S101
        try:
            connection = await self._connections.take()
            try:
                if self._virtual_now is not None:
                    await connection.execute(
                        "select set_config('windlass.now', $1, false)", self._virtual_now().isoformat()
                    )
                if self._is_pooled:
                    async with connection.transaction():
                        await connection.execute(self._pooled_limits())
                        yield connection
                else:
                    yield connection
            except (asyncio.CancelledError, *CUT_OFF):
                self._connections.discard(connection)
                raise
            except BaseException:
                self._connections.give_back(connection)
                raise
            self._connections.give_back(connection)
        except CONNECTION_ERRORS as error:
            raise self._unavailable(doing, error) from None
        except asyncpg.NoDataFoundError as error:
            raise UnknownWorker(f"{doing}: {words(error)}.") from None
        except (
            asyncpg.DataError,
            asyncpg.IntegrityConstraintViolationError,
            asyncpg.ProgramLimitExceededError,
        ) as error:
            raise BadInput(f"{doing}: {words(error).rstrip('.')}.") from None
        except asyncpg.ObjectNotInPrerequisiteStateError:
            raise  # a lease that is lost: the control store's to say
        except asyncpg.PostgresError as error:
            raise refused(doing, self._dsn, error) from None
        except (OverflowError, UnicodeEncodeError) as error:
            # COPY encodes its rows itself and says so in Python's words.
            raise BadInput(f"{doing}: a value cannot be stored ({error}).") from None

    # ---------------------------------------------------------------------------------------------- producers

    async def enqueue(self, task: NewTask) -> int:
        async with self._connection("enqueueing a task") as connection:
            return await enqueue_on(connection, task)

    async def enqueue_or_find(self, task: NewTask) -> tuple[int, bool]:
        async with (
            self._connection("enqueueing a task") as connection,
            # Behind a pooler it is in a transaction already; one inside that would leave a mark of its own.
            nullcontext() if self._is_pooled else connection.transaction(),
        ):
            task_id = await enqueue_on(connection, task)
            return task_id, bool(await connection.fetchval(QUERIES["inserted_by_this_transaction"], task_id))

    async def enqueue_many(self, tasks: Iterable[NewTask] | AsyncIterable[NewTask]) -> int:
        if isinstance(tasks, AsyncIterable):
            # It may be larger than memory, and whether a key comes is not known before its end.
            return await self._enqueue_by_staging(_numbered(tasks))
        rows = tasks if isinstance(tasks, list) else list(tasks)
        if any(row.unique_key is not None for row in rows):
            return await self._enqueue_by_staging((position, *row) for position, row in enumerate(rows))
        # With nothing to be unique, straight into the table.
        async with self._connection("enqueueing tasks") as connection:
            status = await connection.copy_records_to_table(
                "tasks",
                schema_name="windlass",
                records=rows,
                columns=COPY_COLUMNS,
                timeout=BULK_TIMEOUT_S,
            )
        return _row_count(status)

    async def _enqueue_by_staging(
        self, numbered_rows: Iterable[tuple[Any, ...]] | AsyncIterable[tuple[Any, ...]]
    ) -> int:
        async with self._connection("enqueueing tasks") as connection, connection.transaction():
            await connection.execute(
                "create temporary table windlass_staging on commit drop as"
                " select 0 as position, queue, payload, priority, run_after, max_attempts, timeout_s, unique_key"
                " from windlass.tasks with no data"
            )
            await connection.copy_records_to_table(
                "windlass_staging",
                records=numbered_rows,
                columns=("position", *COPY_COLUMNS),
                timeout=BULK_TIMEOUT_S,
            )
            return await _insert_from_staging(connection)

    async def retry_task(self, task_id: int) -> bool:
        async with self._connection("retrying a task") as connection:
            return bool(await connection.fetchval("select windlass.retry_task($1)", task_id))

    async def retry_failed(
        self,
        queue: str,
        failed_before: datetime,
        limit: int = 1000,
        *,
        failed_from: datetime | None = None,
        include_cancelled: bool = False,
    ) -> Retried:
        async with self._connection("retrying tasks") as connection:
            rows = await connection.fetch(
                "select task_id, failed_at from windlass.retry_failed($1, $2, $3, $4, $5)",
                queue,
                limit,
                failed_before,
                include_cancelled,
                failed_from,
                timeout=BULK_TIMEOUT_S,
            )
        return Retried([row["task_id"] for row in rows], max((row["failed_at"] for row in rows), default=None))

    async def cancel_task(self, task_id: int, reason: str) -> bool:
        async with self._connection("cancelling a task") as connection:
            return bool(await connection.fetchval("select windlass.cancel_task($1, $2)", task_id, reason))

    # ------------------------------------------------------------------------------------------------ workers

    async def register(self, registration: Registration) -> WorkerStatus:
        r = registration
        async with self._connection("registering the worker") as connection:
            status = await connection.fetchval(
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
        async with self._connection("claiming tasks") as connection:
            rows = await connection.fetch("select * from windlass.claim_tasks($1, $2, $3)", worker_id, queues, limit)
        return _claims(rows)

    async def finish_and_claim(
        self, worker_id: str, finished: Sequence[Finished], queues: Sequence[str], limit: int
    ) -> ClaimResult:
        async with self._connection("finishing tasks") as connection:
            rows = await connection.fetch(
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
        error = storable(error)
        async with self._connection("reporting a failed attempt") as connection:
            status = await connection.fetchval(
                "select windlass.fail_task($1, $2, $3, $4, $5, $6, coalesce($7, random()))",
                worker_id,
                task_id,
                token,
                error,
                code,
                retry,
                jitter,
            )
        return TaskStatus(status) if status is not None else None

    async def release(self, worker_id: str, task_id: int, token: UUID, reason: str, delay_s: float = 0.0) -> bool:
        async with self._connection("giving a task back") as connection:
            released = await connection.fetchval(
                "select windlass.release_task($1, $2, $3, $4, $5)", worker_id, task_id, token, reason, delay_s
            )
        return bool(released)

    async def heartbeat(
        self, worker_id: str, claims: Sequence[HeldClaim] = (), vitals: Mapping[str, Any] | None = None
    ) -> HeartbeatReply:
        async with self._connection("sending a heartbeat") as connection:
            row = await connection.fetchrow(
                "select * from windlass.heartbeat($1, $2, $3)",
                worker_id,
                json.dumps([_held_to_json(claim) for claim in claims]),
                json.dumps(dict(vitals or {})),
            )
        status = WorkerStatus(row["status"]) if row["status"] != "unknown" else None
        return HeartbeatReply(status=status, is_paused=row["paused"], lost=frozenset(row["lost"]))

    async def deregister(self, worker_id: str, reason: str) -> None:
        async with self._connection("signing off") as connection:
            await connection.execute("select windlass.deregister_worker($1, $2)", worker_id, reason)

    async def run_maintenance(self, worker_id: str) -> list[RecoveredTasks]:
        recovered = await self.recover_lost_workers(worker_id)
        await self.sweep()
        return recovered

    async def recover_lost_workers(self, judge_id: str) -> list[RecoveredTasks]:
        async with self._connection("looking for lost workers") as connection:
            rows = await connection.fetch("select * from windlass.recover_lost_workers($1)", judge_id)
        return [RecoveredTasks(**dict(row)) for row in rows]

    async def next_run_after(self, queues: Sequence[str]) -> datetime | None:
        async with self._connection("looking for waiting tasks") as connection:
            due: datetime | None = await connection.fetchval("select windlass.next_run_after($1)", queues)
        return due

    async def wait_for_work(self, queues: Sequence[str], timeout_s: float) -> None:
        assert self._listener is not None  # noqa: S101
        await self._listener.wait(queues, timeout_s)

    # ------------------------------------------------------------------------------------------------ looking

    async def task(self, task_id: int) -> Task | None:
        async with self._connection("reading a task") as connection:
            row = await connection.fetchrow(QUERIES["task"], task_id)
        return _task(row) if row is not None else None

    async def tasks(
        self,
        *,
        queue: str | None = None,
        status: TaskStatus | None = None,
        limit: int = 50,
        before_id: int | None = None,
    ) -> list[Task]:
        async with self._connection("listing tasks") as connection:
            rows = await connection.fetch(QUERIES["tasks"], queue, status, before_id, limit)
        return [_task(row) for row in rows]

    async def task_summaries(
        self,
        *,
        queue: str | None = None,
        status: TaskStatus | None = None,
        limit: int = 50,
        before_id: int | None = None,
        is_scheduled: bool = False,
    ) -> list[TaskSummary]:
        async with self._connection("listing tasks") as connection:
            rows = await connection.fetch(QUERIES["task_summaries"], queue, status, before_id, limit, is_scheduled)
        return [TaskSummary(**{**row, "status": TaskStatus(row["status"])}) for row in rows]

    async def known_queues(self) -> list[str]:
        async with self._connection("reading the queues") as connection:
            rows = await connection.fetch(QUERIES["known_queues"])
        return [row["queue"] for row in rows]

    async def has_recent_task(self, queue: str, newest: int) -> bool:
        """Whether one of the newest tasks, at the most so many, is in this queue."""
        async with self._connection("reading the queues") as connection:
            return bool(await connection.fetchval(QUERIES["has_recent_task"], queue, newest))

    async def is_queue_served(self, queue: str) -> bool:
        """Whether a fleet, or a worker that is there, takes tasks of this queue."""
        async with self._connection("reading who serves the queue") as connection:
            return bool(await connection.fetchval(QUERIES["is_queue_served"], queue))

    async def worker(self, worker_id: str) -> Worker | None:
        async with self._connection("reading a worker") as connection:
            row = await connection.fetchrow(QUERIES["workers"], worker_id, True)
        return _worker(row) if row is not None else None

    async def workers(self, *, include_terminated: bool = False) -> list[Worker]:
        async with self._connection("listing workers") as connection:
            rows = await connection.fetch(QUERIES["workers"], None, include_terminated)
        return [_worker(row) for row in rows]

    async def set_paused(self, worker_ids: Sequence[str], is_paused: bool) -> int:
        async with self._connection("pausing or resuming workers") as connection:
            return _row_count(await connection.execute(QUERIES["set_paused"], worker_ids, is_paused))

    async def set_terminating(self, worker_ids: Sequence[str], reason: str) -> int:
        async with self._connection("ending workers") as connection:
            return _row_count(await connection.execute(QUERIES["set_terminating"], worker_ids, reason))

    async def queue_depths(self) -> list[QueueDepth]:
        async with self._connection("reading the queues") as connection:
            rows = await connection.fetch(QUERIES["queue_depths"])
        return [QueueDepth(**dict(row)) for row in rows]

    async def finished_since(self, since_s: float) -> dict[TaskStatus, int]:
        async with self._connection("counting finished tasks") as connection:
            rows = await connection.fetch(QUERIES["finished_since"], since_s)
        counts = {TaskStatus(row["status"]): row["count"] for row in rows}
        return {status: counts.get(status, 0) for status in (TaskStatus.COMPLETE, TaskStatus.FAILED)}

    async def events(
        self, *, task_id: int | None = None, worker_id: str | None = None, limit: int = 200
    ) -> list[Event]:
        async with self._connection("reading events") as connection:
            rows = await connection.fetch(QUERIES["events"], task_id, worker_id, limit)
        return [_event(row) for row in reversed(rows)]

    async def purge(self, queue: str | None, statuses: Sequence[TaskStatus], older_than_s: float) -> int:
        deleted, until = 0, await self.now() - timedelta(seconds=older_than_s)
        # Where the last round came to, so that the tasks of other queues are passed over once and not in every round.
        complete_from = failed_from = None
        # Bounded by the table: each round deletes a full batch or is the last.
        for _ in itertools.count():
            async with self._connection("deleting finished tasks") as connection:
                gone = await connection.fetchrow(
                    QUERIES["purge"], queue, list(statuses), until, complete_from, failed_from, PURGE_BATCH,
                    timeout=BULK_TIMEOUT_S,
                )  # fmt: skip
            deleted += gone["count"]
            complete_from, failed_from = gone["complete_to"] or complete_from, gone["failed_to"] or failed_from
            if gone["count"] < PURGE_BATCH:
                break
        return deleted

    async def sweep(self) -> int:
        kept = self._retention
        return await self._sweep_all(
            "select windlass.sweep($1, $2, $3, $4, $5, $6, $7)",
            kept.complete_s,
            kept.failed_s,
            kept.events_s,
            kept.cycles_s,
            kept.logs_s,
            kept.charges_s,
        )

    async def _sweep_all(self, query: str, *kept_s: float) -> int:
        """`query` deletes what is older, so many rows of a kind as its last argument says, and returns how many. Again
        and again, until nothing is left or the time is over."""
        deleted, give_up_at = 0, time.monotonic() + SWEEP_TIMEOUT_S
        while time.monotonic() < give_up_at:
            async with self._connection("applying retention") as connection:
                count: int = await connection.fetchval(query, *kept_s, SWEEP_BATCH)
            deleted += count
            if count < SWEEP_BATCH:
                break
        return deleted

    async def now(self) -> datetime:
        async with self._connection("reading the time") as connection:
            now: datetime = await connection.fetchval("select windlass.now()")
        return now


async def enqueue_on(connection: Any, task: NewTask) -> int:
    """Add a task on the caller's own asyncpg connection, inside whatever transaction it is in."""
    task_id: int = await connection.fetchval(
        # As text: on a connection of the caller's, jsonb may have a codec that would encode it once more.
        "select windlass.enqueue($1, $2::text::jsonb, $3, $4, $5, $6, $7, $8)",
        task.queue,
        task.payload,
        task.priority,
        task.run_after,
        task.max_attempts,
        task.timeout_s,
        task.unique_key,
        # The producer's own limit was applied when the task was made; the database's is for those who come by SQL.
        2**31 - 1,
    )
    return task_id


async def _insert_from_staging(connection: Any) -> int:
    # In the order they were handed in: that of their ids. Another who brings the same keys in another order waits for
    # us as we for it; who gives way lets go of its rows, keeps the staging table, and comes after the other.
    async def insert() -> int:
        async with connection.transaction():
            return _row_count(await connection.execute(QUERIES["insert_from_staging"], timeout=BULK_TIMEOUT_S))

    for _ in range(MAX_STAGING_INSERTS - 1):
        with suppress(asyncpg.DeadlockDetectedError):
            return await insert()
    return await insert()


async def _numbered(tasks: AsyncIterable[NewTask]) -> AsyncIterator[tuple[Any, ...]]:
    position = 0
    async for task in tasks:
        yield position, *task
        position += 1


def _break_off_after(timeout_s: float, scope: str = "session") -> str:
    return f"set {scope} statement_timeout = {round(1000 * timeout_s)}"


def _row_count(status: str) -> int:
    return int(status.rsplit(" ", 1)[-1])


def _claims(rows: Iterable[Any]) -> list[Claim]:
    """From rows of type windlass.claim: the columns are the fields, and after them stands is_lost."""
    claims = [Claim(*row[:-1]) for row in rows if not row[-1]]
    # An UPDATE returns its rows in no promised order.
    claims.sort(key=lambda claim: (-claim.priority, claim.task_id))
    return claims


def _held_to_json(claim: HeldClaim) -> dict[str, Any]:
    held: dict[str, Any] = {"task_id": claim.task_id, "token": str(claim.token)}
    if claim.progress is not None:
        held |= {"progress": claim.progress, "note": storable(claim.note) if claim.note is not None else None}
    return held


def _task(row: Any) -> Task:
    return Task(**{**row, "status": TaskStatus(row["status"])})


def _worker(row: Any) -> Worker:
    fields = dict(row)
    fields["is_paused"] = fields.pop("paused")
    fields["queues"] = tuple(row["queues"])
    fields["status"] = WorkerStatus(row["status"])
    fields["metadata"] = json.loads(row["metadata"])
    fields["kind"] = WorkerKind(row["kind"])
    fields["node"] = node_view(row["node"])
    return Worker(**fields)


def node_view(text: str | None) -> NodeView | None:
    if text is None:
        return None
    said = json.loads(text)
    moments = {name: datetime.fromisoformat(said[name]) for name in ("since", "at")}
    return NodeView(**{**said, **moments, "state": NodeState(said["state"])})


def _event(row: Any) -> Event:
    detail = json.loads(row["detail"]) if row["detail"] is not None else None
    return Event(**{**row, "detail": detail})
