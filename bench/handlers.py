"""Handlers of Windlass workers in the benchmarks: `windlass worker --handler bench.handlers:noop`."""

import asyncio
import functools
import os
import time

from bench import shared_counters as counters
from windlass import RunningTask


def noop(_task: RunningTask) -> None:
    counters.count()


async def noop_inline(_task: RunningTask) -> None:
    counters.count()


def wake(task: RunningTask) -> None:
    counters.arrived(task.payload)


async def wake_inline(task: RunningTask) -> None:
    counters.arrived(task.payload)


def nothing(task: object) -> None:
    """For a single task, whose end the database tells."""


async def record_run(task: RunningTask) -> None:
    """Append one line per run: when, which process, which task. A kill must neither lose a task nor run it twice."""
    line = f"{time.monotonic()} {os.getpid()} {task.id}\n"
    await asyncio.sleep(0.005)
    os.write(_runs(), line.encode())


@functools.cache
def _runs() -> int:
    return os.open(os.environ["BENCH_RUNS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
