"""Ray's nodes of a fleet, as last seen: whose worker each is, which get tasks, what a task may expect of them.

A node gets tasks ("open") if it is alive, can hold tasks of the fleet, is not ending or paused (also if only the
database knows so yet), and has not refused one lately for want of our program, the handler or the command.
"""

import enum
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from windlass.model.node import AliveNode, DeadNode, Resources
from windlass.model.ray import RaySettings
from windlass.ray.capacity import Needs, NodeCapacity, places
from windlass.ray.cluster import FLEET_LABEL, WORKER_LABEL, ClusterNode, label_value

# The least of so many looks: what others use of a node for long, and not the moment between two of our own tasks.
LOOKS_REMEMBERED = 3
# A node that lacked something is tried again after this: somebody may have installed it.
REFUSAL_S = 60.0
# One that the database would not have a task placed on: what we know of the nodes is newer by then.
AVOIDANCE_S = 1.0
# Ray may try for about a minute to reach a node that was cut off, also for tasks that could run elsewhere. Those that
# are submitted with other wishes than before it does not line up behind them.
LOST_S = 120.0


class Schedulability(enum.Enum):
    """What a task that waits for a place may expect."""

    FITS = "an open node could hold it"
    AWAITED = "none could, but the cluster is not ours and may grow"
    LATER = "no open node could hold it now"
    REFUSED = "no node of the fleet can run our tasks"
    NEVER = "it needs more than any node of the fleet has"


@dataclass(frozen=True, slots=True)
class _Refusal:
    why: str
    until: float


