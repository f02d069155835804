"""Scaling policies: how many workers a fleet should have. One pure function per file, selected by name.

A policy returns how many more workers it wants, or which idle workers it can spare. It does not apply limits:
policy/stages/scaling.py applies minimum, maximum, caps, holds and intervals to every policy alike.
"""

from windlass.policy.scale.adaptive import adaptive
from windlass.policy.scale.buffered import buffered
from windlass.policy.scale.clear_time import clear_time
from windlass.policy.scale.demand import Demand, Policy, ScalingDecision
from windlass.policy.scale.threshold import threshold

POLICIES: dict[str, Policy] = {
    "adaptive": adaptive,
    "threshold": threshold,
    "buffered": buffered,
    "clear-time": clear_time,
}

__all__ = ["POLICIES", "Demand", "Policy", "ScalingDecision"]
