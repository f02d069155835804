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
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from windlass.model.action import Plan
from windlass.model.cost import BillingAccount, Settlement
from windlass.model.cycle import Cycle, CycleDetail, Fleet
from windlass.model.errors import WindlassError
from windlass.model.fleet import FleetConfig
from windlass.model.machine import Machine
from windlass.model.snapshot import Snapshot

# Nobody needs to know more exactly how far a task is from its turn.
MAX_AHEAD = 10_000


class LeaseLost(WindlassError):
    """Somebody else leads now. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Who wants to lead, and for how long at a time."""

    holder: str
    ttl_s: float
    lease: str = "orchestrator"


@dataclass(frozen=True, slots=True)
class Standby:
    """Somebody else leads, until then at least unless they resign or are gone. `at`: when the database said so, by its
    clock; None where it could not be asked."""

    expires_in_s: float
    at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Intent:
    """A worker about to be hired. Its id names its machine and is the idempotency key of the creation."""

    worker_id: str
    slot: int
    reason: str
    lease_s: float
    # Hired because a person asked for it: when it is granted, that wish is fulfilled.
    is_requested: bool = False
    # Of a machine that will join over HTTP: the hash of its join token, and for how long that is good. The token itself
    # goes to the provider and nowhere else.
    join_token_hash: bytes | None = None
    join_ttl_s: float | None = None


@dataclass(frozen=True, slots=True)
class Committed:
    cycle_id: int
    granted: frozenset[str]
    requeued: int


@dataclass(frozen=True, slots=True)
class Created:
    worker_id: str
    machine: Machine
    # It starts the worker's program by itself: nothing is to be done between boot and heartbeat.
    is_prepared: bool = True
    # How its provider counts time.
    billing_unit_s: int = 1


@dataclass(frozen=True, slots=True)
class CreationUnclear:
    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class CreationRefused:
    worker_id: str
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Deleted:
    """The worker's machine is gone. `machine_id` None: it never had one. A worker that has another one is not over."""

    worker_id: str
    machine_id: str | None
    code: str
    reason: str
    # When its machine was gone: it is not paid for beyond. None: now.
    ended_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class NotDeleted:
    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class OrphanDeleted:
    """A machine that no worker had is gone. It was paid for all the same."""

    machine: Machine
    reason: str
    billing_unit_s: int = 1
    # As in Deleted.
    ended_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class HostKeySeen:
    """Who answers on the worker's machine. Whoever was seen first stays."""

    worker_id: str
    machine_id: str
    host_key: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """The worker's program was started on its machine."""

    worker_id: str
    machine_id: str
    host_key: str | None = None


@dataclass(frozen=True, slots=True)
class PreparationFailed:
    """The worker's machine cannot become one. `output`: the last that was said there."""

    worker_id: str
    machine_id: str
    code: str
    reason: str
    output: str = ""
    host_key: str | None = None


@dataclass(frozen=True, slots=True)
class PreparationUnclear:
    """It was not finished. It is begun again, and finds what has been done."""

    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class VolumeGrown:
    volume_id: str
    size_gb: int
    reason: str


@dataclass(frozen=True, slots=True)
class VolumeNotGrown:
    """`reason`: why, in the provider's words."""

    volume_id: str
    size_gb: int
    reason: str


Outcome = (
    Created
    | CreationUnclear
    | CreationRefused
    | Deleted
    | NotDeleted
    | OrphanDeleted
    | HostKeySeen
    | Prepared
    | PreparationFailed
    | PreparationUnclear
    | VolumeGrown
    | VolumeNotGrown
)


class ControlStore(Protocol):
    async def instance_id(self) -> str:
        """What tells this database from every other, whatever address it is reached by. Machines are tagged with it."""

    async def lead(self, candidate: Candidate) -> int | Standby:
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

    async def resign(self, candidate: Candidate) -> None:
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
