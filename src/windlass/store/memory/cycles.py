"""Stored cycles: snapshot, actions and decision of each."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import islice
from typing import Any

from windlass.model.action import Delete, DeleteOrphan, GrowVolume, Plan, Spawn
from windlass.model.cycle import Cycle, CycleDetail
from windlass.model.snapshot import Snapshot
from windlass.store.memory.workers import MemoryWorker

MAX_CYCLES_SEARCHED = 5
# A cycle that repeats the last one is stored again after this time, so that `explain` has a recent snapshot.
REPEAT_LIMIT = timedelta(minutes=5)


class Cycles:
    def __init__(self) -> None:
        self.rows: OrderedDict[int, CycleDetail] = OrderedDict()
        self._last_id = 0
        self._last_of: dict[str, int] = {}

    def record(self, term: int, snapshot: Snapshot, plan: Plan, now: datetime) -> int:
        """Store a cycle, or count a repeat of the last one if it does nothing new. Returns the cycle's id."""
        repeated = self._repeated(snapshot.fleet, plan, now)
        if repeated is not None:
            self.amend(repeated.id, repeats=repeated.repeats + 1, repeated_at=now)
            return repeated.id
        self._last_id += 1
        is_finished = not any(isinstance(action, Delete | DeleteOrphan | Spawn | GrowVolume) for action in plan.actions)
        cycle = Cycle(
            id=self._last_id,
            fleet=snapshot.fleet,
            term=term,
            started_at=snapshot.now,
            finished_at=now if is_finished else None,
            decision=plan.decision,
            actions=plan.actions,
            summary=None,
            repeats=0,
            repeated_at=None,
        )
        self.rows[cycle.id] = CycleDetail(cycle, snapshot)
        self._last_of[cycle.fleet] = cycle.id
        return cycle.id

    def _repeated(self, fleet: str, plan: Plan, now: datetime) -> Cycle | None:
        last = self.rows.get(self._last_of.get(fleet, 0))
        if plan.actions or last is None or last.cycle.actions or last.cycle.decision != plan.decision:
            return None
        return last.cycle if last.cycle.started_at > now - REPEAT_LIMIT else None

    def amend(self, cycle_id: int, **changes: Any) -> None:
        stored = self.rows.get(cycle_id)
        if stored is not None:
            self.rows[cycle_id] = replace(stored, cycle=replace(stored.cycle, **changes))

    def of(self, fleet: str) -> Iterator[CycleDetail]:
        """Newest first."""
        return (stored for stored in reversed(self.rows.values()) if stored.cycle.fleet == fleet)

    def last_with(self, worker: MemoryWorker, now: datetime) -> CycleDetail | None:
        until = worker.terminated_at or now
        recent = islice((s for s in self.of(worker.fleet) if s.cycle.started_at <= until), MAX_CYCLES_SEARCHED)
        return next((s for s in recent if any(view.id == worker.id for view in s.snapshot.workers)), None)

    def forget(self, before: datetime, limit: int) -> int:
        old = [id_ for id_, stored in self.rows.items() if stored.cycle.started_at < before][:limit]
        for cycle_id in old:
            del self.rows[cycle_id]
        return len(old)
