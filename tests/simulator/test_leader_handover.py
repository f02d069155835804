"""Two orchestrators on one database, whose leader is killed again and again."""

import asyncio
from random import Random

import pytest

from support.simulator.scenario import FleetScenario, Scenario, fleet_config
from support.simulator.simulation import Simulation
from support.simulator.workers import TaskProfile
from windlass.model.lease import Candidate

TTL_S = 10.0
CYCLES = 100
# Time for one or two round trips after the lease is free.
TAKEOVER_MARGIN_S = 0.5


@pytest.mark.parametrize("seed", range(5))
def test_killed_leader_is_replaced_within_one_lease(seed: int) -> None:
    """A hundred cycles: at most max_workers machines, no machine created twice, and short gaps between leaders."""
    rng = Random(seed)  # noqa: S311
    fleet_scenario = FleetScenario(
        config=fleet_config(max_workers=3, poll_interval_s=5.0, idle_timeout_s=10.0),
        max_list_age_s=5.0,
        max_creation_delay_s=5.0,
        tasks=TaskProfile(duration_s=(5.0, 20.0)),
        arrivals=tuple((float(n * 25), 4) for n in range(32)),
    )
    simulation = Simulation(Scenario(seed, {"red": fleet_scenario}, orchestrators=2, ttl_s=TTL_S, faults_end_s=900.0))
    kills: list[float] = []

    async def kill_the_leader() -> None:
        """Kill one at a time, at any moment of a cycle; restart it after the other had to take over."""
        while not simulation.faults_ended:
            await asyncio.sleep(rng.uniform(5.0, 25.0))
            leaders = [o for o in simulation.orchestrators if o.process and o.process.name == simulation.checker.leader]
            for orchestrator in leaders:
                kills.append(asyncio.get_running_loop().time())
                orchestrator.kill()
                await asyncio.sleep(2 * TTL_S)
                orchestrator.start()

    simulation.on_ready = lambda _: simulation.schedule(1.0, kill_the_leader)
    report = simulation.run()
    assert simulation.checker.plans >= CYCLES
    assert len(kills) >= 15
    assert report.takeovers >= len(kills)
    assert simulation.checker.longest_leaderless_s <= TAKEOVER_MARGIN_S
    assert report.most_billed["red"] <= 3
    made_for = [entry.name for entry in simulation.clouds["red"].machines.values()]
    assert len(set(made_for)) == len(made_for)


def test_released_lease_is_taken_over_by_the_next_cycle() -> None:
    fleet_scenario = FleetScenario(config=fleet_config(max_workers=1, poll_interval_s=3.0))
    simulation = Simulation(Scenario(0, {"red": fleet_scenario}, orchestrators=2, ttl_s=60.0, faults_end_s=120.0))

    async def release_lease() -> None:
        leader = next(o for o in simulation.orchestrators if o.process and o.process.name == simulation.checker.leader)
        leader.kill()
        await simulation.store.release_lease(Candidate(simulation.checker.leader, 60.0))
        before = simulation.checker.takeovers
        await asyncio.sleep(4.0)
        assert simulation.checker.takeovers == before + 1

    simulation.on_ready = lambda _: simulation.schedule(30.0, release_lease)
    simulation.run()
