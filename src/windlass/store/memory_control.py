"""The control loop's part of the store in memory: the contract of PostgresControlStore without PostgreSQL.

migrations/0004_control.sql says what is right; every method here is the function of the same name there, and
tests/conformance/test_control_store.py runs the same histories over both. What a fleet's memory and snapshots hold is
kept as the values they are: nothing passes through JSON.
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import islice, takewhile
from random import Random
from typing import TYPE_CHECKING, Any, assert_never
from uuid import uuid4

from pydantic import TypeAdapter

from windlass.model.action import (
    Acquittal,
    Action,
    Adopt,
    Alert,
    Delete,
    DeleteStray,
    Drain,
    Fail,
    FailSlot,
    GrowVolume,
    Plan,
    Prepare,
    Price,
    Promote,
    Requeue,
    Spawn,
)
from windlass.model.config import Retention
from windlass.model.cost import (
    Account,
    Bill,
    Charge,
    ChargeKind,
    Cost,
    Settlement,
    Span,
    Spending,
    Tariff,
    day_of,
    hour_of,
    month_of,
)
from windlass.model.errors import BadInput
from windlass.model.event import Event
from windlass.model.fleet import MAX_RESTARTS, FleetConfig
from windlass.model.machine import Machine
from windlass.model.record import Cycle, CycleInFull, Fleet
from windlass.model.snapshot import (
    Failure,
    Hiring,
    Memory,
    QueueView,
    Refusal,
    RunningView,
    SlotView,
    Snapshot,
    StorageUse,
    Suspect,
    WorkerView,
)
from windlass.model.task import TaskStatus
from windlass.model.worker import LIVE, HeldClaim, Pulse, Registration, WorkerKind, WorkerStatus
from windlass.ports.control import (
    MAX_AHEAD,
    Candidate,
    Committed,
    Created,
    CreationRefused,
    CreationUnclear,
    Deleted,
    Intent,
    LeaseLost,
    NotDeleted,
    Outcome,
    PreparationFailed,
    PreparationUnclear,
    Prepared,
    Standby,
    StrayDeleted,
    VolumeGrown,
    VolumeNotGrown,
)
from windlass.store.memory import MAX_SWEPT_PER_KIND, MemoryStore, _interval, _TaskRow, _WorkerRow

if TYPE_CHECKING:
    from windlass.ports.control import ControlStore, Operations
    from windlass.ports.costs import Costs

# The bounds of the SQL functions.
MAX_HIRINGS = 1000
MAX_BOOTS = 50
MAX_DURATIONS = 500
MAX_LOOKED_AT = 20_000
MAX_CYCLES_SEARCHED = 5
MAX_ANSWERS = 50
# Refusals that are not about one machine.
FLEET_REFUSALS = frozenset({"LimitReached", "Denied", "InvalidRequest", "NoCapacity"})
MAX_SUSPECTS = 50
MAX_TASKS_WEIGHED = 500
MAX_EVENTS_WEIGHED = 1000
MAX_LOOKED_AT = 20_000
MAX_ACQUITTED = 10_000
MAX_ENDED_BILLS = 1000
MAX_SPANS = 20_000
FIRST_SETTLED_AFTER = timedelta(hours=1, minutes=1)
SETTLED_AFTER_END = timedelta(minutes=1)
# A cycle that repeats the last one is stored again after this time, so that there is a recent snapshot to explain from.
REPEAT_LIMIT = timedelta(minutes=5)

LEGAL_MOVES = {
    WorkerStatus.SPAWNING: frozenset(WorkerStatus) - {WorkerStatus.SPAWNING},
    WorkerStatus.ACTIVE: frozenset({WorkerStatus.TERMINATING, WorkerStatus.ERROR, WorkerStatus.TERMINATED}),
    WorkerStatus.TERMINATING: frozenset({WorkerStatus.ERROR, WorkerStatus.TERMINATED}),
    WorkerStatus.ERROR: frozenset({WorkerStatus.TERMINATED}),
    WorkerStatus.TERMINATED: frozenset(),
}


_SUSPECT = TypeAdapter(Suspect)
# A fleet, an hour of the clock and a currency.
_Hour = tuple[str, datetime, str, str]


@dataclass(slots=True)
class _Lease:
    holder: str
    term: int
    expires_at: datetime


@dataclass(slots=True)
class _FleetRow:
    name: str
    created_at: datetime
    provider: str = "local"
    queues: tuple[str, ...] = ()
    min_workers: int = 0
    max_workers: int = 10
    is_paused: bool = False
    requested_workers: int = 0
    reset_at: datetime | None = None
    memory: Memory = field(default_factory=Memory)
    slots: dict[int, "_SlotRow"] = field(default_factory=dict)


@dataclass(slots=True)
class _SlotRow:
    is_failed: bool = False
    restarts: list[datetime] = field(default_factory=list)


@dataclass(slots=True)
class _Hired:
    """The columns of a worker that only the control loop reads."""

    terminating_at: datetime | None = None
    provider: str | None = None
    machine_id: str | None = None
    machine_at: datetime | None = None
    creation: str | None = None
    preparing_at: datetime | None = None
    prepared_at: datetime | None = None
    prepare_code: str | None = None
    prepare_reason: str | None = None
    host_key: str | None = None
    failed_at: datetime | None = None
    vram_at: datetime | None = None
    bill: Bill | None = None
    settle_at: datetime | None = None
    spans: dict[tuple[datetime, int], Span] = field(default_factory=dict)


class MemoryControlStore(MemoryStore):
    def __init__(
        self, clock: Callable[[], datetime], retention: Retention | None = None, chance: Random | None = None
    ) -> None:
        super().__init__(clock, retention, chance)
        self._leases: dict[str, _Lease] = {}
        self._fleets: dict[str, _FleetRow] = {}
        self._hired: defaultdict[str, _Hired] = defaultdict(_Hired)
        self._charges: list[Charge] = []
        # What each fleet spent in each hour of the clock, for each queue and for none.
        self._spending: dict[_Hour, Cost] = {}
        self._cycles: OrderedDict[int, CycleInFull] = OrderedDict()
        self._last_cycle_id = 0
        self._last_cycle_of: dict[str, int] = {}
        self._instance_id = str(uuid4())

    async def instance_id(self) -> str:
        return self._instance_id

    # ------------------------------------------------------------------------------------------------- leadership

    async def lead(self, candidate: Candidate) -> int | Standby:
        now = self._clock()
        lease = self._leases.get(candidate.lease)
        if lease is None:
            lease = self._leases[candidate.lease] = _Lease(candidate.holder, 1, now)
        elif lease.holder != candidate.holder:
            if lease.expires_at > now:
                return Standby((lease.expires_at - now).total_seconds(), now)
            lease.holder = candidate.holder
            lease.term += 1
        lease.expires_at = now + _interval(candidate.ttl_s)
        return lease.term

    def _leaderless_s(self) -> float:
        # Dispatchers have leases too, but judge nobody.
        expired = max((lease.expires_at for name, lease in self._leases.items() if _is_a_leaders(name)), default=None)
        return (self._clock() - expired).total_seconds() if expired is not None else float("inf")

    async def resign(self, candidate: Candidate) -> None:
        lease = self._leases.get(candidate.lease)
        if lease is not None and lease.holder == candidate.holder:
            lease.expires_at = self._clock()

    def _require_lease(self, candidate: Candidate, term: int) -> None:
        lease = self._leases.get(candidate.lease)
        is_held = lease is not None and (lease.holder, lease.term) == (candidate.holder, term)
        if lease is None or not is_held or lease.expires_at <= self._clock():
            raise LeaseLost(f"the lease {candidate.lease} of term {term} is no longer held by {candidate.holder}")

    # ---------------------------------------------------------------------------------------------------- observe

    async def observe(self, candidate: Candidate, fleet: str, config: FleetConfig) -> tuple[int, Snapshot] | Standby:
        led = await self.lead(candidate)
        if isinstance(led, Standby):
            return led
        row = self._fleet_row(fleet)
        row.provider, row.queues = config.provider, config.queues
        row.min_workers, row.max_workers = config.min_workers, config.max_workers
        now = self._clock()
        workers = sorted((w for w in self._workers.values() if w.fleet == fleet), key=_age_order)
        hired = [worker for worker in workers if worker.slot is not None]
        return led, Snapshot(
            now=now,
            fleet=fleet,
            queue=self._observe_queues(config.queues, now),
            workers=tuple(self._view(w) for w in workers if w.status is not WorkerStatus.TERMINATED),
            slots=_observe_slots(row, now - _interval(config.restart_window_s)),
            hirings=self._observe_hirings(hired, now - _interval(config.failure_window_s)),
            refusal=self._last_refusal(hired),
            last_failure=self._observe_last_failure(hired),
            storage=self._observe_storage(workers),
            suspects=self._observe_suspects(workers, config),
            orphaned=self._observe_orphaned(fleet, config.queues),
            is_paused=row.is_paused,
            boot_p50_s=_median(
                (w.activated_at - w.created_at).total_seconds() for w in hired[-MAX_BOOTS:] if w.activated_at
            ),
            requested=row.requested_workers,
            reset_at=row.reset_at,
            spending=self._observe_spending(fleet, now),
            ended_bills=self._observe_ended_bills(workers),
            is_settlement_due=bool(self._to_settle(fleet)),
            memory=row.memory,
        )

    def _fleet_row(self, name: str) -> _FleetRow:
        if name not in self._fleets:
            self._fleets[name] = _FleetRow(name, self._clock())
        return self._fleets[name]

    def _observe_queues(self, names: Sequence[str], now: datetime) -> QueueView:
        queues = [self._queues[name] for name in dict.fromkeys(names)]
        rows = [row for queue in queues for row in queue.unfinished.values()]
        running = [row for row in rows if row.status is TaskStatus.RUNNING]
        # Claimed by a dispatcher whose engine has no place for them yet: they wait still.
        held = [row for row in running if self._is_dispatcher(row.worker_id)]
        heads = [head.created_at for queue in queues if (head := queue.head()) is not None]
        heads += [row.created_at for row in held]
        newest = islice(reversed(self._finished[TaskStatus.COMPLETE].values()), MAX_LOOKED_AT)
        recent = islice((row for row in newest if row.queue in names), MAX_DURATIONS)
        return QueueView(
            queued=len(held)
            + sum(row.is_ready() or (row.run_after is not None and row.run_after <= now) for row in rows),
            running=len(running) - len(held),
            oldest_queued_age_s=(now - min(heads)).total_seconds() if heads else None,
            duration_p50_s=_median(
                (row.finished_at - row.started_at).total_seconds()
                for row in recent
                if row.finished_at and row.started_at
            ),
        )

    def _is_dispatcher(self, worker_id: str | None) -> bool:
        worker = self._workers.get(worker_id) if worker_id is not None else None
        return worker is not None and worker.kind is WorkerKind.DISPATCHER

    def _view(self, worker: _WorkerRow) -> WorkerView:
        hired = self._hired[worker.id]
        idle_s = worker.metadata.get("idle_s")
        return WorkerView(
            id=worker.id,
            slot=worker.slot,
            status=worker.status,
            is_paused=worker.is_paused,
            concurrency=worker.concurrency,
            created_at=worker.created_at,
            activated_at=worker.activated_at,
            last_heartbeat=worker.last_heartbeat,
            first_claimed_at=worker.first_claimed_at,
            terminating_at=hired.terminating_at,
            idle_s=float(idle_s) if idle_s is not None else None,
            machine_id=hired.machine_id,
            machine_at=hired.machine_at,
            creation=hired.creation,
            prepared_at=hired.prepared_at,
            vram_total_mb=worker.vram_total_mb,
            vram_used_mb=worker.vram_used_mb,
            vram_at=hired.vram_at,
            running=tuple(
                RunningView(row.id, row.started_at, row.timeout_s)
                for row in self._held_in_order(worker.id)
                if row.started_at is not None
            ),
            code=worker.code,
            reason=worker.reason,
            lease_s=worker.lease_s,
            bill=hired.bill,
            preparing_at=hired.preparing_at,
            prepare_code=hired.prepare_code,
            prepare_reason=hired.prepare_reason,
            host_key=hired.host_key,
            node=worker.node,
            failing_since=worker.failing_since,
            provider=hired.provider,
        )

    def _observe_spending(self, fleet: str, now: datetime) -> tuple[Spending, ...]:
        own = [(h, c, cost) for (f, h, c, _), cost in self._spending.items() if f == fleet and h >= month_of(now)]

        def since(begins: datetime, currency: str) -> int:
            return sum(cost.total_micros for hour, c, cost in own if c == currency and hour >= begins)

        return tuple(
            Spending(
                currency, since(hour_of(now), currency), since(day_of(now), currency), since(month_of(now), currency)
            )
            for currency in sorted({currency for _, currency, _ in own})
        )

    def _observe_ended_bills(self, workers: list[_WorkerRow]) -> tuple[Bill, ...]:
        ended = [self._hired[worker.id] for worker in workers if worker.status is WorkerStatus.TERMINATED]
        owing = (hired.bill for hired in ended if hired.settle_at is not None and hired.bill is not None)
        return tuple(islice(owing, MAX_ENDED_BILLS))

    def _observe_hirings(self, hired: list[_WorkerRow], since: datetime) -> tuple[Hiring, ...]:
        recent = []
        for worker in hired:
            failed_at = self._hired[worker.id].failed_at
            if worker.created_at > since or (failed_at is not None and failed_at > since):
                recent.append(Hiring(worker.created_at, failed_at is not None))
        return tuple(recent[-MAX_HIRINGS:])

    def _last_refusal(self, hired: list[_WorkerRow]) -> Refusal | None:
        recent = hired[-MAX_ANSWERS:]
        had_at = [at for worker in recent if (at := self._hired[worker.id].machine_at) is not None]
        # The newest first: of those refused at the same moment, the one hired last.
        refusals = [
            Refusal(worker.code, worker.reason or "", worker.terminated_at)
            for worker in reversed(recent)
            if self._hired[worker.id].creation == "refused" and worker.code in FLEET_REFUSALS and worker.terminated_at
        ]
        last = max(refusals, key=lambda refusal: refusal.at, default=None)
        return last if last is not None and not any(at > last.at for at in had_at) else None

    def _observe_last_failure(self, hired: list[_WorkerRow]) -> Failure | None:
        broken = [(at, w) for w in hired if (at := self._hired[w.id].failed_at) is not None]
        at, worker = max(broken, key=lambda pair: (pair[0], pair[1].id), default=(None, None))
        if at is None or worker is None:
            return None
        return Failure(worker.id, worker.code or "", worker.reason or "", at)

    def _observe_storage(self, workers: list[_WorkerRow]) -> StorageUse | None:
        told = [
            (worker.last_heartbeat, worker.id, worker.metadata.get("storage_used_bytes"))
            for worker in workers
            if worker.status in LIVE and worker.last_heartbeat is not None
        ]
        known = [(at, id_, used) for at, id_, used in told if isinstance(used, int) and not isinstance(used, bool)]
        newest = max(known, key=lambda each: each[:2], default=None)
        return None if newest is None else StorageUse(newest[1], newest[2], newest[0])

    def _observe_suspects(self, workers: list[_WorkerRow], config: FleetConfig) -> tuple[Suspect, ...]:
        failing = [
            (worker.failing_since, worker.id)
            for worker in workers
            if worker.failing_since is not None
            and worker.status in (WorkerStatus.SPAWNING, WorkerStatus.ACTIVE)
            and len(worker.failed_tasks) >= config.quarantine_min_failures
        ]
        if not failing:
            return ()
        completed = self._completed_lately(config.queues, min(since for since, _ in failing))
        doers = {row.worker_id for row in completed}
        events = islice(reversed(self._events), MAX_LOOKED_AT)
        failed = [e for e in events if e.code in ("TASK_ERROR", "TASK_FAILED") and e.worker_id in doers]
        return tuple(
            self._suspect(self._workers[id_], completed, failed[:MAX_EVENTS_WEIGHED])
            for _, id_ in sorted(failing)[:MAX_SUSPECTS]
        )

    def _completed_lately(self, queues: Sequence[str], since: datetime) -> list[_TaskRow]:
        """Newest first."""
        finished = islice(reversed(self._finished[TaskStatus.COMPLETE].values()), MAX_LOOKED_AT)
        recent = (row for row in finished if row.finished_at is not None and row.finished_at >= since)
        return list(islice((row for row in recent if row.queue in queues), MAX_TASKS_WEIGHED))

    def _suspect(self, worker: _WorkerRow, lately: list[_TaskRow], failed: list[Event]) -> Suspect:
        since = worker.failing_since
        assert since is not None  # noqa: S101
        completed = [
            row.worker_id
            for row in lately
            if row.finished_at is not None and row.finished_at >= since and row.worker_id != worker.id
        ]
        others = set(completed)
        rows = [row for id_ in sorted(worker.failed_tasks) if (row := self._tasks.get(id_)) is not None]
        return Suspect(
            worker_id=worker.id,
            since=since,
            failed=tuple(worker.failed_tasks),
            completed_by={
                row.id: row.worker_id
                for row in rows
                if row.status is TaskStatus.COMPLETE and row.worker_id is not None and row.worker_id != worker.id
            },
            failed_elsewhere=tuple(
                id_
                for id_ in sorted(worker.failed_tasks)
                if any(
                    event.code in ("TASK_ERROR", "TASK_FAILED") and event.worker_id in others
                    for event in self._events_of_task.get(id_, ())
                )
            ),
            others=len(others),
            others_completed=len(completed),
            others_failed=sum(event.at >= since and event.worker_id in others for event in failed),
        )

    def _observe_orphaned(self, fleet: str, queues: Sequence[str]) -> tuple[str, ...]:
        orphaned = []
        for worker_id, tasks in self._running.items():
            worker = self._workers.get(worker_id)
            if not tasks or (worker is not None and (worker.fleet != fleet or worker.status in LIVE)):
                continue
            if worker is not None or any(row.queue in queues for row in tasks.values()):
                orphaned.append(worker_id)
        return tuple(sorted(orphaned))

    # ----------------------------------------------------------------------------------------------------- commit

    async def commit_plan(
        self, candidate: Candidate, term: int, snapshot: Snapshot, plan: Plan, intents: Sequence[Intent]
    ) -> Committed:
        self._require_lease(candidate, term)
        fleet = self._fleets[snapshot.fleet]
        cycle_id = self._repeat_cycle(plan, fleet.name) or self._store_cycle(term, snapshot, plan)
        requeued = sum(self._carry_out(fleet.name, action, snapshot) for action in plan.actions)
        fleet.memory = plan.memory
        return Committed(cycle_id, self._intend(fleet, intents), requeued)

    def _repeat_cycle(self, plan: Plan, fleet: str) -> int | None:
        last = self._cycles.get(self._last_cycle_of.get(fleet, 0))
        if plan.actions or last is None or last.cycle.actions or last.cycle.decision != plan.decision:
            return None
        now, cycle = self._clock(), last.cycle
        if cycle.started_at <= now - REPEAT_LIMIT:
            return None
        self._amend(cycle.id, repeats=cycle.repeats + 1, repeated_at=now)
        return cycle.id

    def _store_cycle(self, term: int, snapshot: Snapshot, plan: Plan) -> int:
        self._last_cycle_id += 1
        is_over = not any(isinstance(action, Delete | DeleteStray | Spawn | GrowVolume) for action in plan.actions)
        cycle = Cycle(
            id=self._last_cycle_id,
            fleet=snapshot.fleet,
            term=term,
            started_at=snapshot.now,
            finished_at=self._clock() if is_over else None,
            decision=plan.decision,
            actions=plan.actions,
            summary=None,
            repeats=0,
            repeated_at=None,
        )
        self._cycles[cycle.id] = CycleInFull(cycle, snapshot)
        self._last_cycle_of[cycle.fleet] = cycle.id
        return cycle.id

    def _amend(self, cycle_id: int, **changes: Any) -> None:
        stored = self._cycles.get(cycle_id)
        if stored is not None:
            self._cycles[cycle_id] = replace(stored, cycle=replace(stored.cycle, **changes))

    def _carry_out(self, fleet: str, action: Action, snapshot: Snapshot) -> int:
        """What of an action needs no provider. Returns how many tasks it took from their workers."""
        match action:
            case Fail(worker_id, code, reason, evidence, acquittal):
                return self._fail_worker(worker_id, code, reason, counts=True, evidence=evidence, acquittal=acquittal)
            case Requeue(worker_id, reason):
                return self._requeue_tasks_of(worker_id, "WORKER_LOST", reason)
            case Promote():
                self._promote(fleet, action)
            case Drain():
                self._drain(fleet, action)
            case Adopt():
                self._adopt(fleet, action, snapshot)
            case Price():
                self._price(action, snapshot)
            case Prepare():
                self._prepare(fleet, action)
            case FailSlot(number, reason):
                slot = self._fleets[fleet].slots.get(number)
                if slot is not None:
                    slot.is_failed = True
                self._note("SLOT_FAILED", reason, fleet=fleet, detail={"slot": number})
            case Alert(code, reason, worker_id, about):
                detail = {"code": code} | ({"about": about} if about else {})
                self._note("ALERT", reason, fleet=fleet, worker_id=worker_id, detail=detail)
            case Delete() | DeleteStray() | Spawn() | GrowVolume():
                pass  # the provider's to do first
            case _:
                assert_never(action)
        return 0

    def _promote(self, fleet: str, action: Promote) -> None:
        worker = self._in(action.worker_id, WorkerStatus.SPAWNING)
        if worker is not None:
            self._move(worker, WorkerStatus.ACTIVE)
            worker.activated_at = self._clock()
            self._note("WORKER_ACTIVATED", action.reason, fleet=fleet, worker_id=worker.id)

    def _prepare(self, fleet: str, action: Prepare) -> None:
        worker, hired = self._in(action.worker_id, WorkerStatus.SPAWNING), self._hired[action.worker_id]
        if worker is not None and hired.preparing_at is None:
            hired.preparing_at = self._clock()
            self._note("MACHINE_PREPARING", action.reason, fleet=fleet, worker_id=worker.id)

    def _drain(self, fleet: str, action: Drain) -> None:
        worker = self._in(action.worker_id, WorkerStatus.SPAWNING, WorkerStatus.ACTIVE)
        if worker is not None:
            self._move(worker, WorkerStatus.TERMINATING)
            self._hired[worker.id].terminating_at = self._clock()
            worker.code, worker.reason = action.code, action.reason
            self._note("WORKER_TERMINATING", action.reason, fleet=fleet, worker_id=worker.id)

    def _adopt(self, fleet: str, action: Adopt, snapshot: Snapshot) -> None:
        worker, hired = self._workers.get(action.worker_id), self._hired[action.worker_id]
        if worker is not None and hired.machine_id is None:
            hired.machine_id, hired.machine_at, hired.creation = action.machine_id, self._clock(), "created"
            if action.is_prepared:
                hired.prepared_at = hired.prepared_at or self._clock()
            self._price(action, snapshot)
            self._note("MACHINE_ADOPTED", action.reason, fleet=fleet, worker_id=worker.id)

    def _price(self, action: Adopt | Price, snapshot: Snapshot) -> None:
        for machine in snapshot.machines or ():
            if machine.id == action.machine_id:
                self._open_bill(action.worker_id, machine, snapshot.traits.billing_unit_s)

    def _open_bill(self, worker_id: str, machine: Machine, unit_s: int) -> None:
        hired = self._hired[worker_id]
        if machine.price_micros_per_hour is None or hired.bill is not None or worker_id not in self._not_terminated:
            return
        tariff = Tariff(machine.price_micros_per_hour, machine.currency or "XXX", unit_s, machine.price_parts)
        hired.bill = Bill(tariff, machine.created_at or self._clock())
        hired.settle_at = hired.bill.since + FIRST_SETTLED_AFTER

    def _close_bill(self, worker_id: str, ended_at: datetime) -> None:
        hired = self._hired[worker_id]
        if hired.bill is not None:
            hired.bill = replace(hired.bill, until=max(ended_at, hired.bill.since))
            hired.settle_at = self._clock() + SETTLED_AFTER_END

    def _fail_worker(
        self,
        worker_id: str,
        code: str,
        reason: str,
        *,
        counts: bool,
        evidence: Suspect | None = None,
        acquittal: Acquittal | None = None,
    ) -> int:
        worker, now = self._in(worker_id, *LIVE), self._clock()
        if worker is None:
            return 0
        self._move(worker, WorkerStatus.ERROR)
        worker.code, worker.reason = code, reason
        self._hired[worker_id].failed_at = now if counts else None
        told = {} if evidence is None else {"evidence": _SUSPECT.dump_python(evidence, mode="json")}
        self._note("WORKER_ERROR", reason, fleet=worker.fleet, worker_id=worker_id, detail={"code": code, **told})
        if counts and worker.slot is not None:
            slot = self._fleets[worker.fleet].slots[worker.slot]
            slot.restarts = [*slot.restarts, now][-MAX_RESTARTS:]
        if acquittal is not None:
            self._acquit_tasks(worker_id, acquittal)
            held = self._held_in_order(worker_id)
            for row in held:
                self._release(row, worker_id, "its worker is to blame for failures")
            return len(held)
        return self._requeue_tasks_of(worker_id, code, f"worker {worker_id}: {reason}")

    def _acquit_tasks(self, worker_id: str, acquittal: Acquittal) -> None:
        events = (e for e in reversed(self._events_of_worker[worker_id]) if e.code in ("TASK_ERROR", "TASK_FAILED"))
        blamed = islice(takewhile(lambda event: event.at >= acquittal.since, events), MAX_ACQUITTED)
        for task_id, count in sorted(Counter(event.task_id for event in blamed if event.task_id is not None).items()):
            row = self._tasks.get(task_id)
            if row is None or row.status is TaskStatus.COMPLETE or row.error_code == "CANCELLED":
                continue
            if acquittal.is_trial and self._was_acquitted(task_id):
                continue
            row.attempts = max(row.attempts - count, 1 if row.status is TaskStatus.RUNNING else 0)
            has_left = row.status is TaskStatus.FAILED and row.attempts < row.max_attempts
            if has_left or (row.status is TaskStatus.ERROR and row.worker_id == worker_id):
                self._finished[TaskStatus.FAILED].pop(task_id, None)
                row.token = row.worker_id = row.started_at = row.finished_at = None
                self._make_ready(row)
                self._announce(row.queue)
            reason = f"{count} failed attempts on worker {worker_id} do not count: it is to blame"
            self._note("TASK_ACQUITTED", reason, worker_id=worker_id, task_id=task_id)

    def _was_acquitted(self, task_id: int) -> bool:
        """Since it was enqueued, or a person retried it."""
        events = takewhile(lambda event: event.code != "TASK_RETRIED", reversed(self._events_of_task[task_id]))
        return any(event.code == "TASK_ACQUITTED" for event in events)

    def _requeue_tasks_of(self, worker_id: str, code: str, reason: str) -> int:
        tasks = self._held_in_order(worker_id)
        for row in tasks:
            self._take_back(row, code, reason)
        return len(tasks)

    def _intend(self, fleet: _FleetRow, intents: Sequence[Intent]) -> frozenset[str]:
        own = [w for w in self._not_terminated.values() if w.fleet == fleet.name and w.slot is not None]
        taken = {worker.slot for worker in own}
        room = fleet.max_workers - len(own)
        for intent in intents:
            fleet.slots.setdefault(intent.slot, _SlotRow())
        granted = []
        for intent in intents:
            is_free = intent.slot not in taken and not fleet.slots[intent.slot].is_failed
            if room > 0 and is_free and intent.slot < fleet.max_workers and intent.worker_id not in self._workers:
                room -= 1
                taken.add(intent.slot)
                self._hire(fleet, intent)
                granted.append(intent.worker_id)
        fulfilled = sum(intent.is_requested and intent.worker_id in granted for intent in intents)
        fleet.requested_workers = max(0, min(fleet.requested_workers - fulfilled, self._room_for_requests(fleet)))
        return frozenset(granted)

    def _room_for_requests(self, fleet: _FleetRow) -> int:
        staying = (WorkerStatus.SPAWNING, WorkerStatus.ACTIVE)
        own = [w for w in self._not_terminated.values() if w.fleet == fleet.name and w.slot is not None]
        taken = {worker.slot for worker in own if worker.status in staying}
        taken |= {number for number, slot in fleet.slots.items() if slot.is_failed and number < fleet.max_workers}
        return fleet.max_workers - len(taken)

    def _hire(self, fleet: _FleetRow, intent: Intent) -> None:
        row = _WorkerRow(
            intent.worker_id, fleet.name, intent.slot, WorkerStatus.SPAWNING, created_at=self._clock(),
            queues=fleet.queues, lease_s=intent.lease_s, is_paused=fleet.is_paused,
        )  # fmt: skip
        self._workers[row.id] = self._not_terminated[row.id] = row
        self._hired[row.id].provider = fleet.provider
        self._note("WORKER_HIRED", intent.reason, fleet=fleet.name, worker_id=row.id, detail={"slot": intent.slot})

    async def commit_outcomes(
        self,
        candidate: Candidate,
        term: int,
        fleet: str,
        cycle_id: int,
        outcomes: Sequence[Outcome],
        intents: Sequence[Intent],
        summary: dict[str, Any] | None,
    ) -> frozenset[str]:
        for outcome in outcomes:
            self._write_down(fleet, outcome)
        changes = {} if summary is None else {"summary": dict(summary)}
        self._amend(cycle_id, finished_at=self._clock(), **changes)
        if not intents:
            return frozenset()
        self._require_lease(candidate, term)
        return self._intend(self._fleets[fleet], intents)

    def _write_down(self, fleet: str, outcome: Outcome) -> None:  # noqa: PLR0912 - one for each kind
        now = self._clock()
        match outcome:
            case Created(worker_id, machine, is_prepared, unit_s):
                hired = self._hired[worker_id]
                if worker_id in self._workers and hired.machine_id in (None, machine.id):
                    hired.machine_id, hired.creation = machine.id, "created"
                    hired.machine_at = hired.machine_at or now
                    if is_prepared:
                        hired.prepared_at = hired.prepared_at or now
                    self._open_bill(worker_id, machine, unit_s)
            case CreationUnclear(worker_id, reason):
                hired = self._hired[worker_id]
                if worker_id in self._workers and hired.creation is None:
                    hired.creation = "ambiguous"
                self._note("MACHINE_AMBIGUOUS", reason, fleet=fleet, worker_id=worker_id)
            case CreationRefused(worker_id, code, reason):
                worker, hired = self._not_terminated.get(worker_id), self._hired[worker_id]
                if worker is not None and hired.machine_id is None:
                    worker.code, worker.reason = code, reason
                    hired.creation, hired.failed_at = "refused", now if code == "Refused" else None
                    self._terminate(worker)
                    self._note("MACHINE_REFUSED", reason, fleet=fleet, worker_id=worker_id, detail={"code": code})
            case Deleted(worker_id, machine_id, code, reason, ended_at):
                worker = self._not_terminated.get(worker_id)
                if worker is not None and self._hired[worker_id].machine_id in (None, machine_id):
                    self._close_bill(worker_id, ended_at or now)
                    worker.code = worker.code if worker.code is not None else code
                    worker.reason = worker.reason if worker.reason is not None else reason
                    self._terminate(worker)
                    self._requeue_tasks_of(worker_id, code, reason)
                    self._note("WORKER_TERMINATED", reason, fleet=fleet, worker_id=worker_id)
            case NotDeleted(worker_id, reason):
                self._note("MACHINE_NOT_DELETED", reason, fleet=fleet, worker_id=worker_id)
            case StrayDeleted():
                self._write_down_stray(fleet, outcome)
            case Prepared() | PreparationFailed() | PreparationUnclear():
                self._write_down_preparation(fleet, outcome)
            case VolumeGrown(volume_id, size_gb, reason) | VolumeNotGrown(volume_id, size_gb, reason):
                code = "VOLUME_GROWN" if isinstance(outcome, VolumeGrown) else "VOLUME_NOT_GROWN"
                self._note(code, reason, fleet=fleet, detail={"volume_id": volume_id, "size_gb": size_gb})
            case _:
                assert_never(outcome)

    def _write_down_stray(self, fleet: str, outcome: StrayDeleted) -> None:
        machine, now = outcome.machine, self._clock()
        self._note("STRAY_DELETED", outcome.reason, fleet=fleet, worker_id=machine.name)
        worker_id = f"stray-{machine.id}"
        if machine.price_micros_per_hour is None or worker_id in self._workers:
            return
        row = _WorkerRow(
            worker_id, fleet, None, WorkerStatus.TERMINATING, created_at=machine.created_at or now, code="STRAY",
            reason=f"machine of {machine.name}: {outcome.reason}",
        )  # fmt: skip
        self._workers[worker_id] = self._not_terminated[worker_id] = row
        hired = self._hired[worker_id]
        hired.machine_id, hired.machine_at = machine.id, now
        self._open_bill(worker_id, machine, outcome.billing_unit_s)
        self._close_bill(worker_id, outcome.ended_at or now)
        hired.settle_at = now
        self._terminate(row)

    def _write_down_preparation(self, fleet: str, outcome: Prepared | PreparationFailed | PreparationUnclear) -> None:
        if isinstance(outcome, PreparationUnclear):
            self._note("PREPARATION_UNCLEAR", outcome.reason, fleet=fleet, worker_id=outcome.worker_id)
            return
        worker, hired = self._workers.get(outcome.worker_id), self._hired[outcome.worker_id]
        if worker is None or hired.machine_id != outcome.machine_id or hired.prepared_at is not None:
            return
        if isinstance(outcome, Prepared):
            hired.prepared_at = self._clock()
            self._note("MACHINE_PREPARED", "its program was started", fleet=fleet, worker_id=worker.id)
        elif worker.status is WorkerStatus.SPAWNING and hired.prepare_code is None and worker.last_heartbeat is None:
            hired.prepare_code, hired.prepare_reason = outcome.code, outcome.reason
            detail = {"code": outcome.code, "output": outcome.output}
            self._note("PREPARATION_FAILED", outcome.reason, fleet=fleet, worker_id=worker.id, detail=detail)
        else:
            return
        hired.host_key = hired.host_key or outcome.host_key

    # ------------------------------------------------------------------------------------------------- the ledger

    def _note_span(self, row: _TaskRow) -> None:
        worker_id, now = row.worker_id or "", self._clock()
        worker, hired = self._workers.get(worker_id), self._hired[worker_id]
        if worker is None or row.started_at is None or row.started_at >= now:
            return
        if hired.bill is not None or (worker.slot is not None and hired.machine_id is None):
            hired.spans.setdefault((row.started_at, row.id), Span(row.id, row.queue, row.started_at, now))

    def _to_settle(self, fleet: str) -> list[str]:
        now = self._clock()
        due = [
            (hired.settle_at, worker_id)
            for worker_id, hired in self._hired.items()
            if hired.settle_at is not None and hired.settle_at <= now and self._workers[worker_id].fleet == fleet
        ]
        return [worker_id for _, worker_id in sorted(due)]

    async def accounts_to_settle(self, fleet: str, limit: int) -> list[Account]:
        return [self._account(worker_id) for worker_id in self._to_settle(fleet)[:limit]]

    async def open_accounts(self, *, fleet: str | None = None, worker_id: str | None = None) -> list[Account]:
        workers = sorted(self._workers.values(), key=_age_order)
        return [
            self._account(worker.id)
            for worker in workers
            if self._hired[worker.id].settle_at is not None
            and fleet in (None, worker.fleet)
            and worker_id in (None, worker.id)
        ]

    def _account(self, worker_id: str) -> Account:
        worker, hired = self._workers[worker_id], self._hired[worker_id]
        assert hired.bill is not None  # noqa: S101
        ended = sorted(hired.spans.values(), key=_span_length, reverse=True)[:MAX_SPANS]
        running = [
            Span(row.id, row.queue, row.started_at, None) for row in self._held_in_order(worker_id) if row.started_at
        ]
        ready = [moment for moment in (worker.activated_at, worker.first_claimed_at) if moment is not None]
        return Account(
            worker_id,
            worker.fleet,
            hired.bill,
            min(ready, default=None),
            tuple(sorted([*ended, *running], key=lambda span: (span.from_at, span.task_id))),
        )

    async def settle(self, settlements: Sequence[Settlement]) -> int:
        return sum(self._settle(settlement) for settlement in settlements)

    def _settle(self, settlement: Settlement) -> bool:
        hired = self._hired.get(settlement.account.worker_id)
        if hired is None or hired.bill is None or hired.settle_at is None or hired.bill != settlement.account.bill:
            return False
        hired.bill = replace(hired.bill, settled_until=settlement.settled_until)
        hired.settle_at = settlement.settle_at
        self._charges += settlement.charges
        for charge in settlement.charges:
            hour = charge.fleet, hour_of(charge.from_at), charge.currency, charge.queue or ""
            self._spending[hour] = _with(self._spending.get(hour, Cost(None, charge.currency)), charge)
        hired.spans = {
            key: span
            for key, span in hired.spans.items()
            if hired.settle_at is not None and span.until_at is not None and span.until_at > settlement.settled_until
        }
        return True

    def _is_owing(self, worker: _WorkerRow) -> bool:
        return self._hired[worker.id].settle_at is not None

    async def costs(self, by: str, since: datetime, *, fleet: str | None = None, limit: int = 1000) -> list[Cost]:
        if by in ("day", "fleet", "queue"):
            found: list[tuple[str | None, Cost]] = [
                ({"day": f"{hour:%Y-%m-%d}", "queue": queue or None}.get(by, name), cost)
                for (name, hour, _, queue), cost in self._spending.items()
                if hour >= since and fleet in (None, name)
            ]
        else:
            found = [
                (_cost_key(charge, by), _with(Cost(None, charge.currency), charge))
                for charge in self._charges
                if charge.from_at >= since and fleet in (None, charge.fleet)
            ]
        sums: dict[tuple[str | None, str], Cost] = {}
        for key, cost in found:
            before = sums.get((key, cost.currency), Cost(key, cost.currency))
            sums[key, cost.currency] = _sum(before, cost)
        ordered = sorted(sums.values(), key=lambda cost: (cost.key is None, cost.key or "", cost.currency))
        ordered.sort(key=lambda cost: -cost.total_micros)
        if by == "day":
            ordered.sort(key=lambda cost: cost.key or "", reverse=True)
        return ordered[:limit]

    async def charges_of_task(self, task_id: int) -> list[Charge]:
        own = [charge for charge in self._charges if charge.task_id == task_id]
        return sorted(own, key=lambda charge: (charge.from_at, charge.worker_id))

    # ---------------------------------------------------------------------------------------------------- by hand

    async def restart_slots(self, fleet: str, slot: int | None = None) -> int:
        row = self._known_fleet("restarting slots", fleet)
        slots = row.slots
        if slot is not None and slot not in slots and not 0 <= slot < row.max_workers:
            last = row.max_workers - 1
            raise BadInput(f"restarting slots: there is no slot {slot} in fleet {fleet}: its slots are 0 to {last}")
        chosen = [number for number in slots if slot in (None, number)]
        failed = sum(slots[number].is_failed for number in chosen)
        for number in chosen:
            slots[number] = _SlotRow()
        self._fleets[fleet].reset_at = self._clock()
        self._note("SLOTS_RESTARTED", "restart counts cleared by hand", fleet=fleet, detail={"slot": slot})
        return failed

    async def request_workers(self, fleet: str, count: int) -> int:
        row = self._known_fleet("asking for workers", fleet)
        row.requested_workers = max(0, min(row.requested_workers + count, self._room_for_requests(row)))
        self._note("WORKERS_REQUESTED", "by hand", fleet=fleet, detail={"count": count})
        return row.requested_workers

    async def pause_fleet(self, fleet: str, is_paused: bool) -> int:
        self._known_fleet("pausing or resuming a fleet", fleet).is_paused = is_paused
        rows = [w for w in self._workers.values() if w.fleet == fleet and w.status in LIVE and w.is_paused != is_paused]
        for row in rows:
            row.is_paused = is_paused
        self._note("FLEET_PAUSED" if is_paused else "FLEET_RESUMED", "by hand", fleet=fleet)
        return len(rows)

    async def end_worker(self, worker_id: str, reason: str) -> bool:
        worker = self._in(worker_id, *LIVE)
        if worker is None:
            return False
        self._fail_worker(worker_id, "MANUAL", reason, counts=False)
        if worker.slot is None:
            self._terminate(worker)
        return True

    async def fleets(self) -> list[Fleet]:
        return [
            Fleet(
                name=name,
                provider=row.provider,
                queues=row.queues,
                min_workers=row.min_workers,
                max_workers=row.max_workers,
                is_paused=row.is_paused,
                requested_workers=row.requested_workers,
                hold=row.memory.hold,
                failed_slots=tuple(number for number, slot in sorted(row.slots.items()) if slot.is_failed),
                created_at=row.created_at,
                planned_at=row.memory.planned_at,
                next_plan_in_s=row.memory.next_plan_in_s,
                is_led=any(
                    lease.expires_at > self._clock() for name, lease in self._leases.items() if _is_a_leaders(name)
                ),
            )
            for name, row in sorted(self._fleets.items())
        ]

    async def cycles(self, fleet: str, limit: int = 20) -> list[Cycle]:
        own = (stored.cycle for stored in reversed(self._cycles.values()) if stored.cycle.fleet == fleet)
        return list(islice(own, limit))

    async def cycle(self, cycle_id: int) -> CycleInFull | None:
        return self._cycles.get(cycle_id)

    async def last_cycle_with(self, fleet: str, worker_id: str) -> CycleInFull | None:
        worker = self._workers.get(worker_id)
        if worker is None or worker.fleet != fleet:
            return None
        until = worker.terminated_at or self._clock()
        stories = (stored for stored in reversed(self._cycles.values()) if stored.cycle.fleet == fleet)
        recent = islice((stored for stored in stories if stored.cycle.started_at <= until), MAX_CYCLES_SEARCHED)
        return next((s for s in recent if any(view.id == worker_id for view in s.snapshot.workers)), None)

    async def tasks_at_hand(self) -> dict[str, list[int]]:
        return {worker_id: sorted(tasks) for worker_id, tasks in self._running.items() if tasks}

    async def waiting_queues(self, queues: Sequence[str]) -> set[str]:
        now = self._clock()
        return {name for name in queues if self._observe_queues([name], now).queued}

    async def ready_before(self, task_id: int) -> int:
        mine = self._tasks.get(task_id)
        if mine is None:
            return 0
        place = (-mine.priority, mine.id)
        rows = self._queues[mine.queue].unfinished.values()
        before = sum(row.is_ready() and (-row.priority, row.id) < place for row in rows)
        return min(before, MAX_AHEAD + 1)

    def _known_fleet(self, doing: str, name: str) -> _FleetRow:
        try:
            return self._fleets[name]
        except KeyError:
            raise BadInput(f"{doing}: there is no fleet {name}") from None

    # -------------------------------------------------------------------- what changes for workers and tidying up

    async def register(self, registration: Registration) -> WorkerStatus:
        is_new = registration.worker_id not in self._workers
        status = await super().register(registration)
        if is_new:
            self._workers[registration.worker_id].is_paused = self._fleet_row(registration.fleet).is_paused
        return status

    async def heartbeat(
        self, worker_id: str, claims: Sequence[HeldClaim] = (), vitals: Mapping[str, Any] | None = None
    ) -> Pulse:
        pulse = await super().heartbeat(worker_id, claims, vitals)
        if pulse.status in LIVE and "vram_total_mb" in (vitals or {}):
            self._hired[worker_id].vram_at = self._clock()
        return pulse

    async def leave(self, worker_id: str, reason: str) -> None:
        """One that was hired still has a machine: the control loop ends it."""
        worker = self._in(worker_id, *LIVE)
        if worker is None or worker.slot is None:
            await super().leave(worker_id, reason)
            return
        if worker.status is not WorkerStatus.TERMINATING:
            self._move(worker, WorkerStatus.TERMINATING)
        hired = self._hired[worker_id]
        hired.terminating_at = hired.terminating_at or self._clock()
        worker.code = worker.code if worker.code is not None else "LEFT"
        worker.reason = worker.reason if worker.reason is not None else reason
        self._note("WORKER_LEFT", reason, fleet=worker.fleet, worker_id=worker_id)
        for row in self._held_in_order(worker_id):
            self._release(row, worker_id, "its worker left")

    async def set_terminating(self, worker_ids: Sequence[str], reason: str) -> int:
        able = [w for w in self._named(worker_ids) if w.status in (WorkerStatus.SPAWNING, WorkerStatus.ACTIVE)]
        for worker in able:
            self._hired[worker.id].terminating_at = self._clock()
        return await super().set_terminating(worker_ids, reason)

    def hire(self, worker_id: str, fleet: str, slot: int) -> None:
        super().hire(worker_id, fleet, slot)
        self._fleet_row(fleet).slots.setdefault(slot, _SlotRow())

    async def sweep(self) -> int:
        deleted = self._forget_charges() + await super().sweep()
        before = self._clock() - _interval(self._retention.cycles_s)
        old = [id_ for id_, stored in self._cycles.items() if stored.cycle.started_at < before][:MAX_SWEPT_PER_KIND]
        for cycle_id in old:
            del self._cycles[cycle_id]
        for worker_id in self._hired.keys() - self._workers.keys():
            del self._hired[worker_id]
        return deleted + len(old)

    def _forget_charges(self) -> int:
        """Charges and their sums; and spans that nobody will settle."""
        kept, now = self._retention, self._clock()
        before, spans_before = now - _interval(kept.charges_s), now - _interval(max(kept.complete_s, kept.failed_s))
        old = sorted((c for c in self._charges if c.from_at < before), key=lambda c: c.from_at)[:MAX_SWEPT_PER_KIND]
        gone = set(map(id, old))
        self._charges = [charge for charge in self._charges if id(charge) not in gone]
        hours = sorted((hour for hour in self._spending if hour[1] < before), key=lambda hour: hour[1])
        for hour in hours[:MAX_SWEPT_PER_KIND]:
            del self._spending[hour]
        spans = [
            (span.until_at, key, hired.spans)
            for hired in self._hired.values()
            for key, span in hired.spans.items()
            if hired.settle_at is None and span.until_at is not None and span.until_at < spans_before
        ]
        for _, key, holder in sorted(spans, key=lambda found: found[0])[:MAX_SWEPT_PER_KIND]:
            del holder[key]
        return sum(min(len(kind), MAX_SWEPT_PER_KIND) for kind in (old, hours, spans))

    # ------------------------------------------------------------------------------------ the steps of a life

    def move(self, worker_id: str, status: WorkerStatus) -> None:
        """Set a worker's status as plain SQL would: nothing else changes, and only along its life."""
        worker = self._workers[worker_id]
        if status is WorkerStatus.TERMINATED and worker.status is not status:
            self._terminate(worker)
        elif worker.status is not status:
            self._move(worker, status)

    def _move(self, worker: _WorkerRow, status: WorkerStatus) -> None:
        if status not in LEGAL_MOVES[worker.status]:
            raise BadInput(f"worker {worker.id} cannot go from {worker.status} to {status}")
        worker.status = status

    def _terminate(self, worker: _WorkerRow) -> None:
        self._move(worker, WorkerStatus.TERMINATED)
        super()._terminate(worker)

    def _in(self, worker_id: str, *statuses: WorkerStatus) -> _WorkerRow | None:
        worker = self._workers.get(worker_id)
        return worker if worker is not None and worker.status in statuses else None


