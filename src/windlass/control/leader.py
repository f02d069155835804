"""One leader per database, by a lease row.

A holder may act until `call_started + ttl - margin` on its own monotonic clock, never longer: a slow but successful
renewal does not stretch its trust. Every intent checks the term inside its own transaction, so even a holder that is
wrong about its trust cannot write. Losing the database means losing the lease.
"""

import asyncio
import os
import secrets
import socket
from dataclasses import dataclass

from windlass.ports.control import Candidate

# Of the lease, what is left out at its end: for clocks that drift and for a provider call that is just starting.
MARGIN_SHARE = 0.2


def holder_of_this_process() -> str:
    """A name for it in leases that nobody else has, and by which a person finds it."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


@dataclass(slots=True)
class LeaseGuard:
    """For how long we may believe that we lead."""

    candidate: Candidate
    _until: float = float("-inf")

    def renewed(self, call_started: float) -> None:
        """`call_started`: the loop's time before the call that took or renewed the lease."""
        self._until = call_started + self.candidate.ttl_s * (1.0 - MARGIN_SHARE)

    def lost(self) -> None:
        self._until = float("-inf")

    @property
    def until(self) -> float:
        """By the loop's clock."""
        return self._until

    @property
    def is_valid(self) -> bool:
        return asyncio.get_running_loop().time() < self._until

    @property
    def remaining_s(self) -> float:
        return max(0.0, self._until - asyncio.get_running_loop().time())
