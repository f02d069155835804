"""What the workers of `windlass demo` run."""

import os
import signal
import time

from windlass.worker.handler import RunningTask

NEVER_S = 3600.0


def work(task: RunningTask) -> dict[str, int]:
    """Takes the time it is told to. The poisonous one takes its worker along, each time; the stuck one does not end
    when it is first tried."""
    if task.payload.get("is_stuck") and task.attempt == 1:
        time.sleep(NEVER_S)
    time.sleep(task.payload["work_s"])
    if task.payload["is_poisonous"]:
        # A handler runs in a process of its own, whose parent is the worker.
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(task.payload["work_s"])
    return {"number": task.payload["number"], "attempt": task.attempt}
