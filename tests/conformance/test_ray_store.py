"""The contract of ports/ray.py, over both stores in virtual time."""

from collections.abc import AsyncIterator
from dataclasses import replace
from random import Random
from typing import Any
from uuid import UUID, uuid4

import pytest

from support.memory_store.stores import MemoryStores
from support.provider_fixtures import RETENTION, empty_tables, spawn_in_memory, spawn_in_postgres
from support.stores import PostgresStores
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate, LeaseLost, Standby
from windlass.model.node import AliveNode, DeadNode, NodeState, NodeVerdict, Placement, dispatcher_lease
from windlass.model.task import Claim, Finished, TaskStatus, new_task
from windlass.model.worker import HeldClaim, Registration, WorkerKind, WorkerStatus
from windlass.model.worker_log import LogChunk

FLEET = "many"
LEASE_S = 30.0


class World:
    """A fleet with the dispatcher that holds the lease, and two spawned nodes."""

    def __init__(self, store: Any, clock: Any, dsn: str | None) -> None:
        self.store = store
        self.clock = clock
        self._dsn = dsn
        self.candidate = Candidate("dispatcher-a", LEASE_S, dispatcher_lease(FLEET))
        self.term = 0

    async def spawn_worker(self, worker_id: str, slot: int, **registration: Any) -> None:
        kind = registration.pop("kind", WorkerKind.NODE)
        if self._dsn is None:
            spawn_in_memory(self.store, worker_id, FLEET, slot, kind)
        else:
            await spawn_in_postgres(self._dsn, self.clock(), worker_id, FLEET, slot, kind)
        await self.store.register(Registration(worker_id, ("q",), FLEET, lease_s=LEASE_S, kind=kind, **registration))

    async def lead(self, candidate: Candidate | None = None) -> int:
        term = await self.store.acquire_lease(candidate or self.candidate)
        assert isinstance(term, int)
        return term

    async def register_dispatcher(self, worker_id: str = "d") -> None:
        await self.store.register(Registration(worker_id, ("q",), FLEET, 100, LEASE_S, kind=WorkerKind.DISPATCHER))

    async def claim(self, count: int = 1, dispatcher: str = "d") -> list[Claim]:
        await self.store.enqueue_many([new_task("q", number) for number in range(count)])
        claims = await self.store.claim(dispatcher, ["q"], count)
        assert len(claims) == count
        return list(claims)

    async def report(self, *nodes: AliveNode | DeadNode) -> dict[str, bool]:
        return dict(await self.store.report_nodes(self.candidate, self.term, FLEET, ["q"], LEASE_S, nodes))

    async def place(self, claim: Claim, worker_id: str) -> NodeVerdict:
        placed: dict[UUID, NodeVerdict] = await self.store.place([Placement(claim.task_id, claim.token, worker_id)])
        return placed[claim.token]


def alive(worker_id: str, **changes: Any) -> AliveNode:
    return AliveNode(worker_id, f"id-of-{worker_id}", {"CPU": 2.0}, {"CPU": 1.0}, **changes)


@pytest.fixture(params=["memory", "postgres"])
async def world(request: pytest.FixtureRequest, clock: Any) -> AsyncIterator[World]:
    if request.param == "memory":
        made = World(MemoryStores(clock, RETENTION, Random(1)), clock, None)  # noqa: S311
        await _furnish(made)
        yield made
        return
    dsn = request.getfixturevalue("shared_dsn")
    await empty_tables(dsn)
    async with PostgresStores(dsn, retention=RETENTION, virtual_now=clock) as postgres:
        made = World(postgres, clock, dsn)
        await _furnish(made)
        yield made


async def _furnish(world: World) -> None:
    await world.spawn_worker("n1", 0)
    await world.spawn_worker("n2", 1)
    world.term = await world.lead()
    await world.register_dispatcher()


# ----------------------------------------------------------------------------------------------------- placements


