"""How many more tasks may be claimed, so that Ray has a place for each, and a few wait for the next. Pure.

What we have in flight is counted by ourselves, from the moment of the claim: Ray's own word on what is free comes late,
and claims would overrun it. What others use of the same nodes (a handler's own Ray tasks, other jobs) is Ray's word.
A task that no node could hold takes no room from those that one could.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from windlass.model.node import Resources

# Amounts by name, in an order that makes equal ones equal.
Needs = tuple[tuple[str, float], ...]

# Of tasks that need no processor, by which Ray would count them, a node takes as many as this.
MAX_PLACES_PER_NODE = 100
_PROCESSORS = ("CPU", "GPU")
_SEATS = "windlass:seats"
# Amounts are sums of decimal fractions: one that is smaller by this much is not smaller.
TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """`others`: used of it by whom we did not place there."""

    total: Resources
    others: Resources = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InFlightKind:
    """Claimed tasks of a kind: there are thousands in flight, and few kinds. `node_id` None: they wait for a place."""

    needs: Needs
    node_id: str | None = None


def places(free: Resources, needs: Resources) -> int:
    """How many tasks with these needs fit into what is free."""
    free = {_SEATS: MAX_PLACES_PER_NODE, **free}
    counts = (int((free.get(name, 0.0) + TOLERANCE) // amount) for name, amount in _taken(needs).items() if amount > 0)
    return max(0, min(counts))


def capacity(nodes: Mapping[str, NodeCapacity], needs: Resources) -> int:
    """Tasks with these needs that all nodes together could hold if they were empty."""
    return sum(places(node.total, needs) for node in nodes.values())


def homeless(nodes: Mapping[str, NodeCapacity], flights: Mapping[InFlightKind, int]) -> int:
    """How many wait that no node could hold."""
    waiting = ((dict(flight.needs), count) for flight, count in flights.items() if flight.node_id is None)
    return sum(count for needs, count in waiting if not capacity(nodes, needs))


def free_slots(
    nodes: Mapping[str, NodeCapacity],
    flights: Mapping[InFlightKind, int],
    needs: Resources,
    margin: int,
    *,
    is_awaited: bool = False,
) -> int:
    """How many more tasks with these needs to claim.

    Where no node could ever hold one: none, whatever the margin. But if one is awaited (`is_awaited`), as many as the
    margin, and one at least: what waits in Ray is the demand that a cluster grows by. Others that wait for it to grow
    do not count: it may never grow for those.
    """
    if not capacity(nodes, needs):
        waiting = sum(
            count for flight, count in flights.items() if flight.node_id is None and dict(flight.needs) == needs
        )
        return max(0, max(margin, 1) - waiting) if is_awaited else 0
    free = {
        node_id: {_SEATS: MAX_PLACES_PER_NODE, **_minus(node.total, node.others)} for node_id, node in nodes.items()
    }
    for flight, count in flights.items():
        if flight.node_id in free:
            free[flight.node_id] = _minus(free[flight.node_id], _taken(dict(flight.needs)), count)
    beyond = 0
    for flight, count in flights.items():
        if flight.node_id is None and capacity(nodes, dict(flight.needs)):
            beyond += _left_standing(free, dict(flight.needs), count)
    return max(0, sum(places(amounts, needs) for amounts in free.values()) + margin - beyond)


def _left_standing(free: dict[str, dict[str, float]], needs: Resources, count: int) -> int:
    """Keep the first places that are large enough for those that wait. Returns for how many there is none."""
    for node_id, amounts in free.items():
        seated = min(count, places(amounts, needs))
        if seated:
            free[node_id] = _minus(amounts, _taken(needs), seated)
            count -= seated
        if not count:
            break
    return count


def _taken(needs: Resources) -> Resources:
    """Of a node by a task."""
    return needs if any(needs.get(name) for name in _PROCESSORS) else {**needs, _SEATS: 1.0}


def _minus(amounts: Resources, taken: Resources, times: int = 1) -> dict[str, float]:
    return {name: amount - times * taken.get(name, 0.0) for name, amount in amounts.items()}
