"""One misfortune at a time, and what becomes of it. Worlds here have no faults but those in the script."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from windlass.control.cycle import LIST_SHARE
from windlass.control.executor import CALL_TIMEOUT_S
from windlass.model.errors import (
    Denied,
    InvalidRequest,
    LimitReached,
    NoCapacity,
    Refused,
    Throttled,
    Unavailable,
)
from windlass.model.machine import Machine, MachineRequest, MachineState
from windlass.simulator.cloud import MachineRecord, SimulatedCloud
from windlass.simulator.invariants import InvariantViolation
from windlass.simulator.orchestrators import SimulatedOrchestrator
from windlass.simulator.scenario import FleetScenario, Scenario, WorkerFaultPlan, fleet_config
from windlass.simulator.simulation import Simulation
from windlass.simulator.workers import TaskProfile

TTL_S = 20.0
LATE_S = 30.0
LIST_AGE_S = 5.0
# From an intent that was never answered until its slot is free again.
GIVEN_UP_S = TTL_S + CALL_TIMEOUT_S + LATE_S + LIST_AGE_S


def quiet_world(
    *,
    arrivals: tuple[tuple[float, int], ...] = ((1.0, 3),),
    lasts_s: float = 300.0,
    orchestrators: int = 1,
    is_cloud: bool = True,
    worker_faults: WorkerFaultPlan = WorkerFaultPlan(),
    task_s: tuple[float, float] = (10.0, 20.0),
    fails: float = 0.0,
    max_attempts: int = 100,
    ttl_s: float = TTL_S,
    **config: Any,
) -> Simulation:
    fleet_scenario = FleetScenario(
        config=fleet_config(**({"max_workers": 2} | config)),
        max_list_age_s=LIST_AGE_S if is_cloud else 0.0,
        max_creation_delay_s=LATE_S if is_cloud else 0.0,
        worker_faults=worker_faults,
        tasks=TaskProfile(duration_s=task_s, failure_rate=fails),
        arrivals=arrivals,
        max_attempts=max_attempts,
    )
    return Simulation(
        Scenario(0, {"red": fleet_scenario}, orchestrators=orchestrators, ttl_s=ttl_s, faults_end_s=lasts_s)
    )


def script(simulation: Simulation, *deeds: tuple[float, Callable[[], Any]]) -> None:
    """Things to do when the world stands (at 0) or later."""

    def on_ready(_: Simulation) -> None:
        for at_s, action in deeds:
            if at_s == 0:
                action()
            else:
                simulation.at(at_s, _async(action))

    simulation.on_ready = on_ready


def _async(action: Callable[[], Any]) -> Callable[[], Awaitable[None]]:
    async def perform() -> None:
        result = action()
        if asyncio.iscoroutine(result):
            await result

    return perform


def red(simulation: Simulation) -> SimulatedCloud:
    return simulation.clouds["red"]


def names(simulation: Simulation) -> list[str]:
    return [entry.name for entry in red(simulation).machines.values()]


# --------------------------------------------------------------------------------------------------------- creating


@pytest.mark.parametrize(
    "fate",
    [
        {"times_out_after_taking_effect": True},
        {"takes_effect_late_s": LATE_S},
        {"never_answers": True},
        {"duration_s": CALL_TIMEOUT_S + 5.0},
    ],
    ids=lambda fate: next(iter(fate)),
)
def test_a_creation_without_an_answer_is_not_made_twice(fate: dict[str, Any]) -> None:
    simulation = quiet_world(max_workers=1, min_workers=1, spawn_timeout_s=150.0)
    script(simulation, (0, lambda: red(simulation).next_create(**fate)))
    simulation.run()
    assert len(red(simulation).machines) == 1


def test_the_slot_of_a_creation_that_came_to_nothing_is_free_when_no_machine_can_come_any_more() -> None:
    simulation = quiet_world(max_workers=1)
    script(simulation, (0, lambda: red(simulation).next_create(fails_without_effect=True)))
    simulation.run()
    (entry,) = red(simulation).machines.values()
    assert GIVEN_UP_S < entry.created_at < GIVEN_UP_S + 20.0


@pytest.mark.parametrize(
    "problem", [Refused("limit"), NoCapacity("none left")], ids=lambda problem: type(problem).__name__
)
def test_a_refused_creation_is_tried_again_in_the_next_cycle(problem: Exception) -> None:
    simulation = quiet_world(max_workers=1)
    script(simulation, (0, lambda: red(simulation).next_create(raises=problem)))
    simulation.run()
    (entry,) = red(simulation).machines.values()
    assert entry.created_at < 15.0


@pytest.mark.parametrize(
    ("problem", "code"),
    [
        (Refused("no"), "REFUSED"),
        (LimitReached("no more"), "LIMIT_REACHED"),
        (InvalidRequest("not so"), "INVALID_REQUEST"),
        (Denied("who are you"), "DENIED"),
        (NoCapacity("none left"), "NO_CAPACITY"),
        (Throttled("too many requests", retry_after_s=5.0), "THROTTLED"),
    ],
    ids=str,
)
def test_a_refusal_has_a_code_like_those_of_events(problem: Exception, code: str) -> None:
    simulation = quiet_world(max_workers=1, lasts_s=900.0)
    script(simulation, (0, lambda: red(simulation).next_create(raises=problem)))
    simulation.run()
    refusals = [event.detail for event in simulation.store.tables.event_log.events if event.code == "MACHINE_REFUSED"]
    assert {"code": code} in refusals
    assert {detail["code"] for detail in refusals if detail} <= {code, "LEASE_LOST"}


def test_a_provider_that_asks_for_a_pause_is_left_alone() -> None:
    simulation = quiet_world(max_workers=1)
    script(
        simulation, (0, lambda: red(simulation).next_create(raises=Throttled("too many requests", retry_after_s=60.0)))
    )
    simulation.run()
    (entry,) = red(simulation).machines.values()
    assert 60.0 < entry.created_at < 75.0
    assert red(simulation).create_calls == 2


def test_a_pause_in_hiring_delays_no_deletion() -> None:
    """Deletions have their own turn at the provider: a machine that stays is paid for."""
    simulation = quiet_world(max_workers=2, arrivals=((1.0, 2),))

    def refuse_the_second() -> None:
        red(simulation).next_create()
        red(simulation).next_create(raises=Throttled("too many requests", retry_after_s=200.0))

    script(simulation, (0, refuse_the_second))
    simulation.run()
    (entry,) = red(simulation).machines.values()
    assert entry.deleted_at < 150.0


def test_a_long_pause_stops_hiring_for_as_long_as_it_lasts_and_is_said_aloud() -> None:
    simulation = quiet_world(max_workers=1, lasts_s=1800.0)
    script(
        simulation,
        (0, lambda: red(simulation).next_create(raises=Throttled("too many requests", retry_after_s=1200.0))),
    )
    simulation.run()
    (entry,) = red(simulation).machines.values()
    assert 1200.0 < entry.created_at < 1520.0
    assert red(simulation).create_calls == 2
    assert "PROVIDER_PAUSE" in {
        event.detail["code"] for event in simulation.store.tables.event_log.events if event.code == "ALERT"
    }


def test_however_long_a_pause_a_machine_is_asked_to_go_again_after_five_minutes() -> None:
    simulation = quiet_world(max_workers=1, lasts_s=900.0)
    refusal = Throttled("too many requests", retry_after_s=7200.0)
    script(simulation, (0, lambda: red(simulation).next_delete(raises=refusal, takes_effect=False)))
    simulation.run()
    (entry,) = red(simulation).machines.values()
    assert 300.0 < entry.deleted_at < 600.0


def test_a_fault_in_the_adapter_is_an_unclear_creation() -> None:
    simulation = quiet_world(max_workers=2)
    script(simulation, (0, lambda: red(simulation).next_create(raises=KeyError("oops"))))
    simulation.run()
    began = sorted(entry.created_at for entry in red(simulation).machines.values())
    assert began[0] < 10.0
    assert len(began) == 1 or began[1] > GIVEN_UP_S


def test_a_machine_the_provider_made_twice_is_ended_once() -> None:
    simulation = quiet_world(max_workers=1, min_workers=1)
    script(simulation, (0, lambda: red(simulation).next_create(creates_duplicate=True)))
    simulation.run()
    first, double = red(simulation).machines.values()
    assert first.name == double.name
    assert double.deleted_at - double.created_at < 30.0
    assert red(simulation).remaining_machine_ids == [first.id]


def test_a_machine_with_our_tags_and_no_worker_is_ended_after_its_grace() -> None:
    simulation = quiet_world(max_workers=1)

    def plant() -> None:
        red(simulation).machines["stray"] = MachineRecord("stray", "red-0-formerly", "red", 0, 0.0, running_at=0.0)

    script(simulation, (0, plant))
    simulation.run()
    orphan = red(simulation).machines["stray"]
    assert LIST_AGE_S <= orphan.deleted_at < LIST_AGE_S + 15.0
    # While it was billed, there was no room for another.
    (other,) = (entry for entry in red(simulation).machines.values() if entry.id != "stray")
    assert other.created_at >= orphan.deleted_at


def test_a_create_of_a_leader_that_lost_its_lead_does_not_exceed_the_maximum() -> None:
    # The call is under way while another takes over, and takes effect almost as late as it may.
    simulation = quiet_world(max_workers=1, orchestrators=2, spawn_timeout_s=150.0)
    script(
        simulation,
        (0, lambda: red(simulation).next_create(duration_s=CALL_TIMEOUT_S - 1.0)),
        (5.0, lambda: next(o for o in simulation.orchestrators if o.process.name == simulation.checker.leader).kill()),
    )
    simulation.run()
    assert len(red(simulation).machines) == 1
    assert simulation.checker.takeovers == 2


def test_a_creation_that_had_to_wait_for_its_turn_is_not_begun_when_others_no_longer_count_on_it() -> None:
    """Sixteen calls at a time, each of 50 s: the last of 40 would begin when its row is about to be given up."""
    simulation = quiet_world(
        max_workers=40, min_workers=40, max_changes_per_cycle=40, spawn_timeout_s=200.0, lasts_s=600.0, arrivals=()
    )

    def slow_down() -> None:
        for _ in range(200):
            red(simulation).next_create(duration_s=50.0)

    async def refused() -> None:
        codes = {worker.code for worker in await simulation.store.workers(include_terminated=True)}
        assert "NOT_BEGUN" in codes
        assert len(red(simulation).billed_machines()) == 40
        red(simulation)._creates.clear()

    script(simulation, (0, slow_down), (599.0, refused))
    assert simulation.run().most_billed == {"red": 40}


class _FreezesAfterDeciding:
    """Stands still from the moment its first hiring is written down, for longer than its lease."""

    def __init__(self) -> None:
        self.decided: set[str] = set()
        self.created: list[str] = []

    def wrap(self, orchestrator: SimulatedOrchestrator, service: Any) -> Any:
        return _Wrapped(self, orchestrator, service)


class _Wrapped:
    def __init__(self, fate: _FreezesAfterDeciding, orchestrator: SimulatedOrchestrator, service: Any) -> None:
        self._fate = fate
        self._make_orchestrator = orchestrator
        self._service = service

    def __getattr__(self, name: str) -> Any:
        return getattr(self._service, name)

    async def commit_plan(self, *arguments: Any) -> Any:
        committed = await self._service.commit_plan(*arguments)
        if committed.granted and not self._fate.decided:
            self._fate.decided = set(committed.granted)
            process = self._make_orchestrator.process
            assert process is not None
            process.freeze()
            asyncio.get_running_loop().call_later(3 * TTL_S, process.thaw)
            await process.checkpoint()
        return committed

    async def create(self, request: MachineRequest) -> Machine:
        self._fate.created.append(request.name)
        machine: Machine = await self._service.create(request)
        return machine


def test_a_leader_that_stood_still_after_deciding_hires_nobody_when_it_goes_on() -> None:
    fate = _FreezesAfterDeciding()
    simulation = quiet_world(max_workers=2, orchestrators=2)
    simulation.wrap = fate.wrap

    async def is_told() -> None:
        rows = {worker.id: worker for worker in await simulation.store.workers(include_terminated=True)}
        assert {rows[id_].code for id_ in fate.decided} == {"LEASE_LOST"}

    script(simulation, (250.0, is_told))
    simulation.run()
    assert len(fate.decided) == 2
    assert fate.created
    assert not fate.decided & set(fate.created)
    assert simulation.checker.takeovers >= 2


# --------------------------------------------------------------------------------------------------------- deleting


@pytest.mark.parametrize(
    "fate",
    [
        {"raises": Unavailable("503")},
        {"raises": Unavailable("503"), "takes_effect": False},
        {"raises": KeyError("oops"), "takes_effect": False},
        {"never_answers": True},
        {"never_answers": True, "takes_effect": False},
        {"duration_s": CALL_TIMEOUT_S + 10.0},
        {"answer_delay_s": CALL_TIMEOUT_S + 10.0},
    ],
    ids=lambda fate: ", ".join(fate),
)
def test_a_deletion_that_went_wrong_is_asked_for_again(fate: dict[str, Any]) -> None:
    simulation = quiet_world(max_workers=1)
    script(simulation, (0, lambda: red(simulation).next_delete(**fate)))
    simulation.run()
    assert red(simulation).remaining_machine_ids == []


def test_a_deletion_that_takes_its_time_delays_nobody() -> None:
    """While one machine does not end, another worker is hired, promoted and works, and the lead is kept."""
    simulation = quiet_world(max_workers=2, arrivals=((1.0, 1), (70.0, 1)), lasts_s=200.0)

    def dawdle() -> None:
        red(simulation).next_delete(duration_s=CALL_TIMEOUT_S - 5.0)

    script(simulation, (0, dawdle))
    simulation.run()
    first, second = red(simulation).machines.values()
    assert first.deleted_at - second.created_at > 20.0
    assert second.created_at < 80.0
    assert all(len(task.claims) == 1 for task in simulation.checker.tasks.values())
    assert red(simulation).delete_calls == 2
    assert simulation.checker.longest_leaderless_s <= 0.0


def test_a_machine_that_may_not_be_deleted_keeps_its_slot() -> None:
    simulation = quiet_world(max_workers=1, arrivals=((1.0, 1), (100.0, 1)), lasts_s=200.0)

    def deny() -> None:
        for _ in range(8):
            red(simulation).next_delete(raises=Refused("denied"), takes_effect=False)

    script(simulation, (0, deny))
    simulation.run()
    first, second = red(simulation).machines.values()
    assert second.created_at >= first.deleted_at
    assert red(simulation).delete_calls >= 8


# ---------------------------------------------------------------------------------------------------------- listing


@pytest.mark.parametrize(
    "fate", [{"raises": Unavailable("503")}, {"raises": KeyError("oops")}, {"never_answers": True}], ids=str
)
def test_unknown_is_not_absent(fate: dict[str, Any]) -> None:
    """No list for ten minutes: nobody is ended for it, and everybody goes on working."""
    simulation = quiet_world(
        max_workers=2, min_workers=2, arrivals=tuple((10.0 * n, 1) for n in range(1, 55)), lasts_s=700.0
    )

    def fail_lists() -> None:
        for _ in range(400):
            red(simulation).next_list(**fate)

    def see_again() -> None:
        red(simulation)._lists.clear()

    script(simulation, (30.0, fail_lists), (650.0, see_again))
    simulation.run()
    assert len(red(simulation).machines) == 2
    assert red(simulation).delete_calls == 0
    assert len(simulation.checker.tasks) == 54


def test_a_list_that_is_as_old_as_it_may_be_ends_nobody() -> None:
    simulation = quiet_world(max_workers=2, min_workers=2, lasts_s=100.0)

    def age() -> None:
        for _ in range(60):
            red(simulation).next_list(stale_by_s=LIST_AGE_S)

    script(simulation, (0, age))
    simulation.run()
    assert len(red(simulation).machines) == 2


def test_a_machine_made_while_another_leader_listed_is_not_missing() -> None:
    """The successor's list was asked for before the machine of its predecessor became known, and answered after."""
    simulation = quiet_world(
        is_cloud=False, max_workers=1, min_workers=1, orchestrators=2, ttl_s=5.0, task_s=(50.0, 60.0)
    )

    def slow_down() -> None:
        red(simulation).next_list()
        red(simulation).next_create(duration_s=8.0)
        red(simulation).next_list(duration_s=4.5)

    script(simulation, (0, slow_down))
    simulation.run()
    assert len(red(simulation).machines) == 1


