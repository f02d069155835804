"""Runpod's bill, to the micro."""

import itertools
import json
from datetime import UTC, datetime, timedelta
from fractions import Fraction

import pytest

from support.emulated_account import GPU, OTHER_GPU, AccountUnderTest
from windlass_emulators.runpod.catalog import DEFAULT_CATALOG
from windlass_emulators.runpod.ledger import Stretch, rounded, volume_rate

# Per hour.
RTX_4090 = 690_000
START = datetime(2030, 1, 1, tzinfo=UTC)


def micros(account: AccountUnderTest, pod_id: str) -> int:
    account.emulator.settle()
    return account.emulator.ledger.micros_of(pod_id, account.clock.now)


@pytest.mark.parametrize(
    ("lived_s", "seconds"), [(0, 0), (0.000001, 1), (1, 1), (1.000001, 2), (59.5, 60), (3600, 3600)]
)
def test_every_started_second_counts(lived_s: float, seconds: int) -> None:
    assert Stretch(START, Fraction(1), START + timedelta(seconds=lived_s)).seconds(START) == seconds


def test_seconds_belong_to_the_bucket_they_start_in() -> None:
    stretch = Stretch(START + timedelta(seconds=0.5), Fraction(1), START + timedelta(seconds=20))
    cuts = [START + timedelta(seconds=each) for each in (0, 7, 7.5, 13.25, 30)]
    parts = [stretch.seconds(START, since, until) for since, until in itertools.pairwise(cuts)]
    assert (parts, sum(parts)) == ([7, 0, 6, 7], stretch.seconds(START))


def test_a_pod_costs_its_rate_from_its_creation_to_its_deletion(account: AccountUnderTest) -> None:
    pod_id = account.create()["id"]
    account.clock.advance(3600)
    assert micros(account, pod_id) == RTX_4090
    account.clock.advance(1)
    assert micros(account, pod_id) == rounded(Fraction(RTX_4090 * 3601, 3600))
    account.ask("DELETE", f"/pods/{pod_id}")
    account.clock.advance(86_400)
    (line,) = account.emulator.bill()["pods"]
    assert (line["seconds"], line["deleted"]) == (3601, "2030-01-01T01:00:01+00:00")
    assert line["what"] == f"1x {GPU}, SECURE, US-KS-2"
    assert account.emulator.bill()["pods_micros"] == account.emulator.bill()["total_micros"] == line["micros"]


def test_the_rate_is_the_cost_that_is_published(account: AccountUnderTest) -> None:
    pod = account.create(gpu={"id": GPU, "count": 4}, cloud="COMMUNITY")
    assert pod["cost"] == 1.36
    account.clock.advance(1800)
    assert micros(account, pod["id"]) == 680_000


def test_a_stopped_pod_costs_nothing_and_one_in_error_does(account: AccountUnderTest) -> None:
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


def test_a_refused_pod_costs_nothing_and_a_hidden_one_does(account: AccountUnderTest) -> None:
    account.emulator.faults.next_create(500)
    account.refused()
    assert account.emulator.bill()["pods"] == []
    account.emulator.faults.next_create(500, takes_effect=True)
    account.refused()
    account.clock.advance(3600)
    assert account.emulator.bill()["total_micros"] == RTX_4090


def test_a_life_begins_with_the_second_that_is_published(account: AccountUnderTest) -> None:
    account.clock.advance(0.75)
    pod_id = account.create()["id"]
    account.clock.advance(0.5)
    account.ask("DELETE", f"/pods/{pod_id}")
    assert account.emulator.bill()["pods"][0]["seconds"] == 2


def test_a_volume_costs_its_size_also_after_it_grew(account: AccountUnderTest) -> None:
    volume = account.volume(size=100)
    account.clock.advance(30 * 86_400)
    assert account.emulator.bill()["network_volumes"][0]["micros"] == 7_000_000
    account.ask("PATCH", f"/network-volumes/{volume['id']}", {"size": 200})
    account.clock.advance(30 * 86_400)
    account.ask("DELETE", f"/network-volumes/{volume['id']}")
    account.clock.advance(86_400)
    assert account.emulator.bill()["total_micros"] == 21_000_000
    assert volume_rate(2000, "HIGH_PERFORMANCE") == 2 * volume_rate(2000, "STANDARD") == Fraction(240_000_000, 720)


