"""When time is paid for, and what it costs. Pure, in integers: no float touches money or the moment a unit begins.

A provider counts whole units from the machine's creation and charges each when it begins:

    units(t)    ceil((t - since) / unit)                       that begin before t; at least one for a machine that was
    charged(t)  sum over calendar months (UTC) of
                min(price * units of that month * unit / 3600, monthly cap)
                of each part of the price that has a cap of its own

An idle worker of a fleet that pays by long units is worth keeping until what is paid is nearly used up: it costs
nothing more and claims what comes. Then it must go in time. From the cycle that lets it go to the end of its machine:

    boundary - 3 cycles - call   the window opens: from here on it may be let go
    boundary - 1 cycle - call    the window closes: let go now, it would be paid for again, so it stays for another unit
    one cycle later              the cycle that finds it drained (an idle worker drains at once) asks for its deletion
    call                         what the provider takes for that, with room for a second try
    boundary                     the next unit begins

A cycle is here the time that there really is between two of them. The window is two wide, so that one cycle that fails
or is late does not cost a unit. Where a provider deletes only so many machines a second, the windows of those who end
together open earlier, one after another.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from windlass.model.cost import Bill, Tariff, hour_of, month_of, next_month

HOUR = timedelta(hours=1)
_SECONDS_PER_HOUR = 3600
_INSTANT = timedelta.resolution
# Shorter units are as good as seconds: nothing is gained by staying to the end of one.
LONG_UNIT_S = 30
# What a deletion may take, and be tried again, before the next unit begins. Units of seconds (in rehearsals) come with
# providers that are as quick, so it is never more than a twentieth of a unit.
DELETE_CALL_S = 30.0
_CALL_SHARE = 20
WINDOW_OPENS_CYCLES = 3
WINDOW_CLOSES_CYCLES = 1
# Of a unit, the most that is given up so that many can be deleted in time: ten minutes of an hour. Beyond that, paying
# for some of them again costs less than sending all of them away so early.
MAX_EARLY_SHARE = 1 / 6


# ------------------------------------------------------------------------------------------------------- what it costs


def units_begun(tariff: Tariff, since: datetime, before: datetime) -> int:
    """How many units begin before this moment."""
    return max(0, -(-(before - since) // timedelta(seconds=tariff.unit_s)))


def unit_end(unit_s: int, since: datetime, now: datetime) -> datetime:
    """When the unit ends that lasts now. Where it begins the one before has ended."""
    unit = timedelta(seconds=unit_s)
    return since + (max(0, (now - since) // unit) + 1) * unit


def charged(tariff: Tariff, since: datetime, before: datetime) -> int:
    """The micros of all units that begin before this moment."""
    total = 0
    begins = month_of(since)
    while begins < before:
        ends = next_month(begins)
        units = units_begun(tariff, since, min(ends, before)) - units_begun(tariff, since, begins)
        total += _price(tariff, units)
        begins = ends
    return total


def cost(tariff: Tariff, since: datetime, until: datetime) -> int:
    """Of a machine's whole life. One that was there for no time at all has begun a unit too."""
    return charged(tariff, since, max(until, since + _INSTANT))


def charged_between(bill: Bill, since: datetime, now: datetime) -> int:
    """Of a bill, what has begun from a moment until now and is not in the ledger yet."""
    ends = max(min(bill.until or now, now), bill.since + _INSTANT)
    begins = max(since, bill.settled_until or bill.since)
    return charged(bill.tariff, bill.since, ends) - charged(bill.tariff, bill.since, min(begins, ends))


def _price(tariff: Tariff, units: int) -> int:
    """Rounded once for all units of a month, so that the rounding of single units never adds up."""
    if not tariff.parts:
        return _rounded(tariff.price_micros_per_hour * units * tariff.unit_s)
    parts = ((_rounded(hour * units * tariff.unit_s), month) for hour, month in tariff.parts)
    return sum(min(micros, cap) for micros, cap in parts)


def _rounded(micro_seconds: int) -> int:
    """Micros per hour times seconds, in micros."""
    return (2 * micro_seconds + _SECONDS_PER_HOUR) // (2 * _SECONDS_PER_HOUR)


# ------------------------------------------------------------------------------------------------- closing the books


@dataclass(frozen=True, slots=True)
class Period:
    """Paid time that is closed as a whole: all units of a machine that begin in the same hour of the clock (UTC).

    For a machine paid by the hour that is one unit. What a day or a month cost is then a sum of whole periods.
    """

    from_at: datetime
    until_at: datetime
    amount_micros: int


def periods(bill: Bill) -> Iterator[Period]:
    """Those that are not in the ledger, oldest first. Endless for a machine that is still there."""
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


# ------------------------------------------------------------------------------------------------------- when to leave


@dataclass(frozen=True, slots=True)
class TerminationWindow:
    """The next occasion for a worker to be let go so that its machine is gone before another unit begins."""

    opens: datetime
    closes: datetime
    boundary: datetime


def is_worth_waiting(unit_s: int, cycle_s: float) -> bool:
    """Whether idle workers are kept for what is paid. Not where the way out takes longer than a unit."""
    return unit_s >= LONG_UNIT_S and _lead_s(unit_s, cycle_s, WINDOW_OPENS_CYCLES) < unit_s


def next_departure(unit_s: int, since: datetime, now: datetime, cycle_s: float) -> TerminationWindow:
    """The window that is open, or opens next."""
    opens = timedelta(seconds=_lead_s(unit_s, cycle_s, WINDOW_OPENS_CYCLES))
    closes = timedelta(seconds=_lead_s(unit_s, cycle_s, WINDOW_CLOSES_CYCLES))
    boundary = unit_end(unit_s, since, now)
    if now > boundary - closes:
        boundary += timedelta(seconds=unit_s)
    return TerminationWindow(boundary - opens, boundary - closes, boundary)


def one_after_another(
    unit_s: int, leaving: Sequence[TerminationWindow], deletions_per_s: float | None
) -> list[TerminationWindow]:
    """The same for workers that may all leave, in the order in which they would: whoever has others behind it that end
    at about the same time may go early enough for all of them to be deleted in time."""
    if deletions_per_s is None:
        return list(leaving)
    turn, earliest = timedelta(seconds=1 / deletions_per_s), timedelta(seconds=MAX_EARLY_SHARE * unit_s)
    found: list[TerminationWindow] = []
    # From the last to the first: by when the deletion of the one after must have begun.
    next_begins: datetime | None = None
    for departure in reversed(leaving):
        ends = departure.boundary if next_begins is None else min(departure.boundary, next_begins)
        next_begins = ends - turn
        opens = max(departure.opens - (departure.boundary - ends), departure.boundary - earliest)
        found.append(replace(departure, opens=min(departure.opens, opens)))
    return found[::-1]


def _lead_s(unit_s: int, cycle_s: float, cycles: int) -> float:
    return cycles * cycle_s + min(DELETE_CALL_S, unit_s / _CALL_SHARE)
