"""The Hetzner provider against the emulated API in virtual time: what it asks for, and what it makes of the answers."""

import asyncio
from datetime import datetime, timedelta
from typing import Any

import hcloud
import pytest
import requests
from hcloud.networks.domain import NetworkSubnet

from support.hetzner_fixture import Bed, request_for, virtually
from support.hetzner_histories import HetznerHistory
from windlass.control.cycle import CLOSE_TIMEOUT_S
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
from windlass.model.fleet import FleetConfig
from windlass.model.hetzner import HetznerSettings
from windlass.model.machine import Machine, MachineState
from windlass.providers.hetzner.doctor_checks import run_checks
from windlass.providers.hetzner.limiter import BURST, HetznerLimiter
from windlass.providers.hetzner.primary_ips import LABEL_ATTEMPTS
from windlass.providers.hetzner.provider import HetznerProvider
from windlass.providers.rate_limiter import FIRST_PAUSE_S
from windlass.simulator.loop import virtual_now
from windlass.simulator.scenario import FleetScenario, Scenario
from windlass.simulator.workers import TaskProfile

CX23, IPV4 = 5_600, 800
SUBNET = NetworkSubnet("10.0.0.0/24", type="cloud", network_zone="eu-central")
PUBLIC_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f me"

# ------------------------------------------------------------------------------------------------------------ create


@virtually
async def test_a_server_is_what_was_asked_for_and_what_it_costs_is_known() -> None:
    bed = Bed()
    network = bed.client.networks.create(name="inside", ip_range="10.0.0.0/16", subnets=[SUBNET])
    provider = bed.provider(network_id=network.id, labels={"team": "a"})
    machine = await provider.create(request_for(slot=3))
    (server,) = bed.servers.values()
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


@virtually
async def test_an_hour_of_a_minute_costs_as_much_as_an_hour() -> None:
    """In rehearsals: the emulator asks the same for its short hours, so an hour of the clock costs sixty times that."""
    bed = Bed(billing_hour_s=60)
    whole = await bed.provider().create(request_for())
    assert whole.price_parts == (PricePart(CX23, 3_490_000), PricePart(IPV4, 500_000))
    minutes = await bed.provider("blue", billing_hour_s=60).create(request_for(fleet="blue"))
    assert whole.price_micros_per_hour == CX23 + IPV4
    assert minutes.price_micros_per_hour == 60 * (CX23 + IPV4)
    assert minutes.price_parts == (PricePart(60 * CX23, 3_490_000), PricePart(60 * IPV4, 500_000))


@virtually
async def test_without_a_public_address_there_is_none_to_pay() -> None:
    bed = Bed()
    network = bed.client.networks.create(name="inside", ip_range="10.0.0.0/16", subnets=[SUBNET])
    machine = await bed.provider(network_id=network.id, is_ipv4_on=False).create(request_for())
    assert machine.price_micros_per_hour == 5_600
    assert bed.emulator.project.primary_ips == {}


@virtually
async def test_no_capacity_moves_on_to_the_next_choice_and_is_remembered() -> None:
    bed = Bed()
    bed.faults.no_capacity("cx23", "nbg1", is_announced=False)
    bed.faults.no_capacity("cx23", "fsn1", code="placement_error", is_announced=False)
    provider = bed.provider(capacity_memory_s=300)
    assert (await provider.create(request_for(0))).place == "hel1"
    assert len(bed.asked("POST", "/servers")) == 3
    assert (await provider.create(request_for(1))).place == "hel1"
    assert len(bed.asked("POST", "/servers")) == 4
    bed.faults.clear()
    await asyncio.sleep(300)
    assert (await provider.create(request_for(2))).place == "nbg1"


@virtually
async def test_when_all_choices_are_out_nothing_is_asked_until_that_may_have_changed() -> None:
    bed = Bed()
    bed.faults.no_capacity("*", "*", is_announced=False)
    provider = bed.provider()
    with pytest.raises(
        NoCapacity,
        match="creating server red-0-aa: no capacity for cx23 in nbg1, cx23 in fsn1, cx23 in hel1. Wait, or add",
    ):
        await provider.create(request_for())
    asked = len(bed.emulator.requests)
    with pytest.raises(NoCapacity):
        await provider.create(request_for())
    assert len(bed.emulator.requests) == asked


@virtually
async def test_what_one_fleet_learned_about_capacity_all_with_its_token_know() -> None:
    bed = Bed()
    bed.faults.no_capacity("cx23", "nbg1", is_announced=False)
    account = bed.account()
    await bed.provider(account=account).create(request_for())
    await bed.provider("blue", account=account).create(request_for(fleet="blue"))
    assert len(bed.asked("POST", "/servers")) == 3


@virtually
async def test_a_place_that_the_vendor_says_is_out_is_tried_last() -> None:
    bed = Bed()
    bed.faults.no_capacity("cx23", "nbg1")
    assert (await bed.provider().create(request_for())).place == "fsn1"
    assert len(bed.asked("POST", "/servers")) == 1
    assert (await bed.provider(choices=["cx23@nbg1", "cx33@nbg1"]).create(request_for(1))).instance_type == "cx33"


