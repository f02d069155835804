"""Counts how many more tasks a dispatcher may claim: those that Ray can place now, plus a margin that waits. Pure.

Tasks in flight are counted from the moment of the claim, by the dispatcher itself: Ray's free resources lag behind, and
claims would exceed them. Usage by others (Ray tasks of handlers, other jobs) comes from Ray. A task that fits on no
node reduces nothing for tasks that fit.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from windlass.model.node import Resources

# Sorted amounts by resource name, so that equal needs compare equal. Tasks with equal needs are of one kind.
Needs = tuple[tuple[str, float], ...]

# Ray does not limit tasks that need neither CPU nor GPU. A node gets at most this many of them.
MAX_TASKS_WITHOUT_PROCESSOR = 100
_PROCESSORS = ("CPU", "GPU")
# The resource by which those tasks are counted. Only this module knows it.
_SLOTS = "windlass:slots"
# Amounts are sums of decimal fractions. Amounts that differ by less than this are equal.
TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """A node's resources, and what is used of them by anything but the dispatcher's own tasks."""

    total: Resources
    used_by_others: Resources = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InFlightKind:
    """Key for counting claimed tasks: thousands are in flight, of few kinds. `node_id` None: waiting for a seat."""

    needs: Needs
    node_id: str | None = None


def count_fitting(free: Resources, needs: Resources) -> int:
    """How many tasks with these needs fit into the free resources of one node."""
    free = {_SLOTS: MAX_TASKS_WITHOUT_PROCESSOR, **free}
    counts = (int((free.get(name, 0.0) + TOLERANCE) // amount) for name, amount in _usage(needs).items() if amount > 0)
    return max(0, min(counts))


def count_capacity(nodes: Mapping[str, NodeCapacity], needs: Resources) -> int:
    """How many tasks with these needs all nodes could hold if they were empty."""
    return sum(count_fitting(node.total, needs) for node in nodes.values())


def count_unplaceable(nodes: Mapping[str, NodeCapacity], in_flight: Mapping[InFlightKind, int]) -> int:
    """How many waiting tasks fit on no node."""
    waiting = ((dict(kind.needs), count) for kind, count in in_flight.items() if kind.node_id is None)
    return sum(count for needs, count in waiting if not count_capacity(nodes, needs))


def count_free_slots(
    nodes: Mapping[str, NodeCapacity],
    in_flight: Mapping[InFlightKind, int],
    needs: Resources,
    margin: int,
    *,
    may_grow: bool = False,
) -> int:
    """How many more tasks with these needs to claim.

    If no node could hold one: none, whatever the margin. But if the cluster may grow: up to the margin, and at least
    one, because pending seats are the demand by which a cluster scales up. Waiting tasks of other kinds do not count
    then, because the cluster may never grow for them.
    """
    if not count_capacity(nodes, needs):
        waiting = sum(count for kind, count in in_flight.items() if kind.node_id is None and dict(kind.needs) == needs)
        return max(0, max(margin, 1) - waiting) if may_grow else 0
    free = {
        node_id: {_SLOTS: MAX_TASKS_WITHOUT_PROCESSOR, **_subtract(node.total, node.used_by_others)}
        for node_id, node in nodes.items()
    }
    for kind, count in in_flight.items():
        if kind.node_id in free:
            free[kind.node_id] = _subtract(free[kind.node_id], _usage(dict(kind.needs)), count)
    # Waiting tasks take the first free resources that fit; the rest of them use up the margin.
    beyond = 0
    for kind, count in in_flight.items():
        if kind.node_id is not None or not count_capacity(nodes, dict(kind.needs)):
            continue
        unplaced = count
        for node_id, amounts in free.items():
            placed = min(unplaced, count_fitting(amounts, dict(kind.needs)))
            if placed:
                free[node_id] = _subtract(amounts, _usage(dict(kind.needs)), placed)
                unplaced -= placed
            if not unplaced:
                break
        beyond += unplaced
    return max(0, sum(count_fitting(amounts, needs) for amounts in free.values()) + margin - beyond)


def _usage(needs: Resources) -> Resources:
    """What a task takes from a node: its needs, and a slot if it needs no processor."""
    return needs if any(needs.get(name) for name in _PROCESSORS) else {**needs, _SLOTS: 1.0}


def _subtract(amounts: Resources, used: Resources, times: int = 1) -> dict[str, float]:
    return {name: amount - times * used.get(name, 0.0) for name, amount in amounts.items()}
