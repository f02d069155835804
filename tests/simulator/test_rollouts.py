"""Rollouts in virtual time, with the invariants of every simulation: no lost task, never more than max machines.

The version of a fleet is a value that the test changes. Workers of a bad version have the faults of the test.
"""

import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from support.hetzner_histories import HetznerHistory, on_hetzner
from support.simulator.scenario import FleetScenario, Scenario, draw_scenario, fleet_config
from support.simulator.simulation import Simulation
from support.simulator.workers import TaskProfile, WorkerFaults
from windlass.model.rollout import Rollout, RolloutStatus
from windlass.model.worker import WorkerStatus

SEEDS = int(os.environ.get("WINDLASS_SEEDS", "0")) or 12
FIRST = int(os.environ.get("WINDLASS_FIRST_SEED", "0"))
HOUR_S = 3600.0
PRICE = 6_000


def rollout_simulation(
    *, unit_s: int = 1, lasts_s: float = 1800.0, deploy_at_s: float = 300.0, surge: int = 0, max_unavailable: int = 0,
    tasks: int = 200, arrivals: tuple[tuple[float, int], ...] = (), on: type[Simulation] = Simulation, **config: Any,
) -> Simulation:  # fmt: skip
    """One fleet of four workers and up to six, with a steady stream of tasks. Version "a" is deployed over by "b"."""
    arrivals = arrivals or tuple((10.0 * number, 2) for number in range(1, tasks))
    settings = {"min_workers": 4, "max_workers": 6, "poll_interval_s": 10.0} | config
    fleet = FleetScenario(
        config=fleet_config(**settings),
        price_micros_per_hour=PRICE if unit_s > 1 else None,
        billing_unit_s=unit_s,
        tasks=TaskProfile(duration_s=(5.0, 15.0)),
        arrivals=arrivals,
    )
    if on is HetznerHistory:
        fleet = on_hetzner(fleet)
    simulation = on(Scenario(0, {"red": fleet}, faults_end_s=lasts_s))
    simulation.versions["red"] = "a"

    async def deploy() -> None:
        simulation.versions["red"] = "b"
        await simulation.store.request_deploy("red", surge, max_unavailable, is_immediate=False)

    simulation.on_ready = lambda _: simulation.schedule(deploy_at_s, deploy)
    return simulation


def rollout_of(simulation: Simulation) -> Rollout:
    rollout = simulation.store.tables.fleets["red"].planner_state.rollout
    assert rollout is not None
    return rollout


def workers_of(simulation: Simulation, fingerprint: str) -> list[Any]:
    rows = simulation.store.tables.workers.rows.values()
    return [row for row in rows if row.slot is not None and row.spawned.fingerprint == fingerprint]


def watch_active(simulation: Simulation, from_s: float, until_s: float, step_s: float = 2.0) -> list[int]:
    """The number of active workers at regular moments."""
    found: list[int] = []

    def sample_at(moment_s: float) -> Callable[[], Awaitable[None]]:
        async def sample() -> None:
            rows = simulation.store.tables.workers.not_terminated.values()
            found.append(sum(row.status is WorkerStatus.ACTIVE for row in rows))

        return sample

    before = simulation.on_ready

    def on_ready(ready: Simulation) -> None:
        before(ready)
        moment_s = from_s
        while moment_s < until_s:
            ready.schedule(moment_s, sample_at(moment_s))
            moment_s += step_s

    simulation.on_ready = on_ready
    return found


@pytest.mark.parametrize(("surge", "max_unavailable", "missing"), [(0, 0, 0), (2, 0, 0), (0, 1, 1), (0, 2, 2)])
def test_rollout_keeps_the_availability_that_was_asked_for(surge: int, max_unavailable: int, missing: int) -> None:
    simulation = rollout_simulation(surge=surge, max_unavailable=max_unavailable)
    active = watch_active(simulation, 290.0, 1500.0)
    report = simulation.run()
    assert rollout_of(simulation).status is RolloutStatus.COMPLETE, simulation.trace.text()
    assert report.most_billed["red"] <= 6
    assert min(active) >= 4 - missing
    assert all(row.code == "DEPLOY" for row in workers_of(simulation, "a"))


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(WorkerFaults(crashes_at_s=3.0), id="crashes at start"),
        pytest.param(WorkerFaults(never_joins=True), id="never joins"),
        pytest.param(WorkerFaults(fails_tasks=True), id="fails every task"),
    ],
)
def test_bad_version_is_rolled_back_and_old_workers_stay(faults: WorkerFaults) -> None:
    simulation = rollout_simulation(lasts_s=3600.0, spawn_timeout_s=60.0)
    simulation.version_faults["b"] = faults
    active = watch_active(simulation, 290.0, 3000.0)

    async def restore() -> None:
        assert rollout_of(simulation).status is RolloutStatus.ROLLED_BACK, rollout_of(simulation)
        live = [row for row in workers_of(simulation, "a") if row.status is WorkerStatus.ACTIVE]
        assert len(live) == 4, "every old worker stays"
        assert len(workers_of(simulation, "b")) <= 3, "a bad version costs few launches"
        simulation.versions["red"] = "a"

    before = simulation.on_ready

    def on_ready(ready: Simulation) -> None:
        before(ready)
        ready.schedule(3000.0, restore)

    simulation.on_ready = on_ready
    simulation.run()
    assert min(active) >= 4
    assert simulation.store.tables.fleets["red"].planner_state.hold is None


