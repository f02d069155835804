"""A Ray node in words: whether Ray has it, and what of it is in use."""

from collections.abc import Iterator

from windlass.model.node import NodeState, NodeView

_STATES = {NodeState.ABSENT: "not joined", NodeState.ALIVE: "alive", NodeState.DEAD: "dead"}
# First what one looks for first; the others follow by name.
_FIRST = ("CPU", "GPU", "memory")
_GIB = 2**30


def node_state(node: NodeView) -> str:
    return _STATES[node.state]


def node_uses(node: NodeView) -> list[tuple[str, str, float]]:
    """Of each resource: its name, how much of how much is in use, and the share of it."""
    return list(_uses(node))


def _uses(node: NodeView) -> Iterator[tuple[str, str, float]]:
    first = [name for name in _FIRST if name in node.total]
    for name in (*first, *sorted(node.total.keys() - set(first))):
        total, used = node.total[name], node.used.get(name, 0.0)
        is_memory = name in ("memory", "object_store_memory")
        words = f"{used / _GIB:.1f} of {total / _GIB:.1f} GiB" if is_memory else f"{used:g} of {total:g}"
        yield name.replace("_", " "), words, used / total if total else 0.0
