"""The ledger balances: for every worker, task + boot + idle + tail = the provider's charges, to the micro.

Billed time is settled period by period (policy/billing.py). The price of a period is divided by time among what the
worker did in it. While n tasks run at once, each gets an n-th of that time. Time without a task is boot until the
worker was ready, and idle after that. Billed time after the machine's end is tail. Amounts are rounded by largest
remainder, so the parts of a period add up to its price. Zero amounts are not stored.

A settled period never changes: an attempt that is reported later than SETTLE_AFTER has been counted as idle.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from windlass.model.cost import BillingAccount, Charge, ChargeKind, Settlement, Span
from windlass.policy.billing import Period, periods

# By then everything that a worker did is in the database: no statement takes as long.
SETTLE_AFTER = timedelta(seconds=60)
# Periods settled per call. A worker that was not settled for longer, because no orchestrator ran, needs several calls.
MAX_PERIODS = 24

_INSTANT = timedelta.resolution
# Units per microsecond in which time is divided among tasks. Division then loses less than a micro at any price, and
# the largest remainder makes up for it.
_UNITS_PER_INSTANT = 1_000_000

# What a part of a period was for: the kind, and the task with its queue.
_Purpose = tuple[ChargeKind, int | None, str | None]


def settle(account: BillingAccount, now: datetime) -> Settlement:
    """Settle all periods that are due. If none is, the settlement only says when the next one will be."""
    bill = account.bill
    charges: list[Charge] = []
    settled_until = bill.settled_until or bill.since
    settle_at: datetime | None = None
    for count, period in enumerate(periods(bill)):
        ends = period.until_at if bill.until is None else min(period.until_at, bill.until)
        if count == MAX_PERIODS or ends + SETTLE_AFTER > now:
            settle_at = max(ends + SETTLE_AFTER, now)
            break
        charges += _divide(account, period, ChargeKind.TAIL)
        settled_until = period.until_at
    return Settlement(account, settled_until, settle_at, tuple(charges))


def estimate(account: BillingAccount, now: datetime) -> list[Charge]:
    """Divide the periods that began and are not settled as if the machine ended now.

    For a machine that exists, billed time after now is `ahead` and not `tail`.
    """
    bill = account.bill
    if bill.until is not None:
        return [charge for period in periods(bill) for charge in _divide(account, period, ChargeKind.TAIL)]
    ended = replace(account, bill=replace(bill, until=max(now, bill.since)))
    return [charge for period in periods(ended.bill) for charge in _divide(ended, period, ChargeKind.AHEAD)]


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """Split `total` into integers proportional to the weights, by largest remainder; among equals the first wins."""
    whole = sum(weights)
    if whole == 0:
        raise ValueError("cannot apportion: all weights are zero")
    parts = [total * weight // whole for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda n: (-(total * weights[n] % whole), n))
    for n in by_remainder[: total - sum(parts)]:
        parts[n] += 1
    return parts


def _divide(account: BillingAccount, period: Period, after_end: ChargeKind) -> Iterator[Charge]:
    purposes = _purposes(account, period, after_end)
    amounts = apportion(period.amount_micros, list(purposes.values()))
    for (kind, task_id, queue), amount in zip(purposes, amounts, strict=True):
        if amount:
            yield Charge(
                worker_id=account.worker_id,
                fleet=account.fleet,
                kind=kind,
                from_at=period.from_at,
                until_at=period.until_at,
                amount_micros=amount,
                currency=account.bill.tariff.currency,
                task_id=task_id,
                queue=queue,
            )


def _purposes(account: BillingAccount, period: Period, after_end: ChargeKind) -> dict[_Purpose, int]:
    """Time per purpose of a period, in _UNITS_PER_INSTANT."""
    begins = period.from_at
    ends = period.until_at if account.bill.until is None else min(period.until_at, account.bill.until)
    ends = max(ends, begins)
    ready = min(max(account.ready_at or ends, begins), ends)
    spent: dict[_Purpose, int] = {}
    shares = _SharedTime(begins, ends, ready, account.spans)
    for span, share in shares.by_span():
        purpose = (ChargeKind.TASK, span.task_id, span.queue)
        spent[purpose] = spent.get(purpose, 0) + share
    rest = {ChargeKind.BOOT: shares.boot, ChargeKind.IDLE: shares.idle, after_end: _length(ends, period.until_at)}
    return spent | {(kind, None, None): weight for kind, weight in rest.items() if weight}


class _SharedTime:
    """Divides a period among concurrent tasks, in one pass over its start and end times.

    A counter advances at 1/n of real time while n tasks run. A task's share is the counter at its end minus the counter
    at its start.
    """

    def __init__(self, begins: datetime, ends: datetime, ready: datetime, spans: Iterable[Span]) -> None:
        self.boot = self.idle = 0
        self._clipped = [
            (span, max(span.from_at, begins), min(span.until_at or ends, ends))
            for span in spans
            if span.from_at < ends and (span.until_at is None or span.until_at > begins)
        ]
        changes: dict[datetime, int] = {begins: 0, ready: 0, ends: 0}
        for _, starts, stops in self._clipped:
            changes[starts] = changes.get(starts, 0) + 1
            changes[stops] = changes.get(stops, 0) - 1
        self._counter_at: dict[datetime, int] = {}
        counter, running, before = 0, 0, begins
        for moment in sorted(changes):
            passed = _length(before, moment)
            if running:
                counter += passed // running
            elif before < ready:
                self.boot += passed
            else:
                self.idle += passed
            self._counter_at[moment] = counter
            running += changes[moment]
            before = moment

    def by_span(self) -> Iterator[tuple[Span, int]]:
        for span, starts, stops in self._clipped:
            yield span, self._counter_at[stops] - self._counter_at[starts]


def _length(begins: datetime, ends: datetime) -> int:
    return (ends - begins) // _INSTANT * _UNITS_PER_INSTANT
