"""What a fleet has spent of what it may spend. Pure, in integer micros.

Spent is what providers have charged: every unit of time that has begun, whether or not the ledger has closed it. Hours,
days and months are those of the calendar, by UTC, and a unit belongs to where it begins.
"""

from dataclasses import dataclass

from windlass.model.cost import Bill, day_of, hour_of, month_of
from windlass.model.fleet import FleetConfig
from windlass.model.money import amount, to_micros, with_currency
from windlass.model.snapshot import Snapshot
from windlass.policy.billing import charged_between, cost

# From this share on a person is told, so that there is time to do something about it.
NEAR_PERCENT = 80


@dataclass(frozen=True, slots=True)
class Budget:
    """How one limit stands."""

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
    """One for each limit and currency, the one that is nearest to its end first. None without limits or prices."""
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


def has_budget(fleet: FleetConfig) -> bool:
    limits = (fleet.budget_per_hour, fleet.budget_per_day, fleet.budget_per_month)
    return any(limit is not None for limit in limits)


def affordable(snapshot: Snapshot, fleet: FleetConfig, found: list[Budget]) -> int | None:
    """How many more workers the budgets have room for: each costs a unit at the highest price known, and so does each
    of those hired whose price is not known yet. As long as no price is known, one, which will tell it. None: no limit,
    or machines that have no price."""
    if not has_budget(fleet):
        return None
    prices: dict[str, int] = {}
    for bill in _bills(snapshot):
        price = cost(bill.tariff, bill.since, bill.since)
        prices[bill.tariff.currency] = max(price, prices.get(bill.tariff.currency, 0))
    unknown = [worker for worker in snapshot.workers if worker.slot is not None and worker.bill is None]
    if not snapshot.traits.is_remote and any(worker.machine_id is not None for worker in unknown):
        return None
    rooms = [budget.left_micros // prices[budget.currency] for budget in found if prices.get(budget.currency)]
    return max(0, min(rooms, default=1) - len(unknown)) if rooms or not prices else None


def is_price_known(snapshot: Snapshot) -> bool:
    """Whether any machine has told what one costs."""
    return bool(_bills(snapshot))


def _bills(snapshot: Snapshot) -> list[Bill]:
    return [*(worker.bill for worker in snapshot.workers if worker.bill is not None), *snapshot.ended_bills]
