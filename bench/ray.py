"""Empty tasks per second through the dispatcher, compared with bare `ray.get`.

One head, one node, one PostgreSQL (fsync on). Rounds are interleaved, and ratios are taken within a round. The bare
side submits all tasks at once and waits for them. The other side enqueues all tasks at once and waits until the last is
complete: each was claimed, assigned to its node in the database before it began, and finished there.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.figures import rate_table
from windlass.model.ray import RaySettings
from windlass.model.task import new_task
from windlass.ray.head import HeadAddress, run_head
from windlass.store.database import Database
from windlass.store.embedded import EmbeddedPostgres
from windlass.store.migration import migrate
from windlass.store.tasks import PostgresTaskStore

FLEET = "bench"
TIMEOUT_S = 300.0
TOML = """
[fleets.bench]
provider = "ray-local"
queues = ["q"]
handler = "bench.handlers:nothing"
[fleets.bench.ray]
margin = {margin}
"""


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=2_000)
    parser.add_argument("--cpus", type=int, default=2)
    parser.add_argument("--margin", type=int, default=RaySettings().margin)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="windlass-bench-") as place:
        folder = Path(place)
        folder.chmod(0o711)
        with EmbeddedPostgres(folder / "data") as postgres:
            await migrate(postgres.dsn)
            async with run_head() as head, Database(postgres.dsn) as database:
                print(await _measure(options, folder, postgres.dsn, head, database))


async def _measure(options: Any, folder: Path, dsn: str, head: HeadAddress, database: Database) -> str:
    (folder / "windlass.toml").write_text(TOML.format(margin=options.margin))
    node_settings = RaySettings(node_cpus=options.cpus, node_gpus=0, object_store_mb=100).model_dump_json()
    async with database.connection("setting up") as connection:
        await connection.execute("insert into windlass.fleets (name) values ($1)", FLEET)
        await connection.execute("insert into windlass.slots (fleet, slot) values ($1, 0)", FLEET)
        await connection.execute(
            "insert into windlass.workers (id, fleet, slot, status) values ('n', $1, 0, 'spawning')", FLEET
        )
    env = {**os.environ, "DATABASE_URL": dsn, "RAY_ADDRESS": head.address}
    node = ["node", "--address", head.address, "--settings", node_settings, "--queue", "q"]
    dispatch = ["dispatch", "--fleet", FLEET, "--config", str(folder / "windlass.toml")]
    programs = [
        _start(folder / "node.log", node, {**env, "WINDLASS_WORKER_ID": "n", "WINDLASS_FLEET": FLEET}),
        _start(folder / "dispatch.log", dispatch, env),
    ]
    try:
        bare = await asyncio.to_thread(_BareRay, head.address)
        samples: dict[str, list[float]] = {"bare ray.get": [], "through the dispatcher": []}
        await _measure_dispatcher(database, 100)  # warm-up
        await asyncio.to_thread(bare.run, 100)
        for _ in range(options.rounds):
            samples["bare ray.get"].append(await asyncio.to_thread(bare.run, options.tasks))
            samples["through the dispatcher"].append(await _measure_dispatcher(database, options.tasks))
        return rate_table(samples, f"tasks/s, {options.cpus} CPUs, margin {options.margin}", ["through the dispatcher"])
    finally:
        for program in programs:
            program.terminate()
        for program in programs:
            program.wait(30)


def _start(log: Path, arguments: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
    with log.open("wb") as stream:
        command = [sys.executable, "-m", "windlass", "ray", *arguments]
        return subprocess.Popen(command, env=env, stdout=stream, stderr=subprocess.STDOUT)


async def _measure_dispatcher(database: Database, count: int) -> float:
    started = time.monotonic()
    await PostgresTaskStore(database).enqueue_many([new_task("q") for _ in range(count)])
    async with database.connection("counting tasks") as connection:
        while await connection.fetchval("select count(*) from windlass.tasks where status <> 'complete'"):
            if time.monotonic() - started > TIMEOUT_S:
                raise TimeoutError("the tasks were not completed in time")
            await asyncio.sleep(0.02)
        took_s = time.monotonic() - started
        await connection.execute("truncate windlass.tasks")
    return count / took_s


class _BareRay:
    def __init__(self, address: str) -> None:
        import ray  # noqa: PLC0415 - takes a second, and only the bare side needs it

        ray.init(address=address, log_to_driver=False, logging_level="ERROR")

        @ray.remote(num_cpus=1, max_retries=0, label_selector={"windlass-fleet": FLEET})  # type: ignore[untyped-decorator]
        def noop(payload: str) -> str:
            return payload

        self._ray, self._noop = ray, noop

    def run(self, count: int) -> float:
        started = time.monotonic()
        self._ray.get([self._noop.remote("null") for _ in range(count)])
        return count / (time.monotonic() - started)


if __name__ == "__main__":
    asyncio.run(main())
