"""The real provider over httpx over the emulated Runpod, in virtual time: no sockets, no threads.

A request takes a moment to arrive and its answer a moment to come back. What nobody answers is a time-out after the
client's own time limit. A request that was sent arrives, whatever becomes of whoever sent it.
"""

import asyncio
from collections.abc import Callable, Coroutine
from datetime import datetime
from random import Random
from typing import Any

import httpx

from support.runpod_contract import CheckedEmulator, Contract, InProcessTransport, client_of
from windlass.model.auth import JOIN_PREFIX
from windlass.model.machine import MachineRequest
from windlass.model.runpod import RunpodSettings
from windlass.providers.runpod.account import RunpodAccount
from windlass.providers.runpod.limiter import RunpodLimiter
from windlass.providers.runpod.provider import RunpodProvider
from windlass.simulator.loop import run, virtual_now
from windlass.simulator.processes import start_detached
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
    """Carries requests to the emulator and answers back."""

    def __init__(self, inner: httpx.BaseTransport, rng: Random, latency_s: tuple[float, float] = (0.02, 0.2)) -> None:
        self._inner = inner
        self._rng = rng
        self._latency_s = latency_s

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        answer: asyncio.Future[httpx.Response] = asyncio.get_running_loop().create_future()
        await request.aread()
        start_detached(self._carry(request, answer))
        return await answer

    async def _carry(self, request: httpx.Request, answer: "asyncio.Future[httpx.Response]") -> None:
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
        if answer.done():
            return
        if result is not None:
            answer.set_result(result)
        else:
            answer.set_exception(problem or AssertionError("an answer or none"))


class Bed:
    """One account. Made inside a virtual loop."""

    def __init__(self, *, is_judged: bool = False, **settings: Any) -> None:
        self.host = VirtualPodHost()
        self.emulator = RunpodEmulator(virtual_now, RunpodEmulatorSettings(**settings), self.host)
        self.front: Emulator = CheckedEmulator(self.emulator, Contract.find()) if is_judged else self.emulator
        self.rng = Random(1)  # noqa: S311

    @property
    def faults(self) -> Any:
        return self.emulator.faults

    def account(self, key: str = "any", limiter: RunpodLimiter | None = None) -> RunpodAccount:
        transport = Network(InProcessTransport(self.front), self.rng)
        return RunpodAccount(
            key, endpoint=ENDPOINT, timeout_s=TIMEOUT_S, limiter=limiter, transport=transport, rng=self.rng
        )

    def provider(
        self, fleet: str = "red", *, identity: str = "this", account: RunpodAccount | None = None, **options: Any
    ) -> RunpodProvider:
        """`options`: of the provider, or else of its settings."""
        names = ("list_reuse_s", "preparer", "public_key", "hidden_s")
        known = {key: options.pop(key) for key in names if key in options}
        settings = RunpodSettings(**{"image": IMAGE, "choices": [GPU], **options})
        return RunpodProvider(
            fleet, settings, account or self.account(), identity=identity, url=URL, now=virtual_now, **known
        )

    @property
    def client(self) -> httpx.Client:
        """As somebody else would use the account."""
        return client_of(self.emulator)

    def asked(self, method: str | None = None, path: str = "") -> list[tuple[datetime, str, str]]:
        return [each for each in self.emulator.requests if method in (None, each[1]) and path in each[2]]

    @property
    def pods(self) -> dict[str, Any]:
        self.emulator.settle()
        return self.emulator.account.pods


def request_for(slot: int = 0, fleet: str = "red") -> MachineRequest:
    return MachineRequest(f"{fleet}-{slot}-aa", fleet, slot, join_token=TOKEN)


def virtually(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that lives in virtual time."""

    def living(*arguments: Any, **options: Any) -> None:
        run(test(*arguments, **options))

    living.__name__, living.__doc__ = test.__name__, test.__doc__
    return living
