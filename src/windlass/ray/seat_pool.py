"""Submits seats to Ray and assigns waiting attempts to the seats that start.

A seat is a Ray task that runs several short attempts one after another. Attempts wait here; Ray has one pending seat
for each, so Ray decides the placement and sees the demand. A seat that starts gets the attempt of its kind that has
waited longest, after the database has assigned the task to the seat's node. When an attempt finishes, the seat gets the
next one until SEAT_LIFETIME_S after its start. So a long attempt has a seat of its own.

A lost seat fails only the attempt that ran in it. Seats on nodes that get no more tasks, or that cannot run them, get
no attempt and are replaced. Attempts are checked when they arrive and when nodes change: one that no node can hold is
released, and one that no node could ever hold fails. Seats without a waiting attempt are cancelled.
"""

import asyncio
import contextlib
import random
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable
from typing import Any
from uuid import UUID

import structlog

from windlass.model.errors import HandlerNotFound
from windlass.model.node import NodeVerdict, Placement
from windlass.model.ray import RaySettings, frozen
from windlass.model.task import Claim
from windlass.ray.capacity import InFlightKind, Needs, count_unplaceable
from windlass.ray.driver import Driver
from windlass.ray.node_table import NodeTable, Schedulability
from windlass.ray.seat_process import DispatcherUnreachable, NodeUnusable, SeatExit
from windlass.ray.seat_state import Seat, SeatAttempt
from windlass.ray.wait_list import WaitList
from windlass.worker.executor import AttemptFailure, NotBegun, Outcome

# A seat gets attempts for this long after its start: long compared with Ray's overhead per seat, short compared with
# what tasks of other kinds, or of other fleets, may wait for its resources.
SEAT_LIFETIME_S = 1.0
# Seats of a kind that exit in a row without having run an attempt, while attempts wait. Terminating nodes cause a few;
# this many mean that Ray cannot start seats.
MAX_IDLE_EXITS = 100
# The attempts that waited for those seats are released, and not claimed again before this time.
SEAT_FAILURE_DELAY_S = 1.0
# A seat may start on a node before the node was observed. Observations are more frequent than this.
UNKNOWN_NODE_TIMEOUT_S = 3.0
# A task that no node can hold is not claimed again for 1 to 1.5 times this, while other tasks of its queue are.
# Without the delay it would be claimed and released in a loop.
UNSCHEDULABLE_DELAY_S = 20.0
_SCHEDULABLE = (Schedulability.FITS, Schedulability.MAY_FIT_AFTER_GROWTH)
log = structlog.get_logger(__name__)


