"""One scripted fault of workers, tasks or the database per test. No other fault occurs."""

import pytest

from support.scripted_simulation import fault_free_simulation, red, script
from support.simulator.scenario import WorkerFaultPlan, fleet_config
from windlass.model.errors import (
    Unavailable,
)

# -------------------------------------------------------------------------------------------------- crashes and outages


@pytest.mark.parametrize("vanishes", [False, True], ids=["machine exits", "machine vanishes"])
@pytest.mark.parametrize("is_cloud", [False, True], ids=["local", "cloud"])
def test_task_of_crashed_worker_is_requeued(vanishes: bool, is_cloud: bool) -> None:
    simulation = fault_free_simulation(max_workers=1, is_cloud=is_cloud, arrivals=((1.0, 1),))
    script(simulation, (0, lambda: simulation.next_worker(boots_s=2.0, crashes_at_s=8.0, vanishes=vanishes)))
    simulation.run()
    (task,) = simulation.checker.tasks.values()
    assert len(task.claims) == 2
    assert len(red(simulation).machines) == 2


def test_result_of_thawed_worker_is_rejected_after_requeue() -> None:
    simulation = fault_free_simulation(
        max_workers=2, min_workers=2, arrivals=((20.0, 1),), lasts_s=400.0, task_s=(20.0, 25.0)
    )

    def freeze_worker() -> None:
        simulation.next_worker(boots_s=1.0, freezes_at_s=40.0, frozen_s=60.0)
        simulation.next_worker(boots_s=3.0, freezes_at_s=41.0, frozen_s=0.0)
        # Its machine cannot be deleted for a while, so the worker returns.
        for _ in range(8):
            red(simulation).next_delete(raises=Unavailable("503"), takes_effect=False)

    script(simulation, (0, freeze_worker))
    assert simulation.run().late_results == 1
    (task,) = simulation.checker.tasks.values()
    assert task.accepted == task.claims[-1][1]


def test_workers_continue_without_orchestrator() -> None:
    simulation = fault_free_simulation(
        max_workers=2, min_workers=2, arrivals=tuple((10.0 * n, 1) for n in range(1, 40)), lasts_s=500.0
    )

    def check_progress() -> None:
        assert not any(orchestrator.is_running for orchestrator in simulation.orchestrators)
        assert simulation.checker.unfinished_tasks() == []

    script(simulation, (50.0, lambda: simulation.orchestrators[0].kill()), (480.0, check_progress))
    simulation.run()
    assert len(red(simulation).machines) == 2


def test_result_is_delivered_after_database_outage() -> None:
    simulation = fault_free_simulation(max_workers=1, min_workers=1, arrivals=((20.0, 1),), task_s=(30.0, 30.0))

    def away(is_away: bool) -> None:
        simulation.set_database_down(is_away)

    # Shorter than the heartbeat timeout, so the worker must not be failed.
    script(simulation, (40.0, lambda: away(True)), (65.0, lambda: away(False)))
    simulation.run()
    (task,) = simulation.checker.tasks.values()
    assert len(task.claims) == 1
    assert len(red(simulation).machines) == 1


