"""Local workers as real processes: found by a later orchestrator, and deleted with everything they started."""

import os
import random
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.local_workers import ORCHESTRATOR, SHORT_LIVED, LocalWorkers, exited, pid_of, request_named, start_script
from support.stores import PostgresStores
from support.worker_harness import is_alive, until
from windlass.control.cycle import FleetCycle
from windlass.model.lease import Candidate
from windlass.model.machine import Machine, MachineState
from windlass.model.worker import Worker, WorkerStatus
from windlass.providers.local.processes import Process, ProcFs, send_signal
from windlass.providers.local.worker_process import MARK

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")


@pytest.fixture
async def workers(tmp_path: Path) -> AsyncIterator[LocalWorkers]:
    made = LocalWorkers(tmp_path)
    yield made
    await made.delete_all()


async def test_new_orchestrator_adopts_workers_of_a_killed_one(workers: LocalWorkers, dsn: str) -> None:
    fleet = {"queues": ("default",), "min_workers": 2, "max_workers": 2, "poll_interval_s": 0.1}
    config = workers.config(**fleet)
    given = {
        "identity": workers.identity,
        "dsn": dsn,
        "state_dir": str(workers.state_dir),
        "fleet": config.model_dump(mode="json"),
    }
    first = start_script(ORCHESTRATOR, given)
    provider = workers.real_provider(dsn, **fleet)
    try:
        async with PostgresStores(dsn) as store:

            async def active() -> list[Worker]:
                return [row for row in await store.workers() if row.status is WorkerStatus.ACTIVE]

            before = await until(lambda: _if_two(active), "two workers are active")
            first.kill()
            first.wait()
            # The workers are unaffected, and the next orchestrator finds them.
            listed = {machine.name: pid_of(machine) for machine in await provider.list_machines()}
            assert listed == {row.id: row.pid for row in before}
            second = FleetCycle("crowd", config, store, provider, Candidate("second", ttl_s=2.0), random.Random(1))  # noqa: S311
            await until(lambda: _leads(second), "the second orchestrator leads")
            for _ in range(3):
                await second.run()
            assert [(row.id, row.pid) for row in await active()] == [(row.id, row.pid) for row in before]
            assert len(await store.workers(include_terminated=True)) == 2

            # It replaces a worker that dies, although that is not its child.
            os.kill(listed[before[0].id], signal.SIGKILL)
            after = await until(lambda: _replaced(second, active, before[0].id), "the dead worker is replaced")
            assert before[1].id in {row.id for row in after}
    finally:
        first.kill()
        first.wait()


async def _if_two(active: Callable[[], Any]) -> Any:
    rows = await active()
    return rows if len(rows) == 2 else None


async def _leads(cycle: FleetCycle) -> bool:
    return (await cycle.run()).is_leader


async def _replaced(cycle: FleetCycle, active: Callable[[], Any], lost: str) -> Any:
    await cycle.run()
    rows = await active()
    return rows if len(rows) == 2 and lost not in {row.id for row in rows} else None


async def test_worker_is_found_if_its_orchestrator_dies_after_the_fork(workers: LocalWorkers) -> None:
    given = {
        "identity": workers.identity,
        "state_dir": str(workers.state_dir),
        "fleet": workers.config().model_dump(mode="json"),
    }
    provider = workers.provider()
    assert start_script(SHORT_LIVED, given).wait(30) == -signal.SIGKILL

    async def find() -> tuple[Machine, ...]:
        return await provider.list_machines()

    (found,) = await until(find, "the process is found")
    up = await workers.read_file("up")
    assert (found.name, pid_of(found)) == ("crowd-0-aa", up["pid"])
    # Another creation with this name returns the same process.
    assert (await provider.create(request_named("crowd-0-aa"))).id == found.id


