"""Windlass beside its peers and beside a bare loop, on one PostgreSQL, in interleaved rounds.

Prints the tables of docs/benchmarks.md. Ends by itself; nothing of it stays.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from bench import depth, enqueue, throughput, wakeup
from bench.arena import Arena, open_arena
from bench.figures import percentile, rate_table, ratio, table
from bench.throughput import Entry

SWEPT_BATCHES = (50, 100, 200, 500, 1000, 2000)
ROWS_ENQUEUED = 100_000
T = TypeVar("T")


async def one_at_a_time(arena: Arena, arguments: argparse.Namespace) -> None:
    await tasks_per_s(arena, arguments, throughput.ONE_AT_A_TIME, "One task at a time")


async def many_at_once(arena: Arena, arguments: argparse.Namespace) -> None:
    await tasks_per_s(arena, arguments, throughput.IN_BATCHES, "Many small tasks at once")


async def tasks_per_s(arena: Arena, arguments: argparse.Namespace, entries: Mapping[str, Entry], title: str) -> None:
    chosen = pick(entries, arguments.only)
    for processes in arguments.processes:
        samples = await throughput.measure(
            arena, chosen, processes, arguments.rounds, arguments.window, arguments.patience
        )
        print(f"\n### {title}, {processes} process{'es' if processes > 1 else ''} each\n")
        print(rate_table(samples, "tasks/s", [name for name in chosen if name.startswith("windlass")]), flush=True)


async def sweep(arena: Arena, arguments: argparse.Namespace) -> None:
    """Which batch size suits whom."""
    for name, entry in pick(throughput.IN_BATCHES, arguments.only).items():
        sizes = {str(size): replace(entry, mode=replace(entry.mode, batch=size)) for size in SWEPT_BATCHES}
        for processes in arguments.processes:
            samples = await throughput.measure(
                arena, sizes, processes, arguments.rounds, arguments.window, arguments.patience
            )
            print(f"\n### {name} by batch size, {processes} process{'es' if processes > 1 else ''}\n")
            print(rate_table(samples, "batch", []), flush=True)


async def idle_wake_up(arena: Arena, arguments: argparse.Namespace) -> None:
    samples = await wakeup.measure(arena, arguments.rounds * 20, pick(wakeup.ENTRIES, arguments.only))
    print(f"\n### Idle wake-up, {arguments.rounds * 20} tasks each\n")
    rows = [
        [name, *(f"{percentile(values, share):.2f}" for share in (0.1, 0.5, 0.9, 0.99))]
        for name, values in samples.items()
    ]
    print(table(["milliseconds", "p10", "p50", "p90", "p99"], rows), flush=True)


async def bulk_enqueue(arena: Arena, arguments: argparse.Namespace) -> None:
    samples = await enqueue.measure(arena, ROWS_ENQUEUED, arguments.rounds)
    print(f"\n### Bulk enqueue, {ROWS_ENQUEUED:,} tasks a time\n")
    print(rate_table(samples, "rows/s", ["windlass"]), flush=True)


async def claim_beside_many(arena: Arena, arguments: argparse.Namespace) -> None:
    samples = await depth.measure(arena, arguments.rounds)
    middle, lowest, highest = ratio(samples, "large table", "small table")
    print("\n### Claiming beside 1,000,000 finished and 100,000 queued tasks\n")
    rows = [
        [name, f"{statistics.median(values):.0f}", f"{min(values):.0f} to {max(values):.0f}"]
        for name, values in samples.items()
    ]
    print(table(["microseconds a call", "median", "lowest to highest"], rows))
    print(f"\nlarge to small: **{middle:.2f}** ({lowest:.2f} to {highest:.2f})", flush=True)


Part = Callable[[Arena, argparse.Namespace], Awaitable[None]]
PARTS: Mapping[str, Part] = {
    "one": one_at_a_time,
    "many": many_at_once,
    "wakeup": idle_wake_up,
    "enqueue": bulk_enqueue,
    "depth": claim_beside_many,
    "sweep": sweep,
}
# Finding the best batch sizes is only needed on a new machine.
DEFAULT_PARTS = ("one", "many", "wakeup", "enqueue", "depth")


def pick(entries: Mapping[str, T], only: list[str] | None) -> Mapping[str, T]:
    return {name: entry for name, entry in entries.items() if not only or any(part in name for part in only)}


async def run(arena: Arena, arguments: argparse.Namespace) -> None:
    print(await arena.describe(), flush=True)
    for name in arguments.part or DEFAULT_PARTS:
        began = time.monotonic()
        await PARTS[name](arena, arguments)
        print(f"({name} took {time.monotonic() - began:.0f} s)", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.queue", description=__doc__)
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; several times for several")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--window", type=float, default=0.5, metavar="SECONDS", help="how long a turn is counted")
    parser.add_argument(
        "--patience",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="on a shared machine: how long each turn waits for others to be quiet",
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only contenders whose name contains one of these")
    arguments = parser.parse_args()
    with open_arena() as arena:
        asyncio.run(run(arena, arguments))


if __name__ == "__main__":
    main()
