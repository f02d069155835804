"""An executor of which every attempt is noted when it is over: what, for how long, and how it went."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from windlass.model.task import Claim
from windlass.worker.executor import AttemptFailure, Executor, Outcome
from windlass.worker.handler import ReportProgress

# Name, seconds, attributes, error.
Note = Callable[[str, float, Mapping[str, Any], str | None], None]


class TracedExecutor:
    def __init__(self, executor: Executor, note: Note) -> None:
        self._executor = executor
        self._note = note

    async def start(self) -> None:
        await self._executor.start()

    async def run(self, claim: Claim, report: ReportProgress) -> Outcome:
        started = time.monotonic()
        error: str | None = "it was ended before its time"
        try:
            outcome = await self._executor.run(claim, report)
            error = outcome.code if isinstance(outcome, AttemptFailure) else None
            return outcome
        finally:
            # Neither payload nor error: both may hold anybody's secrets.
            about = {"task.id": claim.task_id, "task.queue": claim.queue, "task.attempt": claim.attempt}
            self._note("task", time.monotonic() - started, about, error)

    async def close(self) -> None:
        await self._executor.close()
