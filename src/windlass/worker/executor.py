"""How one attempt is run, seen from the worker's loop.

Whatever a handler does, `run` returns an Outcome. Cancelling `run` ends the attempt at once, with everything it
started: there is nobody left to report to.
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
    """Raised by `run`: the attempt did not begin, and will not here. Its task is given back, the attempt uncounted.

    `delay_s`: nobody is to claim it before, for nobody could begin it.
    """

    def __init__(self, why: str, delay_s: float = 0.0) -> None:
        super().__init__(why)
        self.delay_s = delay_s


class Executor(Protocol):
    async def start(self) -> None:
        """Get ready. Raises HandlerNotFound when there is nothing to run."""

    async def run(self, claim: Claim, report: ReportProgress) -> Outcome:
        """Run one attempt to its end. Raises NotBegun, or HandlerNotFound when the handler cannot be started at all."""

    async def close(self) -> None:
        """End everything that was started."""


def time_limit_failure(limit_s: float) -> AttemptFailure:
    return AttemptFailure("TIMEOUT", f"the attempt ran longer than its limit of {limit_s:g} s and was ended")


def unreadable_payload(error: ValueError | RecursionError) -> AttemptFailure:
    """PostgreSQL takes numbers of more digits and deeper nesting than Python's parser: no attempt will read them."""
    return AttemptFailure("BAD_PAYLOAD", f"the payload is more than Python's JSON parser takes ({error})", retry=False)
