"""What a plan can ask for. Each action prints as a sentence and carries its reason in words."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import TypeAdapter

from windlass.model.snapshot import FailureStreak, Hold, PlannerState


@dataclass(frozen=True, slots=True)
class Promote:
    """A spawning worker has been heard: it is active."""

    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class AttemptRefund:
    """What failed on a worker since then failed because of it: no task's attempt there counts as one, and what it has
    at hand is given back as if never taken."""

    since: datetime
    # Nobody has done better yet, and perhaps nobody can: a task is acquitted once in this way, and then stands for
    # itself.
    is_trial: bool = False


@dataclass(frozen=True, slots=True)
class Fail:
    """A worker is broken: status error, and its tasks go to others at once."""

    worker_id: str
    code: str
    reason: str
    # How tasks fared on it and on others, where that speaks against it.
    evidence: FailureStreak | None = None
    attempt_refund: AttemptRefund | None = None


@dataclass(frozen=True, slots=True)
class Requeue:
    """Tasks that run in the name of a worker that is no longer live go to others."""

    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Drain:
    """A worker takes no new tasks and ends when it has none, or when its fleet's `stop_timeout_s` is over."""

    worker_id: str
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Delete:
    """End a worker's machine; when the provider says that it is gone, the worker is terminated and its slot free."""

    worker_id: str
    machine_id: str | None
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Adopt:
    """A machine was found for a worker whose creation was never answered."""

    worker_id: str
    machine_id: str
    reason: str
    # It starts the worker's program by itself.
    is_prepared: bool = True


@dataclass(frozen=True, slots=True)
class RecordPrice:
    """What a worker's machine costs was not known when it was made, and is now: it has been charged for all along."""

    worker_id: str
    machine_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Prepare:
    """A machine runs: look it over, and start its worker's program. Harmless if somebody else has begun it."""

    worker_id: str
    machine_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class DeleteOrphan:
    """End a machine that carries our tags and belongs to no worker."""

    machine_id: str
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class GrowVolume:
    """Storage that a fleet's machines share gets larger. To a size, not by one: asked for twice, it grows once."""

    volume_id: str
    size_gb: int
    reason: str


@dataclass(frozen=True, slots=True)
class FailSlot:
    """A slot's restarts are used up: nothing is put into it until `windlass restart`."""

    slot: int
    reason: str


@dataclass(frozen=True, slots=True)
class Spawn:
    """Hire a worker into a free slot."""

    slot: int
    reason: str


@dataclass(frozen=True, slots=True)
class RaiseAlert:
    """Tell a person: when a cause appears, and every hour while it lasts."""

    code: str
    reason: str
    worker_id: str | None = None
    # What it is about, where that is no worker: a slot, an hour. Empty: the fleet.
    about: str = ""


Action = (
    Promote
    | Fail
    | Requeue
    | Drain
    | Delete
    | Adopt
    | RecordPrice
    | Prepare
    | GrowVolume
    | DeleteOrphan
    | FailSlot
    | Spawn
    | RaiseAlert
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
    Prepare: "prepare",
    GrowVolume: "grow_volume",
    DeleteOrphan: "delete_orphan",
    FailSlot: "fail_slot",
    Spawn: "spawn",
    RaiseAlert: "alert",
}
_ADAPTERS: dict[str, TypeAdapter[Action]] = {kind: TypeAdapter(action) for action, kind in ACTION_KINDS.items()}


def actions_to_plain(actions: Sequence[Action]) -> list[dict[str, Any]]:
    """Actions as stored with their cycle and printed: each with its kind."""
    kinds = ((action, ACTION_KINDS[type(action)]) for action in actions)
    return [{"kind": kind, **_ADAPTERS[kind].dump_python(action, mode="json")} for action, kind in kinds]


def actions_from_plain(actions: Sequence[dict[str, Any]]) -> tuple[Action, ...]:
    return tuple(
        _ADAPTERS[action["kind"]].validate_python({name: value for name, value in action.items() if name != "kind"})
        for action in actions
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything a cycle should do, in order, and what the next one should remember."""

    actions: tuple[Action, ...]
    planner_state: PlannerState
    # The scaling decision in words: "hiring 3: 41 waiting, 5 workers". There is one even when nothing is done.
    decision: str
    # A cap, a hold, or machines still on their way out left a part of the decision to a later cycle.
    is_cut_short: bool = False

    @property
    def hold(self) -> Hold | None:
        return self.planner_state.hold
