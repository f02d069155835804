"""Steps that the conformance tests of the control store share: a leader that observes and commits."""

import os
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg

from support.memory_store.stores import MemoryStores
from support.stores import PostgresStores
from windlass.model.action import (
    Action,
    Plan,
    Spawn,
)
from windlass.model.config import Retention
from windlass.model.cost import PricePart
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate, Standby
from windlass.model.machine import Machine, MachineState
from windlass.model.outcome import (
    Committed,
    Intent,
    Outcome,
)
from windlass.model.snapshot import (
    PlannerState,
    Snapshot,
)
from windlass.model.task import Finished, NewTask
from windlass.model.worker import WorkerStatus

HISTORIES = int(os.environ.get("WINDLASS_HISTORIES", "0")) or 15
STEPS = 60
RETENTION = Retention(complete_s=3600, failed_s=7200, events_s=10_800, cycles_s=3600, charges_s=200_000)
ControlStores = MemoryStores | PostgresStores
FLEET = FleetConfig(queues=("a", "b"), min_workers=0, max_workers=4)
ANN = Candidate("ann", ttl_s=30.0)
BOB = Candidate("bob", ttl_s=30.0)
EMPTY = """
truncate windlass.charges, windlass.spending, windlass.attempt_spans, windlass.volume_sizes;
truncate windlass.tasks, windlass.events, windlass.cycles, windlass.leases, windlass.clock, windlass.workers,
  windlass.slots, windlass.fleets restart identity cascade
"""


class VirtualClock:
    def __init__(self) -> None:
        self.now = datetime(2030, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


async def execute(dsn: str, sql: str, *arguments: Any) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(sql, *arguments)
    finally:
        await connection.close()


SetStatus = Callable[[str, WorkerStatus], Awaitable[None]]


class Leader:
    """A candidate with what it saw last, so that a test reads as a story."""

    def __init__(self, store: ControlStores, candidate: Candidate = ANN, fleet: str = "f") -> None:
        self.store = store
        self.candidate = candidate
        self.fleet = fleet
        self.term = 0
        self.snapshot = Snapshot(now=datetime.min, fleet=fleet)

    async def observe(self, config: FleetConfig = FLEET) -> Snapshot:
        observed = await self.store.observe(self.candidate, self.fleet, config)
        assert not isinstance(observed, Standby)
        self.term, self.snapshot = observed
        return self.snapshot

    async def commit(
        self,
        *actions: Action,
        intents: tuple[Intent, ...] = (),
        planner_state: PlannerState | None = None,
        decision: str = "so",
    ) -> Committed:
        plan = Plan(actions, planner_state or self.snapshot.planner_state, decision)
        return await self.store.commit_plan(self.candidate, self.term, self.snapshot, plan, intents)

    async def report(self, *outcomes: Outcome, cycle_id: int = 1) -> None:
        await self.store.record_outcomes(self.fleet, cycle_id, outcomes, {"n": len(outcomes)})

    async def spawn_worker(self, *slots: int) -> Committed:
        """Workers w0, w1, ... into these slots."""
        intents = tuple(intent(f"w{slot}", slot) for slot in slots)
        return await self.commit(*(Spawn(slot, "wanted") for slot in slots), intents=intents)


def intent(worker_id: str, slot: int) -> Intent:
    return Intent(worker_id, slot, "wanted", 30.0, concurrency=2)


def machine(number: int, name: str = "w0") -> Machine:
    return Machine(
        f"m{number}",
        name,
        MachineState.RUNNING,
        instance_type="tiny",
        place="nbg1",
        price_micros_per_hour=5,
        currency="EUR",
    )


async def events(store: ControlStores, worker_id: str | None = None) -> list[str]:
    return [event.code for event in await store.events(worker_id=worker_id, limit=1000)]


PARTS = (PricePart(3_000_000, 7_500_000), PricePart(600_000, 1_500_000))


async def reported(store: ControlStores, by: str) -> dict[str | None, tuple[int, int, int, int]]:
    costs = await store.costs(by, datetime(2029, 1, 1, tzinfo=UTC))
    return {c.key: (c.task_micros, c.boot_micros, c.idle_micros, c.tail_micros) for c in costs}


async def do(store: ControlStores, clock: VirtualClock, worker_id: str, seconds: float, queue: str = "a") -> int:
    task_id = await store.enqueue(NewTask(queue))
    (claim,) = await store.claim(worker_id, (queue,), 1)
    clock.advance(seconds)
    await store.finish_and_claim(worker_id, [Finished(claim.task_id, claim.token, None)], (), 0)
    return task_id
