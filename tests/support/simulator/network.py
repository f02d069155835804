"""The simulated network between a process and the database: delays, lost requests and lost answers.

A request takes effect at the store once or never, and its answer arrives or not. Both are independent of whether the
caller is still alive or still waiting.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from support.simulator.decisions import FaultDecisions
from support.simulator.processes import SimulatedProcess, start_detached
from support.simulator.trace import Trace
from windlass.model.errors import DatabaseUnavailable

# Called when a call took effect: its name, arguments, and its result or error.
CallObserver = Callable[[str, tuple[Any, ...], Any], None]

# Upper bounds of the delay of a request or an answer: usual, and slow.
LATENCY_S = 0.05
SLOW_S = 8.0
# A caller without an answer fails within this time.
CALL_ERROR_S = 10.0
# The database may still execute a statement this long after its client failed.
LATE_S = 15.0


@dataclass(frozen=True, slots=True)
class CallOutcome:
    request_delay_s: float = 0.0
    answer_delay_s: float = 0.0
    # The caller gets DatabaseUnavailable after this time. The request still takes effect unless it is lost.
    fails_after_s: float | None = None
    is_request_lost: bool = False


IMMEDIATE = CallOutcome()


@dataclass(slots=True)
class NetworkFaults:
    """Shares of calls with each fault, from 0 to 1, and whether the database is down."""

    slow: float = 0.0
    lost: float = 0.0
    unanswered: float = 0.0
    late: float = 0.0
    is_down: bool = False

    def clear(self) -> None:
        self.slow = self.lost = self.unanswered = self.late = 0.0
        self.is_down = False


class RemoteStore:
    """A store as one process sees it. Forwards every method; `observer` sees each call that takes effect."""

    def __init__(
        self,
        target: Any,
        process: SimulatedProcess,
        faults: NetworkFaults,
        rng: Random,
        trace: Trace,
        observer: CallObserver,
        *,
        immediate_share: float = 0.0,
        decisions: FaultDecisions | None = None,
        source: str = "",
        worker_id: str | None = None,
    ) -> None:
        """`immediate_share` of the calls take no virtual time. They are much cheaper to simulate.

        `source` names the process in fault decisions. `worker_id` is None for an orchestrator.
        """
        self._target = target
        self._process = process
        self._faults = faults
        self._rng = rng
        self._trace = trace
        self._observer = observer
        self._immediate_share = immediate_share
        self._decisions = decisions or FaultDecisions()
        self._source = source or process.name
        self._worker_id = worker_id

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self._target, name)

        async def call(*arguments: Any, **options: Any) -> Any:
            async def take_effect() -> Any:
                try:
                    result = await method(*arguments, **options)
                except Exception as error:
                    self._observer(name, arguments, error)
                    raise
                self._observer(name, arguments, result)
                return result

            await self._process.checkpoint()
            outcome = self._draw_outcome()
            if outcome is IMMEDIATE:
                return await take_effect()
            try:
                return await self._send(name, outcome, take_effect)
            finally:
                # A process that is frozen when the answer arrives reads it after it is thawed.
                await self._process.checkpoint()

        return call

    def _draw_outcome(self) -> CallOutcome:
        faults, rng = self._faults, self._rng
        if faults.is_down:
            return CallOutcome(fails_after_s=rng.uniform(0.0, 1.0), is_request_lost=True)
        if self._immediate_share > 0 and rng.random() < self._immediate_share:
            return IMMEDIATE
        there_s, back_s = rng.uniform(0.0, LATENCY_S), rng.uniform(0.0, LATENCY_S)
        roll = rng.random()
        for kind, share, outcome in (
            ("lost", faults.lost, CallOutcome(there_s, back_s, rng.uniform(0.0, CALL_ERROR_S), is_request_lost=True)),
            ("unanswered", faults.unanswered, CallOutcome(there_s, back_s, there_s + rng.uniform(0.0, CALL_ERROR_S))),
            ("late", faults.late, CallOutcome(rng.uniform(0.0, LATE_S), back_s, rng.uniform(0.0, CALL_ERROR_S))),
            ("slow", faults.slow, CallOutcome(rng.uniform(0.0, SLOW_S), rng.uniform(0.0, SLOW_S))),
        ):
            if roll < share:
                return outcome if self._allow(kind) else CallOutcome(there_s, back_s)
            roll -= share
        return CallOutcome(there_s, back_s)

    def _allow(self, kind: str) -> bool:
        side = "control" if self._worker_id is None else "worker"
        return self._decisions.allow(self._source, f"{side}_call_{kind}", self._worker_id)

    async def _send(self, name: str, outcome: CallOutcome, take_effect: Callable[[], Awaitable[Any]]) -> Any:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def fail() -> None:
            if not answer.done():
                answer.set_exception(DatabaseUnavailable(f"{name}: the database does not answer"))

        if outcome.fails_after_s is not None:
            lost = "request lost" if outcome.is_request_lost else "answer lost"
            self._trace.add(self._process.name, f"{name}: {lost}")
            loop.call_later(outcome.fails_after_s, fail)
        if not outcome.is_request_lost:
            start_detached(_deliver(outcome, take_effect, answer))
        return await answer


async def _deliver(
    outcome: CallOutcome, take_effect: Callable[[], Awaitable[Any]], answer: asyncio.Future[Any]
) -> None:
    await asyncio.sleep(outcome.request_delay_s)
    result: Any = None
    error: Exception | None = None
    try:
        result = await take_effect()
    except Exception as raised:
        error = raised
    await asyncio.sleep(outcome.answer_delay_s)
    if answer.done() or outcome.fails_after_s is not None:
        return
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(error)
