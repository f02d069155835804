"""Windlass compared with its peers and a bare loop, on one PostgreSQL server, in interleaved rounds.

Prints the tables of docs/benchmarks.md. Exits by itself and leaves nothing behind on disk.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from bench import claim_depth, enqueue, throughput, wakeup
from bench.bench_server import BenchServer, open_bench_server
from bench.figures import percentile, rate_table, ratio, table
from bench.throughput import Entry

SWEPT_BATCHES = (50, 100, 200, 500, 1000, 2000)
ROWS_ENQUEUED = 100_000
T = TypeVar("T")


async def one_at_a_time(server: BenchServer, arguments: argparse.Namespace) -> None:
    await tasks_per_s(server, arguments, throughput.ONE_AT_A_TIME, "One task at a time")


async def many_at_once(server: BenchServer, arguments: argparse.Namespace) -> None:
    await tasks_per_s(server, arguments, throughput.IN_BATCHES, "Many small tasks at once")


async def tasks_per_s(
    server: BenchServer, arguments: argparse.Namespace, entries: Mapping[str, Entry], title: str
) -> None:
    chosen = pick(entries, arguments.only)
    for processes in arguments.processes:
        samples = await throughput.measure(
            server, chosen, processes, arguments.rounds, arguments.window, arguments.quiet_timeout
        )
        print(f"\n### {title}, {processes} process{'es' if processes > 1 else ''} each\n")
        print(rate_table(samples, "tasks/s", [name for name in chosen if name.startswith("windlass")]), flush=True)


async def sweep(server: BenchServer, arguments: argparse.Namespace) -> None:
    """Find the best batch size of each contender."""
    for name, entry in pick(throughput.IN_BATCHES, arguments.only).items():
        sizes = {str(size): replace(entry, mode=replace(entry.mode, batch=size)) for size in SWEPT_BATCHES}
        for processes in arguments.processes:
            samples = await throughput.measure(
                server, sizes, processes, arguments.rounds, arguments.window, arguments.quiet_timeout
            )
            print(f"\n### {name} by batch size, {processes} process{'es' if processes > 1 else ''}\n")
            print(rate_table(samples, "batch", []), flush=True)


async def idle_wake_up(server: BenchServer, arguments: argparse.Namespace) -> None:
    samples = await wakeup.measure(server, arguments.rounds * 20, pick(wakeup.ENTRIES, arguments.only))
    print(f"\n### Idle wake-up, {arguments.rounds * 20} tasks each\n")
    rows = [
        [name, *(f"{percentile(values, share):.2f}" for share in (0.1, 0.5, 0.9, 0.99))]
        for name, values in samples.items()
    ]
    print(table(["milliseconds", "p10", "p50", "p90", "p99"], rows), flush=True)


async def bulk_enqueue(server: BenchServer, arguments: argparse.Namespace) -> None:
    samples = await enqueue.measure(server, ROWS_ENQUEUED, arguments.rounds)
    print(f"\n### Bulk enqueue, {ROWS_ENQUEUED:,} tasks a time\n")
    print(rate_table(samples, "rows/s", ["windlass"]), flush=True)


async def claim_with_many_rows(server: BenchServer, arguments: argparse.Namespace) -> None:
    samples = await claim_depth.measure(server, arguments.rounds)
    middle, lowest, highest = ratio(samples, "large table", "small table")
    print("\n### Claiming with 1,000,000 finished and 100,000 queued tasks\n")
    rows = [
        [name, f"{statistics.median(values):.0f}", f"{min(values):.0f} to {max(values):.0f}"]
        for name, values in samples.items()
    ]
    print(table(["microseconds per call", "median", "lowest to highest"], rows))
    print(f"\nlarge to small: **{middle:.2f}** ({lowest:.2f} to {highest:.2f})", flush=True)


Part = Callable[[BenchServer, argparse.Namespace], Awaitable[None]]
PARTS: Mapping[str, Part] = {
    "one": one_at_a_time,
    "many": many_at_once,
    "wakeup": idle_wake_up,
    "enqueue": bulk_enqueue,
    "depth": claim_with_many_rows,
    "sweep": sweep,
}
# The best batch sizes must be found again only on a new machine.
DEFAULT_PARTS = ("one", "many", "wakeup", "enqueue", "depth")


def pick(entries: Mapping[str, T], only: list[str] | None) -> Mapping[str, T]:
    return {name: entry for name, entry in entries.items() if not only or any(part in name for part in only)}


async def run(server: BenchServer, arguments: argparse.Namespace) -> None:
    print(await server.describe(), flush=True)
    for name in arguments.part or DEFAULT_PARTS:
        began = time.monotonic()
        await PARTS[name](server, arguments)
        print(f"({name} took {time.monotonic() - began:.0f} s)", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.queue", description=__doc__)
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; several times for several")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--window", type=float, default=0.5, metavar="SECONDS", help="length of one measured window")
    parser.add_argument(
        "--quiet-timeout",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="on a shared machine: how long each window waits for other load to end",
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only contenders whose name contains one of these")
    arguments = parser.parse_args()
    with open_bench_server() as server:
        asyncio.run(run(server, arguments))


if __name__ == "__main__":
    main()
