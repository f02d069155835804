"""Which nodes get tasks, what a task may expect of them, and what becomes of one that can expect nothing."""

import asyncio
import json
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest

from windlass.model.errors import HandlerNotFound
from windlass.model.fleet import FleetConfig
from windlass.model.node import NodeVerdict, Placement, Resources
from windlass.model.ray import RaySettings, TaskNeeds, frozen
from windlass.model.task import Claim
from windlass.ray.capacity import Needs, NodeCapacity
from windlass.ray.cluster import FLEET_LABEL, WORKER_LABEL, ClusterNode, label_value
from windlass.ray.executor import RayExecutor
from windlass.ray.nodes import AVOIDANCE_S, REFUSAL_S, NodeReporter, Schedulability
from windlass.ray.seat_pool import MISFIT_DELAY_S, Seats
from windlass.ray.seat_process import NoHandler, Parting
from windlass.worker.executor import AttemptFailure, AttemptSuccess, NotBegun, Outcome

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ONE_CPU = frozen({"CPU": 1.0})
LIMIT_S = 5.0


def node(
    node_id: str, *, cpus: float = 2.0, worker_id: str | None = None, fleet: str = "many", used: float = 0.0
) -> ClusterNode:
    labels = {WORKER_LABEL: worker_id, FLEET_LABEL: fleet} if worker_id is not None else {}
    return ClusterNode(node_id, True, labels, "127.0.0.1", {"CPU": cpus}, {"CPU": used}, is_head=False)


def hired(*names: str, settings: RaySettings | None = None, clock: list[float] | None = None) -> NodeReporter:
    settings, ticks = settings or RaySettings(node_cpus=2), clock or [0.0]
    nodes = NodeReporter("many", settings, ("q",), settings, clock=lambda: ticks[0])
    nodes.see([node(f"id-{name}", worker_id=name) for name in names], {})
    return nodes


def foreign(*seen: ClusterNode, settings: RaySettings | None = None, queues: tuple[str, ...] = ("q",)) -> NodeReporter:
    nodes = NodeReporter("many", settings or RaySettings(margin=2), queues, None)
    nodes.see(seen, {})
    return nodes


# ------------------------------------------------------------------------------------------------------ the nodes


def test_what_a_task_may_expect_of_hired_nodes() -> None:
    nodes = hired("n1")
    assert nodes.outlook(ONE_CPU) is Schedulability.FITS
    assert nodes.outlook(frozen({"CPU": 8.0})) is Schedulability.NEVER
    assert nodes.outlook(frozen({"disk": 1.0})) is Schedulability.NEVER
    # Nobody said how much memory a node has: a larger one may come.
    assert nodes.outlook(frozen({"CPU": 1.0, "memory": 2.0**40})) is Schedulability.LATER
    nodes.bar(["n1"])
    assert nodes.outlook(ONE_CPU) is Schedulability.LATER


def test_a_cluster_that_is_not_ours_may_grow() -> None:
    nodes = foreign(node("id-1"))
    assert nodes.outlook(frozen({"CPU": 8.0})) is Schedulability.AWAITED
    assert foreign().outlook(ONE_CPU) is Schedulability.AWAITED
    # One that is only paused is none to wait for.
    nodes.bar(["ray-many-id-1"])
    assert nodes.outlook(ONE_CPU) is Schedulability.LATER


def test_a_node_that_cannot_run_our_tasks_is_passed_over_for_a_while_and_all_together_are_the_end() -> None:
    clock = [0.0]
    nodes = hired("n1", "n2", clock=clock)
    assert nodes.refuse("id-n1", "no handler there")
    assert not nodes.refuse("id-n1", "no handler there")
    assert (nodes.closed(ONE_CPU), nodes.rooms().keys()) == ({"id-n1"}, {"id-n2"})
    assert nodes.outlook(ONE_CPU) is Schedulability.FITS
    nodes.refuse("id-n2", "nor there")
    assert nodes.outlook(ONE_CPU) is Schedulability.REFUSED
    clock[0] = REFUSAL_S + 1
    nodes.see(nodes.alive.values(), {})
    assert nodes.outlook(ONE_CPU) is Schedulability.FITS


