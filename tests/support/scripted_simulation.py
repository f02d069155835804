"""A simulation of one fleet, "red", without random faults, and a way to script events in it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from windlass.control.executor import CALL_TIMEOUT_S
from windlass.simulator.cloud import SimulatedCloud
from windlass.simulator.scenario import FleetScenario, Scenario, WorkerFaultPlan, fleet_config
from windlass.simulator.simulation import Simulation
from windlass.simulator.workers import TaskProfile

TTL_S = 20.0
LATE_S = 30.0
LIST_AGE_S = 5.0
# From the commit of a spawn without an answer until its slot is free again.
SLOT_FREED_S = TTL_S + CALL_TIMEOUT_S + LATE_S + LIST_AGE_S


def fault_free_simulation(
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
    fleet = FleetScenario(
        config=fleet_config(**({"max_workers": 2} | config)),
        max_list_age_s=LIST_AGE_S if is_cloud else 0.0,
        max_creation_delay_s=LATE_S if is_cloud else 0.0,
        worker_faults=worker_faults,
        tasks=TaskProfile(duration_s=task_s, failure_rate=fails),
        arrivals=arrivals,
        max_attempts=max_attempts,
    )
    return Simulation(Scenario(0, {"red": fleet}, orchestrators=orchestrators, ttl_s=ttl_s, faults_end_s=lasts_s))


def script(simulation: Simulation, *events: tuple[float, Callable[[], Any]]) -> None:
    """Run each action at its virtual time. An action at 0 runs before anything starts. An action may be async."""

    def make_async(action: Callable[[], Any]) -> Callable[[], Awaitable[None]]:
        async def perform() -> None:
            result = action()
            if asyncio.iscoroutine(result):
                await result

        return perform

    def on_ready(_: Simulation) -> None:
        for at_s, action in events:
            if at_s == 0:
                action()
            else:
                simulation.schedule(at_s, make_async(action))

    simulation.on_ready = on_ready


def red(simulation: Simulation) -> SimulatedCloud:
    return simulation.clouds["red"]
