"""The store in memory: the contract of PostgresStore without PostgreSQL, for simulations and quick tests.

One event loop, one process, nothing outlives it. Time comes only from `clock`, which must not run backwards, and
chance only from `chance`: the same calls at the same times give the same answers. A claim or a finish costs the
logarithm of what waits, however much has been finished. Each call is a transaction of its own: it happens at once
and whole, or raises and changes nothing.

The SQL in migrations/ says what is right. Where it leaves an order open (which of a leaving worker's tasks goes back
first), this store goes by id. tests/conformance runs one suite and the same random histories over both.
"""

import asyncio
import heapq
import json
import struct
from collections import OrderedDict, defaultdict, deque
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from itertools import islice, takewhile
from random import Random
from typing import TYPE_CHECKING, Any, Self, TypeVar
from uuid import UUID

from windlass.model.config import Retention
from windlass.model.errors import BadInput, UnknownWorker
from windlass.model.event import Event, QueueDepth
from windlass.model.node import NodeView
from windlass.model.task import (
    MAX_ERROR_CHARACTERS,
    MAX_NOTE_CHARACTERS,
    MAX_UNIQUE_KEY_LENGTH,
    Claim,
    Finished,
    NewTask,
    Task,
    TaskStatus,
    TaskSummary,
    Turn,
    check_queue_name,
    storable,
)
from windlass.model.worker import LIVE, HeldClaim, Pulse, Recovery, Registration, Worker, WorkerKind, WorkerStatus
from windlass.policy.backoff import retry_delay_s

if TYPE_CHECKING:
    from windlass.ports.store import Store

# The bounds of the SQL functions of the same name: one call never does more than this.
MAX_DUE_PER_CLAIM = 1000
MAX_RECOVERED_PER_CALL = 100
MAX_SWEPT_PER_KIND = 1000
MAX_FAILED_TASKS = 100
MAX_ATTEMPTS_TOLD = 20
MAX_WORKERS_NAMED = 5
FAILED_ATTEMPTS = frozenset({"TASK_ERROR", "TASK_REQUEUED", "TASK_FAILED"})
MAX_REASON_CHARACTERS, REASON_BEGINS, REASON_ENDS = 300, 100, 200
# As windlass.unnoticed_gap_s: of a lease, the longest silence that says nothing.
UNNOTICED_GAP = 0.4
# Hired workers are judged by others once nobody has led for this many of their leases.
LEADERLESS_LEASES = 2
# PostgreSQL's integer.
MAX_INTEGER = 2**31 - 1

_Key = TypeVar("_Key", int, str)


@dataclass(slots=True)
class _TaskRow:
    id: int
    queue: str
    payload: str
    priority: int
    run_after: datetime | None
    max_attempts: int
    timeout_s: float | None
    unique_key: str | None
    created_at: datetime
    status: TaskStatus = TaskStatus.QUEUED
    attempts: int = 0
    started_at: datetime | None = None
    finished_at: datetime | None = None
    token: UUID | None = None
    worker_id: str | None = None
    progress: float | None = None
    progress_note: str | None = None
    error_code: str | None = None
    error: str | None = None
    result: str | None = None

    def is_held_by(self, token: UUID) -> bool:
        return self.status is TaskStatus.RUNNING and self.token == token

    def is_ready(self) -> bool:
        return self.status is TaskStatus.QUEUED and self.run_after is None

    def as_summary(self) -> TaskSummary:
        return TaskSummary(**{f.name: getattr(self, f.name) for f in fields(TaskSummary)})

    def as_task(self) -> Task:
        return Task(
            id=self.id,
            queue=self.queue,
            status=self.status,
            priority=self.priority,
            attempts=self.attempts,
            max_attempts=self.max_attempts,
            timeout_s=self.timeout_s,
            run_after=self.run_after,
            created_at=self.created_at,
            started_at=self.started_at,
            finished_at=self.finished_at,
            worker_id=self.worker_id,
            unique_key=self.unique_key,
            progress=self.progress,
            progress_note=self.progress_note,
            error_code=self.error_code,
            error=self.error,
            payload=self.payload,
            result=self.result,
        )

    def as_claim(self) -> Claim:
        assert self.token is not None  # noqa: S101
        return Claim(
            task_id=self.id,
            token=self.token,
            queue=self.queue,
            payload=self.payload,
            attempt=self.attempts,
            max_attempts=self.max_attempts,
            timeout_s=self.timeout_s,
            priority=self.priority,
            created_at=self.created_at,
        )


@dataclass(slots=True)
class _WorkerRow:
    id: str
    fleet: str
    slot: int | None
    status: WorkerStatus
    created_at: datetime
    queues: tuple[str, ...] = ()
    concurrency: int = 1
    lease_s: float = 30.0
    is_paused: bool = False
    activated_at: datetime | None = None
    last_heartbeat: datetime | None = None
    heartbeat_gapless_since: datetime | None = None
    first_claimed_at: datetime | None = None
    terminated_at: datetime | None = None
    code: str | None = None
    reason: str | None = None
    host: str | None = None
    pid: int | None = None
    version: str | None = None
    vram_total_mb: int | None = None
    vram_used_mb: int | None = None
    late_results: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)
    failed_tasks: list[int] = field(default_factory=list)
    failing_since: datetime | None = None
    kind: WorkerKind = WorkerKind.WORKER
    node: NodeView | None = None

    @property
    def lease(self) -> timedelta:
        return _interval(self.lease_s)

    @property
    def unnoticed_gap(self) -> timedelta:
        return _interval(UNNOTICED_GAP * self.lease_s)

    def heard_at(self) -> datetime:
        return self.last_heartbeat or self.created_at

    def as_worker(self) -> Worker:
        return Worker(
            id=self.id,
            fleet=self.fleet,
            slot=self.slot,
            status=self.status,
            is_paused=self.is_paused,
            queues=self.queues,
            concurrency=self.concurrency,
            lease_s=self.lease_s,
            created_at=self.created_at,
            activated_at=self.activated_at,
            last_heartbeat=self.last_heartbeat,
            first_claimed_at=self.first_claimed_at,
            terminated_at=self.terminated_at,
            code=self.code,
            reason=self.reason,
            host=self.host,
            pid=self.pid,
            version=self.version,
            vram_total_mb=self.vram_total_mb,
            vram_used_mb=self.vram_used_mb,
            late_results=self.late_results,
            metadata=dict(self.metadata),
            kind=self.kind,
            node=self.node,
        )


