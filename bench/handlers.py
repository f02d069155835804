"""Handlers of Windlass workers in the benchmarks: `windlass worker --handler bench.handlers:noop`."""

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
