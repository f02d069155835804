"""Real `windlass worker` processes for tests. At the end of a test none of their processes may still run."""

import asyncio
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import asyncpg
import psutil

from support.marked_processes import live_processes
from support.postgres_servers import run_aside, wait_until
from support.stores import PostgresStores
from windlass.model.task import Task, TaskStatus, new_task
from windlass.model.worker import Worker, WorkerStatus
from windlass.store.embedded import EmbeddedPostgres
from windlass.store.migration import migrate

HERE = Path(__file__).parents[1] / "e2e"
PROGRAM = Path(sys.executable).with_name("windlass")
POLL_S = 0.02
# Generous, because the machine may be busy with other tests.
PATIENCE_S = 90.0
QUEUE = "work"
# Warnings of Python about unclosed resources. No worker may print one, not even at its exit.
LEAK_WARNINGS = ("ResourceWarning", "RuntimeWarning", "never retrieved", "Task was destroyed", "Exception ignored")

# One row for each heartbeat that reached the database, for the longest gap between two.
HEARTBEATS_SQL = """
create table public.beats (worker_id text, at timestamptz);
create function public.record_heartbeat() returns trigger language plpgsql as $$
begin
  insert into public.beats values (new.id, clock_timestamp());
  return null;
end
$$;
create trigger record_heartbeat after update of last_heartbeat on windlass.workers
  for each row when (new.last_heartbeat is distinct from old.last_heartbeat) execute function public.record_heartbeat();
"""
LONGEST_GAP_SQL = """
select extract(epoch from max(gap))::float8
from (
  select at - lag(at) over (order by at) as gap
  from (
    select at from public.beats where worker_id = $1 and at > $2
    union all
    values ($2::timestamptz), (clock_timestamp())
  ) as moments
) as gaps
"""


