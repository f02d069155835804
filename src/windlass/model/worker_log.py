"""Output of workers: what they and their handlers print, as it is sent, stored and read."""

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field

# One call of append_logs. The database refuses more.
MAX_CHUNKS = 200
MAX_CALL_BYTES = 1 << 20
# A longer line is cut.
MAX_LINE_CHARACTERS = 8_192
# Lines in one call: more would only be empty ones.
MAX_CALL_LINES = 20_000
# Last lines that a machine reports before it joins, and that are read from a provider. The database cuts longer ones.
MAX_BOOT_LOG_CHARACTERS = 32_768
# Lines in one reply of a query.
MAX_LINES_READ = 10_000


class LogSource(StrEnum):
    WORKER = "worker"  # the worker and its handlers
    BOOT = "boot"  # the machine, before the worker's program ran


@dataclass(frozen=True, slots=True)
class AttemptKey:
    """The attempt that printed a line."""

    task_id: int
    attempt: int


@dataclass(frozen=True, slots=True)
class LogChunk:
    """Lines of one attempt, or of the worker itself. `ages_ms`: how long before the call each was printed."""

    lines: tuple[str, ...]
    ages_ms: tuple[int, ...] = ()
    task_id: int | None = None
    attempt: int | None = None
    # Lines before these that are not sent.
    dropped: Annotated[int, Field(ge=0, le=2**53)] = 0


@dataclass(frozen=True, slots=True)
class WorkerLogLine:
    # None: unknown, in the log file of a local worker.
    at: datetime | None
    text: str
    worker_id: str
    task_id: int | None = None
    attempt: int | None = None
    source: LogSource = LogSource.WORKER
    # Lines that are missing here. Then `text` says so.
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class WorkerLogPage:
    """Lines, oldest first. `cursor`: pass it to read the lines after these."""

    lines: tuple[WorkerLogLine, ...] = field(default=())
    cursor: int = 0


def dropped_line(
    at: datetime | None, worker_id: str, count: int, task_id: int | None = None, attempt: int | None = None
) -> WorkerLogLine:
    """Stands for lines that the worker did not send."""
    text = f"[{count:,} {'line' if count == 1 else 'lines'} dropped: more output than the limits allow]"
    return WorkerLogLine(at, text, worker_id, task_id, attempt, dropped=count)


def deleted_line(at: datetime | None, worker_id: str, count: int) -> WorkerLogLine:
    """Stands for older lines that were stored and then deleted."""
    text = f"[{count:,} older {'line' if count == 1 else 'lines'} deleted: limits of the worker, or retention]"
    return WorkerLogLine(at, text, worker_id, dropped=count)