@dataclass(slots=True)
class NodeReporter:
    """`offer`: what each hired node is started with; None for a cluster that is not ours, whose nodes are all used."""

    fleet: str
    settings: RaySettings
    queues: tuple[str, ...]
    offer: RaySettings | None
    clock: Callable[[], float] = time.monotonic
    alive: dict[str, ClusterNode] = field(default_factory=dict)
    _dead: dict[str, ClusterNode] = field(default_factory=dict)
    # Worker ids that get no more tasks.
    _barred: set[str] = field(default_factory=set)
    _refusals: dict[str, _Refusal] = field(default_factory=dict)
    # Node ids, and until when.
    _avoided: dict[str, float] = field(default_factory=dict)
    # Until when they are kept in mind.
    _lost: dict[str, float] = field(default_factory=dict)
    _looks: dict[str, deque[Mapping[str, float]]] = field(default_factory=dict)
    # Of what was seen last; thousands of tasks ask the same.
    _rooms: dict[str, NodeCapacity] | None = None
    _outlooks: dict[Needs, Schedulability] = field(default_factory=dict)
    _closed: dict[Needs, frozenset[str]] = field(default_factory=dict)

    # --------------------------------------------------------------------------------------------- what is learned

    def see(self, nodes: Iterable[ClusterNode], ours: Mapping[str, Resources]) -> bool:
        """`ours`: what our own attempts use of each node. True if nodes were lost that were not to end."""
        before, now = self.alive, self.clock()
        own = [node for node in nodes if self._is_of_fleet(node)]
        self.alive = {node.node_id: node for node in own if node.is_alive}
        self._dead = {node.node_id: node for node in own if not node.is_alive}
        self._looks = {node_id: self._looks.get(node_id, deque(maxlen=LOOKS_REMEMBERED)) for node_id in self.alive}
        for node_id, node in self.alive.items():
            mine = ours.get(node_id, {})
            self._looks[node_id].append(
                {name: max(0.0, used - mine.get(name, 0.0)) for name, used in node.used.items()}
            )
        lost = [node_id for node_id, node in before.items() if node_id not in self.alive and self._is_admitted(node)]
        self._lost = {node_id: until for node_id, until in self._lost.items() if until > now}
        self._lost |= dict.fromkeys(lost, now + LOST_S)
        self._refusals = {
            node_id: refusal
            for node_id, refusal in self._refusals.items()
            if node_id in self.alive and refusal.until > now
        }
        self._avoided = {node_id: until for node_id, until in self._avoided.items() if until > now}
        self._forget()
        return bool(lost)

    def bar(self, worker_ids: Iterable[str]) -> None:
        """Only these get no more tasks."""
        self._barred = set(worker_ids)
        self._forget()

    def refuse(self, node_id: str, why: str) -> bool:
        """A node lacks what it takes to run our tasks. True if that is news."""
        is_news = node_id not in self._refusals
        self._refusals[node_id] = _Refusal(why, self.clock() + REFUSAL_S)
        self._forget()
        return is_news

    def avoid(self, node_id: str) -> None:
        """The database would not have a task placed there."""
        self._avoided[node_id] = self.clock() + AVOIDANCE_S
        self._forget()

    def _forget(self) -> None:
        self._rooms = None
        self._outlooks.clear()
        self._closed.clear()

    # ---------------------------------------------------------------------------------------------- what is asked

    def is_alive(self, node_id: str) -> bool:
        return node_id in self.alive

    def worker_of(self, node_id: str) -> str | None:
        """None: it gets no tasks."""
        return self._worker_id(self.alive[node_id]) if node_id in self.rooms() else None

    def rooms(self) -> dict[str, NodeCapacity]:
        """Of the open ones."""
        if self._rooms is None:
            self._rooms = {
                node_id: NodeCapacity(node.total, _least(self._looks[node_id]))
                for node_id, node in self.alive.items()
                if self._is_admitted(node) and node_id not in self._refusals and node_id not in self._avoided
            }
        return self._rooms

    def closed(self, needs: Needs) -> frozenset[str]:
        """Where Ray could place such a task, or try to, that is not to run there."""
        if needs not in self._closed:
            # Only those that could hold it: on a cluster of thousands that are not for us, each seat would carry them.
            wanted = dict(needs)
            shut = (node_id for node_id in self.alive if node_id not in self.rooms())
            self._closed[needs] = frozenset(
                node_id for node_id in shut if places(self.alive[node_id].total, wanted)
            ).union(self._lost)
        return self._closed[needs]

    def outlook(self, needs: Needs) -> Schedulability:
        if needs not in self._outlooks:
            self._outlooks[needs] = self._look_out(dict(needs))
        return self._outlooks[needs]

    def _look_out(self, needs: Resources) -> Schedulability:
        fitting = {node_id for node_id, node in self.alive.items() if places(node.total, needs)}
        left = {node_id for node_id in fitting - self._avoided.keys() if self._is_admitted(self.alive[node_id])}
        if left - self._refusals.keys():
            return Schedulability.FITS
        if left:
            # Where others run our tasks, these are not the end of it: tasks that only these could hold wait for better.
            admitted = {node_id for node_id, node in self.alive.items() if self._is_admitted(node)}
            return Schedulability.LATER if admitted - self._refusals.keys() else Schedulability.REFUSED
        if self.offer is None:
            return Schedulability.LATER if fitting else Schedulability.AWAITED
        return Schedulability.NEVER if self.offer.lacking(needs) else Schedulability.LATER

    def why_refused(self) -> str:
        return next((refusal.why for refusal in self._refusals.values()), "")

    def report(self) -> list[AliveNode | DeadNode]:
        alive = [
            AliveNode(
                self._worker_id(node),
                node.node_id,
                node.total,
                node.used,
                places=max(1, self._places(node)),
                host=node.address,
                is_managed=self._hired_id(node) is not None,
            )
            for node in self.alive.values()
            if self._serves(node)
        ]
        living = {node.worker_id for node in alive}
        return alive + [
            DeadNode(self._worker_id(node), node.node_id, node.death or "Ray has given it up")
            for node in self._dead.values()
            if self._worker_id(node) not in living
        ]

    def _is_of_fleet(self, node: ClusterNode) -> bool:
        if self.offer is None:
            return True
        return node.labels.get(FLEET_LABEL) == label_value(self.fleet) and WORKER_LABEL in node.labels

    def _is_admitted(self, node: ClusterNode) -> bool:
        return self._serves(node) and self._worker_id(node) not in self._barred

    def _serves(self, node: ClusterNode) -> bool:
        """What can hold no task of any of our queues (a head without CPUs) is no worker of ours."""
        return self._hired_id(node) is not None or self._places(node) > 0

    def _places(self, node: ClusterNode) -> int:
        """Counted by the fleet's usual tasks; where those do not fit, by the ones that do."""
        usual = places(node.total, self.settings.as_resources())
        return usual or max(places(node.total, dict(needs)) for needs in self.settings.classes(self.queues))

    def _worker_id(self, node: ClusterNode) -> str:
        # With the fleet: several may feed the same cluster, and each has its own row of a node, with its own tasks.
        return self._hired_id(node) or label_value(f"ray-{self.fleet}-{node.node_id[:16]}")

    def _hired_id(self, node: ClusterNode) -> str | None:
        """Its worker's, if it was hired for this fleet. One that another fleet hired is a stranger's."""
        is_ours = node.labels.get(FLEET_LABEL) == label_value(self.fleet)
        return node.labels.get(WORKER_LABEL) if is_ours else None


def _least(looks: Iterable[Mapping[str, float]]) -> dict[str, float]:
    seen = list(looks)
    return {name: min(look.get(name, 0.0) for look in seen) for name in seen[0]}
