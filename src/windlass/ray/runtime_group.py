"""The worker runtimes of a dispatcher, one per kind of task, which start and end together."""

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import Any

from windlass.model.lease import LeaseLost
from windlass.worker.lifecycle import ExitReason, WorkerRuntime


class RuntimeGroup:
    def __init__(self, name: str) -> None:
        self._name = name
        self._runtimes: deque[WorkerRuntime] = deque()
        self.stop_requested = asyncio.Event()

    def add(self, runtime: WorkerRuntime) -> None:
        self._runtimes.append(runtime)

    def stop(self) -> None:
        """Finish running tasks, release those that have not begun, and exit. A second call releases all of them."""
        limit_s = 0.0 if self.stop_requested.is_set() else None
        self.stop_requested.set()
        for runtime in self._runtimes:
            runtime.drain("stop requested", limit_s)

    def recheck_capacity(self) -> None:
        # The first to be woken claims first. Without the rotation one kind would take every slot that becomes free.
        self._runtimes.rotate(-1)
        for runtime in self._runtimes:
            runtime.recheck_capacity()

    async def run(self, *watches: Coroutine[Any, Any, None]) -> None:
        """Run until all runtimes have ended. If one of them or a watch fails, all end at once.

        A runtime that the control plane drained leaves its queues unserved: then the others drain too, and LeaseLost is
        raised so that another dispatcher is started.
        """
        if self.stop_requested.is_set():
            self.stop()
        working = [asyncio.create_task(runtime.work()) for runtime in self._runtimes]
        watching = [asyncio.create_task(watch) for watch in watches]
        is_drained = False
        try:
            pending: set[asyncio.Task[Any]] = {*working, *watching}
            while not all(task.done() for task in working):
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if task.result() is ExitReason.LOST:
                        raise LeaseLost(f"dispatcher {self._name} was declared lost or replaced")
                    if task.result() is ExitReason.DRAINED and not self.stop_requested.is_set():
                        is_drained = True
                        for runtime in self._runtimes:
                            runtime.drain("the dispatcher was drained")
            if is_drained and not self.stop_requested.is_set():
                raise LeaseLost(f"dispatcher {self._name} was drained by the control plane")
        finally:
            for task in watching:
                task.cancel()
            for runtime in self._runtimes:
                runtime.drain("the dispatcher ends", 0.0)
            await asyncio.gather(*watching, *working, return_exceptions=True)
