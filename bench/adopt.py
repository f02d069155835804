"""The cost of an adopted table: the same tasks enqueued, claimed and completed with and without one.

`plain` calls windlass.enqueue. `adopted` inserts rows into a table of the first GPU orchestrators, whose status,
attempts, worker and times are written back. Both use the same worker functions in one database, in turns. Compared is
the CPU time of the server process, which a busy machine disturbs less than the time of day; commits come on top of it.
"""

import argparse
import asyncio
import statistics
import sys
from pathlib import Path
from typing import Any

from bench.bench_server import connected, open_bench_server
from bench.figures import ratio, table
from windlass.model.adoption import AdoptionConfig
from windlass.store import adoption
from windlass.store.migration import migrate

SINGLE_TASKS = 500
BATCH = 100
BATCHES = 20
TABLE = """
create type public.generation_status as enum ('Queued', 'In Progress', 'Complete', 'Failed');
create table public.tasks (
  id uuid primary key default gen_random_uuid(),
  status public.generation_status not null default 'Queued',
  attempts integer not null default 0,
  worker_id text,
  generation_started_at timestamptz,
  generation_processed_at timestamptz,
  created_at timestamptz not null default now(),
  params jsonb
)
"""
PAYLOAD = '{"prompt": "a lighthouse at night, photograph", "steps": 30}'
ENQUEUE = {
    "plain": "select windlass.enqueue('plain', $1)",
    "adopted": "insert into public.tasks (params) values ($1)",
}
ENQUEUE_MANY = {
    "plain": (
        "select windlass.enqueue_many(array_fill('plain'::text, array[$2::integer]), array_fill($1::jsonb, array[$2]))"
    ),
    "adopted": "insert into public.tasks (params) select $1::jsonb from generate_series(1, $2::integer)",
}
QUEUE = {"plain": "plain", "adopted": "tasks"}
FINISH_AND_CLAIM = "select * from windlass.finish_and_claim('w', $1, $2, $3, array[$4], $5)"
# Name, tasks in a round, tasks per call.
KINDS_OF_CALLS = (("one at a time", SINGLE_TASKS, 1), (f"batches of {BATCH}", BATCH * BATCHES, BATCH))
STEPS = ("enqueue", "claim and complete", "both")


async def _drain(sql: Any, queue: str, limit: int) -> None:
    done: list[Any] = []
    # Bounded by the tasks that were enqueued.
    while True:
        ids, tokens = [claim["task_id"] for claim in done], [claim["token"] for claim in done]
        done = await sql.fetch(FINISH_AND_CLAIM, ids, tokens, ["{}"] * len(ids), queue, limit)
        if not done:
            return


async def _run_round(sql: Any, kind: str, count: int, limit: int) -> tuple[float, float]:
    """Microseconds of CPU time per task of enqueueing, and of claiming and completing."""
    backend = Path(f"/proc/{await sql.fetchval('select pg_backend_pid()')}/schedstat")
    started_us = _cpu_us(backend)
    if limit == 1:
        for _ in range(count):
            await sql.execute(ENQUEUE[kind], PAYLOAD)
    else:
        for _ in range(count // limit):
            await sql.execute(ENQUEUE_MANY[kind], PAYLOAD, limit)
    enqueued_us = _cpu_us(backend)
    await _drain(sql, QUEUE[kind], limit)
    return (enqueued_us - started_us) / count, (_cpu_us(backend) - enqueued_us) / count


def _cpu_us(backend: Path) -> float:
    return int(backend.read_text().split()[0]) / 1_000


async def measure(dsn: str, rounds: int) -> dict[str, dict[str, list[float]]]:
    samples: dict[str, dict[str, list[float]]] = {}
    await migrate(dsn)
    async with connected(dsn) as sql:
        await sql.execute(TABLE)
        await adoption.apply(dsn, "tasks", AdoptionConfig())
        await sql.execute("select windlass.register_worker('w', 'default', '{plain,tasks}')")
        for round_ in range(rounds + 1):
            for name, count, limit in KINDS_OF_CALLS:
                kinds = list(QUEUE) if round_ % 2 else list(reversed(QUEUE))
                for kind in kinds:
                    figures = await _run_round(sql, kind, count, limit)
                    if round_ == 0:
                        continue  # warm-up
                    for step, value in zip(STEPS, (*figures, sum(figures)), strict=True):
                        samples.setdefault(f"{step}, {name}", {}).setdefault(kind, []).append(value)
            await sql.execute("vacuum analyze windlass.tasks, public.tasks")
    return samples


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    arguments = parser.parse_args()
    with open_bench_server() as server:
        name = await server.template("adopt", migrate)
        samples = await measure(server.dsn_of(name), arguments.rounds)
    rows = []
    for step, by_kind in samples.items():
        middle, lowest, highest = ratio(by_kind, "adopted", "plain")
        medians = (statistics.median(by_kind[kind]) for kind in ("plain", "adopted"))
        rows.append([step, *(f"{value:.0f}" for value in medians), f"**{middle:.2f}** ({lowest:.2f} to {highest:.2f})"])
    print(f"\n### An adopted table, {arguments.rounds} rounds\n")
    print(table(["µs of CPU time per task", "plain", "adopted", "adopted to plain"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
