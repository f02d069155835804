"""Backs off after the provider refused to create machines, instead of requesting them again in every cycle.

An account limit, a rejected token and an invalid request need a person: spawning stops for a while, then one worker is
tried, then spawning stops for twice as long. Missing capacity often passes by itself: the first refusal has no
consequence, only a repeated one. A pause that the provider asks for is kept. One created machine ends the back-off.
"""

from datetime import timedelta

from windlass.model.action import Action
from windlass.model.snapshot import ProviderBackoff, ProviderRefusal
from windlass.policy.planning_context import PlanningContext

# First and longest back-off by refusal code, which is also the hold's code. A person, alerted, needs minutes to raise a
# limit. Capacity may return at any time, and asking for it costs one request.
_BACKOFF_S = {
    "LIMIT_REACHED": (300.0, 3600.0),
    "DENIED": (300.0, 3600.0),
    "INVALID_REQUEST": (300.0, 3600.0),
    "NO_CAPACITY": (30.0, 300.0),
    # Within the pause the provider's answer is known.
    "PROVIDER_PAUSE": (300.0, 300.0),
}
# Refusals without a consequence before the back-off begins.
_TOLERATED = {"NO_CAPACITY": 1}
# Any back-off doubled this often exceeds the longest.
_MAX_DOUBLINGS = 30
CODES = frozenset(_BACKOFF_S)


def apply_provider_backoff(context: PlanningContext) -> list[Action]:
    """Hold spawning while the back-off of the last refusal lasts."""
    refusal = context.snapshot.refusal
    backoff = next_backoff(refusal, context.planner_state.provider_backoff)
    context.remember(provider_backoff=backoff)
    if refusal is None or backoff is None:
        return []
    if context.is_stopped or context.now >= backoff.until:
        return []
    context.hold(refusal.code, f"{refusal.reason.rstrip('.')}; no spawns until {backoff.until:%H:%M:%S} UTC")
    return context.alert(refusal.code, refusal.reason)


def next_backoff(refusal: ProviderRefusal | None, known: ProviderBackoff | None) -> ProviderBackoff | None:
    """The back-off after the provider's last answer. None: it created a machine, or refused only one choice."""
    if refusal is None or refusal.code not in CODES:
        return None
    backoff = known if known is not None and known.code == refusal.code else None
    # Machines requested together are refused together: only a refusal after the back-off counts again.
    if backoff is not None and refusal.at <= backoff.until:
        return backoff
    times = backoff.times + 1 if backoff is not None else 1
    first_s, longest_s = _BACKOFF_S[refusal.code]
    doublings = min(times - 1 - _TOLERATED.get(refusal.code, 0), _MAX_DOUBLINGS)
    backoff_s = min(first_s * 2.0**doublings, longest_s) if doublings >= 0 else 0.0
    return ProviderBackoff(refusal.code, times, refusal.at + timedelta(seconds=backoff_s))


def is_probe_in_flight(context: PlanningContext) -> bool:
    """A create call is pending whose result will show whether the provider still refuses."""
    return any(s.is_managed and s.worker.machine_id is None for s in context.states.values())