@pytest.mark.parametrize(
    ("code", "error", "words"),
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
def test_each_refusal_is_what_it_means(code: str, error: type[Exception], words: str) -> None:
    @virtually
    async def refused() -> None:
        bed = Bed()
        bed.faults.next_create(code)
        with pytest.raises(
            error, match=f"^creating server red-0-aa: .*{code}.*{words}" if words != code else code
        ) as caught:
            await bed.provider().create(request_for())
        assert type(caught.value) is error
        assert len(bed.asked("POST", "/servers")) == 1

    refused()


@pytest.mark.parametrize(
    ("settings", "words", "posts"),
    [
        pytest.param({"image": "ubuntu-99"}, "image not found", 1, id="no other choice would do"),
        pytest.param({"choices": ["cx99@nbg1", "cx98@nbg1"]}, "server type not found", 2, id="no choice exists"),
        pytest.param({"choices": ["cx23@ash"]}, "unsupported location for server type", 1, id="not in that place"),
        pytest.param({"ssh_keys": ["me"]}, "not found", 1, id="no such key"),
    ],
)
def test_settings_that_the_vendor_does_not_take_are_an_invalid_request(
    settings: dict[str, Any], words: str, posts: int
) -> None:
    @virtually
    async def refused() -> None:
        bed = Bed()
        provider = bed.provider(**settings)
        for times in (1, 2):
            with pytest.raises(InvalidRequest, match=f"{words}.*: check the hetzner settings of fleet red"):
                await provider.create(request_for())
            assert len(bed.asked("POST", "/servers")) == posts * times

    refused()


@pytest.mark.parametrize("wrong", ["cx99@nbg1", "cx23@ash"])
def test_a_choice_that_does_not_exist_does_not_keep_the_others_from_being_had(wrong: str) -> None:
    @virtually
    async def create() -> None:
        bed = Bed()
        provider = bed.provider(choices=[wrong, "cx23@nbg1"])
        for number in range(2):
            assert (await provider.create(request_for(number))).place == "nbg1"
        assert len(bed.asked("POST", "/servers")) == 3, "it is not asked for every time"
        ((told, words),) = provider.traits.refused_choices
        assert (told, bool(words)) == (wrong.replace("@", " in "), True)
        bed.faults.no_capacity("cx23", "nbg1", is_announced=False)
        with pytest.raises(NoCapacity, match=f"no capacity for cx23 in nbg1. .* Refused: {told} "):
            await provider.create(request_for(2))
        await asyncio.sleep(3600)
        assert provider.traits.refused_choices == ()

    create()


@virtually
async def test_what_is_refused_to_one_fleet_is_not_closed_to_others() -> None:
    bed = Bed()
    account = bed.account()
    red = bed.provider(account=account, choices=["cx23@fsn1", "cx23@nbg1"])
    blue = bed.provider("blue", account=account, choices=["cx23@fsn1"])
    bed.faults.next_create("invalid_input")  # red's own image, or its network: the vendor does not say which
    assert (await red.create(request_for())).place == "nbg1"
    assert (await blue.create(request_for(fleet="blue"))).place == "fsn1"


@virtually
async def test_when_the_last_choice_is_refused_too_the_request_is_wrong_and_all_are_asked_for_again() -> None:
    bed = Bed()
    provider = bed.provider(choices=["cx23@fsn1", "cx23@nbg1"])
    bed.faults.next_create("invalid_input")
    await provider.create(request_for())
    bed.faults.next_create("invalid_input")
    with pytest.raises(InvalidRequest):
        await provider.create(request_for(1))
    assert (await provider.create(request_for(2))).place == "fsn1"


@virtually
async def test_who_closes_looks_for_all_that_was_left_behind_and_is_counted_no_more() -> None:
    bed = Bed()
    account = bed.account()
    bed.provider("blue", account=account)
    red = bed.provider(account=account)
    machines = [await red.create(request_for(number)) for number in range(10)]
    await asyncio.sleep(60)
    await red.list_machines()
    await asyncio.sleep(60)
    for address in bed.emulator.project.primary_ips.values():
        address.is_auto_deleted = False  # as a person may set it
    await asyncio.gather(*(red.delete(machine) for machine in machines))
    await red.list_machines()
    assert len(bed.emulator.project.primary_ips) == 10
    async with asyncio.timeout(CLOSE_TIMEOUT_S):
        await red.close()
    assert (len(bed.emulator.project.primary_ips), account.limiter.fleet_count) == (0, 1)


@virtually
async def test_who_is_cut_off_while_it_closes_is_counted_no_more() -> None:
    bed = Bed()
    account = bed.account()
    bed.provider("blue", account=account)
    red = bed.provider(account=account)
    await red.create(request_for())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await red.close()
    assert account.limiter.fleet_count == 1


@virtually
async def test_a_request_that_collides_is_sent_again() -> None:
    bed = Bed()
    bed.faults.next_create("conflict")
    bed.faults.next_create("locked")
    assert (await bed.provider().create(request_for())).name == "red-0-aa"
    bed.faults.next_create("conflict", times=9)
    with pytest.raises(Throttled):
        await bed.provider().create(request_for(1))
    assert len(bed.asked("POST", "/servers")) == 6


@virtually
async def test_a_429_is_heeded_by_everybody_with_the_token() -> None:
    bed = Bed()
    account = bed.account()
    provider, other = bed.provider(account=account), bed.provider("blue", account=account)
    bed.faults.next_create("rate_limit_exceeded")
    with pytest.raises(Throttled) as caught:
        await provider.create(request_for())
    assert 0 < caught.value.retry_after_s <= FIRST_PAUSE_S
    asked, began = len(bed.emulator.requests), virtual_now()
    await other.create(request_for(fleet="blue"))
    assert virtual_now() - began > timedelta(seconds=FIRST_PAUSE_S - 1)
    assert len(bed.emulator.requests) > asked


@virtually
async def test_the_vendors_own_limit_is_never_reached_by_those_who_have_one_allowance() -> None:
    bed = Bed(requests_per_hour=3600)
    account = bed.account()
    provider = bed.provider(account=account, list_reuse_s=0.0)
    for _ in range(60):
        await provider.list_machines()
    seconds = (virtual_now() - bed.emulator.requests[0][0]).total_seconds()
    assert len(bed.emulator.requests) <= 20 + seconds


@pytest.mark.parametrize("takes_effect", [True, False])
def test_a_creation_without_an_answer_is_sent_once_and_settled_by_a_list(takes_effect: bool) -> None:
    @virtually
    async def lose() -> None:
        bed = Bed()
        provider = bed.provider()
        bed.faults.next_create(
            times_out_after_taking_effect=takes_effect, times_out_before_taking_effect=not takes_effect
        )
        with pytest.raises(Ambiguous, match="creating server red-0-aa: request timed out"):
            await provider.create(request_for())
        assert len(bed.asked("POST", "/servers")) == 1
        assert [machine.name for machine in await provider.list_machines()] == (["red-0-aa"] if takes_effect else [])
        # As the SDK would by itself: the second request finds the server of the first.
        again = await provider.create(request_for())
        assert [str(server) for server in bed.servers] == [again.id]

    lose()


@virtually
async def test_a_name_that_somebody_else_has_is_refused() -> None:
    bed = Bed()
    provider = bed.provider()
    name = (await _name_of(bed)).removesuffix("!")
    await provider.delete((await provider.list_machines())[0])
    bed.client.servers.create(name, _named("cx23"), _named("ubuntu-24.04"), location=_named("nbg1"))
    with pytest.raises(Refused, match="a server red-0-aa-.* exists that is not ours. Rename or delete it"):
        await provider.create(request_for())
    assert len(bed.servers) == 1


@virtually
async def test_a_name_that_is_taken_and_not_listed_yet_is_ambiguous() -> None:
    bed = Bed()
    await bed.provider().create(request_for())
    bed.faults.list_lags(30)
    with pytest.raises(Ambiguous, match="but no server with that name is listed"):
        await bed.provider().create(request_for())


@virtually
async def test_user_data_that_is_too_long_or_cannot_be_rendered_is_refused_before_any_request() -> None:
    bed = Bed()

    def broken(_: object) -> str:
        raise KeyError("image")

    with pytest.raises(Refused, match="user_data has 40,000 bytes, at most 32,768 are allowed"):
        await bed.provider(render_user_data=lambda _: "x" * 40_000).create(request_for())
    with pytest.raises(Refused, match="cannot render user_data .'image'.. Check the bootstrap settings of fleet red"):
        await bed.provider(render_user_data=broken).create(request_for())
    assert not bed.emulator.requests


@virtually
async def test_no_token_and_no_password_is_in_any_error() -> None:
    bed = Bed(token="right")
    provider = bed.provider(account=bed.account("hush-hush"))
    for call in (provider.create(request_for()), provider.list_machines()):
        with pytest.raises((Denied, Unavailable)) as caught:
            await call
        assert "hush" not in str(caught.value)
        assert "secret" not in str(caught.value)


# -------------------------------------------------------------------------------------------------------------- list


@virtually
async def test_a_list_of_many_takes_one_request_for_fifty() -> None:
    bed = Bed(server_limit=200)
    provider = bed.provider(account=bed.account(limiter=HetznerLimiter(rate_per_s=100, burst=1000)), list_reuse_s=0.0)
    for slot in range(120):
        await provider.create(request_for(slot))
    before = len(bed.asked("GET", "/servers"))
    assert len(await provider.list_machines()) == 120
    assert len(bed.asked("GET", "/servers")) - before == 3


@pytest.mark.parametrize("skip", [0, 1])
@pytest.mark.parametrize("code", ["unavailable", "unauthorized", "rate_limit_exceeded", "server_error", None])
def test_a_list_of_which_a_page_is_missing_is_no_list(code: str | None, skip: int) -> None:
    @virtually
    async def miss() -> None:
        bed = Bed()
        provider = bed.provider(
            account=bed.account(limiter=HetznerLimiter(rate_per_s=100, burst=1000)), list_reuse_s=0.0
        )
        for slot in range(60):
            await provider.create(request_for(slot))
        bed.faults.next_list(code, skip=skip)
        with pytest.raises(Unavailable, match="^listing the servers of fleet red: "):
            await provider.list_machines()

    miss()


@virtually
async def test_a_list_that_changes_while_it_is_read_is_read_again() -> None:
    bed = Bed(boot_s=0, delete_s=0, action_s=0)
    provider = bed.provider(account=bed.account(limiter=HetznerLimiter(rate_per_s=100, burst=1000)), list_reuse_s=0.0)
    made = [await provider.create(request_for(slot)) for slot in range(60)]
    before = len(bed.asked("GET", "/servers"))
    handle = bed.emulator.handle

    def delete_between(*request: object) -> object:
        answer = handle(*request)  # type: ignore[arg-type]
        if len(bed.asked("GET", "/servers")) == before + 1 and int(made[0].id) in bed.servers:
            bed.emulator.project.begin_deletion(bed.servers[int(made[0].id)])
        return answer

    bed.emulator.handle = delete_between  # type: ignore[method-assign, assignment]
    listed = {machine.id for machine in await provider.list_machines()}
    assert listed == {machine.id for machine in made[1:]}
    assert len(bed.asked("GET", "/servers")) - before == 4


@virtually
async def test_lists_that_follow_each_other_are_one_list_with_what_we_did_since() -> None:
    bed = Bed(boot_s=0, delete_s=0, action_s=0)
    provider = bed.provider()
    first = await provider.create(request_for(0))
    await provider.list_machines()
    before = len(bed.asked("GET", "/v1/servers"))
    second = await provider.create(request_for(1))
    await provider.delete(first)
    looked = len(bed.asked("GET", f"/servers/{first.id}"))
    assert [machine.id for machine in await provider.list_machines()] == [second.id]
    assert len(bed.asked("GET", "/v1/servers")) - before == looked
    await asyncio.sleep(5)
    assert [machine.id for machine in await provider.list_machines()] == [second.id]
    assert len(bed.asked("GET", "/v1/servers")) - before == looked + 1


@virtually
async def test_prices_are_asked_for_seldom_and_a_list_does_without() -> None:
    bed = Bed()
    provider = bed.provider(list_reuse_s=0.0)
    bed.faults.next("unavailable", path="/v1/pricing", times=1)
    machine = await provider.create(request_for())
    assert (machine.price_micros_per_hour, machine.currency) == (None, None)
    await asyncio.sleep(60)
    for _ in range(5):
        (machine,) = await provider.list_machines()
        await asyncio.sleep(60)
    assert machine.price_micros_per_hour == 6_400
    assert len(bed.asked("GET", "/pricing")) == 2


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ("initializing", MachineState.BOOTING),
        ("starting", MachineState.BOOTING),
        ("running", MachineState.RUNNING),
        ("migrating", MachineState.BOOTING),
        ("rebuilding", MachineState.BOOTING),
        ("unknown", MachineState.BOOTING),
        ("a state of next year", MachineState.BOOTING),
        ("off", MachineState.EXITED),
        ("stopping", MachineState.EXITED),
        ("deleting", MachineState.EXITED),
    ],
)
def test_every_status_is_one_state(status: str, state: MachineState) -> None:
    @virtually
    async def look() -> None:
        bed = Bed()
        provider = bed.provider(list_reuse_s=0.0)
        await provider.create(request_for())
        await asyncio.sleep(90)
        bed.emulator.settle()
        (server,) = bed.servers.values()
        bed.emulator.project.set_status(server, status)
        (machine,) = await provider.list_machines()
        assert machine.state is state
        assert machine.note == (f"the server is {status}" if state is MachineState.EXITED else None)

    look()


