"""Workers are killed and PostgreSQL is cut off, at random, while tasks run: each completes once, none is lost.

The story is told by its seed. STORM_TASKS=10000 runs the long form, STORM_SEED replays a story.
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
from test_worker_loss import MortalServer

from support.postgres_servers import reachable_temp_dir
from support.worker_harness import QUEUE, Crew, Hand, until
from windlass.model.task import new_task

TASKS = int(os.environ.get("STORM_TASKS", "1000"))
SEED = int(os.environ.get("STORM_SEED", "20250711"))
WORKERS = 4
# Worker kills and restarts of the server, spread evenly over the tasks that complete.
BLOWS = 12 if TASKS <= 1000 else 60
LIMIT_S = 100 if TASKS <= 1000 else 900
LEASE = {"heartbeat_s": 0.5, "lease_s": 3.0}

# One row for each time that a task becomes complete, whoever does it and however.
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
def server() -> Iterator[MortalServer]:
    with reachable_temp_dir() as folder:
        server = MortalServer(folder)
        yield server
        server.close()


@pytest.mark.timeout(LIMIT_S + 60)
async def test_every_task_completes_once_while_workers_are_killed_and_the_database_restarts(
    server: MortalServer, tmp_path: Path
) -> None:
    file = tmp_path / "runs"
    async with Crew(server.dsn, tmp_path) as crew:
        await crew.sql(COMPLETIONS_SQL)
        await crew.store.enqueue_many(
            new_task(QUEUE, {"number": number, "file": str(file), "seconds": 0.002}, max_attempts=100)
            for number in range(TASKS)
        )
        storm = Storm(crew, server, file)
        for blow in range(1, BLOWS + 1):
            await storm.until(lambda blow=blow: storm.runs() >= TASKS * blow // (BLOWS + 2), f"blow {blow}")
            await storm.strike()
        await storm.until(lambda: _is_all_over(crew), "all tasks are finished")
        storm.tell(f"all {TASKS} tasks are over")
        await _judge(crew, file.read_text().splitlines())


class Storm:
    def __init__(self, crew: Crew, server: MortalServer, file: Path) -> None:
        self._crew = crew
        self._server = server
        self._random = Random(SEED)  # noqa: S311
        self._file = file
        self._begun = time.monotonic()
        self._hands = [self._start() for _ in range(WORKERS)]

    def runs(self) -> int:
        return self._file.read_bytes().count(b"\n") if self._file.exists() else 0

    def tell(self, what: str) -> None:
        print(f"{time.monotonic() - self._begun:7.2f} s: {what}", flush=True)

    async def strike(self) -> None:
        if self._random.random() < 0.3:
            how = self._random.choice([signal.SIGQUIT, signal.SIGKILL])
            self.tell(f"{how.name} to the database")
            await asyncio.to_thread(self._server.end, how)
            await asyncio.to_thread(self._server.start)
        else:
            victim = self._random.choice(self._hands)
            self.tell(f"SIGKILL to worker {victim.pid}")
            victim.process.kill()
            await until(lambda: not victim.is_running(), "the worker is gone")

    async def until(self, is_so: Callable[[], Any], what: str) -> None:
        """As long as there are workers in all places. One that starts while the database is away gives up, too."""

        def is_so_and_staffed() -> Any:
            assert len(self._crew.hands) <= WORKERS + 2 * BLOWS, "workers end that nobody has killed"
            self._hands = [hand if hand.is_running() else self._start() for hand in self._hands]
            return is_so()

        await until(is_so_and_staffed, what, LIMIT_S - (time.monotonic() - self._begun))

    def _start(self) -> Hand:
        concurrency = self._random.choice(["1", "3"])
        return self._crew.start("--concurrency", concurrency, handler="tally", **LEASE)


async def _is_all_over(crew: Crew) -> bool:
    return sum(depth.queued + depth.retrying + depth.running for depth in await crew.store.queue_depths()) == 0


async def _judge(crew: Crew, lines: list[str]) -> None:
    rows = await crew.rows("select id, status, attempts, payload, result, claim_token, worker_id from windlass.tasks")
    completions = await crew.rows("select task_id, worker_id, token from public.completions")
    runs = [line.split() for line in lines]
    requeued = sum(row["attempts"] - 1 for row in rows)
    print(f"{len(runs)} runs, {requeued} attempts lost with their workers, {len(crew.hands)} workers")

    assert Counter(row["status"] for row in rows) == {"complete": TASKS}
    # Accepted once: no task became complete twice, and the one acceptance was that of its last claim.
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
    # A run for each completion; more only where a claim was lost with its worker.
    assert len(runs) <= TASKS + requeued
