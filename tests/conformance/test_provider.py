"""The contract of `ports/provider.py`, over every provider.

A provider joins by building a World: how its machines come about, how they look from elsewhere, what else is there.
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
PATIENCE_S = 30.0


class World(Protocol):
    """One provider, and what surrounds it."""

    def provider(self, *, fleet: str = "fleet", windlass: str = "this") -> Provider:
        """As a freshly started orchestrator has it: of a fleet, and of one windlass or another."""

    def provider_that_refuses(self) -> Provider:
        """The same fleet, asked for something that can not be had."""

    def provider_without_answer(self) -> Provider:
        """The same fleet, of a provider that can not be asked now."""

    def foreign_machine(self) -> Machine:
        """One that is there, and was not made by any windlass."""

    def is_there(self, machine: Machine) -> bool:
        """Whether it exists, by other means than the provider's."""

    def end(self, machine: Machine) -> None:
        """Make it end as if by itself."""


class LocalWorld:
    def __init__(self, table: ProcessTable, folder: Path) -> None:
        self._table = table
        self._folder = folder
        self._secret = uuid4().hex
        self._foreign: list[subprocess.Popen[bytes]] = []
        (folder / "stand_in.py").write_text("import signal\nsignal.pause()\n")

    def provider(self, *, fleet: str = "fleet", windlass: str = "this") -> Provider:
        return self._provider(fleet, windlass, self._table)

    def provider_that_refuses(self) -> Provider:
        return self._provider("fleet", "this", self._table, chdir=self._folder / "nowhere")

    def provider_without_answer(self) -> Provider:
        return self._provider("fleet", "this", BrokenTable())

    def _provider(self, fleet: str, windlass: str, table: ProcessTable, chdir: Path | None = None) -> Provider:
        config = FleetConfig(handler="some:handler", chdir=chdir, env={"PYTHONPATH": str(self._folder)})
        return LocalProvider(
            fleet,
            config,
            identity=f"{windlass}-{self._secret}",
            state_dir=self._folder / windlass,
            program=["stand_in"],
            table=table,
        )

    def foreign_machine(self) -> Machine:
        command = [sys.executable, "-c", "import signal; signal.pause()"]
        self._foreign.append(subprocess.Popen(command, start_new_session=True))
        process = self._table.read(self._foreign[-1].pid)
        assert process is not None
        return Machine(process.id, "somebody", MachineState.RUNNING)

    def is_there(self, machine: Machine) -> bool:
        process = self._table.read(int(machine.id.rpartition("/")[2].partition("-")[0]))
        return process is not None and process.id == machine.id and is_alive(self._table, process)

    def end(self, machine: Machine) -> None:
        subprocess.run(["kill", "-KILL", machine.id.rpartition("/")[2].partition("-")[0]], check=True)

    def close(self) -> None:
        for process in self._foreign:
            process.kill()
            process.wait()


class BrokenTable(ProcFs):
    """A host with no file handle left: the process table can be listed and not read."""

    def environment(self, pid: int) -> bytes | None:
        raise OSError(24, "Too many open files")


@pytest.fixture(params=["local", "local by psutil", "hetzner", "runpod"])
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
    for each in (opened, world.provider(fleet="sibling"), world.provider(windlass="other")):
        for machine in await each.list_machines():
            await each.delete(machine)
        await each.close()


def request_for(name: str, fleet: str = "fleet") -> MachineRequest:
    return MachineRequest(name=name, fleet=fleet, slot=0, join_token=f"wlj_{'5' * 64}")


async def listed(provider: Provider) -> dict[str, Machine]:
    """By name, once creations that take their time are through."""
    machines = await provider.list_machines()
    assert len({machine.id for machine in machines}) == len(machines)
    return {machine.name: machine for machine in machines}