@virtually
async def test_a_new_server_that_is_off_for_a_moment_is_booting() -> None:
    bed = Bed()
    provider = bed.provider(list_reuse_s=0.0)
    await provider.create(request_for())
    (server,) = bed.servers.values()
    bed.emulator.project.set_status(server, "off")
    assert (await provider.list_machines())[0].state is MachineState.BOOTING
    bed.emulator.project.set_status(server, "running")
    await provider.list_machines()
    bed.emulator.project.set_status(server, "off")
    assert (await provider.list_machines())[0].state is MachineState.EXITED


# ------------------------------------------------------------------------------------------------------------ delete


@virtually
async def test_a_server_is_gone_when_delete_returns_and_that_took_two_requests() -> None:
    bed = Bed()
    provider = bed.provider()
    machine = await provider.create(request_for())
    await asyncio.sleep(60)
    before, asked_at = len(bed.emulator.requests), virtual_now()
    stopped_at = await provider.delete(machine)
    assert bed.servers == {}
    assert bed.emulator.project.primary_ips == {}
    # In whole seconds, as the vendor publishes them.
    assert stopped_at is not None
    assert abs(stopped_at - asked_at) < timedelta(seconds=1)
    # Asked again, and by somebody who never saw it: the vendor remembers when.
    assert await provider.delete(machine) == await bed.provider().delete(machine) == stopped_at
    assert [request[1] for request in bed.asked()[before : before + 2]] == ["DELETE", "GET"]