def test_a_node_that_the_database_bars_is_avoided_until_we_know_better() -> None:
    clock = [0.0]
    nodes = hired("n1", "n2", clock=clock)
    nodes.avoid("id-n1")
    assert (nodes.closed(ONE_CPU), nodes.rooms().keys()) == ({"id-n1"}, {"id-n2"})
    assert [nodes.worker_of(node_id) for node_id in ("id-n1", "id-n2", "id-unseen")] == [None, "n2", None]
    nodes.avoid("id-n2")
    assert nodes.outlook(ONE_CPU) is Schedulability.LATER
    clock[0] = AVOIDANCE_S + 1
    nodes.see(nodes.alive.values(), {})
    assert nodes.outlook(ONE_CPU) is Schedulability.FITS


def test_a_node_that_is_lost_is_kept_in_mind_and_one_that_was_to_end_is_not() -> None:
    nodes = hired("n1", "n2", "n3")
    nodes.bar(["n3"])
    n1, n2, n3 = nodes.alive.values()
    assert not nodes.see([n1, n2, n3], {})
    assert not nodes.see([n1, n2], {})
    assert nodes.see([n2], {})
    assert nodes.closed(ONE_CPU) == {"id-n1"}
    assert not nodes.see([n2], {})


def test_nodes_of_others_that_hold_any_of_our_queues_are_told_of_and_no_other() -> None:
    settings = RaySettings(num_gpus=1, queues={"q": TaskNeeds(num_cpus=1)})
    nodes = foreign(node("id-1", cpus=3.0), node("id-head", cpus=0.0), settings=settings, queues=("q", "g"))
    assert [(told.worker_id, told.places) for told in nodes.report()] == [("ray-many-id-1", 3)]
    assert nodes.worker_of("id-1") == "ray-many-id-1"
    assert nodes.worker_of("id-head") is None
    # A task that needs nothing would fit there too. For others Ray need not be told.
    assert (nodes.closed(frozen({})), nodes.closed(ONE_CPU)) == ({"id-head"}, set())


def test_nodes_that_could_not_hold_a_task_anyway_are_not_named_to_ray() -> None:
    """On a cluster of thousands of others' nodes every seat would carry their names."""
    gpu, settings = frozen({"CPU": 1.0, "GPU": 1.0}), RaySettings(num_gpus=1)
    strange = [node(f"id-{number}") for number in range(1000)]
    ours = ClusterNode("id-gpu", True, {}, "127.0.0.1", {"CPU": 2.0, "GPU": 1.0}, {}, is_head=False)
    nodes = foreign(*strange, ours, settings=settings)
    assert nodes.closed(gpu) == set()
    nodes.refuse("id-gpu", "no handler there")
    assert nodes.closed(gpu) == {"id-gpu"}
    nodes.see(strange, {})
    assert nodes.closed(gpu) == {"id-gpu"}  # lost, and Ray may still try to reach it
    assert len(nodes.closed(ONE_CPU)) == 1001


def test_what_others_use_counts_from_the_first_look_and_a_moment_between_two_does_not() -> None:
    nodes = foreign(node("id-1", used=2.0))
    assert nodes.rooms() == {"id-1": NodeCapacity({"CPU": 2.0}, {"CPU": 2.0})}
    nodes.see([node("id-1", used=1.0)], {"id-1": {"CPU": 1.0}})
    nodes.see([node("id-1", used=2.0)], {})
    assert nodes.rooms()["id-1"].others == {"CPU": 0.0}


def test_nodes_of_this_host_offer_what_the_largest_task_needs() -> None:
    large = {"provider": "ray-local", "engine": "ray", "queues": ["q"], "concurrency": 2, "handler": "app:f"}
    offer = FleetConfig.model_validate({**large, "ray": {"queues": {"q": {"num_cpus": 4}}}}).node_offer
    assert offer is not None and (offer.node_cpus, offer.node_gpus) == (8, 0)
    small = FleetConfig.model_validate(large).node_offer
    assert small is not None and small.node_cpus == 2.0
    assert FleetConfig.model_validate({**large, "provider": "ray"}).node_offer is None