@pytest.mark.parametrize("outage_s", [35.0, 300.0])
def test_database_outage_deletes_no_machine(outage_s: float) -> None:
    simulation = fault_free_simulation(
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


# ------------------------------------------------------------------------------------------------------------- draining


def test_draining_worker_finishes_its_task() -> None:
    simulation = fault_free_simulation(max_workers=1, arrivals=((1.0, 1),), task_s=(40.0, 45.0), stop_timeout_s=60.0)

    async def drain() -> None:
        (worker,) = await simulation.store.workers()
        await simulation.drain_worker(worker.id)

    script(simulation, (20.0, drain))
    simulation.run()
    (task,) = simulation.checker.tasks.values()
    assert len(task.claims) == 1


def test_busy_worker_is_deleted_at_its_drain_deadline() -> None:
    simulation = fault_free_simulation(max_workers=1, arrivals=((1.0, 1),), task_s=(200.0, 210.0), stop_timeout_s=60.0)

    async def drain() -> None:
        (worker,) = await simulation.store.workers()
        await simulation.drain_worker(worker.id)

    script(simulation, (20.0, drain))
    simulation.run()
    first, *_ = red(simulation).machines.values()
    assert 80.0 <= first.deleted_at < 80.0 + 15.0


def test_worker_that_ignores_drain_is_deleted_when_idle() -> None:
    simulation = fault_free_simulation(max_workers=1, arrivals=((1.0, 1),))
    script(simulation, (0, lambda: simulation.next_worker(boots_s=1.0, ignores_drain=True)))
    simulation.run()
    assert red(simulation).remaining_machine_ids == []


def test_lower_max_workers_lets_busy_workers_finish() -> None:
    simulation = fault_free_simulation(
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
    later = [machine for machine in red(simulation).machines.values() if machine.created_at > 30.0]
    earlier = [machine for machine in red(simulation).machines.values() if machine.created_at <= 30.0]
    for machine in later:
        assert not any(other.deleted_at > machine.created_at for other in earlier)


# ----------------------------------------------------------------------------------------------------------- bad images


HOURS = 6


@pytest.mark.parametrize(
    ("spawn_timeout_s", "window_s"),
    [
        pytest.param(20.0, 60.0, id="timeout shorter than the window"),
        pytest.param(60.0, 60.0, id="timeout as long as the window"),
        pytest.param(120.0, 60.0, id="timeout longer than the window"),
    ],
)
def test_bad_image_costs_bounded_number_of_spawns(spawn_timeout_s: float, window_s: float) -> None:
    """For spawn timeouts shorter than, equal to and longer than the window in which failures are counted."""
    simulation = fault_free_simulation(
        max_workers=4,
        arrivals=((1.0, 20),),
        lasts_s=HOURS * 3600.0,
        worker_faults=WorkerFaultPlan(never_joins=1.0),
        spawn_timeout_s=spawn_timeout_s,
        failure_window_s=window_s,
        restart_window_s=window_s,
    )

    async def check_hold() -> None:
        (fleet,) = await simulation.store.fleets()
        assert fleet.hold is not None
        assert fleet.hold.code == "FAILURE_RATE"
        assert "SPAWNING_TIMEOUT" in fleet.hold.reason

    spawns: list[int] = []

    async def count() -> None:
        spawns.append(red(simulation).create_calls)

    script(simulation, (3000.0, check_hold), (3600.0, count), (HOURS * 3600.0 - 1.0, count))
    simulation.run()
    first_hour, all_hours = spawns
    # The spawns that trip the hold, one probe after each hold, and in the long run one probe per hour.
    assert first_hour <= 4 + 5 + 7
    assert all_hours - first_hour <= HOURS + 1


def test_slot_fails_after_max_restarts() -> None:
    simulation = fault_free_simulation(
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

    def crash_workers() -> None:
        for _ in range(10):
            simulation.next_worker(boots_s=1.0, crashes_at_s=3.0)

    async def check_failed_slot() -> None:
        (fleet,) = await simulation.store.fleets()
        assert fleet.failed_slots == (0,)

    def fix_image() -> None:
        # The operator fixes the image; the simulation then restarts the slots.
        simulation.scripted_faults.clear()

    script(simulation, (0, crash_workers), (550.0, check_failed_slot), (590.0, fix_image))
    simulation.run()
    assert len([machine for machine in red(simulation).machines.values() if machine.created_at < 590.0]) == 4


# ----------------------------------------------------------------------------------------------------------- quarantine


def test_worker_that_fails_every_task_is_quarantined_without_task_loss() -> None:
    simulation = fault_free_simulation(
        min_workers=4,
        max_workers=4,
        arrivals=((20.0, 60),),
        lasts_s=600.0,
        task_s=(10.0, 15.0),
        max_attempts=3,
        # Tasks use up their attempts before the next cycle.
        poll_interval_s=60.0,
        heartbeat_timeout_s=180.0,
    )
    script(simulation, (0, lambda: simulation.next_worker(boots_s=2.0, fails_tasks=True)))
    simulation.run()
    (quarantined,) = simulation.checker.quarantined
    assert quarantined == next(iter(red(simulation).machines.values())).name
    tasks = simulation.checker.tasks.values()
    # It claimed more than its share, and some of its tasks became dead letters. None is lost.
    assert sum(quarantined in task.failed_on for task in tasks) > 20
    assert max(sum(worker_id == quarantined for worker_id, _ in task.claims) for task in tasks) == 3
    assert all(task.accepted is not None for task in tasks)
    assert len(red(simulation).machines) == 5


def test_tasks_that_fail_everywhere_quarantine_one_worker() -> None:
    simulation = fault_free_simulation(
        min_workers=3, max_workers=3, arrivals=((20.0, 30),), task_s=(1.0, 2.0), fails=1.0, max_attempts=3
    )
    simulation.run()
    assert len(simulation.checker.quarantined) == 1
    assert all(task.is_dead for task in simulation.checker.tasks.values())
    assert len(red(simulation).machines) == 4


def test_tasks_that_fail_everywhere_are_not_retried_forever() -> None:
    """Each task has its attempts, and once those that a quarantine refunds."""
    simulation = fault_free_simulation(
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
    # Three attempts, three that were refunded, and one that was interrupted when its worker was quarantined.
    assert max(len(task.claims) for task in tasks) <= 7
    # Each worker with enough failures in a row is replaced once. Later workers find no tasks to fail.
    assert len(simulation.checker.quarantined) <= 4
    assert all(at < 5 * 3600.0 for at in (machine.created_at for machine in red(simulation).machines.values()))


def test_worker_without_gpu_claims_no_task_and_is_replaced() -> None:
    simulation = fault_free_simulation(
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


def test_only_worker_is_replaced_when_every_task_fails_on_it() -> None:
    simulation = fault_free_simulation(
        min_workers=1, max_workers=1, arrivals=((20.0, 20),), task_s=(1.0, 2.0), max_attempts=3
    )
    script(simulation, (0, lambda: simulation.next_worker(boots_s=2.0, fails_tasks=True)))
    simulation.run()
    assert simulation.checker.quarantined == [next(iter(red(simulation).machines.values())).name]
    assert all(task.accepted is not None for task in simulation.checker.tasks.values())
