"""The fault decisions of one run: each fault that is about to be injected asks here first.

A decision has a key such as `red/create_ambiguous/3`: the source, the kind of fault, and its number among the decisions
of that source and kind. `only` limits a run to some keys, so that a run can be repeated with fewer faults; all random
draws are the same, with or without the fault. A batch of tasks is a decision too, so that a history can be shortened.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Decision:
    key: str
    at: float


@dataclass(slots=True)
class FaultDecisions:
    # None: every drawn fault is injected.
    only: Collection[str] | None = None
    # Called with the kind of each fault when it happens, and the worker that it affects. None: every worker.
    on_fault: Callable[[str, str | None], None] = lambda _kind, _worker: None
    taken: list[Decision] = field(default_factory=list)
    _counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def allow(self, source: str, kind: str, worker_id: str | None = None, *, happens_now: bool = True) -> bool:
        """Whether to inject a drawn fault. If not `happens_now`, the caller calls `happened` at its time."""
        number = self._counts[source, kind]
        self._counts[source, kind] += 1
        key = f"{source}/{kind}/{number}"
        if self.only is not None and key not in self.only:
            return False
        self.taken.append(Decision(key, asyncio.get_running_loop().time()))
        if happens_now:
            self.on_fault(kind, worker_id)
        return True

    def happened(self, kind: str, worker_id: str | None = None) -> None:
        """Count a fault that was decided earlier."""
        self.on_fault(kind, worker_id)
