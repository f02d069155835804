"""Seats and attempts: assignment, release, failure and replacement. Ray and the database are scripted."""

import asyncio
import contextlib
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import pytest

from support.ray_builders import make_claim, make_node, table_of_external, table_of_spawned
from windlass.model.errors import HandlerNotFound
from windlass.model.node import NodeVerdict, Placement, Resources
from windlass.model.ray import RaySettings, frozen
from windlass.ray.capacity import Needs
from windlass.ray.executor import RayExecutor
from windlass.ray.node_table import NodeTable, Schedulability
from windlass.ray.seat_pool import UNSCHEDULABLE_DELAY_S, SeatPool
from windlass.ray.seat_process import NodeUnusable, SeatExit
from windlass.worker.executor import AttemptFailure, AttemptSuccess, NotBegun, Outcome

ONE_CPU = frozen({"CPU": 1.0})
TIMEOUT_S = 10.0


@dataclass
class FakeRay:
    """Records submitted seats and starts none. Killing a seat waits for `may_kill`. Dicts are keyed by seat id."""

    excluded_nodes: dict[str, set[str]] = field(default_factory=dict)
    exits: dict[str, "asyncio.Future[SeatExit | AttemptFailure]"] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)
    may_kill: asyncio.Event = field(default_factory=asyncio.Event)
    # Errors of submit() by needs.
    errors: dict[Needs, Exception] = field(default_factory=dict)

    def submit(self, seat_id: str, needs: Resources, excluded_nodes: Collection[str]) -> Any:
        if frozen(needs) in self.errors:
            raise self.errors[frozen(needs)]
        self.excluded_nodes[seat_id] = set(excluded_nodes)
        self.exits[seat_id] = asyncio.get_running_loop().create_future()
        return seat_id

    async def wait_for_exit(self, reference: Any) -> SeatExit | AttemptFailure:
        return await self.exits[reference]

    async def kill(self, reference: Any) -> None:
        self.killed.append(reference)
        # Bounded: cancelled attempts wait for this call, so a failing test would never end.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TIMEOUT_S):
                await self.may_kill.wait()
        self.exit_seat(reference, AttemptFailure("RAY_ERROR", "cancelled"))

    async def cancel(self, references: Collection[Any]) -> None:
        self.cancelled += references
        for reference in references:
            self.exit_seat(reference, AttemptFailure("RAY_ERROR", "cancelled"))

    def exit_seat(self, seat_id: str, seat_exit: SeatExit | AttemptFailure = None) -> None:
        if not self.exits[seat_id].done():
            self.exits[seat_id].set_result(seat_exit)

    @property
    def seats(self) -> list[str]:
        return list(self.excluded_nodes)


class PoolHarness:
    """A seat pool over FakeRay and a database that returns `verdict`, once `database` is set if it is not None."""

    def __init__(self, nodes: NodeTable, verdict: NodeVerdict = NodeVerdict.PLACED) -> None:
        self.ray, self.nodes, self.verdict = FakeRay(), nodes, verdict
        self.placed: list[Placement] = []
        self.database: asyncio.Event | None = None
        self.pool = SeatPool(self.ray, nodes, nodes.settings, self._place)  # type: ignore[arg-type]
        self.executor = RayExecutor(self.pool, nodes.settings)
        self.ray.may_kill.set()

    def _place(self, placement: Placement) -> "asyncio.Future[NodeVerdict]":
        self.placed.append(placement)
        return asyncio.ensure_future(self._wait_for_verdict())

    async def _wait_for_verdict(self) -> NodeVerdict:
        verdict = self.verdict
        if self.database is not None:
            await self.database.wait()
        return verdict

    async def start(self, payload: object = None, timeout_s: float | None = None) -> "asyncio.Task[Outcome]":
        """Start an attempt, which then waits for a seat."""
        claim = make_claim(payload, timeout_s=timeout_s)
        running = asyncio.create_task(self.executor.run(claim, lambda _fraction, _note: None))
        await let_tasks_run()
        return running


async def let_tasks_run() -> None:
    """Enough turns of the loop for everything that waits for no event."""
    for _ in range(10):
        await asyncio.sleep(0)


async def outcome_of(running: "asyncio.Task[Outcome]") -> Outcome:
    return await asyncio.wait_for(running, TIMEOUT_S)


async def test_task_that_no_node_could_ever_hold_fails_at_once() -> None:
    harness = PoolHarness(table_of_spawned("n1"))
    outcome = await outcome_of(await harness.start({"ray_resources": {"num_cpus": 8}}))
    assert isinstance(outcome, AttemptFailure)
    assert (outcome.code, outcome.retry) == ("BAD_RESOURCES", False)
    assert "CPU 8" in outcome.error
    assert not harness.ray.seats


