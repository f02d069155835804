"""Claims, nodes and node tables for tests of the Ray package."""

import json
from datetime import UTC, datetime
from uuid import uuid4

from windlass.model.ray import RaySettings
from windlass.model.task import Claim
from windlass.ray.cluster import FLEET_LABEL, WORKER_LABEL, ClusterNode
from windlass.ray.node_table import NodeTable

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def make_claim(payload: object = None, queue: str = "q", timeout_s: float | None = None) -> Claim:
    return Claim(1, uuid4(), queue, json.dumps(payload), 1, 3, timeout_s, 0, NOW)


def make_node(
    node_id: str,
    *,
    cpus: float = 2.0,
    gpus: float = 0.0,
    worker_id: str | None = None,
    fleet: str = "many",
    used: float = 0.0,
) -> ClusterNode:
    """A live node. With a worker id it has the labels of a spawned node."""
    labels = {WORKER_LABEL: worker_id, FLEET_LABEL: fleet} if worker_id is not None else {}
    total = {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}
    return ClusterNode(node_id, True, labels, "127.0.0.1", total, {"CPU": used})


def table_of_spawned(*names: str, settings: RaySettings | None = None, clock: list[float] | None = None) -> NodeTable:
    """Nodes that the fleet spawned: id-NAME with the worker NAME. `clock[0]` is the time."""
    settings, ticks = settings or RaySettings(node_cpus=2), clock or [0.0]
    table = NodeTable("many", settings, ("q",), settings, clock=lambda: ticks[0])
    table.update([make_node(f"id-{name}", worker_id=name) for name in names], {})
    return table


def table_of_external(
    *nodes: ClusterNode, settings: RaySettings | None = None, queues: tuple[str, ...] = ("q",)
) -> NodeTable:
    """Nodes of an external cluster."""
    table = NodeTable("many", settings or RaySettings(margin=2), queues, None)
    table.update(nodes, {})
    return table
