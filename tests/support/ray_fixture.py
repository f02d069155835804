"""A Ray cluster for tests: one head per module, and nodes and dispatchers as processes of each test."""

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from support.stores import PostgresStores
from windlass.model.ray import RaySettings
from windlass.model.task import NewTask, TaskStatus, new_task
from windlass.ray.head import HeadAddress, run_head

HANDLERS = Path(__file__).parents[1] / "ray"
WAIT_S = 120.0
POLL_S = 0.05
LEASE_S = 6.0
# By default Ray declares a silent node dead after a minute; in tests after some seconds.
FAST_HEALTH_CHECKS = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}


@contextmanager
def head_in_thread() -> Iterator[HeadAddress]:
    """Run a head from an event loop in another thread."""
    environment, started, stopping = dict(os.environ), threading.Event(), threading.Event()
    os.environ.update(FAST_HEALTH_CHECKS)
    found: list[HeadAddress] = []
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with run_head() as head:
            found.append(head)
            started.set()
            while not stopping.is_set():
                await asyncio.sleep(POLL_S)

    def run() -> None:
        try:
            loop.run_until_complete(serve())
        finally:
            started.set()
            loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    started.wait(WAIT_S)
    try:
        yield found[0]
    finally:
        stopping.set()
        thread.join()
        os.environ.clear()
        os.environ.update(environment)


async def until(condition: Callable[[], Awaitable[Any]], what: str, timeout_s: float = WAIT_S) -> Any:
    """Wait for a true result of `condition` and return it."""
    deadline = time.monotonic() + timeout_s
    while not (found := await condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        await asyncio.sleep(POLL_S)
    return found


@dataclass(slots=True)
class RayFixture:
    """A fleet with its own nodes, dispatchers and database, on a shared head."""

    head: HeadAddress
    dsn: str
    folder: Path
    store: PostgresStores
    # Unique: the shared head takes some seconds to notice that the nodes of another test are gone.
    fleet: str = field(default_factory=lambda: f"many-{secrets.token_hex(3)}")
    settings: dict[str, Any] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)

    # ------------------------------------------------------------------------------------------------- processes

    async def spawn_nodes(self, *worker_ids: str, cpus: int = 2) -> None:
        for slot, worker_id in enumerate(worker_ids, start=len(self.processes)):
            await self._insert_spawning_worker(worker_id, slot)
            offered = RaySettings(node_cpus=cpus, node_gpus=0, object_store_mb=80).model_dump_json()
            arguments = ["node", "--address", self.head.address, "--settings", offered, "--queue", "q"]
            timing = ["--heartbeat-interval", "1", "--lease", str(LEASE_S), "--chdir", str(HANDLERS)]
            self.start(worker_id, *arguments, *timing, WINDLASS_WORKER_ID=worker_id, WINDLASS_FLEET=self.fleet)

    def start_external_node(self, name: str, resources: dict[str, float], **environment: str) -> None:
        """Start a node with plain `ray start`, as KubeRay or `ray up` would."""
        command = ["ray.scripts.scripts", "start", "--block", f"--address={self.head.address}", "--num-gpus=0"]
        offered = ["--num-cpus=2", f"--resources={json.dumps(resources)}", "--object-store-memory=83886080"]
        ports = ["--min-worker-port=0", "--max-worker-port=0", "--disable-usage-stats"]
        # Ray creates sockets there, whose paths must be short.
        folder = tempfile.mkdtemp(prefix="wl-ray-", dir="/tmp")
        self.folders.append(folder)
        self._start(name, [*command, *offered, *ports, f"--temp-dir={folder}"], environment, cwd=HANDLERS)

    async def _insert_spawning_worker(self, worker_id: str, slot: int) -> None:
        async with self.store.database.connection("spawning for a test") as connection:
            await connection.execute(
                "insert into windlass.fleets (name) values ($1) on conflict do nothing", self.fleet
            )
            await connection.execute("insert into windlass.slots (fleet, slot) values ($1, $2)", self.fleet, slot)
            await connection.execute(
                "insert into windlass.workers (id, fleet, slot, status, kind, queues, lease_s) "
                "values ($1, $2, $3, 'spawning', 'node', '{q}', $4)",
                worker_id,
                self.fleet,
                slot,
                LEASE_S,
            )

    def start_dispatcher(self, name: str = "dispatcher", **environment: str) -> subprocess.Popen[bytes]:
        config = self.folder / "windlass.toml"
        settings = {
            "provider": "ray-local",
            "queues": ["q"],
            "handler": "ray_handlers:work",
            "chdir": str(HANDLERS),
            "heartbeat_interval_s": 1,
            "heartbeat_timeout_s": LEASE_S,
            **self.settings,
        }
        lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items() if value is not None]
        config.write_text("\n".join([f"[fleets.{self.fleet}]", *lines]))
        return self.start(name, "dispatch", "--fleet", self.fleet, "--config", str(config), **environment)

    def start(self, name: str, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        return self._start(name, ["windlass", "ray", *arguments], environment)

    def _start(
        self, name: str, module: list[str], environment: dict[str, str], cwd: Path | None = None
    ) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", *module],
                cwd=cwd,
                env={**os.environ, "DATABASE_URL": self.dsn, "RAY_ADDRESS": self.head.address, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self.processes[name]

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait(WAIT_S)

    def raylet_of(self, worker_id: str) -> psutil.Process:
        children = psutil.Process(self.processes[worker_id].pid).children(recursive=True)
        (raylet,) = [child for child in children if child.name() == "raylet"]
        return raylet

    def close(self) -> None:
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(WAIT_S)
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    # ------------------------------------------------------------------------------------------------------ tasks

    async def enqueue(self, count: int = 1, **payload: Any) -> list[int]:
        return [await self.store.enqueue(new_task("q", {**payload, "number": number})) for number in range(count)]

    async def add(self, task: NewTask) -> int:
        return await self.store.enqueue(task)

    async def wait_for_tasks(self, task_ids: list[int], timeout_s: float = WAIT_S) -> list[Any]:
        terminal = (TaskStatus.COMPLETE, TaskStatus.FAILED)

        async def finished() -> list[Any]:
            tasks = [await self.store.task(task_id) for task_id in task_ids]
            return tasks if all(task is not None and task.status in terminal for task in tasks) else []

        found: list[Any] = await until(finished, f"finishing {len(task_ids)} tasks", timeout_s)
        return found

    async def running_on(self, *worker_ids: str) -> list[Any]:
        tasks = await self.store.tasks(status=TaskStatus.RUNNING, limit=1000)
        return [task for task in tasks if task.worker_id in worker_ids]

    async def nodes(self, state: str) -> set[str]:
        workers = await self.store.workers()
        return {worker.id for worker in workers if worker.node is not None and worker.node.state.value == state}

    async def wait_for_nodes(self, *worker_ids: str) -> None:
        async def are_alive() -> bool:
            return set(worker_ids) <= await self.nodes("alive")

        await until(are_alive, f"{worker_ids} joining")


@asynccontextmanager
async def ray_fixture(head: HeadAddress, dsn: str, folder: Path) -> AsyncIterator[RayFixture]:
    async with PostgresStores(dsn) as store:
        fixture = RayFixture(head, dsn, folder, store)
        try:
            yield fixture
        finally:
            await asyncio.to_thread(fixture.close)