def test_a_slow_list_says_nothing_about_what_came_after_it_was_asked_for() -> None:
    """It was asked for before a late machine came, and answered after."""
    simulation = quiet_world(max_workers=1, min_workers=1, spawn_timeout_s=200.0)
    script(
        simulation,
        (0, lambda: red(simulation).next_create(duration_s=CALL_TIMEOUT_S - 1.0, takes_effect_late_s=LATE_S)),
        (0, lambda: simulation.next_worker(boots_s=60.0)),
        (85.5, lambda: red(simulation).next_list(duration_s=LIST_SHARE * TTL_S - 0.5)),
    )
    simulation.run()
    (entry,) = red(simulation).machines.values()
    assert 85.0 < entry.created_at < GIVEN_UP_S


def test_lists_that_take_longer_than_a_lease_stop_no_cycle() -> None:
    """Of two orchestrators, whoever leads gives up on the list in time to keep the lead, and goes on without it."""
    simulation = quiet_world(
        max_workers=2, orchestrators=2, arrivals=tuple((20.0 * n, 1) for n in range(1, 20)), lasts_s=500.0
    )

    def slow_down() -> None:
        for _ in range(400):
            red(simulation).next_list(duration_s=1.3 * TTL_S)

    def all_done() -> None:
        assert simulation.checker.unfinished_tasks() == []
        assert simulation.checker.plans > 490 / (LIST_SHARE * TTL_S) - 5
        red(simulation)._lists.clear()

    script(simulation, (0, slow_down), (490.0, all_done))
    simulation.run()
    assert simulation.checker.takeovers == 1
    assert "list machines failed" in simulation.trace.text(limit=None)


