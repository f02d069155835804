"""An emulated Hetzner project in virtual time, with a client's view of it.

Every response is checked against Hetzner's published contract, if the document is available.
"""

import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

import hcloud

from support.hetzner_contract import CheckedEmulator, Contract, client_of
from support.postgres_servers import VirtualClock
from windlass_emulators.hetzner import HetznerEmulator, HetznerEmulatorSettings
from windlass_emulators.http import Emulator, Response
from windlass_emulators.machines import VirtualHost

HEADERS = {"Authorization": "Bearer any", "Host": "hetzner.test"}
ORDER = {"name": "worker-1", "server_type": "cx23", "image": "ubuntu-24.04", "location": "nbg1"}


@dataclass(frozen=True)
class HetznerAnswer:
    status: int
    headers: dict[str, str]
    json: Any

    @property
    def code(self) -> str:
        return str(self.json["error"]["code"])


class ProjectUnderTest:
    def __init__(self, contract: Contract | None, settings: HetznerEmulatorSettings | None = None) -> None:
        self.clock = VirtualClock()
        self.host = VirtualHost()
        self.emulator = HetznerEmulator(self.clock, settings, self.host)
        self.api: Emulator = self.emulator if contract is None else CheckedEmulator(self.emulator, contract)

    @property
    def sdk(self) -> hcloud.Client:
        return client_of(self.api)

    def request(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> HetznerAnswer:
        place, _, query = path.partition("?")
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        pairs = parse_qsl(query, keep_blank_values=True)
        response: Response = self.api.handle(method, f"/v1{place}", pairs, headers or HEADERS, data)
        document = json.loads(response.body) if response.body else None
        return HetznerAnswer(response.status, dict(response.headers), document)

    def create(self, **order: Any) -> Any:
        answer = self.request("POST", "/servers", {**ORDER, **order})
        assert answer.status == 201, answer
        return answer.json["server"]

    def running(self, **order: Any) -> int:
        """Create a server and wait until it has booted. Returns its id."""
        server_id = int(self.create(**order)["id"])
        self.clock.advance(self.emulator.settings.boot_s)
        assert self.status(server_id) == "running"
        return server_id

    def network(self, **order: Any) -> int:
        """Create a network with one subnet in eu-central. Returns its id."""
        subnets = [{"type": "cloud", "ip_range": "10.0.1.0/24", "network_zone": "eu-central"}]
        body = {"name": "net", "ip_range": "10.0.0.0/16", "subnets": subnets, **order}
        return int(self.request("POST", "/networks", body).json["network"]["id"])

    def status(self, server_id: int) -> str:
        return str(self.request("GET", f"/servers/{server_id}").json["server"]["status"])

    def listed(self, path: str = "/servers") -> list[str]:
        root = path.partition("?")[0].strip("/")
        return [each["name"] for each in self.request("GET", path).json[root]]

    def settle_all(self) -> None:
        """Advance the clock until nothing is scheduled any more."""
        while (due := self.emulator.next_due()) is not None:
            self.clock.now = max(self.clock.now, due)
            self.emulator.settle()
