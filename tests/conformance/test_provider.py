"""The contract of `ports/provider.py`, over every provider.

Each provider implements World, which creates provider objects and inspects machines independently of them.
"""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol
from uuid import uuid4

import pytest

from support.hetzner_provider_fixture import HetznerWorld
from support.runpod_provider_fixture import RunpodWorld
from windlass.model.errors import Ambiguous, Refused, Throttled, Unavailable
from windlass.model.fleet import FleetConfig
from windlass.model.machine import Machine, MachineRequest, MachineState
from windlass.ports.provider import Provider
from windlass.providers.local import LocalProvider
from windlass.providers.local.processes import ProcessTable, ProcFs, PsutilTable, is_alive

POLL_S = 0.02
TIMEOUT_S = 30.0


class World(Protocol):
    """A provider and its environment."""

    def provider(self, *, fleet: str = "fleet", database: str = "this") -> Provider:
        """A provider without memory, like that of a new orchestrator, for a fleet and a database."""

    def provider_that_refuses(self) -> Provider:
        """The same fleet with settings that are refused."""

    def provider_without_answer(self) -> Provider:
        """The same fleet while the provider cannot be reached."""

    def foreign_machine(self) -> Machine:
        """A machine that no Windlass created."""

    def exists(self, machine: Machine) -> bool:
        """Whether it exists, checked without the provider."""

    def end(self, machine: Machine) -> None:
        """Make it exit without a deletion."""


class LocalWorld:
    def __init__(self, table: ProcessTable, folder: Path) -> None:
        self._table = table
        self._folder = folder
        self._secret = uuid4().hex
        self._foreign: list[subprocess.Popen[bytes]] = []
        (folder / "stand_in.py").write_text("import signal\nsignal.pause()\n")

    def provider(self, *, fleet: str = "fleet", database: str = "this") -> Provider:
        return self._provider(fleet, database, self._table)

    def provider_that_refuses(self) -> Provider:
        return self._provider("fleet", "this", self._table, chdir=self._folder / "nowhere")

    def provider_without_answer(self) -> Provider:
        return self._provider("fleet", "this", BrokenTable())

    def _provider(self, fleet: str, database: str, table: ProcessTable, chdir: Path | None = None) -> Provider:
        config = FleetConfig(handler="some:handler", chdir=chdir, env={"PYTHONPATH": str(self._folder)})
        return LocalProvider(
            fleet,
            config,
            identity=f"{database}-{self._secret}",
            state_dir=self._folder / database,
            program=["stand_in"],
            table=table,
        )

    def foreign_machine(self) -> Machine:
        command = [sys.executable, "-c", "import signal; signal.pause()"]
        self._foreign.append(subprocess.Popen(command, start_new_session=True))
        process = self._table.read(self._foreign[-1].pid)
        assert process is not None
        return Machine(process.id, "foreign", MachineState.RUNNING)

    def exists(self, machine: Machine) -> bool:
        process = self._table.read(int(machine.id.rpartition("/")[2].partition("-")[0]))
        return process is not None and process.id == machine.id and is_alive(self._table, process)

    def end(self, machine: Machine) -> None:
        subprocess.run(["kill", "-KILL", machine.id.rpartition("/")[2].partition("-")[0]], check=True)

    def close(self) -> None:
        for process in self._foreign:
            process.kill()
            process.wait()


class BrokenTable(ProcFs):
    """A host without free file handles: processes can be listed but not read."""

    def environment(self, pid: int) -> bytes | None:
        raise OSError(24, "Too many open files")


