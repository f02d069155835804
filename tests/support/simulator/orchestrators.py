"""Simulated orchestrators: the real FleetTask and FleetCycle as a process that can be killed and started again.

Each start uses a new lease holder name, because a killed process cannot renew its lease.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from random import Random
from typing import Any

from support.simulator.processes import SimulatedProcess
from support.simulator.trace import Trace
from windlass.control.cycle import FleetCycle
from windlass.control.deployment import Deployment, UnknownVersion
from windlass.control.fleet_task import FleetTask
from windlass.control.summary import Summary
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate
from windlass.model.machine import ProviderTraits
from windlass.model.rollout import WorkingVersion
from windlass.ports.provider import Provider

# Returns what an orchestrator uses in place of a store or a provider.
WrapService = Callable[["SimulatedOrchestrator", Any], Any]
# The optional volume calls are left out: no simulated fleet has a shared volume.
_PROVIDER_CALLS = frozenset({"create", "list_machines", "delete", "prepare", "price", "close"})


class SimulatedOrchestrator:
    def __init__(
        self,
        name: str,
        fleets: dict[str, tuple[FleetConfig, Provider]],
        open_store: Callable[[SimulatedProcess], Any],
        ttl_s: float,
        rng: Random,
        trace: Trace,
        wrap_service: WrapService,
        versions: dict[str, str],
    ) -> None:
        self.name = name
        self.fleets = fleets
        self._open_store = open_store
        self._ttl_s = ttl_s
        self._rng = rng
        self._trace = trace
        self._wrap_service = wrap_service
        # Fleet to the fingerprint of its code and settings, which a test may change at any time.
        self._versions = versions
        self.restores_settings = False
        self._starts = 0
        self._tasks: dict[str, FleetTask] = {}
        # After how many awaits the process of this name dies. None: it does not.
        self.draw_death: Callable[[str], int | None] = lambda _: None
        self.on_death: Callable[[SimulatedOrchestrator], None] = lambda _: None
        self.process: SimulatedProcess | None = None

    @property
    def is_running(self) -> bool:
        return self.process is not None and not self.process.is_dead

    def start(self) -> None:
        """Start a new process, unless one is running."""
        if self.is_running:
            return
        self._starts += 1
        process = self.process = SimulatedProcess(f"{self.name}.{self._starts}")
        self._trace.add(process.name, "started")
        process.steps_left = self.draw_death(process.name)
        process.on_last_step = lambda: self.on_death(self)
        process.start(self._run(process))

    def kill(self) -> None:
        if self.process is not None and self.is_running:
            self._trace.add(self.process.name, "killed")
            self.process.kill()

    def reconfigure(self, fleet: str, config: FleetConfig) -> None:
        """Use another configuration, as after a reload: at once if the process runs, and in later starts."""
        provider = self.fleets[fleet][1]
        self.fleets[fleet] = config, provider
        if self.process is not None and self.is_running and fleet in self._tasks:
            self._tasks[fleet].reconfigure(config, self._wrap_service(self, ProcessProvider(provider, self.process)))

    async def _run(self, process: SimulatedProcess) -> None:
        candidate = Candidate(process.name, self._ttl_s)
        store = self._wrap_service(self, self._open_store(process))
        cycles = [
            FleetCycle(
                name,
                config,
                store,
                self._wrap_service(self, ProcessProvider(provider, process)),
                candidate,
                self._rng,
                deployment=self._deployment(name, provider, process),
            )
            for name, (config, provider) in self.fleets.items()
        ]

        def trace_actions(summary: Summary) -> None:
            counts = {action: count for action, count in (summary.actions or {}).items() if count}
            if summary.is_leader and counts:
                actions = ", ".join(f"{count} {action}" for action, count in counts.items())
                self._trace.add(process.name, f"{summary.fleet}: {actions}; {summary.decision}")

        async with asyncio.TaskGroup() as group:
            self._tasks = {cycle.name: FleetTask(cycle, trace_actions, self._rng) for cycle in cycles}
            for task in self._tasks.values():
                group.create_task(task.run())

    def _deployment(self, fleet: str, provider: Provider, process: SimulatedProcess) -> Deployment:
        if not self.restores_settings:
            return Deployment(SimulatedVersions(self._versions, fleet))
        return Deployment(
            RestoredVersions(self._versions, fleet),
            make_provider=lambda _config: self._wrap_service(self, ProcessProvider(provider, process)),
        )


class SimulatedVersions(UnknownVersion):
    """The version that a scenario gave a fleet."""

    def __init__(self, versions: Mapping[str, str | None], fleet: str) -> None:
        self._versions = versions
        self._fleet = fleet

    async def read(self, _fleet: FleetConfig) -> str | None:
        return self._versions.get(self._fleet)


class RestoredVersions(SimulatedVersions):
    """Versions whose settings can be restored."""

    def describe(self, fingerprint: str) -> str | None:
        return json.dumps({"image": fingerprint})

    def restore(self, fleet: FleetConfig, working: WorkingVersion) -> FleetConfig | None:
        return fleet.model_copy(update={"handler": f"{working.fingerprint}:work"})


class ProcessProvider:
    """A provider as one process sees it: every call waits while the process is frozen, and fails when it is dead."""

    def __init__(self, provider: Provider, process: SimulatedProcess) -> None:
        self.provider = provider
        self.process = process

    @property
    def traits(self) -> ProviderTraits:
        return self.provider.traits

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        if name not in _PROVIDER_CALLS:
            raise AttributeError(name)
        method = getattr(self.provider, name)

        async def call(*arguments: Any) -> Any:
            await self.process.checkpoint()
            return await method(*arguments)

        return call
