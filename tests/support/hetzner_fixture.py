"""The real provider over the real SDK over the emulated Hetzner, in virtual time: no sockets, no threads.

Requests and responses have latency. A request without a response times out after the client's own time limit. A request
that was sent arrives, even if its sender is cancelled.
"""

import asyncio
from collections.abc import Callable
from datetime import datetime
from random import Random
from typing import Any, TypeVar

import requests

from support.hetzner_contract import CheckedEmulator, Contract, InProcessTransport, client_of
from support.simulator.loop import virtual_now
from support.simulator.processes import start_detached
from windlass.model.hetzner import HetznerSettings
from windlass.model.machine import Machine, MachineRequest
from windlass.providers.hetzner.account import HetznerAccount
from windlass.providers.hetzner.limiter import HetznerLimiter
from windlass.providers.hetzner.provider import HetznerProvider
from windlass_emulators.hetzner import HetznerEmulator
from windlass_emulators.hetzner.project import PrimaryIp
from windlass_emulators.hetzner.settings import HetznerEmulatorSettings
from windlass_emulators.http import Emulator

T = TypeVar("T")
ENDPOINT = "http://hetzner.test/v1"
TIMEOUT_S = 20.0

# Servers with an IPv4 address and nothing else: each creation is one request, and addresses have a price.
PUBLIC_ONLY: dict[str, Any] = {
    "is_ipv4_on": True, "is_ipv6_on": False, "is_network_on": False, "is_firewall_on": False
}  # fmt: skip


class Network:
    """Carries calls to the emulator and responses back."""

    def __init__(self, rng: Random, latency_s: tuple[float, float] = (0.02, 0.2)) -> None:
        self._rng = rng
        self._latency_s = latency_s

    async def __call__(self, call: Callable[[], T], timeout_s: float) -> T:
        response: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        start_detached(self._carry(call, response))
        async with asyncio.timeout(timeout_s):
            return await response

    async def _carry(self, call: Callable[[], T], response: "asyncio.Future[T]") -> None:
        await asyncio.sleep(self._rng.uniform(*self._latency_s))
        result: Any = None
        problem: Exception | None = None
        try:
            result = call()
        except requests.exceptions.Timeout as error:
            problem = error
            await asyncio.sleep(TIMEOUT_S)
        except Exception as error:
            problem = error
        await asyncio.sleep(self._rng.uniform(*self._latency_s))
        if response.done():
            return
        if problem is None:
            response.set_result(result)
        else:
            response.set_exception(problem)


class EmulatedHetzner:
    """One project. Must be created inside a virtual event loop."""

    def __init__(self, *, checks_contract: bool = False, **settings: Any) -> None:
        self.emulator = HetznerEmulator(virtual_now, HetznerEmulatorSettings(**settings))
        self.faults = self.emulator.faults
        self.front: Emulator = CheckedEmulator(self.emulator, Contract.find()) if checks_contract else self.emulator
        self.rng = Random(1)  # noqa: S311

    def account(self, token: str = "any", limiter: HetznerLimiter | None = None) -> HetznerAccount:  # noqa: S107
        return HetznerAccount(
            token,
            endpoint=ENDPOINT,
            timeout_s=TIMEOUT_S,
            limiter=limiter,
            run=Network(self.rng),
            adapter=InProcessTransport(self.front),
            rng=self.rng,
        )

    def provider(
        self, fleet: str = "red", *, identity: str = "this", account: HetznerAccount | None = None, **options: Any
    ) -> HetznerProvider:
        """`options` are those of the provider, or of its settings."""
        known = {key: options.pop(key) for key in ("network_id", "list_reuse_s", "render_user_data") if key in options}
        given = {"is_network_on": "network_id" in known, "is_firewall_on": "firewall_ids" in options}
        return HetznerProvider(
            fleet,
            HetznerSettings(**{**PUBLIC_ONLY, **given, **options}),
            account or self.account(),
            identity=identity,
            now=virtual_now,
            **{"render_user_data": lambda request: f"#cloud-config\n# {request.name}\n", **known},
        )

    @property
    def client(self) -> Any:
        """The vendor's own client, for changes made by other people or programs."""
        return client_of(self.emulator)

    def sent(self, method: str | None = None, path: str = "") -> list[tuple[datetime, str, str]]:
        return [each for each in self.emulator.requests if method in (None, each[1]) and path in each[2]]

    @property
    def servers(self) -> dict[int, Any]:
        return self.emulator.project.servers

    def add_primary_ip(self, name: str) -> PrimaryIp:
        """An unassigned address in nbg1, which a person created."""
        project = self.emulator.project
        location = next(each for each in project.catalog.locations if each.name == "nbg1")
        return project.add_primary_ip("ipv4", location, is_auto_deleted=False, name=name)


async def list_and_reconcile(provider: HetznerProvider) -> tuple[Machine, ...]:
    """List the machines, then wait until the background task for Primary IPs is done."""
    machines = await provider.list_machines()
    await asyncio.sleep(10)
    return machines


def request_for(slot: int = 0, fleet: str = "red") -> MachineRequest:
    return MachineRequest(f"{fleet}-{slot}-aa", fleet, slot, join_token="secret")