def test_fleets_that_share_a_cluster_have_each_their_own_rows_of_its_nodes() -> None:
    """Else one that takes over would take the other's tasks back."""
    strange, hired_by_a = node("f" * 56), node("e" * 56, worker_id="a-1", fleet="a")
    seen: dict[str, list[tuple[str, bool]]] = {}
    for fleet in ("a", "b", "x" * 63):
        nodes = NodeReporter(fleet, RaySettings(), ("q",), None)
        nodes.see([strange, hired_by_a], {})
        seen[fleet] = [(told.worker_id, getattr(told, "is_managed", False)) for told in nodes.report()]
        assert [nodes.worker_of(one.node_id) for one in (strange, hired_by_a)] == [name for name, _ in seen[fleet]]
    assert seen["a"] == [(f"ray-a-{'f' * 16}", False), ("a-1", True)]
    assert seen["b"] == [(f"ray-b-{'f' * 16}", False), (f"ray-b-{'e' * 16}", False)]
    # Names of workers are labels in Ray.
    assert all(label_value(name) == name for names in seen.values() for name, _ in names)


# ------------------------------------------------------------------------------------------------------ the seats


@dataclass
class Ray:
    """Starts nothing by itself; ending a seat takes until that is allowed."""

    # By seat id.
    closed: dict[str, set[str]] = field(default_factory=dict)
    partings: dict[str, "asyncio.Future[Parting | AttemptFailure]"] = field(default_factory=dict)
    called_back: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    # What it says to needs that it does not like.
    refusals: dict[Needs, Exception] = field(default_factory=dict)

    def submit(self, seat_id: str, needs: Resources, closed: Collection[str]) -> Any:
        if frozen(needs) in self.refusals:
            raise self.refusals[frozen(needs)]
        self.closed[seat_id] = set(closed)
        self.partings[seat_id] = asyncio.get_running_loop().create_future()
        return seat_id

    async def parting(self, reference: Any) -> Parting | AttemptFailure:
        return await self.partings[reference]

    async def end(self, reference: Any) -> None:
        self.ended.append(reference)
        await self.may_end.wait()
        self.part(reference, AttemptFailure("ENGINE_ERROR", "cancelled"))

    async def call_back(self, references: Collection[Any]) -> None:
        self.called_back += references
        for reference in references:
            self.part(reference, AttemptFailure("ENGINE_ERROR", "cancelled"))

    def part(self, seat_id: str, parting: Parting | AttemptFailure = None) -> None:
        if not self.partings[seat_id].done():
            self.partings[seat_id].set_result(parting)

    @property
    def seats(self) -> list[str]:
        return list(self.closed)


class Bench:
    """Seats over nodes and a database that answers as told."""

    def __init__(self, nodes: NodeReporter, verdict: NodeVerdict = NodeVerdict.PLACED) -> None:
        self.ray, self.nodes, self.verdict = Ray(), nodes, verdict
        self.placed: list[Placement] = []
        # None: it answers at once.
        self.database: asyncio.Event | None = None
        self.seats = Seats(self.ray, nodes, nodes.settings, self._place)
        self.executor = RayExecutor(self.seats, nodes.settings)
        self.ray.may_end.set()

    def _place(self, placement: Placement) -> "asyncio.Future[NodeVerdict]":
        self.placed.append(placement)
        return asyncio.ensure_future(self._verdict())

    async def _verdict(self) -> NodeVerdict:
        verdict = self.verdict
        if self.database is not None:
            await self.database.wait()
        return verdict

    async def build_context(self, payload: object = None, timeout_s: float | None = None) -> "asyncio.Task[Outcome]":
        claim = Claim(1, uuid4(), "q", json.dumps(payload), 1, 3, timeout_s, 0, NOW)
        running = asyncio.create_task(self.executor.run(claim, lambda _fraction, _note: None))
        await turns()
        return running


async def turns() -> None:
    """As many as anything takes that waits for nobody."""
    for _ in range(10):
        await asyncio.sleep(0)


async def is_over(running: "asyncio.Task[Outcome]") -> Outcome:
    return await asyncio.wait_for(running, LIMIT_S)


async def test_a_task_that_no_node_of_the_fleet_could_ever_hold_fails_at_once() -> None:
    bench = Bench(hired("n1"))
    outcome = await is_over(await bench.build_context({"ray_resources": {"num_cpus": 8}}))
    assert isinstance(outcome, AttemptFailure)
    assert (outcome.code, outcome.retry) == ("BAD_RESOURCES", False)
    assert "CPU 8" in outcome.error
    assert not bench.ray.seats


