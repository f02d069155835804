"""What a cycle did, as opposed to what it planned.

A plan's actions on rows took effect when it was committed. Provider calls count only as far as the cycle's summary
confirms them.
"""

from windlass.model.action import Delete, Drain, Fail, Promote, Spawn
from windlass.model.cycle import Cycle
from windlass.model.plural import plural

# Actions shown in a cycle's line, in the order of a worker's lifecycle: the verb, and for provider calls the noun and
# the key of the cycle's summary that counts successful calls. The others took effect when the plan was committed.
COUNTED_ACTIONS: tuple[tuple[type, str, str, str], ...] = (
    (Spawn, "spawned", "spawn", "workers_spawned"),
    (Promote, "promoted", "", ""),
    (Fail, "failed", "", ""),
    (Drain, "drained", "", ""),
    (Delete, "deleted", "deletion", "workers_terminated"),
)


def done_actions(cycle: Cycle) -> list[str]:
    """For example: spawned 2 of 3, drained 1, 1 deletion not confirmed."""
    parts = []
    for kind, verb, noun, key in COUNTED_ACTIONS:
        planned = sum(isinstance(action, kind) for action in cycle.actions)
        done = planned if not key else (cycle.summary or {}).get(key, 0)
        if 0 < done < planned:
            parts.append(f"{verb} {done} of {planned}")
        elif planned:
            parts.append(f"{verb} {planned}" if done else f"{plural(planned, noun)} not confirmed")
    return parts
