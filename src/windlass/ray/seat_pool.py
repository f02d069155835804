"""The seats of a fleet in Ray, and which attempt sits where.

A seat is a Ray task that runs several small attempts, one after another. Attempts wait here, not in Ray; Ray has a seat
for each of them, so placement is Ray's, and so is the sight of what is wanted. A seat that starts reports at the gate
and gets the attempt of its kind that has waited longest, which first becomes its node's task in the database. When it
is done it gets another, for SEAT_S from its start: then Ray is to place anew. So a long attempt has a seat for itself.

Who waits is unharmed by whatever becomes of seats, and the attempt that ran in one that was lost has failed. A node
that gets no more tasks, or lacks what it takes to run them, gets no attempt either: its seats end, and others are
asked for. What an attempt may expect is looked at before it waits and when nodes change: one that no node can hold is
given back, and one that none ever could has failed. Seats that nobody waits for are called back.
"""

import asyncio
import contextlib
import random
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import UUID

import structlog

from windlass.model.errors import HandlerNotFound
from windlass.model.node import NodeVerdict, Placement, Resources
from windlass.model.ray import RaySettings, frozen
from windlass.model.task import Claim
from windlass.ray.capacity import InFlightKind, Needs, NodeCapacity, homeless
from windlass.ray.nodes import Schedulability
from windlass.ray.seat_process import NoHandler, Parting, ResultNotDelivered
from windlass.ray.wait_list import WaitList
from windlass.worker.executor import AttemptFailure, NotBegun, Outcome
from windlass.worker.handler import ReportProgress

# For so long after its start a seat gets more attempts. Long against what Ray needs to start one, short against what
# other kinds of tasks, or another fleet's, may have to wait for the place.
SEAT_S = 1.0
# Seats of a kind that end one after another without having run anything, while attempts wait: so many are no longer a
# coincidence of nodes that end.
MAX_SEATS_IN_VAIN = 100
# How soon those attempts are looked at again.
IN_VAIN_DELAY_S = 1.0
# A node may start seats before we have seen it. We look more often than this.
UNSEEN_S = 3.0
# A task that no node can hold, while others of its queue find places, is not looked at again before this, and half as
# long again at most: it would be claimed and given back in a circle.
MISFIT_DELAY_S = 20.0
log = structlog.get_logger(__name__)


class SeatSubmitter(Protocol):
    """Who hands seats to Ray: driver.py."""

    def submit(self, seat_id: str, needs: Resources, closed: Collection[str]) -> Any:
        """`closed`: nodes that are not to have it."""

    async def parting(self, reference: Any) -> Parting | AttemptFailure:
        """How it ended."""

    async def end(self, reference: Any) -> None: ...

    async def call_back(self, references: Collection[Any]) -> None:
        """Seats that nobody needs any more; has Ray started one meanwhile, it is ended."""


class NodeTable(Protocol):
    """Where attempts may run: nodes.py."""

    def closed(self, needs: Needs) -> Collection[str]: ...

    def is_alive(self, node_id: str) -> bool: ...

    def worker_of(self, node_id: str) -> str | None: ...

    def outlook(self, needs: Needs) -> Schedulability: ...

    def rooms(self) -> Mapping[str, NodeCapacity]: ...

    def avoid(self, node_id: str) -> None: ...

    def refuse(self, node_id: str, why: str) -> bool: ...

    def why_refused(self) -> str: ...


def _nobody() -> None:
    """Nobody is on the line."""


@dataclass(slots=True, eq=False)
class SeatAttempt:
    """One that waits for a seat, or sits. `over` is cancelled by whoever does not want to wait for it any more."""

    claim: Claim
    needs: Needs
    report: ReportProgress
    over: "asyncio.Future[Outcome]"
    # Of its time, from its beginning. It can end for another reason, which then is `failure`.
    limit: asyncio.Timeout
    failure: AttemptFailure | None = None
    seat: "_Seat | None" = None
    # Its node's task in the database, and its seat was told to run it.
    has_begun: bool = False

    @property
    def kind(self) -> InFlightKind:
        return InFlightKind(self.needs, None if self.seat is None else self.seat.node_id)

    @property
    def is_over(self) -> bool:
        return self.over.done()

    def settle(self, outcome: Outcome | NotBegun | HandlerNotFound) -> None:
        if self.is_over:
            return
        if isinstance(outcome, Exception):
            self.over.set_exception(outcome)
        else:
            self.over.set_result(outcome)

    def give_up(self, failure: AttemptFailure) -> None:
        """It fails, as soon as its process has been ended."""
        if not self.is_over:
            self.failure = failure
            self.limit.reschedule(asyncio.get_running_loop().time())


