"""An emulated Runpod whose pods answer SSH, and a provider that prepares them."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncssh

from windlass.model.auth import JOIN_PREFIX
from windlass.model.machine import Machine, MachineRequest, MachineState
from windlass.model.runpod import RunpodSettings
from windlass.providers.runpod.account import RunpodAccount
from windlass.providers.runpod.installation import PodInstallation
from windlass.providers.runpod.limiter import RunpodLimiter
from windlass.providers.runpod.provider import RunpodProvider
from windlass.providers.runpod.provisioning import Preparer
from windlass.providers.runpod.ssh import Identity
from windlass_emulators.http_server import serving
from windlass_emulators.runpod import RunpodEmulator, RunpodEmulatorSettings
from windlass_emulators.runpod.pod_host import RealPodHost

TIMEOUT_S = 30.0
GPU = "NVIDIA L40S"
TOKEN = f"{JOIN_PREFIX}{'7' * 64}"
START_SCRIPT = "bash /workspace/start.sh"


@dataclass
class PodSite:
    emulator: RunpodEmulator
    host: RealPodHost
    address: str
    identity: Identity
    volume_id: str
    # Address of the control plane, for pods.
    url: str = "http://127.0.0.1:1"
    image: str = "runpod/pytorch:1"
    colour: str = "red"
    installation: PodInstallation | None = None
    # Certificate of the authority that signed the control plane's certificate.
    ca_pem: str | None = None

    @property
    def volume(self) -> Path:
        return self.host.volume_folder(self.volume_id)

    def settings(self, **ssh: Any) -> RunpodSettings:
        ssh = {"start_command": START_SCRIPT, "start_watch_s": 0.5, "timeout_s": 20, **ssh}
        return RunpodSettings(
            image=self.image, choices=[GPU], network_volume_id=self.volume_id, env={"COLOUR": self.colour}, ssh=ssh
        )  # fmt: skip

    @asynccontextmanager
    async def provider(self, preparer: Preparer | None = None, **ssh: Any) -> AsyncIterator[RunpodProvider]:
        settings = self.settings(**ssh)
        account = RunpodAccount("any", endpoint=f"{self.address}/v2", limiter=RunpodLimiter(1e6, 1000))
        own = Preparer(settings, self.identity.open_shell, retry_s=0.2, installation=self.installation)
        try:
            yield RunpodProvider(
                "red",
                settings,
                account,
                identity="this",
                url=self.url,
                preparer=preparer or own,
                public_key=self.identity.public_key,
                ca_pem=self.ca_pem,
                list_reuse_s=0.1,
            )
        finally:
            await account.close()

    def root(self, pod_id: str) -> Path:
        return self.host.folder / pod_id / "root"

    def folder(self, pod_id: str) -> Path:
        return self.root(pod_id) / "etc" / "windlass"


@contextmanager
def open_pod_site(folder: Path) -> Iterator[PodSite]:
    settings = RunpodEmulatorSettings(
        provisioning_s=0, starting_s=0, runtime_s=0, requests_per_minute=10**5, requests_per_hour=10**6
    )
    with RealPodHost(folder / "pods", stop_grace_s=1.0) as host:
        emulator = RunpodEmulator(lambda: datetime.now(UTC), settings, host)
        with serving(emulator) as address:
            body = json.dumps({"name": "d", "size": 100, "dataCenter": "EU-RO-1"}).encode()
            made = emulator.handle("POST", "/v2/network-volumes", [], {"Authorization": "Bearer any"}, body)
            identity = Identity(asyncssh.generate_private_key("ssh-ed25519"))
            yield PodSite(emulator, host, address, identity, json.loads(made.body)["id"])


async def ignore_host_key(_host_key: str) -> None: ...


async def spawn_worker(provider: RunpodProvider, slot: int = 0) -> Machine:
    await provider.create(MachineRequest(f"red-{slot}-aa", "red", slot, join_token=TOKEN))
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            machine = {machine.name: machine for machine in await provider.list_machines()}[f"red-{slot}-aa"]
            if machine.state is MachineState.RUNNING:
                return machine
            await asyncio.sleep(0.05)


async def has_port(provider: RunpodProvider, machine: Machine) -> None:
    """Wait until it is listed with one: the time to prepare it counts from then on."""
    async with asyncio.timeout(TIMEOUT_S):
        while not any(each.id == machine.id and each.address for each in await provider.list_machines()):
            await asyncio.sleep(0.05)
