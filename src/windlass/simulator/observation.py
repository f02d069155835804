"""What the database would report about past tasks and boots: bounded, sorted samples."""

from bisect import bisect_left, insort
from collections import Counter, deque
from datetime import UTC, datetime, timedelta

from windlass.model.snapshot import ProviderRefusal, QueueDurations
from windlass.simulator.engine import SimulatedFleet

# Any fixed moment: decisions depend on differences only. Not in the future, at an hour.
EPOCH = datetime(2024, 1, 1, tzinfo=UTC)
# The observation of a cycle reads as many from the database.
KEPT_DURATIONS = 200
KEPT_BOOTS = 50
KEPT_QUEUE_DURATIONS = 100
KEPT_QUEUES = 32


def moment(at: float) -> datetime:
    return EPOCH + timedelta(seconds=at)


def last_refusal(fleet: SimulatedFleet) -> ProviderRefusal | None:
    """The provider's last answer to a create call, if it refused: missing capacity, which passes by itself."""
    at = fleet.refused_at
    return None if at is None else ProviderRefusal("NO_CAPACITY", "no capacity in this simulation", moment(at))


class SortedWindow:
    """The newest values, sorted, with their mean."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._newest: deque[float] = deque()
        self._sum = 0.0
        # How many values were ever added.
        self.added = 0
        self.ordered: list[float] = []

    def add(self, value: float) -> None:
        self.added += 1
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
        self._by_queue: dict[str, SortedWindow] = {}

    def update(self, fleet: SimulatedFleet) -> None:
        names = fleet.trace.queues
        for index, started, ended in fleet.completed:
            duration_s = round(ended - started, 3)
            self.durations.add(duration_s)
            if names:
                self._by_queue.setdefault(names[index], SortedWindow(KEPT_QUEUE_DURATIONS)).add(duration_s)
        fleet.completed.clear()
        for boot_s in fleet.boots:
            self.boots.add(round(boot_s, 3))
        fleet.boots.clear()
        self.arrived, self._seen = fleet.arrived - self._seen, fleet.arrived

    def each_queue(self, fleet: SimulatedFleet) -> tuple[QueueDurations, ...]:
        """The queues with queued or running tasks, as the database reports them. Empty: the fleet has one queue."""
        names = fleet.trace.queues
        if not names or not fleet.trace.has_several_queues:
            return ()
        queued = Counter(names[index] for index in fleet.queue)
        tasks = queued + Counter(names[index] for machine in fleet.machines.values() for index in machine.running)
        busiest = sorted(tasks, key=lambda name: (-tasks[name], name))[:KEPT_QUEUES]
        none = SortedWindow(0)
        samples = {name: self._by_queue.get(name, none) for name in sorted(busiest)}
        return tuple(
            QueueDurations(name, queued[name], tuple(sample.ordered), sample.mean) for name, sample in samples.items()
        )
