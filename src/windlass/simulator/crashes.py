"""Kills an orchestrator before, during or after any of its calls to the store or the provider.

`record_calls` runs a simulation and lists the calls of its orchestrators until the faults end.
`run_with_crash` runs the same simulation and kills the caller of one of these calls:
    before   the request was never sent
    during   the request was sent and takes effect after its caller died
    after    the answer arrived, and its caller died before it used it
The orchestrator starts again after RESTART_DELAY_S, and every invariant must hold to the end.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from windlass.simulator.orchestrators import SimulatedOrchestrator
from windlass.simulator.simulation import Simulation, SimulationReport

CrashTiming = Literal["before", "during", "after"]
RESTART_DELAY_S = 1.0


@dataclass(frozen=True, slots=True)
class CrashPoint:
    call_index: int
    timing: CrashTiming


@dataclass(slots=True)
class CrashInjector:
    """Counts the calls of all orchestrators and kills the caller at `point`. Without a point it only counts."""

    point: CrashPoint | None = None
    calls: list[str] = field(default_factory=list)

    def wrap_service(self, orchestrator: SimulatedOrchestrator, service: Any) -> "_InterceptedService":
        return _InterceptedService(self, orchestrator, service)

    async def call(
        self, orchestrator: SimulatedOrchestrator, name: str, method: Callable[..., Awaitable[Any]], arguments: Any
    ) -> Any:
        self.calls.append(name)
        if self.point is None or len(self.calls) - 1 != self.point.call_index:
            return await method(*arguments)
        match self.point.timing:
            case "before":
                pass
            case "during":
                sending = asyncio.ensure_future(method(*arguments))
                # One iteration of the loop sends the request. The caller is killed before the answer arrives.
                await asyncio.wait([sending], timeout=0)
            case "after":
                await asyncio.gather(method(*arguments), return_exceptions=True)
        orchestrator.kill()
        asyncio.get_running_loop().call_later(RESTART_DELAY_S, orchestrator.start)
        raise asyncio.CancelledError


class _InterceptedService:
    def __init__(self, injector: CrashInjector, orchestrator: SimulatedOrchestrator, service: Any) -> None:
        self._injector = injector
        self._orchestrator = orchestrator
        self._service = service

    def __getattr__(self, name: str) -> Any:
        if name == "traits":
            return self._service.traits
        method = getattr(self._service, name)

        async def call(*arguments: Any) -> Any:
            return await self._injector.call(self._orchestrator, name, method, arguments)

        return call


def record_calls(make_simulation: Callable[[], Simulation]) -> list[str]:
    injector, simulation = CrashInjector(), make_simulation()
    simulation.wrap_service = injector.wrap_service
    calls: list[str] = []
    simulation.on_faults_ended = lambda: calls.extend(injector.calls)
    simulation.run()
    return calls


def run_with_crash(make_simulation: Callable[[], Simulation], point: CrashPoint) -> SimulationReport:
    simulation = make_simulation()
    simulation.wrap_service = CrashInjector(point).wrap_service
    return simulation.run()