# ---------------------------------------------------------------------------------------------------------- workers


@pytest.mark.parametrize("vanishes", [False, True], ids=["exits", "vanishes"])
@pytest.mark.parametrize("is_cloud", [False, True], ids=["process", "cloud"])
def test_the_task_of_a_worker_that_dies_goes_to_another(vanishes: bool, is_cloud: bool) -> None:
    simulation = quiet_world(max_workers=1, is_cloud=is_cloud, arrivals=((1.0, 1),))
    script(simulation, (0, lambda: simulation.next_worker(boots_s=2.0, crashes_at_s=8.0, vanishes=vanishes)))
    simulation.run()
    (task,) = simulation.checker.tasks.values()
    assert len(task.claims) == 2
    assert len(red(simulation).machines) == 2


def test_a_worker_that_comes_back_too_late_finds_its_task_with_another() -> None:
    simulation = quiet_world(max_workers=2, min_workers=2, arrivals=((20.0, 1),), lasts_s=400.0, task_s=(20.0, 25.0))

    def stop_time() -> None:
        simulation.next_worker(boots_s=1.0, freezes_at_s=40.0, frozen_s=60.0)
        simulation.next_worker(boots_s=3.0, freezes_at_s=41.0, frozen_s=0.0)
        # Its machine cannot be deleted for a while, so it does come back.
        for _ in range(8):
            red(simulation).next_delete(raises=Unavailable("503"), takes_effect=False)

    script(simulation, (0, stop_time))
    assert simulation.run().late_results == 1
    (task,) = simulation.checker.tasks.values()
    assert task.accepted == task.claims[-1][1]


