"""What the control loop needs of the store, and what people do to fleets: the contract of PostgresControlStore.

migrations/0004_control.sql says what is right; every method here is the function of the same name there, and
tests/conformance/test_control_store.py runs the same histories over both. Planner state and snapshots are
kept as the values they are: nothing passes through JSON.
"""

from collections.abc import Sequence
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any

from windlass.model.action import Plan
from windlass.model.cost import BillingAccount, Charge, Cost, Settlement
from windlass.model.cycle import Cycle, CycleDetail, Fleet
from windlass.model.errors import BadInput
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate, Standby
from windlass.model.outcome import Committed, Intent, Outcome
from windlass.model.snapshot import Snapshot
from windlass.model.worker import LIVE, WorkerStatus
from windlass.ports.control import MAX_AHEAD
from windlass.store.memory.actions import carry_out
from windlass.store.memory.fleets import SlotRow
from windlass.store.memory.ledger import account, to_settle
from windlass.store.memory.observe import observe, queues_with_tasks
from windlass.store.memory.outcomes import write_down
from windlass.store.memory.store import MemoryStore

if TYPE_CHECKING:
    from windlass.ports.control import ControlStore, Operations
    from windlass.ports.costs import Costs


class MemoryControlStore(MemoryStore):
    async def instance_id(self) -> str:
        return self._tables.instance_id

    # -------------------------------------------------------------------------------------------- the control loop

    async def acquire_lease(self, candidate: Candidate) -> int | Standby:
        return self._tables.leases.acquire(candidate)

    async def release_lease(self, candidate: Candidate) -> None:
        self._tables.leases.release(candidate)

    async def observe(self, candidate: Candidate, fleet: str, config: FleetConfig) -> tuple[int, Snapshot] | Standby:
        led = await self.acquire_lease(candidate)
        if isinstance(led, Standby):
            return led
        row = self._tables.fleet(fleet)
        row.provider, row.queues = config.provider, config.queues
        row.min_workers, row.max_workers = config.min_workers, config.max_workers
        return led, observe(self._tables, row, config)

    async def commit_plan(
        self, candidate: Candidate, term: int, snapshot: Snapshot, plan: Plan, intents: Sequence[Intent]
    ) -> Committed:
        self._tables.leases.require(candidate, term)
        fleet = self._tables.fleets[snapshot.fleet]
        cycle_id = self._tables.cycles.record(term, snapshot, plan, self._clock())
        requeued = sum(carry_out(self._tables, action, snapshot) for action in plan.actions)
        fleet.planner_state = plan.planner_state
        return Committed(cycle_id, self._tables.intend(fleet, intents), requeued)

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
            write_down(self._tables, fleet, outcome)
        changes = {} if summary is None else {"summary": dict(summary)}
        self._tables.cycles.amend(cycle_id, finished_at=self._clock(), **changes)
        if not intents:
            return frozenset()
        self._tables.leases.require(candidate, term)
        return self._tables.intend(self._tables.fleets[fleet], intents)

    # ------------------------------------------------------------------------------------------------------- money

    async def accounts_to_settle(self, fleet: str, limit: int) -> list[BillingAccount]:
        due = to_settle(self._workers.rows.values(), fleet, self._clock())
        return [account(worker, self._tasks.run_by(worker.id)) for worker in due[:limit]]

    async def open_accounts(self, *, fleet: str | None = None, worker_id: str | None = None) -> list[BillingAccount]:
        workers = sorted(self._workers.rows.values(), key=lambda row: row.age_order)
        return [
            account(worker, self._tasks.run_by(worker.id))
            for worker in workers
            if worker.hired.settle_at is not None and fleet in (None, worker.fleet) and worker_id in (None, worker.id)
        ]

    async def settle(self, settlements: Sequence[Settlement]) -> int:
        return sum(self._tables.ledger.settle(self._workers.get(s.account.worker_id), s) for s in settlements)

    async def costs(self, by: str, since: datetime, *, fleet: str | None = None, limit: int = 1000) -> list[Cost]:
        return self._tables.ledger.costs(by, since, fleet, limit)

    async def charges_of_task(self, task_id: int) -> list[Charge]:
        own = [charge for charge in self._tables.ledger.charges if charge.task_id == task_id]
        return sorted(own, key=lambda charge: (charge.from_at, charge.worker_id))

    # ---------------------------------------------------------------------------------------------------- by hand

    async def restart_slots(self, fleet: str, slot: int | None = None) -> int:
        row = self._tables.known_fleet("restarting slots", fleet)
        slots = row.slots
        if slot is not None and slot not in slots and not 0 <= slot < row.max_workers:
            last = row.max_workers - 1
            raise BadInput(f"restarting slots: there is no slot {slot} in fleet {fleet}: its slots are 0 to {last}.")
        chosen = [number for number in slots if slot in (None, number)]
        failed = sum(slots[number].is_failed for number in chosen)
        for number in chosen:
            slots[number] = SlotRow()
        row.reset_at = self._clock()
        if slot is None:
            row.restarted_at = row.reset_at
        self._note("SLOTS_RESTARTED", "restart counts cleared by hand", fleet=fleet, detail={"slot": slot})
        return failed

    async def request_workers(self, fleet: str, count: int) -> int:
        row = self._tables.known_fleet("asking for workers", fleet)
        row.requested_workers = max(0, min(row.requested_workers + count, self._tables.room_for_requests(row)))
        self._note("WORKERS_REQUESTED", "by hand", fleet=fleet, detail={"count": count})
        return row.requested_workers

    async def pause_fleet(self, fleet: str, is_paused: bool) -> int:
        self._tables.known_fleet("pausing or resuming a fleet", fleet).is_paused = is_paused
        own = (worker for worker in self._workers.not_terminated.values() if worker.fleet == fleet)
        rows = [worker for worker in own if worker.status in LIVE and worker.is_paused != is_paused]
        for row in rows:
            row.is_paused = is_paused
        self._note("FLEET_PAUSED" if is_paused else "FLEET_RESUMED", "by hand", fleet=fleet)
        return len(rows)

    async def terminate_worker(self, worker_id: str, reason: str) -> bool:
        worker = self._workers.among(LIVE, worker_id)
        if worker is None:
            return False
        self._tables.fail_worker(worker_id, "MANUAL", reason, counts=False)
        if worker.slot is None:
            self._tables.terminate(worker)
        return True

    def move(self, worker_id: str, status: WorkerStatus) -> None:
        """Set a worker's status as plain SQL would: nothing else changes, and only along its life."""
        worker = self._workers.rows[worker_id]
        if status is WorkerStatus.TERMINATED and worker.status is not status:
            self._tables.terminate(worker)
        elif worker.status is not status:
            worker.move(status)

    # ---------------------------------------------------------------------------------------------------- looking

    async def fleets(self) -> list[Fleet]:
        is_led = self._tables.leases.leaderless_s() < 0
        return [row.as_fleet(is_led=is_led) for _, row in sorted(self._tables.fleets.items())]

    async def cycles(self, fleet: str, limit: int = 20) -> list[Cycle]:
        return [stored.cycle for stored in islice(self._tables.cycles.of(fleet), limit)]

    async def cycle(self, cycle_id: int) -> CycleDetail | None:
        return self._tables.cycles.rows.get(cycle_id)

    async def last_cycle_with(self, fleet: str, worker_id: str) -> CycleDetail | None:
        worker = self._workers.get(worker_id)
        if worker is None or worker.fleet != fleet:
            return None
        return self._tables.cycles.last_with(worker, self._clock())

    async def running_tasks(self) -> dict[str, list[int]]:
        return {worker_id: sorted(tasks) for worker_id, tasks in self._tasks.running.items() if tasks}

    async def queues_with_tasks(self, queues: Sequence[str]) -> set[str]:
        return queues_with_tasks(self._tables, queues)

    async def ready_before(self, task_id: int) -> int:
        mine = self._tasks.rows.get(task_id)
        if mine is None:
            return 0
        place = (-mine.priority, mine.id)
        rows = self._tasks.queues[mine.queue].unfinished.values()
        before = sum(row.is_ready() and (-row.priority, row.id) < place for row in rows)
        return min(before, MAX_AHEAD + 1)


if TYPE_CHECKING:
    # mypy compares every signature with the contracts'.
    _: type[ControlStore] = MemoryControlStore
    __: type[Operations] = MemoryControlStore
    ___: type[Costs] = MemoryControlStore
