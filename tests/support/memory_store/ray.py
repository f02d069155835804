"""The Ray dispatcher's store, in memory. Implements ports/ray.py."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from uuid import UUID

from support.memory_store.control import MemoryLeaseStore
from support.memory_store.tables import Tables
from support.memory_store.transport import MemoryTransport
from support.memory_store.workers import MemoryWorker
from windlass.model.lease import Candidate
from windlass.model.node import AliveNode, DeadNode, NodeState, NodeVerdict, NodeView, Placement
from windlass.model.worker import LIVE, Registration, WorkerKind, WorkerStatus

MISSING_NOTE = "no longer in the Ray cluster"


class MemoryRayStore(MemoryLeaseStore):
    def __init__(self, tables: Tables) -> None:
        super().__init__(tables)
        self._transport = MemoryTransport(tables)

    async def take_over_nodes(self, candidate: Candidate, term: int, fleet: str) -> int:
        self._tables.leases.require(candidate, term)
        workers = self._workers.not_terminated.values()
        dispatchers = [w for w in workers if (w.fleet, w.kind) == (fleet, WorkerKind.DISPATCHER)]
        reason = "its dispatcher was lost"
        nodes = self._workers.nodes_of(fleet)
        taken = sum(self._tables.requeue_tasks_of(node.id, "DISPATCHER_LOST", reason) for node in nodes)
        for dispatcher in dispatchers:
            taken += len(self._tasks.running[dispatcher.id])
            await self._transport.deregister(dispatcher.id, "replaced by another dispatcher")
        return taken

    async def place(self, placements: Sequence[Placement]) -> dict[UUID, NodeVerdict]:
        return {placement.token: self._place(placement) for placement in placements}

    def _place(self, placement: Placement) -> NodeVerdict:
        node = self._workers.get(placement.worker_id)
        if node is None or not node.is_staying or node.kind is not WorkerKind.NODE or node.is_paused:
            return NodeVerdict.BARRED
        row = self._tasks.held(placement.task_id, placement.token)
        if row is None or row.worker_id is None:
            return NodeVerdict.LOST
        now = self._clock()
        if row.worker_id != node.id:
            self._tasks.hand_over(row, node.id, now)
        if node.first_claimed_at is None:
            node.first_claimed_at = now
            self._tables.promote(node, "started its first task")
        return NodeVerdict.PLACED

    async def report_nodes(
        self,
        candidate: Candidate,
        term: int,
        fleet: str,
        queues: Sequence[str],
        lease_s: float,
        nodes: Sequence[AliveNode | DeadNode],
    ) -> dict[str, bool]:
        self._tables.leases.require(candidate, term)
        alive = {node.worker_id: node for node in nodes if isinstance(node, AliveNode)}
        deaths = {node.worker_id: node for node in nodes if isinstance(node, DeadNode)}
        self._tables.fleet(fleet)
        for node in alive.values():
            if not node.is_managed:
                await self._register_unmanaged_node(node, fleet, queues, lease_s)
        for worker in self._live_nodes(fleet):
            if worker.slot is None and worker.id not in alive:
                self._end_unmanaged(worker, deaths[worker.id].death if worker.id in deaths else MISSING_NOTE)
        for worker in self._live_nodes(fleet):
            self._record_node(worker, alive.get(worker.id), deaths.get(worker.id), timedelta(seconds=lease_s / 6))
        ending = (WorkerStatus.TERMINATING, WorkerStatus.ERROR)
        return {
            worker.id: worker.status in ending
            for worker in self._workers.nodes_of(fleet)
            if worker.status in ending or worker.is_paused
        }

    def _record_node(
        self, worker: MemoryWorker, alive: AliveNode | None, dead: DeadNode | None, repeat: timedelta
    ) -> None:
        before, after = worker.node, self._node_view(worker, alive, dead)
        is_unchanged = before is not None and replace(after, at=before.at) == before and after.at - before.at < repeat
        if is_unchanged and (alive is None or alive.slots == worker.concurrency):
            return
        worker.node = after
        if alive is not None:
            worker.concurrency = alive.slots
            if not alive.is_managed:
                worker.last_heartbeat = after.at
                worker.heartbeat_gapless_since = worker.heartbeat_gapless_since or after.at

    def _live_nodes(self, fleet: str) -> list[MemoryWorker]:
        nodes = sorted(self._workers.nodes_of(fleet), key=lambda worker: worker.id)
        return [node for node in nodes if node.status in LIVE]

    async def _register_unmanaged_node(
        self, node: AliveNode, fleet: str, queues: Sequence[str], lease_s: float
    ) -> None:
        ended = self._workers.terminated.get(node.worker_id)
        if ended is not None and ended.kind is WorkerKind.NODE and ended.slot is None:
            self._workers.forget(ended)
        if node.worker_id not in self._workers.rows:
            queues = tuple(queues)
            await self._transport.register(
                Registration(node.worker_id, queues, fleet, node.slots, lease_s, node.host, kind=WorkerKind.NODE)
            )

    def _end_unmanaged(self, worker: MemoryWorker, death: str) -> None:
        self._tables.requeue_tasks_of(worker.id, "NODE_DEAD", f"node {worker.id}: {death}")
        worker.code, worker.reason = "NODE_DEAD", death
        self._tables.terminate(worker)
        self._add_event("NODE_DEAD", death, fleet=worker.fleet, worker_id=worker.id)

    def _node_view(self, worker: MemoryWorker, alive: AliveNode | None, dead: DeadNode | None) -> NodeView:
        now, before = self._clock(), worker.node

        def since(state: NodeState) -> tuple[NodeState, datetime, datetime]:
            return state, before.since if before is not None and before.state is state else now, now

        if alive is not None:
            return NodeView(*since(NodeState.ALIVE), alive.node_id, dict(alive.total), dict(alive.used))
        was_present = before is not None and before.state is not NodeState.ABSENT
        if dead is None and not was_present:
            return NodeView(*since(NodeState.ABSENT))
        node_id = dead.node_id if dead is not None else before.node_id if before is not None else None
        note = dead.death if dead is not None else (before.note if before is not None else None) or MISSING_NOTE
        return NodeView(*since(NodeState.DEAD), node_id, note=note)
