"""What a cycle did, in the form that programs and people read."""

from dataclasses import dataclass
from typing import Any

from windlass.model.action import Fail, Plan, Promote
from windlass.model.snapshot import Snapshot
from windlass.model.worker import WorkerStatus
from windlass.ports.control import Created, Deleted, Outcome


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

    def to_plain(self) -> dict[str, Any]:
        return {
            "timestamp": self.timestamp,
            "fleet": self.fleet,
            "is_leader": self.is_leader,
            "cycle_id": self.cycle_id,
            "actions": self.actions or {},
            "status": self.status or {},
            "decision": self.decision,
            "hold": self.hold,
            "duration_s": round(self.duration_s, 3),
        }


def count_actions(plan: Plan, outcomes: list[Outcome], requeued: int) -> dict[str, int]:
    return {
        "workers_promoted": sum(isinstance(action, Promote) for action in plan.actions),
        "workers_failed": sum(isinstance(action, Fail) for action in plan.actions),
        "workers_spawned": sum(isinstance(outcome, Created) for outcome in outcomes),
        "workers_terminated": sum(isinstance(outcome, Deleted) for outcome in outcomes),
        "tasks_reset": requeued,
    }


def count_status(snapshot: Snapshot) -> dict[str, int]:
    """What the cycle saw, before it acted."""
    by_status = {
        status: sum(worker.status is status for worker in snapshot.workers)
        for status in (WorkerStatus.SPAWNING, WorkerStatus.ACTIVE, WorkerStatus.TERMINATING)
    }
    return {
        "queued_tasks": snapshot.queue.queued,
        "running_tasks": snapshot.queue.running,
        **{f"{status}_workers": count for status, count in by_status.items()},
        "total_workers": len(snapshot.workers),
    }
