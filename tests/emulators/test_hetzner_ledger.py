"""The bill of the emulated Hetzner project, exact to the micro."""

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


def micros_of_server(ledger: HetznerBill, server_id: int, now: datetime) -> int:
    """Net, including the server's Primary IPs."""
    return next(int(line["micros"]) for line in ledger.to_json(now)["servers"] if line["id"] == server_id)


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
def test_every_started_hour_is_billed(lived: timedelta, hours: int) -> None:
    started = datetime(2030, 6, 10, 12, 34, 56, tzinfo=UTC)
    assert hours_by_month(started, started + lived, HOUR) == [hours]


def test_hour_belongs_to_the_month_in_which_it_starts() -> None:
    started = datetime(2030, 1, 31, 22, 30, tzinfo=UTC)
    assert hours_by_month(started, datetime(2030, 2, 1, 0, 30, tzinfo=UTC), HOUR) == [2]
    assert hours_by_month(started, datetime(2030, 2, 1, 0, 31, tzinfo=UTC), HOUR) == [2, 1]
    assert hours_by_month(started, datetime(2030, 3, 1, 0, 30, tzinfo=UTC), HOUR) == [2, 28 * 24]


def test_monthly_counts_equal_counting_hour_by_hour() -> None:
    started, hour = datetime(2031, 11, 30, 23, 17, tzinfo=UTC), timedelta(minutes=47)
    ended = started + timedelta(days=100)
    by_month: dict[tuple[int, int], int] = {}
    moment = started
    while moment < ended:
        by_month[moment.year, moment.month] = by_month.get((moment.year, moment.month), 0) + 1
        moment += hour
    assert hours_by_month(started, ended, hour) == list(by_month.values())


def test_server_is_billed_with_its_primary_ip(project: ProjectUnderTest) -> None:
    server_id = project.running()
    project.clock.advance(3600 - 8)
    project.request("DELETE", f"/servers/{server_id}")
    project.clock.advance(86_400)
    bill = project.emulator.bill()
    (line,) = bill["servers"]
    assert (line["hours"], line["server_micros"], line["primary_ip_micros"]) == (1, CX23, IPV4)
    assert line["micros"] == bill["total_micros"] == CX23 + IPV4
    assert line["gross_micros"] == (CX23 + IPV4) * 119 // 100
    assert line["deleted"] == "2030-01-01T01:00:00+00:00"


def test_one_second_over_the_hour_bills_another_hour(project: ProjectUnderTest) -> None:
    server_id = project.running()
    project.clock.advance(3600 - 8 + 1)
    project.request("DELETE", f"/servers/{server_id}")
    assert micros_of_server(project.emulator.ledger, server_id, project.clock.now) == 2 * (CX23 + IPV4)


def test_server_that_is_off_costs_the_same(project: ProjectUnderTest) -> None:
    server_id = project.running()
    project.request("POST", f"/servers/{server_id}/actions/poweroff")
    project.clock.advance(10 * 3600 - 8)
    assert project.emulator.bill()["total_micros"] == 10 * (CX23 + IPV4)


def test_server_without_ipv4_has_no_address_cost(project: ProjectUnderTest) -> None:
    project.create(public_net={"enable_ipv4": False})
    assert project.emulator.bill()["total_micros"] == CX23


def test_monthly_price_caps_the_bill(project: ProjectUnderTest) -> None:
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


def test_leftover_primary_ip_is_still_billed(project: ProjectUnderTest) -> None:
    server_id = project.running()
    ip_id = project.request("GET", f"/servers/{server_id}").json["server"]["public_net"]["ipv4"]["id"]
    project.request("PUT", f"/primary_ips/{ip_id}", {"auto_delete": False})
    project.request("DELETE", f"/servers/{server_id}")
    project.clock.advance(10 * 3600 - 8)
    (line,) = project.emulator.bill()["servers"]
    assert (line["server_micros"], line["primary_ip_micros"]) == (CX23, 10 * IPV4)
    assert project.request("DELETE", f"/primary_ips/{ip_id}").status == 204
    project.clock.advance(10 * 3600)
    assert project.emulator.bill()["total_micros"] == CX23 + 10 * IPV4


def test_unassigned_primary_ip_has_its_own_line(project: ProjectUnderTest) -> None:
    location = DEFAULT_CATALOG.locations[1]
    project.emulator.project.add_primary_ip("ipv4", location, is_auto_deleted=False, name="mine")
    project.running(public_net={"enable_ipv4": False})
    bill = project.emulator.bill()
    assert [line["micros"] for line in bill["servers"]] == [CX23]
    assert [(line["name"], line["micros"]) for line in bill["primary_ips"]] == [("mine", IPV4)]


def test_billed_hour_can_be_shortened() -> None:
    project = ProjectUnderTest(Contract.find_or_none(), HetznerEmulatorSettings(billing_hour_s=60))
    server_id = project.running()
    project.clock.advance(52)
    assert micros_of_server(project.emulator.ledger, server_id, project.clock.now) == CX23 + IPV4
    project.clock.advance(1)
    assert micros_of_server(project.emulator.ledger, server_id, project.clock.now) == 2 * (CX23 + IPV4)
    clock = json.loads(project.emulator.handle("GET", "/_emulator/clock", [], {}, b"").body)
    assert clock == {"now": "2030-01-01T00:01:01+00:00", "billing_hour_s": 60.0}


def test_published_creation_time_is_billed(project: ProjectUnderTest) -> None:
    """Billing starts with the whole second that `created` shows, so clients can compute the bill."""
    project.clock.advance(0.9)
    server = project.create()
    assert server["created"] == "2030-01-01T00:00:00Z"
    project.clock.advance(3599.2)
    assert project.emulator.bill()["servers"][0]["hours"] == 2


def test_published_deletion_time_is_billed(project: ProjectUnderTest) -> None:
    """Billing ends with the second of the deletion's `started`: at 01:00:00.9 no second hour has begun."""
    server_id = project.running()
    project.clock.advance(3600 - 8 + 0.9)
    action = project.request("DELETE", f"/servers/{server_id}").json["action"]
    assert action["started"] == "2030-01-01T01:00:00Z"
    project.settle_all()
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
def test_windlass_cost_equals_the_emulated_bill(choice: Choice, has_ipv4: bool, since: datetime, hours: int) -> None:
    """Server and address reach their caps in different hours."""
    ledger, until = HetznerBill(3600.0), since + hours * HOUR
    rates = DEFAULT_CATALOG.server_type(choice.server_type)
    assert rates is not None
    ledger.open(HetznerBillLine("server", 1, "s", rates.rates[choice.location], since, ""))
    if has_ipv4:
        ledger.open(HetznerBillLine("primary_ip", 2, "i", DEFAULT_CATALOG.primary_ipv4, since, "", 1))
    parts = PUBLISHED.price_parts(choice, has_ipv4=has_ipv4)
    tariff = Tariff(sum(part.price_micros_per_hour for part in parts), "EUR", 3600, parts)
    assert cost(tariff, since, until) == micros_of_server(ledger, 1, until)
