"""The environment of a demo: a temporary folder, PostgreSQL, `windlass up`, and the lines that are printed.

The lines come from decisions and events in the database. A trigger (see demo.sql) records every change of a task's
status, and the report is computed from that record, not from what workers report.
"""

import asyncio
import os
import re
import secrets
import socket
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from windlass.config_sources import ENVIRONMENT_ALIASES, PREFIX
from windlass.demo.cleanup import MARK
from windlass.model.auth import Role
from windlass.model.config import Config
from windlass.model.errors import WindlassError
from windlass.store.connection import connect, explained
from windlass.store.queries import read_queries
from windlass.wiring import stores
from windlass.wiring.http_server import dashboard_link

QUEUE = FLEET = "demo"
HANDLER = "windlass.demo.handlers:work"
POLL_INTERVAL_S = 0.1
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
ERROR_WIDTH = 160
QUERIES = read_queries("windlass.demo", "demo.sql")
PrintLine = Callable[[str], None]
_ADDRESS = re.compile(r"^dashboard: (http\S+)/ ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class KilledWorker:
    """A worker that the demo killed or drained, and the task that it was running."""

    worker_id: str
    task_id: int
    at: datetime


@dataclass(frozen=True, slots=True)
class DemoPlace:
    """A temporary folder, and a mark in the environment of all processes of the demo. cleanup.py removes both."""

    folder: Path
    mark: str

    @property
    def data_dir(self) -> Path:
        return self.folder / "data"

    @property
    def toml(self) -> Path:
        return self.folder / "windlass.toml"


@dataclass(frozen=True, slots=True)
class DemoEnvironment:
    place: DemoPlace
    config: Config
    database: Any
    up: Process

    async def read_progress(self) -> Any:
        """Numbers of tasks and workers. Raises WindlassError if `windlass up` has exited."""
        if self.up.returncode is not None:
            last = _last_line((self.place.folder / "up.log").read_text(errors="replace"))
            raise WindlassError(f"`windlass up` of the demo exited with code {self.up.returncode}: {last}")
        return await self.database.fetchrow(QUERIES["progress"])

    async def now(self) -> datetime:
        now: datetime = await self.database.fetchval("select clock_timestamp()")
        return now


class DemoNarrator:
    """Prints a line for each event in `messages` and for each new kind of decision."""

    def __init__(self, print_line: PrintLine, messages: Mapping[str, str], task_count: int) -> None:
        self._print_line = print_line
        self._messages = {"DECISION": "decision: {reason}", **messages}
        self._task_count = task_count
        self._quarters = 0
        self._last_decision: tuple[str, bool] | None = None
        self._last_ids = {"cycle": 0, "event": 0}
        self._started = time.monotonic()

    def add_tasks(self, count: int) -> None:
        """More tasks were enqueued. Progress in quarters is not printed any more."""
        self._task_count += count
        self._quarters = 4

    async def print_news(self, environment: DemoEnvironment, progress: Any) -> None:
        rows = await environment.database.fetch(
            QUERIES["new_entries"], self._last_ids["cycle"], self._last_ids["event"]
        )
        for row in rows:
            self._last_ids[row["source"]] = row["id"]
            kind = row["reason"].partition(":")[0]
            if row["code"] in self._messages and (
                row["source"] == "event" or self._record_decision(kind, row["reason"])
            ):
                values = {"reason": row["reason"], "worker": row["worker_id"], "task": row["task_id"]}
                self._print_line(self._messages[row["code"]].format(**values, attempt=kind))
        quarters = 4 * progress["complete"] // self._task_count
        if quarters > self._quarters:
            self._quarters = quarters
            self._print_line(f"{progress['complete']} of {self._task_count} tasks are complete")

    def _record_decision(self, kind: str, decision: str) -> bool:
        """Record a decision. True if it acts, or differs in its kind or in whether idle workers are kept."""
        previous, self._last_decision = self._last_decision, (re.sub(r"\d+", "", kind), " kept" in decision)
        is_acting = kind.startswith(("spawn", "drain")) and not kind.startswith("spawn 0 ")
        return is_acting or previous != self._last_decision

    @property
    def took_s(self) -> float:
        return time.monotonic() - self._started


@asynccontextmanager
async def temporary_place() -> AsyncIterator[DemoPlace]:
    """A folder, and a clean-up process that deletes it and kills what runs in it when this process exits."""
    folder = stores.make_temporary_folder("windlass-demo-")
    mark = secrets.token_hex(8)
    cleanup = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "windlass.demo.cleanup", str(folder), mark),
        stdin=PIPE,
        stdout=DEVNULL,
        stderr=DEVNULL,
        start_new_session=True,
        # The current folder may be deleted before it exits.
        cwd="/",
    )
    try:
        yield DemoPlace(folder, mark)
    finally:
        if cleanup.stdin is not None:
            cleanup.stdin.close()
        await asyncio.shield(cleanup.wait())


@asynccontextmanager
async def start_environment(
    place: DemoPlace, toml: str, description: str, secrets: Mapping[str, str], print_line: PrintLine
) -> AsyncIterator[DemoEnvironment]:
    """PostgreSQL, and `windlass up` with this configuration, which shuts down at the end.

    After an error or Ctrl-C, the clean-up process kills everything instead.
    """
    config = Config(data_dir=place.data_dir)
    print_line(f"starting PostgreSQL in {config.data_dir}")
    async with stores.database(config) as dsn, _connection(dsn) as database:
        await database.execute(QUERIES["create_history"])
        print_line(f"starting `windlass up`: {description}")
        place.toml.write_text(toml, encoding="utf-8")
        up = await _start_up(place, secrets)
        address = await _wait_for_address(place, up)
        print_line(f"dashboard: {await dashboard_link(config, Role.OPERATOR, address, 'demo')}")
        yield DemoEnvironment(place, config, database, up)
        print_line("stopping `windlass up`: it drains its workers and exits")
        up.terminate()
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await up.wait()


async def _wait_for_address(place: DemoPlace, up: Process) -> str:
    """The address of the dashboard, which `windlass up` prints when it listens."""
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            log = (place.folder / "up.log").read_text(errors="replace")
            if (found := _ADDRESS.search(log)) is not None:
                return found[1]
            if up.returncode is not None:
                raise WindlassError(f"`windlass up` of the demo did not start: {_last_line(log)}")
            await asyncio.sleep(POLL_INTERVAL_S)


async def _start_up(place: DemoPlace, secrets: Mapping[str, str]) -> Process:
    # Without the user's settings, so that the demo is the same for everyone.
    kept = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX) and k not in ENVIRONMENT_ALIASES}
    with (place.folder / "up.log").open("wb") as log:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "windlass", "up", "--config", str(place.toml), "--log-format", "json"),
            stdin=DEVNULL,
            stdout=log,
            stderr=STDOUT,
            cwd=place.folder,
            env={**kept, **secrets, MARK: place.mark},
            # Ctrl-C must not reach it: the demo stops it in order.
            start_new_session=True,
        )


@asynccontextmanager
async def _connection(dsn: str) -> AsyncIterator[Any]:
    with explained("connecting to the demo database", dsn):
        connection = await connect(dsn)
    try:
        yield connection
    finally:
        connection.terminate()


def _last_line(log: str) -> str:
    return (log.strip().splitlines() or ["no output"])[-1][:ERROR_WIDTH]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port
