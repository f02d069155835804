"""Moving in, rehearsed in one go: `make rehearsal` prints its figures.

A table of 1,000 rows is adopted, and a fleet of pods works them off. Meanwhile new code is deployed, the control plane
is killed in the middle of that, and a next release migrates the database and takes over. No row is lost, none runs
twice, and the largest gap between two claims is far below a minute.
"""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from support import next_release
from support.adopted_tables import GPU_TASKS
from support.command_line import CommandLine
from support.stores import PostgresStores
from support.worker_harness import until
from windlass.model.cycle import Fleet
from windlass.model.rollout import RolloutStatus
from windlass.model.worker import Worker, WorkerStatus
from windlass_emulators.http_server import serving
from windlass_emulators.runpod import RunpodEmulator, RunpodEmulatorSettings
from windlass_emulators.runpod.pod_host import RealPodHost

ROWS = 1_000
KEY = "a-good-key"
# Promised; the largest gap of a quiet run is a few seconds.
MAX_GAP_S = 60.0
STEP_TIMEOUT_S = 150.0
pytestmark = pytest.mark.timeout(600)
# Each run is one line of a file, written before anything else, so that a second run of a row would show.
HANDLER = """
import os, time
from pathlib import Path

RELEASE = Path(__file__).parent
SITE = RELEASE.parent

def work(task):
    line = f"{task.payload['params']['n']} {RELEASE.name}\\n"
    file = os.open(SITE / "runs", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line.encode())
    os.close(file)
    time.sleep(float((SITE / "pace").read_text()))
    return RELEASE.name
"""
TOML = """
[adopt.tasks]

[control]
lease_s = 5

[fleets.gpu]
provider = "runpod"
policy = "buffered"
queues = ["tasks"]
handler = "app:work"
chdir = {folder}
min_workers = 2
max_workers = 3
poll_interval_s = 0.5
heartbeat_interval_s = 0.5
heartbeat_timeout_s = 60
spawn_timeout_s = 120
min_scaling_interval_s = 0
stop_timeout_s = 30

[fleets.gpu.runpod]
image = "example/worker:{release}"
choices = ["NVIDIA L40S@SECURE/EU-RO-1"]
"""


class MoveIn:
    """A team's table, its control plane and its pods."""

    def __init__(self, folder: Path, dsn: str, address: str, sql: Any, store: PostgresStores) -> None:
        self.folder, self.sql, self.store = folder, sql, store
        with socket.create_server(("127.0.0.1", 0)) as taken:
            self._port = taken.getsockname()[1]
        env = {"DATABASE_URL": dsn, "RUNPOD_API_KEY": KEY, "RUNPOD_ENDPOINT": f"{address}/v2"}
        self.windlass = CommandLine(folder, env)
        self.processes: list[subprocess.Popen[str]] = []
        self.steps: dict[str, float] = {}
        self._began = time.monotonic()

    def note(self, step: str) -> None:
        """Record when a step was done."""
        self.steps[step] = round(time.monotonic() - self._began, 1)

    def release(self, number: int) -> None:
        """An image with its own code, and the configuration that names it."""
        code = self.folder / f"release-{number}"
        code.mkdir()
        (code / "app.py").write_text(HANDLER)
        (self.folder / "windlass.toml").write_text(TOML.format(folder=json.dumps(str(code)), release=number))

    def up(self, *options: str, is_next_release: bool = False) -> "subprocess.Popen[str]":
        program = [sys.executable, next_release.__file__] if is_next_release else [sys.executable, "-m", "windlass"]
        with (self.folder / "up.log").open("a") as log:
            process = subprocess.Popen(
                [*program, "up", "--port", str(self._port), *options],
                cwd=self.folder,
                env=self.windlass.environment(),
                text=True,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def migrate_to_next_release(self) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, next_release.__file__, "db", "migrate"],
            cwd=self.folder,
            env=self.windlass.environment(),
            capture_output=True,
            text=True,
            timeout=STEP_TIMEOUT_S,
            check=False,
        )

    def log(self) -> str:
        return (self.folder / "up.log").read_text()[-5_000:]

    def set_pace(self, seconds: float) -> None:
        draft = self.folder / "pace.new"
        draft.write_text(str(seconds))
        draft.replace(self.folder / "pace")

    async def complete(self) -> int:
        count: int = await self.sql.fetchval("select count(*) from public.tasks where status = 'Complete'")
        return count

    async def fleet(self) -> Fleet:
        (fleet,) = await self.store.fleets()
        return fleet

    async def active(self) -> list[Worker]:
        return [worker for worker in await self.store.workers() if worker.status is WorkerStatus.ACTIVE]

    async def until_more_complete(self, count: int, what: str) -> None:
        goal = await self.complete() + count

        async def is_reached() -> bool:
            return await self.complete() >= goal

        await until(is_reached, f"{count} more rows {what}\n{self.log()}", STEP_TIMEOUT_S)

    async def until_led_anew(self, term: int) -> None:
        async def is_led() -> bool:
            (cycle,) = await self.store.cycles("gpu", 1)
            return cycle.term > term

        await until(is_led, f"a leader with a term above {term}\n{self.log()}", STEP_TIMEOUT_S)

    async def term(self) -> int:
        (cycle,) = await self.store.cycles("gpu", 1)
        return cycle.term

    def runs(self) -> list[tuple[int, str]]:
        """The row and the release of each run of the handler."""
        lines = [line.split() for line in (self.folder / "runs").read_text().splitlines()]
        return [(int(number), release) for number, release in lines]


