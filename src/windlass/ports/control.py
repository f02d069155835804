"""What the control loop needs from the store: to lead, to see everything at once, to write down what was decided.

The contract:
- One holder of a lease at a time; `lead` and `observe` take or renew it. A decision of a holder whose lease is gone
  raises LeaseLost and changes nothing. Facts about machines are written down whoever reports them, also when the
  decisions that came with them are refused.
- The number of round trips does not depend on the number of workers, tasks or actions.
- `commit_plan` grants an intent only for a slot that is free and within the maximum, so no two leaders, and no leader
  twice, can fill a slot.
- A worker's status moves only along: spawning, active, terminating, error, terminated. Never back.
- What a worker's time was spent on is in the ledger once, however often, and by however many, it is settled.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from windlass.model.action import Plan
from windlass.model.cost import BillingAccount, Settlement
from windlass.model.cycle import Cycle, CycleDetail, Fleet
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate, Standby
from windlass.model.outcome import Committed, Intent, Outcome
from windlass.model.snapshot import Snapshot

# Nobody needs to know more exactly how far a task is from its turn.
MAX_AHEAD = 10_000


class ControlStore(Protocol):
    async def instance_id(self) -> str:
        """What tells this database from every other, whatever address it is reached by. Machines are tagged with it."""

    async def acquire_lease(self, candidate: Candidate) -> int | Standby:
        """Take or renew the lease and nothing else. The term, or for how long somebody else leads."""

    async def observe(self, candidate: Candidate, fleet: str, config: FleetConfig) -> tuple[int, Snapshot] | Standby:
        """Take or renew the lease; the term and what the store knows, in one round trip."""

    async def commit_plan(
        self, candidate: Candidate, term: int, snapshot: Snapshot, plan: Plan, intents: Sequence[Intent]
    ) -> Committed:
        """Do what needs no provider, and intend what does. Raises LeaseLost."""

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
        """Write down what providers did, then intend hirings into slots that became free: LeaseLost is for those.

        Without a summary the cycle keeps the one it has: these outcomes came after it.
        """

    async def release_lease(self, candidate: Candidate) -> None:
        """Give the lease up at once."""

    async def accounts_to_settle(self, fleet: str, limit: int) -> list[BillingAccount]:
        """Workers of which the ledger has something to close, longest due first."""

    async def settle(self, settlements: Sequence[Settlement]) -> int:
        """Write them into the ledger. One whose account has changed since it was read is left out. Returns how many
        were written. Needs no lease."""


class Operations(Protocol):
    """What a person does by hand, and reads. None of it needs the lease; the next cycle sees it.

    A fleet that no cycle has seen yet is unknown: BadInput.
    """

    async def restart_slots(self, fleet: str, slot: int | None = None) -> int:
        """A person has mended something: forget the restarts of a slot, or of all, so that they may be filled again,
        and what the fleet's guards hold against it. Said of all, it also gives up machines of another account that the
        fleet is held for. Returns how many slots were failed. BadInput for a slot that the fleet cannot have."""

    async def request_workers(self, fleet: str, count: int) -> int:
        """Ask for so many more; below 0 takes a wish back. Returns how many are now asked for and not yet hired.

        Never more than there is room for: slots that are not failed and have no worker that stays. What no slot can
        take when the next plan is carried out is forgotten.
        """

    async def pause_fleet(self, fleet: str, is_paused: bool) -> int:
        """Pause or resume its workers, those to come too. Returns how many changed. While paused, nobody is hired."""

    async def terminate_worker(self, worker_id: str, reason: str) -> bool:
        """End a worker at once, code MANUAL; its tasks go to others. Nobody's failure. False if it was over already."""

    async def fleets(self) -> list[Fleet]:
        """By name."""

    async def cycles(self, fleet: str, limit: int = 20) -> list[Cycle]:
        """Newest first."""

    async def cycle(self, cycle_id: int) -> CycleDetail | None: ...

    async def last_cycle_with(self, fleet: str, worker_id: str) -> CycleDetail | None:
        """The newest cycle of a fleet that saw this worker, among the last few until it ended."""

    async def running_tasks(self) -> dict[str, list[int]]:
        """Worker id to the tasks it is running."""

    async def queues_with_tasks(self, queues: Sequence[str]) -> set[str]:
        """Those of these in which a task waits, as an observation would count it. One cheap look."""

    async def ready_before(self, task_id: int) -> int:
        """How many ready tasks of its queue come before this one; MAX_AHEAD + 1 if there are more than that."""
