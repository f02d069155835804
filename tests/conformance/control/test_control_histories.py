"""The same random histories over the memory and the PostgreSQL control store.

`WINDLASS_HISTORIES=2000 pytest tests/conformance/control/test_control_histories.py` runs that many.
"""

import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any
from uuid import UUID

import pytest

from support.control_actions import (
    ANN,
    BOB,
    EMPTY,
    FLEET,
    HISTORIES,
    PARTS,
    RETENTION,
    STEPS,
    VirtualClock,
    execute,
)
from support.memory_store.stores import MemoryStores
from support.stores import PostgresStores
from windlass.cost.ledger import settle
from windlass.model.action import (
    Action,
    Adopt,
    Delete,
    Drain,
    Fail,
    FailSlot,
    Plan,
    Prepare,
    Promote,
    RaiseAlert,
    RecordPrice,
    Requeue,
    Spawn,
)
from windlass.model.cost import PricePart
from windlass.model.errors import BadInput, UnknownWorker
from windlass.model.lease import LeaseLost, Standby
from windlass.model.machine import Machine, MachineState, ProviderTraits
from windlass.model.outcome import (
    Committed,
    Created,
    CreationRefused,
    CreationUnclear,
    Deleted,
    HostKeySeen,
    Intent,
    NotDeleted,
    OrphanDeleted,
    Outcome,
    PreparationFailed,
    PreparationUnclear,
    Prepared,
)
from windlass.model.snapshot import (
    Cadence,
    FailureStreak,
    PlannerState,
    ScalingState,
    Snapshot,
)
from windlass.model.task import Finished, NewTask
from windlass.model.worker import HeldClaim, Registration


class Twins:
    """Runs every step on both stores. A difference is a bug in one of them."""

    def __init__(self, memory: MemoryStores, postgres: PostgresStores, clock: VirtualClock) -> None:
        self.memory = memory
        self.postgres = postgres
        self.clock = clock
        self.claims: list[tuple[str, int, UUID, UUID]] = []  # worker, task, memory's token, PostgreSQL's
        self.cycle_ids = [1]
        self.seen: dict[str, tuple[int, Snapshot]] = {}

    async def both(self, name: str, *arguments: Any, **options: Any) -> Any:
        results = []
        for store in (self.memory, self.postgres):
            try:
                results.append(await getattr(store, name)(*arguments, **options))
            except (LeaseLost, BadInput) as error:
                results.append(type(error))
        ours, theirs = results
        assert ours == theirs, (name, arguments, options)
        return theirs

    async def claim(self, worker_id: str, limit: int) -> None:
        try:
            ours = await self.memory.claim(worker_id, ("a", "b"), limit)
        except UnknownWorker:
            with pytest.raises(UnknownWorker):
                await self.postgres.claim(worker_id, ("a", "b"), limit)
            return
        theirs = await self.postgres.claim(worker_id, ("a", "b"), limit)
        assert [claim.task_id for claim in ours] == [claim.task_id for claim in theirs]
        self.claims += [(worker_id, a.task_id, a.token, b.token) for a, b in zip(ours, theirs, strict=True)]

    async def finish(self, index: int) -> None:
        worker_id, task_id, token_a, token_b = self.claims[index]
        ours = await self.memory.finish_and_claim(worker_id, [Finished(task_id, token_a, None)], (), 0)
        theirs = await self.postgres.finish_and_claim(worker_id, [Finished(task_id, token_b, None)], (), 0)
        assert len(ours.lost) == len(theirs.lost)

    async def fail_any(self, rng: Random) -> None:
        if not self.claims:
            return
        worker_id, task_id, token_a, token_b = rng.choice(self.claims)
        jitter = rng.random()
        ours = await self.memory.fail(worker_id, task_id, token_a, "boom", jitter=jitter)
        theirs = await self.postgres.fail(worker_id, task_id, token_b, "boom", jitter=jitter)
        assert ours == theirs

    async def beat(self, worker_id: str, held: bool, vitals: dict[str, Any]) -> None:
        own = [claim for claim in self.claims if claim[0] == worker_id] if held else []
        ours = await self.memory.heartbeat(worker_id, [HeldClaim(c[1], c[2]) for c in own], vitals)
        theirs = await self.postgres.heartbeat(worker_id, [HeldClaim(c[1], c[3]) for c in own], vitals)
        assert (ours.status, ours.is_paused, len(ours.lost)) == (theirs.status, theirs.is_paused, len(theirs.lost))

    async def compare(self) -> None:
        for fleet in ("f", "g"):
            for candidate in (ANN, BOB):
                observed = await self.both("observe", candidate, fleet, FLEET)
                if not isinstance(observed, Standby):
                    self.seen[fleet] = observed
            for cycle in await self.both("cycles", fleet, 3):
                await self.both("cycle", cycle.id)
            await self.both("last_cycle_with", fleet, "w0")
        await self.both("running_tasks")
        await self.both("ready_before", 5)
        await self.both("queues_with_tasks", ("a", "b", "nowhere"))
        await self.both("fleets")
        await self.both("open_accounts")
        for by in ("day", "fleet", "queue", "worker", "task"):
            await self.both("costs", by, datetime(2029, 1, 1, tzinfo=UTC))
        ours, theirs = [await store.events(limit=10_000) for store in (self.memory, self.postgres)]
        assert sorted(map(_telling, ours)) == sorted(map(_telling, theirs))


