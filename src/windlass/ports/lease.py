"""Leases: acquire, renew, release.

The contract: a lease has one holder at a time. A new holder gets a higher term. Renewal keeps the term.
"""

from typing import Protocol

from windlass.model.lease import Candidate, Standby


class LeaseStore(Protocol):
    async def acquire_lease(self, candidate: Candidate) -> int | Standby:
        """Acquire or renew the lease. Returns its term, or Standby if another process holds it."""

    async def release_lease(self, candidate: Candidate) -> None:
        """End the lease at once if the candidate holds it."""
