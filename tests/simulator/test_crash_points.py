"""A crash before, during and after every call of an orchestrator: the next cycle repairs all of them.

The history has one of each: spawns, a creation without an answer, a worker that crashes and is replaced, a deletion
that fails, an orphaned machine, promotions, drains. A killed orchestrator is restarted after a second; with two of
them, the other takes over first.
"""

import pytest

from support.simulator.cloud import MachineRecord
from support.simulator.crashes import CrashPoint, CrashTiming, record_calls, run_with_crash
from support.simulator.scenario import FleetScenario, Scenario, fleet_config
from support.simulator.simulation import Simulation
from support.simulator.workers import TaskProfile
from windlass.model.errors import Unavailable

CHUNKS = 4


def eventful_world(orchestrators: int) -> Simulation:
    fleet_scenario = FleetScenario(
        config=fleet_config(max_workers=3, poll_interval_s=10.0, stop_timeout_s=20.0, idle_timeout_s=10.0),
        max_list_age_s=5.0,
        max_creation_delay_s=10.0,
        tasks=TaskProfile(duration_s=(10.0, 15.0)),
        arrivals=((0.5, 5), (100.0, 2)),
    )
    simulation = Simulation(
        Scenario(0, {"red": fleet_scenario}, orchestrators=orchestrators, ttl_s=10.0, faults_end_s=170.0)
    )

    def plan_events(_: Simulation) -> None:
        cloud = simulation.clouds["red"]
        cloud.machines["orphan"] = MachineRecord("orphan", "red-2-formerly", "red", 2, 0.0, running_at=0.0)
        cloud.next_create(duration_s=35.0)
        cloud.next_create(duration_s=3.0, times_out_after_taking_effect=True)
        cloud.next_create(duration_s=35.0)
        cloud.next_delete()
        cloud.next_delete(raises=Unavailable("503"), takes_effect=False)
        simulation.next_worker(boots_s=2.0)
        simulation.next_worker(boots_s=2.0, crashes_at_s=10.0)
        simulation.next_worker(boots_s=2.0)

    simulation.on_ready = plan_events
    return simulation


@pytest.fixture(scope="module", params=[1, 2], ids=["restarted", "replaced"])
def history(request: pytest.FixtureRequest) -> tuple[int, list[str]]:
    return request.param, record_calls(lambda: eventful_world(request.param))


def test_history_has_a_call_of_every_kind(history: tuple[int, list[str]]) -> None:
    _, calls = history
    assert set(calls) == {
        "acquire_lease",
        "list_machines",
        "observe",
        "commit_plan",
        "create",
        "delete",
        "record_outcomes",
    }
    assert calls.count("create") >= 3
    assert calls.count("delete") >= 4


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_crash_at_any_call_is_repaired(history: tuple[int, list[str]], when: CrashTiming, chunk: int) -> None:
    orchestrators, calls = history
    for number in range(chunk, len(calls), CHUNKS):
        run_with_crash(lambda: eventful_world(orchestrators), CrashPoint(number, when))