def test_workers_work_on_while_nobody_orchestrates() -> None:
    simulation = quiet_world(
        max_workers=2, min_workers=2, arrivals=tuple((10.0 * n, 1) for n in range(1, 40)), lasts_s=500.0
    )

    def all_done_without_them() -> None:
        assert not any(orchestrator.is_running for orchestrator in simulation.orchestrators)
        assert simulation.checker.unfinished_tasks() == []

    script(simulation, (50.0, lambda: simulation.orchestrators[0].kill()), (480.0, all_done_without_them))
    simulation.run()
    assert len(red(simulation).machines) == 2


def test_a_result_survives_an_outage_of_the_database() -> None:
    simulation = quiet_world(max_workers=1, min_workers=1, arrivals=((20.0, 1),), task_s=(30.0, 30.0))

    def away(is_away: bool) -> None:
        simulation.set_database_down(is_away)

    # Shorter than the heartbeat time-out: nobody may doubt the worker.
    script(simulation, (40.0, lambda: away(True)), (65.0, lambda: away(False)))
    simulation.run()
    (task,) = simulation.checker.tasks.values()
    assert len(task.claims) == 1
    assert len(red(simulation).machines) == 1


@pytest.mark.parametrize("outage_s", [35.0, 300.0])
def test_an_outage_that_silences_everybody_costs_nobody_their_machine(outage_s: float) -> None:
    simulation = quiet_world(
        max_workers=4, min_workers=4, arrivals=((20.0, 4),), task_s=(400.0, 420.0), lasts_s=600.0, stuck_timeout_s=900.0
    )
    script(
        simulation,
        (60.0, lambda: simulation.set_database_down(True)),
        (60.0 + outage_s, lambda: simulation.set_database_down(False)),
    )
    simulation.run()
    assert len(red(simulation).machines) == 4
    assert all(len(task.claims) == 1 for task in simulation.checker.tasks.values())


