"""A control plane that rented machines cannot reach is refused before they cost money."""

from typing import Any

import pytest

from windlass.model.config import ApiConfig, Config
from windlass.model.errors import ConfigError
from windlass.model.fleet import FleetConfig
from windlass.model.hetzner import HetznerSettings
from windlass.model.machine import Quote
from windlass.model.reachability import MachineNetwork, is_loopback_url, problem_of_reach
from windlass.model.runpod import RunpodSettings
from windlass.wiring import reachability
from windlass.wiring.minimum_cost import cost_per_day
from windlass.wiring.reachability import check_address, check_control_plane_url

POD = FleetConfig(provider="runpod", handler="a:b", runpod=RunpodSettings(image="i:1"))
SERVER = FleetConfig(provider="hetzner", handler="a:b", hetzner=HetznerSettings(is_ipv4_on=True, network_id=7))
EMULATOR = "http://127.0.0.1:8190"


async def range_of_network(_config: Config, network_id: int) -> str | None:
    return {7: "10.0.0.0/16"}.get(network_id)


def config_of(fleet: FleetConfig, api: dict[str, Any], **settings: Any) -> Config:
    keys = {"hetzner_api_token": "t", "runpod_api_key": "k"}
    return Config(api=ApiConfig(**api), fleets={"far": fleet}, **keys, **settings)


@pytest.mark.parametrize("fleet", [POD, SERVER], ids=["runpod", "hetzner"])
@pytest.mark.parametrize("api", [{"port": 8499}, {"url": "http://localhost:8499"}, {"url": "http://[::1]:8499"}])
async def test_loopback_control_plane_is_refused_for_a_public_vendor(fleet: FleetConfig, api: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"of fleet far call http://.*:8499, which only this host can reach\. Set"):
        await check_control_plane_url(config_of(fleet, api), range_of_network)


@pytest.mark.parametrize("fleet", [POD, SERVER], ids=["runpod", "hetzner"])
async def test_emulated_vendor_may_use_a_loopback_control_plane(fleet: FleetConfig) -> None:
    endpoints = {"hetzner_endpoint": f"{EMULATOR}/v1", "runpod_endpoint": f"{EMULATOR}/v2"}
    await check_control_plane_url(config_of(fleet, {"port": 8499}, **endpoints), range_of_network)


async def test_private_address_is_refused_for_pods() -> None:
    with pytest.raises(ConfigError, match="an address of a private network that the machines are not in"):
        await check_control_plane_url(config_of(POD, {"url": "http://192.168.1.4:80"}), range_of_network)


async def test_private_address_must_be_within_the_private_network_of_the_fleet() -> None:
    await check_control_plane_url(config_of(SERVER, {"url": "http://10.0.0.2:80"}), range_of_network)
    with pytest.raises(ConfigError, match=r"192\.168\.1\.4:80, which is not in the machines' private network 10\.0"):
        await check_control_plane_url(config_of(SERVER, {"url": "http://192.168.1.4:80"}), range_of_network)


async def test_unreadable_network_is_no_reason_to_refuse_an_address() -> None:
    unread = SERVER.model_copy(update={"hetzner": HetznerSettings(network_id=8)})
    await check_control_plane_url(config_of(unread, {"url": "http://192.168.1.4:80"}), range_of_network)


@pytest.mark.parametrize(
    ("url", "network", "problem"),
    [
        ("https://plane.example.com", MachineNetwork(has_ipv4=False, has_ipv6=False), None),
        ("https://203.0.114.9", MachineNetwork(), None),
        ("https://203.0.114.9", MachineNetwork(has_ipv4=False), "needs a public IPv4 address"),
        ("https://203.0.114.9", MachineNetwork(has_ipv4=False, has_own_network=True), None),
        ("https://[2a01:4f8::1]", MachineNetwork(has_ipv6=False), "needs a public IPv6 address"),
        ("http://169.254.1.1", MachineNetwork(), "is an address of one network segment"),
        ("http://10.1.0.2", MachineNetwork(private_range="10.0.0.0/8"), None),
        ("http://100.100.1.1:8080", MachineNetwork(), "of a private network that the machines are not in"),
        ("http://100.100.1.1:8080", MachineNetwork(has_own_network=True), None),
        ("http://224.0.0.1", MachineNetwork(has_own_network=True), "is a multicast address"),
        ("http://255.255.255.255", MachineNetwork(), "of a private network that the machines are not in"),
        ("http://127.1", MachineNetwork(), "only this host can reach"),
        ("http://0", MachineNetwork(), "only this host can reach"),
        ("http://2130706433", MachineNetwork(), "only this host can reach"),
        ("http://0x7f000001", MachineNetwork(), "only this host can reach"),
        ("http://[::ffff:127.0.0.1]", MachineNetwork(), "only this host can reach"),
        ("http://10.258", MachineNetwork(), "of a private network that the machines are not in"),
        ("http://localhost.localdomain", MachineNetwork(), "only this host can reach"),
        ("http://localhost.", MachineNetwork(), "only this host can reach"),
        ("http://1and1.example", MachineNetwork(), None),
    ],
)
def test_addresses_that_machines_can_reach(url: str, network: MachineNetwork, problem: str | None) -> None:
    found = problem_of_reach(url, network)
    assert found is None if problem is None else found is not None and problem in found


