"""The contract of ports/control.py, over memory and over PostgreSQL in the same virtual time.

The last test lets both live through the same random histories and compares everything that can be seen of them.
`WINDLASS_HISTORIES=2000 pytest tests/conformance/test_control_store.py` runs that many.
"""

import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from support.provider_fixtures import set_status_in_memory
from support.stores import PostgresStores
from windlass.cost.ledger import settle
from windlass.model.action import (
    Action,
    Adopt,
    AttemptRefund,
    Delete,
    DeleteOrphan,
    Drain,
    Fail,
    FailSlot,
    GrowVolume,
    Plan,
    Prepare,
    Promote,
    RaiseAlert,
    RecordPrice,
    Requeue,
    Spawn,
)
from windlass.model.config import Retention
from windlass.model.cost import Bill, PricePart, Span, Spending, Tariff
from windlass.model.errors import BadInput, UnknownWorker
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate, LeaseLost, Standby
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
    VolumeGrown,
    VolumeNotGrown,
)
from windlass.model.snapshot import (
    Cadence,
    FailureStreak,
    Hold,
    MachineListState,
    OrphanState,
    PlannerState,
    ProviderRefusal,
    RecentFailure,
    ScalingState,
    Snapshot,
    StorageUse,
)
from windlass.model.task import Finished, NewTask, TaskStatus
from windlass.model.worker import HeldClaim, RecoveredTasks, Registration, WorkerKind, WorkerStatus
from windlass.store import fleets
from windlass.store.memory import fleet_store as memory_fleets
from windlass.store.memory.stores import MemoryStores

HISTORIES = int(os.environ.get("WINDLASS_HISTORIES", "0")) or 15
STEPS = 60
RETENTION = Retention(complete_s=3600, failed_s=7200, events_s=10_800, cycles_s=3600, charges_s=200_000)

ControlStores = MemoryStores | PostgresStores
FLEET = FleetConfig(queues=("a", "b"), min_workers=0, max_workers=4)
ANN = Candidate("ann", ttl_s=30.0)
BOB = Candidate("bob", ttl_s=30.0)
EMPTY = """
truncate windlass.charges, windlass.spending, windlass.attempt_spans;
truncate windlass.tasks, windlass.events, windlass.cycles, windlass.leases, windlass.workers, windlass.slots,
  windlass.fleets restart identity cascade
"""


