"""All tables, and the steps that change several of them, as the internal SQL functions do.

Each step leaves all tables consistent and records its events.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import islice, takewhile
from random import Random
from typing import Any
from uuid import UUID, uuid4

from pydantic import TypeAdapter

from support.memory_store.cycles import Cycles
from support.memory_store.events import EventLog, failed_attempts, failed_attempts_text
from support.memory_store.fleets import FleetRow, LeaseTable, SlotRow
from support.memory_store.interval import interval
from support.memory_store.ledger import ChargeLedger, record_span
from support.memory_store.notifications import NotificationHub
from support.memory_store.tasks import MemoryTask, TaskTable
from support.memory_store.worker_logs import WorkerLogTable, diagnostics_of
from support.memory_store.workers import Credentials, MemoryWorker, WorkerTable
from windlass.model.action import AttemptRefund
from windlass.model.auth import ApiToken, Session
from windlass.model.config import Retention
from windlass.model.error_text import error_headline
from windlass.model.errors import BadInput
from windlass.model.node import dispatcher_lease
from windlass.model.outcome import Intent
from windlass.model.snapshot import FailureStreak
from windlass.model.task import TaskStatus
from windlass.model.worker import LIVE, RecoveredTasks, WorkerKind, WorkerStatus

MAX_REFUNDED_EVENTS = 10_000

_FAILURE_STREAK = TypeAdapter(FailureStreak)


class Tables:
    def __init__(
        self, clock: Callable[[], datetime], retention: Retention | None = None, chance: Random | None = None
    ) -> None:
        """`clock` returns aware datetimes; see clock.py for steps back. `chance` makes claim tokens and jitter."""
        self.now = clock
        self.retention = retention or Retention()
        self.chance = chance or Random()  # noqa: S311 - tokens need not be secret within one process
        self.instance_id = str(uuid4())
        self.tasks = TaskTable()
        self.workers = WorkerTable()
        self.fleets: dict[str, FleetRow] = {}
        self.leases = LeaseTable(clock)
        # The latest time that follow_clock has seen.
        self.clock_seen_at: datetime | None = None
        # Until then recover_lost_workers finds nothing.
        self.judged_until: datetime | None = None
        self.event_log = EventLog(clock)
        self.notifications = NotificationHub()
        self.ledger = ChargeLedger()
        self.worker_logs = WorkerLogTable()
        # By worker that failed or terminated.
        self.diagnostics: dict[str, dict[str, Any]] = {}
        self.cycles = Cycles()
        self.api_tokens: dict[bytes, ApiToken] = {}
        # Sessions and links by hash.
        self.sessions: dict[bytes, Session] = {}
        # Rates of heavy callers by server, with the time of their record.
        self.caller_rates: dict[UUID, tuple[datetime, dict[tuple[str, str], float]]] = {}
        # Time of the last report by address, newest last.

    # --------------------------------------------------------------------------------------------------- tasks

    def stop(self, row: MemoryTask) -> None:
        """Stop a running task and record its span. The caller sets its new status."""
        if self.tasks.stop(row):
            record_span(self.workers.get(row.worker_id), row, self.now())

    def end(self, row: MemoryTask, status: TaskStatus, *, code: str | None, error: str | None) -> None:
        self.stop(row)
        self.tasks.end(row, status, self.now())
        row.error_code, row.error = code, error

    def schedule_retry(self, row: MemoryTask, delay_s: float, *, code: str, error: str) -> None:
        self.stop(row)
        now = self.now()
        self.tasks.schedule_retry(row, now + interval(delay_s), now)
        row.error_code, row.error = code, error

    def release(self, row: MemoryTask, worker_id: str, reason: str, delay_s: float = 0.0) -> None:
        """Requeue a task without counting the attempt."""
        self.stop(row)
        row.attempts -= 1
        now = self.now()
        self.tasks.put_back(row, now, now + interval(delay_s) if delay_s > 0 else None)
        self.event_log.add("TASK_RELEASED", reason, worker_id=worker_id, task_id=row.id)
        self.notifications.notify(row.queue)

    def release_all_of(self, worker_id: str, reason: str) -> int:
        held = self.tasks.run_by(worker_id)
        for row in held:
            self.release(row, worker_id, reason)
        return len(held)

    def take_back(self, row: MemoryTask, code: str, reason: str) -> None:
        """Requeue a task whose worker will not finish it, or fail it without attempts left. The attempt counts."""
        worker_id, started_at = row.worker_id, row.started_at
        if row.attempts < row.max_attempts:
            self.stop(row)
            row.error_code, row.error = code, reason
            self.tasks.put_back(row, self.now())
            self.notifications.notify(row.queue)
        else:
            self.end(row, TaskStatus.FAILED, code=code, error=reason)
        row.token = None
        event = "TASK_FAILED" if row.status is TaskStatus.FAILED else "TASK_REQUEUED"
        self.record_attempt(event, row, worker_id, started_at, code, reason)

    def take_back_all(self, worker_id: str, code: str, reason: str, node_ids: Sequence[str] = ()) -> RecoveredTasks:
        """Take back the tasks of a worker and of the given nodes."""
        tasks = [row for id_ in (worker_id, *node_ids) for row in self.tasks.run_by(id_)]
        for row in tasks:
            self.take_back(row, code, reason)
        failed = sum(row.status is TaskStatus.FAILED for row in tasks)
        return RecoveredTasks(worker_id, tasks_requeued=len(tasks) - failed, tasks_failed=failed)

    def record_attempt(
        self, event: str, row: MemoryTask, worker_id: str | None, started_at: datetime | None, code: str, error: str
    ) -> None:
        detail: dict[str, object] = {"attempt": row.attempts, "error_code": code, "error": error}
        if started_at is not None:
            # Without trailing zeros, as PostgreSQL writes it.
            detail["started_at"] = re.sub(r"(\.\d*?)0+(?=\+)", r"\1", started_at.isoformat())
        reason = f"attempt {row.attempts} of {row.max_attempts}: {error_headline(error)}"
        if event == "TASK_FAILED":
            last = {"attempt": row.attempts, "worker_id": worker_id, "error_code": code}
            attempts = failed_attempts(self.event_log, self.workers, row, last)
            detail["failed_attempts"] = attempts
            reason += failed_attempts_text(attempts)
        self.event_log.add(event, reason, worker_id=worker_id, task_id=row.id, detail=detail)

    # ------------------------------------------------------------------------------------------------- workers

    def promote(self, worker: MemoryWorker, reason: str) -> None:
        if worker.status is WorkerStatus.SPAWNING:
            worker.move(WorkerStatus.ACTIVE)
            worker.activated_at = self.now()
            self.event_log.add("WORKER_ACTIVATED", reason, fleet=worker.fleet, worker_id=worker.id)

    def terminate(self, worker: MemoryWorker) -> None:
        before = worker.status
        self.workers.terminate(worker, self.now())
        self._record_diagnostics(worker, before)

    def _record_diagnostics(self, worker: MemoryWorker, before: WorkerStatus) -> None:
        running = len(self.tasks.running.get(worker.id, ()))
        found = diagnostics_of(worker, before, running, self.worker_logs, self.event_log.of_worker(worker.id))
        self.diagnostics[worker.id] = self.diagnostics.get(worker.id, {}) | found

    def fail_worker(
        self,
        worker_id: str,
        code: str,
        reason: str,
        *,
        counts: bool,
        evidence: FailureStreak | None = None,
        attempt_refund: AttemptRefund | None = None,
        is_proven: bool = False,
    ) -> int:
        """Set a worker to error and requeue its tasks. Returns how many. `counts`: count a restart of its slot."""
        worker, now = self.workers.among(LIVE, worker_id), self.now()
        if worker is None:
            return 0
        before = worker.status
        worker.move(WorkerStatus.ERROR)
        worker.code, worker.reason = code, reason
        self._record_diagnostics(worker, before)
        worker.spawned.failed_at = now if counts else None
        worker.spawned.is_proven = is_proven
        values = {} if evidence is None else {"evidence": _FAILURE_STREAK.dump_python(evidence, mode="json")}
        self.event_log.add(
            "WORKER_ERROR", reason, fleet=worker.fleet, worker_id=worker_id, detail={"code": code, **values}
        )
        if counts and worker.slot is not None:
            self.fleets[worker.fleet].slots[worker.slot].record_restart(now)
        if attempt_refund is not None:
            self._refund_attempts(worker_id, attempt_refund)
            released = self._release_not_at_fault(worker_id, attempt_refund.max_releases, reason)
            return released + self.requeue_tasks_of(worker_id, code, f"worker {worker_id}: {reason}")
        return self.requeue_tasks_of(worker_id, code, f"worker {worker_id}: {reason}")

    def requeue_tasks_of(self, worker_id: str, code: str, reason: str) -> int:
        recovery = self.take_back_all(worker_id, code, reason)
        return recovery.tasks_requeued + recovery.tasks_failed

    def _refund_attempts(self, worker_id: str, attempt_refund: AttemptRefund) -> None:
        events = (e for e in reversed(self.event_log.of_worker(worker_id)) if e.code in ("TASK_ERROR", "TASK_FAILED"))
        failures = islice(takewhile(lambda event: event.at >= attempt_refund.since, events), MAX_REFUNDED_EVENTS)
        counts = Counter(event.task_id for event in failures if event.task_id is not None)
        for task_id, count in sorted(counts.items()):
            row = self.tasks.rows.get(task_id)
            if row is None or row.status is TaskStatus.COMPLETE or row.error_code == "CANCELLED":
                continue
            if attempt_refund.is_trial and self._was_refunded(task_id):
                continue
            row.attempts = max(row.attempts - count, 1 if row.status is TaskStatus.RUNNING else 0)
            has_attempts_left = row.status is TaskStatus.FAILED and row.attempts < row.max_attempts
            if has_attempts_left or (row.status is TaskStatus.ERROR and row.worker_id == worker_id):
                self.tasks.put_back(row, self.now())
                self.notifications.notify(row.queue)
            reason = f"{count} failed attempts on worker {worker_id} refunded"
            self.event_log.add("ATTEMPTS_REFUNDED", reason, worker_id=worker_id, task_id=task_id)

    def _release_not_at_fault(self, worker_id: str, limit: int | None, reason: str) -> int:
        """Release the running tasks of a worker, but those that were released this often before."""
        prefix = "not the fault of the task: "
        released = 0
        for row in self.tasks.run_by(worker_id):
            events = self.event_log.since_retried(row.id)
            earlier = sum(event.code == "TASK_RELEASED" and (event.reason or "").startswith(prefix) for event in events)
            if limit is None or earlier < limit:
                self.release(row, worker_id, f"{prefix}{reason}")
                released += 1
        return released

    def _was_refunded(self, task_id: int) -> bool:
        """Whether an attempt was refunded since the task was enqueued or retried by hand."""
        return any(event.code == "ATTEMPTS_REFUNDED" for event in self.event_log.since_retried(task_id))

    def acts_for(self, worker_id: str, holder_id: str | None) -> bool:
        """Whether a worker may end the holder's attempts: its own; a dispatcher also those on its fleet's nodes."""
        dispatcher, node = self.workers.get(worker_id), self.workers.get(holder_id)
        if worker_id == holder_id or dispatcher is None or node is None:
            return worker_id == holder_id
        return (dispatcher.kind, node.kind) == (
            WorkerKind.DISPATCHER,
            WorkerKind.NODE,
        ) and dispatcher.fleet == node.fleet

    def lost_with(self, worker: MemoryWorker) -> list[str]:
        """Nodes whose tasks are lost with this dispatcher: none while another dispatcher holds the lease."""
        if worker.kind is not WorkerKind.DISPATCHER or self.leases.is_held(dispatcher_lease(worker.fleet)):
            return []
        return [node.id for node in self.workers.nodes_of(worker.fleet)]

    # -------------------------------------------------------------------------------------------------- fleets

    def fleet(self, name: str) -> FleetRow:
        """The fleet's row, created on first use."""
        if name not in self.fleets:
            self.fleets[name] = FleetRow(name, self.now())
        return self.fleets[name]

    def known_fleet(self, doing: str, name: str) -> FleetRow:
        try:
            return self.fleets[name]
        except KeyError:
            raise BadInput(f"{doing}: fleet {name} not found") from None

    def free_slots_for_requests(self, fleet: FleetRow) -> int:
        """How many slots could take a requested worker."""
        occupied = {worker.slot for worker in self.workers.spawned_in(fleet.name) if worker.is_staying}
        occupied |= {number for number, slot in fleet.slots.items() if slot.is_failed and number < fleet.max_workers}
        return fleet.max_workers - len(occupied)

    def reserve_slots(self, fleet: FleetRow, intents: Sequence[Intent]) -> frozenset[str]:
        """Spawn a worker for each intent with a free slot, up to max_workers. Returns the spawned workers."""
        own = self.workers.spawned_in(fleet.name)
        occupied = {worker.slot for worker in own}
        free = fleet.max_workers - len(own)
        for intent in intents:
            fleet.slots.setdefault(intent.slot, SlotRow())
        granted = []
        for intent in intents:
            is_free = intent.slot not in occupied and not fleet.slots[intent.slot].is_failed
            if free > 0 and is_free and intent.slot < fleet.max_workers and intent.worker_id not in self.workers.rows:
                free -= 1
                occupied.add(intent.slot)
                self._spawn(fleet, intent)
                granted.append(intent.worker_id)
        fulfilled = sum(intent.is_requested and intent.worker_id in granted for intent in intents)
        fleet.requested_workers = max(0, min(fleet.requested_workers - fulfilled, self.free_slots_for_requests(fleet)))
        return frozenset(granted)

    def _spawn(self, fleet: FleetRow, intent: Intent) -> None:
        row = MemoryWorker(
            intent.worker_id, fleet.name, intent.slot, WorkerStatus.SPAWNING, created_at=self.now(),
            queues=fleet.queues, lease_s=intent.lease_s, is_paused=fleet.is_paused, concurrency=intent.concurrency,
            kind=intent.kind,
        )  # fmt: skip
        row.spawned.provider = fleet.provider
        row.spawned.fingerprint = intent.fingerprint
        if intent.join_token_hash is not None and intent.join_ttl_s is not None:
            row.credentials = Credentials(intent.join_token_hash, self.now() + interval(intent.join_ttl_s))
        self.workers.add(row)
        slot = fleet.slots[intent.slot]
        detail = {"slot": intent.slot, "cause": "worker_replacement" if slot.needs_replacement else intent.cause}
        slot.needs_replacement = False
        self.event_log.add("WORKER_SPAWNED", intent.reason, fleet=fleet.name, worker_id=row.id, detail=detail)


class TableStore:
    """Base of the memory stores. Each implements one port over shared tables."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._tasks, self._workers = tables.tasks, tables.workers
        self._clock = tables.now
        self._add_event = tables.event_log.add

    async def now(self) -> datetime:
        return self._clock()
