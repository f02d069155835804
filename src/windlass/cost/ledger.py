"""The ledger closes: for every worker, tasks + boot + idle + tail = what its provider charges, to the micro.

Paid time is closed period by period (policy/billing.py). What a period cost is divided by time among what the worker
did in it: while n tasks run at once, each has an n-th of that time; time without a task is boot until the worker was
ready and idle from then on; what is paid and comes after the machine's end is tail. Rounded by largest remainder, so
that the parts of a period add up to its price. Parts of nothing are not written down.

What is closed is closed: a span that comes to light later than SETTLE_AFTER has been counted as idle.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from windlass.model.cost import BillingAccount, Charge, ChargeKind, Settlement, Span
from windlass.policy.billing import Period, periods

# What a worker did is in the database by then: no statement of ours takes as long.
SETTLE_AFTER = timedelta(seconds=60)
# Closed in one go. A worker nobody settled for longer (there was no orchestrator) is closed in several.
MAX_PERIODS = 24

_INSTANT = timedelta.resolution
# Time is divided among tasks in units this much finer than a microsecond: enough that what is lost to rounding is less
# than a micro for any price, and it is made good by the largest remainder anyway.
_FINENESS = 1_000_000

# What a part of a period was for: the kind, and the task with its queue.
_Purpose = tuple[ChargeKind, int | None, str | None]


def settle(account: BillingAccount, now: datetime) -> Settlement:
    """Close what can be closed. There may be nothing yet; then only the time of the next look is new."""
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
    """What has begun and is not closed, divided as it would be if the machine ended now.

    Of a machine that is there, what is paid beyond now is not tail but ahead.
    """
    bill = account.bill
    if bill.until is not None:
        return [charge for period in periods(bill) for charge in _divide(account, period, ChargeKind.TAIL)]
    ended = replace(account, bill=replace(bill, until=max(now, bill.since)))
    return [charge for period in periods(ended.bill) for charge in _divide(ended, period, ChargeKind.AHEAD)]


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """Whole parts in proportion to the weights that add up to the total: by largest remainder, the first of equals."""
    whole = sum(weights)
    if whole == 0:
        raise ValueError("nothing can be divided among nobody")
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
    """What the time of a period was spent on, in the same small units throughout."""
    begins = period.from_at
    ends = period.until_at if account.bill.until is None else min(period.until_at, account.bill.until)
    ends = max(ends, begins)
    ready = min(max(account.ready_at or ends, begins), ends)
    spent: dict[_Purpose, int] = {}
    clock = _Clock(begins, ends, ready, account.spans)
    for span, share in clock.shares():
        purpose = (ChargeKind.TASK, span.task_id, span.queue)
        spent[purpose] = spent.get(purpose, 0) + share
    rest = {ChargeKind.BOOT: clock.boot, ChargeKind.IDLE: clock.idle, after_end: _length(ends, period.until_at)}
    return spent | {(kind, None, None): weight for kind, weight in rest.items() if weight}


class _Clock:
    """Goes once through a period. It runs at an n-th of its speed while n tasks run, so that what it shows at the end
    of a task less what it showed at its beginning is that task's share."""

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
        self._shows: dict[datetime, int] = {}
        reading, running, before = 0, 0, begins
        for moment in sorted(changes):
            passed = _length(before, moment)
            if running:
                reading += passed // running
            elif before < ready:
                self.boot += passed
            else:
                self.idle += passed
            self._shows[moment] = reading
            running += changes[moment]
            before = moment

    def shares(self) -> Iterator[tuple[Span, int]]:
        for span, starts, stops in self._clipped:
            yield span, self._shows[stops] - self._shows[starts]


def _length(begins: datetime, ends: datetime) -> int:
    return (ends - begins) // _INSTANT * _FINENESS