def quarantine(worker_id: str, since: datetime) -> Fail:
    return Fail(worker_id, "QUARANTINED", "all fails", FailureStreak(worker_id, since, (1, 2), {1: "w1"}))


def _telling(event: Any) -> tuple[str, ...]:
    named = (event.at, event.code, event.reason, event.fleet, event.worker_id, event.task_id)
    return *map(str, named), json.dumps(event.detail, sort_keys=True)


VITALS: list[dict[str, Any]] = [
    {}, {"idle_s": 1.5}, {"vram_total_mb": 4}, {"vram_total_mb": 0}, {"pid": 7}, {"storage_used_bytes": 9}
]  # fmt: skip


async def live(twins: Twins, rng: Random) -> None:
    spawned = [f"w{number}" for number in range(12)]
    names = [*spawned, "hand", "unknown"]
    machines = [f"m{number}" for number in range(5)]

    def name() -> str:
        return rng.choice(names)

    def some_intents() -> tuple[Intent, ...]:
        count = rng.randrange(4)
        pairs = zip(rng.sample(spawned, count), rng.sample(range(6), count), strict=True)
        return tuple(Intent(worker_id, slot, "wanted", 30.0, rng.random() < 0.5) for worker_id, slot in pairs)

    def some_actions() -> tuple[Action, ...]:
        makers: list[Callable[[], Action]] = [
            lambda: Promote(name(), "first heartbeat"),
            lambda: Fail(name(), "X", "broke"),
            lambda: quarantine(name(), twins.clock() - timedelta(seconds=rng.choice([1, 300]))),
            lambda: Requeue(name(), "lost"),
            lambda: Drain(name(), "IDLE", "idle"),
            lambda: Delete(name(), rng.choice([None, *machines]), "X", "x"),
            lambda: Adopt(name(), rng.choice(machines), "found", rng.random() < 0.5),
            lambda: RecordPrice(name(), rng.choice(machines), "known"),
            lambda: Prepare(name(), rng.choice(machines), "it runs"),
            lambda: FailSlot(rng.randrange(5), "too often"),
            lambda: Spawn(rng.randrange(5), "x"),
            lambda: RaiseAlert("A", "alert"),
        ]
        return tuple(rng.choice(makers)() for _ in range(rng.choice([0, 0, 1, 2, 3])))

    def some_outcomes() -> tuple[Outcome, ...]:
        makers: list[Callable[[], Outcome]] = [
            lambda: Created(name(), Machine(rng.choice(machines), "x", MachineState.RUNNING), rng.random() < 0.5),
            lambda: Created(name(), priced(), billing_unit_s=rng.choice([1, 60, 3600])),
            lambda: Deleted(
                name(),
                rng.choice([None, *machines]),
                "D",
                "deleted",
                twins.clock() - timedelta(seconds=rng.randrange(100)),
            ),
            lambda: CreationUnclear(name(), "unclear"),
            lambda: CreationRefused(name(), rng.choice(["REFUSED", "NO_CAPACITY", "LIMIT_REACHED"]), "no"),
            lambda: Deleted(name(), rng.choice([None, *machines]), "D", "deleted"),
            lambda: NotDeleted(name(), "denied"),
            lambda: OrphanDeleted(Machine(rng.choice(machines), name(), MachineState.RUNNING), "orphaned"),
            lambda: OrphanDeleted(replace(priced(), name=name()), "orphaned", 60, twins.clock()),
            lambda: HostKeySeen(name(), rng.choice(machines), rng.choice(["key 1", "key 2"])),
            lambda: Prepared(name(), rng.choice(machines), rng.choice([None, "key 1", "key 2"])),
            lambda: PreparationFailed(name(), rng.choice(machines), "DISK_FULL", "full", "df", rng.choice([None, "k"])),
            lambda: PreparationUnclear(name(), "unclear"),
        ]
        return tuple(rng.choice(makers)() for _ in range(rng.randrange(4)))

    def priced() -> Machine:
        born = rng.choice([None, twins.clock() - timedelta(seconds=rng.randrange(9))])
        price = rng.choice([1, 5_000, 3_600_001])
        return Machine(
            rng.choice(machines), "x", MachineState.RUNNING, born, price_micros_per_hour=price,
            price_parts=rng.choice([(), (PricePart(price, 10_000),), PARTS]), currency=rng.choice([None, "EUR"]),
        )  # fmt: skip

    async def close_accounts() -> None:
        if rng.random() < 0.5:
            twins.clock.advance(3600)
        for fleet in ("f", "g"):
            accounts = await twins.both("accounts_to_settle", fleet, rng.choice([1, 10]))
            closed = [settle(account, twins.clock()) for account in accounts]
            assert await twins.both("settle", closed) == len(closed)

    async def commit() -> None:
        fleet, candidate = rng.choice(["f", "f", "g"]), rng.choice([ANN, ANN, BOB])
        if fleet not in twins.seen:
            return
        term, snapshot = twins.seen[fleet]
        snapshot = replace(snapshot, machines=(priced(), priced()), traits=ProviderTraits(billing_unit_s=3600))
        planner_state = PlannerState(Cadence(cycle=rng.randrange(5)), ScalingState(rng.choice([None, twins.clock()])))
        decided = Plan(some_actions(), planner_state, rng.choice(["no change", "spawn"]))
        committed = await twins.both("commit_plan", candidate, term, snapshot, decided, some_intents())
        if isinstance(committed, Committed):
            twins.cycle_ids.append(committed.cycle_id)

    async def report() -> None:
        fleet = rng.choice(["f", "f", "g"])
        if fleet in twins.seen:
            await twins.both("record_outcomes", fleet, rng.choice(twins.cycle_ids), some_outcomes(), {"n": 1})

    async def work() -> None:
        workers = await twins.both("workers")
        if workers:
            await twins.both("enqueue", NewTask(rng.choice(["a", "b"]), max_attempts=rng.randrange(1, 4)))
            await twins.claim(rng.choice(workers).id, rng.randrange(1, 3))

    async def finish() -> None:
        if twins.claims:
            await twins.finish(rng.randrange(len(twins.claims)))

    async def advance() -> None:
        twins.clock.advance(rng.choice([0.25, 1.0, 10.0, 31.0, 250.0]))

    def vitals() -> dict[str, Any]:
        return rng.choice(VITALS)

    steps: list[Callable[[], Awaitable[Any]]] = [
        commit, commit, commit, report, report, work, work, finish, advance, advance, advance,
        lambda: twins.fail_any(rng),
        lambda: twins.beat(name(), rng.random() < 0.8, vitals()),
        lambda: twins.beat(rng.choice(spawned[:6]), True, vitals()),
        lambda: twins.both("enqueue", NewTask(rng.choice(["a", "b", "c"]), priority=rng.randrange(2))),
        lambda: twins.both("enqueue", NewTask("a", run_after=twins.clock() + timedelta(seconds=rng.randrange(20)))),
        lambda: twins.both("register", Registration(name(), ("a", "b"), fleet=rng.choice(["f", "g"]), concurrency=2)),
        lambda: twins.both("deregister", name(), "left"),
        lambda: twins.both("set_terminating", [name(), name()], "enough"),
        lambda: twins.both("set_paused", [name()], rng.random() < 0.5),
        lambda: twins.both("release_lease", rng.choice([ANN, BOB])),
        lambda: twins.both("acquire_lease", rng.choice([ANN, BOB])),
        lambda: twins.both("restart_slots", rng.choice(["f", "no"]), rng.choice([None, 0, 1])),
        lambda: twins.both("request_workers", rng.choice(["f", "no"]), rng.randrange(-2, 4)),
        lambda: twins.both("pause_fleet", rng.choice(["f", "no"]), rng.random() < 0.3),
        lambda: twins.both("terminate_worker", name(), "by hand"),
        close_accounts,
        close_accounts,
    ]  # fmt: skip
    for _ in range(STEPS):
        await rng.choice(steps)()
        await twins.compare()


@pytest.mark.parametrize("chunk", range(5))
async def test_both_control_stores_agree_on_random_histories(shared_dsn: str, chunk: int) -> None:
    for seed in range(chunk, HISTORIES, 5):
        clock = VirtualClock()
        await execute(shared_dsn, EMPTY)
        async with PostgresStores(shared_dsn, retention=RETENTION, virtual_now=clock) as postgres:
            twins = Twins(MemoryStores(clock, RETENTION, Random(1)), postgres, clock)  # noqa: S311
            try:
                await live(twins, Random(seed))  # noqa: S311
            except AssertionError as error:
                raise AssertionError(f"history {seed}: {error}") from error