def _observe_slots(fleet: _FleetRow, since: datetime) -> tuple[SlotView, ...]:
    views = (
        SlotView(number, slot.is_failed, tuple(at for at in slot.restarts if at > since))
        for number, slot in sorted(fleet.slots.items())
    )
    return tuple(view for view in views if view.is_failed or view.restarts)


def _is_a_leaders(lease: str) -> bool:
    return not lease.startswith("ray:")


def _span_length(span: Span) -> timedelta:
    return (span.until_at or span.from_at) - span.from_at


def _with(cost: Cost, charge: Charge) -> Cost:
    name = f"{charge.kind}_micros"
    return replace(cost, **{name: getattr(cost, name) + charge.amount_micros})


def _sum(one: Cost, other: Cost) -> Cost:
    names = (f"{kind}_micros" for kind in ChargeKind)
    return replace(one, **{name: getattr(one, name) + getattr(other, name) for name in names})


def _cost_key(charge: Charge, by: str) -> str | None:
    keys: dict[str, object] = {"queue": charge.queue, "worker": charge.worker_id, "task": charge.task_id}
    return None if keys[by] is None else str(keys[by])


def _age_order(worker: _WorkerRow) -> tuple[datetime, str]:
    return worker.created_at, worker.id


def _median(values: Iterable[float]) -> float | None:
    """As percentile_cont(0.5): between two neighbours, the middle."""
    ordered = sorted(values)
    if not ordered:
        return None
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return low + 0.5 * (high - low)


if TYPE_CHECKING:
    # mypy compares every signature with the contracts'.
    _: type[ControlStore] = MemoryControlStore
    __: type[Operations] = MemoryControlStore
    ___: type[Costs] = MemoryControlStore
