"""What people ask about money: what is settled, and the accounts that are not. cost/report.py adds it up."""

from datetime import datetime
from typing import Protocol

from windlass.model.cost import BillingAccount, Charge, Cost


class Costs(Protocol):
    async def costs(self, by: str, since: datetime, *, fleet: str | None = None, limit: int = 1000) -> list[Cost]:
        """What is in the ledger for time that began since then, by day, fleet, queue, worker or task.

        Days newest first; everything else dearest first.
        """

    async def charges_of_task(self, task_id: int) -> list[Charge]:
        """What is in the ledger for a task, oldest first."""

    async def open_accounts(self, *, fleet: str | None = None, worker_id: str | None = None) -> list[BillingAccount]:
        """Workers whose bill is not closed, oldest first."""
