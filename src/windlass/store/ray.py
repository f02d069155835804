"""The Ray dispatcher's store over PostgreSQL. Implements ports/ray.py.

store/memory/ray.py has the same contract; tests/conformance/test_ray_store.py runs over both.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from uuid import UUID

from windlass.model.lease import Candidate
from windlass.model.node import AliveNode, DeadNode, NodeVerdict, Placement
from windlass.store.leases import PostgresLeaseStore, lease_required


class PostgresRayStore(PostgresLeaseStore):
    async def take_over_nodes(self, candidate: Candidate, term: int, fleet: str) -> int:
        with lease_required():
            function = "windlass_internal.take_over_nodes"
            return int(await self._database.call("taking over nodes", function, candidate.holder, term, fleet))

    async def place(self, placements: Sequence[Placement]) -> dict[UUID, NodeVerdict]:
        rows = await self._database.call_rows(
            "placing tasks",
            "windlass_internal.place_tasks",
            [placement.task_id for placement in placements],
            [placement.token for placement in placements],
            [placement.worker_id for placement in placements],
        )
        # asyncpg returns its own UUID class, which compares slowly.
        return {UUID(int=row["token"].int): NodeVerdict(row["outcome"]) for row in rows}

    async def report_nodes(
        self,
        candidate: Candidate,
        term: int,
        fleet: str,
        queues: Sequence[str],
        lease_s: float,
        nodes: Sequence[AliveNode | DeadNode],
    ) -> dict[str, bool]:
        with lease_required():
            plain = json.dumps([asdict(node) for node in nodes])
            arguments = (candidate.holder, term, fleet, list(queues), lease_s, plain)
            rows = await self._database.call_rows("reporting nodes", "windlass_internal.report_nodes", *arguments)
        return {row["worker_id"]: row["is_ending"] for row in rows}
