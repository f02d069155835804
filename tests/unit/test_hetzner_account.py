"""The Hetzner account with real threads: concurrency, timeouts and the SDK's internals."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import pytest
import requests
from hcloud import APIException

from support.hetzner_contract import InProcessTransport
from support.hetzner_fixture import PUBLIC_ONLY
from windlass.model.errors import Throttled
from windlass.model.hetzner import HetznerSettings
from windlass.model.machine import MachineRequest
from windlass.providers.hetzner import account as module
from windlass.providers.hetzner.account import HetznerAccount
from windlass.providers.hetzner.limiter import HetznerLimiter
from windlass.providers.hetzner.provider import HetznerProvider
from windlass_emulators.hetzner import HetznerEmulator, HetznerEmulatorSettings

# Far longer than anything here takes.
LIMIT_S = 20.0


class HeldTransport(InProcessTransport):
    """Holds the responses to creations until the test releases them."""

    def __init__(self) -> None:
        self.emulator = HetznerEmulator(
            lambda: datetime.now(UTC), HetznerEmulatorSettings(boot_s=0, action_s=0, delete_s=0, server_limit=50)
        )
        super().__init__(self.emulator)
        # The emulator handles one request at a time.
        self._lock = threading.Lock()
        self.held = threading.Semaphore(0)
        self.posts = 0

    def send(self, request: requests.PreparedRequest, **options: object) -> requests.Response:
        if request.method == "POST":
            self.posts += 1
            assert self.held.acquire(timeout=LIMIT_S)
        with self._lock:
            return super().send(request, **options)


@pytest.fixture
def transport() -> Iterator[HeldTransport]:
    transport = HeldTransport()
    yield transport
    transport.held.release(1000)


@pytest.fixture
def account(transport: HeldTransport) -> Iterator[HetznerAccount]:
    account = HetznerAccount(
        "any", endpoint="http://hetzner.test/v1", adapter=transport, limiter=HetznerLimiter(1e6, burst=1000)
    )
    yield account
    account.close()


def provider_of(account: HetznerAccount, fleet: str = "red") -> HetznerProvider:
    return HetznerProvider(
        fleet,
        HetznerSettings(**PUBLIC_ONLY),
        account,
        identity="this",
        render_user_data=lambda _: "#cloud-config\n",
        list_reuse_s=0.0,
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.01)


async def test_unanswered_creations_do_not_delay_a_list(transport: HeldTransport, account: HetznerAccount) -> None:
    provider = provider_of(account)
    creations = [asyncio.create_task(provider.create(MachineRequest(f"red-{n}-aa", "red", n))) for n in range(32)]
    await until(lambda: transport.posts == 32)
    async with asyncio.timeout(LIMIT_S / 2):
        assert await provider.list_machines() == ()
    transport.held.release(32)
    assert len({machine.id for machine in await asyncio.gather(*creations)}) == 32


async def test_call_without_a_free_thread_is_throttled(
    transport: HeldTransport, account: HetznerAccount, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_THREADS", 1)
    monkeypatch.setattr(module, "MAX_WAIT_S", 0.05)
    provider = provider_of(account)
    first = asyncio.create_task(provider.create(MachineRequest("red-0-aa", "red", 0)))
    await until(lambda: transport.posts == 1)
    with pytest.raises(Throttled, match="too many requests in flight"):
        await provider.create(MachineRequest("red-1-aa", "red", 1))
    transport.held.release(1)
    await first
    assert transport.posts == 1


async def test_timeout_starts_when_the_call_starts(account: HetznerAccount, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_THREADS", 1)
    free = threading.Event()
    before = asyncio.create_task(account._run_in_thread(lambda: free.wait(LIMIT_S), LIMIT_S))
    await until(lambda: account._pool is not None)
    began = time.monotonic()
    behind = asyncio.create_task(account._run_in_thread(lambda: "done", 0.2))
    await until(lambda: time.monotonic() - began > 0.3)
    free.set()
    assert await behind == "done"
    assert await before


async def test_threads_end_with_the_last_user_of_the_account(account: HetznerAccount) -> None:
    def threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("hetzner")]

    one, other = provider_of(account), provider_of(account, "blue")
    await one.list_machines()
    await one.close()
    assert threads()
    await other.list_machines()
    await other.close()
    await until(lambda: not threads())


def test_sdk_retries_are_off_and_our_adapter_is_mounted(transport: HeldTransport, account: HetznerAccount) -> None:
    """A newer version may move these attributes, and would then repeat creations outside our limiter."""
    client = account.api._client
    assert client._retry_max_retries == 0
    for scheme in ("https://", "http://"):
        assert client._session.get_adapter(f"{scheme}hetzner.test") is account._adapter
    transport.emulator.faults.next("unavailable", times=9)
    with pytest.raises(APIException):
        account.api.locations.get_list()
    assert len(transport.emulator.requests) == 1
