"""The rare faults of a whole installation, the coverage of seeds, and the checks that see them."""

import asyncio
from functools import partial

import pytest

from support.memory_store.tables import Tables
from support.scripted_simulation import fault_free_simulation, red, script
from support.simulator import simulation, worlds
from support.simulator.campaign import run_campaign
from support.simulator.coverage import OUT_OF_REACH, Coverage, known_alert_codes, known_event_codes, known_pairs
from support.simulator.invariants import InvariantViolation
from support.simulator.loop import run
from support.simulator.processes import SimulatedProcess, track_processes
from support.simulator.runtime_workers import RuntimeWorker
from support.simulator.shrinking import Shrinker
from support.simulator.storms import Standby, copy_store, restore_store
from support.simulator.worlds import WORLDS, check_seed, make_simulation
from windlass.model.task import NewTask
from windlass.model.worker import WorkerStatus
from windlass.worker.delivery import Outbox

SEEDS = range(24)
# Faults of the whole installation that these seeds inject while a worker is busy.
BASELINE = (
    "orchestrator_dies_at_await", "failover", "clock_forward", "clock_back", "notification_lost", "reconfigured",
    "rolling_restart", "deployed", "bad_version", "budget_reached", "machines_taken",
    "outage", "list_failed", "control_call_unanswered",
)  # fmt: skip


def test_storms_keep_every_promise_and_meet_busy_workers() -> None:
    coverage = Coverage()
    for seed in SEEDS:
        coverage.add(check_seed("storm", seed).coverage)
    assert [fault for fault in BASELINE if not coverage.pairs["active busy", fault]] == []
    assert coverage.pairs["active busy", "worker_dies_at_await"] > 0
    assert len(known_pairs()) - len(coverage.uncovered_pairs()) >= 130
    assert {"BUDGET", "VERSION_REJECTED", "WAS_AWAY"} <= set(coverage.alerts)
    assert {"WORKER_SPAWNED", "WORKER_ERROR", "TASK_REQUEUED", "CLOCK_SET_BACK"} <= set(coverage.events)
    assert {"DEPLOY_STARTED", "DEPLOY_COMPLETE", "DEPLOY_ROLLED_BACK"} <= set(coverage.events)


def test_coverage_lists_pairs_and_codes_that_no_seed_met() -> None:
    coverage = Coverage()
    coverage.pairs["active busy", "failover"] = 2
    coverage.events["ALERT"] = 1
    coverage.alerts["BUDGET"] = 1
    coverage.holds["FAILURE_RATE"] = 3
    report = coverage.report()
    assert f"worker state x fault: 1 of {len(known_pairs())} pairs covered" in report
    assert "not covered: spawning x failover" in report
    assert "not covered: active busy x failover" not in report
    assert f"event codes: 1 of {len(known_event_codes())} covered" in report
    assert "not covered: WORKER_TERMINATED" in report
    assert f"alert and hold codes: 2 of {len(known_alert_codes())} covered" in report
    assert "not covered: TOO_MANY_DEAD\n" in report
    assert "not covered: ENGINE_SILENT (not part of these worlds)" in report
    assert "holds: FAILURE_RATE 3" in report


def test_known_codes_are_those_of_the_source() -> None:
    assert {"WORKER_SPAWNED", "TASK_FAILED", "WORKER_RESUMED", "CLOCK_SET_BACK", "DEPLOY_ROLLED_BACK"} <= set(
        known_event_codes()
    )
    assert len(known_event_codes()) >= 39
    assert set(known_event_codes()) | set(known_alert_codes()) > OUT_OF_REACH


@pytest.mark.parametrize("world", WORLDS)
def test_every_world_has_fleets_with_the_default_policy(world: str) -> None:
    scenarios = [make_simulation(world, seed).scenario for seed in range(30)]
    fleets = [fleet for scenario in scenarios for fleet in scenario.fleets.values()]
    adaptive = sum(fleet.config.policy == "adaptive" for fleet in fleets)
    assert len(fleets) / 6 < adaptive < len(fleets) / 2


def test_limit_of_a_reload_holds_again_when_its_calls_have_ended() -> None:
    simulation = fault_free_simulation(max_workers=1, arrivals=((1.0, 9),), lasts_s=900.0)
    config = simulation.scenario.fleets["red"].config
    limits: dict[float, int] = {}

    async def reload(max_workers: int) -> None:
        await simulation.reconfigure("red", config.model_copy(update={"max_workers": max_workers}))

    def note() -> None:
        limits[simulation.now()] = simulation.checker.fleets["red"].max_workers

    script(
        simulation,
        (20.0, lambda: reload(6)), (21.0, lambda: reload(1)), (22.0, note), (400.0, note),
    )  # fmt: skip
    simulation.run()
    assert limits == {22.0: 6, 400.0: 1}


