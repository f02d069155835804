"""A running site for browser tests: `windlass up` with local workers on a real PostgreSQL.

Fleet `renders` runs tasks that block on a file, fail, or complete at once. Fleet `idle` has one worker and no tasks.
Fleet `cloud` consists of database rows only: priced servers, their workers and their cost.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import asyncpg
import httpx
import psutil
from playwright.sync_api import Page

from support.marked_processes import live_processes
from support.postgres_servers import run_aside, wait_until
from support.stores import PostgresStores
from windlass.model.task import Task, TaskStatus, new_task
from windlass.model.worker import Worker

TIMEOUT_S = 30.0
T = TypeVar("T")
# Opens a path in a new browser context: see conftest.py.
NewPage = Callable[..., Page]
APP = """
import time
from pathlib import Path

def work(task):
    payload = task.payload or {}
    if payload.get("error"):
        raise RuntimeError(payload["error"])
    go = payload.get("go")
    if go:
        task.progress(0.4, "step 2 of 5")
    while go and not Path(go).exists():
        time.sleep(0.02)
    return {"image": "lighthouse.png"}
"""
TOML = """
[api]
open_reading = true
[control]
lease_s = 10

[fleets.renders]
queues = ["renders"]
handler = "app:work"
chdir = {folder}
min_workers = 1
max_workers = 6
poll_interval_s = 0.3
heartbeat_interval_s = 0.3
heartbeat_timeout_s = 20
idle_timeout_s = 600
stop_timeout_s = 5

[fleets.idle]
queues = ["idle"]
handler = "app:work"
chdir = {folder}
min_workers = 1
max_workers = 2
poll_interval_s = 0.3
heartbeat_interval_s = 0.3
heartbeat_timeout_s = 20
stop_timeout_s = 5
budget_per_day = 10
"""
# A fleet of three servers that are billed by the hour, with the cost of the last 60 hours.
CLOUD_SQL = """
insert into windlass.fleets (name, provider, queues, min_workers, max_workers, planner_state)
values ('cloud', 'hetzner', '{clips}', 0, 40,
  jsonb_build_object('cadence', jsonb_build_object('planned_at', now(), 'next_plan_in_s', 3600)));
insert into windlass.slots (fleet, slot) select 'cloud', generate_series(0, 2);
insert into windlass.workers (
  id, fleet, slot, status, queues, activated_at, last_heartbeat, lease_s, instance_type, machine_id, vram_total_mb,
  vram_used_mb, price_micros_per_hour, currency, billing_unit_s, billed_since
)
select 'cloud-' || s, 'cloud', s, 'active', '{clips}', now() - interval '39 minutes', now(), 86400, 'cx23', 'm' || s,
  24576, 8000 * s, 9000, 'EUR', 3600, now() - interval '40 minutes'
from generate_series(0, 2) as s;
insert into windlass.spending (fleet, hour, currency, queue, task_micros, boot_micros, idle_micros, tail_micros)
select 'cloud', date_trunc('hour', now()) - h * interval '1 hour', 'EUR', 'clips', 27000, 900, 4000, 1100
from generate_series(1, 60) as h;
insert into windlass.charges (worker_id, fleet, queue, kind, from_at, until_at, amount_micros, currency)
select 'cloud-old', 'cloud', 'clips', 'task', now() - h * interval '1 hour', now() - (h - 1) * interval '1 hour',
  27000, 'EUR'
