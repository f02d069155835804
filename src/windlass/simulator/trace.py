"""Traces: arrival times and durations of tasks, read from a file or generated.

A file is CSV, gzip'd if its name ends in .gz, with the header `arrival_s,duration_s` and optionally `queue`. Tasks are
sorted by arrival, and the first arrives at 0. A duration is the time that a task runs on one slot, without its wait.
"""

import csv
import gzip
import io
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from windlass.model.errors import BadInput
from windlass.model.fleet import MAX_SECONDS

# About 300 MB of memory. A longer history should be cut or sampled.
MAX_TASKS = 5_000_000
# Unpacked. A small file that unpacks to more is not a trace.
MAX_BYTES = 512 * 1024 * 1024
DAY_S = 86_400.0
# The longest time between two arrivals, and the longest duration: ten years, as of every duration of the configuration.
MAX_TIME_S = MAX_SECONDS


@dataclass(frozen=True)
class Trace:
    name: str
    arrivals: tuple[float, ...]
    durations: tuple[float, ...]
    # Queue of each task. Empty: all tasks are in one queue.
    queues: tuple[str, ...] = ()

    @cached_property
    def has_several_queues(self) -> bool:
        return len(set(self.queues)) > 1

    @property
    def work_s(self) -> float:
        return math.fsum(self.durations)

    @property
    def span_s(self) -> float:
        return self.arrivals[-1] if self.arrivals else 0.0

    def of_queues(self, names: Iterable[str]) -> "Trace":
        """The tasks of these queues, on the same clock."""
        wanted = set(names)
        kept = [index for index, queue in enumerate(self.queues) if queue in wanted]
        return Trace(
            self.name,
            tuple(self.arrivals[index] for index in kept),
            tuple(self.durations[index] for index in kept),
            tuple(self.queues[index] for index in kept),
        )

    def between(self, from_s: float, until_s: float) -> "Trace":
        """The tasks that arrive in this part of the time, which then begins at 0."""
        kept = [index for index, at in enumerate(self.arrivals) if from_s <= at < until_s]
        return Trace(
            self.name,
            tuple(self.arrivals[index] - from_s for index in kept),
            tuple(self.durations[index] for index in kept),
            tuple(self.queues[index] for index in kept) if self.queues else (),
        )


def read_trace(path: Path) -> Trace:
    """BadInput with the line if the file is not a trace."""
    try:
        with path.open("rb") as file:
            packed = file.read(MAX_BYTES + 1)
        if path.suffix == ".gz":
            with gzip.open(io.BytesIO(packed)) as unpacking:
                packed = unpacking.read(MAX_BYTES + 1)
        text = packed.decode()
    except (OSError, EOFError) as error:
        raise BadInput(f"cannot read trace {path}: {error}.") from None
    except UnicodeDecodeError:
        raise BadInput(f"cannot read trace {path}: it is not a text file.") from None
    if len(packed) > MAX_BYTES:
        raise BadInput(f"trace {path} has more than {MAX_BYTES} bytes: cut it into parts.")
    name = path.name.removesuffix(".gz").removesuffix(".csv")
    return _parse(name, path, csv.reader(io.StringIO(text)))


def _parse(name: str, path: Path, rows: Iterable[list[str]]) -> Trace:
    tasks: list[tuple[float, float, str]] = []
    header: list[str] | None = None
    for number, row in enumerate(rows, 1):
        if not row:
            continue
        if header is None:
            header = [cell.strip() for cell in row]
            if header[:2] != ["arrival_s", "duration_s"] or header[2:] not in ([], ["queue"]):
                raise BadInput(
                    f"trace {path} has the header {','.join(header)[:80]!r}: write arrival_s,duration_s[,queue]."
                )
            continue
        try:
            arrival_s, duration_s = float(row[0]), float(row[1])
        except (ValueError, IndexError):
            raise BadInput(f"line {number} of trace {path} is not two numbers: {','.join(row)[:80]!r}.") from None
        if not (math.isfinite(arrival_s) and math.isfinite(duration_s)) or duration_s < 0:
            raise BadInput(f"line {number} of trace {path} has an impossible time: {','.join(row)[:80]!r}.")
        tasks.append((arrival_s, duration_s, row[2] if len(header) > 2 and len(row) > 2 else ""))
        if len(tasks) > MAX_TASKS:
            raise BadInput(f"trace {path} has more than {MAX_TASKS} tasks: cut it into parts.")
    if not tasks:
        raise BadInput(f"trace {path} has no tasks.")
    return _trace(name, tasks, has_queues=header is not None and len(header) > 2)


