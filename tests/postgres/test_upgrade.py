"""One version apart: old workers with a newer database, new workers with an older one, with tasks under way.

There is no earlier release to install. So the other version is a frozen copy of what the first release sends: the
statements of contract 1 in plain SQL. They do not import the worker of this tree, and may not be edited within
contract 1: a change here is a change that breaks deployed workers. test_upgrade_http.py has the recorded HTTP bodies.
The next release's schema is this one with a migration that changes tables and adds functions.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from support import next_release
from support.next_release import NEXT
from support.queue_sql import connected
from support.worker_harness import until
from windlass.store import migration as module
from windlass.store.migration import LATEST_VERSION, MIGRATIONS, migrate, rollback

TIMEOUT_S = 90.0
SECRET = "frozen-worker-" + "s" * 32
# Sent by a worker of contract 1, in this form.
CONTRACT_1 = {
    "register": "select windlass.register_worker(p_worker_id => $1, p_fleet => 'default', p_queues => array['q'],"
    " p_concurrency => 1, p_lease_s => 30, p_host => 'old', p_pid => 1, p_version => '0.1.0', p_start_id => 'one',"
    " p_secret => $2)",
    "claim": "select task_id, token, payload from windlass.claim_task($1, array['q'], $2)",
    "heartbeat": "select status, paused, lost from windlass.heartbeat($1, $2::jsonb, '{}'::jsonb, $3)",
    "complete": 'select windlass.complete_task($1, $2, $3, \'{"by": "old"}\', $4)',
    "fail": "select windlass.fail_task($1, $2, $3, 'it broke', p_secret => $4)",
    "deregister": "select windlass.deregister_worker($1, 'stopped', $2)",
}
HANDLER = """
import time
from pathlib import Path

def work(task):
    while task.payload and not Path(task.payload["go"]).exists():
        time.sleep(0.01)
    return {"by": "new"}