async def test_amounts_that_ray_refuses_fail_the_tasks_that_ask_for_them_and_no_other() -> None:
    bench = Bench(foreign(node("id-1")))
    bench.ray.refusals[frozen({"CPU": 1.0, "TPU": 3.0})] = ValueError("TPU must be 1, 2 or a multiple of 4")
    neighbour = await bench.build_context()
    claim = await bench.seats.arrive(bench.ray.seats[0], "id-1")
    assert claim is not None
    outcome = await is_over(await bench.build_context({"ray_resources": {"resources": {"TPU": 3}}}))
    assert isinstance(outcome, AttemptFailure)
    assert (outcome.code, outcome.retry) == ("BAD_RESOURCES", False)
    assert "CPU 1, TPU 3 (TPU must be 1, 2 or" in outcome.error
    bench.seats.look()
    await bench.seats.finish(bench.ray.seats[0], claim.token, AttemptSuccess("1"))
    assert await is_over(neighbour) == AttemptSuccess("1")
    assert not bench.seats.counts


async def test_a_seat_that_ray_cannot_take_at_all_is_not_its_tasks_fault() -> None:
    bench = Bench(hired("n1"))
    bench.ray.refusals[ONE_CPU] = RuntimeError("the driver is not connected")
    with pytest.raises(NotBegun, match="not connected") as given_back:
        await is_over(await bench.build_context())
    assert given_back.value.delay_s > 0
    del bench.ray.refusals[ONE_CPU]
    await bench.build_context()
    assert len(bench.ray.seats) == 1


async def test_a_task_that_a_larger_node_might_hold_is_given_back_for_a_while() -> None:
    with pytest.raises(NotBegun, match="memory") as given_back:
        await is_over(await Bench(hired("n1")).build_context({"ray_resources": {"memory_mb": 1 << 20}}))
    assert MISFIT_DELAY_S <= given_back.value.delay_s <= 1.5 * MISFIT_DELAY_S


async def test_of_tasks_that_wait_for_a_cluster_to_grow_only_the_margin_does() -> None:
    bench = Bench(foreign(node("id-1")))
    large = {"ray_resources": {"num_cpus": 8}}
    waiting = [await bench.build_context(large) for _ in range(2)]
    bench.seats.look()
    with pytest.raises(NotBegun):
        await is_over(await bench.build_context(large))
    assert not any(running.done() for running in waiting)
    assert (len(bench.ray.seats), bench.ray.called_back) == (2, [])
    for running in waiting:
        running.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    # Nobody waits, so nothing is wanted of Ray.
    bench.seats.look()
    await turns()
    assert set(bench.ray.called_back) == set(bench.ray.seats)
    assert not bench.seats.counts


async def test_tasks_that_never_fit_take_the_margin_of_their_like_and_of_no_queue() -> None:
    settings = RaySettings(margin=2, num_gpus=1)
    bench = Bench(foreign(node("id-1"), settings=settings))
    absurd = [await bench.build_context({"ray_resources": {"num_cpus": 1e6 + number}}) for number in range(2)]
    with pytest.raises(NotBegun) as given_back:
        await is_over(await bench.build_context({"ray_resources": {"num_cpus": 1e7}}))
    assert given_back.value.delay_s >= MISFIT_DELAY_S
    usual = [await bench.build_context() for _ in range(2)]
    with pytest.raises(NotBegun):
        await is_over(await bench.build_context())
    assert not any(running.done() for running in (*absurd, *usual))
    assert len(bench.ray.seats) == 4


async def test_a_seat_runs_one_attempt_after_another_each_placed_before_it_begins() -> None:
    bench = Bench(hired("n1"))
    running = [await bench.build_context() for _ in range(3)]
    first, second, _third = bench.ray.seats
    claim = await bench.seats.arrive(first, "id-n1")
    tokens = []
    while claim is not None:
        assert bench.placed[-1] == Placement(1, claim.token, "n1")
        assert sum(count for kind, count in bench.seats.counts.items() if kind.node_id == "id-n1") == 1
        tokens.append(claim.token)
        claim = await bench.seats.finish(first, claim.token, AttemptSuccess(str(len(tokens))))
    assert [await is_over(each) for each in running] == [AttemptSuccess("1"), AttemptSuccess("2"), AttemptSuccess("3")]
    assert len(set(tokens)) == 3
    # One that starts too late has nothing to do, and the rest are called back.
    assert await bench.seats.arrive(second, "id-n1") is None
    bench.seats.look()
    await turns()
    assert bench.ray.called_back == [bench.ray.seats[2]]
    assert not bench.seats.counts


