"""What the benchmark needs from a contender."""

import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

QUEUE = "bench"
# Rows handed over in one call where a contender's bulk interface takes a list.
BULK_ROWS = 10_000

# Enqueues one task that carries the time of its sending.
Send = Callable[[int], Awaitable[None]]


class Contender(Protocol):
    # Contenders of one schema share their filled databases.
    schema: str

    async def install(self, dsn: str) -> None:
        """Its tables and functions, into an empty database."""

    async def enqueue(self, dsn: str, count: int) -> float:
        """That many no-op tasks, by its own bulk interface. Returns the seconds spent in it, on tasks made before."""

    async def finished(self, connection: Any) -> int:
        """How many tasks the database knows as done."""

    def producer(self, dsn: str) -> AbstractAsyncContextManager[Send]:
        """Its own way to enqueue a single task, connected and ready."""

    def worker(self, mode: "Mode") -> list[str]:
        """The command of one worker process."""


@dataclass(frozen=True, slots=True)
class Mode:
    """How a contender's workers run: `batch` 1 takes one task at a time. `task` is what they run: noop or wake."""

    batch: int = 1
    task: str = "noop"
    # What is special about this variant: isolated or inline for Windlass, delete or archive for pgmq.
    variant: str = ""


class Stopwatch:
    """Adds up the seconds spent inside it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.monotonic() - self._began


def chunks(count: int) -> list[int]:
    """`count` in pieces of BULK_ROWS."""
    whole, rest = divmod(count, BULK_ROWS)
    return [BULK_ROWS] * whole + ([rest] if rest else [])
