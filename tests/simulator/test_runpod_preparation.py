"""Preparation of pods while the emulated Runpod API fails, in virtual time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import NoReturn

import pytest

from support.runpod_fixture import IMAGE, EmulatedRunpod, request_for
from support.virtual_time import in_virtual_time
from windlass.model.errors import (
    NotPrepared,
    Unavailable,
)
from windlass.model.machine import Machine
from windlass.model.runpod import RunpodSettings
from windlass.providers.runpod.provider import RunpodProvider
from windlass.providers.runpod.provisioning import Preparer
from windlass.providers.runpod.ssh import CommandResult, Endpoint, Unreachable
from windlass.simulator.loop import virtual_now

BOOTED_S = 10.0


@pytest.mark.parametrize("is_deleted", [True, False], ids=["deleted", "stopped"])
def test_preparation_of_a_gone_pod_fails_early(is_deleted: bool) -> None:
    @in_virtual_time
    async def prepare() -> None:
        cloud = EmulatedRunpod()

        def open_shell(*_: object) -> NoReturn:
            raise AssertionError("must not be called")

        preparer = Preparer(RunpodSettings(image=IMAGE), open_shell, cloud.rng)
        provider = cloud.provider(preparer=preparer, public_key="ssh-ed25519 OURS")
        machine = await provider.create(request_for())
        await asyncio.sleep(BOOTED_S)
        if is_deleted:
            cloud.client.delete(f"/pods/{machine.id}")
        else:
            cloud.emulator.account.stop(cloud.pods[machine.id])
        began = virtual_now()
        with pytest.raises(NotPrepared, match=f"preparing pod {machine.id} of red-0-aa: the pod ") as caught:
            await provider.prepare(machine, "its key", ignore_host_key)
        assert (caught.value.code, caught.value.host_key) == ("MACHINE_GONE", "its key")
        # A new pod may be hidden for a minute.
        assert virtual_now() - began < timedelta(seconds=75)

    prepare()


async def ignore_host_key(_host_key: str) -> None: ...


class Pod:
    """A shell on a healthy pod, once its sshd responds."""

    host_key = "its key"

    def __init__(self, responds_at: datetime) -> None:
        self.responds_at = responds_at
        self.endpoints: list[Endpoint] = []

    @asynccontextmanager
    async def open(self, endpoint: Endpoint, _host_key: str | None) -> AsyncIterator["Pod"]:
        self.endpoints.append(endpoint)
        if virtual_now() < self.responds_at:
            raise Unreachable("no response")
        yield self

    async def run(self, command: str, _timeout_s: float) -> CommandResult:
        outputs = {"nvidia-smi": "L40S, 46068", "df": "disk 99999999 1 99999999 1 /"}
        return CommandResult(0, outputs.get(command.split(maxsplit=1)[0], ""))


async def pod_in_an_outage(responds_after_s: float, outage_s: float) -> tuple[RunpodProvider, Machine, Pod]:
    """The API fails for `outage_s` just after the pod started."""
    cloud = EmulatedRunpod()
    pod = Pod(virtual_now() + timedelta(seconds=responds_after_s))
    preparer = Preparer(RunpodSettings(image=IMAGE), pod.open, cloud.rng)
    provider = cloud.provider(preparer=preparer, public_key="ssh-ed25519 OURS")
    await provider.create(request_for())
    await asyncio.sleep(BOOTED_S * 2)
    (machine,) = await provider.list_machines()
    assert machine.address is not None
    cloud.faults.next(503, times=10**6)
    asyncio.get_running_loop().call_later(outage_s, cloud.faults.clear)
    await asyncio.sleep(6)  # longer than a list is reused
    return provider, machine, pod


@in_virtual_time
async def test_pod_is_prepared_at_its_last_address_during_an_api_outage() -> None:
    provider, machine, pod = await pod_in_an_outage(responds_after_s=60, outage_s=3600)
    assert (await provider.prepare(machine, None, ignore_host_key)).host_key == pod.host_key
    assert {f"{endpoint.host}:{endpoint.port}" for endpoint in pod.endpoints} == {machine.address}


@pytest.mark.parametrize("outage_s", [3600, 200], ids=["the whole time", "part of the time"])
def test_api_outage_does_not_fail_a_pod(outage_s: float) -> None:
    @in_virtual_time
    async def scenario() -> None:
        provider, machine, _ = await pod_in_an_outage(responds_after_s=600, outage_s=outage_s)
        with pytest.raises(Unavailable, match=f"preparing pod {machine.id} of red-0-aa: not done within 300 s"):
            await provider.prepare(machine, None, ignore_host_key)

    scenario()
