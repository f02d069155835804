"""One attempt, seen through Ray from its claim to its outcome.

It is handed to Ray, waits there for a place, reports at our gate from the node it was placed on, becomes that node's
task in the database, and only then begins. A node that gets no more tasks, or lacks what it takes to run it, sends it
on to another. Whatever it has to wait for, what it may expect is looked at again before each way to Ray, and when nodes
change: one that no node can hold is given back, and one that none ever could has failed. The time limit counts from the
beginning; when it is over, or the claim is gone, the attempt's process is ended.
"""

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import UUID

import structlog

from windlass.engine.attempt import Answer, NoHandler, NotStarted
from windlass.engine.needs import needs_of
from windlass.engine.nodes import Outlook
from windlass.engine.room import Flight, Needs, NodeRoom, homeless
from windlass.model.errors import BadInput, HandlerNotFound
from windlass.model.node import Placement, Resources, Verdict
from windlass.model.ray import RaySettings, frozen
from windlass.model.task import Claim
from windlass.worker.executor import Failure, NotBegun, Outcome, time_limit_failure
from windlass.worker.handler import ReportProgress

# Nodes that end while an attempt waits for one send it on; so many at once is no longer a coincidence.
MAX_SUBMISSIONS = 20
# A task that no node can hold, while others of its queue find places, is not looked at again before this, and half as
# long again at most: it would be claimed and given back in a circle.
MISFIT_DELAY_S = 20.0
# One that its node sent away just when it was to end: what we know of the nodes is newer by then.
SENT_AWAY_DELAY_S = 1.0
# What the engine answers for, and no handler.
ENGINES_FAILURES = ("NODE_LOST", "ENGINE_ERROR")
log = structlog.get_logger(__name__)


class Hands(Protocol):
    """Who hands attempts to Ray: driver.py."""

    def submit(self, claim: Claim, needs: Resources, closed: Collection[str]) -> Any:
        """`closed`: nodes that are not to have it."""

    async def answer(self, reference: Any) -> Answer: ...

    async def end(self, reference: Any) -> None: ...


class Nodes(Protocol):
    """Where attempts may run: nodes.py."""

    @property
    def closed(self) -> Collection[str]: ...

    def is_alive(self, node_id: str) -> bool: ...

    def worker_of(self, node_id: str) -> str | None: ...

    def outlook(self, needs: Needs, shunned: Collection[str] = ()) -> Outlook: ...

    def rooms(self) -> Mapping[str, NodeRoom]: ...

    def refuse(self, node_id: str, why: str) -> bool: ...

    def why_refused(self) -> str: ...


@dataclass(slots=True)
class _Flight:
    claim: Claim
    needs: Resources
    frozen_needs: Needs
    report: ReportProgress
    # Nodes that would not have it.
    shunned: set[str] = field(default_factory=set)
    node_id: str | None = None
    is_lost: bool = False
    # Called back from Ray, to look at what it may expect.
    is_grounded: bool = False
    # It ran on a node that is gone.
    is_down: bool = False
    on_start: Callable[[], None] = lambda: None
    reference: Any = None
    # By the clock of the event loop.
    submitted_at: float = 0.0

    @property
    def kind(self) -> Flight:
        return Flight(self.frozen_needs, self.node_id)


