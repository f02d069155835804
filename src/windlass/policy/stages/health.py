"""Promotes workers with a heartbeat, and holds everything on mass silence, whose cause may be elsewhere."""

from windlass.model.action import Action, Promote
from windlass.model.worker import LIVE
from windlass.policy.planning_context import LIST_SHRANK, PlanningContext

# Fewer silent workers than this are ordinary failures. This many, and more than half, point to the network, the
# database or this orchestrator.
MASS_SILENCE_MIN = 3
# After an outage of the database or the orchestrator, live workers send a heartbeat within this many intervals.
HEARTBEATS_AFTER_OUTAGE = 2


def promote(context: PlanningContext) -> list[Action]:
    """Spawning workers with a recent heartbeat become active."""
    return [
        Promote(state.worker.id, f"heartbeat {state.heartbeat_age_s:.0f} s ago")
        for state in context.states.values()
        if state.should_promote and not state.should_terminate
    ]


def hold_on_mass_silence(context: PlanningContext) -> list[Action]:
    """Give silent workers more time if the silence may not be their fault.

    If most workers fall silent at once, every action waits for one more heartbeat timeout. If no cycle ran for a while,
    the database may have been unavailable: every action waits until live workers had time for two heartbeats, even if
    their last heartbeats become too old within that time.
    """
    hold = context.planner_state.hold
    alerts = context.alert(hold.code, hold.reason) if hold is not None and hold.code == LIST_SHRANK else []
    beating = [s for s in context.states.values() if s.has_heartbeat and s.worker.status in LIVE]
    silent = [s for s in beating if s.is_stale]
    is_mass = len(silent) >= MASS_SILENCE_MIN and len(silent) * 2 > len(beating)
    planned_at = context.snapshot.planner_state.cadence.planned_at
    was_outage = planned_at is None or context.age_s(planned_at) > context.fleet.heartbeat_timeout_s / 2
    beats_s = HEARTBEATS_AFTER_OUTAGE * context.fleet.heartbeat_interval_s
    since = context.planner_state.health.mass_silence_since
    outage_ended_at = context.now if was_outage else context.planner_state.health.outage_ended_at
    if outage_ended_at is not None and context.age_s(outage_ended_at) >= beats_s:
        outage_ended_at = None
    context.remember_in("health", outage_ended_at=outage_ended_at)
    if not silent or (since is None and not is_mass and outage_ended_at is None):
        context.remember_in("health", mass_silence_since=None)
        return alerts
    since = since or context.now
    context.remember_in("health", mass_silence_since=since)
    if is_mass:
        if context.age_s(since) >= context.fleet.heartbeat_timeout_s:
            return alerts
        why = f"{len(silent)} of {len(beating)} workers fell silent at once"
        context.hold("TOO_MANY_DEAD", why, is_total=True)
        return alerts + context.alert("TOO_MANY_DEAD", f"{why}; no action is taken")
    if context.age_s(since) >= beats_s:
        return alerts
    why = f"no cycle ran for a while, and {len(silent)} silent workers may still send a heartbeat"
    context.hold("WAS_AWAY", why, is_total=True)
    return alerts + context.alert("WAS_AWAY", f"{why}; no action is taken")
