"""Orchestrators: the real FleetTask over the real FleetCycle, as a process that can be killed and started again.

Each start is another holder, as in the world: a process that died cannot renew the lease it had.
"""

import asyncio
from collections.abc import Callable
from datetime import datetime
from random import Random
from typing import Any

from windlass.control.cycle import FleetCycle
from windlass.control.fleet_task import FleetTask
from windlass.control.summary import Summary
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate
from windlass.model.machine import Machine, MachineRequest, Preparation, ProviderTraits
from windlass.ports.provider import OnHostKey, Provider
from windlass.simulator.processes import SimulatedProcess
from windlass.simulator.trace import Trace

StoreSeen = Callable[[SimulatedProcess], Any]
# Given a store or a provider, what this orchestrator is given instead.
Wrap = Callable[["SimulatedOrchestrator", Any], Any]


class SimulatedOrchestrator:
    def __init__(
        self,
        name: str,
        fleets: dict[str, tuple[FleetConfig, Provider]],
        open_store: StoreSeen,
        ttl_s: float,
        rng: Random,
        trace: Trace,
        wrap: Wrap = lambda _, service: service,
    ) -> None:
        self.name = name
        self.fleets = fleets
        self._open_store = open_store
        self._ttl_s = ttl_s
        self._rng = rng
        self._trace = trace
        self._wrap = wrap
        self._starts = 0
        self.process: SimulatedProcess | None = None

    @property
    def is_running(self) -> bool:
        return self.process is not None and not self.process.is_dead

    def start(self) -> None:
        if self.is_running:
            return
        self._starts += 1
        process = self.process = SimulatedProcess(f"{self.name}.{self._starts}")
        self._trace.add(process.name, "starts")
        process.start(self._run(process))

    def kill(self) -> None:
        if self.process is not None and self.is_running:
            self._trace.add(self.process.name, "is killed")
            self.process.kill()

    async def _run(self, process: SimulatedProcess) -> None:
        candidate = Candidate(process.name, self._ttl_s)
        store = self._wrap(self, self._open_store(process))
        cycles = [
            FleetCycle(name, config, store, self._wrap(self, ProcessProvider(provider, process)), candidate, self._rng)
            for name, (config, provider) in self.fleets.items()
        ]
        async with asyncio.TaskGroup() as group:
            for cycle in cycles:
                task = FleetTask(cycle, lambda summary: self._note(process.name, summary), self._rng)
                group.create_task(task.run())

    def _note(self, who: str, summary: Summary) -> None:
        if summary.is_leader and any((summary.actions or {}).values()):
            did = ", ".join(f"{count} {what}" for what, count in (summary.actions or {}).items() if count)
            self._trace.add(who, f"{summary.fleet}: {did}; {summary.decision}")


class ProcessProvider:
    """A provider as one process sees it: the dead ask for nothing."""

    def __init__(self, provider: Provider, process: SimulatedProcess) -> None:
        self.provider = provider
        self.process = process

    @property
    def traits(self) -> ProviderTraits:
        return self.provider.traits

    async def create(self, request: MachineRequest) -> Machine:
        await self.process.checkpoint()
        return await self.provider.create(request)

    async def list_machines(self) -> tuple[Machine, ...]:
        await self.process.checkpoint()
        return await self.provider.list_machines()

    async def delete(self, machine: Machine) -> datetime | None:
        await self.process.checkpoint()
        return await self.provider.delete(machine)

    async def prepare(self, machine: Machine, host_key: str | None, on_host_key: OnHostKey) -> Preparation:
        await self.process.checkpoint()
        return await self.provider.prepare(machine, host_key, on_host_key)

    async def close(self) -> None:
        await self.provider.close()
