"""What a dispatcher needs from the store beyond a worker's part: to be the only one, to place, to tell of nodes.

The contract:
- One dispatcher of a fleet acts: `take_over_nodes` and `report_nodes` of one whose lease is gone raise LeaseLost and
  change nothing. Placing needs no lease: the claim token is right enough.
- After `take_over_nodes` no task of the fleet runs in the name of a node or of an earlier dispatcher.
- A task that is placed belongs to its node: it is requeued when that node is lost or ended, and its time counts from
  there. A node that ends, or is paused, gets no more.
"""

from collections.abc import Sequence
from typing import Protocol
from uuid import UUID

from windlass.model.lease import Candidate, Standby
from windlass.model.node import AliveNode, DeadNode, NodeVerdict, Placement
from windlass.ports.transport import WorkerTransport


class RayStore(WorkerTransport, Protocol):
    async def acquire_lease(self, candidate: Candidate) -> int | Standby: ...

    async def release_lease(self, candidate: Candidate) -> None: ...

    async def take_over_nodes(self, candidate: Candidate, term: int, fleet: str) -> int:
        """Take back what earlier dispatchers claimed and placed. Returns how many tasks. Raises LeaseLost."""

    async def place(self, placements: Sequence[Placement]) -> dict[UUID, NodeVerdict]:
        """These attempts are about to start: from here on they are their nodes'. By token."""

    async def report_nodes(
        self,
        candidate: Candidate,
        term: int,
        fleet: str,
        queues: Sequence[str],
        lease_s: float,
        nodes: Sequence[AliveNode | DeadNode],
    ) -> dict[str, bool]:
        """What the engine says of the fleet's nodes; who is not named is not there. Raises LeaseLost.

        Returns the workers that get no more tasks: True for one that ends, False for one that is paused.
        """