class VirtualClock:
    def __init__(self) -> None:
        self.now = datetime(2030, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture(scope="session")
def shared_dsn(embedded_server: Any) -> Iterator[str]:
    with embedded_server.migrated_database() as dsn:
        yield dsn


@pytest.fixture(params=["memory", "postgres"])
async def store(request: pytest.FixtureRequest, clock: VirtualClock) -> AsyncIterator[ControlStores]:
    if request.param == "memory":
        yield MemoryStores(clock, RETENTION, Random(1))  # noqa: S311
        return
    dsn = request.getfixturevalue("shared_dsn")
    await execute(dsn, EMPTY)
    async with PostgresStores(dsn, retention=RETENTION, virtual_now=clock) as postgres:
        yield postgres


async def execute(dsn: str, sql: str, *arguments: Any) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(sql, *arguments)
    finally:
        await connection.close()


SetStatus = Callable[[str, WorkerStatus], Awaitable[None]]


@pytest.fixture
def set_status(request: pytest.FixtureRequest, store: ControlStores) -> SetStatus:
    """Past all functions, as a person with psql might."""

    async def set_status(worker_id: str, status: WorkerStatus) -> None:
        if isinstance(store, MemoryStores):
            set_status_in_memory(store, worker_id, status)
            return
        try:
            sql = "update windlass.workers set status = $2 where id = $1"
            await execute(request.getfixturevalue("shared_dsn"), sql, worker_id, status)
        except asyncpg.CheckViolationError as error:
            raise BadInput(str(error)) from None

    return set_status


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

    async def report(self, *outcomes: Outcome, intents: tuple[Intent, ...] = (), cycle_id: int = 1) -> frozenset[str]:
        return await self.store.commit_outcomes(
            self.candidate, self.term, self.fleet, cycle_id, outcomes, intents, {"n": len(outcomes)}
        )

    async def hire(self, *slots: int) -> Committed:
        """Workers w0, w1, ... into these slots."""
        intents = tuple(intent(f"w{slot}", slot) for slot in slots)
        return await self.commit(*(Spawn(slot, "wanted") for slot in slots), intents=intents)


def intent(worker_id: str, slot: int) -> Intent:
    return Intent(worker_id, slot, "wanted", 30.0)


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


@pytest.fixture
async def ann(store: ControlStores) -> Leader:
    leader = Leader(store)
    await leader.observe()
    return leader


async def events(store: ControlStores, worker_id: str | None = None) -> list[str]:
    return [event.code for event in await store.events(worker_id=worker_id, limit=1000)]


# ------------------------------------------------------------------------------------------------------- leadership


async def test_the_first_to_ask_leads_and_others_learn_for_how_long(store: ControlStores, clock: VirtualClock) -> None:
    assert await store.acquire_lease(ANN) == 1
    clock.advance(10)
    assert await store.acquire_lease(BOB) == Standby(20.0, clock())
    assert await store.observe(BOB, "f", FLEET) == Standby(20.0, clock())


async def test_a_renewed_lease_keeps_its_term(store: ControlStores, clock: VirtualClock) -> None:
    assert await store.acquire_lease(ANN) == 1
    clock.advance(29)
    assert await store.acquire_lease(ANN) == 1
    clock.advance(29)
    assert await store.acquire_lease(BOB) == Standby(1.0, clock())


async def test_a_lease_that_ran_out_goes_to_the_next_with_a_new_term(store: ControlStores, clock: VirtualClock) -> None:
    assert await store.acquire_lease(ANN) == 1
    clock.advance(30)
    assert await store.acquire_lease(BOB) == 2
    assert await store.acquire_lease(ANN) == Standby(30.0, clock())
    clock.advance(30)
    assert await store.acquire_lease(ANN) == 3


async def test_a_lease_that_was_given_up_need_not_run_out(store: ControlStores) -> None:
    assert await store.acquire_lease(ANN) == 1
    await store.release_lease(BOB)
    assert isinstance(await store.acquire_lease(BOB), Standby)
    await store.release_lease(ANN)
    assert await store.acquire_lease(BOB) == 2


async def test_leases_of_different_names_do_not_disturb_each_other(store: ControlStores) -> None:
    assert await store.acquire_lease(ANN) == 1
    assert await store.acquire_lease(replace(BOB, lease="other")) == 1


async def lose_by_time(store: ControlStores, clock: VirtualClock) -> None:
    clock.advance(30)


async def lose_to_another(store: ControlStores, clock: VirtualClock) -> None:
    clock.advance(30)
    assert await store.acquire_lease(BOB) == 2


async def lose_and_win_back(store: ControlStores, clock: VirtualClock) -> None:
    await lose_to_another(store, clock)
    clock.advance(30)
    assert await store.acquire_lease(ANN) == 3


async def lose_by_resigning(store: ControlStores, clock: VirtualClock) -> None:
    await store.release_lease(ANN)


LOSSES = [lose_by_time, lose_to_another, lose_and_win_back, lose_by_resigning]


@pytest.mark.parametrize("lose", LOSSES)
async def test_a_plan_of_a_lost_lease_changes_nothing(
    store: ControlStores, clock: VirtualClock, ann: Leader, lose: Callable[..., Awaitable[None]]
) -> None:
    await ann.hire(0)
    await ann.observe()
    await lose(store, clock)
    before = await store.events(limit=1000), await store.workers(), await store.cycles("f"), await store.fleets()
    with pytest.raises(LeaseLost):
        await ann.commit(
            Promote("w0", "heard"),
            Drain("w0", "IDLE", "idle"),
            RaiseAlert("X", "x"),
            intents=(intent("w1", 1),),
            planner_state=PlannerState(Cadence(cycle=9)),
        )
    after = await store.events(limit=1000), await store.workers(), await store.cycles("f"), await store.fleets()
    assert after == before


@pytest.mark.parametrize("lose", LOSSES)
async def test_facts_are_written_down_though_the_lease_is_lost_and_hirings_are_not(
    store: ControlStores, clock: VirtualClock, ann: Leader, lose: Callable[..., Awaitable[None]]
) -> None:
    await ann.hire(0, 1)
    await lose(store, clock)
    with pytest.raises(LeaseLost):
        await ann.report(Created("w0", machine(1)), Deleted("w1", None, "X", "gone"), intents=(intent("w9", 2),))
    view = (await Leader(store, replace(ANN, lease="aside")).observe()).workers
    assert [(worker.id, worker.machine_id) for worker in view] == [("w0", "m1")]


@pytest.mark.parametrize("lose", LOSSES)
async def test_facts_alone_need_no_lease(
    store: ControlStores, clock: VirtualClock, ann: Leader, lose: Callable[..., Awaitable[None]]
) -> None:
    await ann.hire(0)
    await lose(store, clock)
    assert await ann.report(Deleted("w0", None, "X", "gone")) == frozenset()
    assert (await store.worker("w0")).status is WorkerStatus.TERMINATED


# ---------------------------------------------------------------------------------------------------------- observe


async def test_the_first_observation_of_a_fleet_is_empty_and_makes_it_known(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    assert ann.snapshot == Snapshot(now=clock(), fleet="f")
    (fleet,) = await store.fleets()
    assert (fleet.name, fleet.provider, fleet.queues, fleet.min_workers, fleet.max_workers) == (
        "f", "local", ("a", "b"), 0, 4,
    )  # fmt: skip
    assert (fleet.is_paused, fleet.requested_workers, fleet.hold, fleet.failed_slots) == (False, 0, None, ())
    await ann.observe(FleetConfig(queues=("c",), min_workers=1, max_workers=2))
    (fleet,) = await store.fleets()
    assert (fleet.queues, fleet.min_workers, fleet.max_workers) == (("c",), 1, 2)


async def test_a_worker_is_seen_with_everything_it_said_and_has(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    created_at = clock()
    await ann.hire(0)
    await ann.report(Created("w0", machine(1)))
    machine_at = clock()
    clock.advance(5)
    await store.register(Registration("w0", ("a", "b"), fleet="f", concurrency=2))
    clock.advance(5)
    await store.heartbeat("w0", (), {"vram_total_mb": 100, "vram_used_mb": 7, "idle_s": 2.5})
    heard_at = clock()
    await ann.observe()
    await ann.commit(Promote("w0", "heard"))
    activated_at = clock()
    first = await store.enqueue(NewTask("a", timeout_s=9.0))
    second = await store.enqueue(NewTask("b"))
    await store.enqueue(NewTask("a"))
    clock.advance(1)
    assert len(await store.claim("w0", ("a", "b"), 1)) == 1
    claimed_at = clock()
    clock.advance(1)
    await store.claim("w0", ("b",), 1)
    await ann.observe()
    (view,) = ann.snapshot.workers
    assert (view.id, view.slot, view.status, view.is_paused, view.concurrency) == ("w0", 0, "active", False, 2)
    assert (view.created_at, view.activated_at, view.last_heartbeat) == (created_at, activated_at, heard_at)
    assert (view.first_claimed_at, view.terminating_at, view.idle_s) == (claimed_at, None, 2.5)
    assert (view.machine_id, view.machine_at, view.creation) == ("m1", machine_at, "created")
    assert view.prepared_at == machine_at, "its machine starts the worker's program by itself"
    assert (view.vram_total_mb, view.vram_used_mb, view.vram_at) == (100, 7, heard_at)
    assert [(task.task_id, task.started_at, task.timeout_s) for task in view.running] == [
        (first, claimed_at, 9.0),
        (second, clock(), None),
    ]
    assert (view.code, view.reason) == (None, None)
    assert ann.snapshot.boot_p50_s == 10.0


async def test_since_when_a_gpu_is_gone_that_was_there_is_counted_from_the_first_word_of_it_without_a_break(
    store: ControlStores, ann: Leader, clock: Any
) -> None:
    await ann.hire(0)
    await store.register(Registration("w0", ("a",), fleet="f"))

    async def lost_after(**vitals: int | None) -> datetime | None:
        clock.advance(5)
        await store.heartbeat("w0", (), vitals)
        (view,) = (await ann.observe()).workers
        return view.vram_lost_at

    assert await lost_after(pid=7) is None
    assert await lost_after(vram_total_mb=0, vram_used_mb=0) is None, "it has never had any"
    assert await lost_after(vram_total_mb=0, vram_used_mb=0) is None
    assert await lost_after(vram_total_mb=100, vram_used_mb=7) is None
    assert await lost_after(vram_total_mb=0, vram_used_mb=0) == (gone_at := clock())
    assert await lost_after(vram_total_mb=0, vram_used_mb=0) == gone_at
    assert await lost_after(pid=7) == gone_at, "no word changes nothing"
    assert await lost_after(vram_total_mb=None) == gone_at
    assert await lost_after(vram_total_mb=100, vram_used_mb=7) is None
    assert await lost_after(vram_total_mb=0, vram_used_mb=0) == clock()


async def test_workers_of_other_fleets_and_terminated_ones_are_not_seen(store: ControlStores, ann: Leader) -> None:
    other = Leader(store, ANN, "g")
    await other.observe()
    await other.commit(Spawn(0, "x"), intents=(intent("g0", 0),))
    await ann.hire(0, 1)
    await ann.report(Deleted("w0", None, "X", "gone"))
    assert [worker.id for worker in (await ann.observe()).workers] == ["w1"]


async def test_a_worker_started_by_hand_is_seen_in_its_fleet(store: ControlStores, ann: Leader) -> None:
    await store.register(Registration("hand", ("a",), fleet="f"))
    (view,) = (await ann.observe()).workers
    assert (view.id, view.slot, view.status, view.machine_id) == ("hand", None, "active", None)


async def test_what_waits_and_runs_in_its_queues_is_counted(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await store.register(Registration("hand", ("a",), fleet="g"))
    for _ in range(3):
        await store.enqueue(NewTask("a"))
    clock.advance(2)
    await store.enqueue(NewTask("b", priority=5))
    await store.enqueue(NewTask("b", run_after=clock() + timedelta(seconds=10)))
    await store.enqueue(NewTask("elsewhere"))
    (claim,) = await store.claim("hand", ("a",), 1)
    clock.advance(4)
    queue = (await ann.observe()).queue
    assert (queue.queued, queue.running, queue.oldest_queued_age_s, queue.duration_p50_s) == (3, 1, 6.0, None)
    await store.finish_and_claim("hand", [Finished(claim.task_id, claim.token, None)], (), 0)
    clock.advance(6)
    queue = (await ann.observe()).queue
    assert (queue.queued, queue.running, queue.oldest_queued_age_s, queue.duration_p50_s) == (4, 0, 12.0, 4.0)


async def test_a_fleet_is_told_since_when_what_waits_could_have_been_claimed(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await store.register(Registration("hand", ("a",), fleet="g"))
    await store.enqueue(NewTask("a"))
    await store.enqueue(NewTask("a"))
    (claim, _) = await store.claim("hand", ("a",), 2)
    clock.advance(60)
    await store.release("hand", claim.task_id, claim.token, "no room")
    await store.enqueue(NewTask("a", run_after=clock() + timedelta(seconds=1)))
    clock.advance(2)
    assert (await ann.observe()).queue.oldest_queued_age_s == 2.0


async def test_a_task_that_was_put_back_a_moment_ago_hides_none_that_wait_behind_it(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await store.register(Registration("hand", ("a",), fleet="g"))
    for _ in range(3):
        await store.enqueue(NewTask("a"))
    (claim,) = await store.claim("hand", ("a",), 1)
    clock.advance(60)
    await store.release("hand", claim.task_id, claim.token, "no room")
    assert (await ann.observe()).queue.oldest_queued_age_s == 60.0


async def test_a_retry_whose_time_has_come_waits(store: ControlStores, clock: VirtualClock, ann: Leader) -> None:
    await store.register(Registration("hand", ("a",), fleet="g"))
    await store.enqueue(NewTask("a"))
    (claim,) = await store.claim("hand", ("a",), 1)
    await store.fail("hand", claim.task_id, claim.token, "oh", jitter=0.0)
    assert (await ann.observe()).queue.queued == 0
    clock.advance(5)
    assert (await ann.observe()).queue.queued == 1


async def test_the_median_duration_lies_between_neighbours(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await store.register(Registration("hand", ("a",), fleet="g"))
    for duration_s in (1.0, 9.0, 2.0, 4.5):
        await store.enqueue(NewTask("a"))
        (claim,) = await store.claim("hand", ("a",), 1)
        clock.advance(duration_s)
        await store.finish_and_claim("hand", [Finished(claim.task_id, claim.token, None)], (), 0)
    await store.enqueue(NewTask("a", max_attempts=1))
    (claim,) = await store.claim("hand", ("a",), 1)
    clock.advance(100)
    await store.fail("hand", claim.task_id, claim.token, "failures say nothing")
    assert (await ann.observe()).queue.duration_p50_s == 3.25


async def test_a_busy_queue_does_not_hide_how_long_the_tasks_of_another_take(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await store.register(Registration("hand", ("a", "elsewhere"), fleet="g", concurrency=1000))
    await store.enqueue(NewTask("a"))
    (claim,) = await store.claim("hand", ("a",), 1)
    clock.advance(7)
    await store.finish_and_claim("hand", [Finished(claim.task_id, claim.token, None)], (), 0)
    await store.enqueue_many([NewTask("elsewhere")] * 600)
    busy = await store.claim("hand", ("elsewhere",), 600)
    clock.advance(1)
    await store.finish_and_claim("hand", [Finished(claim.task_id, claim.token, None) for claim in busy], (), 0)
    assert (len(busy), (await ann.observe()).queue.duration_p50_s) == (600, 7.0)


async def test_hirings_of_the_window_are_seen_and_those_that_broke_in_it(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await ann.hire(0, 1)
    first = clock()
    await ann.report(Deleted("w1", None, "X", "gone"))
    clock.advance(200)
    await ann.observe()
    await ann.hire(1, 2)
    second = clock()
    assert [(hiring.at, hiring.has_failed) for hiring in (await ann.observe()).launches] == [
        (first, False), (first, False), (second, False),
    ]  # fmt: skip
    clock.advance(200)
    await ann.observe()
    # Hired before the window, found broken in it.
    await ann.commit(Fail("w0", "SPAWNING_TIMEOUT", "too slow"), Fail("w2", "SPAWNING_TIMEOUT", "too slow"))
    assert [(hiring.at, hiring.has_failed) for hiring in (await ann.observe()).launches] == [
        (first, True), (second, True),
    ]  # fmt: skip
    clock.advance(299)
    assert len((await ann.observe()).launches) == 2
    clock.advance(1)
    assert (await ann.observe()).launches == ()


async def test_a_slot_remembers_restarts_within_the_window(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await ann.hire(0, 1)
    await ann.commit(Fail("w0", "CRASHED", "x"))
    broke_at = clock()
    (slot,) = (await ann.observe()).slots
    assert (slot.slot, slot.is_failed, slot.restarts) == (0, False, (broke_at,))
    clock.advance(FLEET.restart_window_s)
    assert (await ann.observe()).slots == ()
    await ann.commit(FailSlot(0, "too often"))
    (slot,) = (await ann.observe()).slots
    assert (slot.slot, slot.is_failed, slot.restarts) == (0, True, ())
    assert (await store.fleets())[0].failed_slots == (0,)


async def test_tasks_in_the_name_of_the_dead_are_seen_as_orphaned(
    store: ControlStores, clock: VirtualClock, ann: Leader, set_status: SetStatus
) -> None:
    for worker_id in ("broken", "gone", "well"):
        await store.register(Registration(worker_id, ("a",), fleet="f"))
    await store.register(Registration("stranger", ("a",), fleet="g"))
    for worker_id in ("broken", "gone", "well", "stranger"):
        await store.enqueue(NewTask("a"))
        await store.claim(worker_id, ("a",), 1)
    # As a claim does that was under way when its worker ended.
    await set_status("gone", WorkerStatus.TERMINATED)
    await set_status("broken", WorkerStatus.ERROR)
    await set_status("stranger", WorkerStatus.ERROR)
    assert (await ann.observe()).orphaned == ("broken", "gone")
    await ann.commit(Requeue("gone", "worker gone is no longer live"))
    assert (await ann.observe()).orphaned == ("broken",)


async def test_planner_state_round_trips(store: ControlStores, clock: VirtualClock, ann: Leader) -> None:
    planner_state = PlannerState(
        cadence=Cadence(cycle=7, gaps_s=(1.25, 60.0)),
        scaling=ScalingState(spawned_at=clock(), over_capacity_since=clock()),
        machines=MachineListState(missing_since={"w0": clock()}),
        orphans=OrphanState(orphan_since={"m0": clock() - timedelta(microseconds=1)}),
        hold=Hold("X", "because: ü", clock(), is_total=True),
    )
    await ann.commit(planner_state=planner_state)
    assert (await ann.observe()).planner_state == planner_state
    assert (await store.fleets())[0].hold == planner_state.hold
    await ann.commit(planner_state=replace(planner_state, hold=None))
    assert (await ann.observe()).planner_state.hold is None
    assert (await store.fleets())[0].hold is None


# ------------------------------------------------------------------------------------------------------ commit_plan


async def test_promoting_makes_a_spawning_worker_active_once(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await ann.hire(0)
    clock.advance(3)
    await ann.commit(Promote("w0", "heard"))
    worker = await store.worker("w0")
    assert (worker.status, worker.activated_at) == (WorkerStatus.ACTIVE, clock())
    activated_at = clock()
    clock.advance(3)
    await ann.commit(Promote("w0", "heard"), Promote("nobody", "heard"))
    assert (await store.worker("w0")).activated_at == activated_at
    assert await events(store, "w0") == ["WORKER_SPAWNED", "WORKER_ACTIVATED"]


async def test_failing_gives_tasks_to_others_and_counts_for_the_slot(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await ann.hire(0)
    await store.register(Registration("w0", ("a",), fleet="f", concurrency=2))
    again = await store.enqueue(NewTask("a"))
    over = await store.enqueue(NewTask("a", max_attempts=1))
    claims = await store.claim("w0", ("a",), 2)
    committed = await ann.commit(Fail("w0", "CRASHED", "it crashed"))
    assert committed.requeued == 2
    assert (await store.task(again)).status is TaskStatus.QUEUED
    assert (await store.task(over)).status is TaskStatus.FAILED
    worker = await store.worker("w0")
    assert (worker.status, worker.code, worker.reason) == (WorkerStatus.ERROR, "CRASHED", "it crashed")
    turn = await store.finish_and_claim("w0", [Finished(c.task_id, c.token, "1") for c in claims], (), 0)
    assert len(turn.lost) == 2
    snapshot = await ann.observe()
    assert [slot.restarts for slot in snapshot.slots] == [(clock(),)]
    assert [hiring.has_failed for hiring in snapshot.launches] == [True]
    assert (await ann.commit(Fail("w0", "AGAIN", "again"))).requeued == 0
    assert (await store.worker("w0")).code == "CRASHED"


async def test_a_worker_that_broke_keeps_its_slot(store: ControlStores, ann: Leader) -> None:
    await ann.hire(0)
    await ann.commit(Fail("w0", "CRASHED", "x"))
    assert (await ann.commit(intents=(intent("again", 0),))).granted == frozenset()


async def test_draining_asks_a_worker_to_end_and_notes_since_when(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await ann.hire(0)
    clock.advance(2)
    await ann.commit(Drain("w0", "IDLE", "idle 41 s"))
    drained_at = clock()
    clock.advance(2)
    await ann.commit(Drain("w0", "OTHER", "again"))
    (view,) = (await ann.observe()).workers
    assert (view.status, view.terminating_at, view.code, view.reason) == (
        "terminating", drained_at, "IDLE", "idle 41 s",
    )  # fmt: skip
    assert (await store.heartbeat("w0")).status is WorkerStatus.TERMINATING
    assert await events(store, "w0") == ["WORKER_SPAWNED", "WORKER_TERMINATING"]


async def test_adopting_gives_a_worker_the_machine_that_was_found(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await ann.hire(0)
    await ann.observe()
    ann.snapshot = replace(ann.snapshot, machines=(machine(1), machine(2)), traits=ProviderTraits())
    clock.advance(4)
    await ann.commit(Adopt("w0", "m1", "found"))
    await ann.commit(Adopt("w0", "m2", "found"))
    (view,) = (await ann.observe()).workers
    assert (view.machine_id, view.machine_at, view.creation) == ("m1", clock(), "created")
    assert view.prepared_at == clock()
    worker = await store.worker("w0")
    assert (worker.machine_id, worker.instance_type, worker.place) == ("m1", "tiny", "nbg1")


async def test_a_machine_that_must_be_prepared_first_is_not_prepared(store: ControlStores, ann: Leader) -> None:
    await ann.hire(0, 1)
    await ann.report(Created("w0", machine(1), is_prepared=False))
    await ann.commit(Adopt("w1", "m2", "found", is_prepared=False))
    assert [view.prepared_at for view in (await ann.observe()).workers] == [None, None]


async def test_a_preparation_is_written_down_before_and_after(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await ann.hire(0)
    await ann.report(Created("w0", machine(1), is_prepared=False))
    began_at = clock()
    await ann.commit(Prepare("w0", "m1", "it runs"))
    clock.advance(5)
    await ann.commit(Prepare("w0", "m1", "it runs"))
    await ann.report(PreparationUnclear("w0", "the connection broke"))
    (view,) = (await ann.observe()).workers
    assert (view.preparing_at, view.prepared_at, view.host_key) == (began_at, None, None)
    await ann.report(Prepared("w0", "m2", "not its machine"))
    await ann.report(Prepared("w0", "m1", "ssh-ed25519 AAAA"))
    done_at = clock()
    clock.advance(5)
    await ann.report(Prepared("w0", "m1", "another"), PreparationFailed("w0", "m1", "DISK_FULL", "too late"))
    (view,) = (await ann.observe()).workers
    assert (view.prepared_at, view.prepare_code, view.host_key) == (done_at, None, "ssh-ed25519 AAAA")
    told = ["WORKER_SPAWNED", "MACHINE_PREPARING", "PREPARATION_UNCLEAR", "MACHINE_PREPARED"]
    assert await events(store, "w0") == told


async def test_whoever_answers_first_on_a_machine_is_remembered_before_it_is_prepared(
    store: ControlStores, ann: Leader
) -> None:
    await ann.hire(0)
    await ann.report(Created("w0", machine(1), is_prepared=False))
    before = await events(store, "w0")
    await ann.report(HostKeySeen("w0", "m2", "not its machine"))
    await ann.report(HostKeySeen("w0", "m1", "ssh-ed25519 AAAA"))
    await ann.report(HostKeySeen("w0", "m1", "another"), Prepared("w0", "m1", "another"))
    (view,) = (await ann.observe()).workers
    assert view.host_key == "ssh-ed25519 AAAA"
    assert await events(store, "w0") == [*before, "MACHINE_PREPARED"]


async def test_a_preparation_that_failed_says_which_check_and_what_was_said(store: ControlStores, ann: Leader) -> None:
    await ann.hire(0)
    await ann.report(Created("w0", machine(1), is_prepared=False))
    failed = PreparationFailed("w0", "m1", "GPU_NOT_DETECTED", "no GPU answers", "No devices were found", "key")
    await ann.report(failed)
    await ann.report(replace(failed, code="DISK_FULL"))
    (view,) = (await ann.observe()).workers
    assert (view.status, view.prepared_at) == ("spawning", None)
    assert (view.prepare_code, view.prepare_reason, view.host_key) == ("GPU_NOT_DETECTED", "no GPU answers", "key")
    (event,) = [event for event in await store.events(limit=1000) if event.code == "PREPARATION_FAILED"]
    assert event.detail == {"code": "GPU_NOT_DETECTED", "output": "No devices were found"}


async def test_a_worker_that_is_heard_was_prepared_whatever_anybody_says(store: ControlStores, ann: Leader) -> None:
    await ann.hire(0)
    await ann.report(Created("w0", machine(1), is_prepared=False))
    await store.heartbeat("w0")
    await ann.report(PreparationFailed("w0", "m1", "SSH_UNREACHABLE", "nobody answers"))
    (view,) = (await ann.observe()).workers
    assert view.prepare_code is None


async def test_a_failed_slot_and_an_alert_are_noted(store: ControlStores, ann: Leader) -> None:
    await ann.hire(0)
    await ann.commit(FailSlot(0, "too often"), RaiseAlert("SLOT_FAILED", "slot 0 is failed", "w0", "0"))
    told = {event.code: event for event in await store.events(limit=1000)}
    assert (told["SLOT_FAILED"].reason, told["SLOT_FAILED"].detail) == ("too often", {"slot": 0})
    assert (told["ALERT"].worker_id, told["ALERT"].detail) == ("w0", {"code": "SLOT_FAILED", "about": "0"})


async def test_what_a_provider_must_do_first_changes_no_worker(store: ControlStores, ann: Leader) -> None:
    await ann.hire(0)
    before = await store.workers()
    await ann.commit(Delete("w0", "m0", "X", "x"), DeleteOrphan("m9", "w9", "x"), Spawn(1, "x"))
    assert await store.workers() == before


# ---------------------------------------------------------------------------------------------------------- intents


async def test_intents_get_free_slots_below_the_maximum_only(store: ControlStores, ann: Leader) -> None:
    committed = await ann.commit(
        intents=(intent("x3", 3), intent("x4", 4), intent("x0", 0), intent("twin", 0), intent("x99", 99))
    )
    assert committed.granted == {"x3", "x0"}
    assert (await ann.commit(intents=(intent("y0", 0), intent("y1", 1)))).granted == {"y1"}


async def test_an_intent_is_granted_once(store: ControlStores, ann: Leader) -> None:
    await ann.hire(0)
    await ann.report(Deleted("w0", None, "X", "gone"))
    assert (await ann.commit(intents=(intent("w0", 0),))).granted == frozenset()


async def test_a_failed_slot_is_never_filled_until_it_is_restarted(store: ControlStores, ann: Leader) -> None:
    await ann.hire(0)
    await ann.commit(FailSlot(0, "too often"))
    await ann.report(Deleted("w0", None, "X", "gone"))
    assert (await ann.commit(intents=(intent("y0", 0),))).granted == frozenset()
    assert await ann.report(intents=(intent("y0", 0),)) == frozenset()
    assert await store.restart_slots("f", 0) == 1
    assert (await ann.commit(intents=(intent("y0", 0),))).granted == {"y0"}


async def test_workers_beyond_a_smaller_maximum_count(store: ControlStores, ann: Leader) -> None:
    await ann.hire(1, 2, 3)
    await ann.observe(FleetConfig(queues=("a",), min_workers=0, max_workers=3))
    await ann.report(Deleted("w1", None, "X", "gone"))
    # Two are left, one of them in a slot that is no more: there is room for one.
    assert (await ann.commit(intents=(intent("y0", 0), intent("y1", 1)))).granted == {"y0"}


async def test_a_hired_worker_takes_queues_and_pause_from_its_fleet(store: ControlStores, ann: Leader) -> None:
    await store.pause_fleet("f", True)
    await ann.commit(intents=(Intent("w0", 0, "wanted", 12.5),))
    worker = await store.worker("w0")
    assert (worker.fleet, worker.slot, worker.status) == ("f", 0, WorkerStatus.SPAWNING)
    assert (worker.queues, worker.is_paused, worker.lease_s) == (("a", "b"), True, 12.5)
    (hired,) = await store.events(worker_id="w0")
    assert (hired.code, hired.reason, hired.fleet, hired.detail) == ("WORKER_SPAWNED", "wanted", "f", {"slot": 0})


async def test_outcomes_free_slots_for_the_intents_that_come_with_them(store: ControlStores, ann: Leader) -> None:
    await ann.hire(0, 1)
    granted = await ann.report(Deleted("w0", None, "X", "gone"), intents=(intent("y0", 0), intent("y1", 1)))
    assert granted == {"y0"}


# --------------------------------------------------------------------------------------------------------- outcomes


async def test_a_created_machine_is_known_from_then_on(store: ControlStores, clock: VirtualClock, ann: Leader) -> None:
    await ann.hire(0)
    clock.advance(2)
    await ann.report(Created("w0", machine(1)))
    known_at = clock()
    clock.advance(2)
    await ann.report(Created("w0", machine(1)), Created("w0", machine(2)), CreationUnclear("w0", "late word"))
    (view,) = (await ann.observe()).workers
    assert (view.machine_id, view.machine_at, view.creation) == ("m1", known_at, "created")
    worker = await store.worker("w0")
    assert (worker.machine_id, worker.instance_type, worker.place) == ("m1", "tiny", "nbg1")


async def test_an_unclear_creation_keeps_its_slot(store: ControlStores, ann: Leader) -> None:
    await ann.hire(0)
    await ann.report(CreationUnclear("w0", "no answer"))
    (view,) = (await ann.observe()).workers
    assert (view.status, view.creation, view.machine_id) == ("spawning", "ambiguous", None)
    assert "MACHINE_AMBIGUOUS" in await events(store, "w0")


@pytest.mark.parametrize(("code", "is_failure"), [("REFUSED", True), ("NO_CAPACITY", False), ("LEASE_LOST", False)])
async def test_a_refused_creation_is_over_and_only_a_plain_no_is_a_failure(
    store: ControlStores, ann: Leader, code: str, is_failure: bool
) -> None:
    await ann.hire(0)
    await ann.report(CreationRefused("w0", code, "said no"))
    worker = await store.worker("w0")
    assert (worker.status, worker.code, worker.reason) == (WorkerStatus.TERMINATED, code, "said no")
    snapshot = await ann.observe()
    assert [hiring.has_failed for hiring in snapshot.launches] == [is_failure]
    assert snapshot.slots == ()
    assert (await ann.commit(intents=(intent("y0", 0),))).granted == {"y0"}


@pytest.mark.parametrize("meanwhile", [Fail("w0", "SPAWNING_TIMEOUT", "x"), Drain("w0", "MANUAL", "x")])
async def test_a_refusal_ends_a_worker_that_was_given_up_meanwhile(
    store: ControlStores, ann: Leader, meanwhile: Action
) -> None:
    await ann.hire(0)
    await ann.commit(meanwhile)
    await ann.report(CreationRefused("w0", "NO_CAPACITY", "said no"))
    assert (await store.worker("w0")).status is WorkerStatus.TERMINATED


@pytest.mark.parametrize("code", ["LIMIT_REACHED", "DENIED", "INVALID_REQUEST", "NO_CAPACITY", "PROVIDER_PAUSE"])
async def test_a_refusal_of_the_whole_fleet_is_seen_until_a_machine_was_had_after_it(
    clock: VirtualClock, ann: Leader, code: str
) -> None:
    assert (await ann.observe()).refusal is None
    await ann.hire(0, 1, 2, 3)
    clock.advance(5)
    refused_at = clock()
    await ann.report(CreationRefused("w0", code, "said no"))
    await ann.report(Created("w1", machine(1, "w1")))  # at the same moment, so it may have come first
    clock.advance(5)
    await ann.report(CreationRefused("w2", "REFUSED", "a plain no is about one machine"))
    assert (await ann.observe()).refusal == ProviderRefusal(code, "said no", refused_at)
    await ann.report(Created("w3", machine(3, "w3")))
    assert (await ann.observe()).refusal is None


async def test_of_refusals_at_the_same_moment_the_one_hired_last_is_seen(ann: Leader) -> None:
    await ann.hire(0, 1)
    await ann.report(CreationRefused("w0", "DENIED", "zero"), CreationRefused("w1", "DENIED", "one"))
    refusal = (await ann.observe()).refusal
    assert refusal is not None
    assert refusal.reason == "one"


async def test_a_machine_that_was_found_outweighs_a_refusal(store: ControlStores, ann: Leader) -> None:
    await ann.hire(0)
    await ann.commit(Adopt("w0", "m1", "found"))
    await ann.report(CreationRefused("w0", "REFUSED", "said no"))
    (view,) = (await ann.observe()).workers
    assert (view.status, view.machine_id) == ("spawning", "m1")


async def test_a_deleted_worker_is_terminated_and_what_it_had_goes_to_others(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await ann.hire(0)
    task_id = await store.enqueue(NewTask("a"))
    await store.claim("w0", ("a",), 1)
    await ann.commit(Drain("w0", "IDLE", "idle"))
    await ann.report(Deleted("w0", None, "DRAIN_TIMEOUT", "still at work"))
    worker = await store.worker("w0")
    assert (worker.status, worker.terminated_at, worker.code) == (WorkerStatus.TERMINATED, clock(), "IDLE")
    task = await store.task(task_id)
    assert (task.status, task.error_code) == (TaskStatus.QUEUED, "DRAIN_TIMEOUT")
    before = await events(store)
    await ann.report(Deleted("w0", None, "X", "x"), Deleted("nobody", None, "X", "x"))
    assert await events(store) == before


@pytest.mark.parametrize(
    ("known", "deleted", "is_over"),
    [
        pytest.param(None, None, True, id="never had one"),
        pytest.param(None, "m1", True, id="found and deleted before it was known"),
        pytest.param("m1", "m1", True, id="its own is gone"),
        pytest.param("m1", None, False, id="got one since it was said to have none"),
        pytest.param("m2", "m1", False, id="has another one"),
    ],
)
async def test_the_end_of_a_machine_ends_only_the_worker_that_has_no_other(
    store: ControlStores, ann: Leader, known: str | None, deleted: str | None, is_over: bool
) -> None:
    """Facts are written down whoever reports them: a leader of old may speak of what was so then."""
    await ann.hire(0)
    if known is not None:
        await ann.report(Created("w0", machine(int(known[1:]))))
    task_id = await store.enqueue(NewTask("a"))
    await store.claim("w0", ("a",), 1)
    await ann.report(Deleted("w0", deleted, "X", "x"))
    assert ((await store.worker("w0")).status is WorkerStatus.TERMINATED) is is_over
    assert ((await store.task(task_id)).status is TaskStatus.QUEUED) is is_over


async def test_what_could_not_be_deleted_and_strays_are_noted_and_change_nothing(
    store: ControlStores, ann: Leader
) -> None:
    await ann.hire(0)
    before = await store.workers()
    await ann.report(NotDeleted("w0", "denied"), OrphanDeleted(Machine("m7", "w7", MachineState.RUNNING), "nobody's"))
    assert await store.workers() == before
    assert await events(store, "w0") == ["WORKER_SPAWNED", "MACHINE_NOT_DELETED"]
    assert await events(store, "w7") == ["ORPHAN_DELETED"]


# ------------------------------------------------------------------------------------------------------ transitions

LIFE = [
    WorkerStatus.SPAWNING,
    WorkerStatus.ACTIVE,
    WorkerStatus.TERMINATING,
    WorkerStatus.ERROR,
    WorkerStatus.TERMINATED,
]


@pytest.mark.parametrize("before", LIFE)
async def test_a_workers_status_moves_only_along_its_life(
    store: ControlStores, ann: Leader, set_status: SetStatus, before: WorkerStatus
) -> None:
    for number, after in enumerate(LIFE):
        worker_id = f"w{before}{number}"
        await ann.commit(intents=(intent(worker_id, 0),))
        await set_status(worker_id, before)
        if LIFE.index(after) < LIFE.index(before):
            with pytest.raises(BadInput, match=f"cannot change from {before} to {after}"):
                await set_status(worker_id, after)
            assert (await store.worker(worker_id)).status is before
        else:
            await set_status(worker_id, after)
            assert (await store.worker(worker_id)).status is after
        await set_status(worker_id, WorkerStatus.TERMINATED)


# ----------------------------------------------------------------------------------------------------------- cycles


async def test_a_cycle_is_stored_with_what_it_saw_and_decided(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await store.enqueue(NewTask("a"))
    await ann.observe()
    ann.snapshot = replace(
        ann.snapshot,
        machines=(replace(machine(1), created_at=clock(), note="x"),),
        listed_at=clock() - timedelta(seconds=1.5),
        traits=ProviderTraits(1.0, 2.0, 3.0),
    )
    actions: tuple[Action, ...] = (
        Promote("a", "heard"),
        Fail("b", "X", "x"),
        Requeue("c", "x"),
        Drain("d", "IDLE", "idle"),
        Delete("e", None, "X", "x"),
        Adopt("f", "m1", "found"),
        DeleteOrphan("m2", "g", "x"),
        FailSlot(0, "x"),
        Spawn(1, "x"),
        RaiseAlert("Y", "y"),
    )
    committed = await ann.commit(*actions, decision="hiring 1: 1 waiting")
    stored = await store.cycle(committed.cycle_id)
    assert stored.snapshot == ann.snapshot
    assert stored.cycle.actions == actions
    assert (stored.cycle.fleet, stored.cycle.term, stored.cycle.started_at) == ("f", 1, clock())
    assert (stored.cycle.decision, stored.cycle.repeats) == ("hiring 1: 1 waiting", 0)
    assert (stored.cycle.finished_at, stored.cycle.summary) == (None, None)
    clock.advance(2)
    await ann.report(Deleted("e", None, "X", "x"), cycle_id=committed.cycle_id)
    (cycle,) = await store.cycles("f")
    assert cycle == (await store.cycle(committed.cycle_id)).cycle
    assert (cycle.finished_at, cycle.summary) == (clock(), {"n": 1})
    assert await store.cycles("other") == []
    assert await store.cycle(99_999) is None


async def test_a_cycle_that_asks_nothing_of_a_provider_is_finished_at_once(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    committed = await ann.commit(RaiseAlert("X", "x"))
    assert (await store.cycle(committed.cycle_id)).cycle.finished_at == clock()


async def test_cycles_that_do_nothing_and_say_the_same_are_counted(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    first = (await ann.commit(decision="steady")).cycle_id
    for _ in range(2):
        clock.advance(10)
        await ann.observe()
        assert (await ann.commit(decision="steady", planner_state=PlannerState(Cadence(cycle=5)))).cycle_id == first
    (cycle,) = await store.cycles("f")
    assert (cycle.repeats, cycle.repeated_at) == (2, clock())
    assert (await ann.observe()).planner_state.cadence.cycle == 5
    second = (await ann.commit(decision="other")).cycle_id
    third = (await ann.commit(RaiseAlert("X", "x"), decision="other")).cycle_id
    fourth = (await ann.commit(decision="other")).cycle_id
    assert len({first, second, third, fourth}) == 4
    assert [cycle.id for cycle in await store.cycles("f")] == [fourth, third, second, first]
    assert [cycle.id for cycle in await store.cycles("f", 2)] == [fourth, third]


async def test_at_least_one_cycle_in_five_minutes_is_stored(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    first = (await ann.commit(decision="steady")).cycle_id
    clock.advance(299)
    await ann.observe()
    assert (await ann.commit(decision="steady")).cycle_id == first
    clock.advance(1)
    await ann.observe()
    assert (await ann.commit(decision="steady")).cycle_id != first


async def test_old_cycles_are_swept(store: ControlStores, clock: VirtualClock, ann: Leader) -> None:
    await ann.commit(decision="steady")
    clock.advance(RETENTION.cycles_s + 1)
    assert await store.sweep() == 1
    assert await store.cycles("f") == []


# ----------------------------------------------------------------------------------------------------------- leaving


async def test_a_hired_worker_that_leaves_keeps_its_slot_until_its_machine_is_gone(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await ann.hire(0)
    await ann.commit(Promote("w0", "heard"))
    task_id = await store.enqueue(NewTask("a"))
    await store.claim("w0", ("a",), 1)
    clock.advance(3)
    await store.deregister("w0", "SIGTERM")
    (view,) = (await ann.observe()).workers
    assert (view.status, view.terminating_at, view.code, view.running) == ("terminating", clock(), "DEREGISTERED", ())
    task = await store.task(task_id)
    assert (task.status, task.attempts) == (TaskStatus.QUEUED, 0)
    assert (await ann.commit(intents=(intent("y0", 0),))).granted == frozenset()
    assert await ann.report(Deleted("w0", None, "DRAINED", "x"), intents=(intent("y0", 0),)) == {"y0"}


async def test_a_drained_worker_that_leaves_keeps_the_reason_it_was_given(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await ann.hire(0)
    await ann.commit(Drain("w0", "IDLE", "idle 41 s"))
    drained_at = clock()
    clock.advance(3)
    await store.deregister("w0", "told to")
    (view,) = (await ann.observe()).workers
    assert (view.terminating_at, view.code, view.reason) == (drained_at, "IDLE", "idle 41 s")


async def test_a_worker_started_by_hand_that_leaves_is_over(store: ControlStores, ann: Leader) -> None:
    await store.register(Registration("hand", ("a",), fleet="f"))
    await store.deregister("hand", "SIGTERM")
    assert (await store.worker("hand")).status is WorkerStatus.TERMINATED


async def test_a_worker_ended_by_hand_is_seen_terminating_since_then(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await ann.hire(0)
    clock.advance(5)
    assert await store.set_terminating(["w0"], "enough") == 1
    (view,) = (await ann.observe()).workers
    assert (view.status, view.terminating_at, view.code) == ("terminating", clock(), "MANUAL")


# ------------------------------------------------------------------------------------------------------- the ledger

PARTS = (PricePart(3_000_000, 7_500_000), PricePart(600_000, 1_500_000))
PRICED = Machine("m0", "w0", MachineState.RUNNING, price_micros_per_hour=3_600_000, price_parts=PARTS, currency="EUR")


async def hire_priced(ann: Leader, clock: VirtualClock, slot: int = 0, unit_s: int = 3600, born_s: float = 0) -> None:
    await ann.observe()
    await ann.hire(slot)
    made = replace(PRICED, id=f"m{slot}", name=f"w{slot}", created_at=clock() - timedelta(seconds=born_s))
    await ann.report(Created(f"w{slot}", made, billing_unit_s=unit_s))


async def settle_all(store: ControlStores, fleet: str = "f") -> int:
    now = await store.now()
    return await store.settle([settle(account, now) for account in await store.accounts_to_settle(fleet, 100)])


async def told(store: ControlStores, by: str) -> dict[str | None, tuple[int, int, int, int]]:
    costs = await store.costs(by, datetime(2029, 1, 1, tzinfo=UTC))
    return {c.key: (c.task_micros, c.boot_micros, c.idle_micros, c.tail_micros) for c in costs}


async def do(store: ControlStores, clock: VirtualClock, worker_id: str, seconds: float, queue: str = "a") -> int:
    task_id = await store.enqueue(NewTask(queue))
    (claim,) = await store.claim(worker_id, (queue,), 1)
    clock.advance(seconds)
    await store.finish_and_claim(worker_id, [Finished(claim.task_id, claim.token, None)], (), 0)
    return task_id


async def test_what_queues_cost_is_known_from_sums_and_adds_up_to_what_fleets_cost(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await hire_priced(ann, clock)
    await store.register(Registration("w0", ("a", "b"), fleet="f"))
    for queue, seconds in (("a", 1200), ("b", 600), ("a", 1800), ("b", 3600)):
        await do(store, clock, "w0", seconds, queue)
        clock.advance(300)
    assert await settle_all(store) == 1
    by_queue, by_fleet = await told(store, "queue"), await told(store, "fleet")
    assert set(by_queue) == {"a", "b", None}
    assert by_queue["a"][1:] == by_queue["b"][1:] == (0, 0, 0)
    assert [sum(parts) for parts in zip(*by_queue.values(), strict=True)] == list(by_fleet["f"])
    if isinstance(store, PostgresStores):
        async with store.database.connection("forgetting the charges themselves") as connection:
            await connection.execute("truncate windlass.charges")
        assert await told(store, "queue") == by_queue


async def test_a_machine_with_a_price_has_a_bill_from_its_creation(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await hire_priced(ann, clock, born_s=7)
    await ann.hire(1)
    await ann.report(Created("w1", Machine("m1", "w1", MachineState.RUNNING)))
    priced, free = (await ann.observe()).workers
    assert priced.bill == Bill(Tariff(3_600_000, "EUR", 3600, PARTS), clock() - timedelta(seconds=7))
    assert free.bill is None


async def test_a_machine_that_nobody_had_is_in_the_ledger_once(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    orphan = replace(PRICED, id="m9", name="nobody", created_at=clock() - timedelta(seconds=30))
    for _ in range(2):
        await ann.report(OrphanDeleted(orphan, "nobody's", 60, clock() - timedelta(seconds=10)))
    clock.advance(60)
    await settle_all(store)
    assert await told(store, "worker") == {"orphan-m9": (0, 20_000, 0, 40_000)}
    worker = await store.worker("orphan-m9")
    assert (worker.status, worker.code) == (WorkerStatus.TERMINATED, "ORPHAN")
    assert worker.reason == "machine of nobody: nobody's"


async def test_an_adopted_machine_has_the_bill_of_the_list_it_was_found_in(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await ann.hire(0)
    await ann.observe()
    found = replace(PRICED, created_at=clock() - timedelta(seconds=3))
    ann.snapshot = replace(ann.snapshot, machines=(found,), traits=ProviderTraits(billing_unit_s=60))
    await ann.commit(Adopt("w0", "m0", "found"))
    (view,) = (await ann.observe()).workers
    assert view.bill == Bill(Tariff(3_600_000, "EUR", 60, PARTS), clock() - timedelta(seconds=3))


async def test_a_price_in_no_currency_is_kept_apart_from_all_others(store: ControlStores, ann: Leader) -> None:
    await ann.hire(0)
    await ann.report(Created("w0", replace(PRICED, currency=None)))
    (view,) = (await ann.observe()).workers
    assert view.bill is not None
    assert view.bill.tariff.currency == "XXX"  # ISO 4217


async def test_a_price_that_comes_to_light_later_is_paid_from_the_machines_creation_on(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await ann.hire(0)
    await ann.report(Created("w0", replace(PRICED, price_micros_per_hour=None)))
    born = clock()
    clock.advance(60)
    await ann.observe()
    listed = replace(PRICED, created_at=born)
    ann.snapshot = replace(ann.snapshot, machines=(listed,), traits=ProviderTraits(billing_unit_s=3600))
    await ann.commit(RecordPrice("w0", "m0", "known now"))
    (view,) = (await ann.observe()).workers
    assert view.bill == Bill(Tariff(3_600_000, "EUR", 3600, PARTS), born)
    ann.snapshot = replace(ann.snapshot, machines=(replace(listed, price_micros_per_hour=1),))
    await ann.commit(RecordPrice("w0", "m0", "dearer"))
    (again,) = (await ann.observe()).workers
    assert again.bill == view.bill, "what was agreed stays"


async def test_what_a_worker_did_in_its_hour_is_charged_when_it_is_gone(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await hire_priced(ann, clock)
    clock.advance(20)
    await ann.observe()
    clock.advance(20)
    await ann.observe()
    clock.advance(20)
    await ann.observe()
    await ann.commit(Promote("w0", "heard"))
    first = await do(store, clock, "w0", 100)
    second = await do(store, clock, "w0", 200, "b")
    clock.advance(40)
    await ann.observe()
    await ann.report(Deleted("w0", "m0", "IDLE", "x", clock() - timedelta(seconds=10)))
    assert len((await ann.observe()).ended_bills) == 1
    assert await settle_all(store) == 0, "what it did last may still be on its way"
    clock.advance(60)
    assert (await ann.observe()).is_settlement_due
    assert await settle_all(store) == 1
    assert await settle_all(store) == 0
    snapshot = await ann.observe()
    assert (snapshot.is_settlement_due, snapshot.ended_bills) == (False, ())
    assert snapshot.spending == (Spending("EUR", 3_600_000, 3_600_000, 3_600_000),)
    assert await told(store, "worker") == {"w0": (300_000, 60_000, 30_000, 3_210_000)}
    assert await told(store, "fleet") == {"f": (300_000, 60_000, 30_000, 3_210_000)}
    assert await told(store, "day") == {"2030-01-01": (300_000, 60_000, 30_000, 3_210_000)}
    assert await told(store, "queue") == {
        "a": (100_000, 0, 0, 0), "b": (200_000, 0, 0, 0), None: (0, 60_000, 30_000, 3_210_000),
    }  # fmt: skip
    assert list(await told(store, "task")) == [None, str(second), str(first)]
    (charge,) = await store.charges_of_task(second)
    assert (charge.worker_id, charge.queue, charge.amount_micros) == ("w0", "b", 200_000)
    assert await store.open_accounts() == []


async def test_a_worker_that_lives_is_charged_hour_by_hour_and_its_task_in_each(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await hire_priced(ann, clock)
    await ann.commit(Promote("w0", "heard"))
    task_id = await store.enqueue(NewTask("a"))
    (claim,) = await store.claim("w0", ("a",), 1)
    clock.advance(3600)
    assert not (await ann.observe()).is_settlement_due
    clock.advance(60)
    assert (await ann.observe()).is_settlement_due
    assert await settle_all(store) == 1
    assert await told(store, "task") == {str(task_id): (3_600_000, 0, 0, 0)}
    (view,) = (await ann.observe()).workers
    assert view.bill is not None
    assert view.bill.settled_until == view.bill.since + timedelta(hours=1)
    clock.advance(1740)
    await store.finish_and_claim("w0", [Finished(task_id, claim.token, None)], (), 0)
    clock.advance(1860)
    await settle_all(store)
    assert await told(store, "worker") == {"w0": (5_400_000, 0, 1_800_000, 0)}
    assert [charge.amount_micros for charge in await store.charges_of_task(task_id)] == [3_600_000, 1_800_000]
    assert (await ann.observe()).spending == (Spending("EUR", 0, 7_200_000, 7_200_000),)


async def test_the_monthly_cap_makes_the_rest_of_the_month_free(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await hire_priced(ann, clock)
    clock.advance(5 * 3600)
    await ann.observe()
    await ann.report(Deleted("w0", "m0", "X", "x"))
    clock.advance(60)
    await settle_all(store)
    assert await told(store, "fleet") == {"f": (0, 9_000_000, 0, 0)}


async def end_by_finish(store: ControlStores, claim: Any, ann: Leader) -> None:
    await store.finish_and_claim("w0", [Finished(claim.task_id, claim.token, None)], ("a",), 1)


async def end_by_finish_alone(store: ControlStores, claim: Any, ann: Leader) -> None:
    await store.finish_and_claim("w0", [Finished(claim.task_id, claim.token, None)], (), 0)


async def end_by_failure(store: ControlStores, claim: Any, ann: Leader) -> None:
    await store.fail("w0", claim.task_id, claim.token, "broke")


async def end_by_release(store: ControlStores, claim: Any, ann: Leader) -> None:
    await store.release("w0", claim.task_id, claim.token, "not now")


async def end_by_cancelling(store: ControlStores, claim: Any, ann: Leader) -> None:
    await store.cancel_task(claim.task_id, "not wanted")


async def end_by_losing_the_worker(store: ControlStores, claim: Any, ann: Leader) -> None:
    await ann.observe()
    await ann.commit(Fail("w0", "CRASHED", "x"))


async def end_by_leaving(store: ControlStores, claim: Any, ann: Leader) -> None:
    await store.deregister("w0", "told to")


WAYS_TO_END = [
    end_by_finish, end_by_finish_alone, end_by_failure, end_by_release, end_by_cancelling, end_by_losing_the_worker,
    end_by_leaving,
]  # fmt: skip


@pytest.mark.parametrize("end", WAYS_TO_END)
@pytest.mark.parametrize("is_priced", [True, False], ids=["priced", "free"])
async def test_however_an_attempt_ends_its_time_is_remembered_where_time_has_a_price(
    store: ControlStores, clock: VirtualClock, ann: Leader, end: Any, is_priced: bool
) -> None:
    if is_priced:
        await hire_priced(ann, clock)
    else:
        await ann.hire(0)
        await ann.report(Created("w0", Machine("m0", "w0", MachineState.RUNNING)))
    await store.enqueue(NewTask("a"))
    (claim,) = await store.claim("w0", ("a",), 1)
    begun = clock()
    clock.advance(10)
    await end(store, claim, ann)
    await end(store, claim, ann)
    accounts = await store.open_accounts(fleet="f")
    spans = [span for account in accounts for span in account.spans]
    assert spans == ([Span(claim.task_id, "a", begun, clock())] if is_priced else [])
    assert await store.open_accounts(worker_id="nobody") == []


async def test_what_was_done_before_the_machine_was_known_is_remembered_too(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    """A worker may be at work before the answer to its creation is written down, or before its machine is adopted."""
    await ann.hire(0)
    begun = clock()
    task_id = await do(store, clock, "w0", 20)
    await ann.report(Created("w0", replace(PRICED, created_at=begun), billing_unit_s=3600))
    (account,) = await store.open_accounts()
    assert account.spans == (Span(task_id, "a", begun, clock()),)


async def test_an_account_that_changed_since_it_was_read_is_left_as_it_is(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await hire_priced(ann, clock)
    clock.advance(3700)
    (account,) = await store.accounts_to_settle("f", 10)
    closed = settle(account, clock())
    await ann.observe()
    await ann.report(Deleted("w0", "m0", "X", "x"))
    assert await store.settle([closed]) == 0
    clock.advance(60)
    assert await settle_all(store) == 1
    assert await store.settle([closed, closed]) == 0
    assert await told(store, "worker") == {"w0": (0, 3_700_000, 0, 3_500_000)}


async def test_a_bounded_number_is_settled_longest_due_first(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await hire_priced(ann, clock, 1)
    clock.advance(1)
    await hire_priced(ann, clock, 0)
    clock.advance(4000)
    assert [account.worker_id for account in await store.accounts_to_settle("f", 1)] == ["w1"]
    assert [account.worker_id for account in await store.accounts_to_settle("f", 9)] == ["w1", "w0"]
    assert await store.accounts_to_settle("g", 9) == []


async def test_who_still_owes_is_not_forgotten_and_what_was_paid_is_for_its_time(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await hire_priced(ann, clock)
    await ann.report(Deleted("w0", "m0", "X", "x"))
    clock.advance(RETENTION.events_s + 1)
    await store.sweep()
    assert await store.worker("w0") is not None
    assert await settle_all(store) == 1
    await store.sweep()
    assert await store.worker("w0") is None
    assert await told(store, "worker") == {"w0": (0, 0, 0, 3_600_000)}
    clock.advance(RETENTION.charges_s)
    await store.sweep()
    assert await told(store, "worker") == await told(store, "fleet") == {}


# ---------------------------------------------------------------------------------------------------------- by hand


async def test_restarting_slots_forgets_what_they_remember(store: ControlStores, ann: Leader) -> None:
    await ann.hire(0, 1, 2)
    await ann.commit(Fail("w0", "X", "x"), Fail("w1", "X", "x"), FailSlot(0, "x"), FailSlot(1, "x"), FailSlot(2, "x"))
    assert await store.restart_slots("f", 1) == 1
    assert [slot.slot for slot in (await ann.observe()).slots] == [0, 2]
    assert await store.restart_slots("f") == 2
    assert (await ann.observe()).slots == ()
    assert await store.restart_slots("f") == 0


async def test_requested_workers_are_asked_for_until_they_are_hired(store: ControlStores, ann: Leader) -> None:
    assert await store.request_workers("f", 2) == 2
    assert (await ann.observe()).requested == 2
    await ann.commit(intents=(replace(intent("w0", 0), is_requested=True), intent("w1", 1)))
    assert (await ann.observe()).requested == 1
    assert await store.request_workers("f", 99) == FLEET.max_workers - 2
    assert await store.request_workers("f", -1) == 1
    assert await store.request_workers("f", -3) == 0
    assert (await store.fleets())[0].requested_workers == 0


async def test_nobody_can_ask_for_more_than_there_is_room_for(store: ControlStores, ann: Leader) -> None:
    await ann.hire(0, 1, 2, 3)
    await ann.report(Deleted("w3", None, "X", "x"))
    assert await store.request_workers("f", 9) == 1
    await ann.commit(FailSlot(3, "x"))
    assert (await ann.observe()).requested == 0, "the last slot is failed: nobody can be hired for this wish"
    await ann.commit(Drain("w0", "IDLE", "idle"))
    assert await store.request_workers("f", 9) == 1, "whoever leaves makes room"


async def test_a_wish_that_no_slot_can_take_any_more_is_forgotten(store: ControlStores, ann: Leader) -> None:
    """Else it would hire again, one by one, whoever is let go for having nothing to do."""
    assert await store.request_workers("f", 3) == 3
    await ann.hire(0, 1)
    await ann.hire(2, 3)
    assert (await ann.observe()).requested == 0


@pytest.mark.parametrize("slot", [-1, 4, 17])
async def test_a_slot_that_a_fleet_cannot_have_is_no_slot_to_restart(
    store: ControlStores, ann: Leader, slot: int
) -> None:
    with pytest.raises(BadInput, match=f"slot {slot} not found in fleet f: its slots are 0 to 3"):
        await store.restart_slots("f", slot)
    assert (await ann.observe()).reset_at is None


async def test_the_last_one_that_broke_is_seen_with_its_reason(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    assert ann.snapshot.last_failure is None
    await ann.hire(0, 1, 2)
    await ann.commit(Fail("w1", "MACHINE_GONE", "exit code 2"), Drain("w2", "IDLE", "idle"))
    assert (await ann.observe()).last_failure == RecentFailure("w1", "MACHINE_GONE", "exit code 2", clock())
    clock.advance(5)
    await ann.hire(3)
    await ann.report(CreationRefused("w3", "REFUSED", "there is no folder /x"))
    assert (await ann.observe()).last_failure == RecentFailure("w3", "REFUSED", "there is no folder /x", clock())


async def test_a_fleet_says_when_its_last_cycle_was_and_whether_somebody_leads(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    (before,) = await store.fleets()
    assert (before.planned_at, before.next_plan_in_s, before.is_led) == (None, None, True)
    await ann.commit(planner_state=PlannerState(Cadence(planned_at=clock(), next_plan_in_s=10.0)))
    clock.advance(29)
    (fleet,) = await store.fleets()
    assert (fleet.planned_at, fleet.next_plan_in_s, fleet.is_led) == (clock() - timedelta(seconds=29), 10.0, True)
    assert fleet.without_orchestrator_s(clock()) is None
    clock.advance(1)
    (fleet,) = await store.fleets()
    assert (fleet.is_led, fleet.without_orchestrator_s(clock())) == (False, 30.0)


async def test_what_was_hired_for_the_queue_fulfils_nobodys_wish(store: ControlStores, ann: Leader) -> None:
    """A wish that came after the cycle looked is still to be fulfilled."""
    await store.request_workers("f", 2)
    await ann.hire(0, 1)
    assert (await ann.observe()).requested == 2
    await ann.commit(intents=(replace(intent("not granted", 0), is_requested=True),))
    await ann.report(Deleted("w1", None, "X", "x"), intents=(replace(intent("y1", 1), is_requested=True),))
    assert (await ann.observe()).requested == 1


async def test_a_restart_by_hand_is_seen_with_its_time_and_apart_from_it_that_of_all(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    assert (ann.snapshot.reset_at, ann.snapshot.restarted_at) == (None, None)
    clock.advance(5)
    await store.restart_slots("f", 0)
    of_a_slot = clock()
    clock.advance(5)
    seen = await ann.observe()
    assert (seen.reset_at, seen.restarted_at) == (of_a_slot, None)
    await store.restart_slots("f")
    of_all = clock()
    clock.advance(5)
    seen = await ann.observe()
    assert (seen.reset_at, seen.restarted_at) == (of_all, of_all)
    await store.restart_slots("f", 0)
    seen = await ann.observe()
    assert (seen.reset_at, seen.restarted_at) == (clock(), of_all)


async def test_a_database_has_one_identity(store: ControlStores) -> None:
    assert str(UUID(await store.instance_id())) == await store.instance_id()


async def test_the_newest_cycle_that_saw_a_worker_is_found(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await ann.hire(0)
    await ann.observe()
    first = (await ann.commit(decision="one")).cycle_id
    await ann.report(Deleted("w0", None, "X", "x"))
    await ann.observe()
    await ann.commit(decision="two")
    found = await store.last_cycle_with("f", "w0")
    assert (found.cycle.id, [view.id for view in found.snapshot.workers]) == (first, ["w0"])
    assert await store.last_cycle_with("f", "nobody") is None
    assert await store.last_cycle_with("g", "w0") is None
    # However long ago it ended: it is looked for from its end on.
    for number in range(201):
        clock.advance(1)
        await ann.observe()
        await ann.commit(decision=f"later {number}")
    assert (await store.last_cycle_with("f", "w0")).cycle.id == first  # type: ignore[union-attr]


async def test_what_workers_have_at_hand_is_told(store: ControlStores, ann: Leader) -> None:
    await store.register(Registration("hand", ("a",), fleet="f"))
    assert await store.running_tasks() == {}
    ids = [await store.enqueue(NewTask("a")) for _ in range(3)]
    await store.claim("hand", ("a",), 2)
    assert await store.running_tasks() == {"hand": ids[:2]}


async def test_how_many_come_before_a_task(
    store: ControlStores, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await store.enqueue(NewTask("a")), await store.enqueue(NewTask("a"))
    urgent = await store.enqueue(NewTask("a", priority=1))
    await store.enqueue(NewTask("b"))
    await store.enqueue(NewTask("a", priority=9, run_after=clock() + timedelta(seconds=9)))
    assert [await store.ready_before(task_id) for task_id in (urgent, first, second, 4711)] == [0, 1, 2, 0]
    for module in (fleets, memory_fleets):
        monkeypatch.setattr(module, "MAX_AHEAD", 0)
    assert [await store.ready_before(task_id) for task_id in (urgent, first, second, 4711)] == [0, 1, 1, 0]


async def test_queues_in_which_a_task_waits_are_told_from_those_in_which_none_does(
    store: ControlStores, clock: VirtualClock
) -> None:
    queues = ("ready", "later", "busy", "held", "empty")
    await store.register(Registration("hand", ("busy",), fleet="f"))
    await store.register(Registration("d", ("held",), fleet="f", kind=WorkerKind.DISPATCHER))
    for queue in ("ready", "busy", "held"):
        await store.enqueue(NewTask(queue))
    await store.enqueue(NewTask("later", run_after=clock() + timedelta(seconds=9)))
    await store.claim("hand", ("busy",), 1)
    await store.claim("d", ("held",), 1)
    assert await store.queues_with_tasks(queues) == {"ready", "held"}
    clock.advance(10)
    assert await store.queues_with_tasks(queues) == {"ready", "held", "later"}
    assert await store.queues_with_tasks(()) == set()


async def test_pausing_a_fleet_pauses_those_there_and_those_to_come(store: ControlStores, ann: Leader) -> None:
    await ann.hire(0, 1)
    await store.set_paused(["w1"], True)
    assert await store.pause_fleet("f", True) == 1
    assert (await ann.observe()).is_paused
    assert (await store.fleets())[0].is_paused
    await store.register(Registration("hand", ("a",), fleet="f"))
    assert {worker.id: worker.is_paused for worker in await store.workers()} == {"w0": True, "w1": True, "hand": True}
    await store.enqueue(NewTask("a"))
    assert await store.claim("hand", ("a",), 1) == []
    assert await store.pause_fleet("f", False) == 3
    assert not (await ann.observe()).is_paused
    assert len(await store.claim("hand", ("a",), 1)) == 1


async def test_a_worker_ended_at_once_loses_its_tasks_and_is_nobodys_failure(store: ControlStores, ann: Leader) -> None:
    await ann.hire(0)
    task_id = await store.enqueue(NewTask("a"))
    await store.claim("w0", ("a",), 1)
    assert await store.terminate_worker("w0", "it annoys me") is True
    worker = await store.worker("w0")
    assert (worker.status, worker.code, worker.reason) == (WorkerStatus.ERROR, "MANUAL", "it annoys me")
    assert (await store.task(task_id)).status is TaskStatus.QUEUED
    snapshot = await ann.observe()
    assert [hiring.has_failed for hiring in snapshot.launches] == [False]
    assert snapshot.slots == ()
    assert await store.terminate_worker("w0", "again") is False
    assert await store.terminate_worker("nobody", "x") is False


async def test_a_worker_started_by_hand_that_is_ended_at_once_is_over(store: ControlStores, ann: Leader) -> None:
    await store.register(Registration("hand", ("a",), fleet="f"))
    assert await store.terminate_worker("hand", "x") is True
    worker = await store.worker("hand")
    assert (worker.status, worker.code) == (WorkerStatus.TERMINATED, "MANUAL")
    assert worker.terminated_at is not None


async def test_a_lost_hired_worker_is_the_orchestrators_to_judge_until_nobody_has_led_for_two_leases(
    store: ControlStores, ann: Leader, clock: VirtualClock
) -> None:
    await ann.hire(0)
    for worker_id in ("w0", "judge"):
        await store.register(Registration(worker_id, ("a",)))
        await store.heartbeat(worker_id)
    task_id = await store.enqueue(NewTask("a"))
    await store.claim("w0", ("a",), 1)

    async def judged_after(seconds: int) -> list[RecoveredTasks]:
        for _ in range(seconds // 10):
            clock.advance(10)
            await store.heartbeat("judge")
        return await store.recover_lost_workers("judge")

    # While somebody leads, and for two of the lost one's leases after.
    for _ in range(20):
        await store.acquire_lease(ANN)
        assert await judged_after(10) == []
    await store.release_lease(ANN)
    assert await judged_after(60) == []
    assert await judged_after(10) == [RecoveredTasks("w0", tasks_requeued=1, tasks_failed=0)]
    assert (await store.task(task_id)).status is TaskStatus.QUEUED
    # What the control loop finds when it is back: a broken worker, whose slot has counted it.
    snapshot = await ann.observe()
    (broken,) = snapshot.workers
    assert (broken.id, broken.status, broken.code) == ("w0", WorkerStatus.ERROR, "STALE_HEARTBEAT")
    assert [(slot.slot, len(slot.restarts)) for slot in snapshot.slots] == [(0, 1)]
    assert [hiring.has_failed for hiring in snapshot.launches] == [True]


async def test_what_is_asked_of_an_unknown_fleet_is_refused(store: ControlStores) -> None:
    for asked in (store.restart_slots("no"), store.request_workers("no", 1), store.pause_fleet("no", True)):
        with pytest.raises(BadInput, match="fleet no not found"):
            await asked
    assert await store.fleets() == []


# --------------------------------------------------------------------------------------------------------- evidence


async def fail_one(store: ControlStores, worker_id: str, queue: str = "a", error: str = "boom") -> int:
    (claim,) = await store.claim(worker_id, (queue,))
    await store.fail(worker_id, claim.task_id, claim.token, error, jitter=0.0)
    return claim.task_id


async def join(store: ControlStores, *worker_ids: str) -> None:
    for worker_id in worker_ids:
        await store.register(Registration(worker_id, ("a", "b"), fleet="f"))


async def test_a_worker_on_which_tasks_fail_in_a_row_is_a_suspect_with_how_others_did(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await ann.hire(0, 1, 2)
    await join(store, "w0", "w1", "w2")
    await do(store, clock, "w0", 1.0)
    await do(store, clock, "w2", 1.0)
    clock.advance(1)
    for queue in "aaa":
        await store.enqueue(NewTask(queue))
    since, failed = clock(), []
    for _ in range(3):
        failed.append(await fail_one(store, "w0"))
        clock.advance(1)
    assert (await ann.observe()).failure_streaks == (FailureStreak("w0", since, tuple(failed)),)
    clock.advance(5)
    # The first comes back: it fails on w1 too. Of the others, w1 completes one; b is completed as well, c is not ours.
    assert await fail_one(store, "w1") == failed[0]
    (claim,) = await store.claim("w1", ("a",))
    assert claim.task_id == failed[1]
    await store.finish_and_claim("w1", [Finished(claim.task_id, claim.token, None)], (), 0)
    await do(store, clock, "w1", 1.0, "b")
    await do(store, clock, "w2", 1.0, "c")
    (suspect,) = (await ann.observe()).failure_streaks
    assert suspect == FailureStreak(
        "w0", since, tuple(failed), {failed[1]: "w1"}, (failed[0],), others=1, others_completed=2, others_failed=1
    )
    assert (await ann.observe(FLEET.model_copy(update={"quarantine_min_failures": 4}))).failure_streaks == ()


async def test_how_others_did_is_seen_beside_a_queue_that_is_far_busier(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await ann.hire(0, 1)
    await join(store, "w0", "w1")
    await store.register(Registration("busy", ("c",)))
    for queue in "aaab":
        await store.enqueue(NewTask(queue))
    for _ in range(3):
        await fail_one(store, "w0")
    clock.advance(0.1)
    await complete_alone(store, "w1")
    clock.advance(1)
    await store.enqueue_many([NewTask("c") for _ in range(600)])
    claims = await store.claim("busy", ("c",), 600)
    await store.finish_and_claim("busy", [Finished(claim.task_id, claim.token, None) for claim in claims], (), 0)
    (suspect,) = (await ann.observe()).failure_streaks
    assert (suspect.others, suspect.others_completed) == (1, 1)


async def complete_alone(store: ControlStores, worker_id: str) -> None:
    (claim,) = await store.claim(worker_id, ("b",))
    await store.finish_and_claim(worker_id, [Finished(claim.task_id, claim.token, None)], (), 0)


async def complete_and_claim(store: ControlStores, worker_id: str) -> None:
    (claim,) = await store.claim(worker_id, ("b",))
    await store.finish_and_claim(worker_id, [Finished(claim.task_id, claim.token, None)], ("b",), 1)


@pytest.mark.parametrize("complete", [complete_alone, complete_and_claim])
async def test_a_completed_task_ends_a_row_of_failures(
    store: ControlStores, ann: Leader, complete: Callable[[ControlStores, str], Awaitable[None]]
) -> None:
    await ann.hire(0)
    await join(store, "w0")
    for queue in "aaaab":
        await store.enqueue(NewTask(queue))
    for _ in range(3):
        await fail_one(store, "w0")
    assert len((await ann.observe()).failure_streaks) == 1
    await complete(store, "w0")
    await fail_one(store, "w0")
    assert (await ann.observe()).failure_streaks == ()


async def test_the_same_task_again_makes_no_longer_row_and_a_long_one_is_kept_in_part(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await ann.hire(0)
    await join(store, "w0")
    again = await store.enqueue(NewTask("b", max_attempts=5))
    for _ in range(3):
        assert await fail_one(store, "w0", "b") == again
        clock.advance(60)
    assert (await ann.observe()).failure_streaks == ()
    ids = [await store.enqueue(NewTask("a")) for _ in range(101)]
    for _ in ids:
        await fail_one(store, "w0")
    (suspect,) = (await ann.observe()).failure_streaks
    assert suspect.failed == tuple(ids[-100:])


async def test_attempts_on_a_worker_that_is_to_blame_count_for_no_task(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await ann.hire(0, 1)
    await join(store, "w0", "w1")
    before = await store.enqueue(NewTask("b", max_attempts=2))
    await fail_one(store, "w0", "b")
    clock.advance(60)
    await store.enqueue(NewTask("b", priority=1))
    await do(store, clock, "w0", 1.0, "b")
    dead = await store.enqueue(NewTask("a", max_attempts=1))
    waiting = await store.enqueue(NewTask("a"))
    others = await store.enqueue(NewTask("a", max_attempts=2))
    cancelled = await store.enqueue(NewTask("a"))
    for _ in range(4):
        await fail_one(store, "w0")
    await store.cancel_task(cancelled, "not needed")
    clock.advance(0.5)
    assert await fail_one(store, "w0", "b") == before  # its last attempt, and its first was before the row began
    clock.advance(10)
    at_hand = await store.enqueue(NewTask("a", priority=9, max_attempts=1))
    assert [claim.task_id for claim in await store.claim("w0", ("a",))] == [at_hand]
    (claim,) = [claim for claim in await store.claim("w1", ("a",), 2) if claim.task_id == others]
    await store.fail("w1", others, claim.token, "no", jitter=0.0)
    (suspect,) = (await ann.observe()).failure_streaks
    committed = await ann.commit(Fail("w0", "QUARANTINED", "all fails here", suspect, AttemptRefund(suspect.since)))
    assert committed.requeued == 1
    told = {task_id: await store.task(task_id) for task_id in (before, dead, waiting, others, cancelled, at_hand)}
    assert {
        task_id: (task.status, task.attempts, task.worker_id) for task_id, task in told.items() if task is not None
    } == {
        before: (TaskStatus.QUEUED, 1, None),
        dead: (TaskStatus.QUEUED, 0, None),
        waiting: (TaskStatus.RUNNING, 1, "w1"),
        others: (TaskStatus.QUEUED, 1, None),
        cancelled: (TaskStatus.FAILED, 1, "w0"),
        at_hand: (TaskStatus.QUEUED, 0, None),
    }
    (error,) = [event for event in await store.events(worker_id="w0") if event.code == "WORKER_ERROR"]
    assert error.detail is not None
    assert error.detail["code"] == "QUARANTINED"
    assert error.detail["evidence"]["failed"] == list(suspect.failed)
    acquitted = [event for event in await store.events(worker_id="w0") if event.code == "ATTEMPTS_REFUNDED"]
    assert [event.task_id for event in acquitted] == [before, dead, waiting, others]
    assert acquitted[0].reason == "1 failed attempts on worker w0 refunded"
    assert {depth.queue: depth.oldest_queued_age_s for depth in await store.queue_depths()}["a"] == 0


async def test_a_task_is_acquitted_on_trial_once_until_a_person_retries_it(store: ControlStores, ann: Leader) -> None:
    task_id = await store.enqueue(NewTask("a", max_attempts=1))
    attempts = []
    for slot, is_retried in ((0, False), (1, False), (2, True)):
        await ann.hire(slot)
        await join(store, f"w{slot}")
        if is_retried:
            assert await store.retry_task(task_id)
        assert await fail_one(store, f"w{slot}") == task_id
        (view,) = [view for view in (await ann.observe()).workers if view.id == f"w{slot}"]
        assert view.failing_since is not None
        attempt_refund = AttemptRefund(view.failing_since, is_trial=True)
        await ann.commit(Fail(f"w{slot}", "QUARANTINED", "another is tried", None, attempt_refund))
        task = await store.task(task_id)
        assert task is not None
        attempts.append((task.status, task.attempts))
    ready, dead = (TaskStatus.QUEUED, 0), (TaskStatus.FAILED, 1)
    assert attempts == [ready, dead, ready]


async def test_a_worker_remembers_its_provider_when_its_fleet_gets_another(store: ControlStores, ann: Leader) -> None:
    await ann.hire(0)
    seen = await ann.observe(FLEET.model_copy(update={"provider": "hetzner"}))
    assert [view.provider for view in seen.workers] == [FLEET.provider]
    await join(store, "by-hand")
    assert {view.id: view.provider for view in (await ann.observe()).workers}["by-hand"] is None


async def test_a_worker_that_has_done_something_right_is_not_failing(store: ControlStores, ann: Leader) -> None:
    await ann.hire(0)
    await join(store, "w0")
    for queue in "ab":
        await store.enqueue(NewTask(queue))
    await fail_one(store, "w0")
    assert [view.failing_since is None for view in (await ann.observe()).workers] == [False]
    await complete_alone(store, "w0")
    assert [view.failing_since is None for view in (await ann.observe()).workers] == [True]


async def test_a_dead_letter_says_on_whom_it_failed_and_who_has_worked_since(
    store: ControlStores, clock: VirtualClock
) -> None:
    await join(store, "w0", "w1", "w2")
    task_id = await store.enqueue(NewTask("a", max_attempts=9))
    await fail_one(store, "w0")
    await store.retry_task(task_id)  # what was before counts no more
    for worker_id in ("w0", "w1"):
        assert await fail_one(store, worker_id) == task_id
        clock.advance(60)
    await store.enqueue(NewTask("b"))
    await do(store, clock, "w0", 1.0, "b")
    (claim,) = await store.claim("w2", ("a",))
    await store.fail("w2", task_id, claim.token, "boom", code="HANDLER_ERROR", retry=False)
    last = (await store.events(task_id=task_id))[-1]
    assert (last.code, last.reason) == ("TASK_FAILED", "attempt 3 of 9: boom; failed on w0, w1, w2")
    assert last.detail is not None
    assert last.detail["failed_attempts"] == [
        {"attempt": 1, "worker_id": "w0", "error_code": "HANDLER_ERROR", "has_worked_since": True},
        {"attempt": 2, "worker_id": "w1", "error_code": "HANDLER_ERROR", "has_worked_since": False},
        {"attempt": 3, "worker_id": "w2", "error_code": "HANDLER_ERROR", "has_worked_since": False},
    ]


# ---------------------------------------------------------------------------------------------------------- storage


async def test_the_newest_word_about_storage_is_seen(store: ControlStores, clock: VirtualClock, ann: Leader) -> None:
    await ann.hire(0, 1, 2)
    assert (await ann.observe()).storage is None
    await store.heartbeat("w1", (), {"storage_used_bytes": 10**13, "storage_free_bytes": None})
    clock.advance(1)
    await store.heartbeat("w0", (), {"storage_used_bytes": 7})
    clock.advance(1)
    for nonsense in ("7", 7.5, True, None, [7]):
        await store.heartbeat("w2", (), {"storage_used_bytes": nonsense})
        assert (await ann.observe()).storage == StorageUse("w0", 7, clock() - timedelta(seconds=1))
    # Whoever no longer knows has nothing to say.
    await store.heartbeat("w0", (), {"storage_used_bytes": None})
    assert (await ann.observe()).storage == StorageUse("w1", 10**13, clock() - timedelta(seconds=2))
    await ann.commit(Fail("w1", "X", "broken"))
    assert (await ann.observe()).storage is None


async def test_a_volume_that_grew_or_did_not_is_noted(store: ControlStores, ann: Leader) -> None:
    committed = await ann.commit(GrowVolume("v1", 150, "95 of 100 GB are used"))
    cycle = await store.cycle(committed.cycle_id)
    assert cycle is not None
    assert cycle.cycle.finished_at is None
    await ann.report(VolumeGrown("v1", 150, "95 of 100 GB are used"), VolumeNotGrown("v2", 200, "no funds"))
    told = [(event.code, event.reason, event.detail) for event in await store.events() if event.detail]
    assert told == [
        ("VOLUME_GROWN", "95 of 100 GB are used", {"volume_id": "v1", "size_gb": 150}),
        ("VOLUME_NOT_GROWN", "no funds", {"volume_id": "v2", "size_gb": 200}),
    ]


# ------------------------------------------------------------------------------------------------- the same histories


class Twins:
    """Both stores live through the same; what differs is a bug in one of them."""

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
    hired = [f"w{number}" for number in range(12)]
    names = [*hired, "hand", "nobody"]
    machines = [f"m{number}" for number in range(5)]

    def name() -> str:
        return rng.choice(names)

    def some_intents() -> tuple[Intent, ...]:
        count = rng.randrange(4)
        pairs = zip(rng.sample(hired, count), rng.sample(range(6), count), strict=True)
        return tuple(Intent(worker_id, slot, "wanted", 30.0, rng.random() < 0.5) for worker_id, slot in pairs)

    def some_actions() -> tuple[Action, ...]:
        makers: list[Callable[[], Action]] = [
            lambda: Promote(name(), "heard"),
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
            lambda: OrphanDeleted(Machine(rng.choice(machines), name(), MachineState.RUNNING), "stray"),
            lambda: OrphanDeleted(replace(priced(), name=name()), "stray", 60, twins.clock()),
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
        decided = Plan(some_actions(), planner_state, rng.choice(["steady", "hiring"]))
        committed = await twins.both("commit_plan", candidate, term, snapshot, decided, some_intents())
        if isinstance(committed, Committed):
            twins.cycle_ids.append(committed.cycle_id)

    async def report() -> None:
        fleet, candidate = rng.choice(["f", "f", "g"]), rng.choice([ANN, ANN, BOB])
        if fleet in twins.seen:
            cycle_id, term = rng.choice(twins.cycle_ids), twins.seen[fleet][0]
            outcomes, intents = some_outcomes(), rng.choice([(), some_intents()])
            await twins.both("commit_outcomes", candidate, term, fleet, cycle_id, outcomes, intents, {"n": 1})

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
        lambda: twins.beat(rng.choice(hired[:6]), True, vitals()),
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
async def test_both_stores_tell_the_same_story(shared_dsn: str, chunk: int) -> None:
    for seed in range(chunk, HISTORIES, 5):
        clock = VirtualClock()
        await execute(shared_dsn, EMPTY)
        async with PostgresStores(shared_dsn, retention=RETENTION, virtual_now=clock) as postgres:
            twins = Twins(MemoryStores(clock, RETENTION, Random(1)), postgres, clock)  # noqa: S311
            try:
                await live(twins, Random(seed))  # noqa: S311
            except AssertionError as error:
                raise AssertionError(f"history {seed}: {error}") from error
