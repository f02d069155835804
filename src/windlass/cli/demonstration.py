"""What `windlass demo` does, and how it judges what it saw.

Real worker processes on a real PostgreSQL, one of them killed in the middle of a task. A witness in the database (see
demo.sql) writes down every change of a task's status; the report is made from that, not from what the workers say.
"""

import asyncio
import os
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

import asyncpg

from windlass import wire
from windlass.cli.demo_views import CrewMember, Picture, View
from windlass.cli.output import duration
from windlass.model.config import Config
from windlass.model.errors import WindlassError
from windlass.model.task import new_task

QUEUE = "demo"
HANDLER = "windlass.cli.demo_handlers:work"
# One task in so many fails the first time.
FAILS_ONCE_EVERY = 20
WORK_S = (0.02, 0.04, 0.08)
# Short, so that the loss of a worker is noticed while one watches.
HEARTBEAT_INTERVAL_S = 0.5
LEASE_S = 3.0
KILL_AT = 1 / 3
LOOK_INTERVAL_S = 0.1
START_TIMEOUT_S = 30.0
# Retries and the killed worker's lease take ten seconds, a task its share of a worker; a busy machine may need more.
RUN_TIMEOUT_S = 30.0
RUN_TIMEOUT_PER_TASK_S = 0.05
STOP_TIMEOUT_S = 10.0
KILL_TRIES = 50


def _read_queries() -> dict[str, str]:
    text = resources.files("windlass.cli").joinpath("demo.sql").read_text()
    named = (block.split("\n", 1) for block in text.split("-- name: ")[1:])
    return {name.strip(): sql.strip().rstrip(";") for name, sql in named}


QUERIES = _read_queries()


@dataclass(frozen=True, slots=True)
class Recovery:
    """A task that the killed worker held."""

    task_id: int
    lost_worker_id: str
    noticed_by: str
    noticed_after_s: float
    completed_by: str | None


@dataclass(frozen=True, slots=True)
class Report:
    enqueued: int
    complete: int
    accepted_once: int
    accepted_twice: int
    accepted: int
    attempts: int
    failed_attempts: int
    lost_attempts: int
    late_results: int
    wait_p50_s: float | None
    wait_p95_s: float | None
    took_s: float
    killed_worker_id: str
    recoveries: list[Recovery]

    def problems(self) -> list[str]:
        """What was promised and not kept; empty if all is well."""
        problems = []
        if self.complete != self.enqueued:
            problems.append(f"{self.enqueued - self.complete} of {self.enqueued} tasks are not complete")
        if self.accepted_twice:
            problems.append(f"{self.accepted_twice} tasks were accepted more than once")
        if self.accepted_once != self.enqueued:
            problems.append(f"{self.accepted_once} of {self.enqueued} tasks were accepted exactly once")
        if self.attempts != self.accepted + self.failed_attempts + self.lost_attempts:
            problems.append(
                f"of {self.attempts} attempts {self.accepted} were accepted, {self.failed_attempts} failed and "
                f"{self.lost_attempts} were lost, which does not add up"
            )
        if not any(r.lost_worker_id == self.killed_worker_id and r.completed_by for r in self.recoveries):
            problems.append("the killed worker's task was not recovered")
        return problems

    def lines(self) -> list[tuple[str, str]]:
        lost = self.enqueued - self.complete
        return [
            ("tasks", f"{self.enqueued} enqueued, {self.complete} complete, {lost or 'none'} lost"),
            (
                "results accepted",
                f"{self.accepted}: {self.accepted_once} tasks once, {self.accepted_twice or 'none'} twice",
            ),
            (
                "attempts",
                f"{self.attempts}: {self.accepted} accepted, {self.failed_attempts} failed on purpose and were "
                f"retried, {self.lost_attempts} died with the worker",
            ),
            ("wait in the queue", f"p50 {duration(self.wait_p50_s)}, p95 {duration(self.wait_p95_s)}"),
            ("killed", f"{self.killed_worker_id}, by SIGKILL"),
            *(
                (
                    f"its task {recovery.task_id}",
                    f"recovered after {duration(recovery.noticed_after_s)} by {recovery.noticed_by}, "
                    f"completed by {recovery.completed_by or 'nobody'}",
                )
                for recovery in self.recoveries
            ),
            ("took", f"{self.took_s:.1f} s"),
        ]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Demonstration:
    def __init__(self, task_count: int, worker_count: int, view: View) -> None:
        self._task_count = task_count
        self._worker_count = worker_count
        self._view = view
        self._killed_worker_id: str | None = None
        self._killed_at: datetime | None = None

    async def run(self) -> Report:
        started = time.monotonic()
        with wire.temporary_data_dir() as folder:
            config = Config(data_dir=folder / "data")
            self._view.note(f"starting PostgreSQL in {config.data_dir}")
            async with wire.database(config) as dsn, _connection(dsn) as database:
                await database.execute(QUERIES["install"])
                self._view.note(f"starting {self._worker_count} workers")
                async with _crew(self._worker_count, folder) as crew:
                    await self._until_all_are_there(database, crew)
                    await self._enqueue(config)
                    await self._until_all_is_done(database, crew)
                return await self._report(database, time.monotonic() - started)

    async def _until_all_are_there(self, database: Any, crew: "Crew") -> None:
        async with _limit(START_TIMEOUT_S, "starting the workers"):
            while len(await database.fetch(QUERIES["crew"])) < self._worker_count:
                crew.check()
                await asyncio.sleep(LOOK_INTERVAL_S)

    async def _enqueue(self, config: Config) -> None:
        tasks = [
            new_task(
                QUEUE,
                {
                    "number": number,
                    "work_s": WORK_S[number % len(WORK_S)],
                    "fails_once": number % FAILS_ONCE_EVERY == 0,
                },
            )
            for number in range(self._task_count)
        ]
        async with wire.store(config) as store:
            await store.enqueue_many(tasks)
        failing = sum(number % FAILS_ONCE_EVERY == 0 for number in range(self._task_count))
        self._view.note(f"enqueued {self._task_count} tasks, {failing} of which will fail once")

    async def _until_all_is_done(self, database: Any, crew: "Crew") -> None:
        limit_s = RUN_TIMEOUT_S + RUN_TIMEOUT_PER_TASK_S * self._task_count
        with suppress(_TooSlow):  # then the report says what is missing
            async with _limit(limit_s, "running the tasks"):
                while (picture := await self._look(database)).complete < self._task_count:
                    crew.check()
                    self._view.show(picture)
                    if self._killed_worker_id is None and picture.complete >= KILL_AT * self._task_count:
                        await self._kill_one_at_work(database, crew)
                    await asyncio.sleep(LOOK_INTERVAL_S)
        self._view.show(picture)

    async def _look(self, database: Any) -> Picture:
        counts = {row["status"]: row["count"] for row in await database.fetch(QUERIES["standing"])}
        return Picture(
            total=self._task_count,
            complete=counts.get("complete", 0),
            running=counts.get("running", 0),
            retrying=counts.get("error", 0),
            crew=[
                CrewMember(
                    worker_id=row["id"],
                    status=row["status"],
                    complete=row["complete"],
                    task_id=row["task_id"],
                    silent_s=row["silent_s"],
                    is_killed=row["id"] == self._killed_worker_id,
                )
                for row in await database.fetch(QUERIES["crew"])
            ],
        )

    async def _kill_one_at_work(self, database: Any, crew: "Crew") -> None:
        for _ in range(KILL_TRIES):
            for worker_id, pid in (await _at_work(database)).items():
                # Stopped first, so that what we then see of it is still true when it is killed.
                os.kill(pid, signal.SIGSTOP)
                if worker_id in await _at_work(database):
                    crew.kill(pid)
                    self._killed_worker_id = worker_id
                    self._killed_at = await database.fetchval("select clock_timestamp()")
                    self._view.note(f"killed {worker_id} in the middle of a task")
                    return
                os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(LOOK_INTERVAL_S)
        raise WindlassError("the demo found no worker at work to kill: give it more --tasks.")

    async def _report(self, database: Any, took_s: float) -> Report:
        numbers = dict(await database.fetchrow(QUERIES["report"]))
        recoveries = await database.fetch(QUERIES["recoveries"], self._killed_at)
        return Report(
            enqueued=self._task_count,
            took_s=took_s,
            killed_worker_id=self._killed_worker_id or "nobody",
            recoveries=[Recovery(**row) for row in recoveries],
            **numbers,
        )


