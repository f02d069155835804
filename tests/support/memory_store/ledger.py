"""Bills and task spans of workers, and the ledger of settled charges.

Bills and spans are part of the worker's row and are written by functions here. ChargeLedger holds settled charges.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import pairwise

from support.memory_store.tasks import MemoryTask
from support.memory_store.workers import MemoryWorker
from windlass.cost.report import spread
from windlass.model.cost import (
    Bill,
    BillingAccount,
    Charge,
    ChargeKind,
    Cost,
    Settlement,
    Span,
    Spending,
    Tariff,
    VolumeCost,
    day_of,
    hour_of,
    month_of,
)
from windlass.model.machine import Machine, Volume
from windlass.model.worker import WorkerStatus

MAX_SPANS = 20_000
FIRST_SETTLED_AFTER = timedelta(hours=1, minutes=1)
SETTLED_AFTER_END = timedelta(minutes=1)
# ISO 4217 code for no currency. Prices without a currency are summed separately.
NO_CURRENCY = "XXX"

# Fleet, hour, currency, and queue or "".
_Hour = tuple[str, datetime, str, str]


@dataclass(slots=True)
class _VolumeSize:
    size_gb: int
    micros_per_hour: int
    currency: str
    from_at: datetime
    until_at: datetime


class ChargeLedger:
    def __init__(self) -> None:
        # By fleet and volume.
        self._volumes: dict[tuple[str, str], list[_VolumeSize]] = {}
        self.charges: list[Charge] = []
        # Cost by fleet, hour, currency and queue.
        self._spending: dict[_Hour, Cost] = {}

    def settle(self, worker: MemoryWorker | None, settlement: Settlement) -> bool:
        """Write a settlement. False if its account has changed since it was read."""
        spawned = worker.spawned if worker is not None else None
        if (
            spawned is None
            or spawned.bill is None
            or spawned.settle_at is None
            or spawned.bill != settlement.account.bill
        ):
            return False
        spawned.bill = replace(spawned.bill, settled_until=settlement.settled_until)
        spawned.settle_at = settlement.settle_at
        self.charges += settlement.charges
        for charge in settlement.charges:
            hour = charge.fleet, hour_of(charge.from_at), charge.currency, charge.queue or ""
            self._spending[hour] = _with(self._spending.get(hour, Cost(None, charge.currency)), charge)
        spawned.spans = {
            key: span
            for key, span in spawned.spans.items()
            if spawned.settle_at is not None and span.until_at is not None and span.until_at > settlement.settled_until
        }
        return True

    def spent_by(self, fleet: str, now: datetime) -> tuple[Spending, ...]:
        """Spending in the current hour, day and month, by currency."""
        own = [
            (h, c, cost) for (f, h, c, _), cost in self._spending.items() if f == fleet and month_of(now) <= h <= now
        ]

        def since(begins: datetime, currency: str) -> int:
            return sum(cost.total_micros for hour, c, cost in own if c == currency and hour >= begins)

        return tuple(
            Spending(
                currency, since(hour_of(now), currency), since(day_of(now), currency), since(month_of(now), currency)
            )
            for currency in sorted({currency for _, currency, _ in own})
        )

    def costs(self, by: str, since: datetime, fleet: str | None, limit: int) -> list[Cost]:
        if by in ("day", "fleet", "queue"):
            found: list[tuple[str | None, Cost]] = [
                ({"day": f"{hour:%Y-%m-%d}", "queue": queue or None}.get(by, name), cost)
                for (name, hour, _, queue), cost in self._spending.items()
                if hour >= since and fleet in (None, name)
            ]
        else:
            found = [
                (_cost_key(charge, by), _with(Cost(None, charge.currency), charge))
                for charge in self.charges
                if charge.from_at >= since and fleet in (None, charge.fleet)
            ]
        ordered = _ordered(found)
        if by == "day":
            ordered.sort(key=lambda cost: cost.key or "", reverse=True)
        return ordered[:limit]

    def record_volume(self, fleet: str, volume: Volume, now: datetime) -> None:
        sizes = self._volumes.setdefault((fleet, volume.id), [])
        if sizes:
            sizes[-1].until_at = max(sizes[-1].until_at, now)
        if not sizes or (sizes[-1].size_gb, sizes[-1].micros_per_hour) != (
            volume.size_gb,
            volume.price_micros_per_hour,
        ):
            price, currency = volume.price_micros_per_hour or 0, volume.currency or NO_CURRENCY
            sizes.append(_VolumeSize(volume.size_gb, price, currency, now, now))

    def volume_costs(self, since: datetime, fleet: str | None) -> list[VolumeCost]:
        """A volume is billed once at any moment, at the highest price that a fleet has seen."""
        by_volume: dict[tuple[str, str], list[tuple[str, _VolumeSize]]] = {}
        for (name, volume_id), sizes in self._volumes.items():
            for size in sizes:
                if size.until_at > since:
                    by_volume.setdefault((volume_id, size.currency), []).append((name, size))
        found = []
        for (volume_id, currency), seen in sorted(by_volume.items(), key=lambda entry: entry[0]):
            fleets = tuple(sorted({name for name, _ in seen}))
            if fleet is not None and fleet not in fleets:
                continue
            moments = sorted({max(moment, since) for _, size in seen for moment in (size.from_at, size.until_at)})
            micros = 0.0
            for begin, end in pairwise(moments):
                prices = [size.micros_per_hour for _, size in seen if size.from_at <= begin and size.until_at >= end]
                micros += max(prices, default=0) * (end - begin).total_seconds() / 3600
            last = max((size for _, size in seen), key=lambda size: size.from_at)
            found.append(VolumeCost(volume_id, fleets, last.size_gb, currency, round(micros), last.micros_per_hour))
        return found

    def spread_costs(self, since: datetime, fleet: str | None, limit: int) -> list[Cost]:
        recent = [charge for charge in self.charges if charge.from_at >= since and fleet in (None, charge.fleet)]
        return _ordered(
            (_cost_key(charge, "task"), _with(Cost(None, charge.currency), charge)) for charge in spread(recent)
        )[:limit]

    def forget(self, before: datetime, limit: int) -> int:
        """Delete old charges and hourly sums, at most `limit` of each."""
        old = sorted((c for c in self.charges if c.from_at < before), key=lambda c: c.from_at)[:limit]
        gone = set(map(id, old))
        self.charges = [charge for charge in self.charges if id(charge) not in gone]
        hours = sorted((hour for hour in self._spending if hour[1] < before), key=lambda hour: hour[1])[:limit]
        for hour in hours:
            del self._spending[hour]
        return len(old) + len(hours)


def open_bill(worker: MemoryWorker | None, machine: Machine, unit_s: int, now: datetime) -> None:
    if worker is None or worker.status is WorkerStatus.TERMINATED:
        return
    spawned = worker.spawned
    if machine.price_micros_per_hour is not None and spawned.bill is None:
        tariff = Tariff(machine.price_micros_per_hour, machine.currency or NO_CURRENCY, unit_s, machine.price_parts)
        spawned.bill = Bill(tariff, machine.created_at or now)
        spawned.settle_at = spawned.bill.since + FIRST_SETTLED_AFTER


def close_bill(worker: MemoryWorker, ended_at: datetime, now: datetime) -> None:
    spawned = worker.spawned
    if spawned.bill is not None:
        spawned.bill = replace(spawned.bill, until=max(ended_at, spawned.bill.since))
        spawned.settle_at = now + SETTLED_AFTER_END


def record_span(worker: MemoryWorker | None, row: MemoryTask, now: datetime) -> None:
    """Record the time of an ended attempt, if its worker has a price or may get one."""
    if worker is None or row.started_at is None or row.started_at >= now:
        return
    spawned = worker.spawned
    if spawned.bill is not None or (worker.slot is not None and spawned.machine_id is None):
        spawned.spans.setdefault((row.started_at, row.id), Span(row.id, row.queue, row.started_at, now))


def forget_spans(workers: Iterable[MemoryWorker], before: datetime, limit: int) -> int:
    """Delete old spans of workers without an open account."""
    found = [
        (span.until_at, key, worker.spawned.spans)
        for worker in workers
        for key, span in worker.spawned.spans.items()
        if worker.spawned.settle_at is None and span.until_at is not None and span.until_at < before
    ]
    old = sorted(found, key=lambda each: each[0])[:limit]
    for _, key, spans in old:
        del spans[key]
    return len(old)


def to_settle(workers: Iterable[MemoryWorker], fleet: str, now: datetime) -> list[MemoryWorker]:
    """Workers of the fleet whose settlement is due, longest due first."""
    due = [
        (worker.spawned.settle_at, worker.id, worker)
        for worker in workers
        if worker.spawned.settle_at is not None and worker.spawned.settle_at <= now and worker.fleet == fleet
    ]
    return [worker for _, _, worker in sorted(due, key=lambda each: each[:2])]


def account(worker: MemoryWorker, running: Sequence[MemoryTask]) -> BillingAccount:
    bill = worker.spawned.bill
    assert bill is not None
    ended = sorted(worker.spawned.spans.values(), key=_length, reverse=True)[:MAX_SPANS]
    unfinished = [Span(row.id, row.queue, row.started_at, None) for row in running if row.started_at]
    ready = [moment for moment in (worker.activated_at, worker.first_claimed_at) if moment is not None]
    return BillingAccount(
        worker.id,
        worker.fleet,
        bill,
        min(ready, default=None),
        tuple(sorted([*ended, *unfinished], key=lambda span: (span.from_at, span.task_id))),
    )


def _length(span: Span) -> timedelta:
    return (span.until_at or span.from_at) - span.from_at


def _with(cost: Cost, charge: Charge) -> Cost:
    name = f"{charge.kind}_micros"
    return replace(cost, **{name: getattr(cost, name) + charge.amount_micros})


def _sum(one: Cost, other: Cost) -> Cost:
    names = (f"{kind}_micros" for kind in ChargeKind)
    return replace(one, **{name: getattr(one, name) + getattr(other, name) for name in names})


def _ordered(found: Iterable[tuple[str | None, Cost]]) -> list[Cost]:
    """Sums by key and currency, most expensive first."""
    sums: dict[tuple[str | None, str], Cost] = {}
    for key, cost in found:
        before = sums.get((key, cost.currency), Cost(key, cost.currency))
        sums[key, cost.currency] = _sum(before, cost)
    ordered = sorted(sums.values(), key=lambda cost: (cost.key is None, cost.key or "", cost.currency))
    return sorted(ordered, key=lambda cost: -cost.total_micros)


def _cost_key(charge: Charge, by: str) -> str | None:
    keys: dict[str, object] = {"queue": charge.queue, "worker": charge.worker_id, "task": charge.task_id}
    return None if keys[by] is None else str(keys[by])
