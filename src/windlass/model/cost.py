"""Costs: tariffs, bills, and what each part of a bill was for. Money is in integer micros."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import NamedTuple


class PricePart(NamedTuple):
    """A part of a price with its own monthly cap: a server, its IP address."""

    price_micros_per_hour: int
    # Cap for the units that begin in one calendar month (UTC).
    price_micros_per_month: int


@dataclass(frozen=True, slots=True)
class Tariff:
    """Whole units of time from the machine's creation, each charged when it begins."""

    price_micros_per_hour: int
    currency: str
    # 3600: per started hour.
    unit_s: int = 1
    # The parts of the price if they have monthly caps. Empty: no cap.
    parts: tuple[PricePart, ...] = ()


@dataclass(frozen=True, slots=True)
class Bill:
    """What a provider charges for one machine."""

    tariff: Tariff
    since: datetime
    # When the provider confirmed the deletion. None: the machine exists.
    until: datetime | None = None
    # Units that began before this moment are in the ledger.
    settled_until: datetime | None = None


class ChargeKind(StrEnum):
    TASK = "task"
    BOOT = "boot"  # from the machine's creation until the worker was ready
    IDLE = "idle"
    TAIL = "tail"  # from the machine's deletion to the end of its billing period
    # Only in estimates: charged, but still in the future.
    AHEAD = "ahead"


@dataclass(frozen=True, slots=True)
class Span:
    """Time that a worker spent on one attempt of a task. No end: it still runs."""

    task_id: int
    queue: str
    from_at: datetime
    until_at: datetime | None


@dataclass(frozen=True, slots=True)
class BillingAccount:
    """A worker whose bill is open, and what it did in the open time."""

    worker_id: str
    fleet: str
    bill: Bill
    # When it was first ready. None: never.
    ready_at: datetime | None
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class Charge:
    """A part of the charge for the time from `from_at` to `until_at`, and what it was for."""

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
    """Ledger entries for a worker. Valid only while the account is unchanged since it was read."""

    account: BillingAccount
    settled_until: datetime
    # When there is more to close. None: never, the bill is closed.
    settle_at: datetime | None
    charges: tuple[Charge, ...]


@dataclass(frozen=True, slots=True)
class Spending:
    """What a fleet has spent in the present hour, day and month (UTC)."""

    currency: str
    hour_micros: int = 0
    day_micros: int = 0
    month_micros: int = 0


@dataclass(frozen=True, slots=True)
class Cost:
    """Costs of one `key` (a day, fleet, queue, worker or task) by kind.

    No key: costs that belong to none of them. The boot of a worker, for example, belongs to no queue.
    """

    key: str | None
    currency: str
    task_micros: int = 0
    boot_micros: int = 0
    idle_micros: int = 0
    tail_micros: int = 0
    ahead_micros: int = 0
    # A part is not settled yet and may change.
    is_estimate: bool = False

    @property
    def total_micros(self) -> int:
        return self.task_micros + self.boot_micros + self.idle_micros + self.tail_micros + self.ahead_micros

    @property
    def wasted_share(self) -> float | None:
        """The share of the used-up costs that was for no task."""
        used = self.total_micros - self.ahead_micros
        return (used - self.task_micros) / used if used else None


# The vendors' month has 30 days.
HOURS_PER_MONTH = 30 * 24


@dataclass(frozen=True, slots=True)
class VolumeCost:
    """What a shared volume cost since a moment, as far as cycles have seen it, and its price now."""

    volume_id: str
    # All that use it. It is billed once.
    fleets: tuple[str, ...]
    size_gb: int
    currency: str
    amount_micros: int
    price_micros_per_hour: int

    @property
    def month_micros(self) -> int:
        return self.price_micros_per_hour * HOURS_PER_MONTH


# ---------------------------------------------------------------------------------------------- ledger calendar


def hour_of(moment: datetime) -> datetime:
    """Start of the hour in UTC: bills ignore daylight saving time."""
    return moment.astimezone(UTC).replace(minute=0, second=0, microsecond=0)


def day_of(moment: datetime) -> datetime:
    return hour_of(moment).replace(hour=0)


def month_of(moment: datetime) -> datetime:
    return day_of(moment).replace(day=1)


def next_month(moment: datetime) -> datetime:
    return month_of(month_of(moment) + timedelta(days=31))
