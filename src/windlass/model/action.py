"""Actions that a plan can request, each with its reason, and the plan itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import TypeAdapter

from windlass.model.snapshot import FailureStreak, Hold, PlannerState


@dataclass(frozen=True, slots=True)
class Promote:
    """A spawning worker sent a heartbeat and becomes active."""

    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class AttemptRefund:
    """Attempts on a worker since this moment do not count for their tasks: the worker was at fault. Its running tasks
    are released without an attempt."""

    since: datetime
    # No other worker has done better yet, so the tasks may be at fault: each gets such a refund once.
    is_trial: bool = False
    # A running task that was released this often as not at fault may be at fault: its attempt counts. None: no limit.
    max_releases: int | None = None


@dataclass(frozen=True, slots=True)
class Fail:
    """A worker failed: it gets status error, and its tasks are requeued at once."""

    worker_id: str
    code: str
    reason: str
    # How tasks did on it and on other workers, if that shows that it is at fault.
    evidence: FailureStreak | None = None
    attempt_refund: AttemptRefund | None = None
    # It had proven to work: its failure does not count for the fleet's failure rate.
    is_proven: bool = False


@dataclass(frozen=True, slots=True)
class Requeue:
    """Requeue running tasks of a worker that is no longer live."""

    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Drain:
    """A worker claims no more tasks and terminates when it has none left, or after the fleet's `stop_timeout_s`."""

    worker_id: str
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a worker's machine. When the provider confirms it, the worker is terminated and its slot is free."""

    worker_id: str
    machine_id: str | None
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Adopt:
    """A machine was found for a worker whose create call was never answered."""

    worker_id: str
    machine_id: str
    reason: str
    # The machine starts the worker's program by itself.
    is_prepared: bool = True


@dataclass(frozen=True, slots=True)
class RecordPrice:
    """The price of a worker's machine is known now. It was unknown at creation and applies since then."""

    worker_id: str
    machine_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class RecordMachine:
    """The provider reports a worker's machine as running, or at an address, for the first time."""

    worker_id: str
    machine_id: str
    reason: str
    is_running: bool
    address: str | None = None
    machine_host: str | None = None


@dataclass(frozen=True, slots=True)
class Prepare:
    """Check a running machine and start its worker's program. Idempotent."""

    worker_id: str
    machine_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class DeleteOrphan:
    """Delete a machine that has Windlass tags and no worker."""

    machine_id: str
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class GrowVolume:
    """Grow the fleet's shared volume to a size. Absolute, so that a repeated request grows it once."""

    volume_id: str
    size_gb: int
    reason: str


@dataclass(frozen=True, slots=True)
class FailSlot:
    """A slot exceeded its restarts. It stays empty until `windlass restart`."""

    slot: int
    reason: str


@dataclass(frozen=True, slots=True)
class Spawn:
    """Spawn a worker into a free slot.

    `cause`: queue_depth, min_workers, idle_buffer, requested or deploy. If the slot's last worker failed, the store
    makes it worker_replacement.
    """

    slot: int
    reason: str
    cause: str = "queue_depth"


@dataclass(frozen=True, slots=True)
class RaiseAlert:
    """Raise an alert when its condition begins to hold, and every hour while it does."""

    code: str
    reason: str
    worker_id: str | None = None
    # The subject if it is not a worker: a slot, a budget period. Empty: the fleet.
    about: str = ""


@dataclass(frozen=True, slots=True)
class RecordEvent:
    """Add an event about the fleet: a rollout began or ended."""

    code: str
    reason: str


Action = (
    Promote
    | Fail
    | Requeue
    | Drain
    | Delete
    | Adopt
    | RecordPrice
    | RecordMachine
    | Prepare
    | GrowVolume
    | DeleteOrphan
    | FailSlot
    | Spawn
    | RaiseAlert
    | RecordEvent
)
# The kind under which each action is stored in cycle rows and read by commit_plan. Independent of class names: a rename
# must not change stored data.
ACTION_KINDS: dict[type[Action], str] = {
    Promote: "promote",
    Fail: "fail",
    Requeue: "requeue",
    Drain: "drain",
    Delete: "delete",
    Adopt: "adopt",
    RecordPrice: "record_price",
    RecordMachine: "record_machine",
    Prepare: "prepare",
    GrowVolume: "grow_volume",
    DeleteOrphan: "delete_orphan",
    FailSlot: "fail_slot",
    Spawn: "spawn",
    RaiseAlert: "alert",
    RecordEvent: "event",
}
_ADAPTERS: dict[str, TypeAdapter[Action]] = {kind: TypeAdapter(action) for action, kind in ACTION_KINDS.items()}


def actions_to_plain(actions: Sequence[Action]) -> list[dict[str, Any]]:
    """Actions as stored with their cycle, each with its kind."""
    kinds = ((action, ACTION_KINDS[type(action)]) for action in actions)
    return [{"kind": kind, **_ADAPTERS[kind].dump_python(action, mode="json")} for action, kind in kinds]


def actions_from_plain(actions: Sequence[dict[str, Any]]) -> tuple[Action, ...]:
    return tuple(
        _ADAPTERS[action["kind"]].validate_python({name: value for name, value in action.items() if name != "kind"})
        for action in actions
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything a cycle should do, in order, and the planner state for the next one."""

    actions: tuple[Action, ...]
    planner_state: PlannerState
    # The scaling decision with its numbers: "spawn 3: 41 queued, 0 free slots, target 5". Never empty.
    decision: str
    # A cap, a hold or machines that are not deleted yet postponed a part of the decision to a later cycle.
    is_cut_short: bool = False

    @property
    def hold(self) -> Hold | None:
        return self.planner_state.hold
