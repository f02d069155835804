"""The control loop's store, in memory. Implements ports/control.py, ports/lease.py and ports/costs.py.

Each method does what the SQL function of the same name does. Snapshots and planner states are kept as values; nothing
passes through JSON.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from support.memory_store.actions import apply_action
from support.memory_store.clock import follow_clock, move_back_state
from support.memory_store.ledger import account, to_settle
from support.memory_store.observe import observe
from support.memory_store.outcomes import record_outcome
from support.memory_store.tables import TableStore
from windlass.model.action import Plan
from windlass.model.cost import BillingAccount, Charge, Cost, Settlement, VolumeCost
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate, Standby
from windlass.model.machine import Volume
from windlass.model.outcome import Committed, Intent, Outcome
from windlass.model.snapshot import Snapshot


class MemoryLeaseStore(TableStore):
    async def acquire_lease(self, candidate: Candidate) -> int | Standby:
        return self._tables.leases.acquire(candidate)

    async def release_lease(self, candidate: Candidate) -> None:
        self._tables.leases.release(candidate)


class MemoryControlStore(MemoryLeaseStore):
    async def instance_id(self) -> str:
        return self._tables.instance_id

    async def observe(self, candidate: Candidate, fleet: str, config: FleetConfig) -> tuple[int, Snapshot] | Standby:
        lease = await self.acquire_lease(candidate)
        if isinstance(lease, Standby):
            return lease
        follow_clock(self._tables)
        row = self._tables.fleet(fleet)
        row.provider, row.queues = config.provider, config.queues
        row.min_workers, row.max_workers = config.min_workers, config.max_workers
        return lease, observe(self._tables, row, config)

    async def commit_plan(
        self, candidate: Candidate, term: int, snapshot: Snapshot, plan: Plan, intents: Sequence[Intent]
    ) -> Committed:
        self._tables.leases.require(candidate, term)
        fleet = self._tables.fleets[snapshot.fleet]
        cycle_id = self._tables.cycles.record(term, snapshot, plan, self._clock())
        requeued = sum(apply_action(self._tables, action, snapshot) for action in plan.actions)
        fleet.planner_state = move_back_state(plan.planner_state, self._clock())
        return Committed(cycle_id, self._tables.reserve_slots(fleet, intents), requeued)

    async def record_outcomes(
        self, fleet: str, cycle_id: int, outcomes: Sequence[Outcome], summary: dict[str, Any] | None
    ) -> None:
        for outcome in outcomes:
            record_outcome(self._tables, fleet, outcome)
        changes = {} if summary is None else {"summary": dict(summary)}
        self._tables.cycles.amend(cycle_id, finished_at=self._clock(), **changes)

    async def record_volume(self, fleet: str, volume: Volume) -> None:
        assert volume.price_micros_per_hour is not None
        self._tables.ledger.record_volume(fleet, volume, self._clock())

    async def accounts_to_settle(self, fleet: str, limit: int) -> list[BillingAccount]:
        due = to_settle(self._workers.rows.values(), fleet, self._clock())
        return [account(worker, self._tasks.run_by(worker.id)) for worker in due[:limit]]

    async def settle(self, settlements: Sequence[Settlement]) -> int:
        return sum(self._tables.ledger.settle(self._workers.get(s.account.worker_id), s) for s in settlements)

    async def settle_rows(self) -> int:
        return 0  # it has no adopted tables


class MemoryCostStore(TableStore):
    async def costs(self, by: str, since: datetime, *, fleet: str | None = None, limit: int = 1000) -> list[Cost]:
        return self._tables.ledger.costs(by, since, fleet, limit)

    async def volume_costs(self, since: datetime, *, fleet: str | None = None) -> list[VolumeCost]:
        return self._tables.ledger.volume_costs(since, fleet)

    async def spread_costs(self, since: datetime, *, fleet: str | None = None, limit: int = 1000) -> list[Cost]:
        return self._tables.ledger.spread_costs(since, fleet, limit)

    async def charges_of_task(self, task_id: int) -> list[Charge]:
        own = [charge for charge in self._tables.ledger.charges if charge.task_id == task_id]
        return sorted(own, key=lambda charge: (charge.from_at, charge.worker_id))

    async def open_accounts(self, *, fleet: str | None = None, worker_id: str | None = None) -> list[BillingAccount]:
        workers = sorted(self._workers.rows.values(), key=lambda row: row.age_order)
        return [
            account(worker, self._tasks.run_by(worker.id))
            for worker in workers
            if worker.spawned.settle_at is not None and fleet in (None, worker.fleet) and worker_id in (None, worker.id)
        ]