async def test_after_its_time_a_seat_gets_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.ray.seat_pool.SEAT_S", 0.0)
    bench = Bench(hired("n1"))
    running = [await bench.build_context() for _ in range(2)]
    claim = await bench.seats.arrive(bench.ray.seats[0], "id-n1")
    assert claim is not None
    assert await bench.seats.finish(bench.ray.seats[0], claim.token, AttemptSuccess("1")) is None
    assert (await is_over(running[0]), running[1].done()) == (AttemptSuccess("1"), False)
    # Ray has one for it.
    assert await bench.seats.arrive(bench.ray.seats[1], "id-n1") is not None


async def test_who_names_no_seat_of_ours_or_no_attempt_of_its_own_gets_and_changes_nothing() -> None:
    bench = Bench(hired("n1"))
    running = [await bench.build_context() for _ in range(2)]
    first, second = bench.ray.seats
    claim = await bench.seats.arrive(first, "id-n1")
    assert claim is not None
    assert await bench.seats.arrive("made up", "id-n1") is None
    assert await bench.seats.arrive(first, "id-n1") is None
    for seat_id, token in (("made up", claim.token), (second, claim.token), (first, uuid4())):
        assert await bench.seats.finish(seat_id, token, AttemptSuccess("forged")) is None
    assert not any(each.done() for each in running)
    assert len(bench.placed) == 1


async def test_a_seat_that_dies_costs_the_attempt_that_ran_and_no_other() -> None:
    bench = Bench(hired("n1"))
    ran, waits = await bench.build_context(), await bench.build_context()
    first, second = bench.ray.seats
    assert await bench.seats.arrive(first, "id-n1") is not None
    bench.ray.part(first, AttemptFailure("CHILD_DIED", "killed"))
    assert await is_over(ran) == AttemptFailure("CHILD_DIED", "killed")
    assert not waits.done()
    # Also one that dies before it starts anything: another takes its place.
    bench.ray.part(second, AttemptFailure("NODE_LOST", "gone"))
    await turns()
    claim = await bench.seats.arrive(bench.ray.seats[2], "id-n1")
    assert claim is not None
    await bench.seats.finish(bench.ray.seats[2], claim.token, AttemptSuccess("1"))
    assert await is_over(waits) == AttemptSuccess("1")


async def test_an_attempt_whose_seat_dies_while_the_database_is_asked_has_not_begun() -> None:
    bench = Bench(hired("n1"))
    running, bench.database = await bench.build_context(), asyncio.Event()
    first = bench.ray.seats[0]
    arriving = asyncio.create_task(bench.seats.arrive(first, "id-n1"))
    await turns()
    bench.ray.part(first, AttemptFailure("CHILD_DIED", "killed"))
    await turns()
    assert not running.done()
    bench.database.set()
    assert await arriving is None
    # It waits again, and Ray has a seat for it.
    assert await bench.seats.arrive(bench.ray.seats[1], "id-n1") is not None
    assert [placement.token for placement in bench.placed] == 2 * [bench.placed[0].token]
    assert not running.done()


@pytest.mark.parametrize("is_told_to_run", [False, True], ids=["before", "after it was told what to run"])
async def test_an_attempt_that_a_node_cannot_run_goes_to_another(is_told_to_run: bool) -> None:
    bench = Bench(hired("n1", "n2"))
    running = await bench.build_context()
    if is_told_to_run:
        assert await bench.seats.arrive(bench.ray.seats[0], "id-n1") is not None
    bench.ray.part(bench.ray.seats[0], NoHandler("no handler there", "id-n1"))
    await turns()
    # Nobody is sent there, and who comes from there gets nothing.
    assert bench.ray.closed[bench.ray.seats[1]] == {"id-n1"}
    assert await bench.seats.arrive(bench.ray.seats[1], "id-n1") is None
    bench.ray.part(bench.ray.seats[1])
    await turns()
    assert await bench.seats.arrive(bench.ray.seats[2], "id-n2") is not None
    assert not running.done()


async def test_a_handler_that_no_node_has_is_the_end() -> None:
    bench = Bench(hired("n1", "n2"))
    running = await bench.build_context()
    for number, name in enumerate(("n1", "n2")):
        bench.ray.part(bench.ray.seats[number], NoHandler(f"no handler on {name}", f"id-{name}"))
        await turns()
    bench.seats.look()
    with pytest.raises(HandlerNotFound, match="handler"):
        await is_over(running)


