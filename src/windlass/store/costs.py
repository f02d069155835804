"""The ledger over PostgreSQL: what was settled, and the accounts that are open. Implements ports/costs.py."""

from datetime import datetime
from typing import Any

from windlass.model.cost import Bill, BillingAccount, Charge, ChargeKind, Cost, Span, Tariff, VolumeCost
from windlass.store.database import Database, DatabaseStore
from windlass.store.queries import read_queries
from windlass.store.rows import price_parts_of

QUERIES = read_queries("windlass.store", "control_queries.sql")
# Accounts that can be open at the same time: one per existing worker, and those that ended a minute ago.
MAX_OPEN_ACCOUNTS = 10_000


class PostgresCostStore(DatabaseStore):
    async def costs(self, by: str, since: datetime, *, fleet: str | None = None, limit: int = 1000) -> list[Cost]:
        query = QUERIES["costs_from_spending" if by in ("day", "fleet", "queue") else "costs_from_charges"]
        rows = await self._database.fetch("reading costs", query, by, since, fleet, limit)
        return [Cost(**dict(row)) for row in rows]

    async def spread_costs(self, since: datetime, *, fleet: str | None = None, limit: int = 1000) -> list[Cost]:
        rows = await self._database.fetch("reading costs", QUERIES["costs_spread"], since, fleet, limit)
        return [Cost(**dict(row)) for row in rows]

    async def volume_costs(self, since: datetime, *, fleet: str | None = None) -> list[VolumeCost]:
        rows = await self._database.fetch("reading costs of volumes", QUERIES["volume_costs"], since, fleet)
        return [VolumeCost(**{**row, "fleets": tuple(row["fleets"])}) for row in rows]

    async def charges_of_task(self, task_id: int) -> list[Charge]:
        rows = await self._database.fetch("reading a task's cost", QUERIES["charges_of_task"], task_id)
        return [Charge(**{**row, "kind": ChargeKind(row["kind"])}) for row in rows]

    async def open_accounts(self, *, fleet: str | None = None, worker_id: str | None = None) -> list[BillingAccount]:
        return await read_accounts(self._database, fleet, worker_id, MAX_OPEN_ACCOUNTS, is_due=False)


async def read_accounts(
    database: Database, fleet: str | None, worker_id: str | None, limit: int, *, is_due: bool
) -> list[BillingAccount]:
    """`is_due`: only accounts that are due for settlement, longest due first. Otherwise all, oldest first."""
    function = "windlass_internal.open_accounts"
    rows = await database.call_rows("reading open accounts", function, fleet, worker_id, is_due, limit)
    return [_account(row) for row in rows]


def _account(row: Any) -> BillingAccount:
    tariff = Tariff(row["price_micros_per_hour"], row["currency"], row["unit_s"], price_parts_of(row["price_parts"]))
    spans = zip(row["task_ids"] or (), row["queues"] or (), row["begun"] or (), row["ended"] or (), strict=True)
    return BillingAccount(
        row["worker_id"],
        row["fleet"],
        Bill(tariff, row["since"], row["until"], row["settled_until"]),
        row["ready_at"],
        tuple(Span(*span) for span in spans),
    )
