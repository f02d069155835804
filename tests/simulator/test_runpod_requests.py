"""Request rate, doctor checks and network volumes of the Runpod provider, in virtual time."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from support.runpod_fixture import GPU, IMAGE, OTHER_GPU, EmulatedRunpod, request_for
from support.simulator.loop import virtual_now
from support.virtual_time import in_virtual_time
from windlass.model.errors import (
    Ambiguous,
    ProviderError,
    Throttled,
    Unavailable,
)
from windlass.model.runpod import RunpodSettings
from windlass.providers.fingerprint import fingerprint
from windlass.providers.runpod.doctor_checks import run_checks
from windlass.providers.runpod.limiter import RunpodLimiter


@in_virtual_time
async def test_429_pauses_all_fleets_with_the_key() -> None:
    cloud = EmulatedRunpod()
    account = cloud.account()
    provider, other = cloud.provider(account=account), cloud.provider("blue", account=account)
    cloud.faults.next(429, method="POST", retry_after_s=12)
    with pytest.raises(Throttled) as caught:
        await provider.create(request_for())
    assert caught.value.retry_after_s == 12
    assert cloud.pods == {}
    began = virtual_now()
    await other.create(request_for(fleet="blue"))
    assert virtual_now() - began > timedelta(seconds=11)


@in_virtual_time
async def test_requests_stay_below_the_vendors_rate_limits() -> None:
    cloud = EmulatedRunpod(requests_per_minute=30, requests_per_hour=600)
    provider = cloud.provider(list_reuse_s=0.0)
    for slot in range(15):
        await provider.create(request_for(slot))
        await provider.list_machines()
    for machine in await provider.list_machines():
        while True:
            try:
                await provider.delete(machine)
                break
            except (Throttled, Unavailable):
                await asyncio.sleep(10)
    assert cloud.pods == {}
    minutes = [at.replace(second=0) for at, _, _ in cloud.emulator.requests]
    assert all(window.remaining(virtual_now()) > 0 for window in cloud.emulator._windows)
    assert max(minutes.count(minute) for minute in set(minutes)) <= 60


@in_virtual_time
async def test_doctor_reports_a_healthy_configuration() -> None:
    cloud = EmulatedRunpod(checks_contract=True)
    volume = cloud.client.post("/network-volumes", json={"name": "d", "size": 100, "dataCenter": "EU-RO-1"}).json()
    settings = RunpodSettings(image="i", choices=[f"{GPU}@SECURE/EU-RO-1"], network_volume_id=volume["id"])
    await cloud.provider().create(request_for())
    diagnostics = [diagnostic async for diagnostic in run_checks(cloud.account(), "this", {"red": settings})]
    assert [(diagnostic.check, diagnostic.message, diagnostic.advice) for diagnostic in diagnostics] == [
        ("runpod", "key valid, windlass pods: 1", ""),
        ("volume", "d (100 GB in EU-RO-1)", ""),
        ("gpu type", f"{GPU} in SECURE/EU-RO-1, 0.69 USD per hour", ""),
    ]
    assert {method for _, method, _ in cloud.sent()} == {"GET", "POST"}


@pytest.mark.parametrize(
    ("settings", "check", "what", "is_error"),
    [
        ({"choices": ["NVIDIA Abacus"]}, "gpu type", "NVIDIA Abacus does not exist", True),
        ({"choices": ["NVIDIA H200@COMMUNITY"]}, "gpu type", "NVIDIA H200 is not offered in COMMUNITY", True),
        ({"gpu_count": 9}, "gpu type", "can have at most 8 of", True),
        ({"choices": [f"{OTHER_GPU}@SECURE/EU-RO-1"]}, "gpu type", "SECURE/EU-RO-1 is out of stock", False),
        ({"network_volume_id": "nope"}, "volume", "network volume nope: network volume not found (404)", True),
        ({"registry_id": "nope"}, "registry", "registry nope: ", True),
    ],
)  # fmt: skip
def test_doctor_reports_each_problem(settings: dict[str, Any], check: str, what: str, is_error: bool) -> None:
    @in_virtual_time
    async def look() -> None:
        cloud = EmulatedRunpod()
        cloud.faults.no_capacity(OTHER_GPU, "*", "EU-RO-1")
        given = RunpodSettings(**{"image": "i", "choices": [GPU], **settings})
        diagnostics = [diagnostic async for diagnostic in run_checks(cloud.account(), "this", {"red": given})]
        (found,) = [diagnostic for diagnostic in diagnostics if diagnostic.check == check]
        assert what in found.message
        assert (found.is_error, bool(found.advice)) == (is_error, True)

    look()


@in_virtual_time
async def test_doctor_reports_remote_volume_and_unconfigured_fleets() -> None:
    cloud = EmulatedRunpod()
    volume = cloud.client.post("/network-volumes", json={"name": "d", "size": 100, "dataCenter": "EU-RO-1"}).json()
    given = RunpodSettings(image="i", choices=[f"{GPU}@SECURE/US-KS-2"], network_volume_id=volume["id"])
    await cloud.provider("blue").create(request_for(fleet="blue"))
    diagnostics = [diagnostic async for diagnostic in run_checks(cloud.account(), "this", {"red": given})]
    assert diagnostics[0].message == "pods exist of fleets that are not configured: blue"
    assert diagnostics[1].message == f"d is in EU-RO-1, but {GPU} in SECURE/US-KS-2 is not"
    cloud.faults.next_list(401)
    (denied,) = [diagnostic async for diagnostic in run_checks(cloud.account(), None, {"red": given})]
    assert (denied.is_error, denied.message) == (True, "missing bearer token (401)")


@in_virtual_time
async def test_doctor_counts_pods_of_other_databases() -> None:
    cloud = EmulatedRunpod()
    for slot, identity in enumerate(("this", "old", "old", "older")):
        await cloud.provider(identity=identity).create(request_for(slot))
    cloud.client.post("/pods", json={"name": "theirs", "image": IMAGE, "gpu": {"id": GPU}})
    given = RunpodSettings(image="i", choices=[GPU])
    diagnostics = [diagnostic async for diagnostic in run_checks(cloud.account(), "this", {"red": given})]
    assert diagnostics[0].message == "key valid, windlass pods: 1"
    assert sorted(
        (diagnostic.message, bool(diagnostic.advice), diagnostic.is_error) for diagnostic in diagnostics[1:3]
    ) == sorted(
        (
            f"pods of another windlass database in this account: {count} "
            f"(WINDLASS_POD begins with {fingerprint(identity)}/)",
            True,
            False,
        )
        for identity, count in (("old", 2), ("older", 1))
    )
    assert len(cloud.pods) == 5


@in_virtual_time
async def test_limiter_spreads_remaining_requests_over_the_window() -> None:
    limiter = RunpodLimiter(rate_per_s=10.0, burst=20)
    loop = asyncio.get_running_loop()
    limiter.record_response(200, {"RateLimit": '"minute";r=5;t=40, "hour";r=2800;t=1812, "day";r=49500;t=45012'})
    began = loop.time()
    for _ in range(5):
        await limiter.wait(60)
    assert 8 <= loop.time() - began <= 20
    limiter.record_response(200, {"RateLimit": '"minute";r=0;t=12'})
    with pytest.raises(Throttled):
        await limiter.wait(5)
    limiter.record_response(200, {})
    await asyncio.sleep(5)
    await limiter.wait(0)


def make_volume(cloud: EmulatedRunpod, size_gb: int) -> str:
    body = {"name": "models", "size": size_gb, "dataCenter": "EU-RO-1"}
    return str(cloud.client.post("/network-volumes", json=body).json()["id"])


@in_virtual_time
async def test_repeated_request_grows_a_volume_once() -> None:
    cloud = EmulatedRunpod(checks_contract=True)
    volume_id = make_volume(cloud, 100)
    provider = cloud.provider(network_volume_id=volume_id)
    found = await provider.volume()
    assert found is not None
    assert (found.id, found.size_gb) == (volume_id, 100)
    assert found.price_micros_per_hour and found.currency == "USD"
    # Whether the first request took effect is unknown, and repeating it is harmless.
    cloud.faults.next(500, method="PATCH", path="/v2/network-volumes/.*", takes_effect=True)
    with pytest.raises(Ambiguous):
        await provider.grow_volume(volume_id, 150)
    assert (await provider.grow_volume(volume_id, 150)).size_gb == 150
    assert (await provider.grow_volume(volume_id, 120)).size_gb == 150
    found = await provider.volume()
    assert found is not None
    assert found.size_gb == 150
    assert len(cloud.sent("PATCH")) == 1


@in_virtual_time
async def test_missing_volume_is_reported() -> None:
    cloud = EmulatedRunpod()
    provider = cloud.provider(network_volume_id="none")
    with pytest.raises(Unavailable, match="reading network volume none: .*not found"):
        await provider.volume()
    with pytest.raises(ProviderError, match="growing network volume none to 150 GB: .*not found"):
        await provider.grow_volume("none", 150)
    assert await cloud.provider().volume() is None