# ----------------------------------------------------------------------------------------------------------- draining


def test_a_busy_worker_that_should_end_may_finish() -> None:
    simulation = quiet_world(max_workers=1, arrivals=((1.0, 1),), task_s=(40.0, 45.0), stop_timeout_s=60.0)

    async def end() -> None:
        (worker,) = await simulation.store.workers()
        await simulation.drain_worker(worker.id)

    script(simulation, (20.0, end))
    simulation.run()
    (task,) = simulation.checker.tasks.values()
    assert len(task.claims) == 1


def test_a_busy_worker_that_does_not_finish_is_ended_at_its_deadline_and_not_before() -> None:
    simulation = quiet_world(max_workers=1, arrivals=((1.0, 1),), task_s=(200.0, 210.0), stop_timeout_s=60.0)

    async def end() -> None:
        (worker,) = await simulation.store.workers()
        await simulation.drain_worker(worker.id)

    script(simulation, (20.0, end))
    simulation.run()
    first, *_ = red(simulation).machines.values()
    assert 80.0 <= first.deleted_at < 80.0 + 15.0


def test_a_worker_that_ignores_the_wish_to_end_is_ended_when_it_is_idle() -> None:
    simulation = quiet_world(max_workers=1, arrivals=((1.0, 1),))
    script(simulation, (0, lambda: simulation.next_worker(boots_s=1.0, ignores_drain=True)))
    simulation.run()
    assert red(simulation).remaining_machine_ids == []