@dataclass(slots=True)
class _Queue:
    """What is not finished in one queue. Heap entries may be out of date; the row they name decides."""

    unfinished: dict[int, _TaskRow] = field(default_factory=dict)
    ready: list[tuple[int, int]] = field(default_factory=list)  # (-priority, id)
    waiting: list[tuple[datetime, int]] = field(default_factory=list)  # (run_after, id)

    def place(self, row: _TaskRow) -> None:
        """To where claims look for it: among the ready, or those that wait for their time."""
        self.unfinished[row.id] = row
        if row.run_after is None:
            heapq.heappush(self.ready, (-row.priority, row.id))
        else:
            heapq.heappush(self.waiting, (row.run_after, row.id))

    def head(self) -> _TaskRow | None:
        """The next task to claim."""
        while self.ready:
            row = self.unfinished.get(self.ready[0][1])
            if row is not None and row.is_ready():
                return row
            heapq.heappop(self.ready)
        return None

    def next_waiting(self) -> _TaskRow | None:
        """The task that is due first, be it past or future."""
        while self.waiting:
            run_after, task_id = self.waiting[0]
            row = self.unfinished.get(task_id)
            if row is not None and row.run_after == run_after:
                return row
            heapq.heappop(self.waiting)
        return None

    def depth(self, name: str, now: datetime) -> QueueDepth:
        rows = self.unfinished.values()
        queued = [row for row in rows if row.status is TaskStatus.QUEUED]
        due = [row for row in queued if row.run_after is None or row.run_after <= now]
        oldest = min((row.created_at for row in due), default=None)
        return QueueDepth(
            queue=name,
            queued=len(due),
            scheduled=len(queued) - len(due),
            waiting_for_retry=sum(row.status is TaskStatus.ERROR for row in rows),
            running=sum(row.status is TaskStatus.RUNNING for row in rows),
            oldest_queued_age_s=(now - oldest).total_seconds() if oldest is not None else None,
        )


