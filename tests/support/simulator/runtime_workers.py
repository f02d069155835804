"""The real worker runtime as the program on a simulated machine, in virtual time.

Real: windlass.worker's lifecycle, claiming, attempts, delivery and heartbeat, with their retries and time limits.
Replaced: the executor, whose attempts are virtual time and no processes; the heartbeat's thread, which is a task of the
same loop, because a virtual clock has one loop; the transport, which is a RemoteStore; and the clock and the random
numbers of those modules. Signals, GPU readers and output are left out.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from random import Random
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

from support.simulator.loop import virtual_now
from support.simulator.workers import FAILING_TASK_S, SimulatedWorker
from windlass import retry
from windlass.model.errors import WindlassError
from windlass.model.task import Claim
from windlass.ports.transport import WorkerTransport
from windlass.worker import attempts, claiming, delivery, heartbeat, lifecycle, shutdown_state
from windlass.worker.executor import AttemptFailure, AttemptSuccess, Outcome
from windlass.worker.handler import ReportProgress
from windlass.worker.lifecycle import WorkerRuntime, WorkerSettings
from windlass.worker.shutdown_state import FOREVER

_CLOCKED = (attempts, claiming, delivery, heartbeat, lifecycle, retry, shutdown_state)
_RANDOM = (claiming, heartbeat, retry)


class LoopHeartbeat(heartbeat.Heartbeat):
    """The heartbeat as a task of the worker's loop instead of a thread."""

    def start(self) -> None:
        self._task = asyncio.create_task(self._send_until_stopped())

    async def stop(self) -> None:
        self._is_stopped = True
        self._wake_up()
        await asyncio.wait([self._task], timeout=heartbeat.STOP_TIMEOUT_S)


class RuntimeWorker(SimulatedWorker):
    """Its faults are those of every simulated worker."""

    @classmethod
    @contextmanager
    def environment(cls, _rng: Random) -> Iterator[None]:
        def monotonic() -> float:
            try:
                return asyncio.get_running_loop().time()
            except RuntimeError:  # the simulation has ended, and its coroutines are closed
                return time.monotonic()

        numbers = SimpleNamespace(random=_rng.random, Random=lambda: _rng)
        with ExitStack() as stack:
            for module in _CLOCKED:
                stack.enter_context(patch.object(module, "time", SimpleNamespace(monotonic=monotonic)))
            for module in _RANDOM:
                stack.enter_context(patch.object(module, "random", numbers))
            stack.enter_context(patch.object(claiming, "datetime", SimpleNamespace(now=lambda _: virtual_now())))
            stack.enter_context(patch.object(lifecycle, "Heartbeat", LoopHeartbeat))
            yield

    async def _serve(self) -> None:
        fleet = self._fleet
        runtime = WorkerRuntime(
            WorkerSettings(
                queues=fleet.queues,
                fleet=self.fleet_name,
                concurrency=fleet.concurrency,
                heartbeat_interval_s=fleet.heartbeat_interval_s,
                lease_s=fleet.heartbeat_timeout_s,
                drain_timeout_s=fleet.stop_timeout_s,
                registration_timeout_s=FOREVER,
                worker_id=self.id,
                start_id=self.id,
            ),
            self._open_transport,
            _VirtualExecutor(self._run_attempt),
        )
        runtime._readers = []
        if self._faults.ignores_drain:
            runtime._shutdown = _DeafShutdown()
        try:
            reason = await runtime.work()
            self._trace.add(self.id, f"exits: {reason.value}")
        except WindlassError as error:
            self._trace.add(self.id, f"exits: {error}")

    @asynccontextmanager
    async def _open_transport(self) -> AsyncIterator[WorkerTransport]:
        await self.process.checkpoint()
        yield cast(WorkerTransport, self._transport)

    async def _run_attempt(self, claim: Claim, report: ReportProgress) -> Outcome:
        # The attempt counts as running until its outcome arrives: then the checker removes it.
        self.history.running[claim.token] = self._now()
        payload: Any = json.loads(claim.payload)
        own_s = payload.get("duration_s") if isinstance(payload, dict) else None
        duration_s = own_s if own_s is not None else self._rng.uniform(*self._tasks.duration_s)
        duration_s = FAILING_TASK_S if self._fails_tasks() else duration_s
        try:
            for progress in (0.5, 1.0):
                await asyncio.sleep(duration_s / 2)
                await self.process.checkpoint()
                report(progress, None)
        except asyncio.CancelledError:
            self.history.running.pop(claim.token, None)
            raise
        is_failure = self._rng.random() < self._tasks.failure_rate and self.allow_task_failure()
        if is_failure or self._fails_tasks():
            self._failed_tasks.add(claim.task_id)
            return AttemptFailure("HANDLER_ERROR", "simulated failure")
        return AttemptSuccess('"done"')


class _VirtualExecutor:
    """Stands for the executors, whose attempts are processes."""

    def __init__(self, run: Callable[[Claim, ReportProgress], Awaitable[Outcome]]) -> None:
        self._run = run

    async def start(self) -> None:
        pass

    async def run(self, claim: Claim, report: ReportProgress) -> Outcome:
        return await self._run(claim, report)

    async def close(self) -> None:
        pass


class _DeafShutdown(shutdown_state.ShutdownState):
    def drain(self, reason: str, limit_s: float) -> None:
        pass
