"""The real provider over the real SDK over the emulated Hetzner, in virtual time: no sockets, no threads.

A request takes a moment to arrive and its answer a moment to come back. What nobody answers is a time-out after the
client's own time limit. A request that was sent arrives, whatever becomes of whoever sent it.
"""

import asyncio
from collections.abc import Callable, Coroutine
from datetime import datetime
from random import Random
from typing import Any, TypeVar

import requests

from support.hetzner_contract import CheckedEmulator, Contract, InProcessTransport, client_of
from windlass.model.hetzner import HetznerSettings
from windlass.model.machine import MachineRequest
from windlass.providers.hetzner.account import HetznerAccount
from windlass.providers.hetzner.limiter import HetznerLimiter
from windlass.providers.hetzner.provider import HetznerProvider
from windlass.simulator.loop import run, virtual_now
from windlass.simulator.processes import start_detached
from windlass_emulators.hetzner import HetznerEmulator
from windlass_emulators.hetzner.project import PrimaryIp
from windlass_emulators.hetzner.settings import HetznerEmulatorSettings
from windlass_emulators.http import Emulator

T = TypeVar("T")
ENDPOINT = "http://hetzner.test/v1"
TIMEOUT_S = 20.0


class Network:
    """Carries calls to the emulator and answers back."""

    def __init__(self, rng: Random, latency_s: tuple[float, float] = (0.02, 0.2)) -> None:
        self._rng = rng
        self._latency_s = latency_s

    async def __call__(self, call: Callable[[], T], timeout_s: float) -> T:
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        start_detached(self._carry(call, answer))
        async with asyncio.timeout(timeout_s):
            return await answer

    async def _carry(self, call: Callable[[], T], answer: "asyncio.Future[T]") -> None:
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
        if answer.done():
            return
        if problem is None:
            answer.set_result(result)
        else:
            answer.set_exception(problem)


class Bed:
    """One project. Made inside a virtual loop."""

    def __init__(self, *, is_judged: bool = False, **settings: Any) -> None:
        self.emulator = HetznerEmulator(virtual_now, HetznerEmulatorSettings(**settings))
        self.faults = self.emulator.faults
        self.front: Emulator = CheckedEmulator(self.emulator, Contract.find()) if is_judged else self.emulator
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
        """`options`: of the provider, or else of its settings."""
        known = {key: options.pop(key) for key in ("network_id", "list_reuse_s", "render_user_data") if key in options}
        return HetznerProvider(
            fleet,
            HetznerSettings(**options),
            account or self.account(),
            identity=identity,
            now=virtual_now,
            **{"render_user_data": lambda request: f"#cloud-config\n# {request.name}\n", **known},
        )

    @property
    def client(self) -> Any:
        """The vendor's own, as somebody else would use it."""
        return client_of(self.emulator)

    def asked(self, method: str | None = None, path: str = "") -> list[tuple[datetime, str, str]]:
        return [each for each in self.emulator.requests if method in (None, each[1]) and path in each[2]]

    @property
    def servers(self) -> dict[int, Any]:
        return self.emulator.project.servers

    def add_primary_ip(self, name: str) -> PrimaryIp:
        """An unassigned address in nbg1, which a person created."""
        project = self.emulator.project
        location = next(each for each in project.catalog.locations if each.name == "nbg1")
        return project.add_primary_ip("ipv4", location, is_auto_deleted=False, name=name)


def request_for(slot: int = 0, fleet: str = "red") -> MachineRequest:
    return MachineRequest(f"{fleet}-{slot}-aa", fleet, slot, join_token="secret")


def virtually(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that lives in virtual time."""

    def living(*arguments: Any, **options: Any) -> None:
        run(test(*arguments, **options))

    living.__name__, living.__doc__ = test.__name__, test.__doc__
    return living
