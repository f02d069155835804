"""How long migrations of a large queue take, and how long workers wait for them: `python -m bench.migrations [ROWS]`

Fills a table of tasks (5,000,000 by default) in an embedded PostgreSQL and applies what later releases may need, with
the runner of `windlass db migrate`: a column, an index, a value in every row. A worker enqueues, claims and completes
meanwhile; its slowest round is what a migration costs.
"""

import asyncio
import sys
import time
from typing import Any

import asyncpg

from windlass.store import migration as module
from windlass.store.embedded import EmbeddedPostgres
from windlass.store.migration import LATEST_VERSION, MIGRATIONS, Migration, migrate
from windlass.wiring.stores import temporary_data_dir

CHUNK = 250_000
DELTAS = {
    "add a column": "alter table windlass.tasks add column colour text;"
    " alter table windlass.tasks alter column colour set default 'red';",
    "build an index": "\n-- step: statement\ncreate index concurrently if not exists tasks_colour"
    " on windlass.tasks (colour) where colour is not null\n",
    "change 100,000 rows": "\n-- step: batches\nupdate windlass.tasks set colour = 'red' where id in"
    " (select id from windlass.tasks where colour is null and id <= 100000 order by id limit 2000"
    " for update skip locked);\n",
    "drop the column": "alter table windlass.tasks drop column colour;",
}


async def main(rows: int) -> None:
    with temporary_data_dir() as folder, EmbeddedPostgres(folder) as server:
        dsn = server.dsn
        await migrate(dsn)
        connection = await asyncpg.connect(dsn, command_timeout=600)
        started = time.monotonic()
        for first in range(0, rows, CHUNK):
            await connection.execute(
                "insert into windlass.tasks (queue, status, attempts, finished_at, payload)"
                " select 'old', 'complete', 1, now(), '{\"n\": 1}' from generate_series(1, $1::integer)",
                min(CHUNK, rows - first),
            )
        print(f"{rows:,} tasks written in {time.monotonic() - started:.0f} s", flush=True)
        await connection.execute("analyze windlass.tasks")
        for number, (name, sql) in enumerate(DELTAS.items(), start=1):
            module.MIGRATIONS = [*module.MIGRATIONS, Migration(LATEST_VERSION + number, "delta", sql)]
            module.LATEST_VERSION = LATEST_VERSION + number
            await _measure(dsn, name)
        await connection.close()
    module.MIGRATIONS = MIGRATIONS


async def _measure(dsn: str, name: str) -> None:
    waits_s: list[float] = []
    worker = await asyncpg.connect(dsn)
    await worker.execute("select windlass.register_worker('w', 'default', array['q'])")
    working = asyncio.create_task(_work(worker, waits_s))
    await asyncio.sleep(1.0)
    usual_s, started = max(waits_s), time.monotonic()
    del waits_s[:]
    await migrate(dsn)
    took_s = time.monotonic() - started
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    await worker.close()
    slowest_s = max(waits_s, default=0.0)
    print(f"{name:<22} {took_s:8.2f} s   slowest round {slowest_s:6.3f} s (before: {usual_s:.3f} s)", flush=True)


async def _work(connection: Any, waits_s: list[float]) -> None:
    while True:
        started = time.monotonic()
        await connection.execute("select windlass.enqueue('q')")
        task = await connection.fetchrow("select task_id, token from windlass.claim_task('w', array['q'])")
        if task is not None:
            await connection.execute("select windlass.complete_task('w', $1, $2, '1')", *task)
        waits_s.append(time.monotonic() - started)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 5_000_000))
