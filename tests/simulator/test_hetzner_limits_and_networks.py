"""Hetzner as it really behaves: limits per kind, retired types, a private network and a firewall for every server."""

import json
from typing import Any

import pytest

from support.hetzner_fixture import EmulatedHetzner
from support.simulator.loop import run
from support.virtual_time import in_virtual_time
from windlass.model.errors import InvalidRequest, LimitReached
from windlass.model.fleet import FleetConfig
from windlass.model.hetzner import HetznerSettings
from windlass.model.machine import MachineRequest
from windlass.providers.hetzner.doctor_checks import check_network_sizes, run_checks
from windlass.providers.hetzner.errors import LimitKind, limit_kind
from windlass.providers.vendor_error import ErrorKind, VendorError

MIXED = ["ccx13@nbg1", "ccx23@fsn1", "cx23@nbg1"]
DEFAULTS: dict[str, Any] = {
    "is_ipv4_on": False, "is_ipv6_on": True, "is_network_on": True, "is_firewall_on": True
}  # fmt: skip


def request_for(name: str = "red-0-aa") -> MachineRequest:
    return MachineRequest(name, "red", 0, join_token="wlj_" + "0" * 64)


def posts(cloud: EmulatedHetzner) -> int:
    return len(cloud.sent("POST", "/v1/servers"))


@pytest.mark.parametrize(
    ("limits", "message", "kind"),
    [
        ({"dedicated_core_limit"}, "limit", LimitKind.DEDICATED_CORES),
        (set(), "dedicated core limit exceeded (resource_limit_exceeded)", LimitKind.DEDICATED_CORES),
        (set(), "Primary IP limit exceeded (resource_limit_exceeded)", LimitKind.PRIMARY_IPS),
        ({"server_limit"}, "server limit exceeded", LimitKind.SERVERS),
        (set(), "core limit exceeded (resource_limit_exceeded)", LimitKind.OTHER),
    ],
)
def test_kind_of_a_limit_is_read_from_details_and_prose(limits: set[str], message: str, kind: LimitKind) -> None:
    assert limit_kind(VendorError(ErrorKind.LIMIT, message, limits=frozenset(limits))) is kind


def test_limit_of_dedicated_cores_does_not_stop_shared_types() -> None:
    """Defect 1 of the cloud review: two requests for ccx13, none for cx23, and a hold of the fleet."""

    async def scenario() -> None:
        cloud = EmulatedHetzner()
        cloud.emulator.faults.resource_limit("dedicated_core_limit", 1)
        provider = cloud.provider(choices=MIXED)
        machine = await provider.create(request_for())
        assert machine.instance_type == "cx23"
        # ccx23 counts towards the same limit: it was not asked for.
        assert posts(cloud) == 2
        refused = dict(provider.traits.refused_choices)
        assert set(refused) == {"ccx13 in nbg1", "ccx23 in fsn1"}
        assert "dedicated core limit exceeded" in refused["ccx13 in nbg1"]

        # Other fleets of the project remember the kind too.
        other = cloud.provider("blue", account=provider._account, choices=MIXED)
        assert (await other.create(request_for("blue-0-aa"))).instance_type == "cx23"
        assert posts(cloud) == 3

    run(scenario())


def test_only_a_limit_that_leaves_no_choice_is_reported_as_one() -> None:
    async def scenario() -> None:
        cloud = EmulatedHetzner()
        cloud.emulator.faults.resource_limit("dedicated_core_limit", 0)
        provider = cloud.provider(choices=MIXED[:2])
        for attempt in (1, 2):
            with pytest.raises(LimitReached, match="dedicated core limit exceeded"):
                await provider.create(request_for())
            assert posts(cloud) == attempt
        cloud.emulator.faults.resource_limit("dedicated_core_limit", None)
        assert (await provider.create(request_for())).instance_type == "ccx13"

    run(scenario())


@pytest.mark.parametrize("limit", ["server_limit", "primary_ip_limit"])
def test_limit_that_concerns_every_choice_is_asked_for_once(limit: str) -> None:
    async def scenario() -> None:
        cloud = EmulatedHetzner()
        cloud.emulator.faults.resource_limit(limit, 0)
        with pytest.raises(LimitReached, match="limit exceeded"):
            await cloud.provider(choices=MIXED).create(request_for())
        assert posts(cloud) == 1

    run(scenario())


def test_full_network_is_a_limit_that_another_zone_does_not_have() -> None:
    async def scenario() -> None:
        cloud = EmulatedHetzner(network_limit=1)
        provider = cloud.provider(**DEFAULTS, choices=["cx23@nbg1", "cpx11@ash"])
        machines = [await provider.create(request_for(f"red-{slot}-aa")) for slot in range(2)]
        assert [machine.place for machine in machines] == ["nbg1", "ash"]
        with pytest.raises(LimitReached, match="limit of servers attached to a network exceeded"):
            await provider.create(request_for("red-2-aa"))

    run(scenario())


