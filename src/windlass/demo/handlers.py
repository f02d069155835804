"""The handler that workers of `windlass demo` run."""

import os
import signal
import time

from windlass.worker.handler import RunningTask

STUCK_S = 3600.0


def work(task: RunningTask) -> dict[str, int]:
    """Sleep for `work_s`. A poisonous task kills its worker in every attempt, a stuck task hangs in its first."""
    if task.payload.get("is_stuck") and task.attempt == 1:
        time.sleep(STUCK_S)
    time.sleep(task.payload["work_s"])
    if task.payload["is_poisonous"]:
        # The parent of the handler's process is the worker.
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(task.payload["work_s"])
    return {"number": task.payload["number"], "attempt": task.attempt}