async def test_amounts_that_ray_rejects_fail_only_the_tasks_that_need_them() -> None:
    harness = PoolHarness(table_of_external(make_node("id-1")))
    harness.ray.errors[frozen({"CPU": 1.0, "TPU": 3.0})] = ValueError("TPU must be 1, 2 or a multiple of 4")
    other = await harness.start()
    claim = await harness.pool.on_started(harness.ray.seats[0], "id-1")
    assert claim is not None
    outcome = await outcome_of(await harness.start({"ray_resources": {"resources": {"TPU": 3}}}))
    assert isinstance(outcome, AttemptFailure)
    assert (outcome.code, outcome.retry) == ("BAD_RESOURCES", False)
    assert "CPU 1, TPU 3 (TPU must be 1, 2 or" in outcome.error
    harness.pool.reconcile()
    await harness.pool.on_finished(harness.ray.seats[0], claim.token, AttemptSuccess("1"))
    assert await outcome_of(other) == AttemptSuccess("1")
    assert not harness.pool.in_flight


async def test_task_is_released_if_ray_cannot_accept_its_seat() -> None:
    harness = PoolHarness(table_of_spawned("n1"))
    harness.ray.errors[ONE_CPU] = RuntimeError("the driver is not connected")
    with pytest.raises(NotBegun, match="not connected") as released:
        await outcome_of(await harness.start())
    assert released.value.delay_s > 0
    del harness.ray.errors[ONE_CPU]
    await harness.start()
    assert len(harness.ray.seats) == 1


async def test_task_that_a_larger_node_might_hold_is_released_with_a_delay() -> None:
    with pytest.raises(NotBegun, match="memory") as released:
        await outcome_of(await PoolHarness(table_of_spawned("n1")).start({"ray_resources": {"memory_mb": 1 << 20}}))
    assert UNSCHEDULABLE_DELAY_S <= released.value.delay_s <= 1.5 * UNSCHEDULABLE_DELAY_S


async def test_at_most_the_margin_waits_for_a_cluster_to_grow() -> None:
    harness = PoolHarness(table_of_external(make_node("id-1")))
    large = {"ray_resources": {"num_cpus": 8}}
    waiting = [await harness.start(large) for _ in range(2)]
    harness.pool.reconcile()
    with pytest.raises(NotBegun):
        await outcome_of(await harness.start(large))
    assert not any(running.done() for running in waiting)
    assert (len(harness.ray.seats), harness.ray.cancelled) == (2, [])
    for running in waiting:
        running.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    # Without waiting attempts all seats are cancelled.
    harness.pool.reconcile()
    await let_tasks_run()
    assert set(harness.ray.cancelled) == set(harness.ray.seats)
    assert not harness.pool.in_flight


async def test_tasks_with_own_needs_do_not_use_the_margin_of_queues() -> None:
    settings = RaySettings(margin=2, num_gpus=1)
    harness = PoolHarness(table_of_external(make_node("id-1"), settings=settings))
    huge = [await harness.start({"ray_resources": {"num_cpus": 1e6 + number}}) for number in range(2)]
    with pytest.raises(NotBegun) as released:
        await outcome_of(await harness.start({"ray_resources": {"num_cpus": 1e7}}))
    assert released.value.delay_s >= UNSCHEDULABLE_DELAY_S
    default = [await harness.start() for _ in range(2)]
    with pytest.raises(NotBegun):
        await outcome_of(await harness.start())
    assert not any(running.done() for running in (*huge, *default))
    assert len(harness.ray.seats) == 4


async def test_seat_runs_attempts_in_turn_each_placed_before_it_begins() -> None:
    harness = PoolHarness(table_of_spawned("n1"))
    running = [await harness.start() for _ in range(3)]
    first, second, _third = harness.ray.seats
    claim = await harness.pool.on_started(first, "id-n1")
    tokens = []
    while claim is not None:
        assert harness.placed[-1] == Placement(1, claim.token, "n1")
        assert sum(count for kind, count in harness.pool.in_flight.items() if kind.node_id == "id-n1") == 1
        tokens.append(claim.token)
        claim = await harness.pool.on_finished(first, claim.token, AttemptSuccess(str(len(tokens))))
    assert [await outcome_of(each) for each in running] == [
        AttemptSuccess("1"),
        AttemptSuccess("2"),
        AttemptSuccess("3"),
    ]
    assert len(set(tokens)) == 3
    # A seat that starts now gets no attempt, and the pending one is cancelled.
    assert await harness.pool.on_started(second, "id-n1") is None
    harness.pool.reconcile()
    await let_tasks_run()
    assert harness.ray.cancelled == [harness.ray.seats[2]]
    assert not harness.pool.in_flight