def test_a_fleet_whose_maximum_shrinks_lets_busy_workers_finish_and_never_grows_meanwhile() -> None:
    simulation = quiet_world(
        max_workers=4, arrivals=((1.0, 8),), task_s=(30.0, 35.0), lasts_s=200.0, stop_timeout_s=60.0
    )

    def shrink() -> None:
        simulation.orchestrators[0].kill()
        smaller = fleet_config(max_workers=1, stop_timeout_s=60.0)
        simulation.orchestrators[0].fleets["red"] = (smaller, red(simulation))
        simulation.orchestrators[0].start()

    script(simulation, (30.0, shrink))
    simulation.run()
    assert all(len(task.claims) == 1 for task in simulation.checker.tasks.values())
    later = [entry for entry in red(simulation).machines.values() if entry.created_at > 30.0]
    earlier = [entry for entry in red(simulation).machines.values() if entry.created_at <= 30.0]
    for entry in later:
        assert not any(other.deleted_at > entry.created_at for other in earlier)


# ----------------------------------------------------------------------------------------------------------- bad images

HOURS = 6


@pytest.mark.parametrize(
    ("spawn_timeout_s", "window_s"), [(20.0, 60.0), (60.0, 60.0), (120.0, 60.0)], ids=["fails fast", "as long", "slow"]
)
def test_a_bad_image_costs_a_bounded_number_of_launches(spawn_timeout_s: float, window_s: float) -> None:
    """However long a machine takes to fail, compared with the window in which failures are counted."""
    simulation = quiet_world(
        max_workers=4,
        arrivals=((1.0, 20),),
        lasts_s=HOURS * 3600.0,
        worker_faults=WorkerFaultPlan(never_joins=1.0),
        spawn_timeout_s=spawn_timeout_s,
        failure_window_s=window_s,
        restart_window_s=window_s,
    )

    async def is_held() -> None:
        (fleet,) = await simulation.store.fleets()
        assert fleet.hold is not None
        assert fleet.hold.code == "FAILURE_RATE"
        assert "SPAWNING_TIMEOUT" in fleet.hold.reason

    launched: list[int] = []

    async def count() -> None:
        launched.append(red(simulation).create_calls)

    script(simulation, (3000.0, is_held), (3600.0, count), (HOURS * 3600.0 - 1.0, count))
    simulation.run()
    first_hour, all_hours = launched
    # Enough to notice, a probe after each pause, and in the long run one an hour.
    assert first_hour <= 4 + 5 + 7
    assert all_hours - first_hour <= HOURS + 1


