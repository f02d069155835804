"""Leases: one holder per lease at a time, each tenure with its own term.

A holder may act until `call_started + ttl - margin` on its own monotonic clock. A slow but successful renewal does not
extend that time. Every write of a holder checks the term inside its own transaction, so a holder that wrongly believes
it still holds the lease cannot write. Losing the database means losing the lease.
"""

import asyncio
import os
import re
import secrets
import socket
from dataclasses import dataclass
from datetime import datetime

from windlass.model.errors import WindlassError

# Share of the lease that the holder does not use: room for clock drift and for a provider call that is just starting.
MARGIN_SHARE = 0.2


class LeaseLost(WindlassError):
    """Another process holds the lease now. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A process that wants a lease, and the time for which each renewal is valid."""

    holder: str
    ttl_s: float
    lease: str = "orchestrator"


@dataclass(frozen=True, slots=True)
class Standby:
    """Another process holds the lease, for at least `expires_in_s` unless it releases it.

    `at` is the database time of this answer; None if the database was not asked. `holder` is known with it.
    """

    expires_in_s: float
    at: datetime | None = None
    holder: str | None = None


def holder_of_this_process() -> str:
    """A unique holder name for this process, from which it can be found: host, pid and a random suffix."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


def process_of_holder(holder: str) -> tuple[str, int] | None:
    """Host and pid, for a name that holder_of_this_process() made."""
    found = re.fullmatch(r"(.+)-([0-9]{1,10})-[0-9a-f]+", holder)
    return (found[1], int(found[2])) if found is not None else None


def described_holder(holder: str | None) -> str:
    """The process that holds a lease, in the words of messages."""
    process = process_of_holder(holder) if holder is not None else None
    return f"pid {process[1]} on host {process[0]}" if process is not None else "another orchestrator"


@dataclass(slots=True)
class LeaseGuard:
    """Tracks for how long this process may act as the holder, by the event loop's clock."""

    candidate: Candidate
    _until: float = float("-inf")

    def renewed(self, call_started: float) -> None:
        """`call_started`: the loop's time before the call that acquired or renewed the lease."""
        self._until = call_started + self.candidate.ttl_s * (1.0 - MARGIN_SHARE)

    def lost(self) -> None:
        self._until = float("-inf")

    @property
    def until(self) -> float:
        return self._until

    @property
    def is_valid(self) -> bool:
        return asyncio.get_running_loop().time() < self._until

    @property
    def remaining_s(self) -> float:
        return max(0.0, self._until - asyncio.get_running_loop().time())