async def test_seat_gets_no_attempt_after_its_lifetime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.ray.seat_pool.SEAT_LIFETIME_S", 0.0)
    harness = PoolHarness(table_of_spawned("n1"))
    running = [await harness.start() for _ in range(2)]
    claim = await harness.pool.on_started(harness.ray.seats[0], "id-n1")
    assert claim is not None
    assert await harness.pool.on_finished(harness.ray.seats[0], claim.token, AttemptSuccess("1")) is None
    assert (await outcome_of(running[0]), running[1].done()) == (AttemptSuccess("1"), False)
    # Ray has another seat for the second attempt.
    assert await harness.pool.on_started(harness.ray.seats[1], "id-n1") is not None


async def test_unknown_seats_and_wrong_tokens_change_nothing() -> None:
    harness = PoolHarness(table_of_spawned("n1"))
    running = [await harness.start() for _ in range(2)]
    first, second = harness.ray.seats
    claim = await harness.pool.on_started(first, "id-n1")
    assert claim is not None
    assert await harness.pool.on_started("unknown", "id-n1") is None
    assert await harness.pool.on_started(first, "id-n1") is None
    for seat_id, token in (("unknown", claim.token), (second, claim.token), (first, uuid4())):
        assert await harness.pool.on_finished(seat_id, token, AttemptSuccess("forged")) is None
    assert not any(each.done() for each in running)
    assert len(harness.placed) == 1


async def test_dead_seat_fails_only_the_attempt_that_ran_in_it() -> None:
    harness = PoolHarness(table_of_spawned("n1"))
    running, waiting = await harness.start(), await harness.start()
    first, second = harness.ray.seats
    assert await harness.pool.on_started(first, "id-n1") is not None
    harness.ray.exit_seat(first, AttemptFailure("CHILD_DIED", "killed"))
    assert await outcome_of(running) == AttemptFailure("CHILD_DIED", "killed")
    assert not waiting.done()
    # A seat that dies before it runs an attempt is replaced.
    harness.ray.exit_seat(second, AttemptFailure("NODE_LOST", "gone"))
    await let_tasks_run()
    claim = await harness.pool.on_started(harness.ray.seats[2], "id-n1")
    assert claim is not None
    await harness.pool.on_finished(harness.ray.seats[2], claim.token, AttemptSuccess("1"))
    assert await outcome_of(waiting) == AttemptSuccess("1")


async def test_attempt_whose_seat_dies_during_placement_waits_again() -> None:
    harness = PoolHarness(table_of_spawned("n1"))
    running, harness.database = await harness.start(), asyncio.Event()
    first = harness.ray.seats[0]
    starting = asyncio.create_task(harness.pool.on_started(first, "id-n1"))
    await let_tasks_run()
    harness.ray.exit_seat(first, AttemptFailure("CHILD_DIED", "killed"))
    await let_tasks_run()
    assert not running.done()
    harness.database.set()
    assert await starting is None
    # The attempt waits again, and Ray has another seat for it.
    assert await harness.pool.on_started(harness.ray.seats[1], "id-n1") is not None
    assert [placement.token for placement in harness.placed] == 2 * [harness.placed[0].token]
    assert not running.done()


@pytest.mark.parametrize("has_begun", [False, True], ids=["before the attempt begins", "after the attempt began"])
async def test_attempt_moves_from_an_unusable_node_to_another(has_begun: bool) -> None:
    harness = PoolHarness(table_of_spawned("n1", "n2"))
    running = await harness.start()
    if has_begun:
        assert await harness.pool.on_started(harness.ray.seats[0], "id-n1") is not None
    harness.ray.exit_seat(harness.ray.seats[0], NodeUnusable("no handler there", "id-n1"))
    await let_tasks_run()
    # New seats exclude the node, and a seat that starts there gets no attempt.
    assert harness.ray.excluded_nodes[harness.ray.seats[1]] == {"id-n1"}
    assert await harness.pool.on_started(harness.ray.seats[1], "id-n1") is None
    harness.ray.exit_seat(harness.ray.seats[1])
    await let_tasks_run()
    assert await harness.pool.on_started(harness.ray.seats[2], "id-n2") is not None
    assert not running.done()


