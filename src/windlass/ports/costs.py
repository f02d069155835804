"""The ledger for people: settled costs and open accounts. cost/report.py adds them up."""

from datetime import datetime
from typing import Protocol

from windlass.model.cost import BillingAccount, Charge, Cost, VolumeCost


class CostStore(Protocol):
    async def costs(self, by: str, since: datetime, *, fleet: str | None = None, limit: int = 1000) -> list[Cost]:
        """Settled cost of time that began since then, by day, fleet, queue, worker or task.

        Days newest first; everything else most expensive first.
        """

    async def spread_costs(self, since: datetime, *, fleet: str | None = None, limit: int = 1000) -> list[Cost]:
        """Settled cost by task, most expensive first. Boot, idle and tail of each billing period of a worker are spread
        over the tasks of that period, so the sum is the bill. A period without a task has no key."""

    async def volume_costs(self, since: datetime, *, fleet: str | None = None) -> list[VolumeCost]:
        """What each shared volume cost since then. With `fleet`, those that it uses, at their whole cost."""

    async def charges_of_task(self, task_id: int) -> list[Charge]:
        """Settled charges of a task, oldest first."""

    async def open_accounts(self, *, fleet: str | None = None, worker_id: str | None = None) -> list[BillingAccount]:
        """Accounts that are not settled to their end, oldest first."""
