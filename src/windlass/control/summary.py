"""The summary of one cycle: what it observed, decided and did, for logs, metrics and the CLI."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from windlass.model.action import Delete, Drain, Fail, Plan, Promote, RaiseAlert
from windlass.model.cycle import ACTION_COUNTS, COUNTED_STATUSES, STATUS_COUNTS
from windlass.model.lease import described_holder
from windlass.model.machine import MachineState
from windlass.model.outcome import (
    Committed,
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
from windlass.model.worker import WorkerStatus


@dataclass(frozen=True, slots=True)
class Summary:
    """One cycle of one fleet. `is_leader` False: another orchestrator leads, and the cycle did nothing."""

    fleet: str
    is_leader: bool
    timestamp: str
    decision: str = ""
    hold: str | None = None
    cycle_id: int | None = None
    duration_s: float = 0.0
    # On standby: the remaining time of the leader's lease.
    standby_s: float | None = None
    # On standby: the leader, as in model/lease.py, and a dashboard on its host.
    leader: str | None = None
    leader_url: str | None = None
    actions: dict[str, int] | None = None
    status: dict[str, int] | None = None
    # Observed workers that the fleet spawned. A fleet does not wait for workers that a person started.
    managed_workers: int | None = None
    # Machines that cost money, with or without a worker: as listed, or as known from rows and earlier lists.
    billed_machines: int | None = None
    # Workers that failed, and creations that were refused: worker id, code, reason.
    failures: tuple[tuple[str, str, str], ...] = ()
    # Other changes of workers: worker id, change (active, draining, terminated), reason. An activation may occur twice.
    changes: tuple[tuple[str, str, str], ...] = ()
    # Machine choices of the fleet that the provider refused lately while it accepted others: choice, reason.
    refused_choices: tuple[tuple[str, str], ...] = ()
    # Alerts for a person: code, reason.
    alerts: tuple[tuple[str, str], ...] = ()
    # Provider calls: call, outcome (ok, refused, error), count.
    provider_calls: tuple[tuple[str, str, int], ...] = ()

    def to_plain(self) -> dict[str, Any]:
        """Every summary has every key. On standby the actions are 0 and the status, which was not read, is null."""
        return {
            "timestamp": self.timestamp,
            "fleet": self.fleet,
            "is_leader": self.is_leader,
            "cycle_id": self.cycle_id,
            "actions": self.actions or dict.fromkeys(ACTION_COUNTS, 0),
            "status": self.status or dict.fromkeys(STATUS_COUNTS),
            "decision": self.decision or self.standby_reason,
            "hold": self.hold,
            "failures": [{"worker_id": id_, "code": code, "reason": reason} for id_, code, reason in self.failures],
            "refused_choices": [{"choice": choice, "reason": reason} for choice, reason in self.refused_choices],
            "duration_s": round(self.duration_s, 3),
        }

    @property
    def standby_reason(self) -> str:
        dashboard = f" (dashboard: {self.leader_url})" if self.leader_url is not None else ""
        remaining = f" for {self.standby_s:.0f} s more" if self.standby_s is not None else ""
        return f"standby: {described_holder(self.leader)}{dashboard} leads{remaining}"


def summarize(
    snapshot: Snapshot,
    plan: Plan,
    outcomes: list[Outcome],
    committed: Committed,
    *,
    duration_s: float,
    refused_choices: tuple[tuple[str, str], ...],
) -> Summary:
    """The summary of a leader's cycle. Status and machines are counted as observed, before the actions."""
    failed = [(a.worker_id, a.code, a.reason) for a in plan.actions if isinstance(a, Fail)]
    refused = [(o.worker_id, o.code, o.reason) for o in outcomes if isinstance(o, CreationRefused)]
    changes = [(a.worker_id, "active", a.reason) for a in plan.actions if isinstance(a, Promote)]
    # A first claim activates a worker without a plan.
    planned_at, promoted = snapshot.planner_state.cadence.planned_at, {worker_id for worker_id, _, _ in changes}
    changes += [
        (worker.id, "active", "claimed its first task")
        for worker in snapshot.workers
        if worker.status is WorkerStatus.ACTIVE and worker.slot is not None and worker.id not in promoted
        if worker.activated_at is not None and (planned_at is None or worker.activated_at > planned_at)
    ]
    changes += [(a.worker_id, "draining", a.reason) for a in plan.actions if isinstance(a, Drain)]
    reasons = {action.worker_id: action.reason for action in plan.actions if isinstance(action, Delete)}
    changes += [(o.worker_id, "terminated", reasons.get(o.worker_id, "")) for o in outcomes if isinstance(o, Deleted)]
    by_status = {status: sum(worker.status is status for worker in snapshot.workers) for status in COUNTED_STATUSES}
    calls = Counter(call_of(outcome) for outcome in outcomes)
    calls["list", "ok" if snapshot.machines is not None else "error"] += 1
    managed_workers = sum(worker.slot is not None for worker in snapshot.workers)
    if snapshot.machines is not None:
        # An exited process is listed for a while and costs nothing; an exited pod does.
        is_billed = snapshot.traits.is_remote
        billed_machines = sum(is_billed or machine.state is not MachineState.EXITED for machine in snapshot.machines)
    else:
        # A worker whose machine may exist keeps its row, so without rows only orphaned machines can be left.
        billed_machines = managed_workers + len(plan.planner_state.orphans.orphan_since)
    return Summary(
        fleet=snapshot.fleet,
        is_leader=True,
        timestamp=snapshot.now.isoformat(),
        decision=plan.decision,
        hold=plan.hold.reason if plan.hold is not None else None,
        cycle_id=committed.cycle_id,
        duration_s=duration_s,
        actions=count_actions(plan, outcomes, committed.requeued),
        status={
            "queued_tasks": snapshot.queue.queued,
            "running_tasks": snapshot.queue.running,
            **{f"{status}_workers": count for status, count in by_status.items()},
            "total_workers": len(snapshot.workers),
        },
        managed_workers=managed_workers,
        billed_machines=billed_machines,
        failures=(*failed, *refused),
        changes=tuple(changes),
        refused_choices=refused_choices,
        alerts=tuple((action.code, action.reason) for action in plan.actions if isinstance(action, RaiseAlert)),
        provider_calls=tuple((call, outcome, count) for (call, outcome), count in sorted(calls.items())),
    )


def count_actions(plan: Plan, outcomes: list[Outcome], requeued: int) -> dict[str, int]:
    """Keys: model/cycle.py ACTION_COUNTS."""
    return {
        "workers_promoted": sum(isinstance(action, Promote) for action in plan.actions),
        "workers_failed": sum(isinstance(action, Fail) for action in plan.actions),
        "workers_spawned": sum(isinstance(outcome, Created) for outcome in outcomes),
        "workers_terminated": sum(isinstance(outcome, Deleted) for outcome in outcomes),
        "tasks_reset": requeued,
    }


def count_refused_creations(outcomes: list[Outcome]) -> dict[str, int]:
    """By error code."""
    return dict(Counter(outcome.code for outcome in outcomes if isinstance(outcome, CreationRefused)))


def call_of(outcome: Outcome) -> tuple[str, str]:
    """The provider call of an outcome, and its result: ok, refused or error."""
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
