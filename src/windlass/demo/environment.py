"""What every demonstration stands on: a database and a `windlass up` of its own, and somebody who tells what happens.

What is told while it runs are the decisions and events in the database; a witness there (see demo.sql) writes down
every change of a task's status, and reports are made from that, not from what anybody says of itself. Whatever is
started ends with the demonstration, however that ends.
"""

import asyncio
import os
import re
import secrets
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from windlass.cli.output import shortened
from windlass.config_loader import ENVIRONMENT_ALIASES, PREFIX
from windlass.demo.cleanup import MARK
from windlass.model.config import Config
from windlass.model.errors import WindlassError
from windlass.model.task import NewTask
from windlass.store.connect import connect, explained
from windlass.store.queries import read_queries
from windlass.wiring import stores

QUEUE = FLEET = "demo"
HANDLER = "windlass.demo.handlers:work"
LOOK_INTERVAL_S = 0.1
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
NOTE_WIDTH = 160
# How decisions begin that change nothing.
QUIET = ("no change", "at max_workers", "queue empty")
QUERIES = read_queries("windlass.demo", "demo.sql")
Tell = Callable[[str], None]
_LINK = re.compile(r"^dashboard: (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class DemoFailed:
    """A worker that was ended from outside, and the task it had at hand."""

    worker_id: str
    task_id: int
    at: datetime


@dataclass(frozen=True, slots=True)
class DemoPlace:
    """A folder, and a mark for the environment of whatever is started in it: both end with us, however we end."""

    folder: Path
    mark: str

    @property
    def data_dir(self) -> Path:
        return self.folder / "data"

    @property
    def toml(self) -> Path:
        return self.folder / "windlass.toml"

    def filled_in(self, toml: str, **words: object) -> str:
        """A configuration of the demo's fleet, in this folder."""
        return toml.format(data_dir=self.data_dir, fleet=FLEET, queue=QUEUE, handler=HANDLER, **words)


@dataclass(frozen=True, slots=True)
class DemoScenario:
    """What `windlass up` is given, what that is in words, and how long the arc may take."""

    toml: str
    what: str
    limit_s: float
    secrets: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DemoEnvironment:
    place: DemoPlace
    config: Config
    database: Any
    up: Process

    async def standing(self) -> Any:
        """How far it is. Raises WindlassError if `windlass up` is not there any more."""
        if self.up.returncode is not None:
            last = shortened((self.place.folder / "up.log").read_text(errors="replace"), NOTE_WIDTH)
            raise WindlassError(f"the demo's `windlass up` ended with exit code {self.up.returncode}: {last}")
        return await self.database.fetchrow(QUERIES["standing"])

    async def enqueue(self, tasks: list[NewTask]) -> None:
        async with stores.store(self.config) as store:
            await store.enqueue_many(tasks)

    async def now(self) -> datetime:
        moment: datetime = await self.database.fetchval("select clock_timestamp()")
        return moment

    async def tasks_report(self, lost: DemoFailed | None) -> dict[str, Any]:
        """What became of all tasks, and of the one that was lost with its worker."""
        words = (lost.worker_id, lost.task_id, lost.at) if lost is not None else (None, None, None)
        return {
            **await self.database.fetchrow(QUERIES["report"]),
            **await self.database.fetchrow(QUERIES["recovery"], *words),
        }


class DemoNarrator:
    """`tell` is given a sentence whenever something happens. `told`: the events worth telling, in plain words; the
    rest of the story is in the decisions."""

    def __init__(self, tell: Tell, told: Mapping[str, str], task_count: int) -> None:
        self.tell = tell
        self._told = {"DECISION": "decided: {reason}", **told}
        self._task_count = task_count
        self._quarters = 0
        self._last_decision: tuple[str, bool] | None = None
        self._seen = {"cycle": 0, "event": 0}
        self.started = time.monotonic()

    def expect(self, more: int) -> None:
        """So many tasks more than were announced."""
        self._task_count += more
        self._quarters = 4

    async def tell_news(self, stage: DemoEnvironment, standing: Any) -> None:
        for row in await stage.database.fetch(QUERIES["news"], self._seen["cycle"], self._seen["event"]):
            self._seen[row["source"]] = row["id"]
            kind = row["reason"].partition(":")[0]
            if row["code"] in self._told and (row["source"] == "event" or self._is_news(kind, row["reason"])):
                words = {"reason": row["reason"], "worker": row["worker_id"], "task": row["task_id"]}
                self.tell(self._told[row["code"]].format(**words, attempt=kind))
        quarters = 4 * standing["complete"] // self._task_count
        if quarters > self._quarters:
            self._quarters = quarters
            self.tell(f"{standing['complete']} of {self._task_count} tasks are complete")

    def _is_news(self, kind: str, decision: str) -> bool:
        """That nothing changes is news once; and once more when somebody is kept for what is paid."""
        before, self._last_decision = self._last_decision, (kind, " idle kept" in decision)
        return not kind.startswith(QUIET) or before != self._last_decision

    @property
    def took_s(self) -> float:
        return time.monotonic() - self.started


@asynccontextmanager
async def guarded_place() -> AsyncIterator[DemoPlace]:
    folder = stores.make_temporary_folder("windlass-demo-")
    mark = secrets.token_hex(8)
    guard = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "windlass.demo.cleanup", str(folder), mark),
        stdin=PIPE,
        stdout=DEVNULL,
        stderr=DEVNULL,
        start_new_session=True,
        # It may be there when the folder we are in is not any more.
        cwd="/",
    )
    try:
        yield DemoPlace(folder, mark)
    finally:
        if guard.stdin is not None:
            guard.stdin.close()
        await asyncio.shield(guard.wait())