class Flights:
    """All attempts of a fleet that Ray has, whichever queue they came from."""

    def __init__(
        self,
        nodes: Nodes,
        place: Callable[[Placement], "asyncio.Future[Verdict]"],
    ) -> None:
        self.nodes = nodes
        self._place = place
        self._flights: dict[UUID, _Flight] = {}
        # Of each kind.
        self.counts: Counter[Flight] = Counter()

    def __len__(self) -> int:
        return len(self._flights)

    def ground(self, waiting_since: float = -math.inf) -> None:
        """Call back what waits where no node can hold it: in our name it would wait for ever, and nobody be hired.

        And give up what runs on nodes that are gone: from one that was cut off, Ray would wait for minutes to hear.
        What it was about to place there waits as long: what waits since before `waiting_since` is called back too.
        """
        for flight in self._flights.values():
            if flight.reference is None:
                continue
            if flight.node_id is None:
                is_stuck = flight.submitted_at < waiting_since
                flight.is_grounded = flight.is_grounded or is_stuck or not self._may_wait(flight)
            else:
                flight.is_down = flight.is_down or not self.nodes.is_alive(flight.node_id)
            if flight.is_grounded or flight.is_down:
                flight.on_start()

    def _may_wait(self, flight: _Flight) -> bool:
        return self.nodes.outlook(flight.frozen_needs, flight.shunned) in (Outlook.FITS, Outlook.AWAITED)

    def begin(self, claim: Claim, needs: Resources, report: ReportProgress) -> _Flight:
        flight = self._flights[claim.token] = _Flight(claim, needs, frozen(needs), report)
        self.counts[flight.kind] += 1
        return flight

    def end(self, claim: Claim) -> None:
        self._uncount(self._flights.pop(claim.token))

    def move(self, flight: _Flight, node_id: str | None) -> None:
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
        flight, worker_id = self._flights.get(token), self.nodes.worker_of(node_id)
        if flight is None or flight.is_grounded or flight.is_down:
            return False
        if worker_id is None:
            flight.shunned.add(node_id)
            return False
        self.move(flight, node_id)
        verdict = await self._place(Placement(flight.claim.task_id, token, worker_id))
        if verdict is Verdict.PLACED:
            flight.on_start()
            return True
        self.move(flight, None)
        if verdict is Verdict.BARRED:
            flight.shunned.add(node_id)
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
            if not self._may_go(flight):
                return Failure(
                    "BAD_RESOURCES", f"no node of its fleet has what it needs: {_words(flight)}", retry=False
                )
            if flight.is_grounded:
                # Ray may not have let go of it. Given back, it comes again with a token that what is left lacks.
                break
            answer = await self._submit(flight)
            if isinstance(answer, NoHandler):
                if self._flights.nodes.refuse(answer.node_id, answer.why):
                    log.warning("a node cannot run our tasks", node_id=answer.node_id, why=answer.why)
                self._flights.move(flight, None)
                answer = NotStarted(answer.why)
            if isinstance(answer, Failure) and answer.code in ENGINES_FAILURES and flight.node_id is None:
                # Its node was lost before it could begin: it is sent to another, and no attempt has been made.
                answer = NotStarted(answer.error)
            if not isinstance(answer, NotStarted):
                return answer
            why = answer.why
            if flight.is_lost:
                break
        raise NotBegun(why)

    def _may_go(self, flight: _Flight) -> bool:
        """False: no node ever could hold it. Raises NotBegun if none can now, HandlerNotFound if none can run it."""
        nodes, outlook = self._flights.nodes, self._flights.nodes.outlook(flight.frozen_needs, flight.shunned)
        if outlook is Outlook.REFUSED:
            raise HandlerNotFound(nodes.why_refused())
        is_one_too_many = outlook is Outlook.AWAITED and (
            homeless(nodes.rooms(), self._flights.counts) > max(self._settings.margin, 1)
        )
        if outlook is Outlook.LATER or is_one_too_many:
            raise NotBegun(f"no node can hold it now: it needs {_words(flight)}", self._delay_s(flight))
        return outlook is not Outlook.NEVER

    def _delay_s(self, flight: _Flight) -> float:
        if flight.frozen_needs != frozen(self._settings.needs_of(flight.claim.queue).as_resources()):
            return MISFIT_DELAY_S * (1.0 + random.random() / 2)  # noqa: S311
        # Where no task of its queue has a place, none is claimed, and it is seen by whoever hires.
        return SENT_AWAY_DELAY_S if flight.shunned else 0.0

    async def _submit(self, flight: _Flight) -> Answer:
        claim = flight.claim
        closed = flight.shunned | set(self._flights.nodes.closed)
        reference = flight.reference = self._hands.submit(claim, flight.needs, closed)
        loop = asyncio.get_running_loop()
        flight.submitted_at = loop.time()
        try:
            async with asyncio.timeout(None) as limit:

                def on_start() -> None:
                    if flight.is_grounded or flight.is_down:
                        limit.reschedule(loop.time())
                    elif claim.timeout_s is not None:
                        limit.reschedule(loop.time() + claim.timeout_s)

                flight.on_start = on_start
                return await self._hands.answer(reference)
        except TimeoutError:
            # Its end takes Ray a while. Whoever calls it back meanwhile must not find a limit that is over.
            flight.on_start = lambda: None
            await self._hands.end(reference)
            if flight.is_grounded:
                return NotStarted("it was called back from Ray, where nodes have changed")
            if flight.is_down:
                return Failure("NODE_LOST", "its node was lost: Ray has given it up")
            return time_limit_failure(claim.timeout_s or 0)
        except asyncio.CancelledError:
            await asyncio.shield(asyncio.ensure_future(self._hands.end(reference)))
            raise
        finally:
            flight.on_start = lambda: None
            flight.reference = None


def _words(flight: _Flight) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in flight.frozen_needs) or "nothing"
