"""A provider's no is heeded, in its own words, instead of being asked for again in every cycle.

A limit of the account, a token that is not let in and a request against the rules are for a person to put right:
nobody is hired for a while, then one worker is tried, then nobody for twice as long. No capacity often passes by
itself: the first no costs nothing, and only one that comes again makes us wait. A pause of many minutes that the
provider asks for is kept, and told. One machine that is had ends it all.
"""

from datetime import timedelta

from windlass.model.action import Action
from windlass.model.snapshot import ProviderBackoff, ProviderRefusal
from windlass.policy.planning_context import PlanningContext

# First and longest pause, by the code of the refusal, which is the hold's too. A person takes minutes to raise a limit
# and learns of it by the alert; machines come free at any time, and asking for them costs one request.
_HELD = {
    "LIMIT_REACHED": (300.0, 3600.0),
    "DENIED": (300.0, 3600.0),
    "INVALID_REQUEST": (300.0, 3600.0),
    "NO_CAPACITY": (30.0, 300.0),
    # Whoever is asked again within the pause need not be asked: the answer is known.
    "PROVIDER_PAUSE": (300.0, 300.0),
}
# Refusals that pass unheeded before they make us wait.
_LET_PASS = {"NO_CAPACITY": 1}
# Every pause doubled this often is beyond the longest.
_MAX_DOUBLINGS = 30
CODES = frozenset(_HELD)


def heed_refusal(context: PlanningContext) -> list[Action]:
    """Hold while the last refusal is fresh."""
    refusal = context.snapshot.refusal
    if refusal is None or refusal.code not in CODES:
        context.remember(provider_backoff=None)
        return []
    pause = _pause(context.planner_state.provider_backoff, refusal)
    context.remember(provider_backoff=pause)
    if context.is_stopped or context.now >= pause.until:
        return []
    context.hold(refusal.code, f"{refusal.reason.rstrip('.')}; nobody is hired until {pause.until:%H:%M:%S} UTC")
    return context.alert(refusal.code, refusal.reason)


def is_tried(context: PlanningContext) -> bool:
    """Whether a creation is under way that will show if the cause of the refusal is gone."""
    return any(s.is_managed and s.worker.machine_id is None for s in context.states.values())


def _pause(known: ProviderBackoff | None, refusal: ProviderRefusal) -> ProviderBackoff:
    """Those that were asked for together are refused together: only a no to what was asked for later counts again."""
    if known is not None and known.code == refusal.code and refusal.at <= known.until:
        return known
    times = known.times + 1 if known is not None and known.code == refusal.code else 1
    first_s, longest_s = _HELD[refusal.code]
    doublings = min(times - 1 - _LET_PASS.get(refusal.code, 0), _MAX_DOUBLINGS)
    pause_s = min(first_s * 2.0**doublings, longest_s) if doublings >= 0 else 0.0
    return ProviderBackoff(refusal.code, times, refusal.at + timedelta(seconds=pause_s))
