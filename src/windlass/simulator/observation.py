"""What the database would report about past tasks and boots: bounded, sorted samples."""

from bisect import bisect_left, insort
from collections import deque

from windlass.simulator.engine import SimulatedFleet

# As many as the observation of a cycle reads from the database.
KEPT_DURATIONS = 200
KEPT_BOOTS = 50


class SortedWindow:
    """The newest values, sorted, with their mean."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._newest: deque[float] = deque()
        self._sum = 0.0
        self.ordered: list[float] = []

    def add(self, value: float) -> None:
        self._newest.append(value)
        insort(self.ordered, value)
        self._sum += value
        if len(self._newest) > self._size:
            oldest = self._newest.popleft()
            self._sum -= oldest
            del self.ordered[bisect_left(self.ordered, oldest)]

    @property
    def mean(self) -> float | None:
        return self._sum / len(self._newest) if self._newest else None


class Observation:
    """Collects what happened in a simulated fleet since the last cycle."""

    def __init__(self) -> None:
        self.durations = SortedWindow(KEPT_DURATIONS)
        self.boots = SortedWindow(KEPT_BOOTS)
        self.arrived = 0
        self._seen = 0

    def update(self, fleet: SimulatedFleet) -> None:
        for _, started, ended in fleet.completed:
            self.durations.add(round(ended - started, 3))
        fleet.completed.clear()
        for boot_s in fleet.boots:
            self.boots.add(round(boot_s, 3))
        fleet.boots.clear()
        self.arrived, self._seen = fleet.arrived - self._seen, fleet.arrived
