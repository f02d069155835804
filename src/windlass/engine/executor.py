"""One attempt, seen through Ray from its claim to its outcome.

It is handed to Ray, waits there for a place, reports at our gate from the node it was placed on, becomes that node's
task in the database, and only then begins. A node that gets no more tasks sends it on to another; one that finds no
node to begin on is given back. The time limit counts from the beginning; when it is over, or the claim is gone, the
attempt's process is ended.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import UUID

from windlass.engine.attempt import Answer, NoHandler, NotStarted
from windlass.engine.needs import needs_of
from windlass.engine.room import Flight, Needs
from windlass.model.errors import BadInput, HandlerNotFound
from windlass.model.node import Placement, Resources, Verdict
from windlass.model.ray import RaySettings, frozen
from windlass.model.task import Claim
from windlass.worker.executor import Failure, NotBegun, Outcome, time_limit_failure
from windlass.worker.handler import ReportProgress

# Nodes that end while an attempt waits for one send it on; so many at once is no longer a coincidence.
MAX_SUBMISSIONS = 20
# What the engine answers for, and no handler.
ENGINES_FAILURES = ("NODE_LOST", "ENGINE_ERROR")


class Hands(Protocol):
    """Who hands attempts to Ray: driver.py."""

    def submit(self, claim: Claim, needs: Resources, barred: Sequence[str]) -> Any: ...

    async def answer(self, reference: Any) -> Answer: ...

    async def end(self, reference: Any) -> None: ...


@dataclass(slots=True)
class _Flight:
    claim: Claim
    needs: Resources
    frozen_needs: Needs
    report: ReportProgress
    # Nodes that would not have it.
    barred: set[str] = field(default_factory=set)
    node_id: str | None = None
    is_lost: bool = False
    is_grounded: bool = False
    on_start: Callable[[], None] = lambda: None
    reference: Any = None

    @property
    def kind(self) -> Flight:
        return Flight(self.frozen_needs, self.node_id)


class Flights:
    """All attempts of a fleet that Ray has, whichever queue they came from."""

    def __init__(
        self,
        worker_of: Callable[[str], str | None],
        place: Callable[[Placement], "asyncio.Future[Verdict]"],
        on_change: Callable[[], None],
    ) -> None:
        """`worker_of`: the worker whose node that is. `on_change`: there may be more room."""
        self._worker_of = worker_of
        self._place = place
        self._on_change = on_change
        self._flights: dict[UUID, _Flight] = {}
        # Of each kind.
        self.counts: Counter[Flight] = Counter()

    def __len__(self) -> int:
        return len(self._flights)

    def ground(self) -> None:
        """No node is there: give back what has not begun, or it would wait in our name and nobody would be hired."""
        for flight in self._flights.values():
            if flight.node_id is None:
                flight.is_grounded = True
                if flight.reference is not None:
                    flight.on_start()

    def begin(self, claim: Claim, needs: Resources, report: ReportProgress) -> _Flight:
        flight = self._flights[claim.token] = _Flight(claim, needs, frozen(needs), report)
        self.counts[flight.kind] += 1
        return flight

    def end(self, claim: Claim) -> None:
        self._uncount(self._flights.pop(claim.token))
        self._on_change()

    def _move(self, flight: _Flight, node_id: str | None) -> None:
        # It may have ended while the database was asked.
        if flight.claim.token in self._flights:
            self._uncount(flight)
            flight.node_id = node_id
            self.counts[flight.kind] += 1

    def _uncount(self, flight: _Flight) -> None:
        kind = flight.kind
        if self.counts[kind] > 1:
            self.counts[kind] -= 1
        else:
            del self.counts[kind]

    # --------------------------------------------------------------------------------------- what the gate brings

    async def may_start(self, token: UUID, node_id: str) -> bool:
        flight, worker_id = self._flights.get(token), self._worker_of(node_id)
        if flight is None or worker_id is None or flight.is_grounded:
            return False
        self._move(flight, node_id)
        verdict = await self._place(Placement(flight.claim.task_id, token, worker_id))
        if verdict is Verdict.PLACED:
            flight.on_start()
            return True
        self._move(flight, None)
        if verdict is Verdict.BARRED:
            flight.barred.add(worker_id)
        else:
            flight.is_lost = True
        return False

    def on_progress(self, token: UUID, fraction: float, note: str | None) -> None:
        flight = self._flights.get(token)
        if flight is not None:
            flight.report(fraction, note)


class RayExecutor:
    def __init__(self, hands: Hands, flights: Flights, settings: RaySettings) -> None:
        self._hands = hands
        self._flights = flights
        self._settings = settings

    async def start(self) -> None:
        """Nothing to get ready: whether there is a handler, the first node tells."""

    async def close(self) -> None:
        """Attempts are ended one by one."""

    async def run(self, claim: Claim, report: ReportProgress) -> Outcome:
        try:
            needs = needs_of(claim, self._settings)
        except BadInput as error:
            return Failure("BAD_RESOURCES", str(error), retry=False)
        flight = self._flights.begin(claim, needs, report)
        try:
            return await self._fly(flight)
        finally:
            self._flights.end(claim)

    async def _fly(self, flight: _Flight) -> Outcome:
        why = ""
        for _ in range(MAX_SUBMISSIONS):
            answer = await self._submit(flight)
            if isinstance(answer, NoHandler):
                raise HandlerNotFound(answer.why)
            if isinstance(answer, Failure) and answer.code in ENGINES_FAILURES and flight.node_id is None:
                # Its node was lost before it could begin: it is sent to another, and no attempt has been made.
                answer = NotStarted(answer.error)
            if not isinstance(answer, NotStarted):
                return answer
            why = answer.why
            if flight.is_lost or flight.is_grounded:
                break
        raise NotBegun(why)

    async def _submit(self, flight: _Flight) -> Answer:
        claim = flight.claim
        reference = flight.reference = self._hands.submit(claim, flight.needs, sorted(flight.barred))
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as limit:

                def on_start() -> None:
                    if flight.is_grounded:
                        limit.reschedule(loop.time())
                    elif claim.timeout_s is not None:
                        limit.reschedule(loop.time() + claim.timeout_s)

                flight.on_start = on_start
                return await self._hands.answer(reference)
        except TimeoutError:
            await self._hands.end(reference)
            if flight.is_grounded:
                return NotStarted("no node could run it")
            return time_limit_failure(claim.timeout_s or 0)
        except asyncio.CancelledError:
            await asyncio.shield(asyncio.ensure_future(self._hands.end(reference)))
            raise
        finally:
            flight.on_start = lambda: None
            flight.reference = None