def _trace(name: str, tasks: list[tuple[float, float, str]], *, has_queues: bool = False) -> Trace:
    tasks.sort(key=lambda task: task[0])
    first = tasks[0][0]
    if max(tasks[-1][0] - first, *(duration_s for _, duration_s, _ in tasks)) > MAX_TIME_S:
        raise BadInput(f"trace {name} spans more than ten years, or a task of it takes as long: cut it into parts.")
    return Trace(
        name,
        tuple(arrival_s - first for arrival_s, _, _ in tasks),
        tuple(duration_s for _, duration_s, _ in tasks),
        tuple(queue for _, _, queue in tasks) if has_queues else (),
    )


# ---------------------------------------------------------------------------------------------------------- generators


@dataclass(frozen=True, slots=True)
class GeneratorSettings:
    """Durations are lognormal with this mean and sigma."""

    tasks: int = 10_000
    days: float = 7.0
    duration_s: float = 60.0
    duration_sigma: float = 1.0
    seed: int = 1


def generate(kind: str, settings: GeneratorSettings) -> Trace:
    """A trace of this kind. BadInput if the kind is unknown."""
    if kind not in GENERATORS:
        raise BadInput(f"generator {kind!r} not found: choose one of {', '.join(GENERATORS)}.")
    source = random.Random(settings.seed)  # noqa: S311
    arrivals = GENERATORS[kind](source, settings)
    sigma, mean_s = settings.duration_sigma, settings.duration_s
    tasks = [(at, mean_s * math.exp(sigma * source.gauss(0.0, 1.0) - sigma * sigma / 2), "") for at in arrivals]
    return _trace(kind, tasks)


def _poisson(source: random.Random, settings: GeneratorSettings) -> list[float]:
    """Independent arrivals at a constant rate."""
    rate = settings.tasks / (settings.days * DAY_S)
    at, found = 0.0, []
    for _ in range(settings.tasks):
        at += source.expovariate(rate)
        found.append(at)
    return found


def _bursts(source: random.Random, settings: GeneratorSettings) -> list[float]:
    """Batches of geometric size, mean 20, at independent moments; the tasks of a batch arrive within a minute."""
    span_s, found = settings.days * DAY_S, list[float]()
    while len(found) < settings.tasks:
        begins = source.random() * span_s
        size = min(settings.tasks - len(found), 1 + int(source.expovariate(1 / 20)))
        found += [begins + source.random() * 60.0 for _ in range(size)]
    return found


def _diurnal(source: random.Random, settings: GeneratorSettings) -> list[float]:
    """A rate that follows the day, nearly zero at night, and halves on two of seven days."""
    span_s, found = settings.days * DAY_S, list[float]()
    while len(found) < settings.tasks:
        at = source.random() * span_s
        share = max(0.02, math.sin(math.pi * (at % DAY_S) / DAY_S)) * (0.5 if at // DAY_S % 7 >= 5 else 1.0)
        if source.random() < share:
            found.append(at)
    return found


def _spikes(source: random.Random, settings: GeneratorSettings) -> list[float]:
    """Long silence, then a tenth of all tasks within five minutes, ten times; between them a few single tasks."""
    span_s, found = settings.days * DAY_S, list[float]()
    for _ in range(10):
        begins = source.random() * span_s
        found += [begins + source.random() * 300.0 for _ in range(max(1, settings.tasks // 11))]
    found += [source.random() * span_s for _ in range(settings.tasks - len(found))]
    return found[: settings.tasks]


GENERATORS: dict[str, Callable[[random.Random, GeneratorSettings], list[float]]] = {
    "poisson": _poisson,
    "bursts": _bursts,
    "diurnal": _diurnal,
    "spikes": _spikes,
}
