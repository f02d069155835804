"""The invariant checker accepts a run without faults and detects broken promises."""

from typing import Any

import pytest

from support.scripted_simulation import fault_free_simulation, red, script
from support.simulator.cloud import MachineRecord, SimulatedCloud
from support.simulator.invariants import InvariantViolation
from windlass.model.errors import (
    Unavailable,
)
from windlass.model.machine import Machine, MachineRequest, MachineState


def test_without_faults_no_machine_is_superfluous() -> None:
    simulation = fault_free_simulation(max_workers=3, min_workers=1, arrivals=((1.0, 6),))
    report = simulation.run()
    assert report.most_billed == {"red": 3}
    assert len(red(simulation).machines) == 3
    assert all(len(task.claims) == 1 for task in simulation.checker.tasks.values())
    assert report.late_results == 0


@pytest.mark.parametrize("policy", ["threshold", "buffered", "clear-time"])
def test_constant_load_causes_no_spawn_or_drain(policy: str) -> None:
    simulation = fault_free_simulation(
        policy=policy,
        max_workers=4,
        arrivals=tuple((float(n), 1) for n in range(1, 1200, 6)),
        lasts_s=1200.0,
        task_s=(10.0, 11.0),
        idle_timeout_s=60.0,
    )
    calls: list[tuple[int, int]] = []

    def count() -> None:
        calls.append((red(simulation).create_calls, red(simulation).delete_calls))

    script(simulation, (300.0, count), (1190.0, count))
    simulation.run()
    before, after = calls
    assert before == after
    assert before[0] > 0


class LyingProvider:
    """A provider that breaks its contract: it reports machines as deleted and keeps them."""

    def __init__(self, cloud: SimulatedCloud) -> None:
        self._make_cloud = cloud
        self.traits = cloud.traits

    async def create(self, request: MachineRequest) -> Machine:
        return await self._make_cloud.create(request)

    async def list_machines(self) -> tuple[Machine, ...]:
        return await self._make_cloud.list_machines()

    async def delete(self, machine: Machine) -> None:
        pass

    async def close(self) -> None:
        pass


def test_checker_detects_leaked_machine() -> None:
    simulation = fault_free_simulation(max_workers=1, arrivals=((1.0, 1), (100.0, 1)))
    simulation.make_provider = LyingProvider
    with pytest.raises(InvariantViolation, match="machine m0-red of red-0-.* is billed without a live worker"):
        simulation.run()


def test_checker_detects_accepted_stale_result() -> None:
    simulation = fault_free_simulation(
        max_workers=2, min_workers=2, arrivals=((20.0, 1),), lasts_s=400.0, task_s=(40.0, 45.0)
    )

    def forge() -> None:
        simulation.next_worker(boots_s=1.0, freezes_at_s=40.0, frozen_s=60.0)
        simulation.next_worker(boots_s=3.0, freezes_at_s=41.0, frozen_s=0.0)
        for _ in range(20):
            red(simulation).next_delete(raises=Unavailable("503"), takes_effect=False)
        honest = simulation.store._complete

        def accept_all(_worker_id: str, done: Any) -> bool:
            row = simulation.store.tables.tasks.rows[done.task_id]
            if row.status == "running":
                row.token = done.token
            return bool(honest(row.worker_id, done))

        simulation.store._complete = accept_all

    script(simulation, (0, forge))
    with pytest.raises(InvariantViolation, match="promise 2 broken: task 1 accepted from .* not hold its claim"):
        simulation.run()


def test_checker_detects_lost_task() -> None:
    simulation = fault_free_simulation(max_workers=1, arrivals=((1.0, 1),))

    def forge() -> None:
        simulation.next_worker(boots_s=2.0, crashes_at_s=8.0)
        simulation.store.tables.requeue_tasks_of = lambda *_: 0

    script(simulation, (0, forge))
    with pytest.raises(InvariantViolation, match=r"promise 1 broken: 1 tasks are not finished, such as \[1\]"):
        simulation.run()


def test_machine_state_is_as_of_list_time() -> None:
    machine = MachineRecord("m", "w", "red", 0, 10.0, running_at=20.0, exited_at=30.0, deleted_at=40.0)
    states = [(at, machine.is_billed(at) and machine.state(at)) for at in (5.0, 10.0, 20.0, 30.0, 40.0)]
    assert states == [
        (5.0, False),
        (10.0, MachineState.BOOTING),
        (20.0, MachineState.RUNNING),
        (30.0, MachineState.EXITED),
        (40.0, False),
    ]
