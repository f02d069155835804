"""A worker without a handler, as a process that a test can kill: `python adopted_worker.py DSN WORKER_ID QUEUE`.

It completes what it claims, in batches, and recovers the tasks of killed workers, until it is terminated. Each run of
the handler, which does nothing, is a row in public.runs.
"""

import asyncio
import sys
import time
from typing import Any

import asyncpg

BATCH = 200
# A worker that lives and is late by as much, on a busy machine, would lose its claims.
LEASE_S = 10.0
HEARTBEAT_S = 1.0
REGISTER = "select windlass.register_worker($1, 'default', array[$2], p_concurrency => $3, p_lease_s => $4)"
RUN = "insert into public.runs (task_id, worker_id) select task_id, $2 from unnest($1::bigint[]) as task_id"
FINISH_AND_CLAIM = "select task_id, token from windlass.finish_and_claim($1, $2, $3, $4, array[$5], $6)"


async def main(dsn: str, worker_id: str, queue: str) -> None:
    sql = await asyncpg.connect(dsn)
    await sql.execute(
        "select windlass.activate_worker($1)", await sql.fetchval(REGISTER, worker_id, queue, BATCH, LEASE_S)
    )
    claims: list[Any] = []
    beat_at = 0.0
    while True:
        if time.monotonic() >= beat_at:
            held = ",".join(f'{{"task_id": {claim[0]}, "token": "{claim[1]}"}}' for claim in claims)
            await sql.fetchrow("select status from windlass.heartbeat($1, $2)", worker_id, f"[{held}]")
            await sql.fetch("select worker_id from windlass.recover_lost_workers($1)", worker_id)
            await sql.fetchval("select windlass.settle_rows($1)", worker_id)
            beat_at = time.monotonic() + HEARTBEAT_S
        ids, tokens = [claim[0] for claim in claims], [claim[1] for claim in claims]
        results = ['{"url": "s3://out"}'] * len(claims)
        claims = await sql.fetch(FINISH_AND_CLAIM, worker_id, ids, tokens, results, queue, BATCH)
        claims = [claim for claim in claims if claim["token"] not in tokens]
        if claims:
            await sql.execute(RUN, [claim["task_id"] for claim in claims], worker_id)
        else:
            await asyncio.sleep(0.05)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