async def until(condition: Callable[[], Awaitable[Any] | Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
    """Wait until the condition is true and return its value."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = condition()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        if time.monotonic() > deadline:
            raise TimeoutError(f"timed out after {timeout_s:g} s: {what}")
        await asyncio.sleep(POLL_S)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def descendants(pid: int) -> list[psutil.Process]:
    """The live descendants of a process."""
    try:
        return [p for p in psutil.Process(pid).children(recursive=True) if is_alive(p.pid)]
    except psutil.NoSuchProcess:
        return []


class WorkerProcess:
    """One worker process."""

    def __init__(self, popen: subprocess.Popen[bytes], log: Path) -> None:
        self.popen = popen
        self._log = log

    @property
    def pid(self) -> int:
        return self.popen.pid

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def last_lines(self) -> str:
        return "\n".join(line[:300] for line in self.log().splitlines()[-40:])

    def is_running(self) -> bool:
        return self.popen.poll() is None

    def send(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    async def send_again(self, number: signal.Signals) -> None:
        """Repeat a signal until it counts as a second one: signals within half a second count as one."""
        while '"limit_s": 0.0' not in self.log():
            handled = self._count_signals()
            self.send(number)
            await until(lambda: self._count_signals() > handled, f"signal handled\n{self.last_lines()}")  # noqa: B023

    def _count_signals(self) -> int:
        return self.log().count('"event": "drain worker"') + self.log().count('"event": "ignored repeated signal"')

    def send_to_all(self, number: signal.Signals) -> None:
        """Signal the worker and its descendants, as a service manager or a terminal does."""
        for process in [*descendants(self.pid), psutil.Process(self.pid)]:
            process.send_signal(number)

    def children(self) -> list[psutil.Process]:
        return [p for p in descendants(self.pid) if "windlass.worker.child" in p.cmdline()]

    async def exit_code(self, timeout_s: float = PATIENCE_S) -> int:
        await until(lambda: not self.is_running(), f"worker {self.pid} ends\n{self.last_lines()}", timeout_s)
        return self.popen.returncode


class WorkerHarness:
    """Workers of one database. At exit all are killed, and none of their descendants may still run."""

    def __init__(self, dsn: str, folder: Path) -> None:
        self.dsn = dsn
        self.folder = folder
        self.store = PostgresStores(dsn)
        self.processes: list[WorkerProcess] = []
        # A marker in the environment of all descendants of the workers, even detached ones.
        self._mark = f"CREW_{uuid4().hex}"

    async def __aenter__(self) -> Self:
        await self.store.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        try:
            for process in self.processes:
                if process.is_running():
                    process.popen.kill()
                process.popen.wait(PATIENCE_S)
            await until(lambda: not self.live_processes(), f"everything is gone, but {self.live_processes()} runs")
            logs = "".join(process.log() for process in self.processes)
            assert [words for words in LEAK_WARNINGS if words in logs] == []
        finally:
            for process in self.live_processes():
                process.kill()
            for process in self.processes:
                print(f"--- worker {process.pid}\n{process.last_lines()}")
            await self.store.__aexit__(*error)

    def live_processes(self) -> list[psutil.Process]:
        return live_processes(self._mark)

    def start(
        self,
        *arguments: str,
        handler: str | None = None,
        heartbeat_s: float = 0.2,
        lease_s: float = 10.0,
        env: Mapping[str, str] | None = None,
        stderr: int | None = None,
    ) -> WorkerProcess:
        command = [PROGRAM, "worker", "--queue", QUEUE, "--chdir", HERE, *arguments]
        command += ["--heartbeat-interval", str(heartbeat_s), "--lease", str(lease_s), "--log-format", "json"]
        if handler is not None:
            command += ["--handler", f"handlers:{handler}"]
        return self.start_command(command, {"DATABASE_URL": self.dsn, **(env or {})}, stderr)

    def start_command(self, command: list[Any], env: Mapping[str, str], stderr: int | None = None) -> WorkerProcess:
        log = self.folder / f"worker-{len(self.processes)}.log"
        with log.open("wb") as output:
            popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=stderr or output,
                env={**os.environ, "PYTHONWARNINGS": "default", self._mark: "1", **env},
                start_new_session=True,
            )
        process = WorkerProcess(popen, log)
        self.processes.append(process)
        return process

    async def start_registered(self, *arguments: str, **options: Any) -> WorkerProcess:
        """Start a worker and wait for its first heartbeat."""
        process = self.start(*arguments, **options)
        await until(lambda: self.worker_row(process), f"a row of worker {process.pid}\n{process.last_lines()}")
        return process

    async def worker_row(self, process: WorkerProcess) -> Worker | None:
        """The newest row of this process, once it has a heartbeat."""
        rows = [w for w in await self.store.workers(include_terminated=True) if w.pid == process.pid]
        return rows[-1] if rows and rows[-1].last_heartbeat is not None else None

    async def enqueue(self, payload: Any = None, **options: Any) -> int:
        return await self.store.enqueue(new_task(QUEUE, payload, **options))

    async def task(self, task_id: int) -> Task:
        task = await self.store.task(task_id)
        assert task is not None
        return task

    async def wait_until_running(self, task_id: int) -> Task:
        return await self._until_status(task_id, TaskStatus.RUNNING)

    async def wait_for_result(self, task_id: int, timeout_s: float = PATIENCE_S) -> Any:
        """Wait for the result of a task and return it."""
        task = await self._until_status(task_id, TaskStatus.COMPLETE, timeout_s)
        return json.loads(task.result or "null")

    async def wait_until_failed(self, task_id: int, timeout_s: float = PATIENCE_S) -> Task:
        return await self._until_status(task_id, TaskStatus.FAILED, timeout_s)

    async def _until_status(self, task_id: int, status: TaskStatus, timeout_s: float = PATIENCE_S) -> Task:
        deadline = time.monotonic() + timeout_s
        while (task := await self.task(task_id)).status is not status:
            assert task.status is not TaskStatus.FAILED, f"task {task_id} failed ({task.error_code}): {task.error}"
            assert time.monotonic() < deadline, f"task {task_id} is not {status} but {task}"
            await asyncio.sleep(POLL_S)
        return task

    async def worker_status(self, process: WorkerProcess) -> WorkerStatus | None:
        row = await self.worker_row(process)
        return row.status if row is not None else None

    async def event_codes(self, *, task_id: int | None = None, worker_id: str | None = None) -> list[str]:
        return [event.code for event in await self.store.events(task_id=task_id, worker_id=worker_id)]

    async def sql(self, statement: str, *values: Any) -> Any:
        connection = await asyncpg.connect(self.dsn)
        try:
            if values:
                return await connection.fetchval(statement, *values)
            return await connection.execute(statement)
        finally:
            await connection.close()

    async def rows(self, query: str) -> list[Any]:
        connection = await asyncpg.connect(self.dsn)
        try:
            await connection.set_type_codec("jsonb", encoder=json.dumps, decoder=json.loads, schema="pg_catalog")
            return await connection.fetch(query)
        finally:
            await connection.close()

    async def record_heartbeats(self) -> None:
        await self.sql(HEARTBEATS_SQL)

    async def wait_for_heartbeats(self, count: int, since: datetime) -> None:
        counted = "select count(*) from public.beats where at > $1"

        async def have_come() -> bool:
            return int(await self.sql(counted, since)) >= count

        await until(have_come, f"{count} heartbeats")

    async def longest_heartbeat_gap_s(self, process: WorkerProcess, since: datetime) -> float:
        row = await self.worker_row(process)
        assert row is not None
        silence: float = await self.sql(LONGEST_GAP_SQL, row.id, since)
        return silence


class KillableServer:
    """A database server for tests that kill it. Commits reach the operating system and so survive its processes."""

    def __init__(self, folder: Path) -> None:
        self._postgres = EmbeddedPostgres(folder / "data")
        self._postgres.open()
        self.dsn = self._postgres.dsn
        run_aside(self._prepare())

    async def _prepare(self) -> None:
        await migrate(self.dsn)
        connection = await asyncpg.connect(self.dsn)
        await connection.execute("alter system set fsync = off")
        await connection.execute("select pg_reload_conf()")
        await connection.close()

    def end(self, how: signal.Signals) -> None:
        pid = int((self._postgres.data_dir / "postgres" / "postmaster.pid").read_text().split()[0])
        os.kill(pid, how)
        wait_until(lambda: not is_alive(pid), PATIENCE_S, "ending PostgreSQL")

    def start(self) -> None:
        self._postgres.open()

    def close(self) -> None:
        self._postgres.close()