async def keep_busy(site: MoveIn) -> None:
    """Slow the handler down as rows run out, so that rows are queued until the last step, on a slow machine too."""
    while True:
        left = ROWS - len(site.runs())
        site.set_pace(0.1 if left > 600 else 0.5 if left > 150 else 4.0)
        await asyncio.sleep(0.2)


@pytest.fixture
async def site(tmp_path: Path, dsn: str) -> AsyncIterator[MoveIn]:
    plenty = {"requests_per_minute": 10**5, "requests_per_hour": 10**6, "requests_per_day": 10**6}
    settings = RunpodEmulatorSettings(provisioning_s=0.1, starting_s=0.2, runtime_s=0.1, key=KEY, **plenty)
    async with AsyncExitStack() as stack:
        host = stack.enter_context(RealPodHost(tmp_path / "pods", stop_grace_s=2.0))
        address = stack.enter_context(serving(RunpodEmulator(lambda: datetime.now(UTC), settings, host)))
        store = await stack.enter_async_context(PostgresStores(dsn))
        sql = await asyncpg.connect(dsn)
        stack.push_async_callback(sql.close)
        site = MoveIn(tmp_path, dsn, address, sql, store)
        yield site
        for process in site.processes:
            process.kill()
            process.wait(timeout=30)


async def adopt_the_table(site: MoveIn) -> None:
    """The team's table, with rows that wait."""
    await site.sql.execute(GPU_TASKS)
    insert = (
        "insert into public.tasks (params) select jsonb_build_object('n', n) from generate_series(1, $1::integer) n"
    )
    await site.sql.execute(insert, ROWS)
    adopted = site.windlass("db", "adopt", "tasks", "--apply", "--backfill")
    assert f"{ROWS:,} existing rows were adopted" in adopted.out, adopted
    site.note("adopted")


