"""The ledger: charges by kind add up to what the machine cost."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.cost.ledger import SETTLE_AFTER, apportion, estimate, settle
from windlass.cost.report import By, add_up, forecasts, merged, total
from windlass.model.cost import Bill, BillingAccount, Charge, ChargeKind, Cost, PricePart, Settlement, Span, Tariff
from windlass.policy import billing

T0 = datetime(2026, 3, 1, 10, 20, tzinfo=UTC)
HOURLY = Tariff(3_600_000, "EUR", 3600)
always = settings(max_examples=200, derandomize=True, deadline=None, database=None)


def at(seconds: float) -> datetime:
    return T0 + timedelta(seconds=seconds)


def account(
    *spans: tuple[int, float, float | None],
    until: float | None = None,
    ready: float | None = 60,
    tariff: Tariff = HOURLY,
    settled: float | None = None,
) -> BillingAccount:
    bill = Bill(tariff, T0, None if until is None else at(until), None if settled is None else at(settled))
    done = tuple(Span(id_, f"q{id_ % 2}", at(begun), None if end is None else at(end)) for id_, begun, end in spans)
    return BillingAccount("w", "f", bill, None if ready is None else at(ready), done)


def charges_by_kind(charges: tuple[Charge, ...] | list[Charge]) -> dict[str, int]:
    """Charges by kind, in micros. At 3.60 per hour a second costs 1,000."""
    names: dict[str, int] = {}
    for charge in charges:
        name = f"task {charge.task_id}" if charge.task_id is not None else str(charge.kind)
        names[name] = names.get(name, 0) + charge.amount_micros
    return names


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param(
            account((1, 100, 400), until=3000),
            {"boot": 60_000, "task 1": 300_000, "idle": 2_640_000, "tail": 600_000},
            id="boot, a task, nothing to do, and the billed time after its end",
        ),
        pytest.param(
            account((1, 100, 400), (2, 200, 400), until=3600),
            {"boot": 60_000, "task 1": 200_000, "task 2": 100_000, "idle": 3_240_000},
            id="two at once share the time",
        ),
        pytest.param(
            account((1, 100, 400), (1, 500, 600), until=3600),
            {"boot": 60_000, "task 1": 400_000, "idle": 3_140_000},
            id="two attempts of one task are one task",
        ),
        pytest.param(account(until=120, ready=None), {"boot": 120_000, "tail": 3_480_000}, id="it was never ready"),
        pytest.param(account(until=0, ready=None), {"tail": 3_600_000}, id="it was gone at once"),
        pytest.param(
            account((1, 30, 100), until=3600),
            {"boot": 30_000, "task 1": 70_000, "idle": 3_500_000},
            id="a task before the worker was reported ready",
        ),
        pytest.param(
            account((1, 100, 4000), until=3700),
            {"boot": 60_000, "idle": 40_000, "task 1": 3_600_000, "tail": 3_500_000},
            id="a task taken back long after its machine was gone costs until then",
        ),
        pytest.param(
            account((1, 100, 5400), until=5500),
            {"boot": 60_000, "idle": 140_000, "task 1": 5_300_000, "tail": 1_700_000},
            id="a task may last longer than an hour",
        ),
    ],
)
def test_charges_by_kind(given: BillingAccount, expected: dict[str, int]) -> None:
    closed = settle(given, at(100_000))
    assert charges_by_kind(closed.charges) == expected
    assert closed.settle_at is None


def test_live_worker_is_settled_hourly() -> None:
    living = account((1, 100, None), tariff=HOURLY)
    first = settle(living, at(3600) + SETTLE_AFTER)
    assert charges_by_kind(first.charges) == {"boot": 60_000, "idle": 40_000, "task 1": 3_500_000}
    assert (first.settled_until, first.settle_at) == (at(3600), at(7200) + SETTLE_AFTER)
    second = settle(replace(living, bill=replace(living.bill, settled_until=first.settled_until)), at(9000))
    assert charges_by_kind(second.charges) == {"task 1": 3_600_000}


def test_settlement_waits_for_late_reports() -> None:
    early = settle(account((1, 100, None)), at(3600))
    assert (early.charges, early.settled_until, early.settle_at) == ((), T0, at(3600) + SETTLE_AFTER)
    ended = settle(account(until=1000), at(1000))
    assert (ended.charges, ended.settle_at) == ((), at(1000) + SETTLE_AFTER)


def test_long_open_bill_is_settled_in_steps() -> None:
    now = at(100 * 3600)
    closed = settle(account(), now)
    assert closed.settled_until == at(24 * 3600)
    assert closed.settle_at is not None
    assert closed.settle_at <= now


def test_second_billing_is_settled_by_clock_hour() -> None:
    closed = settle(account((1, 100, 400), until=3000, tariff=Tariff(3_600_000, "EUR", 1)), at(9999))
    assert [(charge.from_at, charge.until_at) for charge in closed.charges if charge.kind is ChargeKind.IDLE] == [
        (T0, at(2400)), (at(2400), at(3000)),
    ]  # fmt: skip
    assert charges_by_kind(closed.charges) == {"boot": 60_000, "task 1": 300_000, "idle": 2_640_000}


def test_estimate_includes_charges_ahead() -> None:
    assert charges_by_kind(estimate(account((1, 100, None)), at(600))) == {
        "boot": 60_000, "idle": 40_000, "task 1": 500_000, "ahead": 3_000_000,
    }  # fmt: skip
    assert charges_by_kind(estimate(account((1, 100, 200), until=600), at(610)))["tail"] == 3_000_000


@always
@given(st.integers(0, 10**9), st.lists(st.integers(0, 10**12), min_size=1, max_size=30))
def test_split_adds_up_within_one_micro(whole: int, weights: list[int]) -> None:
    if not sum(weights):
        return
    parts = apportion(whole, weights)
    assert sum(parts) == whole
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part - Fraction(whole * weight, sum(weights))) < 1


# --------------------------------------------------------------------------------------------------- properties

tariffs = st.builds(
    Tariff,
    price_micros_per_hour=st.integers(1, 10**7),
    currency=st.just("EUR"),
    unit_s=st.sampled_from((1, 60, 3600)),
    parts=st.lists(st.builds(PricePart, st.integers(1, 10**7), st.integers(1, 10**7)), max_size=2).map(tuple),
)
seconds = st.floats(0, 20_000).map(lambda value: round(value, 6))


@st.composite
def accounts(draw: st.DrawFn) -> BillingAccount:
    spans = [
        (id_, min(one, other), max(one, other) + 0.000001)
        for id_, (one, other) in enumerate(draw(st.lists(st.tuples(seconds, seconds), max_size=8)))
    ]
    return account(
        *spans,
        until=draw(seconds),
        ready=draw(st.one_of(st.none(), seconds)),
        tariff=draw(tariffs),
    )


@always
@given(accounts())
def test_charges_add_up_to_the_bill(given: BillingAccount) -> None:
    bill = given.bill
    assert bill.until is not None
    closed = settle(given, bill.until + timedelta(days=1))
    assert sum(charge.amount_micros for charge in closed.charges) == billing.cost(bill.tariff, bill.since, bill.until)
    assert all(charge.amount_micros > 0 for charge in closed.charges)
    keys = [(charge.from_at, charge.kind, charge.task_id) for charge in closed.charges]
    assert len(set(keys)) == len(keys), "nothing is charged twice"


@always
@given(accounts(), st.lists(st.floats(0, 25_000), max_size=5))
def test_settlement_time_does_not_change_charges(given: BillingAccount, looks: list[float]) -> None:
    """Settled hourly while the machine exists, or at once after its deletion."""
    until = given.bill.until
    assert until is not None
    living = replace(given, bill=replace(given.bill, until=None))
    charges: list[Charge] = []
    for moment in sorted(map(at, looks)):
        if moment > until:
            break
        seen = replace(
            living,
            spans=tuple(
                replace(span, until_at=span.until_at if span.until_at and span.until_at <= moment else None)
                for span in living.spans
                if span.from_at <= moment
            ),
        )
        closed = settle(seen, moment)
        charges += closed.charges
        living = after(living, closed)
    last = settle(replace(living, bill=replace(living.bill, until=until)), until + timedelta(days=1))
    at_once = settle(given, until + timedelta(days=1))
    assert [*charges, *last.charges] == list(at_once.charges)


def after(before: BillingAccount, closed: Settlement) -> BillingAccount:
    return replace(before, bill=replace(before.bill, settled_until=closed.settled_until))


@always
@given(accounts(), seconds)
def test_estimate_adds_up_to_begun_units(given: BillingAccount, now_s: float) -> None:
    now = at(now_s)
    living = replace(given, bill=replace(given.bill, until=None))
    guessed = sum(charge.amount_micros for charge in estimate(living, now))
    assert guessed == billing.cost(given.bill.tariff, T0, now)


# ------------------------------------------------------------------------------------------------------------ reports


def test_costs_are_grouped_by_requested_key() -> None:
    charges = settle(account((1, 100, 400), (2, 500, 900), until=3000), at(99_999)).charges
    by_queue = {cost.key: cost for cost in add_up(charges, By.QUEUE)}
    assert by_queue["q1"] == Cost("q1", "EUR", task_micros=300_000)
    assert by_queue[None] == Cost(None, "EUR", boot_micros=60_000, idle_micros=2_240_000, tail_micros=600_000)
    (day,) = add_up(charges, By.DAY)
    assert (day.key, day.total_micros, day.wasted_share) == ("2026-03-01", 3_600_000, 2_900_000 / 3_600_000)
    assert [cost.key for cost in add_up(charges, By.TASK) if cost.key] == ["1", "2"]
    assert [cost.key for cost in add_up(charges, By.WORKER)] == ["w"]
    again = merged(add_up(charges, By.FLEET), add_up(charges, By.FLEET, is_estimate=True))
    assert [(cost.key, cost.total_micros, cost.is_estimate) for cost in again] == [("f", 7_200_000, True)]
    assert [cost.total_micros for cost in total(again)] == [7_200_000]


def test_month_forecast_from_spending_and_live_workers() -> None:
    now = datetime(2026, 3, 31, 22, 30, tzinfo=UTC)
    plain = Tariff(1_000_000, "EUR", 3600)
    capped = replace(plain, parts=(PricePart(1_000_000, 1_500_000),))
    born = datetime(2026, 3, 31, 21, 45, tzinfo=UTC)
    open_accounts = [
        BillingAccount("a", "f", Bill(plain, born), None),
        BillingAccount("b", "f", Bill(capped, born), None),
        BillingAccount("c", "f", Bill(plain, born, until=born), None),
    ]
    (forecast,) = forecasts([Cost(None, "EUR", task_micros=5)], open_accounts, datetime(2026, 3, 1, tzinfo=UTC), now)
    # Each has begun one hour. The next begin at 22:45 and 23:45, and the cap leaves half of the first.
    assert forecast.spent_micros == 5 + 3_000_000
    assert (forecast.workers, forecast.burn_micros_per_hour) == (2, 2_000_000)
    assert forecast.rest_micros == 2_000_000 + 500_000
    assert forecast.month_micros == 5_500_005
