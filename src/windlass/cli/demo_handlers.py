"""What the workers of `windlass demo` run."""

import time

from windlass.worker.handler import RunningTask


def work(task: RunningTask) -> dict[str, int]:
    """Takes the time it is told to, and fails the first time if it is told to."""
    time.sleep(task.payload["work_s"])
    if task.payload["fails_once"] and task.attempt == 1:
        raise RuntimeError("the first attempt of this task fails on purpose")
    return {"number": task.payload["number"], "attempt": task.attempt}