class MemoryStore:
    def __init__(
        self, clock: Callable[[], datetime], retention: Retention | None = None, chance: Random | None = None
    ) -> None:
        """`clock` gives aware datetimes and never runs backwards; `chance` makes claim tokens and jitter."""
        self._clock = clock
        self._retention = retention or Retention()
        self._chance = chance or Random()  # noqa: S311 - in one process nobody guesses tokens
        self._last_task_id = 0
        self._last_event_id = 0
        self._tasks: dict[int, _TaskRow] = {}
        self._queues: defaultdict[str, _Queue] = defaultdict(_Queue)
        self._unique: dict[tuple[str, str], int] = {}
        self._running: defaultdict[str, dict[int, _TaskRow]] = defaultdict(dict)
        # In the order they finished, so oldest first: retention and statistics look at one end only.
        self._finished: dict[TaskStatus, OrderedDict[int, _TaskRow]] = {
            TaskStatus.COMPLETE: OrderedDict(),
            TaskStatus.FAILED: OrderedDict(),
        }
        self._workers: dict[str, _WorkerRow] = {}
        self._not_terminated: dict[str, _WorkerRow] = {}
        self._terminated: OrderedDict[str, _WorkerRow] = OrderedDict()
        self._events: deque[Event] = deque()
        self._events_of_task: defaultdict[int, deque[Event]] = defaultdict(deque)
        self._events_of_worker: defaultdict[str, deque[Event]] = defaultdict(deque)
        self._waiters: dict[asyncio.Future[None], frozenset[str]] = {}
        # Queues in which something arrived while nobody was waiting to hear of it.
        self._arrived: set[str] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    # ---------------------------------------------------------------------------------------------- producers

    async def enqueue(self, task: NewTask) -> int:
        _check_new("enqueueing a task", task)
        known = self._known(task)
        return known if known is not None else self._add(task)

    async def enqueue_or_find(self, task: NewTask) -> tuple[int, bool]:
        newest = self._last_task_id
        task_id = await self.enqueue(task)
        return task_id, task_id > newest

    async def enqueue_many(self, tasks: Iterable[NewTask] | AsyncIterable[NewTask]) -> int:
        checked = [task async for task in tasks] if isinstance(tasks, AsyncIterable) else list(tasks)
        for task in checked:
            _check_new("enqueueing tasks", task)
        count = 0
        for task in checked:
            if self._known(task) is None:
                self._add(task)
                count += 1
        return count

    def _known(self, task: NewTask) -> int | None:
        return self._unique.get((task.queue, task.unique_key)) if task.unique_key is not None else None

    def _add(self, task: NewTask) -> int:
        self._last_task_id += 1
        row = _TaskRow(
            id=self._last_task_id,
            queue=task.queue,
            payload=task.payload,
            priority=task.priority,
            run_after=task.run_after,
            max_attempts=task.max_attempts,
            timeout_s=task.timeout_s,
            unique_key=task.unique_key,
            created_at=self._clock(),
        )
        self._tasks[row.id] = row
        if task.unique_key is not None:
            self._unique[task.queue, task.unique_key] = row.id
        self._queues[row.queue].place(row)
        self._announce(row.queue)
        return row.id

    async def retry_task(self, task_id: int) -> bool:
        row = self._tasks.get(task_id)
        if row is None or row.status not in (TaskStatus.ERROR, TaskStatus.FAILED):
            return False
        self._finished[TaskStatus.FAILED].pop(task_id, None)
        row.attempts = 0
        row.token = row.worker_id = row.started_at = row.finished_at = row.progress = row.progress_note = None
        self._make_ready(row)
        self._note("TASK_RETRIED", "put back into the queue by hand", task_id=task_id)
        self._announce(row.queue)
        return True

    async def retry_failed(
        self, queue: str, failed_before: datetime, limit: int = 1000, *, include_cancelled: bool = False
    ) -> list[int]:
        _check_limit("retrying tasks", limit)
        failed = _oldest(self._finished[TaskStatus.FAILED], failed_before + timedelta.resolution)
        own = (row for row in failed if row.queue == queue and (include_cancelled or row.error_code != "CANCELLED"))
        ids = sorted(row.id for row in islice(own, limit))
        for task_id in ids:
            await self.retry_task(task_id)
        return ids

    async def cancel_task(self, task_id: int, reason: str) -> bool:
        row = self._tasks.get(task_id)
        if row is None or row.status in (TaskStatus.COMPLETE, TaskStatus.FAILED):
            return False
        self._end(row, TaskStatus.FAILED, code="CANCELLED", error=reason)
        row.token = None
        self._note("TASK_CANCELLED", reason, worker_id=row.worker_id, task_id=task_id)
        return True

    # ------------------------------------------------------------------------------------------------ workers

    async def register(self, registration: Registration) -> WorkerStatus:
        r = registration
        _check_registration(r)
        row = self._workers.get(r.worker_id)
        if row is None:
            now = self._clock()
            row = _WorkerRow(r.worker_id, r.fleet, None, WorkerStatus.ACTIVE, created_at=now, activated_at=now)
            self._workers[row.id] = self._not_terminated[row.id] = row
        elif row.status not in LIVE:
            return row.status
        row.queues, row.concurrency, row.lease_s = r.queues, r.concurrency, r.lease_s
        row.host, row.pid, row.version, row.kind = r.host, r.pid, r.version, r.kind
        where = r.host if r.host is not None else "an unknown host"
        self._note(
            "WORKER_REGISTERED",
            f"registered on {where}, serving {', '.join(r.queues)}",
            fleet=row.fleet,
            worker_id=row.id,
        )
        return row.status

    def hire(self, worker_id: str, fleet: str, slot: int) -> None:
        """The row of an intent, as an orchestrator writes it before it asks a provider for a machine."""
        rivals = (w for w in self._not_terminated.values() if (w.fleet, w.slot) == (fleet, slot))
        if worker_id in self._workers or any(rivals):
            raise BadInput(f"hiring {worker_id}: the id or slot {slot} of fleet {fleet} is taken.")
        row = _WorkerRow(worker_id, fleet, slot, WorkerStatus.SPAWNING, created_at=self._clock())
        self._workers[row.id] = self._not_terminated[row.id] = row

    async def claim(self, worker_id: str, queues: Sequence[str], limit: int = 1) -> list[Claim]:
        return self._claim(self._living_worker(worker_id), queues, limit)

    def _known_worker(self, worker_id: str) -> _WorkerRow:
        try:
            return self._workers[worker_id]
        except KeyError:
            raise UnknownWorker(f"claiming tasks: worker {worker_id} is not registered: register it first.") from None

    def _living_worker(self, worker_id: str) -> _WorkerRow:
        worker = self._known_worker(worker_id)
        if worker.status not in LIVE:
            raise UnknownWorker(f"claiming tasks: worker {worker_id} has ended ({worker.status}): register a new one.")
        return worker

    def _claim(self, worker: _WorkerRow, queues: Sequence[str], limit: int) -> list[Claim]:
        if limit < 0:
            raise BadInput(f"claiming tasks: the limit is {limit} and must not be below 0.")
        if worker.is_paused or worker.status not in (WorkerStatus.SPAWNING, WorkerStatus.ACTIVE):
            return []
        now = self._clock()
        self._arrived.difference_update(queues)
        self._ready_the_due(queues, now)
        heads = [(head, name) for name in dict.fromkeys(queues) if (head := self._queues[name].head()) is not None]
        heads.sort(key=lambda pair: (-pair[0].priority, pair[0].id))
        taken = list(islice(self._take_in_turn(name for _, name in heads), limit))
        for row in taken:
            self._start(row, worker, now)
        if taken and worker.first_claimed_at is None:
            worker.first_claimed_at = now
        # Queues are emptied one after the other, but whoever claims begins with the best of what it got.
        taken.sort(key=lambda row: (-row.priority, row.id))
        return [row.as_claim() for row in taken]

    def _ready_the_due(self, queues: Sequence[str], now: datetime) -> None:
        due = self._due(queues, now)
        for row in islice(due, MAX_DUE_PER_CLAIM):
            self._make_ready(row)

    def _due(self, queues: Sequence[str], now: datetime) -> Iterator[_TaskRow]:
        """Each is to be taken away before the next is asked for."""
        for name in queues:
            queue = self._queues[name]
            while (row := queue.next_waiting()) is not None and row.run_after is not None and row.run_after <= now:
                yield row

    def _take_in_turn(self, names: Iterable[str]) -> Iterator[_TaskRow]:
        for name in names:
            queue = self._queues[name]
            while (row := queue.head()) is not None:
                # Running from here on, so that a second entry in the heap is not taken for a second task.
                row.status = TaskStatus.RUNNING
                yield row

    def _start(self, row: _TaskRow, worker: _WorkerRow, now: datetime) -> None:
        row.worker_id = worker.id
        row.token = UUID(int=self._chance.getrandbits(128), version=4)
        row.attempts += 1
        row.started_at = now
        row.finished_at = row.progress = row.progress_note = None
        self._running[worker.id][row.id] = row

    async def finish_and_claim(
        self, worker_id: str, finished: Sequence[Finished], queues: Sequence[str], limit: int
    ) -> Turn:
        worker = None
        if limit > 0:
            worker = self._known_worker(worker_id) if finished else self._living_worker(worker_id)
        for done in finished:
            _check_json("finishing tasks", done.result)
        accepted = {done.token for done in finished if self._complete(done)}
        for done in finished:
            doer = self._workers.get(self._tasks[done.task_id].worker_id or "") if done.token in accepted else None
            if doer is not None:
                doer.failed_tasks, doer.failing_since = [], None
        lost = [
            done.token
            for done in finished
            if done.token not in accepted
            and not self._is_repeat(worker_id, done.task_id, done.token, (TaskStatus.COMPLETE,))
        ]
        return Turn(claims=self._claim(worker, queues, limit) if worker is not None else [], lost=lost)

    def _complete(self, done: Finished) -> bool:
        row = self._tasks.get(done.task_id)
        if row is None or not row.is_held_by(done.token):
            return False
        self._end(row, TaskStatus.COMPLETE, code=None, error=None)
        row.result = done.result
        return True

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
        row = self._tasks.get(task_id)
        if row is None or not row.is_held_by(token):
            is_repeat = self._is_repeat(worker_id, task_id, token, (TaskStatus.ERROR, TaskStatus.FAILED))
            return row.status if row is not None and is_repeat else None
        error = storable(error)[-MAX_ERROR_CHARACTERS:]
        jitter = self._chance.random() if jitter is None else jitter
        if retry and row.attempts < row.max_attempts:
            self._let_wait(row, retry_delay_s(row.attempts, jitter), code, error)
        else:
            self._end(row, TaskStatus.FAILED, code=code, error=error)
        self._note_failure(row.worker_id or "", task_id)
        self._note_attempt(
            "TASK_ERROR" if row.status is TaskStatus.ERROR else "TASK_FAILED", row, row.worker_id, code, error
        )
        return row.status

    def _note_failure(self, worker_id: str, task_id: int) -> None:
        worker = self._workers.get(worker_id)
        if worker is not None:
            new = [] if task_id in worker.failed_tasks else [task_id]
            worker.failed_tasks = [*worker.failed_tasks, *new][-MAX_FAILED_TASKS:]
            worker.failing_since = worker.failing_since or self._clock()

    def _let_wait(self, row: _TaskRow, delay_s: float, code: str, error: str) -> None:
        now = self._clock()
        self._stop(row)
        row.status = TaskStatus.ERROR
        row.run_after = now + _interval(delay_s)
        row.finished_at = now
        row.error_code, row.error = code, error
        self._queues[row.queue].place(row)

    def _is_repeat(self, worker_id: str, task_id: int, token: UUID, statuses: tuple[TaskStatus, ...]) -> bool:
        """Whether this only repeats what was accepted before; otherwise it is counted as a late result."""
        row = self._tasks.get(task_id)
        if row is not None and row.token == token and row.status in statuses:
            return True
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.late_results += 1
        self._note(
            "LATE_RESULT",
            "a result came after its claim was lost; it changed nothing",
            fleet=worker.fleet if worker is not None else None,
            worker_id=worker_id,
            task_id=task_id,
        )
        return False

    async def release(self, worker_id: str, task_id: int, token: UUID, reason: str, delay_s: float = 0.0) -> bool:
        row = self._tasks.get(task_id)
        if row is None or not row.is_held_by(token):
            return False
        self._release(row, worker_id, reason, delay_s)
        return True

    def _release(self, row: _TaskRow, worker_id: str, reason: str, delay_s: float = 0.0) -> None:
        self._stop(row)
        row.attempts -= 1
        row.token = row.worker_id = row.started_at = row.progress = row.progress_note = None
        self._make_ready(row, self._clock() + _interval(delay_s) if delay_s > 0 else None)
        self._note("TASK_RELEASED", reason, worker_id=worker_id, task_id=row.id)
        self._announce(row.queue)

    async def heartbeat(
        self, worker_id: str, claims: Sequence[HeldClaim] = (), vitals: Mapping[str, Any] | None = None
    ) -> Pulse:
        worker = self._workers.get(worker_id)
        named = {claim.token for claim in claims}
        if worker is None or worker.status not in LIVE:
            return Pulse(status=worker.status if worker else None, is_paused=False, lost=frozenset(named))
        reported = [(claim, _real(claim.progress)) for claim in claims]
        _take_vitals(worker, dict(vitals or {}))
        now = self._clock()
        if worker.last_heartbeat is None or now - worker.last_heartbeat > worker.unnoticed_gap:
            worker.heartbeat_gapless_since = now
        worker.last_heartbeat = now
        held = {row.token: row for row in self._running[worker_id].values()}
        lost = set()
        for claim, progress in reported:
            row = self._tasks.get(claim.task_id)
            if row is None or not row.is_held_by(claim.token):
                lost.add(claim.token)
            elif progress is not None:
                row.progress = progress
                row.progress_note = storable(claim.note)[:MAX_NOTE_CHARACTERS] if claim.note is not None else None
        # What runs on a node is known to its dispatcher, who beats for it.
        own = held if worker.kind is not WorkerKind.NODE else {}
        for token, row in sorted(own.items(), key=lambda item: item[1].id):
            if token not in named and row.started_at is not None and row.started_at < now - worker.lease:
                self._release(row, worker_id, "claimed by a worker that never received it")
        return Pulse(status=worker.status, is_paused=worker.is_paused, lost=frozenset(lost))

    async def leave(self, worker_id: str, reason: str) -> None:
        worker = self._workers.get(worker_id)
        if worker is None or worker.status not in LIVE:
            return
        worker.code = worker.code if worker.code is not None else "LEFT"
        worker.reason = worker.reason if worker.reason is not None else reason
        if worker.slot is None:
            self._terminate(worker)
        else:
            # It still has a machine, which is the control loop's to end.
            worker.status = WorkerStatus.TERMINATING
        self._note("WORKER_LEFT", reason, fleet=worker.fleet, worker_id=worker_id)
        for row in self._held_in_order(worker_id):
            self._release(row, worker_id, "its worker left")

    async def upkeep(self, worker_id: str) -> list[Recovery]:
        recovered = await self.recover_lost_workers(worker_id)
        await self.sweep()
        return recovered

    async def recover_lost_workers(self, judge_id: str) -> list[Recovery]:
        lost = self._lost_workers(judge_id)[:MAX_RECOVERED_PER_CALL]
        recovered = [self._recover(worker, judge_id) for worker in lost]
        # Those that somebody ended without taking what they held.
        ended = sorted(worker_id for worker_id, tasks in self._running.items() if tasks and not self._lives(worker_id))
        return recovered + [
            self._take_back_all(worker_id, f"worker {worker_id} has ended")
            for worker_id in ended[:MAX_RECOVERED_PER_CALL]
        ]

    def _lost_workers(self, judge_id: str) -> list[_WorkerRow]:
        now = self._clock()
        judge = self._workers.get(judge_id)
        if judge is None or not _is_up(judge) or judge.last_heartbeat is None:
            return []
        if judge.last_heartbeat < now - judge.unnoticed_gap or judge.heartbeat_gapless_since is None:
            return []
        gapless_s = (now - judge.heartbeat_gapless_since).total_seconds()
        leaderless_s = self._leaderless_s()

        def is_lost(worker: _WorkerRow) -> bool:
            allowed_s = worker.lease_s + UNNOTICED_GAP * max(judge.lease_s - worker.lease_s, 0.0)
            return (
                (_is_up(worker) or (worker.status is WorkerStatus.SPAWNING and worker.last_heartbeat is not None))
                and (worker.slot is None or leaderless_s > LEADERLESS_LEASES * worker.lease_s)
                and allowed_s <= gapless_s
                and worker.heard_at() < now - _interval(allowed_s)
            )

        return sorted(filter(is_lost, self._not_terminated.values()), key=lambda worker: worker.id)

    def _leaderless_s(self) -> float:
        """For how long nobody has led. Here nobody ever does."""
        return float("inf")

    def _recover(self, worker: _WorkerRow, judge_id: str) -> Recovery:
        reason = f"no heartbeat for {_whole_seconds(self._clock() - worker.heard_at())} s"
        self._note("WORKER_LOST", reason, fleet=worker.fleet, worker_id=worker.id, detail={"judge": judge_id})
        recovery = self._take_back_all(worker.id, f"worker {worker.id} was lost", self._lost_with(worker))
        if worker.slot is None:
            worker.code, worker.reason = "STALE_HEARTBEAT", reason
            self._terminate(worker)
        else:
            self._fail_worker(worker.id, "STALE_HEARTBEAT", reason, counts=True)
        return recovery

    def _fail_worker(self, worker_id: str, code: str, reason: str, *, counts: bool) -> int:  # noqa: ARG002
        """A hired one is broken. Its machine, and what is counted of it, are the control loop's."""
        worker = self._workers[worker_id]
        worker.status, worker.code, worker.reason = WorkerStatus.ERROR, code, reason
        self._note("WORKER_ERROR", reason, fleet=worker.fleet, worker_id=worker_id, detail={"code": code})
        return 0

    def _lives(self, worker_id: str) -> bool:
        worker = self._workers.get(worker_id)
        return worker is not None and worker.status in LIVE

    def _lost_with(self, worker: _WorkerRow) -> list[str]:
        """The nodes whose tasks are lost with this dispatcher. Here nobody leads, so no other has taken its place."""
        if worker.kind is not WorkerKind.DISPATCHER:
            return []
        return [w.id for w in self._not_terminated.values() if (w.fleet, w.kind) == (worker.fleet, WorkerKind.NODE)]

    def _take_back_all(self, worker_id: str, reason: str, node_ids: Sequence[str] = ()) -> Recovery:
        tasks = [row for id_ in (worker_id, *node_ids) for row in self._held_in_order(id_)]
        for row in tasks:
            self._take_back(row, "WORKER_LOST", reason)
        failed = sum(row.status is TaskStatus.FAILED for row in tasks)
        return Recovery(worker_id, tasks_requeued=len(tasks) - failed, tasks_failed=failed)

    def _take_back(self, row: _TaskRow, code: str, reason: str) -> None:
        worker_id = row.worker_id
        if row.attempts < row.max_attempts:
            self._stop(row)
            row.worker_id = row.finished_at = None
            row.error_code, row.error = code, reason
            self._make_ready(row)
            self._announce(row.queue)
        else:
            self._end(row, TaskStatus.FAILED, code=code, error=reason)
        row.token = None
        event = "TASK_FAILED" if row.status is TaskStatus.FAILED else "TASK_REQUEUED"
        self._note_attempt(event, row, worker_id, code, reason)

    async def next_run_after(self, queues: Sequence[str]) -> datetime | None:
        waiting = (self._queues[name].next_waiting() for name in queues)
        return min((row.run_after for row in waiting if row is not None and row.run_after is not None), default=None)

    async def wait_for_work(self, queues: Sequence[str], timeout_s: float) -> None:
        """Time goes by the event loop's own clock here: a simulation's loop may run ahead of the world's."""
        if not self._arrived.isdisjoint(queues):
            self._arrived.difference_update(queues)
            # Others get their turn even if this caller only ever waits.
            await asyncio.sleep(0)
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = frozenset(queues)
        try:
            await asyncio.wait([waiter], timeout=timeout_s)
        finally:
            del self._waiters[waiter]

    def _announce(self, queue: str) -> None:
        is_heard = False
        for waiter, queues in self._waiters.items():
            if queue in queues and not waiter.done():
                waiter.set_result(None)
                is_heard = True
        if not is_heard:
            self._arrived.add(queue)

    # ------------------------------------------------------------------------------------------------ looking

    async def task(self, task_id: int) -> Task | None:
        row = self._tasks.get(task_id)
        return row.as_task() if row is not None else None

    async def tasks(
        self,
        *,
        queue: str | None = None,
        status: TaskStatus | None = None,
        limit: int = 50,
        before_id: int | None = None,
    ) -> list[Task]:
        _check_limit("listing tasks", limit)
        newest_id = self._last_task_id if before_id is None else min(self._last_task_id, before_id - 1)
        rows = (self._tasks.get(task_id) for task_id in range(newest_id, 0, -1))
        matching = (
            row.as_task()
            for row in rows
            if row is not None and queue in (None, row.queue) and status in (None, row.status)
        )
        return list(islice(matching, limit))

    async def task_summaries(
        self,
        *,
        queue: str | None = None,
        status: TaskStatus | None = None,
        limit: int = 50,
        before_id: int | None = None,
        is_scheduled: bool = False,
    ) -> list[TaskSummary]:
        looked_at = self._last_task_id if is_scheduled else limit
        tasks = await self.tasks(queue=queue, status=status, limit=looked_at, before_id=before_id)
        now = await self.now()
        found = [task for task in tasks if not is_scheduled or (task.run_after is not None and task.run_after > now)]
        return [self._tasks[task.id].as_summary() for task in found[:limit]]

    async def known_queues(self) -> list[str]:
        held = {row.queue for row in self._tasks.values()}
        served = {queue for worker in self._not_terminated.values() for queue in worker.queues}
        return sorted(held | served)

    async def worker(self, worker_id: str) -> Worker | None:
        row = self._workers.get(worker_id)
        return row.as_worker() if row is not None else None

    async def workers(self, *, include_terminated: bool = False) -> list[Worker]:
        rows = self._workers if include_terminated else self._not_terminated
        return [row.as_worker() for row in sorted(rows.values(), key=lambda row: (row.created_at, row.id))]

    async def set_paused(self, worker_ids: Sequence[str], is_paused: bool) -> int:
        rows = [row for row in self._named(worker_ids) if row.status in LIVE and row.is_paused is not is_paused]
        for row in rows:
            row.is_paused = is_paused
            code = "WORKER_PAUSED" if is_paused else "WORKER_RESUMED"
            self._note(code, "by hand", fleet=row.fleet, worker_id=row.id)
        return len(rows)

    async def set_terminating(self, worker_ids: Sequence[str], reason: str) -> int:
        able = (WorkerStatus.SPAWNING, WorkerStatus.ACTIVE)
        rows = [row for row in self._named(worker_ids) if row.status in able]
        for row in rows:
            row.status, row.code, row.reason = WorkerStatus.TERMINATING, "MANUAL", reason
            self._note("WORKER_TERMINATING", reason, fleet=row.fleet, worker_id=row.id)
        return len(rows)

    def _named(self, worker_ids: Sequence[str]) -> list[_WorkerRow]:
        return [self._workers[worker_id] for worker_id in dict.fromkeys(worker_ids) if worker_id in self._workers]

    async def queue_depths(self) -> list[QueueDepth]:
        now = self._clock()
        return [queue.depth(name, now) for name, queue in sorted(self._queues.items()) if queue.unfinished]

    async def finished_since(self, since_s: float) -> dict[TaskStatus, int]:
        after = self._clock() - _interval(since_s)
        return {status: _count_after(rows, after) for status, rows in self._finished.items()}

    async def events(
        self, *, task_id: int | None = None, worker_id: str | None = None, limit: int = 200
    ) -> list[Event]:
        _check_limit("reading events", limit)
        events = self._events
        if task_id is not None:
            events = self._events_of_task.get(task_id, deque())
        elif worker_id is not None:
            events = self._events_of_worker.get(worker_id, deque())
        matching = (event for event in reversed(events) if worker_id in (None, event.worker_id))
        return list(islice(matching, limit))[::-1]

    async def now(self) -> datetime:
        return self._clock()

    # ----------------------------------------------------------------------------------------------- tidying up

    async def purge(self, queue: str | None, statuses: Sequence[TaskStatus], older_than_s: float) -> int:
        until = self._clock() - _interval(older_than_s)
        finished = (rows for status, rows in self._finished.items() if status in statuses)
        # The end of what is old enough is the first that is newer; `until` itself is old enough.
        old = [row for rows in finished for row in _oldest(rows, until + timedelta.resolution)]
        return sum(self._delete(row) for row in old if queue in (None, row.queue))

    async def sweep(self) -> int:
        deleted = 0
        while (count := self._sweep_once()) >= MAX_SWEPT_PER_KIND:
            deleted += count
        return deleted + count

    def _sweep_once(self) -> int:
        kept, now = self._retention, self._clock()
        complete = _oldest(self._finished[TaskStatus.COMPLETE], now - _interval(kept.complete_s))
        failed = _oldest(self._finished[TaskStatus.FAILED], now - _interval(kept.failed_s))
        tasks = [row for rows in (complete, failed) for row in islice(rows, MAX_SWEPT_PER_KIND)]
        deleted = sum(self._delete(row) for row in tasks)
        deleted += self._forget_events(now - _interval(kept.events_s))
        return deleted + self._forget_workers(now - _interval(max(kept.complete_s, kept.failed_s, kept.events_s)))

    def _forget_events(self, before: datetime) -> int:
        count = 0
        while count < MAX_SWEPT_PER_KIND and self._events and self._events[0].at < before:
            event = self._events.popleft()
            _forget_oldest(self._events_of_task, event.task_id)
            _forget_oldest(self._events_of_worker, event.worker_id)
            count += 1
        return count

    def _forget_workers(self, before: datetime) -> int:
        ended = takewhile(lambda w: w.terminated_at is not None and w.terminated_at < before, self._terminated.values())
        old = list(islice((worker for worker in ended if not self._is_owing(worker)), MAX_SWEPT_PER_KIND))
        for worker in old:
            del self._terminated[worker.id], self._workers[worker.id]
            self._running.pop(worker.id, None)
        return len(old)

    def _is_owing(self, _: _WorkerRow) -> bool:
        """Whether its bill is not closed: until then it is remembered."""
        return False

    def _delete(self, row: _TaskRow) -> int:
        del self._tasks[row.id], self._finished[row.status][row.id]
        if row.unique_key is not None:
            del self._unique[row.queue, row.unique_key]
        return 1

    # ------------------------------------------------------------------------------------ the steps of a life

    def _make_ready(self, row: _TaskRow, run_after: datetime | None = None) -> None:
        row.status, row.run_after = TaskStatus.QUEUED, run_after
        self._queues[row.queue].place(row)

    def _stop(self, row: _TaskRow) -> None:
        """It no longer runs; what becomes of it is the caller's to say."""
        if row.worker_id is not None and self._running[row.worker_id].pop(row.id, None) is not None:
            self._note_span(row)

    def _note_span(self, row: _TaskRow) -> None:
        """An attempt has ended. Only workers that the control loop hired have a price for their time."""

    def _end(self, row: _TaskRow, status: TaskStatus, *, code: str | None, error: str | None) -> None:
        self._stop(row)
        row.status, row.run_after, row.finished_at = status, None, self._clock()
        row.error_code, row.error = code, error
        del self._queues[row.queue].unfinished[row.id]
        self._finished[status][row.id] = row

    def _terminate(self, worker: _WorkerRow) -> None:
        worker.status, worker.terminated_at = WorkerStatus.TERMINATED, self._clock()
        del self._not_terminated[worker.id]
        self._terminated[worker.id] = worker

    def _held_in_order(self, worker_id: str) -> list[_TaskRow]:
        return sorted(self._running[worker_id].values(), key=lambda row: row.id)

    def _note_attempt(self, event: str, row: _TaskRow, worker_id: str | None, code: str, error: str) -> None:
        detail: dict[str, Any] = {"attempt": row.attempts, "error_code": code, "error": error}
        reason = f"attempt {row.attempts} of {row.max_attempts}: {_shortened(error)}"
        if event == "TASK_FAILED":
            detail["failed_on"] = self._failed_on(row, worker_id, code)
            reason += _in_words(detail["failed_on"])
        self._note(event, reason, worker_id=worker_id, task_id=row.id, detail=detail)

    def _failed_on(self, row: _TaskRow, worker_id: str | None, code: str) -> list[dict[str, Any]]:
        """Every attempt that failed since the task was enqueued or retried, the last one included."""
        earlier = takewhile(lambda event: event.code != "TASK_RETRIED", reversed(self._events_of_task[row.id]))
        failed = [event for event in earlier if event.code in FAILED_ATTEMPTS][: MAX_ATTEMPTS_TOLD - 1]
        told = [
            {
                "attempt": (event.detail or {}).get("attempt"),
                "worker_id": event.worker_id,
                "error_code": (event.detail or {}).get("error_code"),
                "has_worked_since": event.worker_id in self._workers
                and row.id not in self._workers[event.worker_id].failed_tasks,
            }
            for event in reversed(failed)
        ]
        last = {"attempt": row.attempts, "worker_id": worker_id, "error_code": code, "has_worked_since": False}
        return [*told, last]

    def _note(
        self,
        code: str,
        reason: str,
        *,
        fleet: str | None = None,
        worker_id: str | None = None,
        task_id: int | None = None,
        detail: dict[str, Any] | None = None,
    ) -> None:
        self._last_event_id += 1
        event = Event(self._last_event_id, self._clock(), code, reason, fleet, worker_id, task_id, detail)
        self._events.append(event)
        if task_id is not None:
            self._events_of_task[task_id].append(event)
        if worker_id is not None:
            self._events_of_worker[worker_id].append(event)


