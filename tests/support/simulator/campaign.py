"""Runs many seeds of several worlds and prints the broken ones, shrunk, and the coverage.

`PYTHONPATH=tests python -m support.simulator.campaign --seeds 200 --jobs 2`
"""

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence

from support.simulator.coverage import Coverage
from support.simulator.worlds import WORLDS, failure_of

CHUNK = 5
PROGRESS_S = 60.0

Job = tuple[str, int]
Result = tuple[str, int, str | None, Coverage]


def run_job(job: Job) -> Result:
    world, seed = job
    problem, coverage = failure_of(world, seed)
    return world, seed, problem, coverage


def run_campaign(
    worlds: Sequence[str],
    seeds: int,
    first: int = 0,
    jobs: int = 1,
    write: Callable[[str], object] = sys.stdout.write,
    max_real_s: float | None = None,
) -> tuple[Counter[str], list[Job], Coverage]:
    """Runs per world, broken seeds, and the coverage. After `max_real_s` no further seeds begin."""
    coverage, broken, runs = Coverage(), [], Counter[str]()
    # One seed of each world in turn, so that a campaign that is cut short has runs of all of them.
    work = [(world, seed) for seed in range(first, first + seeds) for world in worlds]
    started = reported = time.monotonic()
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        for world, seed, problem, covered in pool.imap_unordered(run_job, work, CHUNK):
            runs[world] += 1
            coverage.add(covered)
            if problem is not None:
                broken.append((world, seed))
                write(f"BROKEN {world} {seed}\n{problem}\n")
            now = time.monotonic()
            if now - reported > PROGRESS_S:
                reported = now
                write(f"{runs.total()} of {len(work)} histories, {len(broken)} broken, {now - started:.0f} s\n")
            if max_real_s is not None and now - started > max_real_s:
                break
    return runs, broken, coverage


def main() -> int:
    parser = argparse.ArgumentParser(prog="PYTHONPATH=tests python -m support.simulator.campaign", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="per world")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--world", action="append", choices=WORLDS, help="all unless given")
    parser.add_argument("--minutes", type=float, help="begin no seed after this time")
    options = parser.parse_args()
    limit_s = None if options.minutes is None else 60 * options.minutes
    worlds = options.world or WORLDS
    runs, broken, coverage = run_campaign(worlds, options.seeds, options.first, options.jobs, max_real_s=limit_s)
    counts = ", ".join(f"{count} {world}" for world, count in runs.items())
    sys.stdout.write(f"\n{coverage.report()}\n\n{runs.total()} histories ({counts}), {len(broken)} broken: {broken}\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
