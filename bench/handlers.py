"""What Windlass' own workers run in the benchmarks: `windlass worker --handler bench.handlers:noop`."""

from bench import tally
from windlass import RunningTask


def noop(_task: RunningTask) -> None:
    tally.count()


async def noop_inline(_task: RunningTask) -> None:
    tally.count()


def wake(task: RunningTask) -> None:
    tally.arrived(task.payload)


async def wake_inline(task: RunningTask) -> None:
    tally.arrived(task.payload)


def nothing(task: object) -> None:
    """For a single task, whose end the database tells."""
