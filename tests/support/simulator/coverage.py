"""Counts which faults met which worker states, and which events, alerts and holds occurred, over one or many runs.

A fault of one worker counts for the state of that worker; any other fault counts for the state of every worker that
exists at that moment. A pair that no run has met is listed, so that a fault that never meets a state is not mistaken
for one that the product survives.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from support.memory_store.stores import MemoryStores
from support.memory_store.workers import MemoryWorker
from windlass.model.action import Plan, RaiseAlert
from windlass.model.alert import ADVICE
from windlass.model.worker import WorkerStatus
from windlass.runbooks import runbooks

STATES = ("spawning", "active idle", "active busy", "terminating idle", "terminating busy", "error")
# Faults that affect every worker, or the control of all of them.
WORLD_FAULTS = (
    "list_failed", "list_stale", "list_slow",
    "control_call_lost", "control_call_unanswered", "control_call_late", "control_call_slow",
    "orchestrator_killed", "orchestrator_dies_at_await", "outage", "failover", "clock_forward", "clock_back",
    "notification_lost", "reconfigured", "rolling_restart", "deployed", "bad_version", "machines_taken",
    "budget_reached", "action_failed", "address_kept", "bad_pod",
    "operator_pause", "operator_resume", "operator_spawn", "operator_restart", "operator_drain", "operator_terminate",
)  # fmt: skip
# Faults of one worker, and the states in which it can meet them.
_ANY = STATES
_SPAWNING = ("spawning",)
# A worker that runs, and sends heartbeats or results.
_LIVE = STATES[:5]
WORKER_FAULTS: dict[str, tuple[str, ...]] = {
    "create_ambiguous": _SPAWNING, "create_refused": _SPAWNING, "create_throttled": _SPAWNING, "create_slow": _SPAWNING,
    # The machine of a live worker is deleted at its drain deadline, or after it stopped.
    "delete_failed": ("terminating idle", "terminating busy", "error"),
    "delete_slow": ("terminating idle", "terminating busy", "error"),
    "worker_call_lost": _LIVE, "worker_call_unanswered": _LIVE, "worker_call_late": _LIVE, "worker_call_slow": _LIVE,
    "worker_boots_slowly": _SPAWNING, "worker_has_no_gpu": _SPAWNING,
    "worker_never_joins": _SPAWNING, "worker_ignores_drain": _SPAWNING, "worker_fails_tasks": _SPAWNING,
    "worker_crashes": _LIVE, "worker_vanishes": _ANY, "worker_freezes": _LIVE, "worker_dies_at_await": _LIVE,
    "task_fails": ("active busy", "terminating busy"),
}  # fmt: skip
_SOURCE = Path(__file__).parents[3] / "src" / "windlass"
_CODE = re.compile(r"[\"']([A-Z]{4,}(?:_[A-Z]+)*)[\"']")
_SQL_COMMENT = re.compile(r"--.*")
# What no world has: people's sessions, adopted tables, Ray nodes, volumes, dead letters, provider accounts that change.
OUT_OF_REACH = frozenset(
    {
        "LINK_CREATED", "SESSION_ENDED", "SESSION_OPENED", "SESSION_REVOKED", "TASKS_PURGED", "TOKEN_CREATED",
        "TOKEN_REVOKED", "WORKER_JOINED", "WORKER_PAUSED", "WORKER_RESUMED", "TASK_CANCELLED",
        "TASK_RETRIED", "TASK_RELEASED", "ROW_REJECTED", "ENGINE_SILENT",
        "STORAGE_IMPLAUSIBLE", "STORAGE_FULL", "STORAGE_NOT_GROWN", "STORAGE_UNKNOWN", "DEAD_LETTERS", "KEY_CHANGED",
        "OTHER_ACCOUNT", "OTHER_PROVIDER", "CHOICE_REFUSED",
        # Alerts that AlertManager raises, which these worlds do not run.
        "NO_LEADER", "UNATTENDED", "PROVIDER_ERRORS",
    }
)  # fmt: skip


def known_pairs() -> list[tuple[str, str]]:
    pairs = [(state, fault) for fault in WORLD_FAULTS for state in STATES]
    return pairs + [(state, fault) for fault, states in WORKER_FAULTS.items() for state in states]


@cache
def known_event_codes() -> tuple[str, ...]:
    """Codes of events: those in statements of the schema that record one, and those of the planner's events.

    A code with a runbook outside of the section of events is that of an error or an alert, which the event carries.
    """
    found = {"ALERT"}
    for path in (_SOURCE / "store" / "schema").glob("*.sql"):
        for statement in _SQL_COMMENT.sub("", path.read_text()).split(";"):
            if "add_event(" in statement or "insert into windlass.events" in statement:
                found.update(_CODE.findall(statement))
    for path in (_SOURCE / "policy").rglob("*.py"):
        if "RecordEvent(" in path.read_text():
            found.update(code for code in _CODE.findall(path.read_text()) if code.startswith("DEPLOY_"))
    others = (
        code
        for code, rows in runbooks().items()
        if code in ADVICE or not (code.startswith("DEPLOY_") or any(row.section == "Events" for row in rows))
    )
    return tuple(sorted(found - {*others, "MANUAL"}))


def known_alert_codes() -> tuple[str, ...]:
    """Codes of alerts and of holds, which are alerts too."""
    return tuple(sorted(ADVICE))


@dataclass(slots=True)
class Coverage:
    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    alerts: Counter[str] = field(default_factory=Counter)
    holds: Counter[str] = field(default_factory=Counter)

    def count_fault(self, kind: str, worker_id: str | None, store: Any) -> None:
        if not isinstance(store, MemoryStores):
            return
        tables = store.tables
        row = tables.workers.get(worker_id) if worker_id is not None else None
        rows: Iterable[MemoryWorker] = (
            tables.workers.not_terminated.values() if worker_id is None else [row] if row else []
        )
        self.pairs.update({(_state_of(each, bool(tables.tasks.running.get(each.id))), kind) for each in rows})

    def count_events(self, store: Any) -> None:
        if isinstance(store, MemoryStores):
            self.events.update(event.code for event in store.tables.event_log.events)

    def count_plan(self, plan: Plan) -> None:
        """Count the alerts and the hold of a committed plan."""
        self.alerts.update(action.code for action in plan.actions if isinstance(action, RaiseAlert))
        if plan.hold is not None:
            self.holds[plan.hold.code] += 1

    def add(self, other: "Coverage") -> None:
        self.pairs += other.pairs
        self.events += other.events
        self.alerts += other.alerts
        self.holds += other.holds

    def uncovered_pairs(self) -> list[tuple[str, str]]:
        return [pair for pair in known_pairs() if pair not in self.pairs]

    def uncovered_events(self) -> list[str]:
        return [code for code in known_event_codes() if code not in self.events]

    def uncovered_alerts(self) -> list[str]:
        return [code for code in known_alert_codes() if code not in self.alerts and code not in self.holds]

    def report(self) -> str:
        pairs, missing_pairs = known_pairs(), self.uncovered_pairs()
        lines = [f"{'fault':<28}" + "".join(f"{state:>18}" for state in STATES)]
        known = set(pairs)
        for fault in (*WORLD_FAULTS, *WORKER_FAULTS):
            cells = [str(self.pairs[state, fault]) if (state, fault) in known else "-" for state in STATES]
            lines.append(f"{fault:<28}" + "".join(f"{cell:>18}" for cell in cells))
        lines.append(f"worker state x fault: {len(pairs) - len(missing_pairs)} of {len(pairs)} pairs covered")
        lines += [f"  not covered: {state} x {fault}" for state, fault in missing_pairs]
        for what, codes, missing_codes in (
            ("event codes", known_event_codes(), self.uncovered_events()),
            ("alert and hold codes", known_alert_codes(), self.uncovered_alerts()),
        ):
            lines.append(f"{what}: {len(codes) - len(missing_codes)} of {len(codes)} covered")
            lines += [
                f"  not covered: {code}{' (not part of these worlds)' if code in OUT_OF_REACH else ''}"
                for code in missing_codes
            ]
        lines.append("holds: " + ", ".join(f"{code} {count}" for code, count in self.holds.most_common()))
        return "\n".join(lines)


def _state_of(worker: MemoryWorker, is_busy: bool) -> str:
    if worker.status in (WorkerStatus.ACTIVE, WorkerStatus.TERMINATING):
        return f"{worker.status} {'busy' if is_busy else 'idle'}"
    return str(worker.status)
