"""Removes the hidden parts of a payload (`redact` of the fleet) from the error of its attempt, where the error arises.

Errors go into task rows, events and logs, which everyone with access to them can read. A handler often quotes its input
in an error.
"""

from collections.abc import Sequence
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
        outcome = await self._executor.run(claim, report)
        if isinstance(outcome, AttemptFailure):
            error = self._privacy.redact_text(claim.queue, outcome.error, claim.payload)
            return replace(outcome, error=error or "")
        return outcome

    async def close(self) -> None:
        await self._executor.close()