@virtually
async def test_a_deletion_that_says_not_found_is_not_believed() -> None:
    bed = Bed()
    provider = bed.provider()
    machine = await provider.create(request_for())
    await asyncio.sleep(60)
    bed.faults.next_delete("not_found")
    await provider.delete(machine)
    assert bed.servers == {}


@virtually
async def test_a_server_that_is_locked_is_deleted_when_it_is_not() -> None:
    bed = Bed(boot_s=15)
    provider = bed.provider()
    await provider.delete(await provider.create(request_for()))
    assert bed.servers == {}
    assert len(bed.asked("DELETE")) > 1


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        ("protected", Refused, "remove the protection in Hetzner's console. It is billed until then"),
        ("forbidden", Denied, "check hetzner_api_token"),
        ("rate_limit_exceeded", Throttled, "rate_limit_exceeded"),
        ("unavailable", Unavailable, "unavailable"),
        ("service_error", Unavailable, "service_error"),
    ],
)
def test_denied_is_not_gone(code: str, error: type[Exception], words: str) -> None:
    @virtually
    async def deny() -> None:
        bed = Bed()
        provider = bed.provider()
        machine = await provider.create(request_for())
        await asyncio.sleep(60)
        bed.faults.next_delete(code)
        with pytest.raises(error, match=f"^deleting server {machine.id} of red-0-aa: .*{words}"):
            await provider.delete(machine)
        assert len(bed.servers) == 1

    deny()


