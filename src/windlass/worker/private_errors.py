"""Removes the hidden parts of a payload (`redact` of the fleet) from errors and progress notes, where they arise.

Both go into task rows, events and logs, which everyone with access to them can read. A handler often quotes its input
in an error.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

from windlass.model.payload_privacy import privacy_of
from windlass.model.task import Claim
from windlass.worker.executor import AttemptFailure, Executor, Outcome
from windlass.worker.handler import ReportProgress


class PrivateErrors:
    """An executor around another one."""

    def __init__(self, executor: Executor, queues: Sequence[str], paths: Sequence[str]) -> None:
        self._executor = executor
        self._privacy = privacy_of([(queues, paths)])

    async def start(self) -> None:
        await self._executor.start()

    async def run(self, claim: Claim, report: ReportProgress) -> Outcome:
        @functools.cache
        def text_filter() -> Callable[[str], str]:
            """Made once, and only for an attempt that needs it."""
            return self._privacy.text_filter(claim.queue, claim.payload)

        def report_without_private_parts(fraction: float, note: str | None) -> None:
            report(fraction, text_filter()(note) if note else note)

        outcome = await self._executor.run(claim, report_without_private_parts)
        return replace(outcome, error=text_filter()(outcome.error)) if isinstance(outcome, AttemptFailure) else outcome

    async def close(self) -> None:
        await self._executor.close()
