"""The built-in task of `windlass doctor --live`: proves that a machine can run a task, and says what it is."""

import os
import platform
from importlib.metadata import version
from typing import Any

from windlass.worker.handler import RunningTask


def answer(task: RunningTask) -> dict[str, Any]:
    task.progress(1.0, "rehearsal")
    return {
        "windlass": version("windlass"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
    }
