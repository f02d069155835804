"""What a dispatcher does, over PostgreSQL: the functions of migrations/0008_ray.sql.

store/memory/ray.py keeps the same contract; tests/conformance/test_engine_store.py runs over both.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING
from uuid import UUID

import asyncpg

from windlass.model.lease import Candidate, LeaseLost
from windlass.model.node import AliveNode, DeadNode, NodeVerdict, Placement
from windlass.store.control import PostgresControlStore

if TYPE_CHECKING:
    from windlass.ports.ray import RayStore


class PostgresRayStore(PostgresControlStore):
    async def take_over_nodes(self, candidate: Candidate, term: int, fleet: str) -> int:
        try:
            async with self._connection("taking a fleet's nodes over") as connection:
                return int(
                    await connection.fetchval(
                        "select windlass_internal.take_over_nodes($1, $2, $3)", candidate.holder, term, fleet
                    )
                )
        except asyncpg.ObjectNotInPrerequisiteStateError as error:
            raise LeaseLost(str(error)) from None

    async def place(self, placements: Sequence[Placement]) -> dict[UUID, NodeVerdict]:
        async with self._connection("placing tasks") as connection:
            rows = await connection.fetch(
                "select * from windlass_internal.place_tasks($1, $2, $3)",
                [placement.task_id for placement in placements],
                [placement.token for placement in placements],
                [placement.worker_id for placement in placements],
            )
        # asyncpg has a class of its own for these, which compares slowly.
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
        plain = json.dumps([asdict(node) for node in nodes])
        try:
            async with self._connection("telling of nodes") as connection:
                rows = await connection.fetch(
                    "select * from windlass_internal.report_nodes($1, $2, $3, $4, $5, $6)",
                    candidate.holder,
                    term,
                    fleet,
                    list(queues),
                    lease_s,
                    plain,
                )
        except asyncpg.ObjectNotInPrerequisiteStateError as error:
            raise LeaseLost(str(error)) from None
        return {row["worker_id"]: row["is_ending"] for row in rows}


if TYPE_CHECKING:
    # mypy compares every signature with the contract's.
    _: type[RayStore] = PostgresRayStore
