"""The handler of the tests. `do` in the payload selects what it does."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from windlass import DoNotRetry

_warm: dict[str, Any] = {}


def work(task: Any) -> Any:
    return globals()[f"_{task.payload.get('do', 'sleep')}"](task)


def _sleep(task: Any) -> dict[str, Any]:
    mark = task.payload.get("mark")
    if mark:
        with Path(mark).open("a") as file:
            file.write(f"{task.id} {task.claim_token}\n")
    time.sleep(task.payload.get("s", 0.0))
    _warm["seen"] = _warm.get("seen", 0) + 1
    return {"seen": _warm["seen"], "cwd": str(Path.cwd())}


def _progress(task: Any) -> None:
    task.progress(0.5, "half way")
    deadline = time.monotonic() + 30
    while not Path(task.payload["until"]).exists():
        if time.monotonic() > deadline:
            raise TimeoutError("the file did not appear")
        time.sleep(0.02)


def _fail(_task: Any) -> None:
    raise RuntimeError("on purpose")


def _quote(task: Any) -> None:
    raise RuntimeError(f"cannot render {task.payload['prompt']}")


def _never(_task: Any) -> None:
    raise DoNotRetry("never")


def _die(_task: Any) -> None:
    os._exit(7)


def _seat(_task: Any) -> str:
    """The id of the Ray task, which is the seat."""
    import ray

    return str(ray.get_runtime_context().get_task_id())


def _print(task: Any) -> None:
    print("to standard output:", task.payload["prompt"])
    sys.stderr.write("to standard error\n")
    os.write(1, b"past Python's streams\n")
    subprocess.run(["sh", "-c", 'echo "from a process: $RENDER_API_KEY"'], check=True)
    for number in range(task.payload.get("lines", 0)):
        print(f"line {number:06} {'x' * 80}")
    if task.attempt < task.payload.get("succeeds_at", 1):
        raise RuntimeError("again")
    print("without a line feed", end="")


def _large(task: Any) -> str:
    return "x" * int(task.payload["size"])


async def _awaited() -> str:
    await asyncio.sleep(0)
    return "awaited"


def _async(_task: Any) -> Any:
    return _awaited()


def _actor(task: Any) -> Any:
    """A model that is loaded once for all processes."""
    import ray

    @ray.remote(num_cpus=0)
    class Model:
        def __init__(self) -> None:
            self.asked = 0

        def ask(self) -> tuple[int, int]:
            self.asked += 1
            return os.getpid(), self.asked

    if "model" not in _warm:
        _warm["model"] = Model.options(name=task.payload["name"], get_if_exists=True).remote()
    return ray.get(_warm["model"].ask.remote())


def _nested(_task: Any) -> Any:
    import ray

    @ray.remote(num_cpus=1)
    def square(number: int) -> int:
        return number * number

    return sum(ray.get([square.remote(number) for number in range(4)]))
