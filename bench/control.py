"""The control loop: the cost of a cycle compared with a bare read of the same rows, and spawn-to-first-claim time.

    python -m bench.control            # everything
    python -m bench.control --rounds 5

A cycle observes, plans and commits its plan, without any provider call. It is compared, in interleaved rounds on the
same server, with a bare read of the same rows: the workers, their running tasks, and the counts of queued tasks.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import asyncpg

from windlass.control.cycle import FleetCycle
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate
from windlass.model.machine import Machine, MachineRequest, MachineState, Preparation, ProviderTraits
from windlass.ports.provider import OnHostKey
from windlass.providers.local import LocalProvider
from windlass.store.control import PostgresControlStore
from windlass.store.database import Database
from windlass.store.embedded import EmbeddedPostgres
from windlass.store.fleets import PostgresFleetQueries, PostgresOperations
from windlass.store.migration import migrate

FINISHED, QUEUED = 900_000, 100_000
FLEET = "bench"

FILL_TASKS = """
insert into windlass.tasks (queue, status, attempts, started_at, finished_at, worker_id, claim_token)
select 'bench', 'complete', 1, now() - interval '1 hour', now() - interval '59 minutes', 'gone', gen_random_uuid()
from generate_series(1, $1::integer);
"""
FILL_QUEUE = "insert into windlass.tasks (queue) select 'bench' from generate_series(1, $1::integer)"
FILL_WORKERS = """
with slots as (
  insert into windlass.slots (fleet, slot)
  select 'bench', n from generate_series(0, $1::integer - 1) as n
  on conflict do nothing
)
insert into windlass.workers (id, fleet, slot, status, queues, created_at, activated_at, last_heartbeat, machine_id,
  creation, metadata)
select 'w' || n, 'bench', n, 'active', array['bench'], now() - interval '1 hour', now() - interval '1 hour', now(),
  'm' || n, 'created', '{"idle_s": 0}'
from generate_series(0, $1::integer - 1) as n
"""
FILL_RUNNING = """
insert into windlass.tasks (queue, status, attempts, started_at, worker_id, claim_token)
select 'bench', 'running', 1, now(), 'w' || n, gen_random_uuid() from generate_series(0, $1::integer - 1) as n
"""
BARE = (
    "select * from windlass.workers where fleet = 'bench' and status <> 'terminated'",
    "select worker_id, id, started_at, timeout_s from windlass.tasks where status = 'running'",
    "select count(*) from windlass.tasks where queue = 'bench' and status = 'queued' and run_after is null",
)


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


class StaticProvider:
    """A provider whose machines all run and never change."""

    traits = ProviderTraits()

    def __init__(self, count: int) -> None:
        self._machines = tuple(Machine(f"m{n}", f"w{n}", MachineState.RUNNING) for n in range(count))

    async def create(self, request: MachineRequest) -> Machine:
        raise AssertionError(f"unexpected create of {request.name}")

    async def list_machines(self) -> tuple[Machine, ...]:
        return self._machines

    async def delete(self, machine: Machine) -> None:
        raise AssertionError(f"unexpected delete of {machine.name}")

    async def prepare(self, machine: Machine, host_key: str | None, on_host_key: OnHostKey) -> Preparation:  # noqa: ARG002
        raise AssertionError(f"unexpected provisioning of {machine.name}")

    async def close(self) -> None: ...


async def cycles(dsn: str, workers: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of bare reads and of whole cycles, interleaved."""
    config = FleetConfig(
        queues=("bench",), handler="x:y", max_workers=workers, heartbeat_timeout_s=3600, stuck_timeout_s=36_000
    )
    connection = await asyncpg.connect(dsn)
    bare, whole = [], []
    async with Database(dsn) as database:
        store = PostgresControlStore(database)
        cycle = FleetCycle(FLEET, config, store, StaticProvider(workers), Candidate("bench", 600), random.Random(1))
        for number in range(rounds + 2):
            started = time.perf_counter()
            for sql in BARE:
                await connection.fetch(sql)
            middle = time.perf_counter()
            summary = await cycle.run()
            if any((summary.actions or {"none": 1}).values()) or not summary.is_leader:
                raise AssertionError(f"expected a cycle without actions: {summary}")
            if number >= 2:  # the first ones warm caches and plans
                bare.append(middle - started)
                whole.append(time.perf_counter() - middle)
    await connection.close()
    return bare, whole


async def fill(dsn: str, workers: int) -> None:
    connection = await asyncpg.connect(dsn, timeout=60)
    await connection.execute(
        "insert into windlass.fleets (name, max_workers) values ('bench', 100000) on conflict do nothing"
    )
    await connection.execute("delete from windlass.tasks where status = 'running'")
    await connection.execute("delete from windlass.workers")
    await connection.execute(FILL_WORKERS, workers)
    await connection.execute(FILL_RUNNING, workers)
    await connection.execute("vacuum analyze windlass.workers")
    await connection.execute("vacuum analyze windlass.tasks")
    await connection.close()


async def first_claim(dsn: str, folder: Path, rounds: int) -> list[float]:
    """Seconds from the decision to spawn a local worker to its first claimed task."""
    config = FleetConfig(queues=("first",), handler="bench.handlers:nothing", max_workers=1, heartbeat_interval_s=1)
    connection = await asyncpg.connect(dsn)
    provider = LocalProvider("first", config, identity=dsn, state_dir=folder, database_url=dsn)
    seconds = []
    async with Database(dsn) as database:
        store = PostgresControlStore(database)
        cycle = FleetCycle("first", config, store, provider, Candidate("bench", 600), random.Random(2))
        for _ in range(rounds):
            task_id = await connection.fetchval("select windlass.enqueue('first')")
            started = time.perf_counter()
            await cycle.run()
            while await connection.fetchval("select started_at is null from windlass.tasks where id = $1", task_id):
                await asyncio.sleep(0.005)
            seconds.append(time.perf_counter() - started)
            while await connection.fetchval("select finished_at is null from windlass.tasks where id = $1", task_id):
                await asyncio.sleep(0.005)
            for worker in await PostgresFleetQueries(database).workers():
                await PostgresOperations(database).terminate_worker(worker.id, "end of the round")
            while await connection.fetchval(
                "select count(*) from windlass.workers where fleet = 'first' and status <> 'terminated'"
            ):
                await cycle.run()
    await connection.close()
    return seconds


async def run(rounds: int) -> None:
    with tempfile.TemporaryDirectory(prefix="windlass-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        with EmbeddedPostgres(folder / "data") as postgres:
            await migrate(postgres.dsn)
            spawned = await first_claim(postgres.dsn, folder / "state", rounds)
            print(f"spawn to first claim: {spread(spawned)} s")
            connection = await asyncpg.connect(postgres.dsn, timeout=60)
            await connection.execute(FILL_TASKS, FINISHED, timeout=600)
            await connection.execute(FILL_QUEUE, QUEUED, timeout=600)
            await connection.close()
            for workers in (1_000, 10_000):
                await fill(postgres.dsn, workers)
                bare, whole = await cycles(postgres.dsn, workers, rounds)
                ratio = statistics.median(w / b for w, b in zip(whole, bare, strict=True))
                print(
                    f"{workers:>6,} workers, {FINISHED + QUEUED:,} tasks: bare read {spread(bare)} s,"
                    f" cycle {spread(whole)} s, ratio {ratio:.2f}"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=9)
    asyncio.run(run(parser.parse_args().rounds))


if __name__ == "__main__":
    main()
