"""An emulated Runpod account in virtual time, with a client's view of it.

Every response is checked against Runpod's published contract, if the document is available.
"""

import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from support.postgres_servers import VirtualClock
from support.runpod_contract import CheckedEmulator, Contract
from windlass_emulators.http import Emulator, Response
from windlass_emulators.runpod import RunpodEmulator, RunpodEmulatorSettings
from windlass_emulators.runpod.containers import VirtualPodHost

HEADERS = {"Authorization": "Bearer any"}
GPU, OTHER_GPU = "NVIDIA GeForce RTX 4090", "NVIDIA L40S"
IMAGE = "ghcr.io/example/worker:1"
ORDER = {"name": "worker-1", "image": IMAGE, "gpu": {"id": GPU}, "ports": ["22/tcp", "8888/http"]}
# High limits, so that only tests of throttling are throttled.
GENEROUS = RunpodEmulatorSettings(requests_per_minute=10_000, requests_per_hour=100_000, requests_per_day=1_000_000)


@dataclass(frozen=True)
class RunpodAnswer:
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
        self.api: Emulator = self.emulator if contract is None else CheckedEmulator(self.emulator, contract)

    def send(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Response:
        place, _, query = path.partition("?")
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        pairs = parse_qsl(query, keep_blank_values=True)
        return self.api.handle(method, f"/v2{place}", pairs, HEADERS if headers is None else headers, data)

    def request(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> RunpodAnswer:
        response = self.send(method, path, body, headers)
        document = json.loads(response.body) if response.body else None
        return RunpodAnswer(response.status, dict(response.headers), document)

    def create(self, **order: Any) -> Any:
        answer = self.request("POST", "/pods", {**ORDER, **order})
        assert answer.status == 201, answer
        return answer.json

    def refused(self, **order: Any) -> RunpodAnswer:
        answer = self.request("POST", "/pods", {**ORDER, **order})
        assert answer.status >= 400, answer
        return answer

    def running(self, **order: Any) -> str:
        """Create a pod and wait until it shows its ports. Returns its id."""
        pod_id = str(self.create(**order)["id"])
        settings = self.emulator.settings
        self.clock.advance(settings.provisioning_s + settings.starting_s + settings.runtime_s)
        assert self.pod(pod_id)["runtime"] is not None
        return pod_id

    def pod(self, pod_id: str) -> Any:
        answer = self.request("GET", f"/pods/{pod_id}")
        assert answer.status == 200, answer
        return answer.json

    def status(self, pod_id: str) -> str:
        return str(self.pod(pod_id)["status"])

    def act(self, pod_id: str, action: str) -> RunpodAnswer:
        return self.request("POST", f"/pods/{pod_id}/action", {"action": action})

    def listed(self) -> list[str]:
        return [each["name"] for each in self.request("GET", "/pods").json["pods"]]

    def volume(self, **order: Any) -> Any:
        body = {"name": "data", "size": 100, "dataCenter": "EU-RO-1", **order}
        answer = self.request("POST", "/network-volumes", body)
        assert answer.status == 201, answer
        return answer.json
