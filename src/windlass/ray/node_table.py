"""The Ray nodes of a fleet as last observed: their workers, which of them get tasks, and whether a task fits.

A node gets tasks ("is open") if it is alive, can hold tasks of the fleet, is neither terminating nor paused (also if
only the database knows so yet), and has not recently lacked Windlass, the handler or the command.
"""

import enum
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from windlass.model.node import AliveNode, DeadNode, Resources
from windlass.model.ray import RaySettings
from windlass.ray.capacity import Needs, NodeCapacity, count_fitting
from windlass.ray.cluster import FLEET_LABEL, WORKER_LABEL, ClusterNode, to_label_value

# Usage by others is the minimum of this many observations: lasting usage, without the moments between our own tasks.
OBSERVATIONS_KEPT = 3
# A node that cannot run our tasks is tried again after this time: the missing program may have been installed.
UNUSABLE_S = 60.0
# After the database rejected a placement, the node is avoided until its new status has been read.
AVOIDED_S = 1.0
# Ray may try for about a minute to reach a lost node, even for tasks that could run elsewhere. Seats that exclude the
# node by a label selector do not queue up behind those.
LOST_S = 120.0


class Schedulability(enum.Enum):
    """Whether a waiting task can be placed."""

    FITS = "an open node could hold it"
    MAY_FIT_AFTER_GROWTH = "no node could hold it, but the cluster is external and may grow"
    NOT_NOW = "no open node could hold it now"
    NO_USABLE_NODE = "no node of the fleet can run our tasks"
    NEVER = "it needs more than any node of the fleet has"


@dataclass(frozen=True, slots=True)
class _Unusable:
    reason: str
    until: float


