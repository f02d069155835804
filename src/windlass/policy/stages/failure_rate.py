"""The failure-rate hold: a bad image must cost a few launches, not a night of them.

Only failures of workers that had not proven to work count. It trips when more than `max_failure_rate` of at least
`min_spawns_for_rate` workers spawned in the window failed so, or that many in a row, however long each took. Spawning
then stops for one window. After that one worker at a time is spawned as a probe. A proven probe lifts the hold; a
failed one trips it again for twice as long, up to MAX_HOLD_S.

A process of this host costs nothing to launch. There the limit of restarts per slot (stages/termination.py) comes
first: the hold acts only after a slot has failed, and failures in failed slots do not count.

A machine on an avoided host says nothing about the image. It counts by itself: that many in a row hold spawning too,
because the provider would most likely place the next one there.

`windlass restart` resets it: failures before the restart no longer count.

A worker is proven when it got through its first tasks, worked on them for a minute, or was ready for a long time while
the queue was empty.
"""

from dataclasses import replace

from windlass.model.action import Action, FailSlot
from windlass.model.snapshot import FailureRateState
from windlass.policy.placement import HOST_AVOIDED
from windlass.policy.planning_context import PlanningContext
from windlass.policy.worker_state import WorkerState

CODE = "FAILURE_RATE"
LATE_CODE = "MACHINES_LATE"
# A permanently failing fleet costs one probe per hour.
MAX_HOLD_S = 3600.0
# Any window doubled this often exceeds MAX_HOLD_S.
_MAX_DOUBLINGS = 30
# Length of the failure quoted in holds and alerts.
MAX_CAUSE_CHARACTERS = 300


def hold_on_failure_rate(context: PlanningContext) -> list[Action]:
    failing = [context.states[id_] for id_ in sorted(context.failed_ids) if context.states[id_].is_managed]
    rate = _update_state(context, failing)
    context.remember(failure_rate=rate)
    if context.is_stopped:
        return []
    # Name the latest failure, of this plan or before.
    last = context.snapshot.last_failure
    failures = [(last.code, last.reason)] if last is not None else []
    failures += [(state.code or "", state.reason or "") for state in failing]
    cause = ""
    if failures:
        code, reason = failures[-1]
        cause = f", last {code} ({reason.rstrip('.')[:MAX_CAUSE_CHARACTERS]})"

    if rate.until is not None and context.now < rate.until:
        why = f"workers keep failing{cause}; no spawns until {rate.until:%H:%M:%S} UTC"
        context.hold(CODE, why)
        return context.alert(CODE, why)
    tripped = _trip_reason(context, rate, failing)
    if tripped is None:
        return []
    hold_s = min(context.fleet.failure_window_s * 2.0 ** min(rate.trips, _MAX_DOUBLINGS), MAX_HOLD_S)
    until = context.in_s(hold_s)
    context.remember(failure_rate=FailureRateState(trips=rate.trips + 1, until=until, judged_until=context.now))
    why = f"{tripped}{cause}; no spawns until {until:%H:%M:%S} UTC"
    context.hold(CODE, why)
    return context.alert(CODE, why)


def hold_on_late_machines(context: PlanningContext) -> list[Action]:
    """Alert about machines that did not join in time and are kept until their billing period ends. When
    their number reaches the failure rate, spawning stops: further machines would most likely be late too."""
    late = sum(state.is_late for state in context.states.values())
    if late == 0 or context.is_stopped:
        return []
    machines = "1 machine has" if late == 1 else f"{late} machines have"
    why = f"{machines} not joined in time, and will be used if they join before their billing period ends"
    if late >= context.fleet.min_spawns_for_rate:
        context.hold(LATE_CODE, why)
    return context.alert(LATE_CODE, why)


def is_probe(state: WorkerState, rate: FailureRateState) -> bool:
    """Spawned after the hold tripped, and not proven yet."""
    return _is_counted(state, rate) and not state.is_proven


