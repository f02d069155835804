"""A folder with an app and a windlass.toml, in which `windlass up` and its local workers run as processes."""

import json
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil

from support.command_line import CommandLine
from support.marked_processes import live_processes
from support.stores import PostgresStores
from support.worker_harness import PATIENCE_S, until
from windlass.model.cycle import Cycle, Fleet
from windlass.model.task import Task, TaskStatus, new_task
from windlass.model.worker import Worker, WorkerStatus

QUEUE = "work"


APP = """
import os
import time
from pathlib import Path

def work(task):
    print("running task", task.id, flush=True)
    if task.payload and "env" in task.payload:
        return os.environ.get(task.payload["env"])
    if task.payload and "names_of" in task.payload:
        return [name for name, value in os.environ.items() if task.payload["names_of"] in value]
    go = task.payload and task.payload.get("go")
    while go and not Path(go).exists():
        time.sleep(0.01)
    return task.attempt
"""


SETTINGS: dict[str, Any] = {
    "queues": [QUEUE],
    "handler": "app:work",
    "poll_interval_s": 0.3,
    "heartbeat_interval_s": 0.2,
    "heartbeat_timeout_s": 20,
    "spawn_timeout_s": 30,
    "idle_timeout_s": 0.5,
    "stop_timeout_s": 5,
    "max_workers": 3,
}


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {json.dumps(text)}" for name, text in value.items()) + "}"
    return json.dumps(value)


class FleetHost:
    """The folder, its database, and all processes that were started in it."""

    def __init__(self, folder: Path, dsn: str) -> None:
        self.folder = folder
        # Every process that is started here has this variable, also detached ones.
        self._mark = f"HOST_{uuid4().hex}"
        self.windlass = CommandLine(folder, {"DATABASE_URL": dsn, self._mark: "1"})
        self.store = PostgresStores(dsn)
        self.ups: list[subprocess.Popen[str]] = []
        (folder / "app.py").write_text(APP)
        self.configure()

    def configure(self, file: str = "windlass.toml", *, lease_s: float = 10, **settings: Any) -> None:
        chosen = {**SETTINGS, "chdir": str(self.folder), **settings}
        lines = [f"{name} = {_toml(value)}" for name, value in chosen.items() if value is not None]
        head = f'data_dir = "state"\n[control]\nlease_s = {lease_s}\n[fleets.default]\n'
        (self.folder / file).write_text(head + "\n".join(lines))

    def up(self, *arguments: str) -> "subprocess.Popen[str]":
        with (self.folder / f"up-{len(self.ups)}.log").open("w") as log:
            process = self.windlass.start("up", *arguments, stderr=log, stdout=log, start_new_session=True)
        self.ups.append(process)
        return process

    async def up_without_its_handler_file(self, *arguments: str) -> "subprocess.Popen[str]":
        """Start `up`, then delete the handler's file: `up` would refuse to start without it."""
        (self.folder / "missing.py").write_text(APP)
        up = self.up(*arguments)
        await until(lambda: "cycle" in self.log(), f"a first cycle\n{self.log()}")
        (self.folder / "missing.py").unlink()
        return up

    def log(self) -> str:
        return (self.folder / f"up-{len(self.ups) - 1}.log").read_text()

    async def stop(self, up: "subprocess.Popen[str]") -> None:
        """Stop `up` with SIGTERM. No process may remain."""
        up.send_signal(signal.SIGTERM)
        await until(lambda: up.poll() is not None, f"end of up\n{self.log()}")
        assert (up.returncode, self.live_processes()) == (0, []), self.log()

    def live_processes(self) -> list[psutil.Process]:
        return live_processes(self._mark)

    def worker_processes(self) -> list[int]:
        """Worker processes, without the processes of their handlers."""
        launched = [p for p in self.live_processes() if "windlass.providers.local.entry_point" in p.cmdline()]
        pids = {process.pid for process in launched}
        return [process.pid for process in launched if process.ppid() not in pids]

    # -------------------------------------------------------------------------------------------------- the database

    async def enqueue(self, *payloads: Any) -> list[int]:
        return [await self.store.enqueue(new_task(QUEUE, payload)) for payload in payloads]

    async def task(self, task_id: int) -> Task:
        task = await self.store.task(task_id)
        assert task is not None
        return task

    async def until_status(self, status: TaskStatus, *task_ids: int, attempt: int | None = None) -> Task:
        async def first_if_all_match() -> Task | None:
            tasks = [await self.task(task_id) for task_id in task_ids]
            is_match = all(task.status is status and attempt in (None, task.attempts) for task in tasks)
            return tasks[0] if is_match else None

        task: Task = await until(first_if_all_match, f"tasks {task_ids} are {status}\n{self.log() if self.ups else ''}")
        return task

    async def until_workers(self, count: int) -> list[Worker]:
        """Wait for this number of workers, all active."""

        async def active_workers() -> list[Worker] | bool:
            workers = await self.store.workers()
            is_match = len(workers) == count and all(worker.status is WorkerStatus.ACTIVE for worker in workers)
            return (workers or True) if is_match else False

        found = await until(active_workers, f"{count} workers\n{self.log() if self.ups else ''}")
        return found if isinstance(found, list) else []

    async def fleet(self) -> Fleet:
        (fleet,) = await self.store.fleets()
        return fleet

    async def last_cycle(self) -> Cycle:
        (cycle,) = await self.store.cycles("default", 1)
        return cycle

    async def until_decision(self, text: str) -> Cycle:
        async def matching_cycle() -> Cycle | None:
            return next((cycle for cycle in await self.store.cycles("default") if text in cycle.decision), None)

        cycle: Cycle = await until(matching_cycle, f"a decision with {text!r}\n{self.log() if self.ups else ''}")
        return cycle


@asynccontextmanager
async def open_fleet_host(folder: Path, dsn: str) -> AsyncIterator[FleetHost]:
    host = FleetHost(folder, dsn)
    async with host.store:
        try:
            yield host
        finally:
            for process in host.live_processes():
                with suppress(psutil.NoSuchProcess):  # the processes of `up` end with their supervisor
                    process.kill()
            for up in host.ups:
                up.wait(PATIENCE_S)
