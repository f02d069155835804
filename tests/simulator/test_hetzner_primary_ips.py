"""Labels and deletion of Primary IPs, against the emulated Hetzner API in virtual time."""

import asyncio
from datetime import timedelta

import pytest

from support.hetzner_fixture import EmulatedHetzner, list_and_reconcile, request_for
from support.simulator.loop import virtual_now
from support.virtual_time import in_virtual_time
from windlass.control.provider_in_use import CLOSE_TIMEOUT_S
from windlass.model.errors import (
    Ambiguous,
)
from windlass.providers.hetzner.primary_ips import LABEL_ATTEMPTS


@in_virtual_time
async def test_closing_provider_deletes_orphaned_primary_ips() -> None:
    cloud = EmulatedHetzner()
    account = cloud.account()
    cloud.provider("blue", account=account)
    red = cloud.provider(account=account)
    machines = [await red.create(request_for(number)) for number in range(10)]
    await asyncio.sleep(60)
    await red.list_machines()
    await asyncio.sleep(60)
    for address in cloud.emulator.project.primary_ips.values():
        address.is_auto_deleted = False  # a person can turn this off
    await asyncio.gather(*(red.delete(machine) for machine in machines))
    await red.list_machines()
    assert len(cloud.emulator.project.primary_ips) == 10
    async with asyncio.timeout(CLOSE_TIMEOUT_S):
        await red.close()
    assert (len(cloud.emulator.project.primary_ips), account.limiter.fleet_count) == (0, 1)


@in_virtual_time
async def test_interrupted_close_still_releases_the_account() -> None:
    cloud = EmulatedHetzner()
    account = cloud.account()
    cloud.provider("blue", account=account)
    red = cloud.provider(account=account)
    await red.create(request_for())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await red.close()
    assert account.limiter.fleet_count == 1


@in_virtual_time
async def test_orphaned_primary_ip_is_found_by_labels_and_deleted() -> None:
    cloud = EmulatedHetzner(boot_s=0, delete_s=0, action_s=0)
    provider = cloud.provider(list_reuse_s=0.0)
    machine = await provider.create(request_for())
    await list_and_reconcile(provider)
    (address,) = cloud.emulator.project.primary_ips.values()
    assert address.labels["windlass-worker"] == "red-0-aa"
    address.is_auto_deleted = False
    await provider.delete(machine)
    assert list(cloud.emulator.project.primary_ips.values()) == [address]
    await asyncio.sleep(300)
    await list_and_reconcile(cloud.provider("blue", list_reuse_s=0.0))
    await list_and_reconcile(cloud.provider(identity="other", list_reuse_s=0.0))
    assert len(cloud.emulator.project.primary_ips) == 1  # other fleets and databases do not delete it
    await list_and_reconcile(cloud.provider(list_reuse_s=0.0))
    assert cloud.emulator.project.primary_ips == {}


@in_virtual_time
async def test_primary_ip_is_labelled_on_create_and_before_delete() -> None:
    cloud = EmulatedHetzner(boot_s=0, delete_s=0, action_s=0)
    provider = cloud.provider()
    machines = [await provider.create(request_for(slot)) for slot in range(3)]
    addresses = list(cloud.emulator.project.primary_ips.values())
    await asyncio.sleep(15)
    # Before any list.
    assert [address.labels["windlass-worker"] for address in addresses] == ["red-0-aa", "red-1-aa", "red-2-aa"]
    # The first orchestrator crashed before labelling. Its successor deletes the servers without listing them.
    for address in addresses:
        address.labels.clear()
        address.is_auto_deleted = False
    successor = cloud.provider(list_reuse_s=0.0)
    await asyncio.gather(*map(successor.delete, machines))
    for _ in range(2):  # deletions go before labels, so the first sweep may miss some
        await asyncio.sleep(300)
        await list_and_reconcile(successor)
    assert cloud.emulator.project.primary_ips == {}


@in_virtual_time
async def test_foreign_and_assigned_primary_ips_are_kept() -> None:
    cloud = EmulatedHetzner()
    provider = cloud.provider(list_reuse_s=0.0, is_ipv6_on=True)
    await provider.create(request_for())
    alone = cloud.add_primary_ip("mine").id
    for _ in range(40):
        await provider.list_machines()
        await asyncio.sleep(30)
    assert alone in cloud.emulator.project.primary_ips
    assert len(cloud.emulator.project.primary_ips) == 3
    assert len(cloud.sent("PUT", "/primary_ips")) == 2  # each of the fleet's is labelled once
    assert len(cloud.sent("GET", "/primary_ips")) <= 5


