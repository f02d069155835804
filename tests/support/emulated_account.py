"""An emulated Runpod account in virtual time, asked as a client would ask. Every answer is judged by Runpod's published
contract, where that is at hand."""

import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from support.postgres_servers import VirtualClock
from support.runpod_contract import Contract, Judged
from windlass_emulators.http import Emulator, Response
from windlass_emulators.runpod import RunpodEmulator, RunpodEmulatorSettings
from windlass_emulators.runpod.containers import VirtualPodHost

HEADERS = {"Authorization": "Bearer any"}
GPU, OTHER_GPU = "NVIDIA GeForce RTX 4090", "NVIDIA L40S"
IMAGE = "ghcr.io/example/worker:1"
ORDER = {"name": "worker-1", "image": IMAGE, "gpu": {"id": GPU}, "ports": ["22/tcp", "8888/http"]}
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAILXGDN/SclOozk1xsDztpmhGiKkkrfQB9SKoO8dSIQQZ me@example.com"
# Nobody is throttled who does not want to be.
GENEROUS = RunpodEmulatorSettings(requests_per_minute=10_000, requests_per_hour=100_000, requests_per_day=1_000_000)


@dataclass(frozen=True)
class Answered:
    status: int
    headers: dict[str, str]
    json: Any

    @property
    def detail(self) -> str:
        return str(self.json["detail"])

    @property
    def errors(self) -> list[str]:
        return list(self.json.get("errors", []))


class AccountUnderTest:
    def __init__(self, contract: Contract | None, settings: RunpodEmulatorSettings = GENEROUS) -> None:
        self.clock = VirtualClock()
        self.host = VirtualPodHost()
        self.emulator = RunpodEmulator(self.clock, settings, self.host)
        self.face: Emulator = self.emulator if contract is None else Judged(self.emulator, contract)

    def send(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Response:
        place, _, query = path.partition("?")
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        pairs = parse_qsl(query, keep_blank_values=True)
        return self.face.handle(method, f"/v2{place}", pairs, HEADERS if headers is None else headers, data)

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answered:
        response = self.send(method, path, body, headers)
        return Answered(response.status, dict(response.headers), json.loads(response.body) if response.body else None)

    def create(self, **order: Any) -> Any:
        answered = self.ask("POST", "/pods", {**ORDER, **order})
        assert answered.status == 201, answered
        return answered.json

    def refused(self, **order: Any) -> Answered:
        answered = self.ask("POST", "/pods", {**ORDER, **order})
        assert answered.status >= 400, answered
        return answered

    def running(self, **order: Any) -> str:
        """The id of a pod that has booted and shows its ports."""
        pod_id = str(self.create(**order)["id"])
        settings = self.emulator.settings
        self.clock.advance(settings.provisioning_s + settings.starting_s + settings.runtime_s)
        assert self.pod(pod_id)["runtime"] is not None
        return pod_id

    def pod(self, pod_id: str) -> Any:
        answered = self.ask("GET", f"/pods/{pod_id}")
        assert answered.status == 200, answered
        return answered.json

    def status(self, pod_id: str) -> str:
        return str(self.pod(pod_id)["status"])

    def act(self, pod_id: str, action: str) -> Answered:
        return self.ask("POST", f"/pods/{pod_id}/action", {"action": action})

    def listed(self) -> list[str]:
        return [each["name"] for each in self.ask("GET", "/pods").json["pods"]]

    def volume(self, **order: Any) -> Any:
        answered = self.ask("POST", "/network-volumes", {"name": "data", "size": 100, "dataCenter": "EU-RO-1", **order})
        assert answered.status == 201, answered
        return answered.json
