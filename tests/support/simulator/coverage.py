"""Counts which faults met which worker states, and which events were recorded, over one or many runs.

A fault of one worker counts for the state of that worker; any other fault counts for the state of every worker that
exists at that moment. A pair that no run has met is listed, so that a fault that never meets a state is not mistaken
for one that the product survives.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.memory_store.stores import MemoryStores
from support.memory_store.workers import MemoryWorker
from windlass.model.worker import WorkerStatus

STATES = ("spawning", "active idle", "active busy", "terminating idle", "terminating busy", "error")
# Faults that affect every worker, or the control of all of them.
WORLD_FAULTS = (
    "list_failed", "list_stale", "list_slow",
    "control_call_lost", "control_call_unanswered", "control_call_late", "control_call_slow",
    "orchestrator_killed", "orchestrator_dies_at_await", "outage", "failover", "clock_forward", "clock_back",
    "notification_lost", "reconfigured", "rolling_restart", "deployed", "machines_taken",
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
    "worker_never_joins": _SPAWNING, "worker_ignores_drain": _SPAWNING, "worker_fails_tasks": _SPAWNING,
    "worker_crashes": _LIVE, "worker_vanishes": _ANY, "worker_freezes": _LIVE, "worker_dies_at_await": _LIVE,
    "task_fails": ("active busy", "terminating busy"),
}  # fmt: skip
_SCHEMA = Path(__file__).parents[3] / "src" / "windlass" / "store" / "schema"
_ADD_EVENT = re.compile(r"add_event\(\s*(?:case[^']*?)?'([A-Z_]+)'")


def known_pairs() -> list[tuple[str, str]]:
    pairs = [(state, fault) for fault in WORLD_FAULTS for state in STATES]
    return pairs + [(state, fault) for fault, states in WORKER_FAULTS.items() for state in states]


def known_event_codes() -> list[str]:
    """Codes that the schema's functions record by name."""
    return sorted({code for path in _SCHEMA.glob("*.sql") for code in _ADD_EVENT.findall(path.read_text())})


@dataclass(slots=True)
class Coverage:
    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)

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

    def add(self, other: "Coverage") -> None:
        self.pairs += other.pairs
        self.events += other.events

    def uncovered_pairs(self) -> list[tuple[str, str]]:
        return [pair for pair in known_pairs() if pair not in self.pairs]

    def uncovered_events(self) -> list[str]:
        return [code for code in known_event_codes() if code not in self.events]

    def report(self) -> str:
        pairs, missing_pairs = known_pairs(), self.uncovered_pairs()
        codes, missing_codes = known_event_codes(), self.uncovered_events()
        lines = [f"{'fault':<28}" + "".join(f"{state:>18}" for state in STATES)]
        known = set(pairs)
        for fault in (*WORLD_FAULTS, *WORKER_FAULTS):
            cells = [str(self.pairs[state, fault]) if (state, fault) in known else "-" for state in STATES]
            lines.append(f"{fault:<28}" + "".join(f"{cell:>18}" for cell in cells))
        lines.append(f"worker state x fault: {len(pairs) - len(missing_pairs)} of {len(pairs)} pairs covered")
        lines += [f"  not covered: {state} x {fault}" for state, fault in missing_pairs]
        lines.append(f"event codes: {len(codes) - len(missing_codes)} of {len(codes)} covered")
        lines += [f"  not covered: {code}" for code in missing_codes]
        return "\n".join(lines)


def _state_of(worker: MemoryWorker, is_busy: bool) -> str:
    if worker.status in (WorkerStatus.ACTIVE, WorkerStatus.TERMINATING):
        return f"{worker.status} {'busy' if is_busy else 'idle'}"
    return str(worker.status)