@pytest.mark.parametrize("origin", ["of a creation without an answer", "made before a restart"])
def test_primary_ip_of_every_listed_server_is_labelled(origin: str) -> None:
    @in_virtual_time
    async def label() -> None:
        cloud = EmulatedHetzner(boot_s=0, delete_s=0, action_s=0)
        provider = cloud.provider(list_reuse_s=0.0)
        if origin == "of a creation without an answer":
            cloud.faults.next_create(times_out_after_taking_effect=True)
            with pytest.raises(Ambiguous):
                await provider.create(request_for())
        else:
            await cloud.provider().create(request_for())
        (machine,) = await list_and_reconcile(provider)
        (address,) = cloud.emulator.project.primary_ips.values()
        assert address.labels["windlass-worker"] == "red-0-aa"
        address.is_auto_deleted = False
        await provider.delete(machine)
        await asyncio.sleep(300)
        await list_and_reconcile(provider)
        assert cloud.emulator.project.primary_ips == {}

    label()


@in_virtual_time
async def test_primary_ip_assigned_by_a_person_is_left_alone() -> None:
    cloud = EmulatedHetzner(boot_s=0, delete_s=0, action_s=0)
    theirs = cloud.add_primary_ip("mine")
    await asyncio.sleep(600)
    machine = await cloud.provider().create(request_for())
    server = cloud.servers[int(machine.id)]
    cloud.emulator.project.primary_ips[server.ipv4_id].server_id = None
    server.ipv4_id, theirs.server_id = theirs.id, server.id
    provider = cloud.provider(list_reuse_s=0.0)
    for _ in range(20):
        await list_and_reconcile(provider)
        await asyncio.sleep(60)
    await provider.delete(machine)
    await asyncio.sleep(600)
    await list_and_reconcile(provider)
    assert theirs.labels == {}
    assert len(cloud.sent("GET", f"/primary_ips/{theirs.id}")) <= 5


@in_virtual_time
async def test_failed_label_does_not_delay_other_primary_ips() -> None:
    cloud = EmulatedHetzner()
    provider = cloud.provider(list_reuse_s=0.0)
    for slot in range(3):
        await provider.create(request_for(slot))
    first, *others = cloud.emulator.project.primary_ips.values()
    cloud.faults.next("server_error", path=f"/v1/primary_ips/{first.id}", times=1000)
    for _ in range(12):
        await asyncio.sleep(10)
        await list_and_reconcile(provider)
    assert [address.labels["windlass-worker"] for address in others] == ["red-1-aa", "red-2-aa"]
    assert len(cloud.sent("PUT", f"/primary_ips/{first.id}")) == LABEL_ATTEMPTS
    cloud.faults.clear()
    await asyncio.sleep(300)
    await list_and_reconcile(provider)
    assert first.labels["windlass-worker"] == "red-0-aa"


@in_virtual_time
async def test_list_works_while_primary_ip_requests_fail() -> None:
    cloud = EmulatedHetzner()
    provider = cloud.provider(list_reuse_s=0.0)
    await provider.create(request_for())
    cloud.faults.next("server_error", path="/v1/primary_ips.*", times=1000)
    assert len(await provider.list_machines()) == 1


@in_virtual_time
async def test_list_does_not_wait_for_primary_ip_requests() -> None:
    cloud = EmulatedHetzner()
    provider = cloud.provider(list_reuse_s=0.0)
    await provider.create(request_for())
    cloud.faults.next(None, path="/v1/primary_ips.*", times=1000)
    for _ in range(6):
        began = virtual_now()
        assert len(await provider.list_machines()) == 1
        assert virtual_now() - began < timedelta(seconds=2)
        await asyncio.sleep(3)
    assert len(cloud.sent(path="/primary_ips")) == 2  # one at a time
    await provider.close()
    sent = len(cloud.emulator.requests)
    await asyncio.sleep(60)
    assert len(cloud.emulator.requests) == sent


@in_virtual_time
async def test_closing_an_empty_fleet_deletes_its_primary_ips() -> None:
    cloud = EmulatedHetzner()
    provider = cloud.provider()
    machine = await provider.create(request_for())
    await provider.list_machines()
    await asyncio.sleep(60)
    for address in cloud.emulator.project.primary_ips.values():
        address.is_auto_deleted = False
    await provider.list_machines()
    await provider.delete(machine)
    assert cloud.emulator.project.primary_ips
    await provider.close()
    assert not cloud.emulator.project.primary_ips