async def deploy_through_a_crash(site: MoveIn, up: "subprocess.Popen[str]") -> "subprocess.Popen[str]":
    """New code, and the control plane is killed while the rollout runs. Returns the next control plane."""
    old = {worker.id for worker in await site.store.workers()}
    site.release(2)
    deployed = site.windlass("deploy", "gpu")
    assert deployed.out.startswith("deploy 1 of fleet gpu requested"), deployed
    site.note("deploy requested")

    async def has_new_worker() -> bool:
        return any(worker.id not in old for worker in await site.active())

    await until(has_new_worker, f"a worker of the new code\n{site.log()}", STEP_TIMEOUT_S)
    rollout = (await site.fleet()).rollout
    assert rollout is not None
    assert rollout.is_running
    term = await site.term()
    up.kill()
    up.wait(timeout=30)
    site.note("control plane killed")
    up = site.up("--leave-workers")
    await site.until_led_anew(term)
    site.note("control plane leads again")

    async def is_rolled_out() -> bool:
        rollout = (await site.fleet()).rollout
        return rollout is not None and rollout.status is RolloutStatus.COMPLETE

    await until(is_rolled_out, f"the end of the rollout\n{site.log()}", STEP_TIMEOUT_S)
    assert not old & {worker.id for worker in await site.active()}
    site.note("deploy complete")
    return up


async def upgrade_with_rows_under_way(site: MoveIn, up: "subprocess.Popen[str]") -> "subprocess.Popen[str]":
    """Migrate while everything runs, then replace the control plane. Workers stay. Returns the next control plane."""
    kept = {worker.id for worker in await site.active()}
    running = "select count(*) from windlass.tasks where status = 'running'"
    await until(lambda: site.sql.fetchval(running), "rows that run during the migration", STEP_TIMEOUT_S)
    migrated = await asyncio.to_thread(site.migrate_to_next_release)
    assert f"schema is at version {next_release.NEXT.version}" in migrated.stdout, migrated
    site.note("database migrated")
    await site.until_more_complete(5, "with the newer database and the older control plane")
    term = await site.term()
    up.send_signal(signal.SIGTERM)
    assert up.wait(timeout=60) == 0, site.log()
    assert site.windlass("status").code != 0, "the older program accepts the newer database"
    up = site.up(is_next_release=True)
    await site.until_led_anew(term)
    site.note("next release leads")
    await site.until_more_complete(5, "with the next release")
    assert kept & {worker.id for worker in await site.active()}, "no worker was kept through the upgrade"
    return up


async def test_table_moves_in_while_code_and_release_change(site: MoveIn) -> None:
    site.release(1)
    site.set_pace(0.1)
    await adopt_the_table(site)
    up = site.up("--leave-workers")
    await site.until_more_complete(1, "by the first pods")
    site.note("first row complete")
    busy = asyncio.create_task(keep_busy(site))
    await site.until_more_complete(50, "by the first release")
    up = await deploy_through_a_crash(site, up)
    up = await upgrade_with_rows_under_way(site, up)
    assert await site.complete() < ROWS, "the rows ran out before the last step"
    busy.cancel()
    await asyncio.gather(busy, return_exceptions=True)
    site.set_pace(0)

    async def is_done() -> bool:
        return await site.complete() == ROWS

    await until(is_done, f"every row is complete\n{site.log()}", STEP_TIMEOUT_S)
    site.note("all rows complete")
    up.send_signal(signal.SIGTERM)
    assert up.wait(timeout=60) == 0, site.log()
    await check_outcome(site)


async def check_outcome(site: MoveIn) -> None:
    runs = site.runs()
    assert sorted(number for number, _ in runs) == list(range(1, ROWS + 1)), "a row was lost or ran twice"
    by_release = {name: sum(release == name for _, release in runs) for name in ("release-1", "release-2")}
    assert all(by_release.values())
    (tasks,) = await site.sql.fetch("select status, count(*), max(attempts) as attempts from windlass.tasks group by 1")
    assert (tasks["status"], tasks["count"]) == ("complete", ROWS)
    claims = [row[0] for row in await site.sql.fetch("select generation_started_at from public.tasks order by 1")]
    gap_s = max((later - earlier).total_seconds() for earlier, later in pairwise(claims))
    assert gap_s < MAX_GAP_S
    figures = {
        "rows": ROWS,
        "runs": len(runs),
        "runs_by_release": by_release,
        "most_attempts": tasks["attempts"],
        "largest_gap_between_claims_s": round(gap_s, 1),
        "seconds_since_start": site.steps,
    }
    print(json.dumps(figures, indent=2))
