"""What `windlass demo` does, in which order, and how it is told.

A real `windlass up` with real worker processes on a real PostgreSQL: a burst of tasks arrives, workers are hired, one
is killed, one task kills whoever runs it, the queue empties, the fleet shrinks. What is told while it runs are the
decisions and events in the database; a witness there (see demo.sql) writes down every change of a task's status, and
the report is made from that, not from what anybody says of itself.
"""

import asyncio
import os
import secrets
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from windlass import wire
from windlass.cli.demo_guard import MARK
from windlass.cli.demo_report import ATTEMPTS, MIN_WORKERS, Report
from windlass.cli.output import shortened
from windlass.configure import ENVIRONMENT_ALIASES, PREFIX
from windlass.model.config import Config
from windlass.model.errors import WindlassError
from windlass.model.task import new_task
from windlass.store.connect import connect, explained
from windlass.store.queries import read_queries

QUEUE = FLEET = "demo"
# All intervals are short, so that everything happens while one watches.
TOML = """
data_dir = {data_dir}

[control]
lease_s = 10

[fleets.demo]
queues = ["demo"]
handler = "windlass.cli.demo_handlers:work"
min_workers = {min_workers}
max_workers = {max_workers}
poll_interval_s = 0.5
heartbeat_interval_s = 0.5
heartbeat_timeout_s = 10
idle_timeout_s = 3
stop_timeout_s = 10
"""
WORK_S = (0.2, 0.3, 0.4)
# The worker is killed when this share is done; the poison comes a little later.
KILL_AT = 1 / 4
POISON_AT = 1 / 2
LOOK_INTERVAL_S = 0.1
# Two workers' worth of tasks, and half a minute for everything else; twice that for a busy machine.
RUN_TIMEOUT_S = 60.0
RUN_TIMEOUT_PER_TASK_S = 0.2
STOP_TIMEOUT_S = 30.0
NOTE_WIDTH = 160
# How a decision begins that changes nothing.
STEADY = "steady"


QUERIES = read_queries("windlass.cli", "demo.sql")
# The events worth telling, in plain words. The rest of the story is in the decisions.
TOLD = {
    "DECISION": "decided: {reason}",
    "WORKER_ACTIVATED": "{worker} is ready for work",
    "WORKER_ERROR": "{worker} is broken: {reason}",
    "TASK_REQUEUED": "task {task} goes back to the queue after {attempt}",
    "TASK_FAILED": "task {task} is given up after {attempt} and kept as a dead letter, with its history",
    "WORKER_TERMINATING": "{worker} is let go: {reason}",
    "SLOT_FAILED": "{reason}",
}


@dataclass(frozen=True, slots=True)
class Killed:
    """The worker that was killed, and the task it had at hand."""

    worker_id: str
    task_id: int
    at: datetime