@pytest.mark.parametrize("first", [0, 10])
def test_real_worker_runtime_keeps_every_promise(first: int) -> None:
    coverage = Coverage()
    for seed in range(first, first + 10):
        simulation = check_seed("runtime", seed)
        assert {type(worker) for worker in simulation.checker.workers_by_id.values()} <= {RuntimeWorker}
        coverage.add(simulation.coverage)
    assert coverage.pairs["active busy", "worker_call_unanswered"] > 0
    assert {"WORKER_REGISTERED", "WORKER_ACTIVATED", "TASK_REQUEUED"} <= set(coverage.events)


def test_defect_of_the_worker_runtime_breaks_a_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its heartbeats do not list the claims that it holds."""
    monkeypatch.setattr(Outbox, "held_claims", lambda _: [])
    with pytest.raises(InvariantViolation, match=r"promise 2 broken: task \d+ taken from [\w-]+, which is healthy"):
        for seed in range(10):
            make_simulation("runtime", seed).run()


def test_campaign_reports_broken_seeds_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tables, "requeue_tasks_of", lambda *_: 0)
    # A lost task is lost after ten minutes as well as after four hours.
    monkeypatch.setattr(simulation, "REST_LIMIT_S", 600.0)
    monkeypatch.setattr(worlds, "Shrinker", partial(Shrinker, max_runs=3))
    written: list[str] = []
    runs, broken, coverage = run_campaign(["plain"], 1, first=2, write=written.append)
    assert runs == {"plain": 1}
    assert broken == [("plain", 2)]
    assert written[0].startswith("BROKEN plain 2\npromise 1 broken")
    assert coverage.pairs


def test_failover_loses_only_the_last_transactions() -> None:
    simulation = fault_free_simulation(arrivals=(), lasts_s=60.0)

    async def fail_over() -> None:
        await simulation.store.pause_fleet("red", True)
        kept = await simulation.store.enqueue(NewTask("red"))
        saved = copy_store(simulation.store)
        lost = await simulation.store.enqueue(NewTask("red"))
        assert set(simulation.store.tables.tasks.rows) == {kept, lost}
        restore_store(simulation.store, saved)
        assert set(simulation.store.tables.tasks.rows) == {kept}
        await simulation.store.cancel_task(kept, "test")

    script(simulation, (5.0, fail_over))
    simulation.run()


def test_worker_whose_row_a_failover_lost_drains_and_its_machine_is_deleted() -> None:
    simulation = fault_free_simulation(max_workers=1, arrivals=((12.0, 1), (100.0, 1)))
    simulation.next_worker(boots_s=18.0)  # it registers when its machine was not orphaned for long
    standby: list[Standby] = []
    script(
        simulation,
        (11.0, lambda: standby.append(simulation.storm.save())),
        (30.0, lambda: simulation.storm.restore(standby[0])),
    )
    simulation.run()
    first, *_ = red(simulation).machines.values()
    row = simulation.store.tables.workers.rows[first.name]
    assert (row.slot, row.code, row.status) == (None, "NO_SLOT", WorkerStatus.TERMINATED)
    assert first.deleted_at < 100.0


def test_task_without_a_row_is_detected_at_the_next_tick() -> None:
    simulation = fault_free_simulation(max_workers=1, arrivals=((1.0, 1),))
    script(simulation, (20.0, lambda: simulation.store.tables.tasks.rows.clear()))
    with pytest.raises(InvariantViolation, match=r"promise 1 broken: task 1 was enqueued and has no row"):
        simulation.run()


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_process_dies_at_the_chosen_await(steps: int) -> None:
    reached: list[int] = []

    async def suspend() -> None:
        for number in range(1, 5):
            reached.append(number)
            await asyncio.sleep(1.0)

    async def main() -> None:
        track_processes(asyncio.get_running_loop())
        process = SimulatedProcess("p")
        process.steps_left, process.on_last_step = steps, process.kill
        process.start(suspend())
        await asyncio.sleep(10.0)
        assert process.is_dead

    run(main())
    assert reached == list(range(1, steps + 1))