@pytest.mark.parametrize("takes_effect", [True, False])
def test_a_deletion_without_an_answer_is_not_gone_until_it_is(takes_effect: bool) -> None:
    @virtually
    async def lose() -> None:
        bed = Bed()
        provider = bed.provider()
        machine = await provider.create(request_for())
        await asyncio.sleep(60)
        bed.faults.next_delete(
            times_out_after_taking_effect=takes_effect, times_out_before_taking_effect=not takes_effect
        )
        asked_at = virtual_now()
        with pytest.raises(Unavailable):
            await provider.delete(machine)
        asked_again_at = virtual_now()
        stopped_at = await provider.delete(machine)
        assert bed.servers == {}
        # Nothing is paid for the time in which nobody knew.
        assert stopped_at is not None
        assert abs(stopped_at - (asked_at if takes_effect else asked_again_at)) < timedelta(seconds=1)
        (line,) = bed.emulator.bill()["servers"]
        assert line["deleted"] == stopped_at.isoformat()

    lose()


@virtually
async def test_a_deletion_that_fails_after_it_was_accepted_is_sent_again() -> None:
    bed = Bed(boot_s=0)
    provider = bed.provider()
    machine = await provider.create(request_for())
    await asyncio.sleep(60)
    bed.faults.next_action("delete_server")
    asked_at = virtual_now()
    stopped_at = await provider.delete(machine)
    assert len(bed.asked("DELETE")) == 2
    assert stopped_at is not None
    assert stopped_at - asked_at > timedelta(seconds=0.5)  # by the second, not by the first
    (line,) = bed.emulator.bill()["servers"]
    assert line["deleted"] == stopped_at.isoformat()


@virtually
async def test_a_deletion_is_found_among_many_actions() -> None:
    bed = Bed(boot_s=0, action_s=0)
    provider = bed.provider(account=bed.account(limiter=HetznerLimiter(rate_per_s=100, burst=1000)))
    machine, other = [await provider.create(request_for(slot)) for slot in range(2)]
    await asyncio.sleep(60)
    bed.faults.next_delete("server_error", takes_effect=True)
    asked_at = virtual_now()
    with pytest.raises(Unavailable):
        await provider.delete(machine)
    for _ in range(120):
        bed.client.servers.get_by_id(int(other.id)).power_on()
        await asyncio.sleep(1)
    stopped_at = await provider.delete(machine)
    assert stopped_at is not None
    assert abs(stopped_at - asked_at) < timedelta(seconds=1)


@virtually
async def test_a_server_whose_start_failed_has_exited_and_one_without_its_network_has_no_private_address() -> None:
    bed = Bed(boot_s=0)
    network = bed.client.networks.create(name="inside", ip_range="10.0.0.0/16", subnets=[SUBNET])
    provider = bed.provider(network_id=network.id, list_reuse_s=0.0)
    bed.faults.next_action("start_server")
    await provider.create(request_for(0))
    bed.faults.next_action("attach_to_network")
    await provider.create(request_for(1))
    await asyncio.sleep(90)
    off, alone = await provider.list_machines()
    assert (off.state, off.note) == (MachineState.EXITED, "the server is off")
    assert alone.state is MachineState.RUNNING
    assert alone.address is not None
    assert not alone.address.startswith("10.")


@virtually
async def test_a_server_that_lost_its_labels_is_not_gone() -> None:
    bed = Bed(boot_s=0, delete_s=0, action_s=0)
    provider = bed.provider(list_reuse_s=0.0)
    machine = await provider.create(request_for())
    bed.client.servers.get_by_id(int(machine.id)).update(labels={"team": "a"})
    await asyncio.sleep(60)
    assert await provider.list_machines() == ()
    with pytest.raises(
        Refused, match="created for red-0-aa, has lost our labels. Delete it in .* It is billed until then"
    ):
        await provider.delete(machine)
    assert len(bed.servers) == 1


