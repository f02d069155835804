"""Costs of billing units, and termination windows."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.model.cost import Bill, PricePart, Tariff, hour_of, month_of, next_month
from windlass.model.money import amount, to_micros, with_currency
from windlass.policy import billing

T0 = datetime(2026, 3, 1, 10, 20, tzinfo=UTC)
HOURLY = Tariff(6_000, "EUR", 3600, (PricePart(6_000, 3_790_000),))
BY_MINUTE = Tariff(6_001, "EUR", 60)
BY_SECOND = Tariff(1_234_567, "USD", 1)

always = settings(max_examples=300, derandomize=True, deadline=None, database=None)
tariffs = st.builds(
    Tariff,
    price_micros_per_hour=st.integers(1, 10**8),
    currency=st.just("EUR"),
    unit_s=st.sampled_from((1, 60, 600, 3600, 7200)),
    parts=st.lists(st.builds(PricePart, st.integers(1, 10**8), st.integers(1, 10**9)), max_size=3).map(tuple),
)
moments = st.datetimes(datetime(2026, 1, 30), datetime(2026, 4, 2)).map(lambda naive: naive.replace(tzinfo=UTC))
spans = st.one_of(st.timedeltas(timedelta(0), timedelta(hours=5)), st.timedeltas(timedelta(0), timedelta(days=75)))


def after(**span: float) -> datetime:
    return T0 + timedelta(**span)


@pytest.mark.parametrize(
    ("tariff", "lived", "micros"),
    [
        pytest.param(HOURLY, timedelta(0), 6_000, id="a machine that lived for no time has begun an hour"),
        pytest.param(HOURLY, timedelta(seconds=1), 6_000, id="a started hour is an hour"),
        pytest.param(HOURLY, timedelta(hours=1), 6_000, id="an hour is an hour"),
        pytest.param(HOURLY, timedelta(hours=1, microseconds=1), 12_000, id="a moment more is another"),
        pytest.param(HOURLY, timedelta(days=20), 2_880_000, id="twenty days are below the cap of March"),
        pytest.param(HOURLY, timedelta(days=29), 3_790_000, id="twenty-nine days are not"),
        pytest.param(HOURLY, timedelta(days=31), 3_790_000 + 10 * 6_000, id="April has a month of its own"),
        pytest.param(BY_MINUTE, timedelta(seconds=61), 200, id="two minutes, rounded once"),
        pytest.param(BY_MINUTE, timedelta(hours=1), 6_001, id="sixty minutes are an hour's price"),
        pytest.param(BY_SECOND, timedelta(seconds=2.5), 1_029, id="three seconds"),
        pytest.param(BY_SECOND, timedelta(hours=1), 1_234_567, id="3600 seconds are an hour's price"),
    ],
)
def test_cost_of_a_machine(tariff: Tariff, lived: timedelta, micros: int) -> None:
    assert billing.cost(tariff, T0, T0 + lived) == micros


@always
@given(tariffs, moments, spans)
def test_cost_equals_counting_units_by_month(tariff: Tariff, since: datetime, lived: timedelta) -> None:
    """Reference: count the units that begin in each month, price them, apply the cap."""
    if lived / timedelta(seconds=tariff.unit_s) > 20_000:
        return
    counts: dict[datetime, int] = {}
    begins = since
    while begins < since + lived or begins == since:
        counts[month_of(begins)] = counts.get(month_of(begins), 0) + 1
        begins += timedelta(seconds=tariff.unit_s)
    total = 0
    for units in counts.values():
        for price, cap in tariff.parts or ((tariff.price_micros_per_hour, 10**18),):
            micros, rest = divmod(price * units * tariff.unit_s, 3600)
            total += min(micros + (rest >= 1800), cap)
    assert billing.cost(tariff, since, since + lived) == total


@always
@given(tariffs, moments, spans, spans)
def test_longer_life_never_costs_less(tariff: Tariff, since: datetime, one: timedelta, more: timedelta) -> None:
    shorter, longer = (billing.cost(tariff, since, since + lived) for lived in (one, one + more))
    assert shorter <= longer


@always
@given(tariffs, moments, spans)
def test_periods_are_contiguous_and_add_up(tariff: Tariff, since: datetime, lived: timedelta) -> None:
    bill = Bill(tariff, since, since + min(lived, timedelta(days=40)))
    assert bill.until is not None
    found = list(billing.periods(bill))
    assert sum(period.amount_micros for period in found) == billing.cost(tariff, since, bill.until)
    assert found[0].from_at == since
    assert [period.from_at for period in found[1:]] == [period.until_at for period in found[:-1]]
    assert found[-1].from_at < max(bill.until, since + timedelta.resolution) <= found[-1].until_at
    hours = [hour_of(period.from_at) for period in found]
    assert len(set(hours)) == len(hours), "each hour of the clock is closed once"


@always
@given(tariffs, moments, st.integers(0, 30), spans)
def test_settled_units_are_not_charged_again(tariff: Tariff, since: datetime, closed: int, lived: timedelta) -> None:
    bill = Bill(tariff, since, since + min(lived, timedelta(days=3)))
    found = list(billing.periods(bill))[:closed]
    rest = Bill(tariff, since, bill.until, found[-1].until_at if found else None)
    assert bill.until is not None
    paid = sum(period.amount_micros for period in found)
    now = bill.until + timedelta(days=9)
    assert paid + billing.charged_between(rest, since, now) == billing.cost(tariff, since, bill.until)
    assert paid + sum(period.amount_micros for period in billing.periods(rest)) == billing.cost(
        tariff, since, bill.until
    )


@always
@given(tariffs, moments, spans)
def test_charges_by_hour_day_and_month_add_up(tariff: Tariff, since: datetime, lived: timedelta) -> None:
    bill, now = Bill(tariff, since), since + lived
    month = month_of(since)
    total = 0
    while month <= now:
        total += billing.charged(tariff, since, min(next_month(month), now)) - billing.charged(tariff, since, month)
        month = next_month(month)
    assert total == billing.charged(tariff, since, now)
    this_hour = billing.charged_between(bill, hour_of(now), now)
    this_month = billing.charged_between(bill, month_of(now), now)
    assert 0 <= this_hour <= this_month <= billing.cost(tariff, since, now)


# -------------------------------------------------------------------------------------------------- termination windows


@pytest.mark.parametrize(
    ("unit_s", "poll_s", "is_kept"),
    [
        pytest.param(1, 10.0, False, id="seconds"),
        pytest.param(29, 1.0, False, id="29 seconds"),
        pytest.param(30, 1.0, True, id="30 seconds, as in the simulator"),
        pytest.param(60, 10.0, True, id="a minute with short cycles"),
        pytest.param(60, 30.0, False, id="a minute, but draining takes longer"),
        pytest.param(3600, 10.0, True, id="an hour"),
        pytest.param(3600, 1200.0, False, id="an hour, but three cycles are as long"),
    ],
)
def test_when_idle_workers_are_kept(unit_s: int, poll_s: float, is_kept: bool) -> None:
    assert billing.is_worth_waiting(unit_s, poll_s) is is_kept


@pytest.mark.parametrize(
    ("lived_s", "opens_s", "boundary_s"),
    [
        pytest.param(0, 3540, 3600, id="at the beginning of an hour"),
        pytest.param(3530, 3540, 3600, id="shortly before the window"),
        pytest.param(3540, 3540, 3600, id="as the window opens"),
        pytest.param(3560, 3540, 3600, id="at the last safe moment"),
        pytest.param(3561, 7140, 7200, id="too late: it stays for the next unit"),
        pytest.param(3600, 7140, 7200, id="in the next hour"),
        pytest.param(-2, 3540, 3600, id="our clock is a little behind the vendor's"),
        pytest.param(-3 * 3600 + 60, -2 * 3600 - 60, -2 * 3600, id="our clock is hours behind the vendor's"),
    ],
)
def test_termination_window_of_an_hour(lived_s: float, opens_s: float, boundary_s: float) -> None:
    """Cycles of 10 s: opens 3 cycles and 30 s before the boundary, closes 1 cycle and 30 s before it."""
    window = billing.next_window(3600, T0, after(seconds=lived_s), 10.0)
    assert window.opens == after(seconds=opens_s)
    assert window.boundary == after(seconds=boundary_s)


@always
@given(st.sampled_from((60, 600, 3600)), moments, spans, st.floats(0.1, 100.0))
def test_termination_window_is_in_time_and_late(unit_s: int, since: datetime, lived: timedelta, poll_s: float) -> None:
    if not billing.is_worth_waiting(unit_s, poll_s):
        return
    now = since + lived
    window = billing.next_window(unit_s, since, now, poll_s)
    closes = window.boundary - timedelta(seconds=poll_s + min(30.0, unit_s / 20))
    assert window.opens < closes < window.boundary
    assert now <= closes, "enough time is left for a cycle and the deletion"
    assert (window.boundary - since) % timedelta(seconds=unit_s) == timedelta(0)
    assert closes - window.opens >= timedelta(seconds=2 * poll_s) - timedelta.resolution
    lead = window.boundary - window.opens
    assert lead < timedelta(seconds=unit_s)
    if poll_s <= 10 and unit_s == 3600:
        assert lead <= timedelta(seconds=0.2 * unit_s), "no drain in the first four fifths of a billing hour"


def windows(*boundaries_s: float, per_s: float | None, unit_s: int = 3600) -> list[float]:
    """Seconds before its boundary at which each window opens."""
    leaving = [
        billing.next_window(unit_s, after(seconds=at - unit_s), after(seconds=at - unit_s), 10.0) for at in boundaries_s
    ]
    found = billing.stagger_windows(unit_s, leaving, per_s)
    assert [each.boundary for each in found] == [each.boundary for each in leaving]
    return [(each.boundary - each.opens).total_seconds() for each in found]


@pytest.mark.parametrize(
    ("boundaries_s", "per_s", "opens_s"),
    [
        pytest.param([9000], 0.5, [60], id="alone"),
        pytest.param([9000] * 4, None, [60] * 4, id="all can be deleted at once"),
        pytest.param([9000] * 4, 0.5, [66, 64, 62, 60], id="together"),
        pytest.param([9000, 9100, 9200], 0.5, [60, 60, 60], id="far apart"),
        pytest.param([9000, 9000, 9001, 9050], 0.5, [63, 61, 60, 60], id="close together"),
        pytest.param([9000] * 1000, 0.1, [600] * 941, id="at most ten minutes early"),
    ],
)
def test_windows_that_end_together_are_staggered(
    boundaries_s: list[float], per_s: float | None, opens_s: list[float]
) -> None:
    assert windows(*boundaries_s, per_s=per_s)[: len(opens_s)] == pytest.approx(opens_s)


# -------------------------------------------------------------------------------------------------------------- money


@pytest.mark.parametrize(
    ("micros", "text"),
    [
        (0, "0.00"), (9_200_000, "9.20"), (1_204_000_000, "1204.00"), (12_345, "0.0123"), (10_000, "0.01"),
        (1_234, "0.00123"), (12, "0.000012"), (1, "0.000001"), (-5_500_000, "-5.50"), (999_999, "1.0000"),
    ],
)  # fmt: skip
def test_amount_text(micros: int, text: str) -> None:
    assert amount(micros) == text
    assert with_currency(micros, "EUR") == f"EUR {text}"


@pytest.mark.parametrize(("text", "micros"), [("10.00", 10_000_000), ("0.000001", 1), ("7", 7_000_000)])
def test_amount_parsing_is_exact(text: str, micros: int) -> None:
    assert to_micros(text) == micros


@pytest.mark.parametrize("text", ["0.0000001", "ten", "", "nan", "inf"])
def test_invalid_amount_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="amount|decimals"):
        to_micros(text)
