"""Workers and PostgreSQL are killed at random while tasks run: each task completes once, and none is lost.

The seed determines the faults. STORM_TASKS=10000 runs the long form, and STORM_SEED repeats a run.
"""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from support.postgres_servers import reachable_temp_dir
from support.worker_harness import QUEUE, KillableServer, WorkerHarness, WorkerProcess, until
from windlass.model.task import new_task

TASKS = int(os.environ.get("STORM_TASKS", "1000"))
SEED = int(os.environ.get("STORM_SEED", "20250711"))
WORKERS = 4
# Worker kills and restarts of the server, spread evenly over the tasks that complete.
FAULTS = 12 if TASKS <= 1000 else 60
LIMIT_S = 400 if TASKS <= 1000 else 900
LEASE = {"heartbeat_s": 0.5, "lease_s": 3.0}

# One row for each time that a task becomes complete, on whatever path.
COMPLETIONS_SQL = """
create table public.completions (task_id bigint, worker_id text, token uuid);
create function public.note_completion() returns trigger language plpgsql as $$
begin
  insert into public.completions values (new.id, new.worker_id, new.claim_token);
  return null;
end
$$;
create trigger note_completion after update on windlass.tasks
  for each row when (new.status = 'complete') execute function public.note_completion();
"""


@pytest.fixture
def server() -> Iterator[KillableServer]:
    with reachable_temp_dir() as folder:
        server = KillableServer(folder)
        yield server
        server.close()


@pytest.mark.timeout(LIMIT_S + 60)
async def test_every_task_completes_once_despite_kills_and_restarts(server: KillableServer, tmp_path: Path) -> None:
    file = tmp_path / "runs"
    async with WorkerHarness(server.dsn, tmp_path) as harness:
        await harness.sql(COMPLETIONS_SQL)
        await harness.store.enqueue_many(
            new_task(QUEUE, {"number": number, "file": str(file), "seconds": 0.002}, max_attempts=100)
            for number in range(TASKS)
        )
        faults = FaultInjector(harness, server, file)
        for fault in range(1, FAULTS + 1):
            await faults.until(lambda fault=fault: faults.runs() >= TASKS * fault // (FAULTS + 2), f"blow {fault}")
            await faults.inject()
        await faults.until(lambda: _are_all_tasks_done(harness), "all tasks are finished")
        faults.tell(f"all {TASKS} tasks have finished")
        await _check_completions(harness, file.read_text().splitlines())


class FaultInjector:
    def __init__(self, harness: WorkerHarness, server: KillableServer, file: Path) -> None:
        self._harness = harness
        self._server = server
        self._random = Random(SEED)  # noqa: S311
        self._file = file
        self._begun = time.monotonic()
        self._processes = [self._start() for _ in range(WORKERS)]

    def runs(self) -> int:
        return self._file.read_bytes().count(b"\n") if self._file.exists() else 0

    def tell(self, what: str) -> None:
        print(f"{time.monotonic() - self._begun:7.2f} s: {what}", flush=True)

    async def inject(self) -> None:
        if self._random.random() < 0.3:
            how = self._random.choice([signal.SIGQUIT, signal.SIGKILL])
            self.tell(f"{how.name} to the database")
            await asyncio.to_thread(self._server.end, how)
            await asyncio.to_thread(self._server.start)
        else:
            victim = self._random.choice(self._processes)
            self.tell(f"SIGKILL to worker {victim.pid}")
            victim.popen.kill()
            await until(lambda: not victim.is_running(), "the worker is gone")

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        """Wait, and replace workers that exited. A worker that starts during an outage exits too."""

        def condition_with_workers() -> Any:
            assert len(self._harness.processes) <= WORKERS + 2 * FAULTS, "workers exit that were not killed"
            self._processes = [process if process.is_running() else self._start() for process in self._processes]
            return condition()

        await until(condition_with_workers, what, LIMIT_S - (time.monotonic() - self._begun))

    def _start(self) -> WorkerProcess:
        concurrency = self._random.choice(["1", "3"])
        return self._harness.start("--concurrency", concurrency, handler="tally", **LEASE)


async def _are_all_tasks_done(harness: WorkerHarness) -> bool:
    return sum(depth.queued + depth.retrying + depth.running for depth in await harness.store.queue_depths()) == 0


async def _check_completions(harness: WorkerHarness, lines: list[str]) -> None:
    rows = await harness.rows(
        "select id, status, attempts, payload, result, claim_token, worker_id from windlass.tasks"
    )
    completions = await harness.rows("select task_id, worker_id, token from public.completions")
    runs = [line.split() for line in lines]
    requeued = sum(row["attempts"] - 1 for row in rows)
    print(f"{len(runs)} runs, {requeued} attempts lost with their workers, {len(harness.processes)} workers")

    assert Counter(row["status"] for row in rows) == {"complete": TASKS}
    # No task became complete twice, and the accepted result is that of the last claim.
    assert Counter(row["task_id"] for row in completions) == {row["id"]: 1 for row in rows}
    by_task = {row["task_id"]: row for row in completions}
    tokens_run = {token for _, _, token in runs}
    for row in rows:
        accepted = by_task[row["id"]]
        result = row["result"]
        assert result["token"] == str(accepted["token"]) == str(row["claim_token"])
        assert result["double"] == row["payload"]["number"] * 2
        assert row["worker_id"] == accepted["worker_id"]
        assert result["token"] in tokens_run
    # One run per completion, and more only for claims that were lost with their worker.
    assert len(runs) <= TASKS + requeued
