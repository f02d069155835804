"""What a cycle did, as opposed to what it planned.

A plan's actions on rows took effect when it was committed. Provider calls count only as far as the cycle's summary
confirms them.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from windlass.model.action import ACTION_KINDS, Delete, Drain, Fail, Promote, Spawn
from windlass.model.cycle import Cycle
from windlass.model.plural import plural

# Actions shown in a cycle's line, in the order of a worker's lifecycle: the verb, and for provider calls the noun and
# the key of the cycle's summary that counts successful calls. The others took effect when the plan was committed.
COUNTED_ACTIONS: tuple[tuple[type, str, str, str], ...] = (
    (Spawn, "spawned", "spawn", "workers_spawned"),
    (Promote, "activated", "", ""),
    (Fail, "failed", "", ""),
    (Drain, "drained", "", ""),
    (Delete, "deleted", "deletion", "workers_terminated"),
)
# The key of a cycle's summary with the creations that were refused, by error code.
REFUSED_CREATIONS = "creations_refused"


def done_actions(cycle: Cycle) -> list[str]:
    """For example: spawned 1 of 3, 2 refused: no capacity, drained 1, 1 deletion not confirmed."""
    return done_of(Counter(ACTION_KINDS[type(action)] for action in cycle.actions), cycle.summary)


def done_of(planned_by_kind: Mapping[str, int], summary: Mapping[str, Any] | None) -> list[str]:
    """`planned_by_kind`: actions of the cycle's plan, by ACTION_KINDS. `summary`: as stored with the cycle."""
    parts = []
    for kind, verb, noun, key in COUNTED_ACTIONS:
        planned = planned_by_kind.get(ACTION_KINDS[kind], 0)
        done = planned if not key else (summary or {}).get(key, 0)
        refused: Mapping[str, int] = (summary or {}).get(REFUSED_CREATIONS, {}) if kind is Spawn else {}
        if 0 < done < planned:
            parts.append(f"{verb} {done} of {planned}")
        elif planned and done:
            parts.append(f"{verb} {planned}")
        for code, count in sorted(refused.items()):
            subject = str(count) if done else plural(count, noun)
            parts.append(f"{subject} refused{_why(code)}")
        unconfirmed = planned - sum(refused.values())
        if not done and unconfirmed > 0:
            parts.append(f"{plural(unconfirmed, noun)} not confirmed")
    return parts


def done_note(cycle: Cycle) -> str:
    """What a cycle did, after its decision."""
    parts = done_actions(cycle)
    return f" [{', '.join(parts)}]" if parts else ""


def _why(code: str) -> str:
    return "" if code == "REFUSED" else f": {code.lower().replace('_', ' ')}"