from generate_series(1, 60) as h;
"""


class BrowserSite:
    def __init__(self, folder: Path, dsn: str) -> None:
        self.folder = folder
        self.dsn = dsn
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._blocked: list[Path] = []
        self._ups: list[subprocess.Popen[bytes]] = []
        # A variable that `windlass up` and its workers inherit.
        self._mark = f"BROWSER_SITE_{uuid4().hex}"
        (folder / "app.py").write_text(APP)
        (folder / "windlass.toml").write_text(TOML.format(folder=json.dumps(str(folder))))

    def start(self) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("WINDLASS_")}
        with self._log_path(len(self._ups)).open("wb") as log:
            self._ups.append(
                subprocess.Popen(
                    [sys.executable, "-m", "windlass", "up", "--port", str(self.port), "--log-format", "json"],
                    cwd=self.folder,
                    env={**environment, "DATABASE_URL": self.dsn, self._mark: "1"},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        wait_until(self.is_ready, TIMEOUT_S, f"start `windlass up`\n{self.log()}")

    def is_ready(self) -> bool:
        assert self._ups[-1].poll() is None, self.log()
        try:
            return httpx.get(f"{self.url}/readyz", trust_env=False, timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    @contextlib.contextmanager
    def worker_by_hand(self, queue: str) -> Iterator[str]:
        """A `windlass worker` of fleet `default`, which nothing configures. Yields its id."""
        command = [sys.executable, "-m", "windlass", "worker", "--queue", queue, "--handler", "app:work"]
        environment = {**os.environ, "DATABASE_URL": self.dsn}
        process = subprocess.Popen(command, cwd=self.folder, env=environment, stderr=subprocess.DEVNULL)
        try:
            yield self.active_worker("default").id
        finally:
            process.terminate()
            process.wait(TIMEOUT_S)

    def kill(self) -> None:
        """Kill `windlass up` with SIGKILL. Its workers keep running."""
        self._ups[-1].kill()
        self._ups[-1].wait(TIMEOUT_S)

    def stop(self) -> None:
        self.release_tasks()
        if self._ups[-1].poll() is None:
            self._ups[-1].send_signal(signal.SIGTERM)
            self._ups[-1].wait(2 * TIMEOUT_S)
        # A successor of a killed `windlass up` may be stopped before it leads, and leaves the workers running.
        for process in live_processes(self._mark):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _log_path(self, number: int) -> Path:
        return self.folder / f"up-{number}.log"

    def log(self) -> str:
        return self._log_path(len(self._ups) - 1).read_text(errors="replace")[-4_000:]

    def create_link(self, role: str = "operator") -> str:
        """A login link from `windlass tokens link`."""
        done = subprocess.run(
            [sys.executable, "-m", "windlass", "tokens", "link", "--role", role, "--url", self.url],
            cwd=self.folder,
            env={**os.environ, "DATABASE_URL": self.dsn},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
        )
        return done.stdout.strip()

    def query(self, read: Callable[[PostgresStores], Coroutine[Any, Any, T]]) -> T:
        async def run() -> T:
            async with PostgresStores(self.dsn) as store:
                return await read(store)

        return run_aside(run())

    def execute(self, sql: str) -> None:
        async def run() -> None:
            connection = await asyncpg.connect(self.dsn)
            try:
                await connection.execute(sql)
            finally:
                await connection.close()

        run_aside(run())

    def enqueue(self, queue: str = "renders", payload: Any = None, **options: Any) -> int:
        return self.query(lambda store: store.enqueue(new_task(queue, payload, **options)))

    def start_blocked_task(self) -> int:
        """Enqueue a task that runs until `release_tasks`, and wait until it runs."""
        self._blocked.append(self.folder / f"go-{len(self._blocked)}")
        task_id = self.enqueue(payload={"go": str(self._blocked[-1])})
        self.wait_for_task(task_id, TaskStatus.RUNNING)
        return task_id

    def release_tasks(self) -> None:
        """Let all blocked tasks complete."""
        for path in self._blocked:
            path.touch()

    def create_failed_task(self, error: str = "CUDA out of memory") -> int:
        task_id = self.enqueue(payload={"error": error}, max_attempts=1)
        self.wait_for_task(task_id, TaskStatus.FAILED)
        return task_id

    def task(self, task_id: int) -> Task:
        found = self.query(lambda store: store.task(task_id))
        assert found is not None
        return found

    def wait_for_task(self, task_id: int, status: TaskStatus) -> Task:
        wait_until(
            lambda: self.task(task_id).status is status,
            TIMEOUT_S,
            f"wait for task {task_id} to be {status}\n{self.log()}",
        )
        return self.task(task_id)

    def workers(self, fleet: str = "renders") -> list[Worker]:
        return [worker for worker in self.query(lambda store: store.workers()) if worker.fleet == fleet]

    def active_worker(self, fleet: str = "renders") -> Worker:
        def active() -> list[Worker]:
            return [w for w in self.workers(fleet) if w.status == "active" and not w.is_paused]

        wait_until(lambda: bool(active()), TIMEOUT_S, f"wait for an active worker of {fleet}\n{self.log()}")
        return active()[-1]