def test_a_slot_whose_workers_keep_breaking_is_given_up() -> None:
    simulation = quiet_world(
        max_workers=1,
        is_cloud=False,
        arrivals=((1.0, 1),),
        lasts_s=600.0,
        task_s=(50.0, 60.0),
        min_spawns_for_rate=100,
        max_restarts=3,
        restart_window_s=300.0,
        worker_faults=WorkerFaultPlan(crashes=1.0),
    )

    def doomed() -> None:
        for _ in range(10):
            simulation.next_worker(boots_s=1.0, crashes_at_s=3.0)

    async def is_given_up() -> None:
        (fleet,) = await simulation.store.fleets()
        assert fleet.failed_slots == (0,)

    def mend() -> None:
        # What a person does before the calm: mend it, then `windlass restart`.
        simulation.scripted_faults.clear()

    script(simulation, (0, doomed), (550.0, is_given_up), (590.0, mend))
    simulation.run()
    assert len([entry for entry in red(simulation).machines.values() if entry.created_at < 590.0]) == 4


# ------------------------------------------------------------------------------------------------------------ the bed


def test_a_world_in_which_nothing_fails_does_what_is_needed_and_no_more() -> None:
    simulation = quiet_world(max_workers=3, min_workers=1, arrivals=((1.0, 6),))
    report = simulation.run()
    assert report.most_billed == {"red": 3}
    assert len(red(simulation).machines) == 3
    assert all(len(task.claims) == 1 for task in simulation.checker.tasks.values())
    assert report.late_results == 0


