"""The interface between the worker's loop and the ways to run an attempt: inline, isolated, command, Ray.

Whatever a handler does, `run` returns an Outcome. Cancelling `run` ends the attempt and every process it started.
"""

from dataclasses import dataclass
from typing import Protocol

from windlass.model.task import Claim
from windlass.worker.handler import ReportProgress


@dataclass(frozen=True, slots=True)
class AttemptSuccess:
    result: str | None  # JSON text


@dataclass(frozen=True, slots=True)
class AttemptFailure:
    code: str
    error: str
    retry: bool = True


Outcome = AttemptSuccess | AttemptFailure


class NotBegun(Exception):
    """Raised by `run` if the attempt could not begin. The task is released and the attempt not counted.

    `delay_s`: no worker may claim the task earlier, because none could begin it.
    """

    def __init__(self, reason: str, delay_s: float = 0.0) -> None:
        super().__init__(reason)
        self.delay_s = delay_s


class Executor(Protocol):
    async def start(self) -> None:
        """Raises HandlerNotFound if the handler cannot be loaded."""

    async def run(self, claim: Claim, report: ReportProgress) -> Outcome:
        """Run one attempt. Raises NotBegun, or HandlerNotFound if the handler can no longer be started."""

    async def close(self) -> None:
        """End every process that was started."""


def timeout_failure(limit_s: float) -> AttemptFailure:
    return AttemptFailure("TIMEOUT", f"the attempt exceeded its time limit of {limit_s:g} s")


def bad_payload_failure(error: ValueError) -> AttemptFailure:
    """PostgreSQL accepts longer numbers and deeper nesting than a worker, so a retry cannot help."""
    return AttemptFailure("BAD_PAYLOAD", f"cannot parse the payload: {error}", retry=False)
