"""What a dispatcher does, in memory: the contract of PostgresEngineStore without PostgreSQL.

migrations/0008_ray.sql says what is right; tests/conformance/test_engine_store.py runs over both.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING
from uuid import UUID

from windlass.model.node import AliveNode, DeadNode, NodeState, NodeView, Placement, Verdict, dispatcher_lease
from windlass.model.worker import LIVE, Registration, WorkerKind, WorkerStatus
from windlass.ports.control import Candidate
from windlass.store.memory import _WorkerRow
from windlass.store.memory_control import MemoryControlStore

if TYPE_CHECKING:
    from windlass.ports.engine import EngineStore

GONE = "it is no longer in the cluster"


class MemoryEngineStore(MemoryControlStore):
    async def take_over_nodes(self, candidate: Candidate, term: int, fleet: str) -> int:
        self._require_lease(candidate, term)
        own = [worker for worker in self._not_terminated.values() if worker.fleet == fleet]
        reason = "the dispatcher that had placed it was lost"
        taken = sum(
            self._requeue_tasks_of(worker.id, "DISPATCHER_LOST", reason)
            for worker in own
            if worker.kind is WorkerKind.NODE
        )
        for worker in own:
            if worker.kind is WorkerKind.DISPATCHER:
                taken += len(self._held_in_order(worker.id))
                await self.leave(worker.id, "another dispatcher took its place")
        return taken

    async def place(self, placements: Sequence[Placement]) -> dict[UUID, Verdict]:
        return {placement.token: self._place(placement) for placement in placements}

    def _place(self, placement: Placement) -> Verdict:
        node = self._in(placement.worker_id, WorkerStatus.SPAWNING, WorkerStatus.ACTIVE)
        if node is None or node.kind is not WorkerKind.NODE or node.is_paused:
            return Verdict.BARRED
        row = self._tasks.get(placement.task_id)
        if row is None or not row.is_held_by(placement.token) or row.worker_id is None:
            return Verdict.LOST
        now = self._clock()
        if row.worker_id != node.id:
            del self._running[row.worker_id][row.id]
            self._running[node.id][row.id] = row
            row.worker_id, row.started_at = node.id, now
        if node.first_claimed_at is None:
            node.first_claimed_at = now
        return Verdict.PLACED

    async def report_nodes(
        self,
        candidate: Candidate,
        term: int,
        fleet: str,
        queues: Sequence[str],
        lease_s: float,
        nodes: Sequence[AliveNode | DeadNode],
    ) -> dict[str, bool]:
        self._require_lease(candidate, term)
        alive = {node.worker_id: node for node in nodes if isinstance(node, AliveNode)}
        deaths = {node.worker_id: node for node in nodes if isinstance(node, DeadNode)}
        self._fleet_row(fleet)
        for node in alive.values():
            if not node.is_hired:
                await self._hear_of(node, fleet, queues, lease_s)
        for worker in self._nodes(fleet):
            if worker.slot is None and worker.id not in alive:
                self._end_foreign(worker, deaths[worker.id].death if worker.id in deaths else GONE)
        for worker in self._nodes(fleet):
            self._write_news(worker, alive.get(worker.id), deaths.get(worker.id), timedelta(seconds=lease_s / 6))
        over = (WorkerStatus.TERMINATING, WorkerStatus.ERROR)
        return {
            worker.id: worker.status in over
            for worker in self._not_terminated.values()
            if (worker.fleet, worker.kind) == (fleet, WorkerKind.NODE) and (worker.status in over or worker.is_paused)
        }

    def _write_news(
        self, worker: _WorkerRow, alive: AliveNode | None, dead: DeadNode | None, repeat: timedelta
    ) -> None:
        before, said = worker.node, self._said_of(worker, alive, dead)
        is_known = before is not None and replace(said, at=before.at) == before and said.at - before.at < repeat
        if is_known and (alive is None or alive.places == worker.concurrency):
            return
        worker.node = said
        if alive is not None:
            worker.concurrency = alive.places
            if not alive.is_hired:
                worker.last_heartbeat = said.at
                worker.heartbeat_gapless_since = worker.heartbeat_gapless_since or said.at

    def _nodes(self, fleet: str) -> list[_WorkerRow]:
        workers = sorted(self._not_terminated.values(), key=lambda worker: worker.id)
        return [w for w in workers if (w.fleet, w.kind) == (fleet, WorkerKind.NODE) and w.status in LIVE]

    async def _hear_of(self, node: AliveNode, fleet: str, queues: Sequence[str], lease_s: float) -> None:
        ended = self._terminated.get(node.worker_id)
        if ended is not None and ended.kind is WorkerKind.NODE and ended.slot is None:
            del self._terminated[ended.id], self._workers[ended.id]
        if node.worker_id not in self._workers:
            queues = tuple(queues)
            await self.register(
                Registration(node.worker_id, queues, fleet, node.places, lease_s, node.host, kind=WorkerKind.NODE)
            )

    def _end_foreign(self, worker: _WorkerRow, death: str) -> None:
        self._requeue_tasks_of(worker.id, "NODE_DEAD", f"node {worker.id}: {death}")
        worker.code, worker.reason = "NODE_DEAD", death
        self._terminate(worker)
        self._note("NODE_DEAD", death, fleet=worker.fleet, worker_id=worker.id)

    def _said_of(self, worker: _WorkerRow, alive: AliveNode | None, dead: DeadNode | None) -> NodeView:
        now, before = self._clock(), worker.node

        def since(state: NodeState) -> tuple[NodeState, "datetime", "datetime"]:
            return state, before.since if before is not None and before.state is state else now, now

        if alive is not None:
            return NodeView(*since(NodeState.ALIVE), alive.node_id, dict(alive.total), dict(alive.used))
        was_there = before is not None and before.state is not NodeState.ABSENT
        if dead is None and not was_there:
            return NodeView(*since(NodeState.ABSENT))
        node_id = dead.node_id if dead is not None else before.node_id if before is not None else None
        note = dead.death if dead is not None else (before.note if before is not None else None) or GONE
        return NodeView(*since(NodeState.DEAD), node_id, note=note)

    def _lost_with(self, worker: _WorkerRow) -> list[str]:
        lease = self._leases.get(dispatcher_lease(worker.fleet))
        return [] if lease is not None and lease.expires_at > self._clock() else super()._lost_with(worker)


if TYPE_CHECKING:
    from datetime import datetime

    # mypy compares every signature with the contract's.
    _: type[EngineStore] = MemoryEngineStore