@dataclass(slots=True, eq=False)
class _Seat:
    id: str
    needs: Needs
    reference: Any
    # By the clock of the event loop, as all times here.
    submitted_at: float
    started_at: float = 0.0
    # None: it has not reported yet.
    node_id: str | None = None
    # Where Ray has started it, and it imports the handler, which may take minutes.
    loading_on: str | None = None
    attempt: SeatAttempt | None = None
    has_served: bool = False
    is_over: bool = False
    # Ends its process by another way than Ray's.
    hang_up: Callable[[], None] = _nobody


class Seats:
    """All seats and attempts of a fleet, whichever queue these came from. `place` writes placements down."""

    def __init__(
        self,
        hands: SeatSubmitter,
        nodes: NodeTable,
        settings: RaySettings,
        place: Callable[[Placement], "asyncio.Future[NodeVerdict]"],
    ) -> None:
        self._hands = hands
        self._nodes = nodes
        self._settings = settings
        # What tasks of any queue need that do not say so themselves.
        self._usual = {frozen(needs.as_resources()) for needs in (settings, *settings.queues.values())}
        self._place = place
        self._roster: WaitList[SeatAttempt, _Seat] = WaitList()
        # Those that may report.
        self._seats: dict[str, _Seat] = {}
        self._in_vain: Counter[Needs] = Counter()
        self._looked = asyncio.Event()
        self._chores: set[asyncio.Task[None]] = set()
        # Attempts of each kind, from the moment they are here until they are over.
        self.counts: Counter[InFlightKind] = Counter()

    def __len__(self) -> int:
        return self.counts.total()

    # --------------------------------------------------------------------------------------------- of attempts

    def admit(self, attempt: SeatAttempt) -> None:
        """It waits for a seat from here on, if it may expect one."""
        self.counts[attempt.kind] += 1
        if self._nodes.outlook(attempt.needs) is Schedulability.AWAITED and self._is_one_too_many(attempt):
            attempt.settle(self._not_now(attempt))
        elif self._may_wait(attempt):
            self._roster.wait(attempt.needs, attempt)
            self._supply(attempt.needs)

    def _is_one_too_many(self, attempt: SeatAttempt) -> bool:
        """Of its kind; those that ask for something of their own count together, whatever that is."""
        if attempt.needs in self._usual:
            waiting = self.counts[InFlightKind(attempt.needs)]
        else:
            own = {flight: count for flight, count in self.counts.items() if flight.needs not in self._usual}
            waiting = homeless(self._nodes.rooms(), own)
        return waiting > max(self._settings.margin, 1)

    async def end(self, attempt: SeatAttempt) -> None:
        """Whoever waited for it does so no longer: it is ended, with its seat if it has one."""
        if attempt.seat is None:
            self._roster.leave(attempt.needs, attempt)
        else:
            seat = attempt.seat
            await self._hands.end(seat.reference)
            # Where Ray could not end it in time, this may: the attempt is about to be made again elsewhere.
            seat.hang_up()

    def dismiss(self, attempt: SeatAttempt) -> None:
        """It is over, whatever came of it."""
        attempt.over.cancel()
        self._uncount(attempt.kind)

    def _may_wait(self, attempt: SeatAttempt) -> bool:
        """False: it can expect nothing, and has been told so."""
        outlook = self._nodes.outlook(attempt.needs)
        if outlook in (Schedulability.FITS, Schedulability.AWAITED):
            return True
        if outlook is Schedulability.NEVER:
            said = f"no node of its fleet has what it needs: {_words(attempt.needs)}"
            attempt.settle(AttemptFailure("BAD_RESOURCES", said, retry=False))
        elif outlook is Schedulability.REFUSED:
            attempt.settle(HandlerNotFound(self._nodes.why_refused()))
        else:
            attempt.settle(self._not_now(attempt))
        return False

    def _not_now(self, attempt: SeatAttempt) -> NotBegun:
        is_usual = attempt.needs == frozen(self._settings.needs_of(attempt.claim.queue).as_resources())
        # Where no usual task of its queue has a place, none is claimed, and it is seen by whoever hires.
        delay_s = 0.0 if is_usual else MISFIT_DELAY_S * (1.0 + random.random() / 2)  # noqa: S311
        return NotBegun(f"no node can take it now: it needs {_words(attempt.needs)}", delay_s)

    def _seat(self, attempt: SeatAttempt, seat: _Seat) -> None:
        self._uncount(attempt.kind)
        attempt.seat, seat.attempt = seat, attempt
        self.counts[attempt.kind] += 1

    def _unseat(self, attempt: SeatAttempt) -> None:
        self._uncount(attempt.kind)
        if attempt.seat is not None:
            attempt.seat.attempt = None
        attempt.seat, attempt.has_begun = None, False
        self.counts[attempt.kind] += 1

    def _wait_again(self, attempt: SeatAttempt) -> None:
        self._unseat(attempt)
        attempt.limit.reschedule(None)
        if self._may_wait(attempt):
            self._roster.wait_again(attempt.needs, attempt)

    def _uncount(self, kind: InFlightKind) -> None:
        self.counts[kind] -= 1
        if not self.counts[kind]:
            del self.counts[kind]

    # --------------------------------------------------------------------------------------- what the gate brings

    def knows(self, seat_id: str) -> bool:
        return seat_id in self._seats

    def loading(self, seat_id: str, node_id: str) -> None:
        if (seat := self._seats.get(seat_id)) is not None:
            seat.loading_on = node_id

    async def arrive(self, seat_id: str, node_id: str, hang_up: Callable[[], None] = _nobody) -> Claim | None:
        seat = self._seats.get(seat_id)
        if seat is None or seat.node_id is not None:
            return None
        seat.node_id, seat.started_at, seat.hang_up = node_id, asyncio.get_running_loop().time(), hang_up
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(UNSEEN_S):
                while not self._nodes.is_alive(node_id):
                    await self._looked.wait()
        self._roster.started(seat.needs, seat)
        return await self._next(seat, node_id)

    async def finish(self, seat_id: str, token: UUID, outcome: Outcome) -> Claim | None:
        seat = self._seats.get(seat_id)
        attempt = None if seat is None else seat.attempt
        if seat is None or seat.node_id is None or attempt is None or attempt.claim.token != token:
            return None
        if attempt.is_over:
            # Somebody is about to end it, and its seat with it.
            return None
        self._unseat(attempt)
        attempt.settle(outcome)
        if asyncio.get_running_loop().time() >= seat.started_at + SEAT_S:
            return None
        return await self._next(seat, seat.node_id)

    def progress(self, seat_id: str, token: UUID, fraction: float, note: str | None) -> None:
        seat = self._seats.get(seat_id)
        if seat is not None and seat.attempt is not None and seat.attempt.claim.token == token:
            seat.attempt.report(fraction, note)

    async def _next(self, seat: _Seat, node_id: str) -> Claim | None:
        """What the seat is to run, placed on its node; None: it is to end."""
        worker_id = self._nodes.worker_of(node_id)
        if worker_id is None or seat.is_over:
            return None
        attempt = self._roster.take(seat.needs)
        while attempt is not None and attempt.is_over:
            attempt = self._roster.take(seat.needs)
        if attempt is None:
            return None
        self._seat(attempt, seat)
        verdict = await self._place(Placement(attempt.claim.task_id, attempt.claim.token, worker_id))
        if attempt.is_over:
            # As above.
            return None
        if verdict is NodeVerdict.PLACED and not seat.is_over:
            attempt.has_begun = seat.has_served = True
            del self._in_vain[seat.needs]
            if attempt.claim.timeout_s is not None:
                attempt.limit.reschedule(asyncio.get_running_loop().time() + attempt.claim.timeout_s)
            return attempt.claim
        if verdict is NodeVerdict.LOST:
            self._unseat(attempt)
            attempt.settle(NotBegun(""))
            return None
        if verdict is NodeVerdict.BARRED:
            # The database knows it before we do.
            self._nodes.avoid(node_id)
        self._wait_again(attempt)
        self._supply(seat.needs)
        return None

    # --------------------------------------------------------------------------------------------------- of seats

    def look(self, stuck_since: float | None = None) -> None:
        """Nodes may have changed. Who can expect nothing any more is told so, and seats that nobody needs go.

        What runs on nodes that are gone is given up: from one that was cut off, Ray would wait for minutes to hear.
        What it was about to place there waits as long: seats that wait since before `stuck_since` are replaced.
        """
        self._looked.set()
        self._looked = asyncio.Event()
        for kind in self._roster.kinds():
            if self._nodes.outlook(kind) not in (Schedulability.FITS, Schedulability.AWAITED):
                for attempt in self._roster.take_all(kind):
                    self._may_wait(attempt)
        self._give_up_lost()
        if stuck_since is not None:
            self._call_back_idle([seat for seat in self._roster.unstarted() if seat.submitted_at < stuck_since])
        self._call_back_idle(self._roster.surplus())
        for kind in self._roster.kinds():
            self._supply(kind)

    def _give_up_lost(self) -> None:
        """What runs on nodes that are gone. What is only being placed there has not begun, and goes elsewhere."""
        for seat in list(self._seats.values()):
            attempt = seat.attempt
            if attempt is None or seat.node_id is None or self._nodes.is_alive(seat.node_id):
                continue
            if attempt.has_begun:
                attempt.give_up(AttemptFailure("NODE_LOST", "its node was lost: Ray has given it up"))
            else:
                # Whoever waits for the database's answer finds the seat over.
                self._call_back([seat])

    def _supply(self, kind: Needs) -> None:
        """As many seats as there are attempts that wait."""
        count = self._roster.missing(kind)
        if not count:
            return
        closed, now = self._nodes.closed(kind), asyncio.get_running_loop().time()
        for _ in range(count):
            seat_id = secrets.token_hex(16)
            try:
                reference = self._hands.submit(seat_id, dict(kind), closed)
            except Exception as error:  # whatever it is, others are not to suffer from it
                self._turn_away(kind, error)
                return
            seat = _Seat(seat_id, kind, reference, now)
            self._seats[seat_id] = seat
            self._roster.submitted(kind, seat)
            self._do(self._see_out(seat))

    def _turn_away(self, kind: Needs, error: Exception) -> None:
        said = f"Ray takes nothing that needs {_words(kind)} ({error})"
        log.warning("Ray takes no seat", needs=_words(kind), error=f"{type(error).__name__}: {error}")
        for attempt in self._roster.take_all(kind):
            # So it says that it does not like the amounts. Its rules for them are its own, and differ by their names.
            if isinstance(error, ValueError | TypeError | OverflowError):
                attempt.settle(AttemptFailure("BAD_RESOURCES", said, retry=False))
            else:
                attempt.settle(NotBegun(said, IN_VAIN_DELAY_S))

    def _call_back_idle(self, seats: Iterable[_Seat]) -> None:
        """Those that wait in Ray. One that loads the handler is let be: the next would begin that from the start, and
        its process stays warm for whoever comes later."""
        self._call_back(
            [seat for seat in seats if seat.loading_on is None or not self._nodes.is_alive(seat.loading_on)]
        )

    def _call_back(self, seats: Iterable[_Seat]) -> None:
        # Forgotten first: one that Ray starts just now reports in vain, so that nothing runs in what is being ended.
        references = [self._forget(seat) for seat in seats]
        if references:
            self._do(self._hands.call_back(references))

    def _forget(self, seat: _Seat) -> Any:
        seat.is_over = True
        self._seats.pop(seat.id, None)
        self._roster.started(seat.needs, seat)
        return seat.reference

    async def _see_out(self, seat: _Seat) -> None:
        parting = await self._hands.parting(seat.reference)
        if seat.id not in self._seats:
            return
        self._forget(seat)
        if isinstance(parting, NoHandler) and self._nodes.refuse(parting.node_id, parting.why):
            log.warning("a node cannot run our tasks", node_id=parting.node_id, why=parting.why)
        attempt = seat.attempt
        # One that is being placed is left to whoever waits for that, and finds the seat over.
        if attempt is not None and attempt.has_begun and not attempt.is_over:
            if isinstance(parting, NoHandler | ResultNotDelivered):
                self._wait_again(attempt)
            else:
                attempt.settle(parting or AttemptFailure("ENGINE_ERROR", "its seat ended without a word of it"))
        if not seat.has_served and self._roster.is_waited(seat.needs):
            self._note_in_vain(seat.needs, _why(parting))
        self._supply(seat.needs)

    def _note_in_vain(self, kind: Needs, why: str) -> None:
        self._in_vain[kind] += 1
        if self._in_vain[kind] >= MAX_SEATS_IN_VAIN:
            del self._in_vain[kind]
            log.warning("Ray starts no seats", needs=_words(kind), why=why)
            for attempt in self._roster.take_all(kind):
                attempt.settle(NotBegun(f"Ray starts no seats for it ({why})", IN_VAIN_DELAY_S))

    def _do(self, chore: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(chore)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)

    async def close(self) -> None:
        """Nobody is at the gate any more, and nobody looks after what is left: it ends with its driver."""
        for chore in self._chores:
            chore.cancel()
        await asyncio.gather(*self._chores, return_exceptions=True)


def _why(parting: Parting | AttemptFailure) -> str:
    if parting is None:
        return "their nodes get no tasks"
    return parting.error if isinstance(parting, AttemptFailure) else parting.why


def _words(needs: Needs) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in needs) or "nothing"
