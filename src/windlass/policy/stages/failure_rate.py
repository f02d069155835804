"""The failure-rate guard: a bad image must cost a few launches, not a night of them.

It trips when, of at least `min_spawns_for_rate` workers hired in the window, more than `max_failure_rate` failed; or
when that many in a row broke before they had proven themselves, however long each took to break. Then nobody is hired
for one window. After that one worker at a time is hired as a probe: one that proves itself ends the alarm, one that
breaks trips the guard again for twice as long, up to GUARD_MAX_S.

`windlass restart` says that what was broken is mended: nothing that happened before it counts any more.

Proof is work: the first tasks behind it, or a minute at them, or a long time ready while nothing waited.
"""

from dataclasses import replace

from windlass.model.action import Action
from windlass.model.snapshot import FailureRateState
from windlass.policy.derive import WorkerState
from windlass.policy.planning_context import PlanningContext

# One probe an hour is what a broken fleet costs in the end.
GUARD_MAX_S = 3600.0
# Every window doubled this often is beyond the maximum.
_MAX_DOUBLINGS = 30
CODE = "FAILURE_RATE"
# Of a reason that is told with every alert and in every list.
MAX_CAUSE_CHARACTERS = 300


def guard_hiring(context: PlanningContext) -> list[Action]:
    """Judge what was hired lately, and hold if most of it broke."""
    failing = [context.states[id_] for id_ in sorted(context.failed_ids) if context.states[id_].is_managed]
    guard = _learn(context, _unless_reset(context), failing)
    context.remember(failure_rate=guard)
    if context.is_stopped:
        return []
    cause = _cause(context, failing)
    if guard.until is not None and context.now < guard.until:
        reason = f"workers keep breaking{cause}; nobody is hired until {guard.until:%H:%M:%S} UTC"
        context.hold(CODE, reason)
        return context.alert(CODE, reason)
    what = _verdict(context, guard, failing)
    if what is None:
        return []
    pause_s = min(context.fleet.failure_window_s * 2.0 ** min(guard.trips, _MAX_DOUBLINGS), GUARD_MAX_S)
    tripped = FailureRateState(trips=guard.trips + 1, until=context.in_s(pause_s), judged_until=context.now)
    context.remember(failure_rate=tripped)
    context.hold(CODE, f"{what}{cause}; nobody is hired until {tripped.until:%H:%M:%S} UTC")
    return context.alert(CODE, f"{what}{cause}: is the image, the handler or the configuration broken?")


def is_probe(state: WorkerState, guard: FailureRateState) -> bool:
    """Hired after the guard tripped, and not proven yet."""
    return _is_judged(state, guard) and not state.is_proven


def _cause(context: PlanningContext, failing: list[WorkerState]) -> str:
    """Of the last one that broke, in this plan or before: its code and reason, for whoever is to mend it."""
    last = context.snapshot.last_failure
    broken = [(last.code, last.reason)] if last is not None else []
    broken += [(state.code or "", state.reason or "") for state in failing]
    if not broken:
        return ""
    code, reason = broken[-1]
    return f", the last one with {code} ({reason.rstrip('.')[:MAX_CAUSE_CHARACTERS]})"


def _unless_reset(context: PlanningContext) -> FailureRateState:
    guard, reset_at = context.planner_state.failure_rate, context.snapshot.reset_at
    if reset_at is None or (guard.judged_until is not None and guard.judged_until >= reset_at):
        return guard
    return FailureRateState(judged_until=reset_at)


def _learn(context: PlanningContext, guard: FailureRateState, failing: list[WorkerState]) -> FailureRateState:
    """Count who broke unproven; forget it all when somebody has proven themselves since."""
    if any(_is_proof(context, state, guard) for state in context.states.values()):
        guard = FailureRateState(judged_until=context.now if guard.trips else guard.judged_until)
    unproven = [state for state in failing if not state.is_proven and _is_judged(state, guard)]
    if not unproven:
        return guard
    return replace(guard, failed_starts=guard.failed_starts + len(unproven), last_failure_at=context.now)


def _is_proof(context: PlanningContext, state: WorkerState, guard: FailureRateState) -> bool:
    """A healthy worker that became active after the last trouble and works: whatever was broken is mended."""
    trouble = [moment for moment in (guard.last_failure_at, guard.judged_until if guard.trips else None) if moment]
    # One that this plan promotes becomes active now.
    activated_at = context.now if state.should_promote else state.worker.activated_at
    if not trouble or activated_at is None or not state.is_managed:
        return False
    return state.is_healthy and state.is_proven and activated_at > max(trouble)


def _is_judged(state: WorkerState, guard: FailureRateState) -> bool:
    return guard.judged_until is None or state.worker.created_at > guard.judged_until


def _verdict(context: PlanningContext, guard: FailureRateState, failing: list[WorkerState]) -> str | None:
    """Why nobody should be hired, or None. What this plan fails counts as failed already."""
    fleet = context.fleet
    if guard.failed_starts >= fleet.min_spawns_for_rate:
        return f"{guard.failed_starts} workers in a row broke before they had done anything"
    launches = [h for h in context.snapshot.launches if guard.judged_until is None or h.at > guard.judged_until]
    failing = [state for state in failing if _is_judged(state, guard)]
    # Hired before the window, failed within it: they are not among the hirings yet.
    late = [state for state in failing if context.age_s(state.worker.created_at) >= fleet.failure_window_s]
    total = len(launches) + len(late)
    failed = sum(hiring.has_failed for hiring in launches) + len(failing)
    if total >= fleet.min_spawns_for_rate and failed / total > fleet.max_failure_rate:
        return f"{failed} of {total} workers hired lately have failed"
    if guard.trips and failed:
        return "the worker hired to see whether it works broke too"
    return None
