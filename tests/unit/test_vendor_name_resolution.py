"""A vendor whose name does not resolve is unreachable, which is neither a throttled nor an unclear creation."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from support.hetzner_fixture import PUBLIC_ONLY
from support.orchestrator_fixture import SOON_S, OrchestratorFixture, config, run_in_virtual_time
from support.runpod_fixture import EmulatedRunpod, request_for
from support.virtual_time import in_virtual_time
from windlass.model.auth import JOIN_PREFIX
from windlass.model.errors import ProviderUnreachable
from windlass.model.hetzner import HetznerSettings
from windlass.model.machine import MachineRequest
from windlass.model.runpod import RunpodSettings
from windlass.ports.provider import Provider
from windlass.providers.hetzner.account import HetznerAccount
from windlass.providers.hetzner.provider import HetznerProvider
from windlass.providers.runpod.account import RunpodAccount
from windlass.providers.runpod.provider import RunpodProvider

REQUEST = MachineRequest("red-0-aa", "red", 0, join_token=f"{JOIN_PREFIX}{'7' * 64}")


@asynccontextmanager
async def runpod() -> AsyncIterator[Provider]:
    account = RunpodAccount("any", endpoint="https://vendor.invalid/v2")
    try:
        yield RunpodProvider("red", RunpodSettings(image="i"), account, identity="this", url="https://h.example")
    finally:
        await account.close()


@asynccontextmanager
async def hetzner() -> AsyncIterator[Provider]:
    account = HetznerAccount("any", endpoint="https://vendor.invalid/v1", timeout_s=30.0)
    try:
        yield HetznerProvider(
            "red",
            HetznerSettings(**PUBLIC_ONLY),
            account,
            identity="this",
            render_user_data=lambda _: "#cloud-config\n",
        )
    finally:
        account.close()


@pytest.mark.parametrize("open_provider", [runpod, hetzner])
async def test_unknown_name_of_the_vendor_is_unreachable_not_throttled(
    monkeypatch: pytest.MonkeyPatch, open_provider: Callable[[], Any]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    async with open_provider() as provider:
        with pytest.raises(ProviderUnreachable, match="Name or service not known") as caught:
            await provider.create(REQUEST)
    assert caught.value.code == "UNREACHABLE"


@in_virtual_time
async def test_request_for_a_pod_that_was_not_sent_creates_none() -> None:
    """The list of pods is a moment old, so that only the request for the pod finds the vendor unreachable."""
    cloud = EmulatedRunpod()
    provider = cloud.provider()
    await provider.list_machines()
    cloud.is_unreachable = True
    with pytest.raises(ProviderUnreachable, match="creating pod red-0-aa: API unreachable") as caught:
        await provider.create(request_for())
    assert (caught.value.code, caught.value.retry_after_s) == ("UNREACHABLE", 5.0)
    cloud.is_unreachable = False
    await provider.create(request_for())
    assert len(cloud.pods) == 1


def test_shutdown_after_requests_that_were_not_sent_ends_at_once() -> None:
    async def scenario(fixture: OrchestratorFixture) -> None:
        cloud = EmulatedRunpod()
        fixture.fleets = {"red": config("red", poll_interval_s=10.0)}
        provider = cloud.provider()
        fixture.clouds = {"red": provider}  # type: ignore[dict-item]
        await provider.list_machines()
        cloud.is_unreachable = True
        running = fixture.start()
        await asyncio.sleep(SOON_S)
        spawned = await fixture.store.workers(include_terminated=True)
        assert {worker.code for worker in spawned} == {"UNREACHABLE"}
        assert cloud.sent("POST") == []
        running.orchestrator.stop()
        await running.ends_within(5.0)

    run_in_virtual_time(scenario)
