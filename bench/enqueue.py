"""Bulk enqueue: rows per second through each contender's bulk interface, and by bare COPY."""

import random
import time
from collections.abc import Mapping

from bench.bench_server import BenchServer, connected
from bench.contenders.bare import Bare
from bench.contenders.base import Contender
from bench.contenders.ours import Windlass
from bench.contenders.pgmq import Pgmq
from bench.contenders.pgqueuer import PgQueuer
from bench.contenders.procrastinate import Procrastinate


class CopyIntoOurTable(Bare):
    """COPY into a table like Windlass' own, with all its indexes and rules, without its trigger."""

    schema = "copy_ours"
    table = "copy_of_tasks"

    async def install(self, dsn: str) -> None:
        await Windlass().install(dsn)
        async with connected(dsn) as connection:
            await connection.execute("create table copy_of_tasks (like windlass.tasks including all)")


class WindlassFromValues(Windlass):
    """Counts the making of checked tasks too, which the others leave to their caller."""

    async def enqueue(self, dsn: str, count: int) -> float:
        began = time.monotonic()
        await super().enqueue(dsn, count)
        return time.monotonic() - began


ENTRIES: Mapping[str, Contender] = {
    # The same columns, the primary key and the index that claims need.
    "COPY, bare table": Bare(),
    "COPY, our table": CopyIntoOurTable(),
    "windlass": Windlass(),
    "windlass, from values": WindlassFromValues(),
    "pgmq": Pgmq(),
    "pgqueuer": PgQueuer(),
    "procrastinate": Procrastinate(),
}


async def measure(server: BenchServer, rows: int, rounds: int) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in ENTRIES}
    order = list(ENTRIES)
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            contender = ENTRIES[name]
            template = await server.template(f"{contender.schema}_empty", contender.install)
            async with server.copy(template, "filling") as dsn:
                await server.checkpoint()
                samples[name].append(rows / await contender.enqueue(dsn, rows))
    return samples
