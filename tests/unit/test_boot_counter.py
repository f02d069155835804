"""Boots of machines in the exported histogram: each phase of each worker once, by the leader only."""

from types import SimpleNamespace
from typing import Any

from windlass.model.counters import BOOT_PHASE_SECONDS, CounterBuffer
from windlass.model.overview import BootPhase, FleetMetrics
from windlass.wiring.boot_counter import BootCounter


class BootOverview:
    """The last boots of one fleet, as a test sets them."""

    def __init__(self, *boots: BootPhase) -> None:
        self.boots = boots

    async def fleet_metrics(self) -> list[FleetMetrics]:
        return [FleetMetrics("gpu", None, None, 0, 0, None, 0, (), (), boots=self.boots)]


def counter_of(store: BootOverview, *, is_leader: bool = True) -> tuple[BootCounter, CounterBuffer]:
    buffer = CounterBuffer()
    counter = BootCounter(store, buffer)  # type: ignore[arg-type]
    summary: Any = SimpleNamespace(is_leader=is_leader)
    counter.record_cycle(summary)
    return counter, buffer


def seconds_of(buffer: CounterBuffer) -> dict[tuple[str, ...], float]:
    sums = BOOT_PHASE_SECONDS.sum_counter.name
    return {tuple(each.labels): each.value for each in buffer.take() if each.name == sums}


async def test_each_phase_of_each_worker_is_counted_once() -> None:
    store = BootOverview()
    counter, buffer = counter_of(store)
    await counter.observe()
    store.boots = (BootPhase("w0", "running", 40.0), BootPhase("w1", "running", 60.0))
    await counter.observe()
    assert seconds_of(buffer) == {("gpu", "running"): 100.0}
    store.boots = (*store.boots, BootPhase("w0", "joined", 95.0))
    await counter.observe()
    await counter.observe()
    assert seconds_of(buffer) == {("gpu", "joined"): 95.0}


async def test_boots_before_the_first_observation_are_not_counted() -> None:
    counter, buffer = counter_of(BootOverview(BootPhase("w0", "running", 40.0)))
    await counter.observe()
    await counter.observe()
    assert seconds_of(buffer) == {}


async def test_standby_counts_no_boots() -> None:
    store = BootOverview()
    counter, buffer = counter_of(store, is_leader=False)
    await counter.observe()
    store.boots = (BootPhase("w0", "running", 40.0),)
    await counter.observe()
    assert seconds_of(buffer) == {}
