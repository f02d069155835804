"""How many workers a fleet should have: one file per policy, pure, chosen by name.

A policy looks at demand and says how many more it wants, or which of the idle ones it can spare, and why. It need not
keep the limits: min, max, caps, holds and intervals are applied to every policy alike by policy/stages/scaling.py.
"""

from windlass.policy.scale.buffered import buffered
from windlass.policy.scale.clear_time import clear_time
from windlass.policy.scale.demand import Demand, Policy, ScalingDecision
from windlass.policy.scale.threshold import threshold

POLICIES: dict[str, Policy] = {"threshold": threshold, "buffered": buffered, "clear-time": clear_time}

__all__ = ["POLICIES", "Demand", "Policy", "ScalingDecision"]