async def test_placed_task_belongs_to_node_from_placement(world: World) -> None:
    (claim,) = await world.claim()
    assert (await world.store.task(claim.task_id)).worker_id == "d"
    world.clock.advance(7)
    assert await world.place(claim, "n1") is NodeVerdict.PLACED
    task = await world.store.task(claim.task_id)
    assert (task.worker_id, task.status, task.started_at) == ("n1", TaskStatus.RUNNING, world.clock())
    assert (await world.store.worker("n1")).first_claimed_at == world.clock()


async def test_node_that_starts_a_task_is_active(world: World) -> None:
    first, second = await world.claim(2)
    unknown = Placement(first.task_id, uuid4(), "n2")
    placed = Placement(second.task_id, second.token, "n1")
    assert (await world.store.worker("n1")).status is WorkerStatus.SPAWNING
    await world.store.place([unknown, placed])
    node = await world.store.worker("n1")
    assert (node.status, node.activated_at) == (WorkerStatus.ACTIVE, world.clock())
    # A placement that was refused proves nothing.
    assert (await world.store.worker("n2")).status is WorkerStatus.SPAWNING
    world.clock.advance(3)
    await world.place(first, "n1")
    events = [event for event in await world.store.events(worker_id="n1") if event.code == "WORKER_ACTIVATED"]
    assert [event.reason for event in events] == ["started its first task"]


async def test_repeated_placement_changes_nothing(world: World) -> None:
    (claim,) = await world.claim()
    await world.place(claim, "n1")
    started_at = world.clock()
    world.clock.advance(3)
    assert await world.place(claim, "n1") is NodeVerdict.PLACED
    assert (await world.store.task(claim.task_id)).started_at == started_at


async def test_batch_of_placements_has_one_verdict_each(world: World) -> None:
    first, second = await world.claim(2)
    await world.store.set_paused(["n2"], True)
    unknown = uuid4()
    verdicts = await world.store.place(
        [
            Placement(first.task_id, first.token, "n1"),
            Placement(second.task_id, second.token, "n2"),
            Placement(first.task_id, unknown, "n1"),
        ]
    )
    assert verdicts == {first.token: NodeVerdict.PLACED, second.token: NodeVerdict.BARRED, unknown: NodeVerdict.LOST}
    assert (await world.store.task(second.task_id)).worker_id == "d"


@pytest.mark.parametrize(
    "target", ["unknown", "plain", "ending"], ids=["unknown", "a worker that claims", "terminating"]
)
async def test_ineligible_node_gets_no_placement(world: World, target: str) -> None:
    await world.store.register(Registration("plain", ("q",), FLEET))
    await world.spawn_worker("ending", 2)
    await world.store.set_terminating(["ending"], "drained")
    (claim,) = await world.claim()
    assert await world.place(claim, target) is NodeVerdict.BARRED
    assert (await world.store.task(claim.task_id)).worker_id == "d"


async def test_placement_with_a_wrong_token_changes_no_task(world: World) -> None:
    (claim,) = await world.claim()
    before = await world.store.task(claim.task_id)
    wrong = uuid4()
    assert await world.store.place([Placement(claim.task_id, wrong, "n1")]) == {wrong: NodeVerdict.LOST}
    assert await world.store.task(claim.task_id) == before


async def test_placement_of_cancelled_task_is_lost(world: World) -> None:
    (claim,) = await world.claim()
    await world.store.cancel_task(claim.task_id, "not wanted")
    assert await world.place(claim, "n1") is NodeVerdict.LOST


async def test_dispatcher_reports_for_placed_tasks(world: World) -> None:
    done, broken, running = await world.claim(3)
    for claim in (done, broken, running):
        await world.place(claim, "n1")
    turn = await world.store.finish_and_claim("d", [Finished(done.task_id, done.token, "1")], ["q"], 0)
    assert turn.lost == []
    assert await world.store.fail("d", broken.task_id, broken.token, "no") is TaskStatus.ERROR
    await world.store.cancel_task(running.task_id, "not wanted")
    pulse = await world.store.heartbeat("d", [HeldClaim(running.task_id, running.token)])
    assert pulse.lost == {running.token}
    assert (await world.store.task(done.task_id)).status is TaskStatus.COMPLETE


