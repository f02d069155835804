"""Output of workers and tasks on their pages."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from windlass.model.worker_log import LogSource, WorkerLogLine


@dataclass(frozen=True, slots=True)
class AttemptLog:
    attempt: int | None
    worker_id: str
    lines: Sequence[str]


def log_text(line: WorkerLogLine) -> str:
    """A line of a worker: its time and its attempt, where they are known, and the text."""
    at = f"{line.at:%H:%M:%S} " if line.at is not None else ""
    whose = f"[task {line.task_id}] " if line.task_id is not None else ""
    return f"{at}{'[boot] ' if line.source is LogSource.BOOT else whose}{line.text}"


def log_by_attempt(lines: Sequence[WorkerLogLine]) -> list[AttemptLog]:
    return [
        AttemptLog(attempt, worker_id, [f"{line.at:%H:%M:%S} {line.text}" for line in each])
        for (attempt, worker_id), each in groupby(lines, key=lambda line: (line.attempt, line.worker_id))
    ]