@virtually
async def test_when_nobody_says_since_when_a_server_is_gone_that_is_not_known() -> None:
    bed = Bed()
    provider = bed.provider()
    machine = await provider.create(request_for())
    await asyncio.sleep(60)
    bed.faults.next_delete("not_found", takes_effect=True)
    bed.faults.next("unavailable", path="/v1/servers/actions")
    assert await provider.delete(machine) is None
    assert bed.servers == {}


# --------------------------------------------------------------------------------------------------------- addresses


@virtually
async def test_a_primary_ip_that_was_left_behind_is_found_by_its_labels_and_deleted() -> None:
    bed = Bed(boot_s=0, delete_s=0, action_s=0)
    provider = bed.provider(list_reuse_s=0.0)
    machine = await provider.create(request_for())
    await _tended(provider)
    (address,) = bed.emulator.project.primary_ips.values()
    assert address.labels["windlass-worker"] == "red-0-aa"
    address.is_auto_deleted = False
    await provider.delete(machine)
    assert list(bed.emulator.project.primary_ips.values()) == [address]
    await asyncio.sleep(300)
    await _tended(bed.provider("blue", list_reuse_s=0.0))
    await _tended(bed.provider(identity="other", list_reuse_s=0.0))
    assert len(bed.emulator.project.primary_ips) == 1  # nobody else's business
    await _tended(bed.provider(list_reuse_s=0.0))
    assert bed.emulator.project.primary_ips == {}


@virtually
async def test_the_address_of_a_new_server_is_labelled_at_once_and_of_one_that_is_only_deleted_too() -> None:
    bed = Bed(boot_s=0, delete_s=0, action_s=0)
    provider = bed.provider()
    machines = [await provider.create(request_for(slot)) for slot in range(3)]
    addresses = list(bed.emulator.project.primary_ips.values())
    await asyncio.sleep(15)
    # Before anybody has listed anything.
    assert [address.labels["windlass-worker"] for address in addresses] == ["red-0-aa", "red-1-aa", "red-2-aa"]
    # As if whoever had them made had died before that. Its successor never lists them: it is told to delete them.
    for address in addresses:
        address.labels.clear()
        address.is_auto_deleted = False
    successor = bed.provider(list_reuse_s=0.0)
    await asyncio.gather(*map(successor.delete, machines))
    for _ in range(2):  # deletions go before labels, which may be late for the first look
        await asyncio.sleep(300)
        await _tended(successor)
    assert bed.emulator.project.primary_ips == {}


@virtually
async def test_primary_ips_of_others_and_of_living_servers_stay() -> None:
    bed = Bed()
    provider = bed.provider(list_reuse_s=0.0, is_ipv6_on=True)
    await provider.create(request_for())
    alone = bed.add_primary_ip("mine").id
    for _ in range(40):
        await provider.list_machines()
        await asyncio.sleep(30)
    assert alone in bed.emulator.project.primary_ips
    assert len(bed.emulator.project.primary_ips) == 3
    assert len(bed.asked("PUT", "/primary_ips")) == 2  # each of ours is labelled once
    assert len(bed.asked("GET", "/primary_ips")) <= 5


@pytest.mark.parametrize("whose", ["of a creation without an answer", "made before a restart"])
def test_the_address_of_every_server_of_ours_is_labelled_whoever_had_it_made(whose: str) -> None:
    @virtually
    async def label() -> None:
        bed = Bed(boot_s=0, delete_s=0, action_s=0)
        provider = bed.provider(list_reuse_s=0.0)
        if whose == "of a creation without an answer":
            bed.faults.next_create(times_out_after_taking_effect=True)
            with pytest.raises(Ambiguous):
                await provider.create(request_for())
        else:
            await bed.provider().create(request_for())
        (machine,) = await _tended(provider)
        (address,) = bed.emulator.project.primary_ips.values()
        assert address.labels["windlass-worker"] == "red-0-aa"
        address.is_auto_deleted = False
        await provider.delete(machine)
        await asyncio.sleep(300)
        await _tended(provider)
        assert bed.emulator.project.primary_ips == {}

    label()


@virtually
async def test_an_address_that_a_person_gave_to_a_server_of_ours_stays_theirs() -> None:
    bed = Bed(boot_s=0, delete_s=0, action_s=0)
    theirs = bed.add_primary_ip("mine")
    await asyncio.sleep(600)
    machine = await bed.provider().create(request_for())
    server = bed.servers[int(machine.id)]
    bed.emulator.project.primary_ips[server.ipv4_id].server_id = None
    server.ipv4_id, theirs.server_id = theirs.id, server.id
    provider = bed.provider(list_reuse_s=0.0)
    for _ in range(20):
        await _tended(provider)
        await asyncio.sleep(60)
    await provider.delete(machine)
    await asyncio.sleep(600)
    await _tended(provider)
    assert theirs.labels == {}
    assert len(bed.asked("GET", f"/primary_ips/{theirs.id}")) <= 5


