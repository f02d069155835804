"""How much of a fleet's budgets is spent. Pure, in integer micros.

Spent is what providers have charged: every billing period that has begun, whether or not the ledger has closed it.
Hours, days and months are calendar units in UTC. A billing period belongs to the one in which it begins.
"""

from dataclasses import dataclass

from windlass.model.cost import Bill, day_of, hour_of, month_of
from windlass.model.fleet import FleetConfig
from windlass.model.money import amount, to_micros, with_currency
from windlass.model.snapshot import Snapshot
from windlass.policy.billing import charged_between, cost

# An alert fires from this share of a budget, while there is time to react.
NEAR_PERCENT = 80


@dataclass(frozen=True, slots=True)
class Budget:
    """One limit in one currency, and what is spent of it."""

    when: str
    currency: str
    spent_micros: int
    limit_micros: int

    @property
    def is_spent(self) -> bool:
        return self.spent_micros >= self.limit_micros

    @property
    def is_nearly_spent(self) -> bool:
        return self.spent_micros * 100 >= self.limit_micros * NEAR_PERCENT

    @property
    def left_micros(self) -> int:
        return max(0, self.limit_micros - self.spent_micros)

    def __str__(self) -> str:
        return f"{with_currency(self.spent_micros, self.currency)} of {amount(self.limit_micros)} spent {self.when}"


def budgets(snapshot: Snapshot, fleet: FleetConfig) -> list[Budget]:
    """One per limit and currency, the most used first. Empty without limits or prices."""
    now = snapshot.now
    limits = [
        (to_micros(limit), since, when, field)
        for limit, since, when, field in (
            (fleet.budget_per_hour, hour_of(now), "this hour", "hour_micros"),
            (fleet.budget_per_day, day_of(now), "today", "day_micros"),
            (fleet.budget_per_month, month_of(now), "this month", "month_micros"),
        )
        if limit is not None
    ]
    if not limits:
        return []
    bills = _bills(snapshot)
    settled = {spending.currency: spending for spending in snapshot.spending}
    currencies = sorted({bill.tariff.currency for bill in bills} | settled.keys())
    found = []
    for limit, since, when, field in limits:
        for currency in currencies:
            closed = getattr(settled[currency], field) if currency in settled else 0
            begun = sum(charged_between(bill, since, now) for bill in bills if bill.tariff.currency == currency)
            found.append(Budget(when, currency, closed + begun, limit))
    return sorted(found, key=lambda budget: -budget.spent_micros * 10**6 // budget.limit_micros)


def affordable_spawns(snapshot: Snapshot, fleet: FleetConfig, found: list[Budget]) -> int | None:
    """How many more workers the budgets allow. None: no limit, or machines without a price.

    A worker costs one billing period at the highest known price, and so does each spawned worker without a known price.
    While no price is known, one worker is allowed: its machine shows the price.
    """
    if not any((fleet.budget_per_hour, fleet.budget_per_day, fleet.budget_per_month)):
        return None
    prices: dict[str, int] = {}
    for bill in _bills(snapshot):
        price = cost(bill.tariff, bill.since, bill.since)
        prices[bill.tariff.currency] = max(price, prices.get(bill.tariff.currency, 0))
    unpriced = [worker for worker in snapshot.workers if worker.slot is not None and worker.bill is None]
    if not snapshot.traits.is_remote and any(worker.machine_id is not None for worker in unpriced):
        return None
    counts = [budget.left_micros // prices[budget.currency] for budget in found if prices.get(budget.currency)]
    return max(0, min(counts, default=1) - len(unpriced)) if counts or not prices else None


def is_price_known(snapshot: Snapshot) -> bool:
    return bool(_bills(snapshot))


def _bills(snapshot: Snapshot) -> list[Bill]:
    return [*(worker.bill for worker in snapshot.workers if worker.bill is not None), *snapshot.ended_bills]
