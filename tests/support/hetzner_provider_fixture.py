"""Hetzner Cloud (emulated) for the provider conformance suite: real SDK, real threads, no sockets."""

from datetime import UTC, datetime, timedelta
from typing import Any

import requests
from requests.adapters import BaseAdapter

from support.hetzner_contract import InProcessTransport, client_of
from support.hetzner_fixture import PUBLIC_ONLY
from windlass.model.hetzner import HetznerSettings
from windlass.model.machine import Machine, MachineState
from windlass.ports.provider import Provider
from windlass.providers.hetzner.account import HetznerAccount
from windlass.providers.hetzner.limiter import HetznerLimiter
from windlass.providers.hetzner.provider import HetznerProvider
from windlass_emulators.hetzner import HetznerEmulator
from windlass_emulators.hetzner.settings import HetznerEmulatorSettings

# The suite tests decisions, not durations: everything happens at once.
AT_ONCE = {"boot_s": 0.0, "action_s": 0.0, "delete_s": 0.0}


class HetznerWorld:
    def __init__(self) -> None:
        self._now = datetime(2030, 1, 1, tzinfo=UTC)
        self._emulator = HetznerEmulator(lambda: self._now, HetznerEmulatorSettings(**AT_ONCE))
        self._accounts: list[HetznerAccount] = []

    def provider(self, *, fleet: str = "fleet", database: str = "this") -> Provider:
        return self._provider(fleet, database, InProcessTransport(self._emulator))

    def provider_that_refuses(self) -> Provider:
        return self._provider("fleet", "this", InProcessTransport(self._emulator), image="no-such-image")

    def provider_without_answer(self) -> Provider:
        return self._provider("fleet", "this", _Unplugged())

    def _provider(self, fleet: str, database: str, adapter: BaseAdapter, **settings: Any) -> Provider:
        self._accounts.append(
            HetznerAccount(
                "any", endpoint="http://hetzner.test/v1", adapter=adapter, limiter=HetznerLimiter(1e6, burst=1000)
            )
        )
        return HetznerProvider(
            fleet,
            HetznerSettings(**{**PUBLIC_ONLY, **settings}),
            self._accounts[-1],
            identity=database,
            render_user_data=lambda _: "#cloud-config\n",
            list_reuse_s=0.0,
            delete_poll_intervals_s=(0.0, 0.01, 0.1),
            now=lambda: self._now,
        )

    def foreign_machine(self) -> Machine:
        body = {"name": "foreign", "server_type": "cx23", "image": "ubuntu-24.04", "location": "nbg1"}
        made = client_of(self._emulator).request("POST", "/servers", json=body)
        return Machine(str(made["server"]["id"]), "foreign", MachineState.RUNNING)

    def exists(self, machine: Machine) -> bool:
        return int(machine.id) in self._emulator.project.servers

    def end(self, machine: Machine) -> None:
        """Powered off, long after its creation."""
        self._now += timedelta(minutes=10)
        client_of(self._emulator).request("POST", f"/servers/{machine.id}/actions/poweroff")

    def close(self) -> None:
        for account in self._accounts:
            account.close()


class _Unplugged(BaseAdapter):
    def send(self, *_: Any, **__: Any) -> requests.Response:
        raise requests.exceptions.ConnectionError("Connection refused")

    def close(self) -> None: ...