@virtually
async def test_an_address_that_cannot_be_labelled_keeps_no_other_waiting() -> None:
    bed = Bed()
    provider = bed.provider(list_reuse_s=0.0)
    for slot in range(3):
        await provider.create(request_for(slot))
    first, *others = bed.emulator.project.primary_ips.values()
    bed.faults.next("server_error", path=f"/v1/primary_ips/{first.id}", times=1000)
    for _ in range(12):
        await asyncio.sleep(10)
        await _tended(provider)
    assert [address.labels["windlass-worker"] for address in others] == ["red-1-aa", "red-2-aa"]
    assert len(bed.asked("PUT", f"/primary_ips/{first.id}")) == LABEL_ATTEMPTS
    bed.faults.clear()
    await asyncio.sleep(300)
    await _tended(provider)
    assert first.labels["windlass-worker"] == "red-0-aa"


@virtually
async def test_trouble_with_addresses_is_no_reason_not_to_list() -> None:
    bed = Bed()
    provider = bed.provider(list_reuse_s=0.0)
    await provider.create(request_for())
    bed.faults.next("server_error", path="/v1/primary_ips.*", times=1000)
    assert len(await provider.list_machines()) == 1


@virtually
async def test_a_list_does_not_wait_for_addresses_that_nobody_answers_for() -> None:
    bed = Bed()
    provider = bed.provider(list_reuse_s=0.0)
    await provider.create(request_for())
    bed.faults.next(None, path="/v1/primary_ips.*", times=1000)
    for _ in range(6):
        began = virtual_now()
        assert len(await provider.list_machines()) == 1
        assert virtual_now() - began < timedelta(seconds=2)
        await asyncio.sleep(3)
    assert len(bed.asked(path="/primary_ips")) == 2  # one at a time
    await provider.close()
    asked = len(bed.emulator.requests)
    await asyncio.sleep(60)
    assert len(bed.emulator.requests) == asked


# ----------------------------------------------------------------------------------------------------------- account


@pytest.mark.parametrize("code", ["bad_gateway", "timeout", "conflict", "rate_limit_exceeded", None])
def test_the_sdk_sends_nothing_twice_by_itself(code: str | None) -> None:
    @virtually
    async def ask() -> None:
        bed = Bed()
        account = bed.account()
        bed.faults.next(code, times=99)
        with pytest.raises((hcloud.APIException, requests.exceptions.Timeout)):
            await account.send(lambda: account.api.servers.get_list(), max_wait_s=0)
        assert len(bed.emulator.requests) == 1

    ask()


@virtually
async def test_every_request_has_a_time_limit() -> None:
    bed = Bed()
    account = bed.account()
    limits = []
    inner = account._adapter._inner
    send = inner.send

    def note(request: requests.PreparedRequest, **options: object) -> requests.Response:
        limits.append(options["timeout"])
        return send(request, **options)  # type: ignore[arg-type]

    inner.send = note  # type: ignore[method-assign, assignment]
    provider = bed.provider(account=account)
    await provider.delete(await provider.create(request_for()))
    await provider.list_machines()
    assert set(limits) == {(5.0, 20.0)}


async def _tended(provider: HetznerProvider) -> tuple[Machine, ...]:
    """A list, and the time to do what is done after it."""
    machines = await provider.list_machines()
    await asyncio.sleep(10)
    return machines


def _named(name: str) -> object:
    return type("Named", (), {"id_or_name": name})()


async def _name_of(bed: Bed) -> str:
    """The name that the server of the first request gets."""
    await bed.provider().create(request_for())
    await asyncio.sleep(60)
    (server,) = bed.servers.values()
    return str(server.name)


@virtually
async def test_everything_it_asks_is_as_the_vendor_published_it() -> None:
    bed = Bed(is_judged=True)
    key = bed.client.ssh_keys.create(name="me", public_key=PUBLIC_KEY)
    firewall = bed.client.firewalls.create(name="wall").firewall
    network = bed.client.networks.create(name="inside", ip_range="10.0.0.0/16", subnets=[SUBNET])
    provider = bed.provider(
        network_id=network.id, ssh_keys=[key.name, str(key.id)], firewall_ids=[firewall.id], list_reuse_s=0.0
    )
    machine = await provider.create(request_for())
    assert (await provider.create(request_for())).id == machine.id
    await _tended(provider)
    (address,) = bed.emulator.project.primary_ips.values()
    address.is_auto_deleted = False
    await asyncio.sleep(301)
    await provider.delete(machine)
    await _tended(provider)
    assert bed.emulator.project.primary_ips == {}
    account = bed.account()
    remarks = [remark async for remark in run_checks(account, "this", {"red": HetznerSettings()}, network.id)]
    assert [remark.advice for remark in remarks] == ["", "", "", ""]
    assert getattr(bed.front, "checked", 0) > 12


@virtually
async def test_the_doctor_finds_servers_nobody_looks_after() -> None:
    bed = Bed()
    await bed.provider("blue").create(request_for(fleet="blue"))
    await bed.provider("red").create(request_for())
    await bed.provider("green", identity="other").create(request_for(fleet="green"))
    remark = await anext(run_checks(bed.account(), "this", {"red": HetznerSettings()}, None))
    assert (remark.message, remark.is_error) == ("servers exist of fleets that are not configured: blue", False)
    assert remark.advice.startswith("`windlass up` deletes those whose workers are in the database; delete the others")
    # Whose they are cannot be told without the database.
    remark = await anext(run_checks(bed.account(), None, {"red": HetznerSettings()}, None))
    assert (remark.message, remark.advice) == ("token valid, windlass servers: 3", "")


