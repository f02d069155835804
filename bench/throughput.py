"""Tasks per second: one at a time, and many small ones at once.

All contenders are started together, each with its worker processes and its own database, and stopped with SIGSTOP.
In each round every contender runs alone for a short window, in random order, and the calls of its handler are counted.
A disturbance longer than a round affects all alike. Afterwards each database must contain as many finished tasks as
were handled; otherwise the figures are rejected.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from bench.bench_server import BenchServer, connected
from bench.contenders.bare import Bare
from bench.contenders.base import Contender, Mode
from bench.contenders.ours import Windlass
from bench.contenders.pgmq import Pgmq
from bench.contenders.pgqueuer import PgQueuer
from bench.contenders.procrastinate import Procrastinate
from bench.machine_load import QUIET_SHARE, LoadMonitor
from bench.shared_counters import SharedCounters
from bench.worker_processes import WorkerProcesses, worker_processes

# Delay between resuming workers and counting, so that they reach their normal speed.
SETTLE_S = 0.1
# A disturbed window is repeated at most this often; the queue has tasks for all repetitions.
MAX_TRIES = 3


@dataclass(frozen=True, slots=True)
class Entry:
    contender: Contender
    mode: Mode
    # Upper bound of the rate, used to fill the queue: it must not run empty.
    max_per_s: int


ONE_AT_A_TIME: Mapping[str, Entry] = {
    "bare loop": Entry(Bare(), Mode(), 12_000),
    "windlass --inline": Entry(Windlass(), Mode(variant="inline"), 12_000),
    "windlass": Entry(Windlass(), Mode(variant="isolated"), 12_000),
    "pgmq, delete": Entry(Pgmq(), Mode(variant="delete"), 6_000),
    "pgmq, archive": Entry(Pgmq(), Mode(variant="archive"), 6_000),
    "pgqueuer": Entry(PgQueuer(), Mode(), 4_000),
    "procrastinate": Entry(Procrastinate(), Mode(), 2_000),
}
# Each at the batch size at which it was fastest on the machine of docs/benchmarks.md; `--part sweep` finds them.
IN_BATCHES: Mapping[str, Entry] = {
    "bare loop": Entry(Bare(), Mode(batch=1000), 80_000),
    "windlass --inline": Entry(Windlass(), Mode(batch=2000, variant="inline"), 80_000),
    "pgmq, delete": Entry(Pgmq(), Mode(batch=1000, variant="delete"), 100_000),
    "pgmq, archive": Entry(Pgmq(), Mode(batch=1000, variant="archive"), 80_000),
    "pgqueuer": Entry(PgQueuer(), Mode(batch=500), 30_000),
    "procrastinate": Entry(Procrastinate(), Mode(batch=10), 2_000),
}


async def measure(
    server: BenchServer,
    entries: Mapping[str, Entry],
    processes: int,
    rounds: int,
    window_s: float,
    quiet_timeout_s: float,
) -> dict[str, list[float]]:
    """Tasks per second of every entry, one value per round."""
    monitor = LoadMonitor(server.postgres_data, quiet_timeout_s)
    samples: dict[str, list[float]] = {name: [] for name in entries}
    turns = rounds * (MAX_TRIES if quiet_timeout_s else 1) + 1
    async with AsyncExitStack() as stack:
        # Create all databases before all workers: creating one waits for every server process, including one that is
        # blocked because the worker it writes to was stopped.
        databases = {
            name: await stack.enter_async_context(
                _filled_database(server, number, entry, turns * (window_s + SETTLE_S))
            )
            for number, (name, entry) in enumerate(entries.items())
        }
        workers_by_entry = {
            name: await stack.enter_async_context(_stopped_workers(server, number, entry, processes, databases[name]))
            for number, (name, entry) in enumerate(entries.items())
        }
        await server.checkpoint()
        order = list(workers_by_entry)
        for _ in range(rounds):
            random.shuffle(order)
            for name in order:
                samples[name].append(await _measure_window(workers_by_entry[name], monitor, window_s))
    return samples


async def _measure_window(workers: WorkerProcesses, monitor: LoadMonitor, window_s: float) -> float:
    """Measure one window; repeat it within the quiet timeout if other processes used the machine."""
    deadline = monitor.deadline()
    for _ in range(MAX_TRIES):
        await monitor.until_quiet(deadline)
        workers.resume()
        await asyncio.sleep(SETTLE_S)
        moment, before = monitor.sample(), sum(workers.counts())
        await asyncio.sleep(window_s)
        rate = (sum(workers.counts()) - before) / (time.monotonic() - moment.at)
        others = monitor.share_of_others(moment)
        workers.check()
        workers.pause()
        if others < QUIET_SHARE or time.monotonic() >= deadline:
            break
    return rate


@dataclass(frozen=True, slots=True)
class _FilledDatabase:
    """A database of one contender, with tasks for all its windows."""

    dsn: str
    tasks: int


@asynccontextmanager
async def _filled_database(
    server: BenchServer, number: int, entry: Entry, seconds: float
) -> AsyncIterator[_FilledDatabase]:
    tasks = int(entry.max_per_s * seconds)
    template = await _filled(server, entry.contender, tasks)
    async with server.copy(template, f"contender_{number}") as dsn:
        yield _FilledDatabase(dsn, tasks)


@asynccontextmanager
async def _stopped_workers(
    server: BenchServer, number: int, entry: Entry, processes: int, database: _FilledDatabase
) -> AsyncIterator[WorkerProcesses]:
    """The workers of an entry, each with its first task claimed, stopped with SIGSTOP."""
    command = entry.contender.worker(entry.mode)
    counters = SharedCounters(server.folder / f"tally_{number}")
    with worker_processes(
        command, processes, database.dsn, counters, server.folder / f"workers_{number}.log"
    ) as workers:
        await workers.wait_until_all_started()
        counters.release()
        workers.pause()
        yield workers
        handled = sum(workers.counts())
    async with connected(database.dsn) as connection:
        finished = await entry.contender.finished(connection)
    if handled >= database.tasks:
        raise RuntimeError(f"{command} emptied the queue of {database.tasks:,} tasks: raise its most_per_s")
    # Tasks claimed when the workers were stopped, several batches deep, may be missing.
    if finished < handled - 10 * entry.mode.batch * processes:
        raise RuntimeError(f"{command} handled {handled:,} tasks and finished only {finished:,}")


async def _filled(server: BenchServer, contender: Contender, tasks: int) -> str:
    async def build(dsn: str) -> None:
        await contender.install(dsn)
        await contender.enqueue(dsn, tasks)

    return await server.template(f"{contender.schema}_{tasks}", build)
