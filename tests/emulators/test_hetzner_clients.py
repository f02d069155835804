"""Hetzner's own clients against the emulator over HTTP, and the behaviour of the HTTP server."""

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import hcloud
import pytest
import requests
from hcloud.images import Image
from hcloud.locations import Location
from hcloud.networks import NetworkSubnet
from hcloud.server_types import ServerType
from hcloud.servers import ServerCreatePublicNetwork

from support.hetzner_contract import CheckedEmulator, Contract
from support.postgres_servers import wait_until
from windlass_emulators.hetzner import HetznerEmulator, HetznerEmulatorSettings
from windlass_emulators.http import Emulator
from windlass_emulators.http_server import serving
from windlass_emulators.machines import VirtualHost

TIMEOUT_S = 20.0
# Hetzner's client requires 64 characters.
TOKEN = "x" * 64


@dataclass(frozen=True)
class Served:
    emulator: HetznerEmulator
    host: VirtualHost
    address: str

    def sdk(self, timeout_s: float = TIMEOUT_S) -> hcloud.Client:
        return hcloud.Client(TOKEN, api_endpoint=f"{self.address}/v1", poll_interval=0.02, timeout=timeout_s)


@pytest.fixture
def served() -> Iterator[Served]:
    host = VirtualHost()
    settings = HetznerEmulatorSettings(boot_s=0.2, action_s=0.05, delete_s=0.05)
    emulator = HetznerEmulator(lambda: datetime.now(UTC), settings, host)
    contract = Contract.find_or_none()
    api: Emulator = emulator if contract is None else CheckedEmulator(emulator, contract)
    with serving(api) as address:
        yield Served(emulator, host, address)


def _order(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "server_type": ServerType(name="cx23"),
        "image": Image(name="ubuntu-24.04"),
        "location": Location(name="nbg1"),
    }


def test_sdk_creates_uses_and_deletes_a_server(served: Served) -> None:
    client = served.sdk()
    subnet = NetworkSubnet(type="cloud", network_zone="eu-central", ip_range="10.0.1.0/24")
    network = client.networks.create("net", "10.0.0.0/16", subnets=[subnet])
    made = client.servers.create(
        **_order("worker-1"), labels={"windlass": "yes"}, networks=[network], user_data="#cloud-config\n"
    )
    assert made.server.status == "initializing"
    made.action.wait_until_finished()
    for action in made.next_actions:
        action.wait_until_finished()
    (server,) = client.servers.get_all(label_selector="windlass=yes")
    assert (server.status, server.private_net[0].ip) == ("running", "10.0.1.2")
    assert server.location.name == "nbg1"
    wait_until(lambda: served.host.is_running(server.id), TIMEOUT_S, "booting")
    server.update(labels={"windlass": "no"})
    assert client.servers.get_all(label_selector="windlass=yes") == []
    server.power_off().wait_until_finished()
    server.reload()
    assert (server.status, served.host.is_running(server.id)) == ("off", False)
    server.delete().wait_until_finished()
    assert client.servers.get_by_name("worker-1") is None
    assert client.primary_ips.get_all() == []


def test_sdk_reads_types_prices_and_locations(served: Served) -> None:
    client = served.sdk()
    kind = client.server_types.get_by_name("cx23")
    assert kind is not None
    assert {each["location"]: each["price_hourly"]["net"] for each in kind.prices}["nbg1"] == "0.0056000000"
    assert [(each.location.name, each.available) for each in kind.locations] == [
        ("fsn1", True),
        ("nbg1", True),
        ("hel1", True),
    ]
    assert {each.name for each in client.locations.get_all()} == {"fsn1", "nbg1", "hel1", "ash", "hil", "sin"}
    assert client.images.get_by_name_and_architecture("ubuntu-24.04", "arm") is not None
    assert client.firewalls.get_all() == []


def test_sdk_uses_primary_ips_firewalls_and_ssh_keys(served: Served) -> None:
    client = served.sdk()
    public = ServerCreatePublicNetwork(enable_ipv6=False)
    firewall = client.firewalls.create("wall").firewall
    public_key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJtQ2uSg6nTn3fWbWQWQ4mYv2n0b3PTZ8aB1G0u0JqLk me"
    key = client.ssh_keys.create("me", public_key)
    made = client.servers.create(**_order("worker-1"), public_net=public, firewalls=[firewall], ssh_keys=[key])
    assert made.root_password is None
    made.next_actions[-1].wait_until_finished()
    server = client.servers.get_by_id(made.server.id)
    (ip,) = client.primary_ips.get_all()
    assert (server.public_net.ipv4.ip, server.public_net.ipv6) == (ip.ip, None)
    assert server.public_net.firewalls[0].firewall.id == firewall.id
    ip.update(auto_delete=False)
    server.delete().wait_until_finished()
    wait_until(lambda: client.primary_ips.get_by_id(ip.id).assignee_id is None, TIMEOUT_S, "unassigning the address")
    client.primary_ips.get_by_id(ip.id).delete()


@pytest.mark.parametrize(
    ("code", "status"), [("resource_unavailable", 412), ("locked", 423), ("resource_limit_exceeded", 403)]
)
def test_sdk_sees_the_published_error_codes(served: Served, code: str, status: int) -> None:
    served.emulator.faults.next_create(code)
    with pytest.raises(hcloud.APIException) as refused:
        served.sdk().servers.create(**_order("worker-1"))
    assert refused.value.code == code