async def until(is_so: Callable[[], Awaitable[bool]], what: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await is_so():
            await asyncio.sleep(POLL_S)


def living(machines: dict[str, Machine]) -> set[str]:
    return {name for name, machine in machines.items() if machine.state is not MachineState.EXITED}


# ------------------------------------------------------------------------------------------------------------ create


async def test_a_fleet_begins_without_machines(provider: Provider) -> None:
    assert await provider.list_machines() == ()


async def test_a_created_machine_is_listed_under_the_name_it_was_asked_for(world: World, provider: Provider) -> None:
    created = await provider.create(request_for("fleet-0-aa"))
    found = (await listed(provider))["fleet-0-aa"]
    assert (created.name, found.id) == ("fleet-0-aa", created.id)
    assert found.state is not MachineState.EXITED
    assert found.created_at is not None
    assert world.is_there(found)


async def test_a_name_is_used_for_one_machine_only(provider: Provider) -> None:
    first = await provider.create(request_for("fleet-0-aa"))
    second = await provider.create(request_for("fleet-0-aa"))
    assert second.id == first.id
    assert [machine.id for machine in await provider.list_machines()] == [first.id]


async def test_a_name_is_used_once_even_by_calls_at_the_same_time(provider: Provider) -> None:
    created = await asyncio.gather(*(provider.create(request_for("fleet-0-aa")) for _ in range(4)))
    assert len({machine.id for machine in created}) == 1
    assert len(await provider.list_machines()) == 1


async def test_a_name_is_used_once_even_by_another_orchestrator(world: World, provider: Provider) -> None:
    first = await provider.create(request_for("fleet-0-aa"))
    assert (await world.provider().create(request_for("fleet-0-aa"))).id == first.id
    assert len(await provider.list_machines()) == 1


async def test_machines_asked_for_at_once_are_all_made(provider: Provider) -> None:
    names = {f"fleet-{slot}-aa" for slot in range(5)}
    created = await asyncio.gather(*(provider.create(request_for(name)) for name in names))
    assert {machine.name for machine in created} == names
    assert {name: machine.id for name, machine in (await listed(provider)).items()} == {m.name: m.id for m in created}


async def test_a_refusal_makes_nothing_and_says_why(world: World, provider: Provider) -> None:
    with pytest.raises(Refused, match=r"fleet-0-aa: .+"):
        await world.provider_that_refuses().create(request_for("fleet-0-aa"))
    assert await provider.list_machines() == ()
    # The name is still free: nothing was made under it.
    await provider.create(request_for("fleet-0-aa"))


# -------------------------------------------------------------------------------------------------------------- list


async def test_a_machine_stays_what_it_was_from_list_to_list(provider: Provider) -> None:
    created = await provider.create(request_for("fleet-0-aa"))
    for _ in range(3):
        found = (await listed(provider))["fleet-0-aa"]
        assert (found.id, found.created_at) == (created.id, created.created_at)


async def test_a_new_orchestrator_sees_the_machines_of_the_last_one(world: World, provider: Provider) -> None:
    created = [await provider.create(request_for(f"fleet-{slot}-aa")) for slot in range(3)]
    found = await listed(world.provider())
    assert {machine.id for machine in found.values()} == {machine.id for machine in created}


async def test_a_list_that_is_not_whole_is_no_list(world: World, provider: Provider) -> None:
    await provider.create(request_for("fleet-0-aa"))
    with pytest.raises(Unavailable):
        await world.provider_without_answer().list_machines()


async def test_a_creation_without_a_clear_answer_is_no_refusal(world: World, provider: Provider) -> None:
    """Whoever knows that nothing was sent says so."""
    with pytest.raises((Ambiguous, Throttled)):
        await world.provider_without_answer().create(request_for("fleet-0-aa"))


async def test_a_machine_that_ended_by_itself_does_not_pass_for_living(world: World, provider: Provider) -> None:
    ended = await provider.create(request_for("fleet-0-aa"))
    await provider.create(request_for("fleet-1-bb"))
    world.end(ended)

    async def is_noticed() -> bool:
        return living(await listed(provider)) == {"fleet-1-bb"}

    await until(is_noticed, "the end is noticed")
    await provider.delete(ended)
    assert set(await listed(provider)) == {"fleet-1-bb"}


# ------------------------------------------------------------------------------------------------------------ delete


async def test_a_deleted_machine_is_gone_when_delete_returns(world: World, provider: Provider) -> None:
    created = await provider.create(request_for("fleet-0-aa"))
    await provider.delete(created)
    assert not world.is_there(created)
    assert await provider.list_machines() == ()


async def test_deleting_what_is_gone_is_no_error(provider: Provider) -> None:
    created = await provider.create(request_for("fleet-0-aa"))
    await provider.delete(created)
    await provider.delete(created)


async def test_deleting_what_never_was_is_no_error(world: World, provider: Provider) -> None:
    real = await provider.create(request_for("fleet-0-aa"))
    await provider.delete(replace(real, id=f"{real.id}0", name="fleet-9-zz"))
    assert world.is_there(real)


@pytest.mark.parametrize("foreign", ["4711", "k3zq0x1m9ab2cd", "some-host/12-34567"])
async def test_an_id_that_no_machine_of_this_provider_can_have_is_not_called_gone(
    provider: Provider, foreign: str
) -> None:
    """It may be another provider's, and paid for: the fleet's was changed."""
    own_shapes = {"HetznerProvider": "4711", "RunpodProvider": "k3zq0x1m9ab2cd", "LocalProvider": "some-host/12-34567"}
    machine = Machine(foreign, "fleet-9-zz", MachineState.RUNNING, datetime(2026, 1, 1, tzinfo=UTC))
    if own_shapes[type(provider).__name__] == foreign:
        await provider.delete(machine)
        return
    with pytest.raises(Refused, match="at the fleet's former provider"):
        await provider.delete(machine)


async def test_deleting_twice_at_the_same_time_is_no_error(world: World, provider: Provider) -> None:
    created = await provider.create(request_for("fleet-0-aa"))
    await asyncio.gather(provider.delete(created), world.provider().delete(created))
    assert await provider.list_machines() == ()


async def test_deleting_one_machine_leaves_the_others(world: World, provider: Provider) -> None:
    first, second, third = [await provider.create(request_for(f"fleet-{slot}-aa")) for slot in range(3)]
    await provider.delete(second)
    assert set(await listed(provider)) == {first.name, third.name}
    assert world.is_there(first)
    assert world.is_there(third)


async def test_a_new_orchestrator_can_delete_the_machines_of_the_last_one(world: World, provider: Provider) -> None:
    created = await provider.create(request_for("fleet-0-aa"))
    # All that it may know of a machine is what stands in the row.
    await world.provider().delete(Machine(created.id, created.name, MachineState.RUNNING))
    assert not world.is_there(created)
    assert living(await listed(provider)) == set()


async def test_an_old_id_does_not_reach_a_newer_machine(world: World, provider: Provider) -> None:
    created = await provider.create(request_for("fleet-0-aa"))
    await provider.delete(replace(created, id=f"{created.id}0"))
    assert world.is_there(created)


# ------------------------------------------------------------------------------------------------------------ others


async def leave_alone(provider: Provider, machine: Machine) -> None:
    """Whoever is asked to delete a machine that is not ours does not, and does not say that it is gone: somebody pays
    for it. On this host, where nobody pays, what is not ours under an old id means that ours is gone."""
    if provider.traits.is_remote:
        with pytest.raises(Refused, match="has lost our .*billed until then"):
            await provider.delete(machine)
    else:
        await provider.delete(machine)


async def test_the_machines_of_another_fleet_are_neither_listed_nor_touched(world: World, provider: Provider) -> None:
    others = await world.provider(fleet="sibling").create(request_for("sibling-0-aa", "sibling"))
    await provider.create(request_for("fleet-0-aa"))
    assert set(await listed(provider)) == {"fleet-0-aa"}
    await leave_alone(provider, others)
    assert world.is_there(others)


async def test_the_machines_of_another_windlass_are_neither_listed_nor_touched(
    world: World, provider: Provider
) -> None:
    others = await world.provider(windlass="other").create(request_for("fleet-0-aa"))
    ours = await provider.create(request_for("fleet-0-aa"))
    assert [machine.id for machine in await provider.list_machines()] == [ours.id]
    await provider.delete(ours)
    await leave_alone(provider, others)
    assert world.is_there(others)


async def test_a_machine_that_nobody_marked_is_neither_listed_nor_touched(world: World, provider: Provider) -> None:
    foreign = world.foreign_machine()
    assert await provider.list_machines() == ()
    await leave_alone(provider, foreign)
    assert world.is_there(foreign)


async def test_preparing_where_there_is_nothing_to_prepare_changes_nothing(provider: Provider) -> None:
    created = await provider.create(request_for("fleet-0-aa"))
    assert not provider.traits.has_prepare_step
    met: list[str] = []

    async def meet(host_key: str) -> None:
        met.append(host_key)

    await provider.prepare(created, None, meet)
    assert met == []
    assert set(await listed(provider)) == {"fleet-0-aa"}


async def test_traits_are_times(provider: Provider) -> None:
    traits = provider.traits
    assert min(traits.absence_grace_s, traits.creation_lateness_s, traits.orphan_grace_s) >= 0
