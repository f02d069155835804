"""Request rate, timeouts and doctor checks of the Hetzner provider, against the emulated API in virtual time."""

import asyncio
from datetime import datetime, timedelta

import hcloud
import pytest
import requests
from hcloud.networks.domain import NetworkSubnet

from support.hetzner_fixture import EmulatedHetzner, list_and_reconcile, request_for
from support.hetzner_histories import HetznerHistory
from support.simulator.loop import virtual_now
from support.simulator.scenario import FleetScenario, Scenario
from support.simulator.workers import TaskProfile
from support.virtual_time import in_virtual_time
from windlass.model.errors import (
    Throttled,
)
from windlass.model.fleet import FleetConfig
from windlass.model.hetzner import HetznerSettings
from windlass.providers.hetzner.doctor_checks import run_checks
from windlass.providers.hetzner.limiter import BURST
from windlass.providers.rate_limiter import FIRST_PAUSE_S

SUBNET = NetworkSubnet("10.0.0.0/24", type="cloud", network_zone="eu-central")


PUBLIC_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f me"


@in_virtual_time
async def test_429_pauses_all_fleets_with_the_token() -> None:
    cloud = EmulatedHetzner()
    account = cloud.account()
    provider, other = cloud.provider(account=account), cloud.provider("blue", account=account)
    cloud.faults.next_create("rate_limit_exceeded")
    with pytest.raises(Throttled) as caught:
        await provider.create(request_for())
    assert 0 < caught.value.retry_after_s <= FIRST_PAUSE_S
    sent, began = len(cloud.emulator.requests), virtual_now()
    await other.create(request_for(fleet="blue"))
    assert virtual_now() - began > timedelta(seconds=FIRST_PAUSE_S - 1)
    assert len(cloud.emulator.requests) > sent


@in_virtual_time
async def test_lists_stay_below_the_vendors_rate_limit() -> None:
    cloud = EmulatedHetzner(requests_per_hour=3600)
    account = cloud.account()
    provider = cloud.provider(account=account, list_reuse_s=0.0)
    for _ in range(60):
        await provider.list_machines()
    seconds = (virtual_now() - cloud.emulator.requests[0][0]).total_seconds()
    assert len(cloud.emulator.requests) <= 20 + seconds


@pytest.mark.parametrize("code", ["bad_gateway", "timeout", "conflict", "rate_limit_exceeded", None])
def test_sdk_does_not_retry(code: str | None) -> None:
    @in_virtual_time
    async def ask() -> None:
        cloud = EmulatedHetzner()
        account = cloud.account()
        cloud.faults.next(code, times=99)
        with pytest.raises((hcloud.APIException, requests.exceptions.Timeout)):
            await account.send(lambda: account.api.servers.get_list(), max_wait_s=0)
        assert len(cloud.emulator.requests) == 1

    ask()


@in_virtual_time
async def test_every_request_has_a_timeout() -> None:
    cloud = EmulatedHetzner()
    account = cloud.account()
    limits = []
    inner = account._adapter._inner
    send = inner.send

    def record_timeout(request: requests.PreparedRequest, **options: object) -> requests.Response:
        limits.append(options["timeout"])
        return send(request, **options)  # type: ignore[arg-type]

    inner.send = record_timeout  # type: ignore[method-assign, assignment]
    provider = cloud.provider(account=account)
    await provider.delete(await provider.create(request_for()))
    await provider.list_machines()
    assert set(limits) == {(5.0, 20.0)}


@in_virtual_time
async def test_all_requests_match_the_published_api() -> None:
    cloud = EmulatedHetzner(checks_contract=True)
    key = cloud.client.ssh_keys.create(name="me", public_key=PUBLIC_KEY)
    firewall = cloud.client.firewalls.create(name="wall").firewall
    network = cloud.client.networks.create(name="inside", ip_range="10.0.0.0/16", subnets=[SUBNET])
    provider = cloud.provider(
        network_id=network.id, ssh_keys=[key.name, str(key.id)], firewall_ids=[firewall.id], list_reuse_s=0.0
    )
    machine = await provider.create(request_for())
    assert (await provider.create(request_for())).id == machine.id
    await list_and_reconcile(provider)
    (address,) = cloud.emulator.project.primary_ips.values()
    address.is_auto_deleted = False
    await asyncio.sleep(301)
    await provider.delete(machine)
    await list_and_reconcile(provider)
    assert cloud.emulator.project.primary_ips == {}
    account = cloud.account()
    diagnostics = [
        diagnostic async for diagnostic in run_checks(account, "this", {"red": HetznerSettings()}, network.id)
    ]
    assert [diagnostic.advice for diagnostic in diagnostics] == ["", "", "", "", ""]
    assert getattr(cloud.front, "checked", 0) > 12


@in_virtual_time
async def test_doctor_reports_servers_of_unconfigured_fleets() -> None:
    cloud = EmulatedHetzner()
    await cloud.provider("blue").create(request_for(fleet="blue"))
    await cloud.provider("red").create(request_for())
    await cloud.provider("green", identity="other").create(request_for(fleet="green"))
    diagnostic = await anext(run_checks(cloud.account(), "this", {"red": HetznerSettings()}, None))
    assert (diagnostic.message, diagnostic.is_error) == ("servers exist of fleets that are not configured: blue", False)
    assert diagnostic.advice.startswith(
        "`windlass up` deletes those whose workers are in the database; delete the others"
    )
    # Without the database their owner is unknown.
    diagnostic = await anext(run_checks(cloud.account(), None, {"red": HetznerSettings()}, None))
    assert (diagnostic.message, diagnostic.advice) == ("token valid, windlass servers: 3", "")


