"""Attempts that wait for a seat, and seats that wait in Ray for a node, by their kind (resource needs). Pure.

For each kind, Ray should have as many pending seats as attempts wait. With fewer, Ray would not see the demand, and a
self-scaling cluster would not grow; with more, it would grow for nothing. Running seats take waiting attempts too, so
there may be a surplus at any time. A shortage lasts only until the missing seats are submitted.
"""

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from windlass.ray.capacity import Needs

Attempt = TypeVar("Attempt")
Seat = TypeVar("Seat")


class WaitList(Generic[Attempt, Seat]):
    def __init__(self) -> None:
        # Oldest first. Kinds without attempts are deleted: tasks may name any resources, and kinds would accumulate.
        self._attempts: dict[Needs, deque[Attempt]] = {}
        # In the order of submission.
        self._pending_seats: dict[Needs, dict[Seat, None]] = {}

    # ----------------------------------------------------------------------------------------------------- attempts

    def add(self, kind: Needs, attempt: Attempt) -> None:
        self._attempts.setdefault(kind, deque()).append(attempt)

    def add_first(self, kind: Needs, attempt: Attempt) -> None:
        """Put back an attempt that was popped before."""
        self._attempts.setdefault(kind, deque()).appendleft(attempt)

    def pop(self, kind: Needs) -> Attempt | None:
        """The attempt of this kind that has waited longest."""
        queue = self._attempts.get(kind)
        if not queue:
            return None
        attempt = queue.popleft()
        if not queue:
            del self._attempts[kind]
        return attempt

    def discard(self, kind: Needs, attempt: Attempt) -> None:
        queue = self._attempts.get(kind, deque())
        if attempt in queue:
            queue.remove(attempt)
            if not queue:
                del self._attempts[kind]

    def pop_all(self, kind: Needs) -> list[Attempt]:
        return list(self._attempts.pop(kind, ()))

    def has_waiting(self, kind: Needs) -> bool:
        return kind in self._attempts

    def waiting_kinds(self) -> list[Needs]:
        return list(self._attempts)

    # -------------------------------------------------------------------------------------------------------- seats

    def add_seat(self, kind: Needs, seat: Seat) -> None:
        self._pending_seats.setdefault(kind, {})[seat] = None

    def discard_seat(self, kind: Needs, seat: Seat) -> None:
        """The seat has started, or ended before it could."""
        seats = self._pending_seats.get(kind, {})
        seats.pop(seat, None)
        if not seats:
            self._pending_seats.pop(kind, None)

    def count_missing_seats(self, kind: Needs) -> int:
        return max(0, len(self._attempts.get(kind, ())) - len(self._pending_seats.get(kind, ())))

    def surplus_seats(self) -> list[Seat]:
        """Pending seats beyond the number of waiting attempts: the newest of each kind, which Ray would start last."""
        return [
            seat
            for kind, seats in self._pending_seats.items()
            for seat in list(seats)[len(self._attempts.get(kind, ())) :]
        ]

    def pending_seats(self) -> Iterator[Seat]:
        return (seat for seats in self._pending_seats.values() for seat in seats)