@pytest.mark.parametrize("policy", ["threshold", "buffered", "clear-time"])
def test_under_constant_load_nobody_is_hired_or_let_go(policy: str) -> None:
    simulation = quiet_world(
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


class _Liar:
    """A provider that breaks its contract: it says that machines are gone that are not."""

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


def test_the_bed_notices_a_provider_that_lies() -> None:
    simulation = quiet_world(max_workers=1, arrivals=((1.0, 1), (100.0, 1)))
    simulation.make_provider = _Liar
    with pytest.raises(InvariantViolation, match="m0-red of red-0-.* is billed and no live worker has it"):
        simulation.run()


def test_the_bed_notices_a_store_that_accepts_what_was_lost() -> None:
    simulation = quiet_world(max_workers=2, min_workers=2, arrivals=((20.0, 1),), lasts_s=400.0, task_s=(40.0, 45.0))

    def forge() -> None:
        simulation.next_worker(boots_s=1.0, freezes_at_s=40.0, frozen_s=60.0)
        simulation.next_worker(boots_s=3.0, freezes_at_s=41.0, frozen_s=0.0)
        for _ in range(20):
            red(simulation).next_delete(raises=Unavailable("503"), takes_effect=False)
        honest = simulation.store._complete

        def accept_all(done: Any) -> bool:
            row = simulation.store.tables.tasks.rows[done.task_id]
            if row.status == "running":
                row.token = done.token
            return bool(honest(done))

        simulation.store._complete = accept_all

    script(simulation, (0, forge))
    with pytest.raises(InvariantViolation, match="accepted from .*, which does not have it"):
        simulation.run()


def test_the_bed_notices_a_task_that_is_lost() -> None:
    simulation = quiet_world(max_workers=1, arrivals=((1.0, 1),))

    def forge() -> None:
        simulation.next_worker(boots_s=2.0, crashes_at_s=8.0)
        simulation.store.tables.requeue_tasks_of = lambda *_: 0

    script(simulation, (0, forge))
    with pytest.raises(InvariantViolation, match=r"rest was not reached .* tasks \[1\] are not finished"):
        simulation.run()


def test_status_of_machines_is_as_old_as_the_list() -> None:
    entry = MachineRecord("m", "w", "red", 0, 10.0, running_at=20.0, exited_at=30.0, deleted_at=40.0)
    states = [(at, entry.is_billed(at) and entry.state(at)) for at in (5.0, 10.0, 20.0, 30.0, 40.0)]
    assert states == [
        (5.0, False),
        (10.0, MachineState.BOOTING),
        (20.0, MachineState.RUNNING),
        (30.0, MachineState.EXITED),
        (40.0, False),
    ]


# -------------------------------------------------------------------------------------------------------- evidence


def test_a_machine_that_fails_every_task_is_quarantined_and_loses_no_task() -> None:
    simulation = quiet_world(
        min_workers=4,
        max_workers=4,
        arrivals=((20.0, 60),),
        lasts_s=600.0,
        task_s=(10.0, 15.0),
        max_attempts=3,
        # So long that tasks fail on it for the last time before anybody looks.
        poll_interval_s=60.0,
        heartbeat_timeout_s=180.0,
    )
    script(simulation, (0, lambda: simulation.next_worker(boots_s=2.0, fails_tasks=True)))
    simulation.run()
    (culprit,) = simulation.checker.quarantined
    assert culprit == names(simulation)[0]
    tasks = simulation.checker.tasks.values()
    # It took more than its share, some of them until they were dead letters, and none is lost.
    assert sum(culprit in task.failed_attempts for task in tasks) > 20
    assert max(sum(worker_id == culprit for worker_id, _ in task.claims) for task in tasks) == 3
    assert all(task.accepted is not None for task in tasks)
    assert len(red(simulation).machines) == 5


def test_tasks_that_fail_everywhere_cost_one_machine_to_see_and_no_more() -> None:
    simulation = quiet_world(
        min_workers=3, max_workers=3, arrivals=((20.0, 30),), task_s=(1.0, 2.0), fails=1.0, max_attempts=3
    )
    simulation.run()
    assert len(simulation.checker.quarantined) == 1
    assert all(task.is_dead for task in simulation.checker.tasks.values())
    assert len(red(simulation).machines) == 4


def test_tasks_that_fail_everywhere_are_not_tried_again_in_every_hour_to_come() -> None:
    """Each has its attempts, and once those that a trial gives back."""
    simulation = quiet_world(
        min_workers=2,
        max_workers=2,
        arrivals=((20.0, 30),),
        task_s=(1.0, 2.0),
        fails=1.0,
        max_attempts=3,
        lasts_s=8 * 3600.0,
        poll_interval_s=60.0,
        heartbeat_interval_s=30.0,
        heartbeat_timeout_s=180.0,
    )
    simulation.run()
    tasks = simulation.checker.tasks.values()
    assert all(task.is_dead for task in tasks)
    # Three attempts, three that a trial gave back, and one that was interrupted when its worker was quarantined.
    assert max(len(task.claims) for task in tasks) <= 7
    # Whoever has a row behind it is replaced once; what follows finds nothing to fail.
    assert len(simulation.checker.quarantined) <= 4
    assert all(at < 5 * 3600.0 for at in (entry.created_at for entry in red(simulation).machines.values()))


def test_a_machine_without_a_gpu_takes_no_task_and_is_replaced() -> None:
    simulation = quiet_world(
        min_workers=1,
        max_workers=1,
        arrivals=((20.0, 5),),
        task_s=(1.0, 2.0),
        max_attempts=1,
        has_gpu=True,
        gpu_not_detected_timeout_s=60.0,
    )
    script(simulation, (0, lambda: simulation.next_worker(boots_s=2.0, has_no_gpu=True)))
    simulation.run()
    assert all(task.accepted is not None for task in simulation.checker.tasks.values())
    errors = [event.detail for event in simulation.store.tables.event_log.events if event.code == "WORKER_ERROR"]
    assert errors == [{"code": "GPU_NOT_DETECTED"}]


def test_the_only_worker_on_which_every_task_fails_is_replaced_to_see_how_they_fare_on_another() -> None:
    simulation = quiet_world(min_workers=1, max_workers=1, arrivals=((20.0, 20),), task_s=(1.0, 2.0), max_attempts=3)
    script(simulation, (0, lambda: simulation.next_worker(boots_s=2.0, fails_tasks=True)))
    simulation.run()
    assert simulation.checker.quarantined == names(simulation)[:1]
    assert all(task.accepted is not None for task in simulation.checker.tasks.values())