def _is_counted(state: WorkerState, rate: FailureRateState) -> bool:
    return rate.judged_until is None or state.worker.created_at > rate.judged_until


def _update_state(context: PlanningContext, failing: list[WorkerState]) -> FailureRateState:
    """Apply a reset by `windlass restart`, then a proven worker, then this plan's failures."""
    rate, reset_at = context.planner_state.failure_rate, context.snapshot.reset_at
    if reset_at is not None and (rate.judged_until is None or rate.judged_until < reset_at):
        rate = FailureRateState(judged_until=reset_at)
    # A healthy, proven worker that became active after the last failure shows that the cause is fixed.
    failures = [moment for moment in (rate.last_failure_at, rate.judged_until if rate.trips else None) if moment]
    for state in context.states.values() if failures else ():
        # A worker that this plan promotes becomes active now.
        activated_at = context.now if state.should_promote else state.worker.activated_at
        is_proof = state.is_managed and state.is_healthy and state.is_proven
        if is_proof and activated_at is not None and activated_at > max(failures):
            rate = FailureRateState(judged_until=context.now if rate.trips else rate.judged_until)
            break
    if context.snapshot.traits.host is not None and any(isinstance(action, FailSlot) for action in context.actions):
        rate = replace(rate, failed_starts=0)
    unproven = _counted_failures(context, rate, failing)
    if not unproven:
        return rate
    avoided = sum(state.code == HOST_AVOIDED for state in unproven)
    return replace(
        rate,
        failed_starts=rate.failed_starts + len(unproven) - avoided,
        avoided_starts=rate.avoided_starts + avoided,
        last_failure_at=context.now,
    )


def _counted_failures(
    context: PlanningContext, rate: FailureRateState, failing: list[WorkerState]
) -> list[WorkerState]:
    """Failures of this plan that tell something about later spawns."""
    settled = context.failed_slots if context.snapshot.traits.host is not None else set()
    return [s for s in failing if not s.is_proven and _is_counted(s, rate) and s.worker.slot not in settled]


def _trip_reason(context: PlanningContext, rate: FailureRateState, failing: list[WorkerState]) -> str | None:
    """Why spawning must stop, or None. Workers that this plan fails count as failed."""
    fleet, is_local = context.fleet, context.snapshot.traits.host is not None
    launches = [h for h in context.snapshot.launches if rate.judged_until is None or h.at > rate.judged_until]
    counted = _counted_failures(context, rate, failing)
    failing = [state for state in counted if state.code != HOST_AVOIDED]
    max_failed_starts = fleet.min_spawns_for_rate
    if is_local:
        launches = [launch for launch in launches if launch.slot not in context.failed_slots]
        # With more failures a slot has exceeded its limit, unless its workers fail too slowly for the window.
        slots = {launch.slot for launch in launches} | {state.worker.slot for state in failing}
        max_failed_starts = max(max_failed_starts, fleet.max_restarts * len(slots) + 1)
    if rate.failed_starts >= max_failed_starts:
        return f"{rate.failed_starts} workers in a row failed before they proved to work"
    if rate.avoided_starts >= fleet.min_spawns_for_rate:
        return f"{rate.avoided_starts} machines in a row were on avoided hosts"
    # Spawned before the window and failed in this plan: not among the launches yet.
    late = [state for state in failing if context.age_s(state.worker.created_at) >= fleet.failure_window_s]
    total = len(launches) + len(late)
    failed = sum(launch.has_failed for launch in launches) + len(failing)
    has_rate = total >= fleet.min_spawns_for_rate and (not is_local or bool(context.failed_slots))
    if has_rate and failed / total > fleet.max_failure_rate:
        return f"failure rate {failed} of {total} in {fleet.failure_window_s / 60:g} min"
    if rate.trips and (failed or counted):
        return "the probe failed too"
    return None
