"""Output of workers, for people.

Output is readable until its retention ends or newer output displaced it, whether or not its worker and machine still
exist. Every call reads a bounded number of lines and bytes.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from windlass.model.worker_log import WorkerLogPage


class WorkerLogQueries(Protocol):
    async def worker_log(self, worker_id: str, lines: int, *, after: int | None = None) -> WorkerLogPage:
        """The last `lines` of a worker and of all its attempts, at most MAX_LINES_READ; with its boot.

        `after`: the cursor of an earlier page. Then the lines since, oldest first, without the boot.
        """

    async def task_log(
        self, task_id: int, lines: int, *, attempt: int | None = None, after: int | None = None
    ) -> WorkerLogPage:
        """The same for a task: the lines of all its attempts, or of one."""

    async def diagnostics(self, worker_id: str) -> Mapping[str, Any] | None:
        """What was known about a worker when it failed or terminated. None before."""