def test_doctor_warns_if_fleets_exceed_their_network() -> None:
    small = FleetConfig(provider="hetzner", handler="a:b", max_workers=50)
    other = small.model_copy(update={"hetzner": HetznerSettings(choices=("cpx11@ash",))})
    assert check_network_sizes({"a": small, "b": small, "c": other}, None) == []
    (found,) = check_network_sizes({"a": small, "b": small, "c": small, "d": other}, None)
    assert not found.is_error
    assert found.message == (
        "network windlass-eu-central admits 100 servers, and max_workers of its fleets (a, b, c) are 150 together"
    )
    (found,) = check_network_sizes({"a": small, "b": small, "d": other}, 7)
    assert found.message.startswith("network 7 admits 100 servers")
    alone = small.model_copy(update={"hetzner": HetznerSettings(is_network_on=False, is_ipv4_on=True)})
    assert check_network_sizes({"a": small, "b": small, "c": alone}, None) == []


def test_server_gets_a_private_network_and_a_firewall_that_admits_nothing() -> None:
    async def scenario() -> None:
        cloud = EmulatedHetzner()
        provider = cloud.provider(**DEFAULTS)
        machine = await provider.create(request_for())
        await provider.create(request_for("red-1-bb"))
        (network,) = cloud.emulator.project.networks.values()
        (firewall,) = cloud.emulator.project.firewalls.values()
        assert (network.name, network.ip_range) == ("windlass-eu-central", "10.0.0.0/16")
        assert (firewall.name, firewall.rules) == ("windlass", [])
        assert sorted(firewall.server_ids) == sorted(cloud.servers)
        assert machine.address is not None and machine.address.startswith("10.0.")
        server = cloud.servers[int(machine.id)]
        assert server.ipv4_id is None and server.ipv6_id is not None
        assert machine.price_micros_per_hour == 5_600

        # Another process finds both instead of making more.
        await cloud.provider("blue", **DEFAULTS).create(request_for("blue-0-aa"))
        assert len(cloud.emulator.project.networks) == len(cloud.emulator.project.firewalls) == 1

    run(scenario())


def test_foreign_firewall_with_our_name_is_not_used() -> None:
    async def scenario() -> None:
        cloud = EmulatedHetzner()
        cloud.client.firewalls.create(name="windlass")
        with pytest.raises(InvalidRequest, match="a firewall windlass exists that is not ours"):
            await cloud.provider(**DEFAULTS).create(request_for())
        assert not cloud.servers

    run(scenario())


def test_doctor_calls_a_retired_type_retired() -> None:
    async def scenario() -> None:
        cloud = EmulatedHetzner()
        fleets = {"red": HetznerSettings(choices=["cx22@nbg1"])}
        found = [each async for each in run_checks(cloud.account(), "this", fleets, None)]
        (retired,) = [each for each in found if each.check == "server type"]
        assert retired.is_error
        assert retired.message == "cx22 is retired since 2026-01-01 in nbg1"
        assert retired.advice == "replace it in hetzner.choices"
        (exposure,) = [each for each in found if each.check == "exposure"]
        assert "public IPv6 address behind a firewall that admits nothing" in exposure.message

    run(scenario())


@in_virtual_time
async def test_answers_have_no_datacenter_any_more() -> None:
    cloud = EmulatedHetzner()
    headers = {"Authorization": "Bearer any", "Content-Type": "application/json"}

    def call(method: str, path: str, body: Any = None) -> Any:
        answer = cloud.emulator.handle(method, path, [], headers, json.dumps(body).encode() if body else b"")
        return answer.status, json.loads(answer.body)

    order = {"name": "a", "server_type": "cx23", "image": "ubuntu-24.04", "location": "nbg1"}
    status, made = call("POST", "/v1/servers", order)
    assert status == 201
    assert "datacenter" not in made["server"] and made["server"]["location"]["name"] == "nbg1"
    _, addresses = call("GET", "/v1/primary_ips")
    assert addresses["primary_ips"] and all("datacenter" not in each for each in addresses["primary_ips"])
    assert call("GET", "/v1/datacenters")[0] == 410
    assert call("GET", f"/v1/servers/{made['server']['id']}/metrics")[1]["error"]["code"] == "unsupported_error"
    refused = call("POST", "/v1/servers", {**order, "name": "b", "placement_group": 7})[1]["error"]
    assert [field["name"] for field in refused["details"]["fields"]] == ["placement_group"]


MALFORMED = (
    {"type": "server", "server": {"id": {}}},
    {"type": "label_selector", "label_selector": {"selector": 7}},
    7,
)


@in_virtual_time
async def test_malformed_firewall_resources_are_published_errors() -> None:
    cloud = EmulatedHetzner()
    headers = {"Authorization": "Bearer any", "Content-Type": "application/json"}
    firewall = cloud.client.firewalls.create(name="wall").firewall
    for resource in MALFORMED:
        for path, body in (
            ("/v1/firewalls", {"name": "x", "apply_to": [resource]}),
            (f"/v1/firewalls/{firewall.id}/actions/apply_to_resources", {"apply_to": [resource]}),
            (f"/v1/firewalls/{firewall.id}/actions/remove_from_resources", {"remove_from": [resource]}),
        ):
            answer = cloud.emulator.handle("POST", path, [], headers, json.dumps(body).encode())
            assert 400 <= answer.status < 500
            assert json.loads(answer.body)["error"]["code"]