"""


def pretend_next_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIGRATIONS", [*MIGRATIONS, NEXT])
    monkeypatch.setattr(module, "LATEST_VERSION", NEXT.version)


class FrozenWorker:
    """A worker of contract 1: one connection, one task at a time. Counts what it completed."""

    def __init__(self, dsn: str, name: str) -> None:
        self._dsn = dsn
        self._name = name
        self.completed = 0

    async def run(self) -> None:
        async with connected(self._dsn) as connection:
            await connection.execute(CONTRACT_1["register"], self._name, SECRET)
            try:
                while True:
                    # The contract asks for it: a call that ends with a deadlock has changed nothing, and is repeated.
                    with suppress(asyncpg.DeadlockDetectedError):
                        await self._round(connection)
            finally:
                await connection.execute(CONTRACT_1["deregister"], self._name, SECRET)

    async def _round(self, connection: Any) -> None:
        claim = await connection.fetchrow(CONTRACT_1["claim"], self._name, SECRET)
        claims = [] if claim is None else [{"task_id": claim["task_id"], "token": str(claim["token"])}]
        status, _, lost = await connection.fetchrow(CONTRACT_1["heartbeat"], self._name, json.dumps(claims), SECRET)
        assert (status, lost) == ("active", [])
        if claim is None:
            await asyncio.sleep(0.02)
            return
        call, number = ("fail", 0) if claim["payload"] == '"fail"' else ("complete", 1)
        await connection.execute(CONTRACT_1[call], self._name, claim["task_id"], claim["token"], SECRET)
        self.completed += number


@asynccontextmanager
async def frozen_worker(dsn: str, name: str) -> AsyncIterator[FrozenWorker]:
    worker = FrozenWorker(dsn, name)
    running = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        running.cancel()
        (ended,) = await asyncio.gather(running, return_exceptions=True)
        assert isinstance(ended, asyncio.CancelledError), f"the old worker ended by itself: {ended!r}"


@asynccontextmanager
async def new_worker(dsn: str, folder: Path, *, is_next_release: bool = False) -> AsyncIterator[None]:
    """A process of this tree's worker, or of the pretended next release's."""
    program = [next_release.__file__] if is_next_release else ["-m", "windlass"]
    (folder / "app.py").write_text(HANDLER)
    with (folder / "worker.log").open("ab") as log:
        process = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, *program, "worker", "--queue", "r", "--handler", "app:work"],
            cwd=folder,
            env={**os.environ, "DATABASE_URL": dsn},
            stdout=log,
            stderr=log,
        )
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


async def completed(dsn: str) -> dict[str, int]:
    """Completed tasks by the kind of worker."""
    async with connected(dsn) as connection:
        rows = await connection.fetch(
            "select result ->> 'by' as by, count(*) from windlass.tasks where status = 'complete' group by 1"
        )
        return {row["by"]: row["count"] for row in rows}


@pytest.fixture
async def dsn(empty_dsn: str) -> str:
    await migrate(empty_dsn)
    return empty_dsn


async def enqueue(dsn: str, count: int) -> None:
    """Old workers serve queue q, new ones queue r."""
    async with connected(dsn) as connection:
        await connection.execute(
            "select windlass.enqueue('q'), windlass.enqueue('r') from generate_series(1, $1)", count
        )


async def until_completed(dsn: str, each: int) -> None:
    async def is_done() -> bool:
        return await completed(dsn) == {"old": each, "new": each}

    await until(is_done, f"{each} tasks by each kind of worker", TIMEOUT_S)


async def test_both_kinds_of_workers_go_on_through_upgrade_and_rollback(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = tmp_path / "go"
    async with frozen_worker(dsn, "old"), new_worker(dsn, tmp_path):
        await enqueue(dsn, 10)
        await until_completed(dsn, 10)
        async with connected(dsn) as connection:
            slow = await connection.fetchval("select windlass.enqueue('r', $1::jsonb)", json.dumps({"go": str(go)}))
        with monkeypatch.context() as newer:
            pretend_next_release(newer)
            # Tasks are queued and running while the tables change.
            await enqueue(dsn, 10)
            assert await migrate(dsn) == [NEXT]
            await enqueue(dsn, 10)
            go.touch()

            async def is_slow_done() -> bool:
                async with connected(dsn) as connection:
                    return bool(
                        await connection.fetchval("select status = 'complete' from windlass.tasks where id = $1", slow)
                    )

            await until(is_slow_done, "the task that ran during the upgrade", TIMEOUT_S)
            await enqueue(dsn, 10)
            assert await rollback(dsn, LATEST_VERSION) == [NEXT]
        await enqueue(dsn, 10)

        async def is_done() -> bool:
            return await completed(dsn) == {"old": 50, "new": 51}

        await until(is_done, "every task", TIMEOUT_S)
    async with connected(dsn) as connection:
        assert await connection.fetchval("select max(attempts) from windlass.tasks") == 1


@pytest.mark.parametrize("database", ["newer", "older", "rolled back"])
async def test_worker_starts_with_a_database_one_version_apart(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: str
) -> None:
    """The worker needs its contract only, whatever the schema version. The older one gets the next release."""
    if database != "older":
        with monkeypatch.context() as newer:
            pretend_next_release(newer)
            assert await migrate(dsn) == [NEXT]
            if database == "rolled back":
                assert await rollback(dsn, LATEST_VERSION) == [NEXT]
    await enqueue(dsn, 3)
    async with new_worker(dsn, tmp_path, is_next_release=database == "older"):

        async def is_done() -> bool:
            return await completed(dsn) == {"new": 3}

        await until(is_done, f"tasks with a {database} database", TIMEOUT_S)


async def test_every_call_of_the_frozen_contract_has_its_signature(dsn: str) -> None:
    """The statements parse and plan against the present schema, with the same result columns."""
    columns = {
        "claim": ["task_id", "token", "payload"],
        "heartbeat": ["status", "paused", "lost"],
    }
    async with connected(dsn) as connection:
        for name, statement in CONTRACT_1.items():
            prepared = await connection.prepare(statement)
            found = [attribute.name for attribute in prepared.get_attributes()]
            assert len(found) == len(columns.get(name, [name])), name
            if name in columns:
                assert found == columns[name]
