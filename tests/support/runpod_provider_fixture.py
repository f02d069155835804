"""Runpod (emulated) for the provider conformance suite: httpx without sockets."""

from datetime import UTC, datetime, timedelta
from typing import Any

import httpx

from support.runpod_contract import InProcessTransport, client_of
from windlass.model.machine import Machine, MachineState
from windlass.model.runpod import RunpodSettings
from windlass.ports.provider import Provider
from windlass.providers.runpod.account import RunpodAccount
from windlass.providers.runpod.limiter import RunpodLimiter
from windlass.providers.runpod.provider import RunpodProvider
from windlass_emulators.runpod import RunpodEmulator, RunpodEmulatorSettings

# The suite tests decisions, not durations: everything happens at once.
AT_ONCE = {"provisioning_s": 0.0, "starting_s": 0.0, "runtime_s": 0.0}
PLENTY = {"requests_per_minute": 10**6, "requests_per_hour": 10**6, "requests_per_day": 10**6}


class RunpodWorld:
    def __init__(self) -> None:
        self._now = datetime(2030, 1, 1, tzinfo=UTC)
        self._emulator = RunpodEmulator(lambda: self._now, RunpodEmulatorSettings(**AT_ONCE, **PLENTY))  # type: ignore[arg-type]

    def provider(self, *, fleet: str = "fleet", database: str = "this") -> Provider:
        return self._provider(fleet, database, InProcessTransport(self._emulator))

    def provider_that_refuses(self) -> Provider:
        return self._provider("fleet", "this", InProcessTransport(self._emulator), choices=["NVIDIA Abacus"])

    def provider_without_answer(self) -> Provider:
        return self._provider("fleet", "this", _Unplugged())

    def _provider(self, fleet: str, database: str, transport: httpx.AsyncBaseTransport, **settings: Any) -> Provider:
        account = RunpodAccount(
            "any", endpoint="http://runpod.test/v2", transport=transport, limiter=RunpodLimiter(1e6, burst=1000)
        )
        return RunpodProvider(
            fleet,
            RunpodSettings(**{"image": "example/worker:1", **settings}),
            account,
            identity=database,
            url="http://10.0.0.2:8080",
            list_reuse_s=0.0,
            delete_poll_intervals_s=(0.0, 0.01, 0.1),
            hidden_s=0.0,
            now=lambda: self._now,
        )

    def foreign_machine(self) -> Machine:
        order = {"name": "foreign", "image": "i", "gpu": {"id": "NVIDIA L40S"}}
        pod = client_of(self._emulator).post("/pods", json=order).json()
        return Machine(pod["id"], "foreign", MachineState.RUNNING)

    def exists(self, machine: Machine) -> bool:
        return machine.id in self._emulator.account.pods

    def end(self, machine: Machine) -> None:
        """Stopped, long after it was made."""
        self._now += timedelta(minutes=10)
        client_of(self._emulator).post(f"/pods/{machine.id}/action", json={"action": "stop"}).raise_for_status()

    def close(self) -> None: ...


class _Unplugged(httpx.AsyncBaseTransport):
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("Connection refused", request=request)