async def _at_work(database: Any) -> dict[str, int]:
    """Workers that hold a task, with their process ids."""
    return {row["id"]: row["pid"] for row in await database.fetch(QUERIES["crew"]) if row["task_id"] is not None}


class _TooSlow(WindlassError):
    pass


@asynccontextmanager
async def _limit(seconds: float, doing: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise _TooSlow(f"{doing} took longer than {seconds:g} s: is this machine busy? Try again.") from None


@asynccontextmanager
async def _connection(dsn: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(dsn, timeout=10, command_timeout=30)
    try:
        yield connection
    finally:
        connection.terminate()


# -------------------------------------------------------------------------------------------------- worker processes


class Crew:
    def __init__(self, processes: list[Process], logs: list[Path]) -> None:
        self._processes = processes
        self._logs = logs
        self._killed_pid: int | None = None

    def check(self) -> None:
        """All but the one we killed must run."""
        for process, log in zip(self._processes, self._logs, strict=True):
            if process.returncode is not None and process.pid != self._killed_pid:
                last = (log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
                raise WindlassError(f"a worker of the demo ended with exit code {process.returncode}: {last}")

    def kill(self, pid: int) -> None:
        self._killed_pid = pid
        os.kill(pid, signal.SIGKILL)

    async def end(self) -> None:
        for how in (signal.SIGTERM, signal.SIGKILL):
            running = [process for process in self._processes if process.returncode is None]
            for process in running:
                with suppress(ProcessLookupError):
                    process.send_signal(how)
            if running:
                await asyncio.wait([asyncio.create_task(p.wait()) for p in running], timeout=STOP_TIMEOUT_S)


@asynccontextmanager
async def _crew(count: int, folder: Path) -> AsyncIterator[Crew]:
    processes: list[Process] = []
    logs = [folder / f"worker-{number}.log" for number in range(count)]
    crew = Crew(processes, logs)
    try:
        for log in logs:
            # One by one: if the next does not start, those that did are ended.
            processes.append(await _start_worker(folder, log))  # noqa: PERF401
        yield crew
    finally:
        await crew.end()


async def _start_worker(folder: Path, log: Path) -> Process:
    options = {
        "--queue": QUEUE,
        "--handler": HANDLER,
        "--heartbeat-interval": str(HEARTBEAT_INTERVAL_S),
        "--lease": str(LEASE_S),
        "--data-dir": str(folder / "data"),
        "--log-format": "json",
    }
    words = [word for option in options.items() for word in option]
    with log.open("wb") as output:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "windlass", "worker", *words),
            stdin=DEVNULL,
            stdout=output,
            stderr=STDOUT,
            # No windlass.toml there, and none of what the user has set: the demo is the same for everybody.
            cwd=folder,
            env={name: value for name, value in os.environ.items() if not name.startswith("WINDLASS_")},
            # Ctrl-C is for us: we end them in order.
            start_new_session=True,
        )
