"""Observes Ray's nodes for a dispatcher: updates the node table and the seat pool, reports to the store, drains nodes.

A head that does not respond for HEAD_TIMEOUT_S ends the dispatcher: what ran may have ended or not, and the next
dispatcher requeues it.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping

import structlog

from windlass.model.errors import DatabaseUnavailable, WindlassError
from windlass.model.fleet import FleetConfig
from windlass.model.lease import LeaseLost
from windlass.ports.ray import RayStore
from windlass.ray.capacity import InFlightKind
from windlass.ray.cluster import WORKER_LABEL, Cluster, ClusterReplaced, ClusterUnavailable
from windlass.ray.dispatcher_lease import DispatcherLease
from windlass.ray.node_table import NodeTable
from windlass.ray.seat_pool import SeatPool

OBSERVATION_INTERVAL_S = 0.5
# Seats that were pending when a node was lost, and still are after this time, may be waiting for that node.
STUCK_SEAT_S = 10.0
# From the first call that the head did not answer.
HEAD_TIMEOUT_S = 10.0
log = structlog.get_logger(__name__)


class HeadLost(WindlassError):
    """The head of the cluster does not respond any longer, or was replaced."""


class NodeWatch:
    def __init__(
        self,
        config: FleetConfig,
        nodes: NodeTable,
        lease: DispatcherLease,
        store: RayStore,
        cluster: Cluster,
        on_new_nodes: Callable[[], None],
    ) -> None:
        self._config = config
        self._nodes = nodes
        self._lease = lease
        self._store = store
        self._cluster = cluster
        self._on_new_nodes = on_new_nodes
        self._head_silent_since: float | None = None
        # Times at which nodes were lost, until the seats pending since then have been replaced.
        self._losses: deque[float] = deque()
        # Ids of nodes that Ray drains.
        self._draining: set[str] = set()

    @property
    def is_head_silent(self) -> bool:
        return self._head_silent_since is not None

    async def run(self, pool: SeatPool) -> None:
        """Raises HeadLost."""
        while True:
            await asyncio.sleep(OBSERVATION_INTERVAL_S)
            await self.observe(pool)

    async def observe(self, pool: SeatPool) -> None:
        """Raises HeadLost."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        try:
            nodes = await self._cluster.list_nodes()
        except ClusterReplaced as error:
            raise HeadLost(str(error)) from error
        except ClusterUnavailable as error:
            self._head_silent_since = self._head_silent_since or now
            log.warning("list nodes failed", fleet=self._nodes.fleet, error=str(error))
            if loop.time() - self._head_silent_since >= HEAD_TIMEOUT_S:
                raise HeadLost(str(error)) from error
            return
        self._head_silent_since = None
        before = set(self._nodes.alive)
        if self._nodes.update(nodes, _sum_usage(pool.in_flight)):
            self._losses.append(now)
        stuck_since = None
        while self._losses and now >= self._losses[0] + STUCK_SEAT_S:
            stuck_since = self._losses.popleft()
        pool.reconcile(stuck_since)
        # The lease may have expired in an outage and still be free. Attempts continue until another holder is known.
        if not self._lease.is_valid or (barred := await self._report()) is None:
            return
        self._nodes.bar_workers(barred)
        if set(self._nodes.alive) - before:
            self._on_new_nodes()
        await self._drain({worker_id for worker_id, is_terminating in barred.items() if is_terminating})

    async def _report(self) -> dict[str, bool] | None:
        """The workers that get no more tasks: True if terminating, False if paused. None: the report failed."""
        config = self._config
        try:
            return await self._store.report_nodes(
                self._lease.candidate,
                self._lease.term,
                self._nodes.fleet,
                config.queues,
                config.heartbeat_timeout_s,
                self._nodes.report(),
            )
        except (DatabaseUnavailable, LeaseLost) as error:
            if isinstance(error, LeaseLost):
                # The call took too long, or another dispatcher has the lease. The next renewal shows which.
                self._lease.invalidate()
            log.warning("report nodes failed", fleet=self._nodes.fleet, error=str(error))
            return None

    async def _drain(self, worker_ids: set[str]) -> None:
        for node_id, node in self._nodes.alive.items():
            worker_id = node.labels.get(WORKER_LABEL)
            if worker_id in worker_ids and node_id not in self._draining:
                log.info("drain node", worker_id=worker_id, node_id=node_id)
                reason = f"worker {worker_id} is terminating"
                try:
                    await self._cluster.drain_node(node_id, reason, self._config.stop_timeout_s)
                except ClusterUnavailable as error:
                    log.warning("drain node failed", worker_id=worker_id, node_id=node_id, error=str(error))
                else:
                    self._draining.add(node_id)
        self._draining &= self._nodes.alive.keys()


def _sum_usage(in_flight: Mapping[InFlightKind, int]) -> dict[str, dict[str, float]]:
    """The resources that attempts use, by node id."""
    usage: dict[str, dict[str, float]] = {}
    for kind, count in in_flight.items():
        if kind.node_id is not None:
            amounts = usage.setdefault(kind.node_id, {})
            for name, amount in kind.needs:
                amounts[name] = amounts.get(name, 0.0) + count * amount
    return usage
