"""Tasks per second: one at a time, and many small ones at once.

All contenders are up at the same time, each with its worker processes and its own database, and stand still (SIGSTOP).
Then they take turns: in each round everyone runs alone for a short window, in an order drawn anew, and the calls of its
handler are counted. What disturbs the machine for longer than a round disturbs all alike. Afterwards each database must
know of as many finished tasks as were handled, or the figures are refused.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from bench.arena import Arena, connected
from bench.contenders.bare import Bare
from bench.contenders.base import Contender, Mode
from bench.contenders.ours import Windlass
from bench.contenders.pgmq import Pgmq
from bench.contenders.pgqueuer import PgQueuer
from bench.contenders.procrastinate import Procrastinate
from bench.crew import Crew, crew
from bench.quiet import QUIET_SHARE, Onlooker
from bench.tally import Tally

# From being let go to being counted: time to get back into stride.
SETTLE_S = 0.1
# A turn that was disturbed is taken again so often at most; tasks are filled in for all of them.
MOST_TRIES = 3


@dataclass(frozen=True, slots=True)
class Entry:
    contender: Contender
    mode: Mode
    # Tasks are filled in for this many a second: the queue must not run dry.
    most_per_s: int


ONE_AT_A_TIME: Mapping[str, Entry] = {
    "bare loop": Entry(Bare(), Mode(), 12_000),
    "windlass --inline": Entry(Windlass(), Mode(variant="inline"), 12_000),
    "windlass": Entry(Windlass(), Mode(variant="isolated"), 12_000),
    "pgmq, delete": Entry(Pgmq(), Mode(variant="delete"), 6_000),
    "pgmq, archive": Entry(Pgmq(), Mode(variant="archive"), 6_000),
    "pgqueuer": Entry(PgQueuer(), Mode(), 4_000),
    "procrastinate": Entry(Procrastinate(), Mode(), 2_000),
}
# Each at the batch size at which it was fastest on the machine of docs/benchmarks.md; `--part sweep` finds them.
IN_BATCHES: Mapping[str, Entry] = {
    "bare loop": Entry(Bare(), Mode(batch=1000), 80_000),
    "windlass --inline": Entry(Windlass(), Mode(batch=2000, variant="inline"), 80_000),
    "pgmq, delete": Entry(Pgmq(), Mode(batch=1000, variant="delete"), 100_000),
    "pgmq, archive": Entry(Pgmq(), Mode(batch=1000, variant="archive"), 80_000),
    "pgqueuer": Entry(PgQueuer(), Mode(batch=500), 30_000),
    "procrastinate": Entry(Procrastinate(), Mode(batch=10), 2_000),
}


async def measure(
    arena: Arena, entries: Mapping[str, Entry], processes: int, rounds: int, window_s: float, patience_s: float
) -> dict[str, list[float]]:
    """Tasks per second of every entry, round after round."""
    onlooker = Onlooker(arena.postgres_data, patience_s)
    samples: dict[str, list[float]] = {name: [] for name in entries}
    turns = rounds * (MOST_TRIES if patience_s else 1) + 1
    async with AsyncExitStack() as stack:
        # All databases before all workers: making one waits for every server process, also for one that stands still
        # because the worker it is writing to was stopped.
        grounds = {
            name: await stack.enter_async_context(_ground(arena, number, entry, turns * (window_s + SETTLE_S)))
            for number, (name, entry) in enumerate(entries.items())
        }
        crews = {
            name: await stack.enter_async_context(_standing_by(arena, number, entry, processes, grounds[name]))
            for number, (name, entry) in enumerate(entries.items())
        }
        await arena.level_the_ground()
        order = list(crews)
        for _ in range(rounds):
            random.shuffle(order)
            for name in order:
                samples[name].append(await _turn(crews[name], onlooker, window_s))
    return samples


async def _turn(workers: Crew, onlooker: Onlooker, window_s: float) -> float:
    """One figure; taken again, as long as patience lasts, if others used the machine meanwhile."""
    give_up_at = onlooker.give_up_at()
    for _ in range(MOST_TRIES):
        await onlooker.until_quiet(give_up_at)
        workers.resume()
        await asyncio.sleep(SETTLE_S)
        moment, before = onlooker.look(), sum(workers.counts())
        await asyncio.sleep(window_s)
        rate = (sum(workers.counts()) - before) / (time.monotonic() - moment.at)
        others = onlooker.share_of_others(moment)
        workers.check()
        workers.pause()
        if others < QUIET_SHARE or time.monotonic() >= give_up_at:
            break
    return rate


@dataclass(frozen=True, slots=True)
class _Ground:
    """A database of its own, with tasks for all its turns."""

    dsn: str
    tasks: int


@asynccontextmanager
async def _ground(arena: Arena, number: int, entry: Entry, seconds: float) -> AsyncIterator[_Ground]:
    tasks = int(entry.most_per_s * seconds)
    template = await _filled(arena, entry.contender, tasks)
    async with arena.copy(template, f"contender_{number}") as dsn:
        yield _Ground(dsn, tasks)


@asynccontextmanager
async def _standing_by(arena: Arena, number: int, entry: Entry, processes: int, ground: _Ground) -> AsyncIterator[Crew]:
    """The entry's workers, each with its first task in hand, standing still."""
    command = entry.contender.worker(entry.mode)
    tally = Tally(arena.folder / f"tally_{number}")
    with crew(command, processes, ground.dsn, tally, arena.folder / f"workers_{number}.log") as workers:
        await workers.until_all_work()
        tally.open_gate()
        workers.pause()
        yield workers
        handled = sum(workers.counts())
    async with connected(ground.dsn) as connection:
        finished = await entry.contender.finished(connection)
    if handled >= ground.tasks:
        raise RuntimeError(f"{command} emptied the queue of {ground.tasks:,} tasks: raise its most_per_s")
    # What was in hand when the workers were stopped, several batches deep, may be missing.
    if finished < handled - 10 * entry.mode.batch * processes:
        raise RuntimeError(f"{command} handled {handled:,} tasks and finished only {finished:,}")


async def _filled(arena: Arena, contender: Contender, tasks: int) -> str:
    async def build(dsn: str) -> None:
        await contender.install(dsn)
        await contender.enqueue(dsn, tasks)

    return await arena.template(f"{contender.schema}_{tasks}", build)
