"""Idle wake-up: from the call that enqueues one task to the first line of its handler, on a worker with nothing to do.

All contenders idle side by side, each with one worker process. They get one task each in turn, in an order drawn anew;
the next contender's task is sent when the last one's has arrived and the machine has been quiet for a moment.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from bench.bench_server import BenchServer
from bench.contenders.bare import Bare
from bench.contenders.base import Contender, Mode, Send
from bench.contenders.ours import Windlass
from bench.contenders.pgmq import Pgmq
from bench.contenders.pgqueuer import PgQueuer
from bench.contenders.procrastinate import Procrastinate
from bench.shared_counters import SharedCounters
from bench.worker_processes import WorkerProcesses, worker_processes

# Longer than any contender's polling interval; then notifications do not reach it at all.
ARRIVAL_TIMEOUT_S = 45.0
QUIET_S = 0.01

ENTRIES: Mapping[str, tuple[Contender, Mode]] = {
    "bare LISTEN": (Bare(), Mode(task="wake")),
    "windlass --inline": (Windlass(), Mode(task="wake", variant="inline")),
    "windlass": (Windlass(), Mode(task="wake", variant="isolated")),
    "pgmq": (Pgmq(), Mode(task="wake", variant="delete")),
    "pgqueuer": (PgQueuer(), Mode(task="wake", batch=10)),
    "procrastinate": (Procrastinate(), Mode(task="wake")),
}


@dataclass(slots=True)
class _IdleWorker:
    send: Send
    counters: SharedCounters
    workers: WorkerProcesses
    arrived: int = 0

    async def wake(self) -> float:
        """Milliseconds from sending to arrival."""
        await self.send(time.monotonic_ns())
        deadline = time.monotonic() + ARRIVAL_TIMEOUT_S
        while len(latencies := self.counters.latencies_ns()) == self.arrived:
            self.workers.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"a task did not arrive within {ARRIVAL_TIMEOUT_S:g} s")
            await asyncio.sleep(0.002)
        self.arrived = len(latencies)
        return latencies[-1] / 1e6


async def measure(
    server: BenchServer, tasks: int, entries: Mapping[str, tuple[Contender, Mode]]
) -> dict[str, list[float]]:
    """Milliseconds of every task, by contender."""
    samples: dict[str, list[float]] = {name: [] for name in entries}
    async with AsyncExitStack() as stack:
        idle_workers = {
            name: await stack.enter_async_context(_idle(server, number, contender, mode))
            for number, (name, (contender, mode)) in enumerate(entries.items())
        }
        order = list(idle_workers)
        for _ in range(tasks):
            random.shuffle(order)
            for name in order:
                await asyncio.sleep(QUIET_S)
                samples[name].append(await idle_workers[name].wake())
    return samples


@asynccontextmanager
async def _idle(server: BenchServer, number: int, contender: Contender, mode: Mode) -> AsyncIterator[_IdleWorker]:
    template = await server.template(f"{contender.schema}_empty", contender.install)
    async with server.copy(template, f"idle_{number}") as dsn, contender.producer(dsn) as send:
        counters = SharedCounters(server.folder / f"idle_{number}")
        with worker_processes(
            contender.worker(mode), 1, dsn, counters, server.folder / f"idle_{number}.log"
        ) as workers:
            idle_worker = _IdleWorker(send, counters, workers)
            await idle_worker.wake()  # the first one waits for the worker to start
            yield idle_worker
