"""The bill, to the micro."""

import json
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.emulated_project import ProjectUnderTest
from support.hetzner_contract import Contract
from windlass.model.cost import Tariff
from windlass.model.hetzner import Choice
from windlass.policy.billing import cost
from windlass.providers.hetzner.catalog import PriceList, read_prices
from windlass_emulators.hetzner import HetznerEmulator, HetznerEmulatorSettings
from windlass_emulators.hetzner.catalog import DEFAULT_CATALOG
from windlass_emulators.hetzner.ledger import MICROS, HetznerBill, HetznerBillLine, hours_by_month

HOUR = timedelta(hours=1)
CX23, IPV4 = 5_600, 800
CX23_MONTH, IPV4_MONTH = 3_490_000, 500_000


@pytest.mark.parametrize(
    ("lived", "hours"),
    [
        (timedelta(), 1),
        (timedelta(seconds=1), 1),
        (timedelta(minutes=59, seconds=59), 1),
        (HOUR, 1),
        (HOUR + timedelta(microseconds=1), 2),
        (25 * HOUR, 25),
        (-HOUR, 1),
    ],
)
def test_every_started_hour_counts(lived: timedelta, hours: int) -> None:
    started = datetime(2030, 6, 10, 12, 34, 56, tzinfo=UTC)
    assert hours_by_month(started, started + lived, HOUR) == [hours]


def test_an_hour_belongs_to_the_month_in_which_it_starts() -> None:
    started = datetime(2030, 1, 31, 22, 30, tzinfo=UTC)
    assert hours_by_month(started, datetime(2030, 2, 1, 0, 30, tzinfo=UTC), HOUR) == [2]
    assert hours_by_month(started, datetime(2030, 2, 1, 0, 31, tzinfo=UTC), HOUR) == [2, 1]
    assert hours_by_month(started, datetime(2030, 3, 1, 0, 30, tzinfo=UTC), HOUR) == [2, 28 * 24]


def test_months_are_counted_as_if_hour_by_hour() -> None:
    started, hour = datetime(2031, 11, 30, 23, 17, tzinfo=UTC), timedelta(minutes=47)
    ended = started + timedelta(days=100)
    by_month: dict[tuple[int, int], int] = {}
    moment = started
    while moment < ended:
        by_month[moment.year, moment.month] = by_month.get((moment.year, moment.month), 0) + 1
        moment += hour
    assert hours_by_month(started, ended, hour) == list(by_month.values())


def test_a_server_costs_its_started_hours_and_its_address(project: ProjectUnderTest) -> None:
    server_id = project.running()
    project.clock.advance(3600 - 8)
    project.ask("DELETE", f"/servers/{server_id}")
    project.clock.advance(86_400)
    bill = project.emulator.bill()
    (line,) = bill["servers"]
    assert (line["hours"], line["server_micros"], line["primary_ip_micros"]) == (1, CX23, IPV4)
    assert line["micros"] == bill["total_micros"] == CX23 + IPV4
    assert line["gross_micros"] == (CX23 + IPV4) * 119 // 100
    assert line["deleted"] == "2030-01-01T01:00:00+00:00"


def test_a_second_too_late_costs_another_hour(project: ProjectUnderTest) -> None:
    server_id = project.running()
    project.clock.advance(3600 - 8 + 1)
    project.ask("DELETE", f"/servers/{server_id}")
    assert project.emulator.ledger.micros_of_server(server_id, project.clock.now) == 2 * (CX23 + IPV4)


def test_a_server_that_is_off_costs_the_same(project: ProjectUnderTest) -> None:
    server_id = project.running()
    project.ask("POST", f"/servers/{server_id}/actions/poweroff")
    project.clock.advance(10 * 3600 - 8)
    assert project.emulator.bill()["total_micros"] == 10 * (CX23 + IPV4)


def test_without_ipv4_there_is_no_address_to_pay(project: ProjectUnderTest) -> None:
    project.create(public_net={"enable_ipv4": False})
    assert project.emulator.bill()["total_micros"] == CX23


def test_no_month_costs_more_than_its_price(project: ProjectUnderTest) -> None:
    project.create()
    project.clock.now = datetime(2030, 1, 27, tzinfo=UTC)
    # 624 hours would be 3,494,400: just above the price of a month.
    assert project.emulator.bill()["servers"][0]["server_micros"] == CX23_MONTH
    project.clock.now = datetime(2030, 2, 1, tzinfo=UTC)
    assert project.emulator.bill()["total_micros"] == CX23_MONTH + IPV4_MONTH
    project.clock.advance(1)
    assert project.emulator.bill()["total_micros"] == CX23_MONTH + IPV4_MONTH + CX23 + IPV4
    project.clock.now = datetime(2030, 3, 1, tzinfo=UTC)
    assert project.emulator.bill()["total_micros"] == 2 * (CX23_MONTH + IPV4_MONTH)


