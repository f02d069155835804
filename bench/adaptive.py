"""Time of one decision of `adaptive` at 1,000 workers and 1,000,000 queued tasks: `python -m bench.adaptive`.

The policy plays at most a fixed number of groups of tasks, so the time must not grow with the queue.
"""

import time

from windlass.model.adaptive import AdaptiveMemory, ArrivalRecord
from windlass.policy.scale.adaptive import decide
from windlass.policy.scale.adaptive_boot import BootEstimate
from windlass.policy.scale.adaptive_load import FleetLoad

ROUNDS = 20


def measure(workers: int, queued: int) -> float:
    """Median milliseconds of one decision."""
    durations = tuple(float(second) for second in range(1, 201))
    load = FleetLoad(
        now=10_000.0,
        slots=1,
        queued=queued,
        arrived=0,
        oldest_queued_age_s=600.0,
        busy=workers,
        running_ages_s=[float(number % 100) for number in range(workers)],
        idle=[],
        starting_ages_s=[],
        durations_s=durations,
        duration_mean_s=100.5,
        boots=BootEstimate(120.0, 120.0),
    )
    records = tuple(ArrivalRecord(8_800.0 + 10 * number, queued // 120, 0.0) for number in range(120))
    memory = AdaptiveMemory(at=9_990.0, machines=workers, arrivals=records)
    taken = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        decide(load, memory, None, None)
        taken.append((time.perf_counter() - started) * 1000)
    return sorted(taken)[ROUNDS // 2]


def main() -> None:
    for workers, queued in ((10, 100), (100, 10_000), (1000, 100_000), (1000, 1_000_000)):
        print(f"{workers:5d} workers, {queued:8d} queued: {measure(workers, queued):.2f} ms")


if __name__ == "__main__":
    main()
