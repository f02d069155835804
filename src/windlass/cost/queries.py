"""Cost reports from the ledger and from accounts that are not settled yet.

Settled amounts are exact. The rest, about the last hour of live workers, is estimated and marked as an estimate.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from windlass.cost.ledger import estimate
from windlass.cost.report import By, Forecast, TotalCost, add_up, forecasts, merged, spread, total, with_volumes
from windlass.model.cost import BillingAccount, Cost, VolumeCost, hour_of, month_of
from windlass.ports.costs import CostStore

MAX_ROWS = 100_000
# Estimates may move a row up in the ranking. Rows below this rank are not considered.
ROWS_TO_RANK = 1_000


@dataclass(frozen=True, slots=True)
class CostReport:
    by: By
    since: datetime
    costs: list[Cost]
    total: list[Cost]
    forecasts: list[Forecast]
    volumes: list[VolumeCost]
    sums: list[TotalCost]


@dataclass(frozen=True, slots=True)
class CostReportInputs:
    """CostStore by several dimensions, from one read of the ledger."""

    since: datetime
    costs: Mapping[By, list[Cost]]
    total: list[Cost]
    forecasts: list[Forecast]
    volumes: list[VolumeCost]
    # All that are not fully settled.
    accounts: Sequence[BillingAccount]


async def build_report(
    store: CostStore,
    by: By,
    since: datetime,
    now: datetime,
    fleet: str | None,
    limit: int,
    *,
    is_spread: bool = False,
) -> CostReport:
    """`is_spread`: by task, with boot, idle and tail spread over the tasks of each billing period."""
    read = await read_costs(store, {by: limit}, since, now, fleet, is_spread=is_spread)
    sums = with_volumes(read.total, read.volumes)
    return CostReport(by, read.since, read.costs[by], read.total, read.forecasts, read.volumes, sums)


async def read_costs(
    store: CostStore,
    limits: Mapping[By, int],
    since: datetime,
    now: datetime,
    fleet: str | None,
    *,
    is_spread: bool = False,
) -> CostReportInputs:
    """`limits`: the dimensions to group by, with the number of rows for each."""
    # Whole hours: the ledger keeps sums by the hour.
    since = hour_of(since)
    accounts = await store.open_accounts(fleet=fleet)
    open_charges = [charge for account in accounts for charge in estimate(account, now) if charge.from_at >= since]
    everything = await store.costs(By.FLEET, since, fleet=fleet, limit=MAX_ROWS)
    this_month = await store.costs(By.FLEET, month_of(now), fleet=fleet, limit=MAX_ROWS)
    costs = {}
    for by, limit in limits.items():
        rows = max(limit, ROWS_TO_RANK)
        unsettled = open_charges
        if by is By.FLEET:
            settled = everything
        elif is_spread and by is By.TASK:
            settled, unsettled = await store.spread_costs(since, fleet=fleet, limit=rows), spread(open_charges)
        else:
            settled = await store.costs(by, since, fleet=fleet, limit=rows)
        found = merged(settled, add_up(unsettled, by, is_estimate=True))
        found.sort(key=lambda cost: (cost.key or "") if by is By.DAY else cost.total_micros, reverse=True)
        costs[by] = found[:limit]
    return CostReportInputs(
        since,
        costs,
        total([*everything, *add_up(open_charges, By.FLEET, is_estimate=True)]),
        forecasts(this_month, accounts, month_of(now), now),
        await store.volume_costs(since, fleet=fleet),
        accounts,
    )


async def task_cost(store: CostStore, task_id: int, now: datetime, worker_id: str | None = None) -> Cost | None:
    """The cost of all attempts of a task; None if it ran only on workers without a price.

    `worker_id`: the only worker whose unsettled account is read; without it all are.
    """
    charges = await store.charges_of_task(task_id)
    accounts = await store.open_accounts(worker_id=worker_id)
    estimated = [
        charge
        for account in accounts
        if any(span.task_id == task_id for span in account.spans)
        for charge in estimate(account, now)
        if charge.task_id == task_id
    ]
    costs = merged(add_up(charges, By.TASK), add_up(estimated, By.TASK, is_estimate=True))
    return max(costs, key=lambda cost: cost.total_micros, default=None)
