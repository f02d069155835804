"""The state of seats and of the attempts that wait for them or run in them. The seat pool changes it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from windlass.model.errors import HandlerNotFound
from windlass.model.task import Claim
from windlass.ray.capacity import InFlightKind, Needs
from windlass.worker.executor import AttemptFailure, NotBegun, Outcome
from windlass.worker.handler import ReportProgress


@dataclass(slots=True, eq=False)
class SeatAttempt:
    """A claimed attempt. The executor waits for `outcome`, and cancels it if it no longer wants the attempt."""

    claim: Claim
    needs: Needs
    report: ReportProgress
    # Printed lines, and how many before them were dropped.
    add_output: Callable[[bytes, int], None]
    outcome: "asyncio.Future[Outcome]"
    # Expires at the attempt's time limit, or early if the attempt is aborted; then `failure` is the reason.
    timeout: asyncio.Timeout
    failure: AttemptFailure | None = None
    seat: "Seat | None" = None
    # The task belongs to the node's worker in the database, and the seat was sent the claim.
    has_begun: bool = False

    @property
    def kind(self) -> InFlightKind:
        return InFlightKind(self.needs, None if self.seat is None else self.seat.node_id)

    @property
    def is_settled(self) -> bool:
        return self.outcome.done()

    def settle(self, outcome: Outcome | NotBegun | HandlerNotFound) -> None:
        if self.is_settled:
            return
        if isinstance(outcome, Exception):
            self.outcome.set_exception(outcome)
        else:
            self.outcome.set_result(outcome)

    def abort(self, failure: AttemptFailure) -> None:
        """Fail the attempt once its process has been killed."""
        if not self.is_settled:
            self.failure = failure
            self.timeout.reschedule(asyncio.get_running_loop().time())


@dataclass(slots=True, eq=False)
class Seat:
    id: str
    needs: Needs
    # Ray's reference to the submitted task.
    reference: Any
    # Times are those of the event loop's clock.
    submitted_at: float
    started_at: float = 0.0
    # None until the seat has started.
    node_id: str | None = None
    # The node on which the seat loads the handler, which may take minutes.
    loading_node_id: str | None = None
    attempt: SeatAttempt | None = None
    has_run_attempt: bool = False
    # The pool has forgotten the seat: it gets no attempt.
    is_closed: bool = False
    # Ends the seat's process without Ray's help.
    disconnect: Callable[[], None] = lambda: None
