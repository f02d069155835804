"""A vendor whose name does not resolve is unreachable, which is neither a throttled nor an unclear creation."""

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from support.hetzner_fixture import PUBLIC_ONLY
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
