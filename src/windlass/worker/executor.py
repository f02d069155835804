"""How one attempt is run, seen from the worker's loop.

An executor never raises for what a handler does: every attempt ends as an Outcome. `abort` ends an attempt from
outside, and its outcome is then Abandoned: there is nobody left to report to.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

from windlass.model.task import Claim


@dataclass(frozen=True, slots=True)
class Success:
    result: str | None  # JSON text


@dataclass(frozen=True, slots=True)
class Failure:
    code: str
    error: str
    retry: bool = True


@dataclass(frozen=True, slots=True)
class Abandoned:
    reason: str


Outcome = Success | Failure | Abandoned
ReportProgress = Callable[[float, str | None], None]


class Executor(Protocol):
    async def start(self) -> None:
        """Get ready. Raises HandlerNotFound when there is nothing to run."""

    async def run(self, claim: Claim, report: ReportProgress) -> Outcome:
        """Run one attempt to its end."""

    def abort(self, token: UUID, reason: str) -> None:
        """End the attempt with this token now, whatever it is doing."""

    async def close(self) -> None:
        """End everything that was started."""


def time_limit_failure(limit_s: float) -> Failure:
    return Failure("TIMEOUT", f"the attempt ran longer than its limit of {limit_s:g} s and was ended")
