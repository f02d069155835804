"""What a cycle did, in the form that programs and people read."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from windlass.model.action import Fail, Plan, Promote, RaiseAlert
from windlass.model.cycle import ACTION_COUNTS, COUNTED_STATUSES, STATUS_COUNTS
from windlass.model.machine import MachineState
from windlass.model.outcome import (
    Created,
    CreationRefused,
    CreationUnclear,
    Deleted,
    HostKeySeen,
    NotDeleted,
    OrphanDeleted,
    Outcome,
    PreparationFailed,
    PreparationUnclear,
    Prepared,
    VolumeGrown,
    VolumeNotGrown,
)
from windlass.model.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Summary:
    """One cycle of one fleet. `is_leader` False: another orchestrator leads, and nothing was done."""

    fleet: str
    is_leader: bool
    timestamp: str
    decision: str = ""
    hold: str | None = None
    cycle_id: int | None = None
    duration_s: float = 0.0
    # While another leads: for how long at least, unless it resigns.
    standby_s: float | None = None
    actions: dict[str, int] | None = None
    status: dict[str, int] | None = None
    # Of all workers it saw, those that were hired: one that a person started is not the fleet's to wait for.
    hired: int | None = None
    # Machines that it saw and that are paid for, whoever's they are. None: their list could not be had.
    machines: int | None = None
    # Who was found broken, or was refused, and why: worker id, code, reason.
    failures: tuple[tuple[str, str, str], ...] = ()
    # Which of the fleet's choices of machine were refused lately, while others could be had: choice, why.
    refused_choices: tuple[tuple[str, str], ...] = ()
    # What a person should know: code, reason.
    alerts: tuple[tuple[str, str], ...] = ()
    # What was asked of the provider, and how it went: call, outcome (ok, refused, error), how often.
    provider_calls: tuple[tuple[str, str, int], ...] = ()

    def to_plain(self) -> dict[str, Any]:
        """Every key in every summary. Of one that stands by: nothing was done, and what nobody looked at is null."""
        return {
            "timestamp": self.timestamp,
            "fleet": self.fleet,
            "is_leader": self.is_leader,
            "cycle_id": self.cycle_id,
            "actions": self.actions or dict.fromkeys(ACTION_COUNTS, 0),
            "status": self.status or dict.fromkeys(STATUS_COUNTS),
            "decision": self.decision or self._why_nothing(),
            "hold": self.hold,
            "failures": [{"worker_id": id_, "code": code, "reason": reason} for id_, code, reason in self.failures],
            "refused_choices": [{"choice": choice, "reason": words} for choice, words in self.refused_choices],
            "duration_s": round(self.duration_s, 3),
        }

    def _why_nothing(self) -> str:
        if self.standby_s is None:
            return "another orchestrator leads; nothing was done"
        return f"another orchestrator leads for {self.standby_s:.0f} s more; nothing was done"


def count_actions(plan: Plan, outcomes: list[Outcome], requeued: int) -> dict[str, int]:
    return {
        "workers_promoted": sum(isinstance(action, Promote) for action in plan.actions),
        "workers_failed": sum(isinstance(action, Fail) for action in plan.actions),
        "workers_spawned": sum(isinstance(outcome, Created) for outcome in outcomes),
        "workers_terminated": sum(isinstance(outcome, Deleted) for outcome in outcomes),
        "tasks_reset": requeued,
    }


def count_machines(snapshot: Snapshot) -> int | None:
    """A process that has ended is listed for a while and costs nothing; a pod that has does."""
    if snapshot.machines is None:
        return None
    is_paid = snapshot.traits.is_remote
    return sum(is_paid or machine.state is not MachineState.EXITED for machine in snapshot.machines)


def count_status(snapshot: Snapshot) -> dict[str, int]:
    """What the cycle saw, before it acted."""
    by_status = {status: sum(worker.status is status for worker in snapshot.workers) for status in COUNTED_STATUSES}
    return {
        "queued_tasks": snapshot.queue.queued,
        "running_tasks": snapshot.queue.running,
        **{f"{status}_workers": count for status, count in by_status.items()},
        "total_workers": len(snapshot.workers),
    }


def call_of(outcome: Outcome) -> tuple[str, str]:
    """What was asked of the provider, and how it went."""
    match outcome:
        case Created():
            return "create", "ok"
        case CreationRefused():
            return "create", "refused"
        case CreationUnclear():
            return "create", "error"
        case Deleted() | OrphanDeleted():
            return "delete", "ok"
        case NotDeleted():
            return "delete", "error"
        case HostKeySeen() | Prepared():
            return "prepare", "ok"
        case PreparationFailed():
            return "prepare", "refused"
        case PreparationUnclear():
            return "prepare", "error"
        case VolumeGrown():
            return "grow", "ok"
        case VolumeNotGrown():
            return "grow", "error"


def count_calls(is_listed: bool, outcomes: list[Outcome]) -> tuple[tuple[str, str, int], ...]:
    counts = Counter(call_of(outcome) for outcome in outcomes)
    counts["list", "ok" if is_listed else "error"] += 1
    return tuple((call, outcome, count) for (call, outcome), count in sorted(counts.items()))


def failures_of(plan: Plan, outcomes: list[Outcome]) -> tuple[tuple[str, str, str], ...]:
    broken = [(a.worker_id, a.code, a.reason) for a in plan.actions if isinstance(a, Fail)]
    refused = [(o.worker_id, o.code, o.reason) for o in outcomes if isinstance(o, CreationRefused)]
    return (*broken, *refused)


def alerts_of(plan: Plan) -> tuple[tuple[str, str], ...]:
    return tuple((action.code, action.reason) for action in plan.actions if isinstance(action, RaiseAlert))