class SeatPool:
    """All seats and attempts of a fleet. `place` assigns a task to a node in the database."""

    def __init__(
        self,
        driver: Driver,
        nodes: NodeTable,
        settings: RaySettings,
        place: Callable[[Placement], "asyncio.Future[NodeVerdict]"],
    ) -> None:
        self._driver = driver
        self._nodes = nodes
        self._settings = settings
        # The needs of tasks that do not state their own.
        self._configured_needs = {frozen(needs.as_resources()) for needs in (settings, *settings.queues.values())}
        self._place = place
        self._wait_list: WaitList[SeatAttempt, Seat] = WaitList()
        self._seats: dict[str, Seat] = {}
        self._idle_exits: Counter[Needs] = Counter()
        self._nodes_updated = asyncio.Event()
        self._background: set[asyncio.Task[None]] = set()
        # Attempts by kind, from add() to remove().
        self.in_flight: Counter[InFlightKind] = Counter()

    async def close(self) -> None:
        """Remaining seats end with their driver."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    # ----------------------------------------------------------------------------------- attempts, for the executor

    def add(self, attempt: SeatAttempt) -> None:
        """Let the attempt wait for a seat, or settle it if it cannot be placed."""
        self.in_flight[attempt.kind] += 1
        if self._nodes.schedulability(attempt.needs) is Schedulability.MAY_FIT_AFTER_GROWTH:
            # At most the margin waits for growth: per configured kind, and together for all tasks with their own needs.
            if attempt.needs in self._configured_needs:
                waiting = self.in_flight[InFlightKind(attempt.needs)]
            else:
                own = {kind: n for kind, n in self.in_flight.items() if kind.needs not in self._configured_needs}
                waiting = count_unplaceable(self._nodes.open_nodes(), own)
            if waiting > max(self._settings.margin, 1):
                attempt.settle(self._unschedulable_now(attempt))
                return
        if not self._settle_if_unschedulable(attempt):
            self._wait_list.add(attempt.needs, attempt)
            self._submit_missing(attempt.needs)

    async def kill(self, attempt: SeatAttempt) -> None:
        """Stop waiting for a seat, or kill the seat in which the attempt runs."""
        if attempt.seat is None:
            self._wait_list.discard(attempt.needs, attempt)
            return
        seat = attempt.seat
        await self._driver.kill(seat.reference)
        # If Ray could not kill it, this does: the task is about to be retried elsewhere.
        seat.disconnect()

    def remove(self, attempt: SeatAttempt) -> None:
        attempt.outcome.cancel()
        self._uncount(attempt.kind)

    def _settle_if_unschedulable(self, attempt: SeatAttempt) -> bool:
        """Settle an attempt that no node can hold. Returns whether it was settled."""
        schedulability = self._nodes.schedulability(attempt.needs)
        if schedulability in _SCHEDULABLE:
            return False
        if schedulability is Schedulability.NEVER:
            error = f"no node of the fleet has the resources that the task needs: {_describe(attempt.needs)}"
            attempt.settle(AttemptFailure("BAD_RESOURCES", error, retry=False))
        elif schedulability is Schedulability.NO_USABLE_NODE:
            attempt.settle(HandlerNotFound(self._nodes.unusable_reason()))
        else:
            attempt.settle(self._unschedulable_now(attempt))
        return True

    def _unschedulable_now(self, attempt: SeatAttempt) -> NotBegun:
        is_default = attempt.needs == frozen(self._settings.needs_of(attempt.claim.queue).as_resources())
        # If default tasks of the queue fit nowhere, none is claimed, and the queued tasks cause a spawn.
        delay_s = 0.0 if is_default else UNSCHEDULABLE_DELAY_S * (1.0 + random.random() / 2)  # noqa: S311
        return NotBegun(f"no node can hold the task now: it needs {_describe(attempt.needs)}", delay_s)

    def _assign(self, attempt: SeatAttempt, seat: Seat) -> None:
        self._uncount(attempt.kind)
        attempt.seat, seat.attempt = seat, attempt
        self.in_flight[attempt.kind] += 1

    def _unassign(self, attempt: SeatAttempt) -> None:
        self._uncount(attempt.kind)
        if attempt.seat is not None:
            attempt.seat.attempt = None
        attempt.seat, attempt.has_begun = None, False
        self.in_flight[attempt.kind] += 1

    def _return_to_wait_list(self, attempt: SeatAttempt) -> None:
        self._unassign(attempt)
        attempt.timeout.reschedule(None)
        if not self._settle_if_unschedulable(attempt):
            self._wait_list.add_first(attempt.needs, attempt)

    def _uncount(self, kind: InFlightKind) -> None:
        self.in_flight[kind] -= 1
        if not self.in_flight[kind]:
            del self.in_flight[kind]

    # ------------------------------------------------------------------------------- callbacks, for the seat server
    # Messages of unknown seats, or with the token of another attempt, change nothing.

    def has_seat(self, seat_id: str) -> bool:
        return seat_id in self._seats

    def on_loading(self, seat_id: str, node_id: str) -> None:
        if (seat := self._seats.get(seat_id)) is not None:
            seat.loading_node_id = node_id

    async def on_started(
        self, seat_id: str, node_id: str, disconnect: Callable[[], None] = lambda: None
    ) -> Claim | None:
        """Returns the claim to run; None: the seat should exit. `disconnect` ends the process if it runs this seat."""
        seat = self._seats.get(seat_id)
        if seat is None or seat.node_id is not None:
            return None
        seat.node_id, seat.started_at, seat.disconnect = node_id, asyncio.get_running_loop().time(), disconnect
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(UNKNOWN_NODE_TIMEOUT_S):
                while not self._nodes.is_alive(node_id):
                    await self._nodes_updated.wait()
        self._wait_list.discard_seat(seat.needs, seat)
        return await self._begin_next(seat, node_id)

    async def on_finished(self, seat_id: str, token: UUID, outcome: Outcome) -> Claim | None:
        """Returns the next claim; None: the seat should exit."""
        seat = self._seats.get(seat_id)
        attempt = None if seat is None else seat.attempt
        if seat is None or seat.node_id is None or attempt is None or attempt.claim.token != token:
            return None
        if attempt.is_settled:
            # The executor is about to kill the attempt together with its seat.
            return None
        self._unassign(attempt)
        attempt.settle(outcome)
        if asyncio.get_running_loop().time() >= seat.started_at + SEAT_LIFETIME_S:
            return None
        return await self._begin_next(seat, seat.node_id)

    def on_progress(self, seat_id: str, token: UUID, fraction: float, note: str | None) -> None:
        seat = self._seats.get(seat_id)
        if seat is not None and seat.attempt is not None and seat.attempt.claim.token == token:
            seat.attempt.report(fraction, note)

    def on_output(self, seat_id: str, token: UUID, lines: bytes, dropped: int) -> None:
        seat = self._seats.get(seat_id)
        if seat is not None and seat.attempt is not None and seat.attempt.claim.token == token:
            seat.attempt.add_output(lines, dropped)

    async def _begin_next(self, seat: Seat, node_id: str) -> Claim | None:
        """Assign the next attempt to the seat's node and return its claim. None: the seat should exit."""
        worker_id = self._nodes.open_worker_id(node_id)
        if worker_id is None or seat.is_closed:
            return None
        attempt = self._wait_list.pop(seat.needs)
        while attempt is not None and attempt.is_settled:
            attempt = self._wait_list.pop(seat.needs)
        if attempt is None:
            return None
        self._assign(attempt, seat)
        verdict = await self._place(Placement(attempt.claim.task_id, attempt.claim.token, worker_id))
        if attempt.is_settled:
            # See on_finished.
            return None
        if verdict is NodeVerdict.PLACED and not seat.is_closed:
            attempt.has_begun = seat.has_run_attempt = True
            del self._idle_exits[seat.needs]
            if attempt.claim.timeout_s is not None:
                attempt.timeout.reschedule(asyncio.get_running_loop().time() + attempt.claim.timeout_s)
            return attempt.claim
        if verdict is NodeVerdict.LOST:
            self._unassign(attempt)
            attempt.settle(NotBegun("the claim was lost"))
            return None
        if verdict is NodeVerdict.BARRED:
            # The worker's new status is in the database and not yet in the node table.
            self._nodes.avoid(node_id)
        self._return_to_wait_list(attempt)
        self._submit_missing(seat.needs)
        return None

    # --------------------------------------------------------------------------------------------------------- seats

    def reconcile(self, stuck_since: float | None = None) -> None:
        """Adapt to changed nodes: settle attempts that fit nowhere, cancel surplus seats, submit missing ones.

        Attempts on lost nodes are aborted, because Ray may wait minutes for a node that was cut off. Seats that Ray was
        about to place there wait as long, so pending seats from before `stuck_since` are replaced.
        """
        self._nodes_updated.set()
        self._nodes_updated = asyncio.Event()
        for kind in self._wait_list.waiting_kinds():
            if self._nodes.schedulability(kind) not in _SCHEDULABLE:
                for attempt in self._wait_list.pop_all(kind):
                    self._settle_if_unschedulable(attempt)
        for seat in list(self._seats.values()):
            if seat.attempt is None or seat.node_id is None or self._nodes.is_alive(seat.node_id):
                continue
            if seat.attempt.has_begun:
                seat.attempt.abort(AttemptFailure("NODE_LOST", "Ray declared the node of the attempt dead"))
            else:
                # _begin_next, which waits for the database, will find the seat closed and put the attempt back.
                self._cancel([seat])
        if stuck_since is not None:
            self._cancel_pending([seat for seat in self._wait_list.pending_seats() if seat.submitted_at < stuck_since])
        self._cancel_pending(self._wait_list.surplus_seats())
        for kind in self._wait_list.waiting_kinds():
            self._submit_missing(kind)

    def _submit_missing(self, kind: Needs) -> None:
        count = self._wait_list.count_missing_seats(kind)
        if not count:
            return
        excluded, now = self._nodes.excluded_nodes(kind), asyncio.get_running_loop().time()
        for _ in range(count):
            seat_id = secrets.token_hex(16)
            try:
                reference = self._driver.submit(seat_id, dict(kind), excluded)
            except Exception as error:  # any error of Ray concerns this kind only
                log.warning("submit seat failed", needs=_describe(kind), error=f"{type(error).__name__}: {error}")
                reason = f"Ray rejects a task that needs {_describe(kind)} ({error})"
                for attempt in self._wait_list.pop_all(kind):
                    # Ray raises these for invalid amounts; its rules depend on the name of the resource.
                    if isinstance(error, ValueError | TypeError | OverflowError):
                        attempt.settle(AttemptFailure("BAD_RESOURCES", reason, retry=False))
                    else:
                        attempt.settle(NotBegun(reason, SEAT_FAILURE_DELAY_S))
                return
            seat = Seat(seat_id, kind, reference, now)
            self._seats[seat_id] = seat
            self._wait_list.add_seat(kind, seat)
            self._run_in_background(self._handle_exit(seat))

    def _cancel_pending(self, seats: Iterable[Seat]) -> None:
        """Seats that load the handler continue: a replacement would start over, and the process stays warm."""
        self._cancel(
            [seat for seat in seats if seat.loading_node_id is None or not self._nodes.is_alive(seat.loading_node_id)]
        )

    def _cancel(self, seats: Collection[Seat]) -> None:
        # Closed before they are cancelled: a seat that Ray starts at this moment gets no attempt.
        for seat in seats:
            self._close(seat)
        if seats:
            self._run_in_background(self._driver.cancel([seat.reference for seat in seats]))

    def _close(self, seat: Seat) -> None:
        seat.is_closed = True
        self._seats.pop(seat.id, None)
        self._wait_list.discard_seat(seat.needs, seat)

    async def _handle_exit(self, seat: Seat) -> None:
        seat_exit = await self._driver.wait_for_exit(seat.reference)
        if seat.id not in self._seats:
            return
        self._close(seat)
        if isinstance(seat_exit, NodeUnusable) and self._nodes.mark_unusable(seat_exit.node_id, seat_exit.reason):
            log.warning("mark node unusable", node_id=seat_exit.node_id, reason=seat_exit.reason)
        attempt = seat.attempt
        # An attempt that is being placed is left to _begin_next, which finds the seat closed.
        if attempt is not None and attempt.has_begun and not attempt.is_settled:
            if isinstance(seat_exit, NodeUnusable | DispatcherUnreachable):
                self._return_to_wait_list(attempt)
            else:
                attempt.settle(seat_exit or AttemptFailure("RAY_ERROR", "the seat exited without an outcome"))
        if not seat.has_run_attempt and self._wait_list.has_waiting(seat.needs):
            self._count_idle_exit(seat.needs, seat_exit)
        self._submit_missing(seat.needs)

    def _count_idle_exit(self, kind: Needs, seat_exit: SeatExit | AttemptFailure) -> None:
        self._idle_exits[kind] += 1
        if self._idle_exits[kind] < MAX_IDLE_EXITS:
            return
        del self._idle_exits[kind]
        if seat_exit is None:
            reason = "their nodes get no tasks"
        else:
            reason = seat_exit.error if isinstance(seat_exit, AttemptFailure) else seat_exit.reason
        log.warning("run seats failed", needs=_describe(kind), reason=reason, exits=MAX_IDLE_EXITS)
        for attempt in self._wait_list.pop_all(kind):
            attempt.settle(NotBegun(f"Ray cannot start seats for the task ({reason})", SEAT_FAILURE_DELAY_S))

    def _run_in_background(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _describe(needs: Needs) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in needs) or "nothing"