async def test_heartbeat_of_node_releases_no_placed_task(world: World) -> None:
    (claim,) = await world.claim()
    await world.place(claim, "n1")
    world.clock.advance(LEASE_S * 2)
    await world.store.heartbeat("n1")
    assert (await world.store.task(claim.task_id)).worker_id == "n1"


async def test_output_from_a_dispatcher_is_stored_as_that_of_the_node(world: World) -> None:
    placed, waiting = await world.claim(2)
    await world.place(placed, "n1")
    batch = uuid4()
    chunks = [
        LogChunk(("on n1",), (0,), placed.task_id, placed.attempt),
        LogChunk(("of the dispatcher",)),
        LogChunk(("not placed",), (0,), waiting.task_id, waiting.attempt),
    ]
    for _ in range(2):  # a repeated call changes nothing
        await world.store.append_logs("d", batch, chunks)
    stored = {
        worker_id: [(line.text, line.task_id) for line in (await world.store.worker_log(worker_id, 10)).lines]
        for worker_id in ("n1", "n2", "d")
    }
    assert stored == {
        "n1": [("on n1", placed.task_id)],
        "n2": [],
        "d": [("of the dispatcher", None), ("not placed", waiting.task_id)],
    }
    await world.store.finish_and_claim("d", [Finished(placed.task_id, placed.token, "1")], ["q"], 0)
    # What arrives after the end of the attempt is still its own.
    await world.store.append_logs("d", uuid4(), [LogChunk(("late",), (0,), placed.task_id, placed.attempt)])
    assert [line.text for line in (await world.store.task_log(placed.task_id, 10)).lines] == ["on n1", "late"]
    # The bound of a worker counts for each node.
    await world.store.sweep()  # applies the settings
    big = LogChunk(("x" * 1_000,) * 100, (0,) * 100, placed.task_id, placed.attempt)
    for _ in range(2 * (RETENTION.worker_log_mb << 20) // 100_000):
        await world.store.append_logs("d", uuid4(), [big])
        world.clock.advance(5)
    kept = (await world.store.worker_log("n1", 10_000)).lines
    assert 0 < 1_000 * len(kept) <= RETENTION.worker_log_mb << 20
    assert len((await world.store.worker_log("d", 10)).lines) == 2


async def test_dispatcher_reports_progress_of_placed_task(world: World) -> None:
    (claim,) = await world.claim()
    await world.place(claim, "n2")
    await world.store.heartbeat("d", [HeldClaim(claim.task_id, claim.token, 0.5, "half")])
    task = await world.store.task(claim.task_id)
    assert (task.progress, task.progress_note) == (0.5, "half")


async def test_claimed_but_unplaced_task_counts_as_queued(world: World) -> None:
    """So that a worker is spawned for it."""
    placed, _ = await world.claim(2)
    await world.place(placed, "n1")
    world.clock.advance(9)
    fleet = FleetConfig(provider="ray-local", queues=("q",))
    _, snapshot = await world.store.observe(Candidate("leader", LEASE_S), FLEET, fleet)
    seen = snapshot.queue
    assert (seen.queued, seen.running, seen.oldest_queued_age_s) == (1, 1, 9.0)


# --------------------------------------------------------------------------------------------------- takeover


async def test_new_dispatcher_requeues_placed_and_claimed_tasks(world: World) -> None:
    ran, waited = await world.claim(2)
    await world.place(ran, "n1")
    world.clock.advance(LEASE_S + 1)
    other = Candidate("dispatcher-b", LEASE_S, dispatcher_lease(FLEET))
    term = await world.lead(other)
    assert term == world.term + 1
    assert await world.store.take_over_nodes(other, term, FLEET) == 2
    assert (await world.store.worker("d")).status is WorkerStatus.TERMINATED
    tasks = [await world.store.task(claim.task_id) for claim in (ran, waited)]
    assert [(task.status, task.attempts) for task in tasks] == [(TaskStatus.QUEUED, 1), (TaskStatus.QUEUED, 0)]
    assert tasks[0].error_code == "DISPATCHER_LOST"
    late = await world.store.finish_and_claim("d", [Finished(ran.task_id, ran.token, "1")], ["q"], 0)
    assert late.lost == [ran.token]


async def test_former_dispatcher_cannot_take_over_or_report(world: World) -> None:
    (claim,) = await world.claim()
    await world.place(claim, "n1")
    world.clock.advance(LEASE_S + 1)
    await world.lead(Candidate("dispatcher-b", LEASE_S, dispatcher_lease(FLEET)))
    with pytest.raises(LeaseLost):
        await world.store.take_over_nodes(world.candidate, world.term, FLEET)
    with pytest.raises(LeaseLost):
        await world.report(alive("n1"))
    assert (await world.store.task(claim.task_id)).worker_id == "n1"


async def test_one_dispatcher_per_fleet_holds_the_lease(world: World) -> None:
    assert isinstance(await world.store.acquire_lease(Candidate("b", LEASE_S, dispatcher_lease(FLEET))), Standby)
    assert isinstance(await world.store.acquire_lease(Candidate("b", LEASE_S, dispatcher_lease("other"))), int)
    assert isinstance(await world.store.acquire_lease(Candidate("b", LEASE_S)), int)


async def test_dispatcher_lease_does_not_count_as_orchestrator_lease(world: World) -> None:
    """Workers judge spawned workers only without an orchestrator lease."""
    await world.store.heartbeat("n1")
    await world.store.register(Registration("judge", ("q",), "other", lease_s=LEASE_S))
    await world.store.heartbeat("judge")
    for _ in range(40):
        world.clock.advance(LEASE_S / 10)
        await world.store.heartbeat("judge")
        await world.lead()
    lost = {recovery.worker_id for recovery in await world.store.recover_lost_workers("judge")}
    assert "n1" in lost


@pytest.mark.parametrize("has_successor", [False, True], ids=["no successor", "a successor"])
async def test_tasks_on_nodes_are_recovered_with_their_dispatcher(world: World, has_successor: bool) -> None:
    (claim,) = await world.claim()
    await world.place(claim, "n1")
    await world.store.register(Registration("judge", ("q",), "other", lease_s=LEASE_S))
    await world.store.heartbeat("d")
    for _ in range(15):
        world.clock.advance(LEASE_S / 10)
        await world.store.heartbeat("judge")
        # An orchestrator holds the lease, so workers do not judge nodes.
        await world.store.acquire_lease(Candidate("leader", LEASE_S))
    if has_successor:
        await world.lead(Candidate("dispatcher-b", LEASE_S, dispatcher_lease(FLEET)))
    await world.store.recover_lost_workers("judge")
    assert (await world.store.worker("d")).status is WorkerStatus.TERMINATED
    task = await world.store.task(claim.task_id)
    assert task.status is (TaskStatus.RUNNING if has_successor else TaskStatus.QUEUED)


# --------------------------------------------------------------------------------------------- node reports


async def test_ray_state_of_spawned_nodes_is_stored(world: World) -> None:
    began = world.clock()
    assert await world.report(alive("n1", slots=4)) == {}
    world.clock.advance(5)
    await world.report(alive("n1", slots=4))
    first, second = await world.store.worker("n1"), await world.store.worker("n2")
    assert first.concurrency == 4
    assert (first.node.state, first.node.since, first.node.at) == (NodeState.ALIVE, began, world.clock())
    assert (first.node.node_id, first.node.total, first.node.used) == ("id-of-n1", {"CPU": 2.0}, {"CPU": 1.0})
    assert (second.node.state, second.node.since) == (NodeState.ABSENT, began)
    assert first.last_heartbeat is None  # only its own heartbeat counts for a spawned node


@pytest.mark.parametrize("death", [None, "its health check failed"], ids=["not there any more", "known to be dead"])
async def test_missing_node_that_was_alive_is_dead(world: World, death: str | None) -> None:
    await world.report(alive("n1"))
    world.clock.advance(5)
    news = [DeadNode("n1", "id-of-n1", death)] if death else []
    await world.report(*news)
    node = (await world.store.worker("n1")).node
    assert (node.state, node.since, node.node_id) == (NodeState.DEAD, world.clock(), "id-of-n1")
    assert node.note == (death or "no longer in the Ray cluster")
    world.clock.advance(5)
    await world.report()
    assert (await world.store.worker("n1")).node.note == node.note


async def test_unchanged_node_report_is_rewritten_only_after_a_delay(world: World) -> None:
    """Nodes are reported twice a second: unchanged rows are written rarely, but often enough to look current."""
    began = world.clock()
    foreign = alive("ray-1234", is_managed=False)
    await world.report(alive("n1"), foreign)
    world.clock.advance(LEASE_S / 10)
    await world.report(alive("n1"), foreign)
    first, strange = await world.store.worker("n1"), await world.store.worker("ray-1234")
    assert (first.node.at, strange.node.at, strange.last_heartbeat) == (began, began, began)
    busy = replace(alive("n1"), used={"CPU": 2.0})
    await world.report(busy, foreign)
    node = (await world.store.worker("n1")).node
    assert (node.at, node.since, node.used) == (world.clock(), began, {"CPU": 2.0})
    world.clock.advance(LEASE_S / 10)
    await world.report(busy, foreign)
    assert (await world.store.worker("ray-1234")).last_heartbeat == world.clock()


async def test_unmanaged_node_starts_again_after_its_end(world: World) -> None:
    """Its dispatcher was absent, and a peer declared the silent node lost."""
    foreign = alive("ray-1234", is_managed=False)
    await world.report(foreign)
    await world.store.register(Registration("judge", ("q",), "other", lease_s=LEASE_S))
    for _ in range(16):
        world.clock.advance(LEASE_S / 10)
        await world.store.heartbeat("judge")
    assert "ray-1234" in {lost.worker_id for lost in await world.store.recover_lost_workers("judge")}
    world.term = await world.lead()
    await world.register_dispatcher("d2")
    assert await world.report(foreign) == {}
    worker = await world.store.worker("ray-1234")
    assert (worker.status, worker.last_heartbeat, worker.code) == (WorkerStatus.ACTIVE, world.clock(), None)
    (claim,) = await world.claim(dispatcher="d2")
    assert await world.place(claim, "ray-1234") is NodeVerdict.PLACED


async def test_report_returns_terminating_and_paused_nodes(world: World) -> None:
    await world.store.set_terminating(["n1"], "drained")
    assert await world.report(alive("n1"), alive("n2")) == {"n1": True}
    await world.store.set_paused(["n2"], True)
    assert await world.report(alive("n1"), alive("n2")) == {"n1": True, "n2": False}


async def test_unmanaged_node_lives_while_it_is_reported(world: World) -> None:
    foreign = alive("ray-1234", is_managed=False, slots=8, host="10.0.0.7")
    await world.report(foreign)
    world.clock.advance(10)
    await world.report(foreign)
    worker = await world.store.worker("ray-1234")
    assert (worker.kind, worker.slot, worker.status) == (WorkerKind.NODE, None, WorkerStatus.ACTIVE)
    assert (worker.concurrency, worker.host, worker.last_heartbeat) == (8, "10.0.0.7", world.clock())
    (claim,) = await world.claim()
    assert await world.place(claim, "ray-1234") is NodeVerdict.PLACED
    await world.report()
    ended = await world.store.worker("ray-1234")
    assert (ended.status, ended.code) == (WorkerStatus.TERMINATED, "NODE_DEAD")
    task = await world.store.task(claim.task_id)
    assert (task.status, task.attempts, task.error_code) == (TaskStatus.QUEUED, 1, "NODE_DEAD")
    codes = [event.code for event in await world.store.events(worker_id="ray-1234")]
    assert codes == ["WORKER_REGISTERED", "TASK_REQUEUED", "NODE_DEAD"]
