"""Shrinks a failing run: fewer fault decisions, fewer tasks, a shorter time with faults, and the same violation.

Delta debugging over the recorded decisions (decisions.py): a part of them is left out, the run is repeated, and the
part stays out if the same promise is still broken. The number of runs and the CPU time are limited; a shrunk run that
is not minimal is still a failing run.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from support.simulator.decisions import FaultDecisions
from support.simulator.invariants import InvariantViolation
from support.simulator.simulation import Simulation

MAX_RUNS = 300
# CPU time of this process, so that a busy machine shrinks as far as a quiet one.
MAX_CPU_S = 90.0
# After the last decision, a defect may need some time to break a promise.
TAIL_S = (1.0, 30.0, 120.0)


@dataclass(frozen=True, slots=True)
class Injection:
    """The part of a seed's faults that a run has. None: all of them, for the whole time."""

    only: tuple[str, ...] | None = None
    until_s: float | None = None


@dataclass(frozen=True, slots=True)
class FailedRun:
    problem: str
    trace: str
    injection: Injection
    # The decisions that were taken, with their times.
    keys: tuple[str, ...]
    last_decision_at: float

    @property
    def signature(self) -> str:
        """What stays the same when the same promise is broken in another history."""
        promise = re.match(r"(promise \d+|billing rule) broken", self.problem)
        return promise[0] if promise else re.sub(r"\d+", "N", self.problem)[:60]


def run_once(make: Callable[[Injection], Simulation], injection: Injection) -> FailedRun | None:
    """One run. None: every invariant held."""
    simulation = make(injection)
    simulation.decisions = FaultDecisions(None if injection.only is None else frozenset(injection.only))
    try:
        simulation.run()
    except InvariantViolation as violation:
        problem = simulation.violations[0] if simulation.violations else str(violation).splitlines()[0]
        taken = simulation.decisions.taken
        # Keys that no decision used have no effect.
        keys = tuple(dict.fromkeys(decision.key for decision in taken))
        used = injection if injection.only is None else Injection(keys, injection.until_s)
        last_at = max((decision.at for decision in taken), default=0.0)
        return FailedRun(problem, simulation.trace.text(limit=None), used, keys, last_at)
    return None


@dataclass(slots=True)
class Shrinker:
    make: Callable[[Injection], Simulation]
    max_runs: int = MAX_RUNS
    max_cpu_s: float = MAX_CPU_S
    runs: int = 0
    _started: float = field(default_factory=time.process_time)

    def shrink(self, failed: FailedRun) -> FailedRun:
        """The smallest failing run that was found. Its trace is that of a run with exactly its injection."""
        best = self._attempt(Injection(failed.keys, failed.injection.until_s), failed)
        if best is None:
            return failed
        best = self._shorten(best)
        best = self._leave_out(best)
        return self._shorten(best)

    def _attempt(self, injection: Injection, failed: FailedRun) -> FailedRun | None:
        """The run with this injection, if it breaks the same promise."""
        if self.runs >= self.max_runs or time.process_time() - self._started > self.max_cpu_s:
            return None
        self.runs += 1
        run = run_once(self.make, injection)
        return run if run is not None and run.signature == failed.signature else None

    def _shorten(self, best: FailedRun) -> FailedRun:
        for share in (0.25, 0.5, 1.0):
            for tail_s in TAIL_S:
                until_s = round(share * best.last_decision_at + tail_s, 1)
                if best.injection.until_s is None or until_s < best.injection.until_s:
                    shorter = self._attempt(Injection(best.keys, until_s), best)
                    if shorter is not None:
                        return shorter
        return best

    def _leave_out(self, best: FailedRun) -> FailedRun:
        parts = 2
        while best.keys:
            size = -(-len(best.keys) // parts)
            for start in range(0, len(best.keys), size):
                rest = best.keys[:start] + best.keys[start + size :]
                smaller = self._attempt(Injection(rest, best.injection.until_s), best)
                if smaller is not None and len(smaller.keys) < len(best.keys):
                    best, parts = smaller, max(2, parts - 1)
                    break
            else:
                if size == 1:
                    return best
                parts = min(len(best.keys), 2 * parts)
        return best