def _interval(seconds: float) -> timedelta:
    """Rounded to microseconds as make_interval(secs => ...) does; timedelta(seconds=...) may differ by one."""
    return timedelta(microseconds=round(seconds * 1e6))


def _whole_seconds(duration: timedelta) -> int:
    """Halves upwards, as PostgreSQL rounds, not to even as Python does."""
    return (duration + timedelta(milliseconds=500)) // timedelta(seconds=1)


def _is_up(worker: _WorkerRow) -> bool:
    return worker.status in (WorkerStatus.ACTIVE, WorkerStatus.TERMINATING)


def _finish_time(row: _TaskRow) -> datetime:
    assert row.finished_at is not None  # noqa: S101
    return row.finished_at


def _oldest(rows: OrderedDict[int, _TaskRow], before: datetime) -> Iterator[_TaskRow]:
    for row in rows.values():
        if _finish_time(row) >= before:
            return
        yield row


def _count_after(rows: OrderedDict[int, _TaskRow], after: datetime) -> int:
    count = 0
    for row in reversed(rows.values()):
        if _finish_time(row) <= after:
            break
        count += 1
    return count


def _forget_oldest(events: defaultdict[_Key, deque[Event]], key: _Key | None) -> None:
    if key is None:
        return
    events[key].popleft()
    if not events[key]:
        del events[key]


