"""Which attempts wait for a seat, and which seats wait in Ray for a node. Pure: nothing here asks or tells anybody.

Both by their kind, which is what they need. Of a kind there are to be as many seats in Ray as attempts wait: with
fewer, Ray would not see what is wanted, and a cluster that grows by itself would not grow; with more, it would grow for
nothing. A seat that runs takes what waits as well, so there may be too many at any time. There never are too few for
longer than it takes to submit one.
"""

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from windlass.ray.capacity import Needs

Attempt = TypeVar("Attempt")
Seat = TypeVar("Seat")


class WaitList(Generic[Attempt, Seat]):
    def __init__(self) -> None:
        # The oldest first. No kind without one: a task may ask for whatever it likes, and kinds would gather.
        self._waiting: dict[Needs, deque[Attempt]] = {}
        # Not yet on a node, in the order in which Ray got them.
        self._unstarted: dict[Needs, dict[Seat, None]] = {}

    # ------------------------------------------------------------------------------------------------- attempts

    def wait(self, kind: Needs, attempt: Attempt) -> None:
        self._waiting.setdefault(kind, deque()).append(attempt)

    def wait_again(self, kind: Needs, attempt: Attempt) -> None:
        """It has waited before, and comes first."""
        self._waiting.setdefault(kind, deque()).appendleft(attempt)

    def take(self, kind: Needs) -> Attempt | None:
        """The one that has waited longest. None: there is none."""
        queue = self._waiting.get(kind)
        if not queue:
            return None
        attempt = queue.popleft()
        if not queue:
            del self._waiting[kind]
        return attempt

    def leave(self, kind: Needs, attempt: Attempt) -> None:
        """It waits no more, if it did."""
        queue = self._waiting.get(kind, deque())
        if attempt in queue:
            queue.remove(attempt)
            if not queue:
                del self._waiting[kind]

    def take_all(self, kind: Needs) -> list[Attempt]:
        return list(self._waiting.pop(kind, ()))

    def is_waited(self, kind: Needs) -> bool:
        return kind in self._waiting

    def kinds(self) -> list[Needs]:
        """Of those that wait."""
        return list(self._waiting)

    # ---------------------------------------------------------------------------------------------------- seats

    def submitted(self, kind: Needs, seat: Seat) -> None:
        self._unstarted.setdefault(kind, {})[seat] = None

    def started(self, kind: Needs, seat: Seat) -> None:
        """Or ended before it could."""
        seats = self._unstarted.get(kind, {})
        seats.pop(seat, None)
        if not seats:
            self._unstarted.pop(kind, None)

    def missing(self, kind: Needs) -> int:
        """So many seats are to be submitted."""
        return max(0, len(self._waiting.get(kind, ())) - len(self._unstarted.get(kind, ())))

    def surplus(self) -> list[Seat]:
        """Seats that nobody waits for: of each kind the youngest, which Ray would start last."""
        return [
            seat for kind, seats in self._unstarted.items() for seat in list(seats)[len(self._waiting.get(kind, ())) :]
        ]

    def unstarted(self) -> Iterator[Seat]:
        return (seat for seats in self._unstarted.values() for seat in seats)
