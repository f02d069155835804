"""The database's clock."""

from datetime import datetime
from typing import Protocol


class DatabaseClock(Protocol):
    async def now(self) -> datetime:
        """The database's time: the only time used for leases, ages and bills."""