async def test_a_handler_that_only_the_nodes_of_some_tasks_lack_is_not_the_end_of_the_others() -> None:
    bench = Bench(foreign(node("id-small"), node("id-large", cpus=8.0)))
    running, large = await bench.build_context(), await bench.build_context({"ray_resources": {"num_cpus": 8}})
    assert await bench.seats.arrive(bench.ray.seats[0], "id-small") is not None
    bench.ray.part(bench.ray.seats[1], NoHandler("no handler there", "id-large"))
    await turns()
    bench.seats.look()
    with pytest.raises(NotBegun, match="it needs CPU 8") as given_back:
        await is_over(large)
    assert given_back.value.delay_s >= MISFIT_DELAY_S
    assert not running.done()
    # And none of its kind is claimed for a node that would refuse it.
    assert bench.nodes.outlook(frozen({"CPU": 8.0})) is Schedulability.LATER


async def test_a_node_that_the_database_bars_gets_no_attempt_and_no_further_seat() -> None:
    bench = Bench(hired("n1", "n2"), NodeVerdict.BARRED)
    running = await bench.build_context()
    assert await bench.seats.arrive(bench.ray.seats[0], "id-n1") is None
    assert bench.ray.closed[bench.ray.seats[1]] == {"id-n1"}
    bench.verdict = NodeVerdict.PLACED
    assert await bench.seats.arrive(bench.ray.seats[1], "id-n2") is not None
    assert not running.done()


async def test_an_attempt_whose_claim_is_gone_is_given_back() -> None:
    bench = Bench(hired("n1"), NodeVerdict.LOST)
    running = await bench.build_context()
    assert await bench.seats.arrive(bench.ray.seats[0], "id-n1") is None
    with pytest.raises(NotBegun):
        await is_over(running)
    assert not bench.seats.counts


async def test_a_seat_on_a_node_that_was_not_seen_yet_waits_for_the_next_look() -> None:
    bench = Bench(hired("n1"))
    await bench.build_context()
    arriving = asyncio.create_task(bench.seats.arrive(bench.ray.seats[0], "id-n2"))
    await turns()
    assert not arriving.done()
    bench.nodes.see([*bench.nodes.alive.values(), node("id-n2", worker_id="n2")], {})
    bench.seats.look()
    assert await asyncio.wait_for(arriving, LIMIT_S) is not None
    assert bench.placed[0].worker_id == "n2"


async def test_when_nodes_are_gone_who_waits_is_given_back_at_once() -> None:
    """Its queue is then seen by whoever hires."""
    bench = Bench(hired("n1"))
    running = await bench.build_context()
    bench.nodes.see([], {})
    bench.seats.look()
    with pytest.raises(NotBegun) as given_back:
        await is_over(running)
    await turns()
    assert given_back.value.delay_s == 0.0
    assert bench.ray.called_back == bench.ray.seats
    assert not bench.seats.counts


async def test_an_attempt_on_a_node_that_ray_has_given_up_is_over() -> None:
    """Also where Ray hears nothing of its end, because the node was only cut off; and nodes are looked at meanwhile."""
    bench = Bench(hired("n1"))
    bench.ray.may_end.clear()
    running = await bench.build_context()
    assert await bench.seats.arrive(bench.ray.seats[0], "id-n1") is not None
    bench.seats.look()
    bench.nodes.see([], {})
    for _ in range(3):
        bench.seats.look()
        await turns()
    assert bench.ray.ended == bench.ray.seats
    bench.ray.may_end.set()
    outcome = await is_over(running)
    assert isinstance(outcome, AttemptFailure) and (outcome.code, outcome.retry) == ("NODE_LOST", True)


async def test_an_attempt_that_is_being_placed_on_a_node_that_is_lost_goes_to_another() -> None:
    bench = Bench(hired("n1", "n2"))
    running, bench.database = await bench.build_context(), asyncio.Event()
    arriving = asyncio.create_task(bench.seats.arrive(bench.ray.seats[0], "id-n1"))
    await turns()
    bench.nodes.see([one for one in bench.nodes.alive.values() if one.node_id != "id-n1"], {})
    for _ in range(2):
        bench.seats.look()
        await turns()
    assert (running.done(), bench.ray.called_back) == (False, [bench.ray.seats[0]])
    bench.database.set()
    assert await arriving is None
    assert await bench.seats.arrive(bench.ray.seats[1], "id-n2") is not None
    assert [placement.worker_id for placement in bench.placed] == ["n1", "n2"]
    assert not running.done()