@asynccontextmanager
async def played(
    place: DemoPlace,
    scene: DemoScenario,
    teller: DemoNarrator,
    go_on: Callable[[DemoEnvironment, Any], Awaitable[bool]],
) -> AsyncIterator[DemoEnvironment]:
    """The stage, when the arc is over; or when its time is, and then the report says what is missing.

    Whatever is new is told. `go_on` is given how far everything is, takes the arc's next step if it is time for that,
    and answers whether there is none any more.
    """
    async with _staged(place, scene, teller.tell) as stage:
        with suppress(TimeoutError):
            async with asyncio.timeout(scene.limit_s):
                while True:
                    standing = await stage.standing()
                    await teller.tell_news(stage, standing)
                    if await go_on(stage, standing):
                        break
                    await asyncio.sleep(LOOK_INTERVAL_S)
        yield stage


@asynccontextmanager
async def _staged(place: DemoPlace, scene: DemoScenario, tell: Tell) -> AsyncIterator[DemoEnvironment]:
    """A database, and `windlass up` with this configuration, until the end; then it lets its workers go and leaves. If
    something fails, or somebody has had enough, the guard ends it all."""
    config = Config(data_dir=place.data_dir)
    tell(f"starting PostgreSQL in {config.data_dir}")
    async with stores.database(config) as dsn, _connection(dsn) as database:
        await database.execute(QUERIES["install"])
        tell(f"starting `windlass up`: {scene.what}")
        place.toml.write_text(scene.toml, encoding="utf-8")
        up = await _start_up(place, scene.secrets)
        tell(f"watch it in a browser: {await _link(place, up)}")
        yield DemoEnvironment(place, config, database, up)
        tell("the end: `windlass up` lets its workers go and leaves")
        up.terminate()
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await up.wait()


async def _link(place: DemoPlace, up: Process) -> str:
    """What `windlass up` prints once it listens: the address that lets one browser in."""
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            log = (place.folder / "up.log").read_text(errors="replace")
            if (found := _LINK.search(log)) is not None:
                return found[1]
            if up.returncode is not None:
                raise WindlassError(f"the demo's `windlass up` did not start: {shortened(log, NOTE_WIDTH)}")
            await asyncio.sleep(LOOK_INTERVAL_S)


async def _start_up(place: DemoPlace, secrets: Mapping[str, str]) -> Process:
    # None of what the user has set: the demo is the same for everybody.
    kept = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX) and k not in ENVIRONMENT_ALIASES}
    with (place.folder / "up.log").open("wb") as log:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "windlass", "up", "--config", str(place.toml), "--log-format", "json"),
            stdin=DEVNULL,
            stdout=log,
            stderr=STDOUT,
            cwd=place.folder,
            env={**kept, **secrets, MARK: place.mark},
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
