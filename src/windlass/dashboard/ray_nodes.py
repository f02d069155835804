"""Jinja filters for Ray nodes: membership state and resource use."""

from windlass.model.node import NodeState, NodeView

_STATES = {NodeState.ABSENT: "not joined", NodeState.ALIVE: "alive", NodeState.DEAD: "dead"}
# Listed first. The other resources follow by name.
_FIRST = ("CPU", "GPU", "memory")
_GIB = 2**30


def node_state(node: NodeView) -> str:
    return _STATES[node.state]


def node_uses(node: NodeView) -> list[tuple[str, str, float]]:
    """For each resource: its name, used and total as text, and the used share."""
    first = [name for name in _FIRST if name in node.total]
    uses = []
    for name in (*first, *sorted(node.total.keys() - set(first))):
        total, used = node.total[name], node.used.get(name, 0.0)
        is_memory = name in ("memory", "object_store_memory")
        text = f"{used / _GIB:.1f} of {total / _GIB:.1f} GiB" if is_memory else f"{used:g} of {total:g}"
        uses.append((name.replace("_", " "), text, used / total if total else 0.0))
    return uses
