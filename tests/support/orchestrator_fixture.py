"""Orchestrators in virtual time: two fleets, a memory store, and clouds whose machines are simulated workers."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

from support.memory_store.stores import MemoryStores
from support.simulator.cloud import MachineRecord, SimulatedCloud
from support.simulator.loop import run, virtual_now
from support.simulator.processes import SimulatedProcess, track_processes
from support.simulator.scenario import fleet_config
from support.simulator.trace import Trace
from support.simulator.workers import SimulatedWorker, TaskProfile, WorkerFaults
from windlass.control.cycle import FleetCycle, run_once
from windlass.control.orchestrator import (
    Orchestrator,
)
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate
from windlass.model.worker import Worker, WorkerStatus

TTL_S = 20.0
STOP_S = 20.0
# A few cycles.
SOON_S = 15.0
LONG_S = 10_000.0


def config(fleet: str, **changes: Any) -> FleetConfig:
    settings = {"queues": (fleet,), "min_workers": 1, "max_workers": 2, "stop_timeout_s": STOP_S}
    return fleet_config(**(settings | changes))


class ClosingCloud(SimulatedCloud):
    """Counts how often it was closed."""

    closed = 0

    async def close(self) -> None:
        self.closed += 1


class OrchestratorFixture:
    """Two fleets, a store, clouds whose machines are workers, and orchestrators to stop and reload."""

    def __init__(self) -> None:
        track_processes(asyncio.get_running_loop())
        self.store = MemoryStores(virtual_now, chance=Random(1))  # noqa: S311
        self.trace = Trace()
        self.fleets = {name: config(name) for name in ("red", "blue")}
        self.clouds = {name: self.new_cloud(name) for name in self.fleets}
        self.orchestrators = 0

    def new_cloud(self, name: str) -> ClosingCloud:
        cloud = ClosingCloud(name, Random(2), self.trace)  # noqa: S311

        def start_worker(entry: MachineRecord) -> SimulatedWorker:
            process, tasks = SimulatedProcess(entry.name), TaskProfile(duration_s=(LONG_S, LONG_S))
            faults, rng = WorkerFaults(boots_s=1.0), Random(3)  # noqa: S311
            fleet = self.fleets.get(name, config(name))
            worker = SimulatedWorker(entry, cloud, fleet, self.store, process, faults, tasks, rng, self.trace)
            worker.start()
            return worker

        cloud.start_worker = start_worker
        return cloud

    def start(self, *, stops_when_empty: bool = False) -> "RunningOrchestrator":
        self.orchestrators += 1
        candidate = Candidate(f"o{self.orchestrators}", TTL_S)

        def make_cycle(name: str, fleet: FleetConfig) -> FleetCycle:
            return FleetCycle(name, fleet, self.store, self.clouds[name], candidate, Random(4))  # noqa: S311

        orchestrator = Orchestrator(
            self.store, candidate, make_cycle, lambda name, _: self.clouds[name], lambda _: None
        )
        task = orchestrator.run(self.fleets, stops_when_empty=stops_when_empty)
        return RunningOrchestrator(orchestrator, asyncio.ensure_future(task))

    async def cycle(self) -> bool:
        """Run one cycle of each fleet, as from cron on another host. Returns whether it led."""
        cron = Candidate("cron", TTL_S)
        cycles = [
            FleetCycle(name, fleet, self.store, self.clouds[name], cron, Random(4))  # noqa: S311
            for name, fleet in self.fleets.items()
        ]
        summaries = await run_once(cycles)
        await self.store.release_lease(cron)
        return all(summary.is_leader for summary in summaries)

    async def unfinished(self) -> list[str]:
        """Fleets that have run and are not shut down."""
        return [fleet.name for fleet in await self.store.fleets() if fleet.next_plan_in_s is not None]

    async def workers(self, fleet: str | None = None) -> list[Worker]:
        return [worker for worker in await self.store.workers() if fleet in (None, worker.fleet)]

    async def active(self, fleet: str) -> list[str]:
        return [worker.id for worker in await self.workers(fleet) if worker.status is WorkerStatus.ACTIVE]

    def refuse_deletions(self, fleet: str, deletions: int = 1000) -> None:
        for _ in range(deletions):
            self.clouds[fleet].next_delete(raises=RuntimeError("not now"), takes_effect=False)


class RunningOrchestrator:
    """An orchestrator and the task that runs it."""

    def __init__(self, orchestrator: Orchestrator, task: "asyncio.Future[None]") -> None:
        self.orchestrator = orchestrator
        self.task = task

    async def ends_within(self, seconds: float) -> float:
        """Returns how long it took."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        await asyncio.wait_for(self.task, seconds)
        return loop.time() - started


def run_in_virtual_time(scenario: Callable[[OrchestratorFixture], Awaitable[None]]) -> None:
    async def main() -> None:
        await scenario(OrchestratorFixture())

    run(main())


def count_cycles(fixture: OrchestratorFixture) -> Counter[str]:
    """Cycles of each fleet, from now on."""
    counts: Counter[str] = Counter()
    for name, cloud in fixture.clouds.items():
        original = cloud.list_machines

        async def listed(name: str = name, original: Any = original) -> Any:
            counts[name] += 1
            return await original()

        cloud.list_machines = listed  # type: ignore[method-assign]
    return counts
