"""The Hetzner provider against the emulated API in virtual time: create, list and delete."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from hcloud.networks.domain import NetworkSubnet

from support.hetzner_fixture import EmulatedHetzner, request_for
from support.virtual_time import in_virtual_time
from windlass.model.cost import PricePart
from windlass.model.errors import (
    Ambiguous,
    Denied,
    InvalidRequest,
    LimitReached,
    NoCapacity,
    Refused,
    Throttled,
    Unavailable,
)
from windlass.model.machine import Machine, MachineState
from windlass.providers.hetzner.limiter import HetznerLimiter
from windlass.simulator.loop import virtual_now

CX23, IPV4 = 5_600, 800


SUBNET = NetworkSubnet("10.0.0.0/24", type="cloud", network_zone="eu-central")


@in_virtual_time
async def test_created_server_has_requested_properties_and_price() -> None:
    cloud = EmulatedHetzner()
    network = cloud.client.networks.create(name="inside", ip_range="10.0.0.0/16", subnets=[SUBNET])
    provider = cloud.provider(network_id=network.id, labels={"team": "a"})
    machine = await provider.create(request_for(slot=3))
    (server,) = cloud.servers.values()
    assert server.name.startswith("red-3-aa-")
    assert server.labels["managed-by"] == "windlass"
    assert server.labels["windlass-fleet"] == "red"
    assert server.labels["windlass-worker"] == "red-3-aa"
    assert (server.labels["windlass-slot"], server.labels["team"]) == ("3", "a")
    assert (server.image.name, server.server_type.name, server.location.name) == ("ubuntu-24.04", "cx23", "nbg1")
    assert server.user_data == "#cloud-config\n# red-3-aa\n"
    assert machine == Machine(
        id=str(server.id),
        name="red-3-aa",
        state=MachineState.BOOTING,
        created_at=server.created,
        address=server.private_nets[0].ip,
        instance_type="cx23",
        place="nbg1",
        price_micros_per_hour=CX23 + IPV4,
        price_parts=(PricePart(CX23, 3_490_000), PricePart(IPV4, 500_000)),
        currency="EUR",
    )
    await asyncio.sleep(20)
    (listed,) = await provider.list_machines()
    assert listed.state is MachineState.RUNNING


@in_virtual_time
async def test_short_billing_hour_costs_as_much_as_a_full_hour() -> None:
    """The emulator charges the full price for each of its short hours, so a real hour costs sixty times that."""
    cloud = EmulatedHetzner(billing_hour_s=60)
    whole = await cloud.provider().create(request_for())
    assert whole.price_parts == (PricePart(CX23, 3_490_000), PricePart(IPV4, 500_000))
    minutes = await cloud.provider("blue", billing_hour_s=60).create(request_for(fleet="blue"))
    assert whole.price_micros_per_hour == CX23 + IPV4
    assert minutes.price_micros_per_hour == 60 * (CX23 + IPV4)
    assert minutes.price_parts == (PricePart(60 * CX23, 3_490_000), PricePart(60 * IPV4, 500_000))


@in_virtual_time
async def test_server_without_public_address_is_not_billed_for_one() -> None:
    cloud = EmulatedHetzner()
    network = cloud.client.networks.create(name="inside", ip_range="10.0.0.0/16", subnets=[SUBNET])
    machine = await cloud.provider(network_id=network.id, is_ipv4_on=False).create(request_for())
    assert machine.price_micros_per_hour == 5_600
    assert cloud.emulator.project.primary_ips == {}


@in_virtual_time
async def test_choice_without_capacity_is_skipped_and_remembered() -> None:
    cloud = EmulatedHetzner()
    cloud.faults.no_capacity("cx23", "nbg1", is_announced=False)
    cloud.faults.no_capacity("cx23", "fsn1", code="placement_error", is_announced=False)
    provider = cloud.provider(capacity_memory_s=300)
    assert (await provider.create(request_for(0))).place == "hel1"
    assert len(cloud.sent("POST", "/servers")) == 3
    assert (await provider.create(request_for(1))).place == "hel1"
    assert len(cloud.sent("POST", "/servers")) == 4
    cloud.faults.clear()
    await asyncio.sleep(300)
    assert (await provider.create(request_for(2))).place == "nbg1"


@in_virtual_time
async def test_no_request_is_sent_while_all_choices_lack_capacity() -> None:
    cloud = EmulatedHetzner()
    cloud.faults.no_capacity("*", "*", is_announced=False)
    provider = cloud.provider()
    with pytest.raises(
        NoCapacity,
        match="creating server red-0-aa: no capacity for cx23 in nbg1, cx23 in fsn1, cx23 in hel1. Wait, or add",
    ):
        await provider.create(request_for())
    sent = len(cloud.emulator.requests)
    with pytest.raises(NoCapacity):
        await provider.create(request_for())
    assert len(cloud.emulator.requests) == sent


@in_virtual_time
async def test_fleets_with_one_token_share_capacity_memory() -> None:
    cloud = EmulatedHetzner()
    cloud.faults.no_capacity("cx23", "nbg1", is_announced=False)
    account = cloud.account()
    await cloud.provider(account=account).create(request_for())
    await cloud.provider("blue", account=account).create(request_for(fleet="blue"))
    assert len(cloud.sent("POST", "/servers")) == 3


@in_virtual_time
async def test_out_of_stock_location_is_tried_last() -> None:
    cloud = EmulatedHetzner()
    cloud.faults.no_capacity("cx23", "nbg1")
    assert (await cloud.provider().create(request_for())).place == "fsn1"
    assert len(cloud.sent("POST", "/servers")) == 1
    assert (await cloud.provider(choices=["cx23@nbg1", "cx33@nbg1"]).create(request_for(1))).instance_type == "cx33"


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        (
            "resource_limit_exceeded",
            LimitReached,
            "request a higher limit in Hetzner's console, or lower max_workers of",
        ),
        ("unauthorized", Denied, "check hetzner_api_token"),
        ("token_readonly", Denied, "it must belong to the project and allow read and write"),
        ("forbidden", Denied, "check hetzner_api_token"),
        ("server_error", Ambiguous, "server_error"),
        ("unavailable", Ambiguous, "unavailable"),
        ("timeout", Ambiguous, "timeout"),
        ("bad_gateway", Ambiguous, "bad_gateway"),
        ("service_error", Ambiguous, "service_error"),
    ],
)
def test_each_creation_failure_maps_to_one_error(code: str, error: type[Exception], message: str) -> None:
    @in_virtual_time
    async def refused() -> None:
        cloud = EmulatedHetzner()
        cloud.faults.next_create(code)
        with pytest.raises(
            error, match=f"^creating server red-0-aa: .*{code}.*{message}" if message != code else code
        ) as caught:
            await cloud.provider().create(request_for())
        assert type(caught.value) is error
        assert len(cloud.sent("POST", "/servers")) == 1

    refused()


@pytest.mark.parametrize(
    ("settings", "message", "posts"),
    [
        pytest.param({"image": "ubuntu-99"}, "image not found", 1, id="no other choice would do"),
        pytest.param({"choices": ["cx99@nbg1", "cx98@nbg1"]}, "server type not found", 2, id="no choice exists"),
        pytest.param({"choices": ["cx23@ash"]}, "unsupported location for server type", 1, id="not in that place"),
        pytest.param({"ssh_keys": ["me"]}, "not found", 1, id="no such key"),
    ],
)
def test_settings_refused_by_vendor_are_an_invalid_request(settings: dict[str, Any], message: str, posts: int) -> None:
    @in_virtual_time
    async def refused() -> None:
        cloud = EmulatedHetzner()
        provider = cloud.provider(**settings)
        for times in (1, 2):
            with pytest.raises(InvalidRequest, match=f"{message}.*: check the hetzner settings of fleet red"):
                await provider.create(request_for())
            assert len(cloud.sent("POST", "/servers")) == posts * times

    refused()


@pytest.mark.parametrize("wrong", ["cx99@nbg1", "cx23@ash"])
def test_unknown_choice_is_skipped_and_reported(wrong: str) -> None:
    @in_virtual_time
    async def create() -> None:
        cloud = EmulatedHetzner()
        provider = cloud.provider(choices=[wrong, "cx23@nbg1"])
        for number in range(2):
            assert (await provider.create(request_for(number))).place == "nbg1"
        assert len(cloud.sent("POST", "/servers")) == 3, "the unknown choice is not tried every time"
        ((reported, message),) = provider.traits.refused_choices
        assert (reported, bool(message)) == (wrong.replace("@", " in "), True)
        cloud.faults.no_capacity("cx23", "nbg1", is_announced=False)
        with pytest.raises(NoCapacity, match=f"no capacity for cx23 in nbg1. .* Refused: {reported} "):
            await provider.create(request_for(2))
        await asyncio.sleep(3600)
        assert provider.traits.refused_choices == ()

    create()


@in_virtual_time
async def test_refused_choice_is_skipped_by_its_fleet_only() -> None:
    cloud = EmulatedHetzner()
    account = cloud.account()
    red = cloud.provider(account=account, choices=["cx23@fsn1", "cx23@nbg1"])
    blue = cloud.provider("blue", account=account, choices=["cx23@fsn1"])
    cloud.faults.next_create("invalid_input")  # caused by red's image or network: the vendor names no field
    assert (await red.create(request_for())).place == "nbg1"
    assert (await blue.create(request_for(fleet="blue"))).place == "fsn1"


@in_virtual_time
async def test_request_is_invalid_when_the_last_choice_is_refused_too() -> None:
    cloud = EmulatedHetzner()
    provider = cloud.provider(choices=["cx23@fsn1", "cx23@nbg1"])
    cloud.faults.next_create("invalid_input")
    await provider.create(request_for())
    cloud.faults.next_create("invalid_input")
    with pytest.raises(InvalidRequest):
        await provider.create(request_for(1))
    assert (await provider.create(request_for(2))).place == "fsn1"


@in_virtual_time
async def test_conflicting_creation_is_retried() -> None:
    cloud = EmulatedHetzner()
    cloud.faults.next_create("conflict")
    cloud.faults.next_create("locked")
    assert (await cloud.provider().create(request_for())).name == "red-0-aa"
    cloud.faults.next_create("conflict", times=9)
    with pytest.raises(Throttled):
        await cloud.provider().create(request_for(1))
    assert len(cloud.sent("POST", "/servers")) == 6


@pytest.mark.parametrize("takes_effect", [True, False])
def test_unanswered_creation_is_sent_once_and_settled_by_a_list(takes_effect: bool) -> None:
    @in_virtual_time
    async def lose() -> None:
        cloud = EmulatedHetzner()
        provider = cloud.provider()
        cloud.faults.next_create(
            times_out_after_taking_effect=takes_effect, times_out_before_taking_effect=not takes_effect
        )
        with pytest.raises(Ambiguous, match="creating server red-0-aa: request timed out"):
            await provider.create(request_for())
        assert len(cloud.sent("POST", "/servers")) == 1
        assert [machine.name for machine in await provider.list_machines()] == (["red-0-aa"] if takes_effect else [])
        # The second request finds the server of the first.
        again = await provider.create(request_for())
        assert [str(server) for server in cloud.servers] == [again.id]

    lose()


@in_virtual_time
async def test_name_of_a_foreign_server_is_refused() -> None:
    cloud = EmulatedHetzner()
    provider = cloud.provider()
    name = (await _name_of(cloud)).removesuffix("!")
    await provider.delete((await provider.list_machines())[0])
    cloud.client.servers.create(name, _named("cx23"), _named("ubuntu-24.04"), location=_named("nbg1"))
    with pytest.raises(Refused, match="a server red-0-aa-.* exists that is not ours. Rename or delete it"):
        await provider.create(request_for())
    assert len(cloud.servers) == 1


@in_virtual_time
async def test_name_in_use_but_not_listed_is_ambiguous() -> None:
    cloud = EmulatedHetzner()
    await cloud.provider().create(request_for())
    cloud.faults.list_lags(30)
    with pytest.raises(Ambiguous, match="but no server with that name is listed"):
        await cloud.provider().create(request_for())


@in_virtual_time
async def test_invalid_user_data_is_refused_before_any_request() -> None:
    cloud = EmulatedHetzner()

    def broken(_: object) -> str:
        raise KeyError("image")

    with pytest.raises(Refused, match="user_data has 40,000 bytes, at most 32,768 are allowed"):
        await cloud.provider(render_user_data=lambda _: "x" * 40_000).create(request_for())
    with pytest.raises(Refused, match="cannot render user_data .'image'.. Check the bootstrap settings of fleet red"):
        await cloud.provider(render_user_data=broken).create(request_for())
    assert not cloud.emulator.requests


@in_virtual_time
async def test_errors_contain_no_secrets() -> None:
    cloud = EmulatedHetzner(token="right")
    provider = cloud.provider(account=cloud.account("hush-hush"))
    for call in (provider.create(request_for()), provider.list_machines()):
        with pytest.raises((Denied, Unavailable)) as caught:
            await call
        assert "hush" not in str(caught.value)
        assert "secret" not in str(caught.value)


@in_virtual_time
async def test_list_takes_one_request_per_fifty_servers() -> None:
    cloud = EmulatedHetzner(server_limit=200)
    provider = cloud.provider(
        account=cloud.account(limiter=HetznerLimiter(rate_per_s=100, burst=1000)), list_reuse_s=0.0
    )
    for slot in range(120):
        await provider.create(request_for(slot))
    before = len(cloud.sent("GET", "/servers"))
    assert len(await provider.list_machines()) == 120
    assert len(cloud.sent("GET", "/servers")) - before == 3


@pytest.mark.parametrize("skip", [0, 1])
@pytest.mark.parametrize("code", ["unavailable", "unauthorized", "rate_limit_exceeded", "server_error", None])
def test_list_with_a_missing_page_is_unavailable(code: str | None, skip: int) -> None:
    @in_virtual_time
    async def miss() -> None:
        cloud = EmulatedHetzner()
        provider = cloud.provider(
            account=cloud.account(limiter=HetznerLimiter(rate_per_s=100, burst=1000)), list_reuse_s=0.0
        )
        for slot in range(60):
            await provider.create(request_for(slot))
        cloud.faults.next_list(code, skip=skip)
        with pytest.raises(Unavailable, match="^listing the servers of fleet red: "):
            await provider.list_machines()

    miss()


@in_virtual_time
async def test_list_that_changes_while_read_is_read_again() -> None:
    cloud = EmulatedHetzner(boot_s=0, delete_s=0, action_s=0)
    provider = cloud.provider(
        account=cloud.account(limiter=HetznerLimiter(rate_per_s=100, burst=1000)), list_reuse_s=0.0
    )
    made = [await provider.create(request_for(slot)) for slot in range(60)]
    before = len(cloud.sent("GET", "/servers"))
    handle = cloud.emulator.handle

    def delete_between(*request: object) -> object:
        response = handle(*request)  # type: ignore[arg-type]
        if len(cloud.sent("GET", "/servers")) == before + 1 and int(made[0].id) in cloud.servers:
            cloud.emulator.project.begin_deletion(cloud.servers[int(made[0].id)])
        return response

    cloud.emulator.handle = delete_between  # type: ignore[method-assign, assignment]
    listed = {machine.id for machine in await provider.list_machines()}
    assert listed == {machine.id for machine in made[1:]}
    assert len(cloud.sent("GET", "/servers")) - before == 4


@in_virtual_time
async def test_recent_list_is_reused_with_our_own_changes() -> None:
    cloud = EmulatedHetzner(boot_s=0, delete_s=0, action_s=0)
    provider = cloud.provider()
    first = await provider.create(request_for(0))
    await provider.list_machines()
    before = len(cloud.sent("GET", "/v1/servers"))
    second = await provider.create(request_for(1))
    await provider.delete(first)
    looked = len(cloud.sent("GET", f"/servers/{first.id}"))
    assert [machine.id for machine in await provider.list_machines()] == [second.id]
    assert len(cloud.sent("GET", "/v1/servers")) - before == looked
    await asyncio.sleep(5)
    assert [machine.id for machine in await provider.list_machines()] == [second.id]
    assert len(cloud.sent("GET", "/v1/servers")) - before == looked + 1


@in_virtual_time
async def test_prices_are_cached_and_a_list_works_without_them() -> None:
    cloud = EmulatedHetzner()
    provider = cloud.provider(list_reuse_s=0.0)
    cloud.faults.next("unavailable", path="/v1/pricing", times=1)
    machine = await provider.create(request_for())
    assert (machine.price_micros_per_hour, machine.currency) == (None, None)
    await asyncio.sleep(60)
    for _ in range(5):
        (machine,) = await provider.list_machines()
        await asyncio.sleep(60)
    assert machine.price_micros_per_hour == 6_400
    assert len(cloud.sent("GET", "/pricing")) == 2


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ("initializing", MachineState.BOOTING),
        ("starting", MachineState.BOOTING),
        ("running", MachineState.RUNNING),
        ("migrating", MachineState.BOOTING),
        ("rebuilding", MachineState.BOOTING),
        ("unknown", MachineState.BOOTING),
        ("an unknown status", MachineState.BOOTING),
        ("off", MachineState.EXITED),
        ("stopping", MachineState.EXITED),
        ("deleting", MachineState.EXITED),
    ],
)
def test_each_server_status_maps_to_one_state(status: str, state: MachineState) -> None:
    @in_virtual_time
    async def look() -> None:
        cloud = EmulatedHetzner()
        provider = cloud.provider(list_reuse_s=0.0)
        await provider.create(request_for())
        await asyncio.sleep(90)
        cloud.emulator.settle()
        (server,) = cloud.servers.values()
        cloud.emulator.project.set_status(server, status)
        (machine,) = await provider.list_machines()
        assert machine.state is state
        assert machine.note == (f"the server is {status}" if state is MachineState.EXITED else None)

    look()


@in_virtual_time
async def test_new_server_that_is_off_counts_as_booting() -> None:
    cloud = EmulatedHetzner()
    provider = cloud.provider(list_reuse_s=0.0)
    await provider.create(request_for())
    (server,) = cloud.servers.values()
    cloud.emulator.project.set_status(server, "off")
    assert (await provider.list_machines())[0].state is MachineState.BOOTING
    cloud.emulator.project.set_status(server, "running")
    await provider.list_machines()
    cloud.emulator.project.set_status(server, "off")
    assert (await provider.list_machines())[0].state is MachineState.EXITED


@in_virtual_time
async def test_delete_takes_two_requests_and_returns_when_server_is_gone() -> None:
    cloud = EmulatedHetzner()
    provider = cloud.provider()
    machine = await provider.create(request_for())
    await asyncio.sleep(60)
    before, asked_at = len(cloud.emulator.requests), virtual_now()
    stopped_at = await provider.delete(machine)
    assert cloud.servers == {}
    assert cloud.emulator.project.primary_ips == {}
    # The vendor publishes whole seconds.
    assert stopped_at is not None
    assert abs(stopped_at - asked_at) < timedelta(seconds=1)
    # A repeated deletion, also by a provider that never listed the server, returns the time from the vendor's log.
    assert await provider.delete(machine) == await cloud.provider().delete(machine) == stopped_at
    assert [request[1] for request in cloud.sent()[before : before + 2]] == ["DELETE", "GET"]


@in_virtual_time
async def test_not_found_in_response_to_delete_is_verified() -> None:
    cloud = EmulatedHetzner()
    provider = cloud.provider()
    machine = await provider.create(request_for())
    await asyncio.sleep(60)
    cloud.faults.next_delete("not_found")
    await provider.delete(machine)
    assert cloud.servers == {}


@in_virtual_time
async def test_locked_server_is_deleted_when_unlocked() -> None:
    cloud = EmulatedHetzner(boot_s=15)
    provider = cloud.provider()
    await provider.delete(await provider.create(request_for()))
    assert cloud.servers == {}
    assert len(cloud.sent("DELETE")) > 1


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        ("protected", Refused, "remove the protection in Hetzner's console. It is billed until then"),
        ("forbidden", Denied, "check hetzner_api_token"),
        ("rate_limit_exceeded", Throttled, "rate_limit_exceeded"),
        ("unavailable", Unavailable, "unavailable"),
        ("service_error", Unavailable, "service_error"),
    ],
)
def test_failed_deletion_is_reported_and_server_remains(code: str, error: type[Exception], message: str) -> None:
    @in_virtual_time
    async def deny() -> None:
        cloud = EmulatedHetzner()
        provider = cloud.provider()
        machine = await provider.create(request_for())
        await asyncio.sleep(60)
        cloud.faults.next_delete(code)
        with pytest.raises(error, match=f"^deleting server {machine.id} of red-0-aa: .*{message}"):
            await provider.delete(machine)
        assert len(cloud.servers) == 1

    deny()


@pytest.mark.parametrize("takes_effect", [True, False])
def test_unanswered_deletion_is_settled_by_the_next_one(takes_effect: bool) -> None:
    @in_virtual_time
    async def lose() -> None:
        cloud = EmulatedHetzner()
        provider = cloud.provider()
        machine = await provider.create(request_for())
        await asyncio.sleep(60)
        cloud.faults.next_delete(
            times_out_after_taking_effect=takes_effect, times_out_before_taking_effect=not takes_effect
        )
        asked_at = virtual_now()
        with pytest.raises(Unavailable):
            await provider.delete(machine)
        asked_again_at = virtual_now()
        stopped_at = await provider.delete(machine)
        assert cloud.servers == {}
        # Billing ends with the deletion, not with its confirmation.
        assert stopped_at is not None
        assert abs(stopped_at - (asked_at if takes_effect else asked_again_at)) < timedelta(seconds=1)
        (line,) = cloud.emulator.bill()["servers"]
        assert line["deleted"] == stopped_at.isoformat()

    lose()


@in_virtual_time
async def test_deletion_that_fails_after_acceptance_is_repeated() -> None:
    cloud = EmulatedHetzner(boot_s=0)
    provider = cloud.provider()
    machine = await provider.create(request_for())
    await asyncio.sleep(60)
    cloud.faults.next_action("delete_server")
    asked_at = virtual_now()
    stopped_at = await provider.delete(machine)
    assert len(cloud.sent("DELETE")) == 2
    assert stopped_at is not None
    assert stopped_at - asked_at > timedelta(seconds=0.5)  # by the second deletion, not by the first
    (line,) = cloud.emulator.bill()["servers"]
    assert line["deleted"] == stopped_at.isoformat()


@in_virtual_time
async def test_deletion_time_is_found_among_many_actions() -> None:
    cloud = EmulatedHetzner(boot_s=0, action_s=0)
    provider = cloud.provider(account=cloud.account(limiter=HetznerLimiter(rate_per_s=100, burst=1000)))
    machine, other = [await provider.create(request_for(slot)) for slot in range(2)]
    await asyncio.sleep(60)
    cloud.faults.next_delete("server_error", takes_effect=True)
    asked_at = virtual_now()
    with pytest.raises(Unavailable):
        await provider.delete(machine)
    for _ in range(120):
        cloud.client.servers.get_by_id(int(other.id)).power_on()
        await asyncio.sleep(1)
    stopped_at = await provider.delete(machine)
    assert stopped_at is not None
    assert abs(stopped_at - asked_at) < timedelta(seconds=1)


@in_virtual_time
async def test_failed_start_is_exited_and_missing_network_gives_public_address() -> None:
    cloud = EmulatedHetzner(boot_s=0)
    network = cloud.client.networks.create(name="inside", ip_range="10.0.0.0/16", subnets=[SUBNET])
    provider = cloud.provider(network_id=network.id, list_reuse_s=0.0)
    cloud.faults.next_action("start_server")
    await provider.create(request_for(0))
    cloud.faults.next_action("attach_to_network")
    await provider.create(request_for(1))
    await asyncio.sleep(90)
    off, alone = await provider.list_machines()
    assert (off.state, off.note) == (MachineState.EXITED, "the server is off")
    assert alone.state is MachineState.RUNNING
    assert alone.address is not None
    assert not alone.address.startswith("10.")


@in_virtual_time
async def test_server_without_labels_is_not_deleted_or_reported_gone() -> None:
    cloud = EmulatedHetzner(boot_s=0, delete_s=0, action_s=0)
    provider = cloud.provider(list_reuse_s=0.0)
    machine = await provider.create(request_for())
    cloud.client.servers.get_by_id(int(machine.id)).update(labels={"team": "a"})
    await asyncio.sleep(60)
    assert await provider.list_machines() == ()
    with pytest.raises(
        Refused, match="created for red-0-aa, has lost our labels. Delete it in .* It is billed until then"
    ):
        await provider.delete(machine)
    assert len(cloud.servers) == 1


@in_virtual_time
async def test_unknown_deletion_time_is_none() -> None:
    cloud = EmulatedHetzner()
    provider = cloud.provider()
    machine = await provider.create(request_for())
    await asyncio.sleep(60)
    cloud.faults.next_delete("not_found", takes_effect=True)
    cloud.faults.next("unavailable", path="/v1/servers/actions")
    assert await provider.delete(machine) is None
    assert cloud.servers == {}


def _named(name: str) -> object:
    return type("Named", (), {"id_or_name": name})()


async def _name_of(cloud: EmulatedHetzner) -> str:
    """The name of the server that the first request creates."""
    await cloud.provider().create(request_for())
    await asyncio.sleep(60)
    (server,) = cloud.servers.values()
    return str(server.name)