@in_virtual_time
async def test_doctor_reads_all_pages_and_reports_orphaned_primary_ips() -> None:
    cloud = EmulatedHetzner(server_limit=100)
    red, blue = cloud.provider("red"), cloud.provider("blue")
    for slot in range(51):
        await red.create(request_for(slot))
    await blue.create(request_for(fleet="blue"))
    (server,) = [server for server in cloud.servers.values() if server.labels["windlass-fleet"] == "blue"]
    diagnostics = [each async for each in run_checks(cloud.account(), "this", {"red": HetznerSettings()}, None)]
    assert diagnostics[0].message == "servers exist of fleets that are not configured: blue"
    assert [each.check for each in diagnostics] == ["hetzner", "exposure", "server type", "image"]
    await blue.list_machines()
    await asyncio.sleep(60)
    (address,) = [
        each for each in cloud.emulator.project.primary_ips.values() if each.server_id == server.id and each.labels
    ]
    address.is_auto_deleted = False
    cloud.client.servers.delete(hcloud.servers.domain.Server(id=server.id))
    await asyncio.sleep(60)
    diagnostics = [each async for each in run_checks(cloud.account(), "this", {"red": HetznerSettings()}, None)]
    assert (diagnostics[1].check, diagnostics[1].is_error) == ("primary ips", False)
    assert f"{address.ip} (fleet blue)" in diagnostics[1].message


@in_virtual_time
async def test_deletions_go_before_creations_of_other_fleets() -> None:
    cloud = EmulatedHetzner(server_limit=1000)
    account = cloud.account()
    creating, deleting = cloud.provider("red", account=account), cloud.provider("blue", account=account)
    machines = [await deleting.create(request_for(slot, "blue")) for slot in range(10)]
    await asyncio.sleep(600)
    slots = iter(range(1000))

    async def create_until_cancelled() -> None:
        while True:
            try:
                await creating.create(request_for(next(slots)))
            except Throttled as throttled:
                await asyncio.sleep(throttled.retry_after_s)

    launches = [asyncio.create_task(create_until_cancelled()) for _ in range(16)]
    await asyncio.sleep(3)
    began = virtual_now()
    await asyncio.gather(*map(deleting.delete, machines))
    for each in launches:
        each.cancel()
    lines = {line["id"]: line for line in cloud.emulator.bill()["servers"]}
    billed_until = max(datetime.fromisoformat(lines[int(machine.id)]["deleted"]) for machine in machines)
    assert billed_until - began < timedelta(seconds=25)


@in_virtual_time
async def test_fleets_with_one_token_share_the_deletion_rate() -> None:
    cloud = EmulatedHetzner()
    account = cloud.account()
    alone = cloud.provider(account=account)
    one_per_s = alone.traits.deletions_per_s
    assert one_per_s == pytest.approx(0.35)
    others = [cloud.provider(f"blue{n}", account=account) for n in range(3)]
    again = cloud.provider("blue0", account=account)  # a second provider object, after its settings changed
    assert alone.traits.deletions_per_s == pytest.approx(0.9 / 4 / 2 / 4)
    for each in (*others, again):
        await each.close()
    assert alone.traits.deletions_per_s == one_per_s


def test_hundred_servers_need_less_than_one_request_per_second() -> None:
    """The real control loop: a burst of tasks for a hundred workers, ten minutes of work, and all servers deleted."""
    config = FleetConfig(
        provider="hetzner", queues=("red",), max_workers=100, concurrency=1, clear_time_s=1.0, idle_timeout_s=30.0
    )
    arrivals = ((0.0, 400),)
    fleet_scenario = FleetScenario(
        config,
        max_list_age_s=60.0,
        max_creation_delay_s=80.0,
        tasks=TaskProfile((120.0, 150.0)),
        arrivals=arrivals,
        billing_unit_s=3600,
        price_micros_per_hour=1,
    )
    history = HetznerHistory(Scenario(7, {"red": fleet_scenario}, faults_end_s=1500.0))
    report = history.run()
    assert report.most_billed["red"] == 100
    times = [at.timestamp() for at, _, _ in history.project.emulator.requests]
    creations = [
        at for at, method, path in history.project.emulator.requests if (method, path) == ("POST", "/v1/servers")
    ]
    # From the first request until the last deletion.
    last = max(at for at, method, _ in history.project.emulator.requests if method == "DELETE").timestamp()
    busy = [at for at in times if at <= last]
    assert len(busy) / (last - busy[0]) < 0.9
    assert max(sum(start <= at < start + 60 for at in busy) for start in busy) <= 60
    assert max(sum(start <= at < start + 1 for at in busy) for start in busy) <= BURST + 1
    creations_at, deletions_at = (
        [at.timestamp() for at, method, path in history.project.emulator.requests if (method, path[:11]) == kind]
        for kind in (("POST", "/v1/servers"), ("DELETE", "/v1/servers"))
    )
    phases = ((busy[0], creations_at[99]), (creations_at[99], deletions_at[0]), (deletions_at[0], deletions_at[-1]))
    for begins, ends in phases:
        assert sum(begins <= at < ends for at in busy) < ends - begins
    # A hundred creations take no longer than the rate limit requires.
    assert len(creations) >= 100
    assert (creations[99] - creations[0]).total_seconds() < 200
    # All are deleted before their next hour begins, although their hours end almost together and each
    # deletion takes two requests.
    bill = history.project.bill()
    assert [line["hours"] for line in bill["servers"]] == [1] * 100
    assert history.tally == {"idle, at the end of an hour": 100}
