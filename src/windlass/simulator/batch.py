"""Runs simulations in a process of their own, with limits: `main` is its program.

Reads a pickled Batch from standard input and writes a pickled Comparison to standard output. Both come from and go to
the process that started it. A server must not simulate in a thread: that would slow every request down.
"""

import os
import pickle
import resource
import sys
from dataclasses import dataclass, replace

from windlass.simulator.measures import RunResult
from windlass.simulator.report import report_charts
from windlass.simulator.runs import RunRequest, run_policy
from windlass.simulator.trace import Trace

# Processor time, and memory: a run of 200,000 tasks takes a tenth of both.
MAX_CPU_S = 300
MAX_MEMORY_BYTES = 2 * 1024**3
# Lowest priority but one: requests and workers on the same host come first.
NICENESS = 18


@dataclass(frozen=True, slots=True)
class Batch:
    trace: Trace
    requests: tuple[RunRequest, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Results without their series, and the charts that were drawn from them, as SVG."""

    results: tuple[RunResult, ...]
    charts: tuple[str, ...]


def compare(batch: Batch) -> Comparison:
    results = [run_policy(request, batch.trace) for request in batch.requests]
    charts = tuple(report_charts(results))
    return Comparison(tuple(replace(result, samples=(), waits_s=()) for result in results), charts)


def main() -> None:
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    batch: Batch = pickle.load(sys.stdin.buffer)  # noqa: S301 - written by the process that started this one
    pickle.dump(compare(batch), sys.stdout.buffer)