def test_servers_boot_without_requests(served: Served) -> None:
    requests.post(
        f"{served.address}/v1/servers",
        json={"name": "w", "server_type": "cx23", "image": "debian-12"},
        headers={"Authorization": "Bearer any"},
        timeout=TIMEOUT_S,
    ).raise_for_status()
    wait_until(lambda: bool(served.host.running), TIMEOUT_S, "booting")


# ------------------------------------------------------------------------------------------------- hcloud CLI


@pytest.fixture
def command_line(served: Served, tmp_path: Path) -> Any:
    if shutil.which("hcloud") is None:
        pytest.skip("hcloud is not installed: install hcloud-cli to test Hetzner's own client")
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "HCLOUD_ENDPOINT": f"{served.address}/v1",
        "HCLOUD_TOKEN": TOKEN,
    }

    def run(*words: str) -> str:
        done = subprocess.run(
            ["hcloud", *words], env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert done.returncode == 0, f"hcloud {' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    return run


def test_hcloud_cli_works(command_line: Any, served: Served, tmp_path: Path) -> None:
    (tmp_path / "init.yml").write_text("#cloud-config\n# from a file\n")
    order = ["--name", "w1", "--type", "cx23", "--image", "ubuntu-24.04", "--location", "nbg1", "--label", "a=b"]
    assert "created" in command_line("server", "create", *order, "--user-data-from-file", str(tmp_path / "init.yml"))
    (booted,) = served.host.running.values()
    assert booted.user_data == "#cloud-config\n# from a file\n"
    assert "running" in command_line("server", "list")
    assert [each["name"] for each in json.loads(command_line("server", "list", "-l", "a=b", "-o", "json"))] == ["w1"]
    described = command_line("server", "describe", "w1")
    assert "cx23" in described
    assert "stopped" in command_line("server", "poweroff", "w1")
    assert "off" in command_line("server", "list")
    assert "started" in command_line("server", "poweron", "w1")
    assert "deleted" in command_line("server", "delete", "w1")
    wait_until(lambda: "w1" not in command_line("server", "list"), TIMEOUT_S, "deleting")
    for things in ("server-type", "location", "image", "network", "primary-ip", "firewall", "ssh-key"):
        command_line(things, "list")


# --------------------------------------------------------------------------------------------------- HTTP server


def test_injected_time_out_exceeds_the_clients_timeout(served: Served) -> None:
    served.emulator.faults.next(held_s=30)
    with pytest.raises(requests.exceptions.ReadTimeout):
        # Time to connect, and to read.
        limits = (TIMEOUT_S, 0.2)
        requests.get(f"{served.address}/v1/servers", headers={"Authorization": "Bearer any"}, timeout=limits)
    wait_until(lambda: served.emulator.requests, TIMEOUT_S, "arriving")
    assert served.sdk().servers.get_all() == []


def test_injected_time_out_ends_with_a_disconnect(served: Served) -> None:
    served.emulator.faults.next_create(times_out_after_taking_effect=True, held_s=0.05)
    with pytest.raises(requests.exceptions.ConnectionError):
        served.sdk().servers.create(**_order("worker-1"))
    assert [server.name for server in served.sdk().servers.get_all()] == ["worker-1"]


def test_control_endpoints_show_bill_and_machines(served: Served) -> None:
    made = served.sdk().servers.create(**_order("worker-1"))
    wait_until(lambda: bool(served.host.running), TIMEOUT_S, "booting")
    control = f"{served.address}/_emulator"
    assert requests.get(f"{control}/ledger", timeout=TIMEOUT_S).json()["total_micros"] == 6_400
    machines = requests.post(f"{control}/machines/{made.server.id}/crash", timeout=TIMEOUT_S).json()["machines"]
    assert machines == [{"server_id": made.server.id, "name": "worker-1", "status": "running", "is_running": False}]
    assert requests.post(f"{control}/machines/1/crash", timeout=TIMEOUT_S).status_code == 404
    fault = {"fault": "burst", "times": 1}
    assert requests.post(f"{control}/faults", json=fault, timeout=TIMEOUT_S).status_code == 200
    assert requests.get(f"{served.address}/v1/servers", timeout=TIMEOUT_S).status_code == 401


def test_server_answers_this_host_only(served: Served) -> None:
    """Otherwise a web page whose name resolves to loopback could start programs here."""
    headers = {"Host": "evil.example", "Authorization": "Bearer any"}
    assert requests.get(f"{served.address}/v1/servers", headers=headers, timeout=TIMEOUT_S).status_code == 403
    simple = requests.post(f"{served.address}/_emulator/faults", data='{"fault": "burst"}', timeout=TIMEOUT_S)
    assert simple.status_code == 415
    port = int(served.address.rpartition(":")[2])
    with socket.socket() as other, pytest.raises(OSError, match="refused"):
        other.settimeout(TIMEOUT_S)
        other.connect(("127.0.0.2", port))


def test_oversized_body_is_refused(served: Served) -> None:
    body = b"x" * (5 * 1024 * 1024)
    headers = {"Authorization": "Bearer any", "Content-Type": "application/json"}
    answered = requests.post(f"{served.address}/v1/servers", data=body, headers=headers, timeout=TIMEOUT_S)
    assert answered.status_code == 413