async def test_handler_that_no_node_has_ends_the_dispatcher() -> None:
    harness = PoolHarness(table_of_spawned("n1", "n2"))
    running = await harness.start()
    for number, name in enumerate(("n1", "n2")):
        harness.ray.exit_seat(harness.ray.seats[number], NodeUnusable(f"no handler on {name}", f"id-{name}"))
        await let_tasks_run()
    harness.pool.reconcile()
    with pytest.raises(HandlerNotFound, match="handler"):
        await outcome_of(running)


async def test_handler_missing_on_some_nodes_does_not_end_the_dispatcher() -> None:
    harness = PoolHarness(table_of_external(make_node("id-small"), make_node("id-large", cpus=8.0)))
    running, large = await harness.start(), await harness.start({"ray_resources": {"num_cpus": 8}})
    assert await harness.pool.on_started(harness.ray.seats[0], "id-small") is not None
    harness.ray.exit_seat(harness.ray.seats[1], NodeUnusable("no handler there", "id-large"))
    await let_tasks_run()
    harness.pool.reconcile()
    with pytest.raises(NotBegun, match="it needs CPU 8") as released:
        await outcome_of(large)
    assert released.value.delay_s >= UNSCHEDULABLE_DELAY_S
    assert not running.done()
    # No more tasks of its kind are claimed for the unusable node.
    assert harness.nodes.schedulability(frozen({"CPU": 8.0})) is Schedulability.NOT_NOW


async def test_node_rejected_by_the_database_gets_no_attempt_and_no_seat() -> None:
    harness = PoolHarness(table_of_spawned("n1", "n2"), NodeVerdict.BARRED)
    running = await harness.start()
    assert await harness.pool.on_started(harness.ray.seats[0], "id-n1") is None
    assert harness.ray.excluded_nodes[harness.ray.seats[1]] == {"id-n1"}
    harness.verdict = NodeVerdict.PLACED
    assert await harness.pool.on_started(harness.ray.seats[1], "id-n2") is not None
    assert not running.done()


async def test_attempt_with_a_lost_claim_is_released() -> None:
    harness = PoolHarness(table_of_spawned("n1"), NodeVerdict.LOST)
    running = await harness.start()
    assert await harness.pool.on_started(harness.ray.seats[0], "id-n1") is None
    with pytest.raises(NotBegun):
        await outcome_of(running)
    assert not harness.pool.in_flight


async def test_seat_on_an_unobserved_node_waits_for_the_next_observation() -> None:
    harness = PoolHarness(table_of_spawned("n1"))
    await harness.start()
    starting = asyncio.create_task(harness.pool.on_started(harness.ray.seats[0], "id-n2"))
    await let_tasks_run()
    assert not starting.done()
    harness.nodes.update([*harness.nodes.alive.values(), make_node("id-n2", worker_id="n2")], {})
    harness.pool.reconcile()
    assert await asyncio.wait_for(starting, TIMEOUT_S) is not None
    assert harness.placed[0].worker_id == "n2"


async def test_waiting_attempts_are_released_when_all_nodes_are_gone() -> None:
    """Queued tasks cause a spawn; claimed ones would not."""
    harness = PoolHarness(table_of_spawned("n1"))
    running = await harness.start()
    harness.nodes.update([], {})
    harness.pool.reconcile()
    with pytest.raises(NotBegun) as released:
        await outcome_of(running)
    await let_tasks_run()
    assert released.value.delay_s == 0.0
    assert harness.ray.cancelled == harness.ray.seats
    assert not harness.pool.in_flight


async def test_attempt_on_a_dead_node_fails() -> None:
    """Ray does not report its end if the node was cut off. Further observations meanwhile change nothing."""
    harness = PoolHarness(table_of_spawned("n1"))
    harness.ray.may_kill.clear()
    running = await harness.start()
    assert await harness.pool.on_started(harness.ray.seats[0], "id-n1") is not None
    harness.pool.reconcile()
    harness.nodes.update([], {})
    for _ in range(3):
        harness.pool.reconcile()
        await let_tasks_run()
    assert harness.ray.killed == harness.ray.seats
    harness.ray.may_kill.set()
    outcome = await outcome_of(running)
    assert isinstance(outcome, AttemptFailure) and (outcome.code, outcome.retry) == ("NODE_LOST", True)


async def test_attempt_moves_if_its_node_is_lost_during_placement() -> None:
    harness = PoolHarness(table_of_spawned("n1", "n2"))
    running, harness.database = await harness.start(), asyncio.Event()
    starting = asyncio.create_task(harness.pool.on_started(harness.ray.seats[0], "id-n1"))
    await let_tasks_run()
    harness.nodes.update([node for node in harness.nodes.alive.values() if node.node_id != "id-n1"], {})
    for _ in range(2):
        harness.pool.reconcile()
        await let_tasks_run()
    assert (running.done(), harness.ray.cancelled) == (False, [harness.ray.seats[0]])
    harness.database.set()
    assert await starting is None
    assert await harness.pool.on_started(harness.ray.seats[1], "id-n2") is not None
    assert [placement.worker_id for placement in harness.placed] == ["n1", "n2"]
    assert not running.done()


