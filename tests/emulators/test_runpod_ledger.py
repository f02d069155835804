"""The bill of the emulated Runpod account, exact to the micro."""

import json
from datetime import UTC, datetime, timedelta
from fractions import Fraction

import pytest

from support.emulated_account import GPU, AccountUnderTest
from windlass_emulators.runpod.catalog import DEFAULT_CATALOG
from windlass_emulators.runpod.ledger import RatePeriod, rounded, volume_rate

# Per hour: the GPU, and 50 GB of disk.
DISK = 6_944
RTX_4090 = 690_000 + DISK
START = datetime(2030, 1, 1, tzinfo=UTC)


def micros(account: AccountUnderTest, pod_id: str) -> int:
    account.emulator.settle()
    bill = account.emulator.ledger.to_json(account.clock.now)
    return next(line["micros"] for line in bill["pods"] + bill["network_volumes"] if line["id"] == pod_id)


@pytest.mark.parametrize(
    ("lived_s", "seconds"), [(0, 0), (0.000001, 1), (1, 1), (1.000001, 2), (59.5, 60), (3600, 3600)]
)
def test_every_started_second_is_billed(lived_s: float, seconds: int) -> None:
    assert RatePeriod(START, Fraction(1), ended=START + timedelta(seconds=lived_s)).seconds(START) == seconds


def test_pod_is_billed_from_creation_to_deletion(account: AccountUnderTest) -> None:
    pod_id = account.create()["id"]
    account.clock.advance(3600)
    assert micros(account, pod_id) == RTX_4090
    account.clock.advance(1)
    assert micros(account, pod_id) == rounded(Fraction(RTX_4090 * 3601, 3600))
    account.request("DELETE", f"/pods/{pod_id}")
    account.clock.advance(86_400)
    (line,) = account.emulator.bill()["pods"]
    assert (line["seconds"], line["deleted"]) == (3601, "2030-01-01T01:00:01+00:00")
    assert line["what"] == f"1x {GPU}, SECURE, US-KS-2"
    assert account.emulator.bill()["pods_micros"] == account.emulator.bill()["total_micros"] == line["micros"]


def test_pod_is_billed_at_its_published_cost(account: AccountUnderTest) -> None:
    pod = account.create(gpu={"id": GPU, "count": 4}, cloud="COMMUNITY")
    assert pod["cost"] == 1.36
    account.clock.advance(1800)
    assert micros(account, pod["id"]) == 680_000 + DISK // 2


def test_stopped_pod_is_free_but_pod_in_error_is_billed(account: AccountUnderTest) -> None:
    account.emulator.faults.next_pod()
    account.emulator.faults.next_pod(dies_after_s=0, dies_as="ERROR")
    stopped, broken = account.create()["id"], account.create()["id"]
    account.clock.advance(1800)
    account.act(stopped, "stop")
    account.clock.advance(1800)
    assert (micros(account, stopped), micros(account, broken)) == (RTX_4090 // 2, RTX_4090)
    account.act(stopped, "start")
    account.clock.advance(1800)
    assert micros(account, stopped) == RTX_4090


def test_pod_created_by_a_failed_request_is_billed(account: AccountUnderTest) -> None:
    account.emulator.faults.next_create(500)
    account.refused()
    assert account.emulator.bill()["pods"] == []
    account.emulator.faults.next_create(500, takes_effect=True)
    account.refused()
    account.clock.advance(3600)
    assert account.emulator.bill()["total_micros"] == RTX_4090


def test_billing_starts_with_the_published_millisecond(account: AccountUnderTest) -> None:
    account.clock.advance(0.7504)
    pod = account.create()
    assert pod["createdAt"] == "2030-01-01T00:00:00.750Z"
    account.clock.advance(0.9998)
    account.request("DELETE", f"/pods/{pod['id']}")
    assert account.emulator.bill()["pods"][0]["seconds"] == 2


def test_grown_volume_is_billed_at_its_new_size(account: AccountUnderTest) -> None:
    volume = account.volume(size=100)
    account.clock.advance(30 * 86_400)
    assert account.emulator.bill()["network_volumes"][0]["micros"] == 7_000_000
    account.request("PATCH", f"/network-volumes/{volume['id']}", {"size": 200})
    account.clock.advance(30 * 86_400)
    account.request("DELETE", f"/network-volumes/{volume['id']}")
    account.clock.advance(86_400)
    assert account.emulator.bill()["total_micros"] == 21_000_000
    assert volume_rate(2000, "HIGH_PERFORMANCE") == 2 * volume_rate(2000, "STANDARD") == Fraction(240_000_000, 720)


def test_every_price_is_a_whole_number_of_micros() -> None:
    assert all(price > 0 for gpu in DEFAULT_CATALOG.gpus for price in gpu.prices_micros.values())


def test_ledger_is_served(account: AccountUnderTest) -> None:
    account.create()
    response = account.api.handle("GET", "/_emulator/ledger", [], {}, b"")
    assert json.loads(response.body) == account.emulator.bill()
