"""Billing periods: what they cost, and when a worker must terminate to avoid another one.

Pure, in integers: neither money nor the start of a period is ever a float.

A provider counts whole units from the machine's creation and charges each when it begins:

    units(t)    ceil((t - since) / unit)                 units that begin before t; at least one for every machine
    charged(t)  sum over calendar months (UTC) of min(price * units of that month * unit / 3600, monthly cap),
                for each part of the price that has its own cap

Where units are long, an idle worker is kept until its paid unit is nearly used up: it costs nothing more and can claim
tasks. To avoid the next unit it must drain within this window:

    boundary - 3 cycles - call   the window opens
    boundary - 1 cycle - call    the window closes; a later drain would be billed again, so the worker stays
    one cycle later              the next cycle finds the worker drained (an idle one drains at once) and deletes it
    call                         time for the deletion and one retry
    boundary                     the next unit begins

A cycle is the real time between two cycles. The window is two cycles wide, so that one failed or late cycle does not
cost a unit. If the provider limits deletions per second, windows that end together open earlier, one after another.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from windlass.model.cost import Bill, Tariff, hour_of, month_of, next_month

HOUR = timedelta(hours=1)
_SECONDS_PER_HOUR = 3600
_INSTANT = timedelta.resolution
# Shorter units count as seconds: keeping a worker to the end of one saves nothing.
LONG_UNIT_S = 30
# Time for a deletion and one retry before the next unit begins. At most a twentieth of a unit: simulated providers with
# units of seconds delete as fast.
DELETE_CALL_S = 30.0
_CALL_SHARE = 20
WINDOW_OPENS_CYCLES = 3
WINDOW_CLOSES_CYCLES = 1
# Share of a unit that is wasted at most so that many machines can be deleted in time: ten minutes of an hour. Beyond
# that, another unit for some of them costs less than draining all of them so early.
MAX_EARLY_SHARE = 1 / 6


# ---------------------------------------------------------------------------------------------------------------- cost


def units_begun(tariff: Tariff, since: datetime, before: datetime) -> int:
    """Units that begin before this moment."""
    return max(0, -(-(before - since) // timedelta(seconds=tariff.unit_s)))


def unit_end(unit_s: int, since: datetime, now: datetime) -> datetime:
    """End of the current unit. At a boundary: the end of the unit that begins there.

    `since` is in the future if our clock is behind the vendor's. By more than a unit: units are counted back from it.
    """
    unit = timedelta(seconds=unit_s)
    units = (now - since) // unit
    return since + (0 if units == -1 else units) * unit + unit


def charged(tariff: Tariff, since: datetime, before: datetime) -> int:
    """Micros for all units that begin before this moment."""
    total = 0
    begins = month_of(since)
    while begins < before:
        ends = next_month(begins)
        units = units_begun(tariff, since, min(ends, before)) - units_begun(tariff, since, begins)
        total += _price(tariff, units)
        begins = ends
    return total


def cost(tariff: Tariff, since: datetime, until: datetime) -> int:
    """Micros for a machine's whole life. Even a machine that lived for no time has begun one unit."""
    return charged(tariff, since, max(until, since + _INSTANT))


def charged_between(bill: Bill, since: datetime, now: datetime) -> int:
    """Micros of a bill for units that began from `since` until now and are not in the ledger yet."""
    ends = max(min(bill.until or now, now), bill.since + _INSTANT)
    begins = max(since, bill.settled_until or bill.since)
    return charged(bill.tariff, bill.since, ends) - charged(bill.tariff, bill.since, min(begins, ends))


def _price(tariff: Tariff, units: int) -> int:
    """Rounded once for all units of a month, so that rounding errors of single units do not add up."""
    if not tariff.parts:
        return _rounded(tariff.price_micros_per_hour * units * tariff.unit_s)
    parts = ((_rounded(hour * units * tariff.unit_s), month) for hour, month in tariff.parts)
    return sum(min(micros, cap) for micros, cap in parts)


def _rounded(micro_seconds: int) -> int:
    """Micros-per-hour times seconds, converted to micros."""
    return (2 * micro_seconds + _SECONDS_PER_HOUR) // (2 * _SECONDS_PER_HOUR)


# ------------------------------------------------------------------------------------------------------ ledger periods


@dataclass(frozen=True, slots=True)
class Period:
    """The billing period that the ledger closes as a whole: all units of a machine that begin in one UTC hour.

    For a machine billed by the hour that is one unit. Days and months are sums of whole periods.
    """

    from_at: datetime
    until_at: datetime
    amount_micros: int


def periods(bill: Bill) -> Iterator[Period]:
    """Periods that are not in the ledger, oldest first. Endless for a machine that still exists."""
    tariff, since = bill.tariff, bill.since
    ends = None if bill.until is None else max(bill.until, since + _INSTANT)
    begins = bill.settled_until or since
    while ends is None or begins < ends:
        closes = hour_of(begins) + HOUR
        if ends is not None:
            closes = min(closes, ends)
        until = since + units_begun(tariff, since, closes) * timedelta(seconds=tariff.unit_s)
        yield Period(begins, until, charged(tariff, since, closes) - charged(tariff, since, begins))
        begins = until


# --------------------------------------------------------------------------------------------------- when to terminate


@dataclass(frozen=True, slots=True)
class TerminationWindow:
    """From `opens` on, a worker may drain so that its machine is deleted before the unit that begins at `boundary`."""

    opens: datetime
    boundary: datetime


def is_worth_waiting(unit_s: int, cycle_s: float) -> bool:
    """Idle workers are kept for the rest of their unit. Not if units are short or draining takes longer than one."""
    return unit_s >= LONG_UNIT_S and lead_s(unit_s, cycle_s, WINDOW_OPENS_CYCLES) < unit_s


def next_window(unit_s: int, since: datetime, now: datetime, cycle_s: float) -> TerminationWindow:
    """The window that is open, or opens next."""
    boundary = unit_end(unit_s, since, now)
    if now > boundary - timedelta(seconds=lead_s(unit_s, cycle_s, WINDOW_CLOSES_CYCLES)):
        boundary += timedelta(seconds=unit_s)
    return TerminationWindow(boundary - timedelta(seconds=lead_s(unit_s, cycle_s, WINDOW_OPENS_CYCLES)), boundary)


def stagger_windows(
    unit_s: int, windows: Sequence[TerminationWindow], deletions_per_s: float | None
) -> list[TerminationWindow]:
    """The windows of workers that may all drain, in drain order, opened early enough to delete all in time."""
    if deletions_per_s is None:
        return list(windows)
    step, earliest = timedelta(seconds=1 / deletions_per_s), timedelta(seconds=MAX_EARLY_SHARE * unit_s)
    found: list[TerminationWindow] = []
    # From the last to the first: when the deletion of the next one must have begun.
    next_begins: datetime | None = None
    for window in reversed(windows):
        ends = window.boundary if next_begins is None else min(window.boundary, next_begins)
        next_begins = ends - step
        opens = max(window.opens - (window.boundary - ends), window.boundary - earliest)
        found.append(replace(window, opens=min(window.opens, opens)))
    return found[::-1]


def lead_s(unit_s: int, cycle_s: float, cycles: int) -> float:
    return cycles * cycle_s + min(DELETE_CALL_S, unit_s / _CALL_SHARE)
