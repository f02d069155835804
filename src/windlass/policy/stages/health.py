"""Promotes workers with a heartbeat, and holds everything on mass silence, whose cause may be elsewhere."""

from datetime import timedelta

from windlass.model.action import Action, Promote
from windlass.model.worker import LIVE
from windlass.policy.planning_context import LIST_SHRANK, PlanningContext

# Fewer silent workers than this are ordinary failures. This many, and more than half, point to the network, the
# database or this orchestrator.
MASS_SILENCE_MIN = 3


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
    the database may have been unavailable, or its clock was set forward: then too every action waits, even if the last
    heartbeat of a worker becomes too old within that time.
    """
    hold, health = context.planner_state.hold, context.planner_state.health
    alerts = context.alert(hold.code, hold.reason) if hold is not None and hold.code == LIST_SHRANK else []
    beating = [s for s in context.states.values() if s.has_heartbeat and s.worker.status in LIVE]
    silent = [s for s in beating if s.is_stale]
    is_mass = len(silent) >= MASS_SILENCE_MIN and len(silent) * 2 > len(beating)
    planned_at = context.snapshot.planner_state.cadence.planned_at
    timeout_s = context.fleet.heartbeat_timeout_s
    was_outage = planned_at is None or context.age_s(planned_at) > timeout_s / 2
    outage_ended_at = context.now if was_outage else health.outage_ended_at
    if outage_ended_at is not None and context.age_s(outage_ended_at) >= timeout_s:
        outage_ended_at = None
    context.remember_in("health", outage_ended_at=outage_ended_at)
    since = health.mass_silence_since
    if not silent or (since is None and not is_mass and outage_ended_at is None):
        context.remember_in("health", mass_silence_since=None)
        return alerts
    if since is not None and planned_at is not None and was_outage:
        # A gap between cycles is no evidence of silence: at most one cycle interval of it counts as waiting.
        unwatched_s = max(0.0, context.age_s(planned_at) - context.cycle_interval_s)
        since = min(context.now, since + timedelta(seconds=unwatched_s))
    since = since or context.now
    context.remember_in("health", mass_silence_since=since)
    if context.age_s(since) >= timeout_s:
        return alerts
    if is_mass:
        code, why = "TOO_MANY_DEAD", f"{len(silent)} of {len(beating)} workers fell silent at once"
    else:
        code, why = "WAS_AWAY", f"no cycle ran for a while, and {len(silent)} silent workers may still send a heartbeat"
    context.hold(code, why, is_total=True)
    return alerts + context.alert(code, f"{why}; no action is taken")
