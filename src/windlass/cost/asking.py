"""What people ask about money, answered from the ledger and the accounts that are still open.

What is settled is exact. What is not (the last hour or so of workers that are there) is estimated, and says so.
"""

from dataclasses import dataclass
from datetime import datetime

from windlass.cost.ledger import estimate
from windlass.cost.report import By, Forecast, add_up, forecasts, merged, total
from windlass.model.cost import Cost, hour_of, month_of
from windlass.ports.costs import Costs

MAX_ROWS = 100_000
# What is not settled may move somebody up among those shown, from as far down as this.
ROWS_TO_CHOOSE_FROM = 1_000


@dataclass(frozen=True, slots=True)
class Report:
    by: By
    since: datetime
    costs: list[Cost]
    total: list[Cost]
    forecasts: list[Forecast]


async def look(store: Costs, by: By, since: datetime, now: datetime, fleet: str | None, limit: int) -> Report:
    # Whole hours: the sums are kept by the hour.
    since = hour_of(since)
    accounts = await store.open_accounts(fleet=fleet)
    open_charges = [charge for account in accounts for charge in estimate(account, now) if charge.from_at >= since]
    settled = await store.costs(by, since, fleet=fleet, limit=max(limit, ROWS_TO_CHOOSE_FROM))
    costs = merged(settled, add_up(open_charges, by, is_estimate=True))
    costs.sort(key=lambda cost: (cost.key or "") if by is By.DAY else cost.total_micros, reverse=True)
    this_month = await store.costs(By.FLEET, month_of(now), fleet=fleet, limit=MAX_ROWS)
    everything = await store.costs(By.FLEET, since, fleet=fleet, limit=MAX_ROWS)
    return Report(
        by,
        since,
        costs[:limit],
        total([*everything, *add_up(open_charges, By.FLEET, is_estimate=True)]),
        forecasts(this_month, accounts, month_of(now), now),
    )


async def task_cost(store: Costs, task_id: int, now: datetime, worker_id: str | None = None) -> Cost | None:
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
