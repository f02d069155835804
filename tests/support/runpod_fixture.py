"""The real provider over httpx over the emulated Runpod, in virtual time: no sockets, no threads.

Requests and responses have latency. A request without a response times out after the client's own time limit. A request
that was sent arrives, even if its sender is cancelled.
"""

import asyncio
from collections.abc import Callable
from datetime import datetime
from random import Random
from typing import Any

import httpx

from support.runpod_contract import CheckedEmulator, Contract, InProcessTransport, client_of
from support.simulator.loop import virtual_now
from support.simulator.processes import start_detached
from windlass.model.auth import JOIN_PREFIX
from windlass.model.machine import MachineRequest
from windlass.model.runpod import RunpodSettings
from windlass.providers.runpod.account import RunpodAccount
from windlass.providers.runpod.limiter import RunpodLimiter
from windlass.providers.runpod.provider import RunpodProvider
from windlass_emulators.http import Emulator
from windlass_emulators.runpod import RunpodEmulator, RunpodEmulatorSettings
from windlass_emulators.runpod.containers import VirtualPodHost

ENDPOINT = "http://runpod.test/v2"
URL = "http://10.0.0.2:8080"
TIMEOUT_S = 20.0
IMAGE = "example/worker:1"
GPU, OTHER_GPU = "NVIDIA GeForce RTX 4090", "NVIDIA L40S"
TOKEN = f"{JOIN_PREFIX}{'5' * 64}"


class Network(httpx.AsyncBaseTransport):
    """Carries requests to the emulator and responses back. While `is_down()`, no connection is made."""

    def __init__(
        self,
        inner: httpx.BaseTransport,
        rng: Random,
        latency_s: tuple[float, float] = (0.02, 0.2),
        is_down: Callable[[], bool] = lambda: False,
    ) -> None:
        self._inner = inner
        self._rng = rng
        self._latency_s = latency_s
        self._is_down = is_down

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self._is_down():
            raise httpx.ConnectError("Name or service not known", request=request)
        response: asyncio.Future[httpx.Response] = asyncio.get_running_loop().create_future()
        await request.aread()
        start_detached(self._carry(request, response))
        return await response

    async def _carry(self, request: httpx.Request, response: "asyncio.Future[httpx.Response]") -> None:
        await asyncio.sleep(self._rng.uniform(*self._latency_s))
        result: httpx.Response | None = None
        problem: Exception | None = None
        try:
            result = self._inner.handle_request(request)
        except httpx.TimeoutException as error:
            problem = error
            await asyncio.sleep(TIMEOUT_S)
        except httpx.HTTPError as error:
            problem = error
        await asyncio.sleep(self._rng.uniform(*self._latency_s))
        if response.done():
            return
        if result is not None:
            response.set_result(result)
        else:
            response.set_exception(problem or AssertionError("an answer or none"))


class EmulatedRunpod:
    """One account. Must be created inside a virtual event loop."""

    def __init__(self, *, checks_contract: bool = False, **settings: Any) -> None:
        self.host = VirtualPodHost()
        self.emulator = RunpodEmulator(virtual_now, RunpodEmulatorSettings(**settings), self.host)
        self.front: Emulator = CheckedEmulator(self.emulator, Contract.find()) if checks_contract else self.emulator
        self.rng = Random(1)  # noqa: S311
        # While true, the vendor's name does not resolve.
        self.is_unreachable = False

    @property
    def faults(self) -> Any:
        return self.emulator.faults

    def account(self, key: str = "any", limiter: RunpodLimiter | None = None) -> RunpodAccount:
        transport = Network(InProcessTransport(self.front), self.rng, is_down=lambda: self.is_unreachable)
        return RunpodAccount(
            key, endpoint=ENDPOINT, timeout_s=TIMEOUT_S, limiter=limiter, transport=transport, rng=self.rng
        )

    def provider(
        self, fleet: str = "red", *, identity: str = "this", account: RunpodAccount | None = None, **options: Any
    ) -> RunpodProvider:
        """`options` are those of the provider, or of its settings."""
        names = ("list_reuse_s", "preparer", "public_key", "hidden_s")
        known = {key: options.pop(key) for key in names if key in options}
        settings = RunpodSettings(**{"image": IMAGE, "choices": [GPU], **options})
        return RunpodProvider(
            fleet, settings, account or self.account(), identity=identity, url=URL, now=virtual_now, **known
        )

    @property
    def client(self) -> httpx.Client:
        """A client for changes made by other people or programs."""
        return client_of(self.emulator)

    def sent(self, method: str | None = None, path: str = "") -> list[tuple[datetime, str, str]]:
        return [each for each in self.emulator.requests if method in (None, each[1]) and path in each[2]]

    @property
    def pods(self) -> dict[str, Any]:
        self.emulator.settle()
        return self.emulator.account.pods


def request_for(slot: int = 0, fleet: str = "red") -> MachineRequest:
    return MachineRequest(f"{fleet}-{slot}-aa", fleet, slot, join_token=TOKEN)