def test_every_price_is_a_whole_number_of_micros() -> None:
    assert all(price > 0 for gpu in DEFAULT_CATALOG.gpus for price in gpu.prices_micros.values())


def test_the_ledger_is_served(account: AccountUnderTest) -> None:
    account.create()
    response = account.face.handle("GET", "/_emulator/ledger", [], {}, b"")
    assert json.loads(response.body) == account.emulator.bill()


# --------------------------------------------------------------------------------------------------------- /billing


def test_billing_is_the_ledger_in_buckets(account: AccountUnderTest) -> None:
    account.clock.advance(23 * 3600)
    first = account.create()["id"]
    second = account.create(gpu={"id": OTHER_GPU})["id"]
    account.clock.advance(2 * 3600)
    answered = account.ask("GET", "/billing/pods?bucketSize=day").json
    assert [(each["podId"], each["startTime"], each["gpuAmount"]) for each in answered["records"]] == [
        (first, "2030-01-01T00:00:00Z", 0.69),
        (second, "2030-01-01T00:00:00Z", 0.86),
        (first, "2030-01-02T00:00:00Z", 0.69),
        (second, "2030-01-02T00:00:00Z", 0.86),
    ]
    metadata = answered["metadata"]
    assert (metadata["recordCount"], metadata["uniquePodCount"], metadata["totals"]["totalAmount"]) == (4, 2, 3.1)
    only = account.ask("GET", f"/billing/pods?podId={first}&lastN=2&bucketSize=hour").json
    assert [each["totalAmount"] for each in only["records"]] == [0.69]
    assert only["metadata"]["query"] == {
        "startTime": "2030-01-02T00:00:00Z", "endTime": "2030-01-02T02:00:00Z", "bucketSize": "hour", "podId": first,
    }  # fmt: skip
    account.volume()
    account.clock.advance(3600)
    whole = account.ask("GET", "/billing?bucketSize=month").json
    assert whole["metadata"]["totals"]["podGpuAmount"] == 4.65
    assert whole["metadata"]["totals"]["storageStandardAmount"] > 0


@pytest.mark.parametrize("size", ["hour", "day", "week", "month", "year"])
def test_buckets_add_up_to_the_bill(account: AccountUnderTest, size: str) -> None:
    account.clock.now = datetime(2030, 1, 31, 22, 30, 0, tzinfo=UTC)
    account.emulator.settle()
    pod_id = account.create()["id"]
    account.clock.advance(3 * 86_400 + 1234)
    totals = account.ask("GET", f"/billing/pods?bucketSize={size}&lastN=100").json["metadata"]["totals"]
    assert totals["totalAmount"] == micros(account, pod_id) / 1_000_000


@pytest.mark.parametrize("kind", ["serverless", "clusters", "endpoints", "network-volumes"])
def test_what_there_is_none_of_costs_nothing(account: AccountUnderTest, kind: str) -> None:
    answered = account.ask("GET", f"/billing/{kind}").json
    assert (answered["records"], answered["metadata"]["totals"]["totalAmount"]) == ([], 0)


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("bucketSize=decade", 422),
        ("lastN=0", 422),
        ("lastN=3&startTime=2030-01-01T00:00:00Z", 400),
        ("startTime=yesterday", 422),
        ("startTime=2030-01-01T00:00:00", 422),
        ("startTime=2031-01-01T00:00:00Z&endTime=2030-01-01T00:00:00Z", 400),
        ("startTime=1970-01-01T00:00:00Z&bucketSize=hour", 400),
        ("startTime=0001-01-01T00:00:00Z&bucketSize=day", 400),
        ("lastN=19999&bucketSize=year", 400),
        ("startTime=2029-12-01T00:00:00Z&endTime=2030-01-01T00:00:00Z&bucketSize=week", 200),
    ],
)
def test_what_billing_may_be_asked(account: AccountUnderTest, query: str, status: int) -> None:
    assert account.ask("GET", f"/billing/pods?{query}").status == status
