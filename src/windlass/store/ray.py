"""The Ray dispatcher's store over PostgreSQL. Implements ports/ray.py.

store/memory/ray.py has the same contract; tests/conformance/test_ray_store.py runs over both.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING
from uuid import UUID

from windlass.model.lease import Candidate
from windlass.model.node import AliveNode, DeadNode, NodeVerdict, Placement
from windlass.store.leases import PostgresLeaseStore, lease_required

if TYPE_CHECKING:
    from windlass.ports.ray import RayStore


class PostgresRayStore(PostgresLeaseStore):
    async def take_over_nodes(self, candidate: Candidate, term: int, fleet: str) -> int:
        with lease_required():
            return int(
                await self._database.fetchval(
                    "taking over a fleet's nodes",
                    "select windlass_internal.take_over_nodes($1, $2, $3)",
                    candidate.holder,
                    term,
                    fleet,
                )
            )

    async def place(self, placements: Sequence[Placement]) -> dict[UUID, NodeVerdict]:
        rows = await self._database.fetch(
            "placing tasks",
            "select * from windlass_internal.place_tasks($1, $2, $3)",
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
            rows = await self._database.fetch(
                "reporting nodes",
                "select * from windlass_internal.report_nodes($1, $2, $3, $4, $5, $6)",
                candidate.holder,
                term,
                fleet,
                list(queues),
                lease_s,
                json.dumps([asdict(node) for node in nodes]),
            )
        return {row["worker_id"]: row["is_ending"] for row in rows}


if TYPE_CHECKING:
    # mypy compares every signature with the port's.
    _: type[RayStore] = PostgresRayStore
