"""An emulated project in virtual time, asked as a client would ask. Every answer is judged by Hetzner's published
contract, where that is at hand."""

import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

import hcloud

from support.hetzner_contract import Contract, Judged, client_of
from support.postgres_servers import VirtualClock
from windlass_emulators.hetzner import HetznerEmulator, HetznerEmulatorSettings
from windlass_emulators.http import Emulator, Response
from windlass_emulators.machines import VirtualHost

HEADERS = {"Authorization": "Bearer any", "Host": "hetzner.test"}
ORDER = {"name": "worker-1", "server_type": "cx23", "image": "ubuntu-24.04", "location": "nbg1"}


@dataclass(frozen=True)
class Answered:
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
        self.face: Emulator = self.emulator if contract is None else Judged(self.emulator, contract)

    @property
    def sdk(self) -> hcloud.Client:
        return client_of(self.face)

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answered:
        place, _, query = path.partition("?")
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        pairs = parse_qsl(query, keep_blank_values=True)
        response: Response = self.face.handle(method, f"/v1{place}", pairs, headers or HEADERS, data)
        return Answered(response.status, dict(response.headers), json.loads(response.body) if response.body else None)

    def create(self, **order: Any) -> Any:
        answered = self.ask("POST", "/servers", {**ORDER, **order})
        assert answered.status == 201, answered
        return answered.json["server"]

    def running(self, **order: Any) -> int:
        """The number of a server that has booted."""
        server_id = int(self.create(**order)["id"])
        self.clock.advance(self.emulator.settings.boot_s)
        assert self.status(server_id) == "running"
        return server_id

    def status(self, server_id: int) -> str:
        return str(self.ask("GET", f"/servers/{server_id}").json["server"]["status"])

    def listed(self, path: str = "/servers") -> list[str]:
        root = path.partition("?")[0].strip("/")
        return [each["name"] for each in self.ask("GET", path).json[root]]

    def settled(self) -> "ProjectUnderTest":
        """When nothing is on its way any more."""
        while (due := self.emulator.next_due()) is not None:
            self.clock.now = max(self.clock.now, due)
            self.emulator.settle()
        return self
