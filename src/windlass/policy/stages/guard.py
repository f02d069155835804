"""The failure-rate guard: a bad image must cost a few launches, not a night of them.

It trips when, of at least `min_hirings_for_rate` workers hired in the window, more than `max_failure_rate` failed; or
when that many in a row broke before they had proven themselves, however long each took to break. Then nobody is hired
for one window. After that one worker at a time is hired as a probe: one that proves itself ends the alarm, one that
breaks trips the guard again for twice as long, up to GUARD_MAX_S.

`windlass restart` says that what was broken is mended: nothing that happened before it counts any more.

Proof is work: the first tasks behind it, or a minute at them, or a long time ready while nothing waited.
"""

from dataclasses import replace

from windlass.model.action import Action
from windlass.model.snapshot import Guard
from windlass.policy.derive import WorkerState
from windlass.policy.draft import Draft

# One probe an hour is what a broken fleet costs in the end.
GUARD_MAX_S = 3600.0
# Every window doubled this often is beyond the maximum.
_MAX_DOUBLINGS = 30
CODE = "FAILURE_RATE"
# Of a reason that is told with every alert and in every list.
MAX_CAUSE_CHARACTERS = 300


def guard_hiring(draft: Draft) -> list[Action]:
    """Judge what was hired lately, and hold if most of it broke."""
    failing = [draft.states[id_] for id_ in sorted(draft.failed_ids) if draft.states[id_].is_hired]
    guard = _learn(draft, _unless_reset(draft), failing)
    draft.remember(guard=guard)
    if draft.is_stopped:
        return []
    cause = _cause(draft, failing)
    if guard.until is not None and draft.now < guard.until:
        reason = f"workers keep breaking{cause}; nobody is hired until {guard.until:%H:%M:%S} UTC"
        draft.hold(CODE, reason)
        return draft.alert(CODE, reason)
    what = _verdict(draft, guard, failing)
    if what is None:
        return []
    pause_s = min(draft.fleet.failure_window_s * 2.0 ** min(guard.trips, _MAX_DOUBLINGS), GUARD_MAX_S)
    tripped = Guard(trips=guard.trips + 1, until=draft.in_s(pause_s), judged_until=draft.now)
    draft.remember(guard=tripped)
    draft.hold(CODE, f"{what}{cause}; nobody is hired until {tripped.until:%H:%M:%S} UTC")
    return draft.alert(CODE, f"{what}{cause}: is the image, the handler or the configuration broken?")


def is_probe(state: WorkerState, guard: Guard) -> bool:
    """Hired after the guard tripped, and not proven yet."""
    return _is_judged(state, guard) and not state.is_proven


def _cause(draft: Draft, failing: list[WorkerState]) -> str:
    """Of the last one that broke, in this plan or before: its code and reason, for whoever is to mend it."""
    last = draft.snapshot.last_failure
    broken = [(last.code, last.reason)] if last is not None else []
    broken += [(state.code or "", state.reason or "") for state in failing]
    if not broken:
        return ""
    code, reason = broken[-1]
    return f", the last one with {code} ({reason.rstrip('.')[:MAX_CAUSE_CHARACTERS]})"


def _unless_reset(draft: Draft) -> Guard:
    guard, reset_at = draft.memory.guard, draft.snapshot.reset_at
    if reset_at is None or (guard.judged_until is not None and guard.judged_until >= reset_at):
        return guard
    return Guard(judged_until=reset_at)


def _learn(draft: Draft, guard: Guard, failing: list[WorkerState]) -> Guard:
    """Count who broke unproven; forget it all when somebody has proven themselves since."""
    if any(_is_proof(draft, state, guard) for state in draft.states.values()):
        guard = Guard(judged_until=draft.now if guard.trips else guard.judged_until)
    unproven = [state for state in failing if not state.is_proven and _is_judged(state, guard)]
    if not unproven:
        return guard
    return replace(guard, broken_starts=guard.broken_starts + len(unproven), broken_at=draft.now)


def _is_proof(draft: Draft, state: WorkerState, guard: Guard) -> bool:
    """A healthy worker that became active after the last trouble and works: whatever was broken is mended."""
    trouble = [moment for moment in (guard.broken_at, guard.judged_until if guard.trips else None) if moment]
    # One that this plan promotes becomes active now.
    activated_at = draft.now if state.should_promote else state.worker.activated_at
    if not trouble or activated_at is None or not state.is_hired:
        return False
    return state.is_healthy and state.is_proven and activated_at > max(trouble)


def _is_judged(state: WorkerState, guard: Guard) -> bool:
    return guard.judged_until is None or state.worker.created_at > guard.judged_until


def _verdict(draft: Draft, guard: Guard, failing: list[WorkerState]) -> str | None:
    """Why nobody should be hired, or None. What this plan fails counts as failed already."""
    fleet = draft.fleet
    if guard.broken_starts >= fleet.min_hirings_for_rate:
        return f"{guard.broken_starts} workers in a row broke before they had done anything"
    hirings = [h for h in draft.snapshot.hirings if guard.judged_until is None or h.at > guard.judged_until]
    failing = [state for state in failing if _is_judged(state, guard)]
    # Hired before the window, failed within it: they are not among the hirings yet.
    late = [state for state in failing if draft.age_s(state.worker.created_at) >= fleet.failure_window_s]
    total = len(hirings) + len(late)
    failed = sum(hiring.has_failed for hiring in hirings) + len(failing)
    if total >= fleet.min_hirings_for_rate and failed / total > fleet.max_failure_rate:
        return f"{failed} of {total} workers hired lately have failed"
    if guard.trips and failed:
        return "the worker hired to see whether it works broke too"
    return None
