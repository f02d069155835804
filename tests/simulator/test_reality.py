"""The what-if simulator agrees with the orchestrator: the same load through both, within 10 %.

The orchestrator, its cycles, the policy, claims and drains are those of the product, in virtual time, so that the speed
of this machine plays no part. `python -m bench.reality` compares with real processes.
"""

import asyncio
from random import Random
from typing import Any

import pytest

from support.memory_store.stores import MemoryStores
from support.simulator.cloud import MachineRecord, SimulatedCloud
from support.simulator.loop import run, virtual_now
from support.simulator.processes import SimulatedProcess, track_processes
from support.simulator.scenario import fleet_config
from support.simulator.trace import Trace as SimulationTrace
from support.simulator.workers import SimulatedWorker, TaskProfile, WorkerFaults
from windlass.control.cycle import FleetCycle
from windlass.control.orchestrator import Orchestrator
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate
from windlass.model.task import TaskStatus, new_task
from windlass.simulator.engine import World
from windlass.simulator.measures import quantile
from windlass.simulator.runs import RunRequest, run_policy
from windlass.simulator.trace import GeneratorSettings, Trace, generate

BOOT_S = 60.0
# What the simulated cloud adds to a boot: its answer to the create call.
CREATE_S = 1.0


def config(**changes: Any) -> FleetConfig:
    settings = {
        "policy": "adaptive",
        "poll_interval_s": 10.0,
        "heartbeat_interval_s": 1.0,
        "max_workers": 20,
        "spawn_timeout_s": 1200.0,
        "stuck_timeout_s": None,
        "not_claiming_timeout_s": 3600.0,
        "startup_grace_s": 600.0,
    }
    return fleet_config(**(settings | changes))


async def run_orchestrator(trace: Trace, fleet: FleetConfig) -> tuple[float, float]:
    """Machine seconds and p95 wait of the load through the orchestrator."""
    loop = asyncio.get_running_loop()
    track_processes(loop)
    store = MemoryStores(virtual_now, chance=Random(1))  # noqa: S311
    log, cloud = SimulationTrace(), SimulatedCloud("red", Random(2), SimulationTrace())  # noqa: S311

    def start_worker(entry: MachineRecord) -> SimulatedWorker:
        faults, rng = WorkerFaults(boots_s=BOOT_S), Random(3)  # noqa: S311
        process = SimulatedProcess(entry.name)
        worker = SimulatedWorker(entry, cloud, fleet, store, process, faults, TaskProfile(), rng, log)
        worker.start()
        return worker

    cloud.start_worker = start_worker
    candidate = Candidate("leader", 60.0)
    orchestrator = Orchestrator(
        store,
        candidate,
        lambda name, settings: FleetCycle(name, settings, store, cloud, candidate, Random(4)),  # noqa: S311
        lambda _name, _settings: cloud,
        lambda _: None,
    )
    running = asyncio.ensure_future(orchestrator.run({"red": fleet}))
    begins = loop.time()
    for at, duration_s in zip(trace.arrivals, trace.durations, strict=True):
        await asyncio.sleep(max(0.0, begins + at - loop.time()))
        await store.enqueue(new_task("red", {"duration_s": duration_s}))
    while True:
        tasks = await store.tasks(queue="red", limit=10_000)
        if all(task.status is TaskStatus.COMPLETE for task in tasks):
            break
        await asyncio.sleep(1.0)
    last = max((task.finished_at for task in tasks if task.finished_at is not None), default=virtual_now())
    ends = loop.time() - (virtual_now() - last).total_seconds()
    machine_s = sum(min(each.deleted_at, ends) - each.created_at + CREATE_S for each in cloud.machines.values())
    waits = sorted((task.started_at - task.created_at).total_seconds() for task in tasks if task.started_at is not None)
    assert len(waits) == len(trace.arrivals)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return machine_s, quantile(waits, 0.95)


@pytest.mark.parametrize("policy", ["adaptive", "buffered"])
@pytest.mark.parametrize(
    ("kind", "most"),
    [
        ("poisson", 20),
        ("bursts", 20),
        ("diurnal", 20),
        # Never reached.
        ("bursts", 200),
    ],
)
def test_simulation_agrees_with_the_orchestrator(kind: str, most: int, policy: str) -> None:
    trace = generate(kind, GeneratorSettings(tasks=250, days=0.15, duration_s=90.0, seed=5))
    fleet = config(policy=policy, max_workers=most)
    machine_s, p95_s = run(run_orchestrator(trace, fleet))
    simulated = run_policy(RunRequest(policy, fleet, World(boot_s=BOOT_S + CREATE_S)), trace)
    print(f"{kind} {policy}, peak {simulated.machines_peak}: ", end="")
    print(f"{machine_s:.0f} and {simulated.machine_seconds_billed:.0f} machine seconds, ", end="")
    print(f"p95 wait {p95_s:.1f} and {simulated.wait_p95_s:.1f} s")
    assert simulated.machine_seconds_billed == pytest.approx(machine_s, rel=0.1)
    assert simulated.wait_p95_s == pytest.approx(p95_s, rel=0.1)