def test_an_address_that_is_left_behind_goes_on_costing(project: ProjectUnderTest) -> None:
    server_id = project.running()
    ip_id = project.ask("GET", f"/servers/{server_id}").json["server"]["public_net"]["ipv4"]["id"]
    project.ask("PUT", f"/primary_ips/{ip_id}", {"auto_delete": False})
    project.ask("DELETE", f"/servers/{server_id}")
    project.clock.advance(10 * 3600 - 8)
    (line,) = project.emulator.bill()["servers"]
    assert (line["server_micros"], line["primary_ip_micros"]) == (CX23, 10 * IPV4)
    assert project.ask("DELETE", f"/primary_ips/{ip_id}").status == 204
    project.clock.advance(10 * 3600)
    assert project.emulator.bill()["total_micros"] == CX23 + 10 * IPV4


def test_an_address_of_its_own_has_a_line_of_its_own(project: ProjectUnderTest) -> None:
    body = {"name": "mine", "type": "ipv4", "assignee_type": "server", "location": "nbg1"}
    ip_id = project.ask("POST", "/primary_ips", body).json["primary_ip"]["id"]
    project.running(public_net={"ipv4": ip_id, "enable_ipv6": False})
    bill = project.emulator.bill()
    assert [line["micros"] for line in bill["servers"]] == [CX23]
    assert [(line["name"], line["micros"]) for line in bill["primary_ips"]] == [("mine", IPV4)]


def test_an_hour_can_be_shorter_for_a_demonstration() -> None:
    project = ProjectUnderTest(Contract.find_or_none(), HetznerEmulatorSettings(billing_hour_s=60))
    server_id = project.running()
    project.clock.advance(52)
    assert project.emulator.ledger.micros_of_server(server_id, project.clock.now) == CX23 + IPV4
    project.clock.advance(1)
    assert project.emulator.ledger.micros_of_server(server_id, project.clock.now) == 2 * (CX23 + IPV4)
    clock = json.loads(project.emulator.handle("GET", "/_emulator/clock", [], {}, b"").body)
    assert clock == {"now": "2030-01-01T00:01:01+00:00", "billing_hour_s": 60.0}


def test_what_is_published_is_what_is_billed(project: ProjectUnderTest) -> None:
    """A life begins with the whole second that `created` shows, so clients can foresee the bill."""
    project.clock.advance(0.9)
    server = project.create()
    assert server["created"] == "2030-01-01T00:00:00Z"
    project.clock.advance(3599.2)
    assert project.emulator.bill()["servers"][0]["hours"] == 2


def test_an_end_is_billed_as_it_is_published_too(project: ProjectUnderTest) -> None:
    """The second in which the deletion began, by its action: at 01:00:00.9 the hour is over, and no other began."""
    server_id = project.running()
    project.clock.advance(3600 - 8 + 0.9)
    action = project.ask("DELETE", f"/servers/{server_id}").json["action"]
    assert action["started"] == "2030-01-01T01:00:00Z"
    project.settled()
    (line,) = project.emulator.bill()["servers"]
    assert (line["deleted"], line["hours"]) == ("2030-01-01T01:00:00+00:00", 1)
    assert line["micros"] == CX23 + IPV4


def test_every_price_is_a_whole_number_of_micros() -> None:
    rates = [rate for kind in DEFAULT_CATALOG.server_types for rate in kind.rates.values()]
    for rate in (*rates, DEFAULT_CATALOG.primary_ipv4):
        for price in (rate.hourly, rate.monthly):
            assert price.net * MICROS % 1 == price.gross * MICROS % 1 == 0


def _published() -> PriceList:
    emulator = HetznerEmulator(lambda: datetime(2030, 1, 1, tzinfo=UTC))
    answer = emulator.handle("GET", "/v1/pricing", [], {"authorization": "Bearer any"}, b"")
    return read_prices(json.loads(answer.body)["pricing"], "net")


PUBLISHED = _published()


@settings(max_examples=300, derandomize=True, deadline=None, database=None)
@given(
    choice=st.sampled_from(sorted(PUBLISHED.servers)),
    has_ipv4=st.booleans(),
    since=st.datetimes(datetime(2030, 1, 1), datetime(2030, 3, 31)).map(lambda naive: naive.replace(tzinfo=UTC)),
    hours=st.one_of(st.integers(0, 1_500), st.integers(610, 630)),
)
def test_we_reckon_as_the_vendor_does_also_where_a_month_is_capped(
    choice: Choice, has_ipv4: bool, since: datetime, hours: int
) -> None:
    """Server and address reach their caps in different hours."""
    ledger, until = HetznerBill(3600.0), since + hours * HOUR
    rates = DEFAULT_CATALOG.server_type(choice.server_type)
    assert rates is not None
    ledger.open(HetznerBillLine("server", 1, "s", rates.rates[choice.location], since, ""))
    if has_ipv4:
        ledger.open(HetznerBillLine("primary_ip", 2, "i", DEFAULT_CATALOG.primary_ipv4, since, "", 1))
    parts = PUBLISHED.of(choice, has_ipv4=has_ipv4)
    tariff = Tariff(sum(part.price_micros_per_hour for part in parts), "EUR", 3600, parts)
    assert cost(tariff, since, until) == ledger.micros_of_server(1, until)
