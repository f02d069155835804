"""A crash before, during and after each call of an orchestrator: every point at which it can die, one run each.

`calls_of` lives through a world once and counts what its orchestrators ask of store and provider until it is calm.
`crash_at` lives through the same world again and kills whoever makes the call of that number:
    before   it was never sent
    during   it was sent, and takes effect when its caller is dead
    after    it was answered, and nothing came of the answer
Then somebody is started again, and all promises must hold to the end.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from windlass.simulator.orchestrators import SimulatedOrchestrator
from windlass.simulator.simulation import Simulation, SimulationReport

CrashTiming = Literal["before", "during", "after"]
RESTARTS_AFTER_S = 1.0

MakeWorld = Callable[[], Simulation]


@dataclass(frozen=True, slots=True)
class CrashPoint:
    number: int
    when: CrashTiming


@dataclass(slots=True)
class CrashInjector:
    """Counts calls until the one at which its caller dies. None: it only counts."""

    point: CrashPoint | None = None
    calls: list[str] = field(default_factory=list)

    def wrap(self, orchestrator: SimulatedOrchestrator, service: Any) -> "_Wired":
        return _Wired(self, orchestrator, service)

    async def call(
        self, orchestrator: SimulatedOrchestrator, name: str, method: Callable[..., Awaitable[Any]], arguments: Any
    ) -> Any:
        self.calls.append(name)
        if self.point is None or len(self.calls) - 1 != self.point.number:
            return await method(*arguments)
        match self.point.when:
            case "before":
                pass
            case "during":
                sending = asyncio.ensure_future(method(*arguments))
                # One turn of the loop to be sent; the caller does not live to see what becomes of it.
                await asyncio.wait([sending], timeout=0)
            case "after":
                await asyncio.gather(method(*arguments), return_exceptions=True)
        orchestrator.kill()
        asyncio.get_running_loop().call_later(RESTARTS_AFTER_S, orchestrator.start)
        raise asyncio.CancelledError


class _Wired:
    def __init__(self, wire: CrashInjector, orchestrator: SimulatedOrchestrator, service: Any) -> None:
        self._wire = wire
        self._make_orchestrator = orchestrator
        self._service = service

    def __getattr__(self, name: str) -> Any:
        if name == "traits":
            return self._service.traits
        method = getattr(self._service, name)

        async def call(*arguments: Any) -> Any:
            return await self._wire.call(self._make_orchestrator, name, method, arguments)

        return call


def record_calls(make_world: MakeWorld) -> list[str]:
    wire, simulation = CrashInjector(), make_world()
    simulation.wrap = wire.wrap
    eventful: list[str] = []
    simulation.on_faults_ended = lambda: eventful.extend(wire.calls)
    simulation.run()
    return eventful


def run_with_crash(make_world: MakeWorld, point: CrashPoint) -> SimulationReport:
    simulation = make_world()
    simulation.wrap = CrashInjector(point).wrap
    return simulation.run()
