"""Costs for people: added up by day, fleet, queue, worker or task, and what the month will come to. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum

from windlass.model.cost import Bill, BillingAccount, Charge, ChargeKind, Cost, day_of, next_month
from windlass.policy.billing import charged, charged_between


class By(StrEnum):
    DAY = "day"
    FLEET = "fleet"
    QUEUE = "queue"
    WORKER = "worker"
    TASK = "task"


def key_of(charge: Charge, by: By) -> str | None:
    match by:
        case By.DAY:
            return f"{day_of(charge.from_at):%Y-%m-%d}"
        case By.FLEET:
            return charge.fleet
        case By.QUEUE:
            return charge.queue
        case By.WORKER:
            return charge.worker_id
        case By.TASK:
            return None if charge.task_id is None else str(charge.task_id)


def add_up(charges: Iterable[Charge], by: By, *, is_estimate: bool = False) -> list[Cost]:
    costs: dict[tuple[str | None, str], Cost] = {}
    for charge in charges:
        cost = Cost(key_of(charge, by), charge.currency, is_estimate=is_estimate)
        merged = costs.get((cost.key, cost.currency), cost)
        field = f"{charge.kind}_micros"
        costs[cost.key, cost.currency] = replace(merged, **{field: getattr(merged, field) + charge.amount_micros})
    return list(costs.values())


def merged(*parts: Iterable[Cost]) -> list[Cost]:
    """The same things together, each once for each currency."""
    costs: dict[tuple[str | None, str], Cost] = {}
    for cost in (cost for part in parts for cost in part):
        before = costs.get((cost.key, cost.currency))
        costs[cost.key, cost.currency] = cost if before is None else _sum(before, cost)
    return list(costs.values())


def total(costs: Iterable[Cost]) -> list[Cost]:
    """One for each currency."""
    return merged([replace(cost, key=None) for cost in costs])


def _sum(one: Cost, other: Cost) -> Cost:
    amounts = {
        f"{kind}_micros": getattr(one, f"{kind}_micros") + getattr(other, f"{kind}_micros") for kind in ChargeKind
    }
    return replace(one, is_estimate=one.is_estimate or other.is_estimate, **amounts)


@dataclass(frozen=True, slots=True)
class Forecast:
    """What this month comes to if everybody who is there stays: spent so far, and each machine's price for the rest of
    the month, its monthly cap kept."""

    currency: str
    spent_micros: int
    workers: int
    burn_micros_per_hour: int
    rest_micros: int

    @property
    def month_micros(self) -> int:
        return self.spent_micros + self.rest_micros


def forecasts(
    settled: Iterable[Cost], accounts: Iterable[BillingAccount], month: datetime, now: datetime
) -> list[Forecast]:
    """`settled`: of this month, which began at `month`. `accounts`: all that are not closed."""
    found: dict[str, Forecast] = {}

    def of(currency: str) -> Forecast:
        return found.get(currency, Forecast(currency, 0, 0, 0, 0))

    for cost in settled:
        found[cost.currency] = replace(
            of(cost.currency), spent_micros=of(cost.currency).spent_micros + cost.total_micros
        )
    for bill in (account.bill for account in accounts):
        tariff, before = bill.tariff, of(bill.tariff.currency)
        is_there = bill.until is None
        found[tariff.currency] = replace(
            before,
            spent_micros=before.spent_micros + charged_between(bill, month, now),
            workers=before.workers + is_there,
            burn_micros_per_hour=before.burn_micros_per_hour + (tariff.price_micros_per_hour if is_there else 0),
            rest_micros=before.rest_micros + (_rest_of_month(bill, now) if is_there else 0),
        )
    return [found[currency] for currency in sorted(found)]


def _rest_of_month(bill: Bill, now: datetime) -> int:
    begun = max(now, bill.since + datetime.resolution)
    return charged(bill.tariff, bill.since, next_month(now)) - charged(bill.tariff, bill.since, begun)