@pytest.fixture(params=["local", "local with psutil", "hetzner", "runpod"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    if request.param == "local" and not Path("/proc/self/stat").exists():
        pytest.skip("this system has no /proc")
    made: LocalWorld | HetznerWorld | RunpodWorld
    if request.param == "hetzner":
        made = HetznerWorld()
    elif request.param == "runpod":
        made = RunpodWorld()
    else:
        made = LocalWorld(ProcFs() if request.param == "local" else PsutilTable(), tmp_path)
    yield made
    made.close()


@pytest.fixture
async def provider(world: World) -> AsyncIterator[Provider]:
    opened = world.provider()
    yield opened
    for each in (opened, world.provider(fleet="sibling"), world.provider(database="other")):
        for machine in await each.list_machines():
            await each.delete(machine)
        await each.close()


def request_for(name: str, fleet: str = "fleet") -> MachineRequest:
    return MachineRequest(name=name, fleet=fleet, slot=0, join_token=f"wlj_{'5' * 64}")


async def listed(provider: Provider) -> dict[str, Machine]:
    """The listed machines by name."""
    machines = await provider.list_machines()
    assert len({machine.id for machine in machines}) == len(machines)
    return {machine.name: machine for machine in machines}


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not await condition():
            await asyncio.sleep(POLL_S)


def living(machines: dict[str, Machine]) -> set[str]:
    return {name for name, machine in machines.items() if machine.state is not MachineState.EXITED}


# ------------------------------------------------------------------------------------------------------------ create


async def test_new_fleet_has_no_machines(provider: Provider) -> None:
    assert await provider.list_machines() == ()


async def test_created_machine_is_listed_under_its_requested_name(world: World, provider: Provider) -> None:
    created = await provider.create(request_for("fleet-0-aa"))
    found = (await listed(provider))["fleet-0-aa"]
    assert (created.name, found.id) == ("fleet-0-aa", created.id)
    assert found.state is not MachineState.EXITED
    assert found.created_at is not None
    assert world.exists(found)


async def test_name_is_used_for_one_machine(provider: Provider) -> None:
    first = await provider.create(request_for("fleet-0-aa"))
    second = await provider.create(request_for("fleet-0-aa"))
    assert second.id == first.id
    assert [machine.id for machine in await provider.list_machines()] == [first.id]


async def test_concurrent_creations_use_a_name_once(provider: Provider) -> None:
    created = await asyncio.gather(*(provider.create(request_for("fleet-0-aa")) for _ in range(4)))
    assert len({machine.id for machine in created}) == 1
    assert len(await provider.list_machines()) == 1


async def test_another_orchestrator_uses_a_name_once(world: World, provider: Provider) -> None:
    first = await provider.create(request_for("fleet-0-aa"))
    assert (await world.provider().create(request_for("fleet-0-aa"))).id == first.id
    assert len(await provider.list_machines()) == 1


async def test_concurrent_creations_all_succeed(provider: Provider) -> None:
    names = {f"fleet-{slot}-aa" for slot in range(5)}
    created = await asyncio.gather(*(provider.create(request_for(name)) for name in names))
    assert {machine.name for machine in created} == names
    assert {name: machine.id for name, machine in (await listed(provider)).items()} == {m.name: m.id for m in created}


async def test_refused_creation_creates_nothing_and_says_why(world: World, provider: Provider) -> None:
    with pytest.raises(Refused, match=r"fleet-0-aa: .+"):
        await world.provider_that_refuses().create(request_for("fleet-0-aa"))
    assert await provider.list_machines() == ()
    # The name is still free: nothing was made under it.
    await provider.create(request_for("fleet-0-aa"))


# -------------------------------------------------------------------------------------------------------------- list


async def test_machine_keeps_its_identity_between_lists(provider: Provider) -> None:
    created = await provider.create(request_for("fleet-0-aa"))
    for _ in range(3):
        found = (await listed(provider))["fleet-0-aa"]
        assert (found.id, found.created_at) == (created.id, created.created_at)


async def test_new_orchestrator_lists_existing_machines(world: World, provider: Provider) -> None:
    created = [await provider.create(request_for(f"fleet-{slot}-aa")) for slot in range(3)]
    found = await listed(world.provider())
    assert {machine.id for machine in found.values()} == {machine.id for machine in created}


async def test_incomplete_list_is_unavailable(world: World, provider: Provider) -> None:
    await provider.create(request_for("fleet-0-aa"))
    with pytest.raises(Unavailable):
        await world.provider_without_answer().list_machines()


async def test_creation_without_a_response_is_not_refused(world: World, provider: Provider) -> None:
    """Throttled is allowed: then no creation was sent."""
    with pytest.raises((Ambiguous, Throttled)):
        await world.provider_without_answer().create(request_for("fleet-0-aa"))


async def test_exited_machine_is_not_listed_as_live(world: World, provider: Provider) -> None:
    ended = await provider.create(request_for("fleet-0-aa"))
    await provider.create(request_for("fleet-1-bb"))
    world.end(ended)

    async def is_noticed() -> bool:
        return living(await listed(provider)) == {"fleet-1-bb"}

    await until(is_noticed, "the exit is listed")
    await provider.delete(ended)
    assert set(await listed(provider)) == {"fleet-1-bb"}


# ------------------------------------------------------------------------------------------------------------ delete


async def test_machine_is_gone_when_delete_returns(world: World, provider: Provider) -> None:
    created = await provider.create(request_for("fleet-0-aa"))
    await provider.delete(created)
    assert not world.exists(created)
    assert await provider.list_machines() == ()


async def test_deleting_a_deleted_machine_succeeds(provider: Provider) -> None:
    created = await provider.create(request_for("fleet-0-aa"))
    await provider.delete(created)
    await provider.delete(created)


async def test_deleting_an_unknown_id_succeeds_and_touches_nothing(world: World, provider: Provider) -> None:
    real = await provider.create(request_for("fleet-0-aa"))
    await provider.delete(replace(real, id=f"{real.id}0", name="fleet-9-zz"))
    assert world.exists(real)


@pytest.mark.parametrize("foreign", ["4711", "k3zq0x1m9ab2cd", "some-host/12-34567"])
async def test_id_of_another_provider_is_refused(provider: Provider, foreign: str) -> None:
    """The fleet's provider may have changed, and the machine may still be billed."""
    own_shapes = {"HetznerProvider": "4711", "RunpodProvider": "k3zq0x1m9ab2cd", "LocalProvider": "some-host/12-34567"}
    machine = Machine(foreign, "fleet-9-zz", MachineState.RUNNING, datetime(2026, 1, 1, tzinfo=UTC))
    if own_shapes[type(provider).__name__] == foreign:
        await provider.delete(machine)
        return
    with pytest.raises(Refused, match="at the fleet's former provider"):
        await provider.delete(machine)


async def test_concurrent_deletions_succeed(world: World, provider: Provider) -> None:
    created = await provider.create(request_for("fleet-0-aa"))
    await asyncio.gather(provider.delete(created), world.provider().delete(created))
    assert await provider.list_machines() == ()


async def test_deleting_one_machine_keeps_the_others(world: World, provider: Provider) -> None:
    first, second, third = [await provider.create(request_for(f"fleet-{slot}-aa")) for slot in range(3)]
    await provider.delete(second)
    assert set(await listed(provider)) == {first.name, third.name}
    assert world.exists(first)
    assert world.exists(third)


async def test_new_orchestrator_can_delete_existing_machines(world: World, provider: Provider) -> None:
    created = await provider.create(request_for("fleet-0-aa"))
    # It may know only what the worker's row contains.
    await world.provider().delete(Machine(created.id, created.name, MachineState.RUNNING))
    assert not world.exists(created)
    assert living(await listed(provider)) == set()


async def test_old_id_does_not_delete_a_newer_machine(world: World, provider: Provider) -> None:
    created = await provider.create(request_for("fleet-0-aa"))
    await provider.delete(replace(created, id=f"{created.id}0"))
    assert world.exists(created)


# ------------------------------------------------------------------------------------------------------------ others


async def delete_foreign(provider: Provider, machine: Machine) -> None:
    """A remote provider refuses to delete a foreign machine, which may be billed, and does not report it gone. A local
    foreign process under an old id means that ours is gone."""
    if provider.traits.is_remote:
        with pytest.raises(Refused, match="has lost our .*billed until then"):
            await provider.delete(machine)
    else:
        await provider.delete(machine)


async def test_machines_of_another_fleet_are_not_listed_or_deleted(world: World, provider: Provider) -> None:
    others = await world.provider(fleet="sibling").create(request_for("sibling-0-aa", "sibling"))
    await provider.create(request_for("fleet-0-aa"))
    assert set(await listed(provider)) == {"fleet-0-aa"}
    await delete_foreign(provider, others)
    assert world.exists(others)


async def test_machines_of_another_database_are_not_listed_or_deleted(world: World, provider: Provider) -> None:
    others = await world.provider(database="other").create(request_for("fleet-0-aa"))
    ours = await provider.create(request_for("fleet-0-aa"))
    assert [machine.id for machine in await provider.list_machines()] == [ours.id]
    await provider.delete(ours)
    await delete_foreign(provider, others)
    assert world.exists(others)


async def test_untagged_machine_is_not_listed_or_deleted(world: World, provider: Provider) -> None:
    foreign = world.foreign_machine()
    assert await provider.list_machines() == ()
    await delete_foreign(provider, foreign)
    assert world.exists(foreign)


async def test_prepare_without_a_prepare_step_changes_nothing(provider: Provider) -> None:
    created = await provider.create(request_for("fleet-0-aa"))
    assert not provider.traits.has_prepare_step
    received: list[str] = []

    async def receive(host_key: str) -> None:
        received.append(host_key)

    await provider.prepare(created, None, receive)
    assert received == []
    assert set(await listed(provider)) == {"fleet-0-aa"}


async def test_traits_are_non_negative_times(provider: Provider) -> None:
    traits = provider.traits
    assert min(traits.absence_grace_s, traits.creation_lateness_s, traits.orphan_grace_s) >= 0
