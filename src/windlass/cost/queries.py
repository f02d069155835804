"""What people ask about money, answered from the ledger and the accounts that are still open.

What is settled is exact. What is not (the last hour or so of workers that are there) is estimated, and says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from windlass.cost.ledger import estimate
from windlass.cost.report import By, Forecast, add_up, forecasts, merged, total
from windlass.model.cost import BillingAccount, Cost, hour_of, month_of
from windlass.ports.costs import CostStore

MAX_ROWS = 100_000
# What is not settled may move somebody up among those shown, from as far down as this.
ROWS_TO_CHOOSE_FROM = 1_000


@dataclass(frozen=True, slots=True)
class CostReport:
    by: By
    since: datetime
    costs: list[Cost]
    total: list[Cost]
    forecasts: list[Forecast]


@dataclass(frozen=True, slots=True)
class CostReportInputs:
    """One look at the ledger, from as many sides as were asked for."""

    since: datetime
    costs: Mapping[By, list[Cost]]
    total: list[Cost]
    forecasts: list[Forecast]
    # All that are not closed.
    accounts: Sequence[BillingAccount]


async def look(store: CostStore, by: By, since: datetime, now: datetime, fleet: str | None, limit: int) -> CostReport:
    seen = await look_from(store, {by: limit}, since, now, fleet)
    return CostReport(by, seen.since, seen.costs[by], seen.total, seen.forecasts)


async def look_from(
    store: CostStore, sides: Mapping[By, int], since: datetime, now: datetime, fleet: str | None
) -> CostReportInputs:
    """`sides`: by what it is added up, and how many rows of each are wanted."""
    # Whole hours: the sums are kept by the hour.
    since = hour_of(since)
    accounts = await store.open_accounts(fleet=fleet)
    open_charges = [charge for account in accounts for charge in estimate(account, now) if charge.from_at >= since]
    everything = await store.costs(By.FLEET, since, fleet=fleet, limit=MAX_ROWS)
    this_month = await store.costs(By.FLEET, month_of(now), fleet=fleet, limit=MAX_ROWS)
    costs = {}
    for by, limit in sides.items():
        rows = max(limit, ROWS_TO_CHOOSE_FROM)
        settled = everything if by is By.FLEET else await store.costs(by, since, fleet=fleet, limit=rows)
        costs[by] = _first(merged(settled, add_up(open_charges, by, is_estimate=True)), by, limit)
    return CostReportInputs(
        since,
        costs,
        total([*everything, *add_up(open_charges, By.FLEET, is_estimate=True)]),
        forecasts(this_month, accounts, month_of(now), now),
        accounts,
    )


def _first(costs: list[Cost], by: By, limit: int) -> list[Cost]:
    return sorted(costs, key=lambda cost: (cost.key or "") if by is By.DAY else cost.total_micros, reverse=True)[:limit]


async def task_cost(store: CostStore, task_id: int, now: datetime, worker_id: str | None = None) -> Cost | None:
    """What a task has cost in all its attempts; None if it ran on nothing that has a price.

    `worker_id`: whose open account to look at for what is not settled; without it all are looked at.
    """
    charges = await store.charges_of_task(task_id)
    accounts = await store.open_accounts(worker_id=worker_id)
    guessed = [
        charge
        for account in accounts
        if any(span.task_id == task_id for span in account.spans)
        for charge in estimate(account, now)
        if charge.task_id == task_id
    ]
    costs = merged(add_up(charges, By.TASK), add_up(guessed, By.TASK, is_estimate=True))
    return max(costs, key=lambda cost: cost.total_micros, default=None)
