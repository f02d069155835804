"""The Ray dispatcher's store: take over a fleet's nodes, place tasks on them, report them.

The contract:
- One dispatcher of a fleet acts at a time: `take_over_nodes` and `report_nodes` raise LeaseLost and change nothing if
  the caller's lease is gone. Placing needs no lease: the claim token is enough.
- After `take_over_nodes` no task of the fleet runs on a node or under an earlier dispatcher.
- A placed task belongs to its node: it is requeued when the node dies or terminates, and its running time starts with
  the placement. A node that terminates or is paused gets no more tasks.
"""

from collections.abc import Sequence
from typing import Protocol
from uuid import UUID

from windlass.model.lease import Candidate
from windlass.model.node import AliveNode, DeadNode, NodeVerdict, Placement
from windlass.ports.lease import LeaseStore


class RayStore(LeaseStore, Protocol):
    async def take_over_nodes(self, candidate: Candidate, term: int, fleet: str) -> int:
        """Requeue what earlier dispatchers claimed and placed. Returns how many tasks. Raises LeaseLost."""

    async def place(self, placements: Sequence[Placement]) -> dict[UUID, NodeVerdict]:
        """Assign claimed tasks to the nodes on which they are about to start. Returns the verdict by claim token."""

    async def report_nodes(
        self,
        candidate: Candidate,
        term: int,
        fleet: str,
        queues: Sequence[str],
        lease_s: float,
        nodes: Sequence[AliveNode | DeadNode],
    ) -> dict[str, bool]:
        """Record Ray's view of the fleet's nodes; an unnamed node is absent. Raises LeaseLost.

        Returns the workers that get no more tasks: True for one that terminates, False for one that is paused.
        """