class Demonstration:
    """`tell` is given a sentence whenever something happens."""

    def __init__(self, task_count: int, max_workers: int, tell: Callable[[str], None]) -> None:
        self._task_count = task_count
        self._max_workers = max_workers
        self._tell = tell
        self._started = time.monotonic()
        self._last_decision = ""
        self._killed: Killed | None = None
        self._seen = {"cycle": 0, "event": 0}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[tuple[Report, Path]]:
        """The report and the data directory, when all is done and everything still runs. Afterwards it is gone."""
        async with _guarded_folder() as (folder, mark):
            config = Config(data_dir=folder / "data")
            self._tell(f"starting PostgreSQL in {config.data_dir}")
            async with wire.database(config) as dsn, _connection(dsn) as database:
                await database.execute(QUERIES["install"])
                self._tell(f"starting `windlass up`: {MIN_WORKERS} to {self._max_workers} workers, as processes here")
                up = await _start_up(folder, mark, self._max_workers)
                with suppress(TimeoutError):  # then the report says what is missing
                    async with asyncio.timeout(RUN_TIMEOUT_S + RUN_TIMEOUT_PER_TASK_S * self._task_count):
                        await self._watch(database, up, folder, config)
                yield await self._report(database), folder / "data"
                self._tell("the end: `windlass up` lets its workers go and leaves")
                up.terminate()
                with suppress(TimeoutError):
                    await asyncio.wait_for(up.wait(), STOP_TIMEOUT_S)

    async def _enqueue(self, config: Config) -> None:
        poison = round(POISON_AT * self._task_count)
        tasks = [
            new_task(
                QUEUE,
                {"number": number, "work_s": WORK_S[number % len(WORK_S)], "is_poisonous": number == poison},
                max_attempts=ATTEMPTS,
            )
            for number in range(self._task_count)
        ]
        async with wire.store(config) as store:
            await store.enqueue_many(tasks)
        self._tell(f"a burst of {self._task_count} tasks arrives; one of them kills every worker that runs it")

    async def _watch(self, database: Any, up: Process, folder: Path, config: Config) -> None:
        """Until the queue is empty and the fleet back at its minimum."""
        told = 0
        while True:
            standing = await database.fetchrow(QUERIES["standing"])
            await self._tell_news(database)
            quarters = 4 * standing["complete"] // self._task_count
            if quarters > told:
                told = quarters
                self._tell(f"{standing['complete']} of {self._task_count} tasks are complete")
            if not standing["enqueued"]:
                if standing["ready"] >= MIN_WORKERS:
                    await self._enqueue(config)
            elif self._killed is None and standing["complete"] >= KILL_AT * self._task_count:
                await self._kill_one_at_work(database)
            elif not standing["unfinished"] and standing["workers"] == MIN_WORKERS:
                self._tell(f"the queue is empty and the fleet back at its minimum of {MIN_WORKERS}")
                return
            if up.returncode is not None:
                last = shortened((folder / "up.log").read_text(errors="replace"), NOTE_WIDTH)
                raise WindlassError(f"the demo's `windlass up` ended with exit code {up.returncode}: {last}")
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def _tell_news(self, database: Any) -> None:
        for row in await database.fetch(QUERIES["news"], self._seen["cycle"], self._seen["event"]):
            self._seen[row["source"]] = row["id"]
            kind = row["reason"].partition(":")[0]
            if row["source"] == "cycle":
                # "steady" is news once.
                is_news = (kind, self._last_decision) != (STEADY, STEADY)
                self._last_decision = kind
            else:
                is_news = row["code"] in TOLD
            if is_news:
                words = {"reason": row["reason"], "worker": row["worker_id"], "task": row["task_id"]}
                self._tell(TOLD[row["code"]].format(**words, attempt=kind))

    async def _kill_one_at_work(self, database: Any) -> None:
        chosen = await database.fetchrow(QUERIES["at_work"])
        if chosen is None:
            return
        # Stopped first, so that what we then see of it is still true when it is killed.
        os.kill(chosen["pid"], signal.SIGSTOP)
        again = await database.fetchrow(QUERIES["at_work"])
        if again != chosen:
            os.kill(chosen["pid"], signal.SIGCONT)
            return
        os.kill(chosen["pid"], signal.SIGKILL)
        self._killed = Killed(chosen["id"], chosen["task_id"], await database.fetchval("select clock_timestamp()"))
        self._tell(f"WE KILL {chosen['id']} with SIGKILL, in the middle of task {chosen['task_id']}")

    async def _report(self, database: Any) -> Report:
        numbers = dict(await database.fetchrow(QUERIES["report"]))
        killed = self._killed
        words = (killed.worker_id, killed.task_id, killed.at) if killed is not None else (None, None, None)
        return Report(
            **numbers,
            **await database.fetchrow(QUERIES["recovery"], *words),
            took_s=time.monotonic() - self._started,
        )


@asynccontextmanager
async def _guarded_folder() -> AsyncIterator[tuple[Path, str]]:
    """A folder, and a mark for the environment of whatever is started in it: both end with us, however we end."""
    folder = wire.make_temporary_folder("windlass-demo-")
    mark = secrets.token_hex(8)
    guard = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "windlass.cli.demo_guard", str(folder), mark),
        stdin=PIPE,
        stdout=DEVNULL,
        stderr=DEVNULL,
        start_new_session=True,
        # It may be there when the folder we are in is not any more.
        cwd="/",
    )
    try:
        yield folder, mark
    finally:
        if guard.stdin is not None:
            guard.stdin.close()
        await asyncio.shield(guard.wait())


async def _start_up(folder: Path, mark: str, max_workers: int) -> Process:
    config = folder / "windlass.toml"
    config.write_text(
        TOML.format(data_dir=f"'{folder / 'data'}'", min_workers=MIN_WORKERS, max_workers=max_workers), encoding="utf-8"
    )
    # None of what the user has set: the demo is the same for everybody.
    kept = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX) and k not in ENVIRONMENT_ALIASES}
    with (folder / "up.log").open("wb") as log:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "windlass", "up", "--config", str(config), "--log-format", "json"),
            stdin=DEVNULL,
            stdout=log,
            stderr=STDOUT,
            cwd=folder,
            env={**kept, MARK: mark},
            # Ctrl-C is for us: we end it in order.
            start_new_session=True,
        )


@asynccontextmanager
async def _connection(dsn: str) -> AsyncIterator[Any]:
    with explained("looking at the demo", dsn):
        connection = await connect(dsn)
    try:
        yield connection
    finally:
        connection.terminate()