async def test_orphaned_children_of_a_dead_worker_are_deleted(workers: LocalWorkers) -> None:
    creator = workers.provider("leaves a family")
    machine = await creator.create(request_named("crowd-0-aa"))
    family = await workers.read_file("family")
    await workers.read_file("up")
    os.kill(pid_of(machine), signal.SIGKILL)
    await exited(creator, "crowd-0-aa")
    # An orchestrator that never listed the worker, when only its children exist.
    provider = workers.provider()
    (found,) = await provider.list_machines()
    assert (found.name, found.state) == ("crowd-0-aa", MachineState.EXITED)
    assert "2 of its processes still run" in (found.note or "")
    await provider.delete(found)
    child, apart, in_session, lost = family
    assert not any(is_alive(pid) for pid in (child, lost))
    # Out of reach, as documented: no environment, and their parent is gone. The test ends them by pid.
    for pid in (apart, in_session):
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("how", ["fork", "fork with a session"])
async def test_fork_of_a_worker_is_not_listed_as_a_machine(workers: LocalWorkers, how: str) -> None:
    """Every child of a worker is such a fork for a moment."""
    provider = workers.provider(how)
    machine = await provider.create(request_named("crowd-0-aa"))
    fork = await workers.read_file("fork")
    assert [found.id for found in await provider.list_machines()] == [machine.id]
    assert [found.id for found in await workers.provider().list_machines()] == [machine.id]
    await provider.delete(machine)
    assert not is_alive(fork)


async def test_worker_that_overwrites_its_environment_stays_listed(workers: LocalWorkers) -> None:
    provider = workers.provider("forget")
    machine = await provider.create(request_named("crowd-0-aa"))
    await workers.read_file("up")
    assert MARK.encode() not in (ProcFs().environment(pid_of(machine)) or b"")
    assert [found.id for found in await provider.list_machines()] == [machine.id]
    await provider.delete(machine)
    assert not is_alive(pid_of(machine))


async def test_duplicate_worker_is_listed_and_deleted_alone(workers: LocalWorkers) -> None:
    class Blind(ProcFs):
        def pids(self) -> list[int]:
            return []

    provider = workers.provider()
    first = await provider.create(request_named("crowd-0-aa"))
    blind = workers.provider()
    blind._table = Blind()
    blind._logs.discard("crowd-0-aa")
    second = await blind.create(request_named("crowd-0-aa"))
    assert {machine.id for machine in await provider.list_machines()} == {first.id, second.id}
    await provider.delete(second)
    assert [machine.id for machine in await provider.list_machines()] == [first.id]
    assert is_alive(pid_of(first))


async def test_delete_sends_sigterm_first(workers: LocalWorkers) -> None:
    provider = workers.provider("polite")
    machine = await provider.create(request_named("crowd-0-aa"))
    await workers.read_file("up")
    await provider.delete(machine)
    assert await workers.read_file("bye") == "done"
    assert await provider.list_machines() == ()


async def test_worker_that_ignores_sigterm_is_killed_with_its_children(workers: LocalWorkers) -> None:
    provider = workers.provider("stubborn", stop_grace_s=0.2)
    machine = await provider.create(request_named("crowd-0-aa"))
    family = await workers.read_file("family")
    await workers.read_file("up")
    assert all(is_alive(pid) for pid in family)
    await provider.delete(machine)
    assert [pid for pid in [pid_of(machine), *family] if is_alive(pid)] == []


async def test_children_of_a_terminated_worker_are_killed(workers: LocalWorkers) -> None:
    provider = workers.provider("leaves a family")
    machine = await provider.create(request_named("crowd-0-aa"))
    family = await workers.read_file("family")
    await provider.delete(machine)
    assert [pid for pid in family if is_alive(pid)] == []


async def test_stopped_worker_is_deleted(workers: LocalWorkers) -> None:
    provider = workers.provider(stop_grace_s=0.1)
    machine = await provider.create(request_named("crowd-0-aa"))
    os.kill(pid_of(machine), signal.SIGSTOP)
    assert [found.state for found in await provider.list_machines()] == [MachineState.RUNNING]
    await provider.delete(machine)
    assert not is_alive(pid_of(machine))


async def test_reused_pid_is_not_signalled(workers: LocalWorkers) -> None:
    provider = workers.provider()
    machine = await provider.create(request_named("crowd-0-aa"))
    process, _, started = machine.id.rpartition("-")
    pid, earlier = pid_of(machine), int(started) - 1
    await provider.delete(replace(machine, id=f"{process}-{earlier}"))
    send_signal(ProcFs(), Process(pid, earlier, os.getpid(), pid, is_zombie=False), signal.SIGKILL)
    assert is_alive(pid)
    assert [found.id for found in await provider.list_machines()] == [machine.id]