async def test_seats_that_wait_when_a_node_is_lost_are_replaced_and_who_waits_goes_on_waiting() -> None:
    """Ray may be about to place them there, and would wait for that node."""
    bench = Bench(hired("n1", "n2"))
    running, now = await bench.build_context(), asyncio.get_running_loop().time()
    bench.seats.look(stuck_since=now - 60)
    assert len(bench.ray.seats) == 1
    bench.seats.look(stuck_since=now + 60)
    await turns()
    first, second = bench.ray.seats
    assert bench.ray.called_back == [first]
    # What was called back is not let in any more.
    assert await bench.seats.arrive(first, "id-n1") is None
    assert await bench.seats.arrive(second, "id-n2") is not None
    assert not running.done()


async def test_a_seat_that_loads_the_handler_is_let_be_for_as_long_as_its_node_lives() -> None:
    bench = Bench(hired("n1", "n2"))
    running, later = await bench.build_context(), asyncio.get_running_loop().time() + 60
    first = bench.ray.seats[0]
    bench.seats.loading(first, "id-n1")
    bench.seats.loading("made up", "id-n1")
    bench.seats.look(stuck_since=later)
    assert bench.ray.called_back == []
    claim = await bench.seats.arrive(first, "id-n1")
    assert claim is not None
    await bench.seats.finish(first, claim.token, AttemptSuccess("1"))
    assert await is_over(running) == AttemptSuccess("1")
    # Nor if nobody waits any more; but it goes with its node.
    unwanted = await bench.build_context()
    second = bench.ray.seats[1]
    bench.seats.loading(second, "id-n1")
    unwanted.cancel()
    await asyncio.gather(unwanted, return_exceptions=True)
    bench.seats.look()
    await turns()
    assert bench.ray.called_back == []
    bench.nodes.see([one for one in bench.nodes.alive.values() if one.node_id != "id-n1"], {})
    bench.seats.look()
    await turns()
    assert bench.ray.called_back == [second]


async def test_the_time_limit_counts_from_the_beginning_and_ends_the_seat() -> None:
    bench = Bench(hired("n1"))
    running, innocent = await bench.build_context(timeout_s=0.05), await bench.build_context()
    first, hung_up = bench.ray.seats[0], asyncio.Event()
    bench.ray.may_end.clear()
    claim = await bench.seats.arrive(first, "id-n1", hung_up.set)
    assert claim is not None
    async with asyncio.timeout(LIMIT_S):
        while not bench.ray.ended:
            await asyncio.sleep(0.01)
    # It is too late to finish, and what is about to be ended gets nothing more.
    assert await bench.seats.finish(first, claim.token, AttemptSuccess("late")) is None
    assert not hung_up.is_set()
    bench.ray.may_end.set()
    outcome = await is_over(running)
    assert isinstance(outcome, AttemptFailure) and outcome.code == "TIMEOUT"
    # Ray may have been unable to end it, which it does not say.
    assert hung_up.is_set()
    assert (bench.ray.ended, innocent.done()) == ([first], False)


async def test_an_attempt_that_is_not_wanted_any_more_is_ended_with_its_seat_and_one_that_waits_without() -> None:
    bench = Bench(hired("n1"))
    sits, waits = await bench.build_context(), await bench.build_context()
    first, second = bench.ray.seats
    assert await bench.seats.arrive(first, "id-n1") is not None
    for running in (waits, sits):
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await is_over(running)
    assert bench.ray.ended == [first]
    assert await bench.seats.arrive(second, "id-n1") is None
    assert not bench.seats.counts


async def test_when_ray_starts_nothing_at_all_who_waits_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.ray.seat_pool.MAX_SEATS_IN_VAIN", 3)
    bench = Bench(hired("n1"))
    running = await bench.build_context()
    for number in range(3):
        assert not running.done()
        bench.ray.part(bench.ray.seats[number], AttemptFailure("ENGINE_ERROR", "no process can be started"))
        await turns()
    with pytest.raises(NotBegun, match="no process can be started") as given_back:
        await is_over(running)
    assert given_back.value.delay_s > 0
    assert len(bench.ray.seats) == 3
