"""The ledger for people: settled costs and open accounts. cost/report.py adds them up."""

from datetime import datetime
from typing import Protocol

from windlass.model.cost import BillingAccount, Charge, Cost


class CostStore(Protocol):
    async def costs(self, by: str, since: datetime, *, fleet: str | None = None, limit: int = 1000) -> list[Cost]:
        """Settled cost of time that began since then, by day, fleet, queue, worker or task.

        Days newest first; everything else most expensive first.
        """

    async def charges_of_task(self, task_id: int) -> list[Charge]:
        """Settled charges of a task, oldest first."""

    async def open_accounts(self, *, fleet: str | None = None, worker_id: str | None = None) -> list[BillingAccount]:
        """Accounts that are not settled to their end, oldest first."""
