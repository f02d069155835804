"""Cost sums by day, fleet, queue, worker or task, the forecast for the month, and the meter of one machine. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum

from windlass.cost.ledger import apportion
from windlass.model.cost import Bill, BillingAccount, Charge, ChargeKind, Cost, VolumeCost, day_of, next_month
from windlass.policy.billing import charged, charged_between, cost, unit_end


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
        empty = Cost(key_of(charge, by), charge.currency, is_estimate=is_estimate)
        row = costs.get((empty.key, empty.currency), empty)
        field = f"{charge.kind}_micros"
        costs[row.key, row.currency] = replace(row, **{field: getattr(row, field) + charge.amount_micros})
    return list(costs.values())


def spread(charges: Iterable[Charge]) -> list[Charge]:
    """Divide boot, idle, tail and ahead of each billing period of a worker among the tasks of that period, by their
    amounts. The sum does not change. Charges of a period without a task stay as they are."""
    periods: dict[tuple[str, datetime, str], list[Charge]] = {}
    for charge in charges:
        periods.setdefault((charge.worker_id, charge.from_at, charge.currency), []).append(charge)
    found: list[Charge] = []
    for period in periods.values():
        tasks = sorted(
            (charge for charge in period if charge.kind is ChargeKind.TASK and charge.amount_micros > 0),
            key=lambda charge: charge.task_id or 0,
        )
        for charge in period:
            if charge.kind is ChargeKind.TASK or not tasks:
                found.append(charge)
                continue
            parts = apportion(charge.amount_micros, [task.amount_micros for task in tasks])
            found += [
                replace(charge, task_id=task.task_id, queue=task.queue, amount_micros=part)
                for task, part in zip(tasks, parts, strict=True)
            ]
    return found


def merged(*parts: Iterable[Cost]) -> list[Cost]:
    """Add up rows with the same key and currency."""
    costs: dict[tuple[str | None, str], Cost] = {}
    for row in (row for part in parts for row in part):
        before = costs.setdefault((row.key, row.currency), row)
        if before is not row:
            fields = [f"{kind}_micros" for kind in ChargeKind]
            amounts = {field: getattr(before, field) + getattr(row, field) for field in fields}
            is_estimate = before.is_estimate or row.is_estimate
            costs[row.key, row.currency] = replace(before, is_estimate=is_estimate, **amounts)
    return list(costs.values())


def total(costs: Iterable[Cost]) -> list[Cost]:
    """One row per currency."""
    return merged([replace(row, key=None) for row in costs])


@dataclass(frozen=True, slots=True)
class TotalCost:
    """The cost of machines and of volumes in one currency."""

    currency: str
    machines_micros: int
    volumes_micros: int
    is_estimate: bool

    @property
    def total_micros(self) -> int:
        return self.machines_micros + self.volumes_micros


def with_volumes(totals: Iterable[Cost], volumes: Iterable[VolumeCost]) -> list[TotalCost]:
    """One row per currency. `totals`: of machines."""
    machines = {cost.currency: cost for cost in totals}
    of_volumes: dict[str, int] = {}
    for volume in volumes:
        of_volumes[volume.currency] = of_volumes.get(volume.currency, 0) + volume.amount_micros
    return [
        TotalCost(
            currency,
            machines[currency].total_micros if currency in machines else 0,
            of_volumes.get(currency, 0),
            is_estimate=currency in machines and machines[currency].is_estimate,
        )
        for currency in sorted({*machines, *of_volumes})
    ]


@dataclass(frozen=True, slots=True)
class Forecast:
    """The cost of this month if all current machines stay: the amount so far, plus each machine's price for the rest of
    the month, within its monthly cap."""

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
    """`settled`: the rows of this month, which began at `month`. `accounts`: all that are not fully settled."""
    found: dict[str, Forecast] = {}

    def of(currency: str) -> Forecast:
        return found.get(currency, Forecast(currency, 0, 0, 0, 0))

    for row in settled:
        before = of(row.currency)
        found[row.currency] = replace(before, spent_micros=before.spent_micros + row.total_micros)
    for bill in (account.bill for account in accounts):
        tariff, before = bill.tariff, of(bill.tariff.currency)
        is_live = bill.until is None
        found[tariff.currency] = replace(
            before,
            spent_micros=before.spent_micros + charged_between(bill, month, now),
            workers=before.workers + is_live,
            burn_micros_per_hour=before.burn_micros_per_hour + (tariff.price_micros_per_hour if is_live else 0),
            rest_micros=before.rest_micros + (_rest_of_month(bill, now) if is_live else 0),
        )
    return [found[currency] for currency in sorted(found)]


def _rest_of_month(bill: Bill, now: datetime) -> int:
    begun = max(now, bill.since + datetime.resolution)
    return charged(bill.tariff, bill.since, next_month(now)) - charged(bill.tariff, bill.since, begun)


@dataclass(frozen=True, slots=True)
class Meter:
    """The cost of one machine up to now. `billed_until` and `left_s` are None after its end."""

    currency: str
    cost_micros: int
    micros_per_hour: int
    billed_until: datetime | None
    left_s: float | None


def read_meter(bill: Bill, now: datetime) -> Meter:
    tariff = bill.tariff
    billed_until = unit_end(tariff.unit_s, bill.since, now) if bill.until is None else None
    return Meter(
        currency=tariff.currency,
        cost_micros=cost(tariff, bill.since, bill.until or now),
        micros_per_hour=tariff.price_micros_per_hour,
        billed_until=billed_until,
        left_s=(billed_until - now).total_seconds() if billed_until is not None else None,
    )