@dataclass(slots=True)
class NodeTable:
    """`offer`: the resources each spawned node starts with. None: an external cluster, of which all nodes are used."""

    fleet: str
    settings: RaySettings
    queues: tuple[str, ...]
    offer: RaySettings | None
    clock: Callable[[], float] = time.monotonic
    alive: dict[str, ClusterNode] = field(default_factory=dict)
    _dead: dict[str, ClusterNode] = field(default_factory=dict)
    # Ids of workers that get no more tasks.
    _barred_workers: set[str] = field(default_factory=set)
    # The following are keyed by node id; the floats say until when.
    _unusable: dict[str, _Unusable] = field(default_factory=dict)
    _avoided: dict[str, float] = field(default_factory=dict)
    _lost: dict[str, float] = field(default_factory=dict)
    _observed_usage: dict[str, deque[Mapping[str, float]]] = field(default_factory=dict)
    # Caches, because thousands of tasks ask the same. Cleared by every change.
    _open_nodes: dict[str, NodeCapacity] | None = None
    _schedulability: dict[Needs, Schedulability] = field(default_factory=dict)
    _excluded: dict[Needs, frozenset[str]] = field(default_factory=dict)

    # ------------------------------------------------------------------------------------------------------ updates

    def update(self, nodes: Iterable[ClusterNode], own_usage: Mapping[str, Resources]) -> bool:
        """Replace the observed nodes. `own_usage`: what our attempts use, by node id.

        Returns True if nodes were lost that were not terminating.
        """
        before, now = self.alive, self.clock()
        own = [node for node in nodes if self.offer is None or self._spawned_worker_id(node) is not None]
        self.alive = {node.node_id: node for node in own if node.is_alive}
        self._dead = {node.node_id: node for node in own if not node.is_alive}
        usage = self._observed_usage
        self._observed_usage = {node_id: usage.get(node_id, deque(maxlen=OBSERVATIONS_KEPT)) for node_id in self.alive}
        for node_id, node in self.alive.items():
            ours = own_usage.get(node_id, {})
            self._observed_usage[node_id].append(
                {name: max(0.0, used - ours.get(name, 0.0)) for name, used in node.used.items()}
            )
        lost = [node_id for node_id, node in before.items() if node_id not in self.alive and self._is_admitted(node)]
        self._lost = {node_id: until for node_id, until in self._lost.items() if until > now}
        self._lost |= dict.fromkeys(lost, now + LOST_S)
        self._unusable = {
            node_id: unusable
            for node_id, unusable in self._unusable.items()
            if node_id in self.alive and unusable.until > now
        }
        self._avoided = {node_id: until for node_id, until in self._avoided.items() if until > now}
        self._clear_caches()
        return bool(lost)

    def bar_workers(self, worker_ids: Iterable[str]) -> None:
        """Set the workers that get no more tasks, because they terminate or are paused."""
        self._barred_workers = set(worker_ids)
        self._clear_caches()

    def mark_unusable(self, node_id: str, reason: str) -> bool:
        """The node lacks what it takes to run our tasks. Returns True if that was not known."""
        is_new = node_id not in self._unusable
        self._unusable[node_id] = _Unusable(reason, self.clock() + UNUSABLE_S)
        self._clear_caches()
        return is_new

    def avoid(self, node_id: str) -> None:
        """The database rejected a placement on the node."""
        self._avoided[node_id] = self.clock() + AVOIDED_S
        self._clear_caches()

    def _clear_caches(self) -> None:
        self._open_nodes = None
        self._schedulability.clear()
        self._excluded.clear()

    # ------------------------------------------------------------------------------------------------------ queries

    def is_alive(self, node_id: str) -> bool:
        return node_id in self.alive

    def open_worker_id(self, node_id: str) -> str | None:
        """The worker of an open node. None: the node gets no tasks."""
        return self._worker_id(self.alive[node_id]) if node_id in self.open_nodes() else None

    def open_nodes(self) -> dict[str, NodeCapacity]:
        if self._open_nodes is None:
            self._open_nodes = {}
            for node_id, node in self.alive.items():
                if self._is_admitted(node) and node_id not in self._unusable and node_id not in self._avoided:
                    first, *rest = self._observed_usage[node_id]
                    others = {name: min([used, *(one.get(name, 0.0) for one in rest)]) for name, used in first.items()}
                    self._open_nodes[node_id] = NodeCapacity(node.total, others)
        return self._open_nodes

    def excluded_nodes(self, needs: Needs) -> frozenset[str]:
        """Nodes on which Ray could place, or try to place, such a task, although it must not run there.

        Nodes that could not hold it are left out: an external cluster may have thousands, and each seat carries this.
        """
        if needs not in self._excluded:
            closed = (node for node_id, node in self.alive.items() if node_id not in self.open_nodes())
            fitting = {node.node_id for node in closed if count_fitting(node.total, dict(needs))}
            self._excluded[needs] = frozenset(fitting | self._lost.keys())
        return self._excluded[needs]

    def schedulability(self, needs: Needs) -> Schedulability:
        if needs not in self._schedulability:
            self._schedulability[needs] = self._judge(dict(needs))
        return self._schedulability[needs]

    def _judge(self, needs: Resources) -> Schedulability:
        fitting = {node_id for node_id, node in self.alive.items() if count_fitting(node.total, needs)}
        candidates = {node_id for node_id in fitting - self._avoided.keys() if self._is_admitted(self.alive[node_id])}
        if candidates - self._unusable.keys():
            return Schedulability.FITS
        if candidates:
            # If other nodes can run our tasks, the dispatcher continues, and tasks that fit only these wait.
            admitted = {node_id for node_id, node in self.alive.items() if self._is_admitted(node)}
            return Schedulability.NOT_NOW if admitted - self._unusable.keys() else Schedulability.NO_USABLE_NODE
        if self.offer is None:
            return Schedulability.NOT_NOW if fitting else Schedulability.MAY_FIT_AFTER_GROWTH
        return Schedulability.NEVER if self.offer.lacking(needs) else Schedulability.NOT_NOW

    def unusable_reason(self) -> str:
        return next((unusable.reason for unusable in self._unusable.values()), "")

    def report(self) -> list[AliveNode | DeadNode]:
        """The nodes as the database records them."""
        alive = [
            AliveNode(
                self._worker_id(node),
                node.node_id,
                node.total,
                node.used,
                slots=max(1, self._count_tasks(node)),
                host=node.address,
                is_managed=self._spawned_worker_id(node) is not None,
            )
            for node in self.alive.values()
            if self._serves_fleet(node)
        ]
        live_workers = {node.worker_id for node in alive}
        return alive + [
            DeadNode(self._worker_id(node), node.node_id, node.death_reason or "declared dead by Ray")
            for node in self._dead.values()
            if self._worker_id(node) not in live_workers
        ]

    def _is_admitted(self, node: ClusterNode) -> bool:
        return self._serves_fleet(node) and self._worker_id(node) not in self._barred_workers

    def _serves_fleet(self, node: ClusterNode) -> bool:
        """An external node that can hold no task of our queues (a head without CPUs) is not a worker of the fleet."""
        return self._spawned_worker_id(node) is not None or self._count_tasks(node) > 0

    def _count_tasks(self, node: ClusterNode) -> int:
        """Tasks that the node can hold: default tasks of the fleet, or if those do not fit, tasks of its queues."""
        default = count_fitting(node.total, self.settings.as_resources())
        return default or max(count_fitting(node.total, dict(kind)) for kind in self.settings.classes(self.queues))

    def _worker_id(self, node: ClusterNode) -> str:
        # The id contains the fleet: fleets that share a cluster have one row each for a node, with their own tasks.
        return self._spawned_worker_id(node) or to_label_value(f"ray-{self.fleet}-{node.node_id[:16]}")

    def _spawned_worker_id(self, node: ClusterNode) -> str | None:
        """The worker for which this fleet spawned the node. None for external nodes and those of other fleets."""
        is_ours = node.labels.get(FLEET_LABEL) == to_label_value(self.fleet)
        return node.labels.get(WORKER_LABEL) if is_ours else None
