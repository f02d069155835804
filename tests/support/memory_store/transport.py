"""The worker's side of the queue, in memory, and the maintenance that workers run. Implements ports/transport.py."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from math import inf
from typing import Any
from uuid import UUID

from support.memory_store.clock import follow_clock
from support.memory_store.constraints import check_json, check_limit, check_registration, real
from support.memory_store.interval import interval, whole_seconds
from support.memory_store.retention import sweep
from support.memory_store.tables import Tables, TableStore
from support.memory_store.tasks import MemoryTask
from support.memory_store.worker_logs import append
from support.memory_store.workers import LEADERLESS_LEASES, MemoryWorker, lost, parse_vitals
from windlass.model.errors import BadInput, UnknownWorker
from windlass.model.task import (
    MAX_NOTE_CHARACTERS,
    MAX_RESULTS_PER_CALL,
    Claim,
    ClaimResult,
    Finished,
    TaskStatus,
    storable,
    truncate_error,
)
from windlass.model.worker import (
    LIVE,
    MAX_CLAIMS_PER_HEARTBEAT,
    HeartbeatReply,
    HeartbeatReport,
    HeldClaim,
    RecoveredTasks,
    Registration,
    WorkerKind,
    WorkerStatus,
)
from windlass.model.worker_log import LogChunk
from windlass.policy.backoff import retry_delay_s

# The bound of the SQL function recover_lost_workers.
MAX_RECOVERED_PER_CALL = 100
# That function too answers for the calls of the next second if it finds nothing.
MAX_JUDGED_AHEAD = timedelta(seconds=1)
# The SQL function reject_late_results writes one event per worker in this time.
LATE_EVENT_INTERVAL = timedelta(seconds=10)


class MemoryMaintenance(TableStore):
    async def recover_lost_workers(self, judge_id: str) -> list[RecoveredTasks]:
        follow_clock(self._tables)
        judge, now, judged_until = self._workers.get(judge_id), self._clock(), self._tables.judged_until
        if judged_until is not None and judged_until - MAX_JUDGED_AHEAD <= now <= judged_until:
            return []
        silent = (
            lost(judge, self._workers.not_terminated.values(), self._tables.leases.leaderless_s(), now)
            if judge is not None
            else []
        )
        recovered = [self._recover(worker, judge_id) for worker in silent[:MAX_RECOVERED_PER_CALL]]
        # Workers that ended while they were claiming.
        ended = sorted(id_ for id_, tasks in self._tasks.running.items() if tasks and not self._is_live(id_))
        if not silent and not ended:
            self._tables.judged_until = min((now + MAX_JUDGED_AHEAD, *self._judgeable_at(now)))
        return recovered + [
            self._tables.take_back_all(worker_id, "WORKER_LOST", f"worker {worker_id} has terminated")
            for worker_id in ended[:MAX_RECOVERED_PER_CALL]
        ]

    def _judgeable_at(self, now: datetime) -> list[datetime]:
        """When each worker may be declared lost at the earliest."""
        leaderless_s = self._tables.leases.leaderless_s()
        return [
            max(
                worker.last_seen_at() + worker.lease,
                worker.last_seen_at()
                if worker.slot is None or leaderless_s == inf
                else now + interval(LEADERLESS_LEASES * worker.lease_s - leaderless_s),
            )
            for worker in self._workers.not_terminated.values()
            if worker.is_up or (worker.status is WorkerStatus.SPAWNING and worker.last_heartbeat is not None)
        ]

    def _is_live(self, worker_id: str) -> bool:
        return self._workers.among(LIVE, worker_id) is not None

    def _recover(self, worker: MemoryWorker, judge_id: str) -> RecoveredTasks:
        reason = f"no heartbeat for {whole_seconds(self._clock() - worker.last_seen_at())} s"
        self._add_event("WORKER_LOST", reason, fleet=worker.fleet, worker_id=worker.id, detail={"judge": judge_id})
        nodes = self._tables.lost_with(worker)
        is_proven = self._is_proven(worker)
        recovery = self._tables.take_back_all(worker.id, "WORKER_LOST", f"worker {worker.id} was lost", nodes)
        if worker.slot is None:
            worker.code, worker.reason = "STALE_HEARTBEAT", reason
            self._tables.terminate(worker)
        else:
            self._tables.fail_worker(worker.id, "STALE_HEARTBEAT", reason, counts=True, is_proven=is_proven)
        return recovery

    def _is_proven(self, worker: MemoryWorker) -> bool:
        """It got through its first tasks, or worked on them for a minute."""
        first, beat_at = worker.first_claimed_at, worker.last_heartbeat
        if first is None:
            return False
        running = (self._tasks.rows[task_id] for task_id in self._tasks.running.get(worker.id, ()))
        is_first_running = any(task.started_at is not None and task.started_at <= first for task in running)
        return not is_first_running or (beat_at is not None and beat_at - first >= timedelta(minutes=1))

    async def sweep(self) -> int:
        return sweep(self._tables, self._tables.retention)


class MemoryWorkSignal(TableStore):
    async def wait_for_work(self, queues: Sequence[str], timeout_s: float) -> None:
        await self._tables.notifications.wait(queues, timeout_s)


class MemoryTransport(MemoryWorkSignal):
    def __init__(self, tables: Tables) -> None:
        super().__init__(tables)
        self._maintenance = MemoryMaintenance(tables)

    async def register(self, registration: Registration) -> WorkerStatus:
        check_registration(registration)
        row = self._workers.get(registration.worker_id)
        if row is None:
            now, fleet = self._clock(), self._tables.fleet(registration.fleet)
            row = MemoryWorker(
                registration.worker_id, fleet.name, None, WorkerStatus.ACTIVE, created_at=now, activated_at=now,
                is_paused=fleet.is_paused, kind=registration.kind,
            )  # fmt: skip
            self._workers.add(row)
        elif row.status not in LIVE:
            return row.status
        is_same_start = row.start_id is not None and row.start_id == registration.start_id
        row.apply_registration(registration)
        where = row.host if row.host is not None else "an unknown host"
        reason = f"registered on {where}, serving {', '.join(row.queues)}"
        self._add_event("WORKER_REGISTERED", reason, fleet=row.fleet, worker_id=row.id)
        if row.kind is WorkerKind.WORKER and not is_same_start:
            self._tables.requeue_tasks_of(row.id, "WORKER_LOST", "its worker restarted")
        return row.status

    async def claim(self, worker_id: str, queues: Sequence[str], limit: int = 1) -> list[Claim]:
        return self._claim(self._live_worker(worker_id), queues, limit)

    def _known_worker(self, worker_id: str) -> MemoryWorker:
        worker = self._workers.get(worker_id)
        if worker is None:
            raise UnknownWorker(f"claiming tasks: worker {worker_id} is not registered: register it first.")
        return worker

    def _live_worker(self, worker_id: str) -> MemoryWorker:
        worker = self._known_worker(worker_id)
        if worker.status not in LIVE:
            raise UnknownWorker(
                f"claiming tasks: worker {worker_id} has terminated ({worker.status}): register a new one."
            )
        return worker

    def _claim(self, worker: MemoryWorker, queues: Sequence[str], limit: int) -> list[Claim]:
        check_limit("claiming tasks", limit)
        if worker.is_paused or not worker.is_staying:
            return []
        now = self._clock()
        self._tables.notifications.clear(queues)
        taken = self._tasks.take(queues, limit, now)
        for row in taken:
            self._tasks.start(row, worker.id, self._tables.chance, now)
        if taken and worker.first_claimed_at is None:
            worker.first_claimed_at = now
            self._tables.promote(worker, "claimed its first task")
        # Queues are claimed one after the other; the reply is in claim order across queues.
        taken.sort(key=lambda row: (-row.priority, row.id))
        return [row.as_claim() for row in taken]

    async def finish_and_claim(
        self, worker_id: str, finished: Sequence[Finished], queues: Sequence[str], limit: int
    ) -> ClaimResult:
        worker = None
        if limit > 0:
            worker = self._known_worker(worker_id) if finished else self._live_worker(worker_id)
        if len(finished) > MAX_RESULTS_PER_CALL:
            raise BadInput(f"finishing tasks: at most 1000 results are accepted in one call, not {len(finished)}.")
        for done in finished:
            check_json("finishing tasks", done.result)
        accepted = {done.token for done in finished if self._complete(worker_id, done)}
        for done in finished:
            doer = self._workers.get(self._tasks.rows[done.task_id].worker_id) if done.token in accepted else None
            if doer is not None:
                doer.forget_failures()
        refused = [(done.task_id, done.token) for done in finished if done.token not in accepted]
        late = self._reject_late_results(worker_id, refused, (TaskStatus.COMPLETE,))
        return ClaimResult(claims=self._claim(worker, queues, limit) if worker is not None else [], lost=late)

    def _held(self, worker_id: str, task_id: int, token: UUID) -> MemoryTask | None:
        """The running task with this claim, if this worker may act for it."""
        row = self._tasks.held(task_id, token)
        return row if row is not None and self._tables.acts_for(worker_id, row.worker_id) else None

    def _complete(self, worker_id: str, done: Finished) -> bool:
        row = self._held(worker_id, done.task_id, done.token)
        if row is None:
            return False
        self._tables.end(row, TaskStatus.COMPLETE, code=None, error=None)
        row.result, row.progress = done.result, 1.0
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
        row = self._held(worker_id, task_id, token)
        if row is None:
            late = self._reject_late_results(worker_id, [(task_id, token)], (TaskStatus.ERROR, TaskStatus.FAILED))
            return None if late else self._tasks.rows[task_id].status
        error = truncate_error(storable(error))
        jitter = self._tables.chance.random() if jitter is None else jitter
        if retry and row.attempts < row.max_attempts:
            self._tables.schedule_retry(row, retry_delay_s(row.attempts, jitter), code=code, error=error)
        else:
            self._tables.end(row, TaskStatus.FAILED, code=code, error=error)
        doer = self._workers.get(row.worker_id)
        if doer is not None:
            doer.record_failure(task_id, self._clock())
        event = "TASK_ERROR" if row.status is TaskStatus.ERROR else "TASK_FAILED"
        self._tables.record_attempt(event, row, row.worker_id, row.started_at, code, error)
        return row.status

    def _reject_late_results(
        self, worker_id: str, claims: Sequence[tuple[int, UUID]], statuses: tuple[TaskStatus, ...]
    ) -> list[UUID]:
        """The claims that do not repeat an accepted call. They are counted, with an event per worker in ten seconds."""
        late = [
            (task_id, token) for task_id, token in claims if not self._is_repeat(worker_id, task_id, token, statuses)
        ]
        if not late:
            return []
        worker = self._workers.get(worker_id)
        # An id without a worker leaves no trace.
        if worker is None:
            return [token for _, token in late]
        worker.late_results += len(late)
        now, event_at = self._clock(), worker.late_event_at
        if event_at is not None and now - LATE_EVENT_INTERVAL <= event_at <= now:
            return [token for _, token in late]
        worker.late_event_at = now
        is_one = len(late) == 1
        ids = [task_id for task_id, _ in late]
        self._add_event(
            "LATE_RESULT",
            "result rejected: its claim is no longer valid"
            if is_one
            else f"{len(late)} results rejected: their claims are no longer valid",
            fleet=worker.fleet,
            worker_id=worker_id,
            task_id=ids[0],
            **({} if is_one else {"detail": {"count": len(late), "task_ids": ids[:20]}}),
        )
        return [token for _, token in late]

    def _is_repeat(self, worker_id: str, task_id: int, token: UUID, statuses: tuple[TaskStatus, ...]) -> bool:
        row = self._tasks.rows.get(task_id)
        is_known = row is not None and row.token == token and row.status in statuses
        return row is not None and is_known and self._tables.acts_for(worker_id, row.worker_id)

    async def release(self, worker_id: str, task_id: int, token: UUID, reason: str, delay_s: float = 0.0) -> bool:
        row = self._held(worker_id, task_id, token)
        if row is None:
            return False
        self._tables.release(row, worker_id, reason, delay_s)
        return True

    async def heartbeat(
        self, worker_id: str, claims: Sequence[HeldClaim] = (), vitals: Mapping[str, Any] | None = None
    ) -> HeartbeatReply:
        if len(claims) > MAX_CLAIMS_PER_HEARTBEAT:
            raise BadInput(f"sending a heartbeat: a heartbeat names at most 10000 claims, not {len(claims)}.")
        return self._record_heartbeat(HeartbeatReport(worker_id, claims, vitals or {}))

    def _record_heartbeat(self, heartbeat: HeartbeatReport) -> HeartbeatReply:
        worker_id, claims = heartbeat.worker_id, heartbeat.claims
        follow_clock(self._tables)
        worker = self._workers.get(worker_id)
        named = {claim.token for claim in claims}
        if worker is None or worker.status not in LIVE:
            return HeartbeatReply(status=worker.status if worker else None, is_paused=False, lost=frozenset(named))
        reported = [(claim, real(claim.progress)) for claim in claims]
        now = self._clock()
        worker.apply_vitals(heartbeat.vitals, now)
        worker.record_heartbeat(now)
        lost_claims = set()
        for claim, progress in reported:
            row = self._held(worker_id, claim.task_id, claim.token)
            if row is None:
                lost_claims.add(claim.token)
            elif progress is not None:
                row.progress = progress
                row.progress_note = storable(claim.note)[:MAX_NOTE_CHARACTERS] if claim.note is not None else None
        # The dispatcher sends heartbeats for tasks on its nodes.
        own = self._tasks.run_by(worker_id) if worker.kind is not WorkerKind.NODE else []
        for row in own:
            if not heartbeat.first_task_id <= row.id <= heartbeat.last_task_id:
                continue
            if row.token not in named and row.started_at is not None and row.started_at < now - worker.lease:
                self._tables.release(row, worker_id, "the claim did not reach its worker")
        return HeartbeatReply(status=worker.status, is_paused=worker.is_paused, lost=frozenset(lost_claims))

    async def heartbeat_many(
        self, heartbeats: Sequence[HeartbeatReport], *, waits: bool = False
    ) -> list[HeartbeatReply | None]:
        for each in heartbeats:
            # All or none, as one statement.
            if self._workers.among(LIVE, each.worker_id) is not None:
                parse_vitals(each.vitals)
            for claim in each.claims:
                real(claim.progress)
        return [self._record_heartbeat(each) for each in heartbeats]

    async def deregister(self, worker_id: str, reason: str) -> None:
        worker = self._workers.among(LIVE, worker_id)
        if worker is None:
            return
        worker.set_end_reason("DEREGISTERED", reason)
        if worker.slot is None:
            self._tables.terminate(worker)
        else:
            # The control loop deletes its machine.
            if worker.status is not WorkerStatus.TERMINATING:
                worker.move(WorkerStatus.TERMINATING)
            worker.spawned.terminating_at = worker.spawned.terminating_at or self._clock()
        self._add_event("WORKER_DEREGISTERED", reason, fleet=worker.fleet, worker_id=worker_id)
        self._tables.release_all_of(worker_id, "its worker deregistered")

    async def run_maintenance(self, worker_id: str) -> list[RecoveredTasks]:
        recovered = await self._maintenance.recover_lost_workers(worker_id)
        await self._maintenance.sweep()
        return recovered

    async def append_logs(self, worker_id: str, batch_id: UUID, chunks: Sequence[LogChunk]) -> None:
        if worker_id not in self._workers.not_terminated:
            raise UnknownWorker(
                f"storing output: worker {worker_id} has terminated or is not registered: register it first."
            )
        append(self._tables, worker_id, batch_id, chunks)

    async def next_run_after(self, queues: Sequence[str]) -> datetime | None:
        waiting = (self._tasks.queues[name].next_waiting() for name in queues)
        return min((row.run_after for row in waiting if row is not None and row.run_after is not None), default=None)
