"""Cost of a claim with 1,000,000 finished and 100,000 queued tasks, compared with a small table.

One worker per table finishes its task and claims the next through the normal store function. Calls alternate between
the tables, so that both see the same load of the machine.
"""

import statistics
import time
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from bench.bench_server import BenchServer, connected
from bench.contenders.base import QUEUE
from bench.contenders.ours import Windlass
from windlass.model.task import Finished
from windlass.model.worker import Registration
from windlass.store.transport import PostgresTransport, open_postgres_transport

QUEUED = {"small table": 5_000, "large table": 100_000}
CALLS_A_ROUND = 40
WARM_UP_CALLS = 50


class _Claimer:
    """A worker without a handler."""

    def __init__(self, store: PostgresTransport) -> None:
        self._store = store
        self._finished: list[Finished] = []

    async def call_us(self) -> float:
        began = time.perf_counter()
        turn = await self._store.finish_and_claim("bench", self._finished, [QUEUE], 1)
        took_us = (time.perf_counter() - began) * 1e6
        claim = turn.claims[0]
        self._finished = [Finished(claim.task_id, claim.token, "null")]
        return took_us


async def measure(server: BenchServer, rounds: int) -> dict[str, list[float]]:
    """Median microseconds of a call, per round."""
    if CALLS_A_ROUND * rounds + WARM_UP_CALLS > min(QUEUED.values()):
        raise ValueError(f"{rounds} rounds would empty the small table")
    samples: dict[str, list[float]] = {name: [] for name in QUEUED}
    async with AsyncExitStack() as stack:
        claimers = {}
        for name in QUEUED:
            dsn = server.dsn_of(await server.template(name.replace(" ", "_"), partial(_build, name=name)))
            store = await stack.enter_async_context(open_postgres_transport(dsn))
            await store.register(Registration("bench", (QUEUE,)))
            claimers[name] = _Claimer(store)
        for claimer in claimers.values():
            for _ in range(WARM_UP_CALLS):
                await claimer.call_us()
        for _ in range(rounds):
            taken: dict[str, list[float]] = {name: [] for name in claimers}
            for _ in range(CALLS_A_ROUND):
                for name, claimer in claimers.items():
                    taken[name].append(await claimer.call_us())
            for name, took_us in taken.items():
                samples[name].append(statistics.median(took_us))
    return samples


async def _build(dsn: str, name: str) -> None:
    windlass = Windlass()
    await windlass.install(dsn)
    if name == "large table":
        async with connected(dsn) as connection:
            await connection.execute(Path(__file__).with_suffix(".sql").read_text())
    await windlass.enqueue(dsn, QUEUED[name])
