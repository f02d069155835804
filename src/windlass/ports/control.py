"""The control loop's store: observe a fleet, commit a plan, record outcomes, settle bills.

The contract:
- `observe` acquires or renews the lease. A plan or intent of a holder whose lease is gone raises LeaseLost and changes
  nothing. Outcomes are facts about machines: they are recorded for any reporter, with or without a lease.
- The number of round trips does not depend on the number of workers, tasks or actions.
- An intent is granted only for a free slot within max_workers, so no slot is filled twice, by one leader or by two.
- A worker's status only moves forward: spawning, active, terminating, error, terminated.
- Each second of a worker's billed time is in the ledger once, however often it is settled.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from windlass.model.action import Plan
from windlass.model.cost import BillingAccount, Settlement
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate, Standby
from windlass.model.machine import Volume
from windlass.model.outcome import Committed, Intent, Outcome
from windlass.model.snapshot import Snapshot
from windlass.ports.lease import LeaseStore


class ControlStore(LeaseStore, Protocol):
    async def instance_id(self) -> str:
        """Identifies this database, whatever address it is reached by. Machines are tagged with it."""

    async def observe(self, candidate: Candidate, fleet: str, config: FleetConfig) -> tuple[int, Snapshot] | Standby:
        """Acquire or renew the lease and read the fleet's snapshot, in one round trip. Returns the term with it."""

    async def commit_plan(
        self, candidate: Candidate, term: int, snapshot: Snapshot, plan: Plan, intents: Sequence[Intent]
    ) -> Committed:
        """Apply the actions that need no provider, store the plan and grant intents. Raises LeaseLost."""

    async def record_outcomes(
        self, fleet: str, cycle_id: int, outcomes: Sequence[Outcome], summary: dict[str, Any] | None
    ) -> None:
        """Record outcomes. Needs no lease. `summary` None keeps the stored one: these outcomes came after it."""

    async def record_volume(self, fleet: str, volume: Volume) -> None:
        """Record the size and price of a fleet's volume, which must have a price. Needs no lease."""

    async def accounts_to_settle(self, fleet: str, limit: int) -> list[BillingAccount]:
        """Accounts that are due for settlement, longest due first."""

    async def settle(self, settlements: Sequence[Settlement]) -> int:
        """Write settlements to the ledger. Returns how many were written. Needs no lease.

        A settlement whose account changed since it was read is skipped.
        """

    async def settle_rows(self) -> int:
        """Settle rows of adopted tables that differ from their tasks. Returns how many were. Needs no lease.

        Triggers of the tables' owners run in it: it may fail, and takes a few seconds at most.
        """