async def test_seats_pending_when_a_node_is_lost_are_replaced() -> None:
    """Ray may be about to place them there, and would wait for that node. The attempts keep waiting."""
    harness = PoolHarness(table_of_spawned("n1", "n2"))
    running, now = await harness.start(), asyncio.get_running_loop().time()
    harness.pool.reconcile(stuck_since=now - 60)
    assert len(harness.ray.seats) == 1
    harness.pool.reconcile(stuck_since=now + 60)
    await let_tasks_run()
    first, second = harness.ray.seats
    assert harness.ray.cancelled == [first]
    # A cancelled seat gets no attempt.
    assert await harness.pool.on_started(first, "id-n1") is None
    assert await harness.pool.on_started(second, "id-n2") is not None
    assert not running.done()


async def test_seat_that_loads_the_handler_is_kept_while_its_node_lives() -> None:
    harness = PoolHarness(table_of_spawned("n1", "n2"))
    running, later = await harness.start(), asyncio.get_running_loop().time() + 60
    first = harness.ray.seats[0]
    harness.pool.on_loading(first, "id-n1")
    harness.pool.on_loading("unknown", "id-n1")
    harness.pool.reconcile(stuck_since=later)
    assert harness.ray.cancelled == []
    claim = await harness.pool.on_started(first, "id-n1")
    assert claim is not None
    await harness.pool.on_finished(first, claim.token, AttemptSuccess("1"))
    assert await outcome_of(running) == AttemptSuccess("1")
    # It is kept without a waiting attempt too, but not if its node is lost.
    cancelled = await harness.start()
    second = harness.ray.seats[1]
    harness.pool.on_loading(second, "id-n1")
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    harness.pool.reconcile()
    await let_tasks_run()
    assert harness.ray.cancelled == []
    harness.nodes.update([node for node in harness.nodes.alive.values() if node.node_id != "id-n1"], {})
    harness.pool.reconcile()
    await let_tasks_run()
    assert harness.ray.cancelled == [second]


async def test_time_limit_counts_from_the_start_and_kills_the_seat() -> None:
    harness = PoolHarness(table_of_spawned("n1"))
    running, other = await harness.start(timeout_s=0.05), await harness.start()
    first, disconnected = harness.ray.seats[0], asyncio.Event()
    harness.ray.may_kill.clear()
    claim = await harness.pool.on_started(first, "id-n1", disconnected.set)
    assert claim is not None
    async with asyncio.timeout(TIMEOUT_S):
        while not harness.ray.killed:
            await asyncio.sleep(0.01)
    # An outcome after the time limit is ignored, and the seat gets no other attempt.
    assert await harness.pool.on_finished(first, claim.token, AttemptSuccess("late")) is None
    assert not disconnected.is_set()
    harness.ray.may_kill.set()
    outcome = await outcome_of(running)
    assert isinstance(outcome, AttemptFailure) and outcome.code == "TIMEOUT"
    # Ray does not say whether it could kill the seat, so the connection is closed too.
    assert disconnected.is_set()
    assert (harness.ray.killed, other.done()) == ([first], False)


async def test_cancelled_attempt_is_killed_with_its_seat_or_stops_waiting() -> None:
    harness = PoolHarness(table_of_spawned("n1"))
    running, waiting = await harness.start(), await harness.start()
    first, second = harness.ray.seats
    assert await harness.pool.on_started(first, "id-n1") is not None
    for attempt in (waiting, running):
        attempt.cancel()
        with pytest.raises(asyncio.CancelledError):
            await outcome_of(attempt)
    assert harness.ray.killed == [first]
    assert await harness.pool.on_started(second, "id-n1") is None
    assert not harness.pool.in_flight


async def test_attempts_are_released_if_ray_starts_no_seats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.ray.seat_pool.MAX_IDLE_EXITS", 3)
    harness = PoolHarness(table_of_spawned("n1"))
    running = await harness.start()
    for number in range(3):
        assert not running.done()
        harness.ray.exit_seat(harness.ray.seats[number], AttemptFailure("RAY_ERROR", "no process can be started"))
        await let_tasks_run()
    with pytest.raises(NotBegun, match="no process can be started") as released:
        await outcome_of(running)
    assert released.value.delay_s > 0
    assert len(harness.ray.seats) == 3
