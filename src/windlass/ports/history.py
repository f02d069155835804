"""Reads what simulations need of the past.

The contract:
- A finished task is part of the history from its end until `retention.history_s` after its arrival, whether its row
  still exists or not, and exactly once.
- Both methods read at most `limit` tasks or machines: the newest.
- Raises DatabaseUnavailable when no answer came.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Protocol

from windlass.model.history import MachineRecord, TaskHistory
from windlass.ports.clock import DatabaseClock


class HistoryStore(DatabaseClock, Protocol):
    async def task_history(self, queues: Sequence[str], since: datetime, until: datetime, limit: int) -> TaskHistory:
        """Tasks of these queues that arrived in this time and have ended, in the order of their arrival."""

    async def machine_history(self, fleet: str, since: datetime, until: datetime, limit: int) -> list[MachineRecord]:
        """Machines of a fleet that were requested in this time, newest first."""