@virtually
async def test_the_doctor_reads_all_pages_and_finds_addresses_nobody_looks_after() -> None:
    bed = Bed(server_limit=100)
    red, blue = bed.provider("red"), bed.provider("blue")
    for slot in range(51):
        await red.create(request_for(slot))
    await blue.create(request_for(fleet="blue"))
    (server,) = [server for server in bed.servers.values() if server.labels["windlass-fleet"] == "blue"]
    remarks = [each async for each in run_checks(bed.account(), "this", {"red": HetznerSettings()}, None)]
    assert remarks[0].message == "servers exist of fleets that are not configured: blue"
    assert [each.check for each in remarks] == ["hetzner", "server type", "image"]
    await blue.list_machines()
    await asyncio.sleep(60)
    (address,) = [
        each for each in bed.emulator.project.primary_ips.values() if each.server_id == server.id and each.labels
    ]
    address.is_auto_deleted = False
    bed.client.servers.delete(hcloud.servers.domain.Server(id=server.id))
    await asyncio.sleep(60)
    remarks = [each async for each in run_checks(bed.account(), "this", {"red": HetznerSettings()}, None)]
    assert (remarks[1].check, remarks[1].is_error) == ("primary ips", False)
    assert f"{address.ip} (fleet blue)" in remarks[1].message


@virtually
async def test_when_the_last_server_of_a_fleet_is_gone_its_addresses_are_looked_for_once_more() -> None:
    bed = Bed()
    provider = bed.provider()
    machine = await provider.create(request_for())
    await provider.list_machines()
    await asyncio.sleep(60)
    for address in bed.emulator.project.primary_ips.values():
        address.is_auto_deleted = False
    await provider.list_machines()
    await provider.delete(machine)
    assert bed.emulator.project.primary_ips
    await provider.close()
    assert not bed.emulator.project.primary_ips


# ------------------------------------------------------------------------------------------------------------ thrift


@virtually
async def test_deletions_of_one_fleet_do_not_wait_for_the_hirings_of_another() -> None:
    bed = Bed(server_limit=1000)
    account = bed.account()
    hiring, exit_reason = bed.provider("red", account=account), bed.provider("blue", account=account)
    ended = [await exit_reason.create(request_for(slot, "blue")) for slot in range(10)]
    await asyncio.sleep(600)
    slots = iter(range(1000))

    async def hire() -> None:
        while True:
            try:
                await hiring.create(request_for(next(slots)))
            except Throttled as throttled:
                await asyncio.sleep(throttled.retry_after_s)

    launches = [asyncio.create_task(hire()) for _ in range(16)]
    await asyncio.sleep(3)
    began = virtual_now()
    await asyncio.gather(*map(exit_reason.delete, ended))
    for each in launches:
        each.cancel()
    lines = {line["id"]: line for line in bed.emulator.bill()["servers"]}
    paid_until = max(datetime.fromisoformat(lines[int(machine.id)]["deleted"]) for machine in ended)
    assert paid_until - began < timedelta(seconds=25)


@virtually
async def test_fleets_that_share_a_token_share_what_can_be_deleted() -> None:
    bed = Bed()
    account = bed.account()
    alone = bed.provider(account=account)
    one_per_s = alone.traits.deletions_per_s
    assert one_per_s == pytest.approx(0.35)
    others = [bed.provider(f"blue{n}", account=account) for n in range(3)]
    again = bed.provider("blue0", account=account)  # whose settings changed
    assert alone.traits.deletions_per_s == pytest.approx(0.9 / 4 / 2 / 4)
    for each in (*others, again):
        await each.close()
    assert alone.traits.deletions_per_s == one_per_s


def test_a_hundred_servers_boot_run_and_leave_on_less_than_a_request_a_second() -> None:
    """By the real control loop: a burst of work for a hundred, ten minutes of it, and everybody gone."""
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
    # From the first request until the last server was gone.
    last = max(at for at, method, _ in history.project.emulator.requests if method == "DELETE").timestamp()
    busy = [at for at in times if at <= last]
    assert len(busy) / (last - busy[0]) < 0.9
    assert max(sum(start <= at < start + 60 for at in busy) for start in busy) <= 60
    assert max(sum(start <= at < start + 1 for at in busy) for start in busy) <= BURST + 1
    asked_for, told_to_go = (
        [at.timestamp() for at, method, path in history.project.emulator.requests if (method, path[:11]) == kind]
        for kind in (("POST", "/v1/servers"), ("DELETE", "/v1/servers"))
    )
    phases = ((busy[0], asked_for[99]), (asked_for[99], told_to_go[0]), (told_to_go[0], told_to_go[-1]))
    for begins, ends in phases:
        assert sum(begins <= at < ends for at in busy) < ends - begins
    # A hundred are asked for as fast as that allows.
    assert len(creations) >= 100
    assert (creations[99] - creations[0]).total_seconds() < 200
    # And they are gone before another hour of any of them begins, although their hours end nearly together and each
    # deletion takes two requests.
    bill = history.project.bill()
    assert [line["hours"] for line in bill["servers"]] == [1] * 100
    assert history.tally == {"for want of work, at the end of an hour": 100}