def idle_after_rollback(*, restores_settings: bool) -> tuple[Simulation, list[int]]:
    """A bad version, then two hours without a task, then tasks again. min_workers is 0."""
    # Enough for more than one worker.
    times = (*range(10, 1200, 10), *range(9000, 9600, 10))
    simulation = rollout_simulation(
        arrivals=tuple((float(at), 3) for at in times),
        lasts_s=3 * HOUR_S,
        min_workers=0,
        idle_timeout_s=60.0,
        scale_down_grace_s=30.0,
    )
    simulation.restores_settings = restores_settings
    simulation.version_faults["b"] = WorkerFaults(fails_tasks=True)
    return simulation, watch_active(simulation, 1.5 * HOUR_S, 2.4 * HOUR_S, 60.0)


def test_fleet_that_cannot_restore_settings_keeps_idle_old_workers() -> None:
    simulation, active = idle_after_rollback(restores_settings=False)
    simulation.run()
    assert min(active) >= 1, "they could not be spawned again"


def test_fleet_that_restores_settings_spawns_the_former_version() -> None:
    simulation, active = idle_after_rollback(restores_settings=True)
    before = simulation.on_ready

    async def look() -> None:
        rollout, state = rollout_of(simulation), simulation.store.tables.fleets["red"].planner_state
        assert rollout.status is RolloutStatus.ROLLED_BACK
        assert rollout.ended_at is not None
        assert (rollout.changes, state.fingerprint, state.hold) == (("image",), "a", None)
        for fingerprint, is_spawned in (("a", True), ("b", False)):
            later = [row for row in workers_of(simulation, fingerprint) if row.created_at > rollout.ended_at]
            assert bool(later) is is_spawned

    def on_ready(ready: Simulation) -> None:
        before(ready)
        ready.schedule(2.7 * HOUR_S, look)

    simulation.on_ready = on_ready
    simulation.run()
    assert min(active) == 0, "idle workers drain as ever"


def test_billed_hours_are_used_up_before_old_machines_go() -> None:
    simulation = rollout_simulation(unit_s=3600, lasts_s=2 * HOUR_S, deploy_at_s=600.0, tasks=700)
    simulation.run()
    assert rollout_of(simulation).status is RolloutStatus.COMPLETE, simulation.trace.text()
    old = {row.id for row in workers_of(simulation, "a")}
    machines = [m for m in simulation.clouds["red"].machines.values() if m.name in old]
    used = [(machine.deleted_at - machine.created_at) / HOUR_S for machine in machines]
    # Workers that started together cannot all be replaced within one window. None drains in the first half of its hour.
    assert all(share % 1.0 > 0.5 or share > 1.0 for share in used), used
    assert sum(0.9 < share < 1.0 for share in used) >= 1, used


def test_rollout_on_emulated_hetzner_wastes_no_hour_and_the_bill_matches() -> None:
    """The real provider over the vendor's SDK. At the end of every simulation the ledger equals the vendor's bill."""
    simulation = rollout_simulation(
        unit_s=3600, lasts_s=2.5 * HOUR_S, deploy_at_s=600.0, tasks=800, on=HetznerHistory, surge=2, policy="buffered"
    )
    report = simulation.run()
    assert isinstance(simulation, HetznerHistory)
    assert rollout_of(simulation).status is RolloutStatus.COMPLETE, simulation.trace.text()
    assert report.most_billed["red"] <= 6
    assert report.inexact_bills == 0
    old = {row.id for row in workers_of(simulation, "a")}
    machines = [m for m in simulation.clouds["red"].machines.values() if m.name in old]
    used = [(machine.deleted_at - machine.created_at) / HOUR_S for machine in machines]
    assert all(share % 1.0 > 0.5 or share > 1.0 for share in used), used


def test_bad_version_on_emulated_hetzner_costs_few_servers() -> None:
    simulation = rollout_simulation(
        unit_s=3600, lasts_s=HOUR_S, deploy_at_s=600.0, tasks=330, on=HetznerHistory, spawn_timeout_s=60.0
    )
    simulation.version_faults["b"] = WorkerFaults(fails_tasks=True)
    before = simulation.on_ready

    async def restore() -> None:
        assert rollout_of(simulation).status is RolloutStatus.ROLLED_BACK, rollout_of(simulation)
        live = [row for row in workers_of(simulation, "a") if row.status is WorkerStatus.ACTIVE]
        assert len(live) == 4, "every old server stays"
        assert len(workers_of(simulation, "b")) <= 3
        simulation.versions["red"] = "a"

    def on_ready(ready: Simulation) -> None:
        before(ready)
        ready.schedule(3000.0, restore)

    simulation.on_ready = on_ready
    simulation.run()


@pytest.mark.parametrize("seed", range(FIRST, FIRST + SEEDS))
def test_every_invariant_holds_with_deploys_and_random_faults(seed: int) -> None:
    """Lost leases, crashes of orchestrators, lying clouds and bad workers, with three deploys in the middle."""
    simulation = Simulation(draw_scenario(seed))

    def on_ready(ready: Simulation) -> None:
        for fleet in ready.scenario.fleets:
            ready.versions[fleet] = "v0"
            for number, share in enumerate((0.2, 0.45, 0.7), start=1):
                ready.schedule(
                    share * ready.scenario.faults_end_s,
                    deploy(ready, fleet, f"v{number}", number % 3, (number + 1) % 2),
                )

    def deploy(ready: Simulation, fleet: str, version: str, surge: int, unavailable: int) -> Callable[[], Any]:
        async def request() -> None:
            ready.versions[fleet] = version
            if fleet in ready.store.tables.fleets:
                await ready.store.request_deploy(fleet, surge, 0 if surge else unavailable, is_immediate=True)

        return request

    async def clear(ready: Simulation) -> None:
        for fleet in ready.scenario.fleets:
            await ready.store.restart_slots(fleet)

    simulation.on_ready = on_ready
    simulation.on_faults_ended = lambda: simulation.schedule(0.0, lambda: clear(simulation))
    simulation.run()
