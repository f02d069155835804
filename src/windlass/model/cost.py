"""What machines cost: how a provider counts, what it has charged, and what that was for. Money is in integer micros."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import NamedTuple


class PricePart(NamedTuple):
    """What is charged by itself: a server, its address."""

    price_micros_per_hour: int
    # At most this much for the units that begin in one calendar month (UTC).
    price_micros_per_month: int


@dataclass(frozen=True, slots=True)
class Tariff:
    """How a provider counts: whole units of time from the machine's creation on, each charged when it begins."""

    price_micros_per_hour: int
    currency: str
    # 3600: per started hour.
    unit_s: int = 1
    # Where a month costs no more than so much: what the price is made of, each part with its own limit.
    parts: tuple[PricePart, ...] = ()


@dataclass(frozen=True, slots=True)
class Bill:
    """A machine as its provider charges for it."""

    tariff: Tariff
    since: datetime
    # When the provider said that it was gone. None: it is there.
    until: datetime | None = None
    # What began before this is in the ledger.
    settled_until: datetime | None = None


class ChargeKind(StrEnum):
    TASK = "task"
    BOOT = "boot"  # from the machine's creation until the worker was ready
    IDLE = "idle"
    TAIL = "tail"  # from the machine's end to the end of what is paid
    # Only in estimates: paid, and not lived through yet.
    AHEAD = "ahead"


@dataclass(frozen=True, slots=True)
class Span:
    """Time that a worker spent on one attempt of a task. Without an end, it still does."""

    task_id: int
    queue: str
    from_at: datetime
    until_at: datetime | None


@dataclass(frozen=True, slots=True)
class BillingAccount:
    """A worker whose bill is not closed, with what it did in the time that is not."""

    worker_id: str
    fleet: str
    bill: Bill
    # When it was first of use. None: never yet.
    ready_at: datetime | None
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class Charge:
    """A part of what was paid for the time from `from_at` to `until_at`, and what that part was for."""

    worker_id: str
    fleet: str
    kind: ChargeKind
    from_at: datetime
    until_at: datetime
    amount_micros: int
    currency: str
    task_id: int | None = None
    queue: str | None = None


@dataclass(frozen=True, slots=True)
class Settlement:
    """What to write into the ledger for a worker. It holds only while the account is as it was read."""

    account: BillingAccount
    settled_until: datetime
    # When there will be more to close. None: never, it is over.
    settle_at: datetime | None
    charges: tuple[Charge, ...]


@dataclass(frozen=True, slots=True)
class Spending:
    """What a fleet has spent in this hour, on this day and in this month (UTC)."""

    currency: str
    hour_micros: int = 0
    day_micros: int = 0
    month_micros: int = 0


@dataclass(frozen=True, slots=True)
class Cost:
    """What was spent on something (`key`: a day, a fleet, a queue, a worker, a task), by what it was for.

    Without a key: it was for none of them, as the boot of a worker is for no queue.
    """

    key: str | None
    currency: str
    task_micros: int = 0
    boot_micros: int = 0
    idle_micros: int = 0
    tail_micros: int = 0
    ahead_micros: int = 0
    # A part of it may change: it is not settled yet.
    is_estimate: bool = False

    @property
    def total_micros(self) -> int:
        return self.task_micros + self.boot_micros + self.idle_micros + self.tail_micros + self.ahead_micros

    @property
    def wasted_share(self) -> float | None:
        """Of what is used up, the part that was for no task."""
        used = self.total_micros - self.ahead_micros
        return (used - self.task_micros) / used if used else None


# ---------------------------------------------------------------------------------------------- the books' calendar


def hour_of(moment: datetime) -> datetime:
    """When its hour began, by UTC: no bill knows of summer time."""
    return moment.astimezone(UTC).replace(minute=0, second=0, microsecond=0)


def day_of(moment: datetime) -> datetime:
    return hour_of(moment).replace(hour=0)


def month_of(moment: datetime) -> datetime:
    return day_of(moment).replace(day=1)


def next_month(moment: datetime) -> datetime:
    return month_of(month_of(moment) + timedelta(days=31))