def _real(progress: float | None) -> float | None:
    """As PostgreSQL's `real` keeps it."""
    if progress is None:
        return None
    try:
        rounded: float = struct.unpack("f", struct.pack("f", progress))[0]
    except (OverflowError, struct.error):
        raise BadInput(f"sending a heartbeat: {progress} cannot be a task's progress.") from None
    return rounded


def _take_vitals(worker: _WorkerRow, vitals: dict[str, Any]) -> None:
    try:
        # Through JSON and back, so that nothing is shared with the caller and nothing is kept that JSON cannot hold.
        vitals = json.loads(json.dumps(vitals, allow_nan=False))
        numbers = {name: int(str(value)) for name in _NUMBERED_VITALS if (value := vitals.pop(name, None)) is not None}
    except ValueError as error:
        raise BadInput(f"sending a heartbeat: the vitals cannot be stored ({error}).") from None
    for name, value in numbers.items():
        setattr(worker, name, value)
    worker.metadata.update(vitals)


_NUMBERED_VITALS = ("pid", "vram_total_mb", "vram_used_mb")


def _check_limit(doing: str, limit: int) -> None:
    if limit < 0:
        raise BadInput(f"{doing}: the limit is {limit} and must not be below 0.")


def _check_json(doing: str, text: str | None) -> None:
    if text is None:
        return
    try:
        json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise BadInput(f"{doing}: {text[:80]!r} is not JSON ({error}).") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _check_new(doing: str, task: NewTask) -> None:
    """What the table's constraints refuse."""
    check_queue_name(task.queue)
    if not -MAX_INTEGER - 1 <= task.priority <= MAX_INTEGER:
        raise BadInput(f"{doing}: priority {task.priority} is out of range.")
    if not 1 <= task.max_attempts <= MAX_INTEGER:
        raise BadInput(f"{doing}: max_attempts is {task.max_attempts}, but a task needs at least 1 attempt.")
    if task.timeout_s is not None and not task.timeout_s > 0:
        raise BadInput(f"{doing}: timeout_s is {task.timeout_s}, but a time limit must be above 0.")
    if task.unique_key is not None and not 1 <= len(task.unique_key) <= MAX_UNIQUE_KEY_LENGTH:
        raise BadInput(f"{doing}: the unique key is empty or has more than {MAX_UNIQUE_KEY_LENGTH} characters.")
    _check_json(doing, task.payload)


def _check_registration(registration: Registration) -> None:
    check_queue_name(registration.fleet)
    if registration.concurrency < 1:
        raise BadInput(f"registering the worker: concurrency is {registration.concurrency}, at least 1 is needed.")
    if not registration.lease_s > 0:
        raise BadInput(f"registering the worker: lease_s is {registration.lease_s} and must be above 0.")


if TYPE_CHECKING:
    # mypy compares every signature with the contract's.
    _: type[Store] = MemoryStore


def _in_words(failed_on: list[dict[str, Any]]) -> str:
    """As windlass.failed_on_in_words."""
    workers = list(dict.fromkeys(str(attempt["worker_id"]) for attempt in failed_on))
    if len(workers) < 2:
        return ""
    more = f" and {len(workers) - MAX_WORKERS_NAMED} more" if len(workers) > MAX_WORKERS_NAMED else ""
    return f"; it failed on {', '.join(workers[:MAX_WORKERS_NAMED])}{more}"


def _shortened(error: str) -> str:
    """An error as an event tells it: its beginning says what happened, its end where."""
    if len(error) <= MAX_REASON_CHARACTERS:
        return error
    return f"{error.split(chr(10), 1)[0][:REASON_BEGINS]} ... {error[-REASON_ENDS:]}"