DEFAULT_SERVER = FleetConfig(provider="hetzner", handler="a:b")


def resolve_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    async def resolve(_host: str) -> list[str]:
        return list(addresses)

    monkeypatch.setattr(reachability, "_resolve", resolve)


@pytest.mark.parametrize("url", ["https://203.0.114.9", "https://plane.example.com"])
async def test_ipv4_only_control_plane_is_refused_by_default(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_to(monkeypatch, "203.0.114.9")
    config = config_of(DEFAULT_SERVER, {"url": url})
    with pytest.raises(ConfigError, match=r"needs a public IPv4 address.*Set hetzner\.is_ipv4_on = true"):
        await check_control_plane_url(config, range_of_network)
    (found,) = [each async for each in check_address(config)]
    assert found.is_error and "hetzner.is_ipv4_on = true" in found.message


async def test_control_plane_with_ipv6_or_servers_with_ipv4_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_to(monkeypatch, "203.0.114.9", "2a01:4f8::1")
    await check_control_plane_url(config_of(DEFAULT_SERVER, {"url": "https://plane.example.com"}), range_of_network)
    resolve_to(monkeypatch, "203.0.114.9")
    paid = DEFAULT_SERVER.model_copy(update={"hetzner": HetznerSettings(is_ipv4_on=True)})
    await check_control_plane_url(config_of(paid, {"url": "https://plane.example.com"}), range_of_network)


@pytest.mark.parametrize("fleet", [POD, SERVER, DEFAULT_SERVER], ids=["runpod", "own network", "hetzner"])
@pytest.mark.parametrize(
    ("addresses", "is_refused"),
    [
        (("127.0.0.1", "::1"), True),
        (("0.0.0.0",), True),  # noqa: S104
        (("127.0.0.1", "203.0.114.9", "2a01:4f8::1"), False),
        (("10.0.0.5",), False),
        (("100.100.1.1",), False),
        # The control plane's own name, in Debian's hosts file.
        (("127.0.1.1",), False),
        ((), False),
    ],
)
async def test_name_of_this_host_alone_is_refused(
    fleet: FleetConfig, addresses: tuple[str, ...], is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name with a private address is accepted: machines may join a VPN."""
    resolve_to(monkeypatch, *addresses)
    config = config_of(fleet, {"url": "https://plane.example.com"})
    if is_refused:
        with pytest.raises(ConfigError, match=r"plane\.example\.com, which resolves to .*, which only this host"):
            await check_control_plane_url(config, range_of_network)
        return
    await check_control_plane_url(config, range_of_network)


async def test_emulated_vendor_may_use_a_name_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_to(monkeypatch, "127.0.0.1")
    api = {"url": "https://plane.example.com"}
    await check_control_plane_url(config_of(POD, api, runpod_endpoint=f"{EMULATOR}/v2"), range_of_network)


def test_loopback_urls_are_recognised() -> None:
    assert is_loopback_url("http://127.0.0.1:9/v1") and is_loopback_url("http://localhost/v1")
    assert not is_loopback_url("https://api.hetzner.cloud/v1") and not is_loopback_url("https://10.0.0.2/v2")


async def test_doctor_names_an_unreachable_control_plane() -> None:
    (found,) = [each async for each in check_address(config_of(POD, {"port": 8499}))]
    assert found.is_error and found.check == "control plane"
    assert "Runpod's pods of fleet far call http://127.0.0.1:8499, which only this host can reach" in found.message


def test_minimum_is_priced_per_day() -> None:
    fleet = POD.model_copy(update={"min_workers": 2})
    assert cost_per_day(fleet, Quote("NVIDIA GeForce RTX 4090 in SECURE", 690_000, "USD")) == "USD 33.12"
    assert cost_per_day(fleet, None) == "unknown"
