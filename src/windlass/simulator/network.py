"""How calls travel between a process and a service, and what can happen to them on the way.

A call takes effect at its destination or not, once; its answer arrives or not. Whether the caller is still alive, or
still waiting, when it takes effect makes no difference to the effect.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from windlass.model.errors import DatabaseUnavailable
from windlass.simulator.processes import SimulatedProcess, start_detached
from windlass.simulator.trace import Trace

# What was observed of a call when it took effect: its name, arguments and result or error.
Witness = Callable[[str, tuple[Any, ...], dict[str, Any], Any], None]


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """What happens to one call."""

    out_s: float = 0.0
    back_s: float = 0.0
    # The caller is told that it failed, after this time; the effect comes, or came, all the same, unless is_lost.
    fails_after_s: float | None = None
    # It never arrives.
    is_lost: bool = False


STRAIGHT = CallOutcome()


@dataclass(slots=True)
class NetworkFaults:
    """How bad it is between the processes and the database. Shares of calls, from 0 to 1."""

    slow: float = 0.0
    lost: float = 0.0
    unanswered: float = 0.0
    late: float = 0.0
    is_down: bool = False

    def clear(self) -> None:
        self.slow = self.lost = self.unanswered = self.late = 0.0
        self.is_down = False


# Of a call to the database: ordinarily, when slow, and until its caller gives up.
LATENCY_S = 0.05
SLOW_S = 8.0
GIVES_UP_S = 10.0
# A statement whose client is gone may still be carried out for this long.
LATE_S = 15.0


class RemoteStore:
    """A store as one process sees it. Every method of the store can be called; `witness` learns what took effect."""

    def __init__(
        self,
        target: Any,
        process: SimulatedProcess,
        worker_network: NetworkFaults,
        rng: Random,
        trace: Trace,
        witness: Witness | None = None,
        *,
        straight: float = 0.0,
    ) -> None:
        """`straight`: the share of calls that take no time at all; they are cheap to simulate."""
        self._target = target
        self._process = process
        self._weather = worker_network
        self._rng = rng
        self._trace = trace
        self._witness = witness
        self._straight = straight

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self._target, name)

        async def call(*arguments: Any, **options: Any) -> Any:
            await self._process.checkpoint()
            fate = self._draw_fate()
            if fate is STRAIGHT:
                return await self._take_effect(name, method, arguments, options)
            try:
                return await self._travel(name, fate, lambda: self._take_effect(name, method, arguments, options))
            finally:
                # Whoever stands still when the answer comes reads it when they go on.
                await self._process.checkpoint()

        return call

    def _draw_fate(self) -> CallOutcome:
        worker_network, rng = self._weather, self._rng
        if worker_network.is_down:
            return CallOutcome(fails_after_s=rng.uniform(0.0, 1.0), is_lost=True)
        if self._straight > 0 and rng.random() < self._straight:
            return STRAIGHT
        out_s, back_s = rng.uniform(0.0, LATENCY_S), rng.uniform(0.0, LATENCY_S)
        roll = rng.random()
        for share, fate in (
            (worker_network.lost, CallOutcome(out_s, back_s, fails_after_s=rng.uniform(0.0, GIVES_UP_S), is_lost=True)),
            (worker_network.unanswered, CallOutcome(out_s, back_s, fails_after_s=out_s + rng.uniform(0.0, GIVES_UP_S))),
            (
                worker_network.late,
                CallOutcome(rng.uniform(0.0, LATE_S), back_s, fails_after_s=rng.uniform(0.0, GIVES_UP_S)),
            ),
            (worker_network.slow, CallOutcome(rng.uniform(0.0, SLOW_S), rng.uniform(0.0, SLOW_S))),
        ):
            if roll < share:
                return fate
            roll -= share
        return CallOutcome(out_s, back_s)

    async def _take_effect(
        self, name: str, method: Callable[..., Awaitable[Any]], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        try:
            result = await method(*arguments, **options)
        except Exception as error:
            if self._witness is not None:
                self._witness(name, arguments, options, error)
            raise
        if self._witness is not None:
            self._witness(name, arguments, options, result)
        return result

    async def _travel(self, name: str, fate: CallOutcome, effect: Callable[[], Awaitable[Any]]) -> Any:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def fail() -> None:
            if not answer.done():
                answer.set_exception(DatabaseUnavailable(f"{name}: the database does not answer"))

        if fate.fails_after_s is not None:
            self._trace.add(self._process.name, f"{name} will get no answer{', nor arrive' if fate.is_lost else ''}")
            loop.call_later(fate.fails_after_s, fail)
        if not fate.is_lost:
            start_detached(_deliver(fate, effect, answer))
        return await answer


async def _deliver(fate: CallOutcome, effect: Callable[[], Awaitable[Any]], answer: asyncio.Future[Any]) -> None:
    await asyncio.sleep(fate.out_s)
    result: Any = None
    problem: Exception | None = None
    try:
        result = await effect()
    except Exception as error:
        problem = error
    await asyncio.sleep(fate.back_s)
    if answer.done() or fate.fails_after_s is not None:
        return
    if problem is None:
        answer.set_result(result)
    else:
        answer.set_exception(problem)
