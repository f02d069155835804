"""Which nodes get tasks, what a task may expect of them, and what becomes of one that can expect nothing."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import pytest

from windlass.engine.attempt import Answer, NoHandler, NotStarted
from windlass.engine.cluster import FLEET_LABEL, WORKER_LABEL, ClusterNode, label_value
from windlass.engine.executor import MISFIT_DELAY_S, Flights, RayExecutor
from windlass.engine.nodes import REFUSAL_S, Nodes, Outlook
from windlass.engine.room import NodeRoom
from windlass.model.errors import HandlerNotFound
from windlass.model.fleet import FleetConfig
from windlass.model.node import Placement, Resources, Verdict
from windlass.model.ray import RaySettings, TaskNeeds, frozen
from windlass.model.task import Claim
from windlass.worker.executor import Failure, NotBegun, Outcome, Success

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ONE_CPU = frozen({"CPU": 1.0})
LIMIT_S = 5.0


def node(
    node_id: str, *, cpus: float = 2.0, worker_id: str | None = None, fleet: str = "many", used: float = 0.0
) -> ClusterNode:
    labels = {WORKER_LABEL: worker_id, FLEET_LABEL: fleet} if worker_id is not None else {}
    return ClusterNode(node_id, True, labels, "127.0.0.1", {"CPU": cpus}, {"CPU": used}, is_head=False)


def hired(*names: str, settings: RaySettings | None = None, clock: list[float] | None = None) -> Nodes:
    settings, ticks = settings or RaySettings(node_cpus=2), clock or [0.0]
    nodes = Nodes("many", settings, ("q",), settings, clock=lambda: ticks[0])
    nodes.see([node(f"id-{name}", worker_id=name) for name in names], {})
    return nodes


def foreign(*seen: ClusterNode, settings: RaySettings | None = None, queues: tuple[str, ...] = ("q",)) -> Nodes:
    nodes = Nodes("many", settings or RaySettings(margin=2), queues, None)
    nodes.see(seen, {})
    return nodes


# ------------------------------------------------------------------------------------------------------ the nodes


def test_what_a_task_may_expect_of_hired_nodes() -> None:
    nodes = hired("n1")
    assert nodes.outlook(ONE_CPU) is Outlook.FITS
    assert nodes.outlook(frozen({"CPU": 8.0})) is Outlook.NEVER
    assert nodes.outlook(frozen({"disk": 1.0})) is Outlook.NEVER
    # Nobody said how much memory a node has: a larger one may come.
    assert nodes.outlook(frozen({"CPU": 1.0, "memory": 2.0**40})) is Outlook.LATER
    assert nodes.outlook(ONE_CPU, {"id-n1"}) is Outlook.LATER
    nodes.bar(["n1"])
    assert nodes.outlook(ONE_CPU) is Outlook.LATER


def test_a_cluster_that_is_not_ours_may_grow() -> None:
    nodes = foreign(node("id-1"))
    assert nodes.outlook(frozen({"CPU": 8.0})) is Outlook.AWAITED
    assert foreign().outlook(ONE_CPU) is Outlook.AWAITED
    # One that is only paused is none to wait for.
    nodes.bar(["ray-many-id-1"])
    assert nodes.outlook(ONE_CPU) is Outlook.LATER


def test_a_node_that_cannot_run_our_tasks_is_passed_over_for_a_while_and_all_together_are_the_end() -> None:
    clock = [0.0]
    nodes = hired("n1", "n2", clock=clock)
    assert nodes.refuse("id-n1", "no handler there")
    assert not nodes.refuse("id-n1", "no handler there")
    assert (nodes.closed, nodes.rooms().keys()) == ({"id-n1"}, {"id-n2"})
    assert nodes.outlook(ONE_CPU) is Outlook.FITS
    nodes.refuse("id-n2", "nor there")
    assert nodes.outlook(ONE_CPU) is Outlook.REFUSED
    clock[0] = REFUSAL_S + 1
    nodes.see(nodes.alive.values(), {})
    assert nodes.outlook(ONE_CPU) is Outlook.FITS


def test_a_node_that_is_lost_is_kept_in_mind_and_one_that_was_to_end_is_not() -> None:
    nodes = hired("n1", "n2", "n3")
    nodes.bar(["n3"])
    n1, n2, n3 = nodes.alive.values()
    assert not nodes.see([n1, n2, n3], {})
    assert not nodes.see([n1, n2], {})
    assert nodes.see([n2], {})
    assert nodes.closed == {"id-n1"}
    assert not nodes.see([n2], {})


def test_nodes_of_others_that_hold_any_of_our_queues_are_told_of_and_no_other() -> None:
    settings = RaySettings(num_gpus=1, queues={"q": TaskNeeds(num_cpus=1)})
    nodes = foreign(node("id-1", cpus=3.0), node("id-head", cpus=0.0), settings=settings, queues=("q", "g"))
    assert [(told.worker_id, told.places) for told in nodes.report()] == [("ray-many-id-1", 3)]
    assert nodes.worker_of("id-1") == "ray-many-id-1"
    assert nodes.worker_of("id-head") is None
    # A task that needs nothing would fit there too.
    assert nodes.closed == {"id-head"}


def test_what_others_use_counts_from_the_first_look_and_a_moment_between_two_does_not() -> None:
    nodes = foreign(node("id-1", used=2.0))
    assert nodes.rooms() == {"id-1": NodeRoom({"CPU": 2.0}, {"CPU": 2.0})}
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
        nodes = Nodes(fleet, RaySettings(), ("q",), None)
        nodes.see([strange, hired_by_a], {})
        seen[fleet] = [(told.worker_id, getattr(told, "is_hired", False)) for told in nodes.report()]
        assert [nodes.worker_of(one.node_id) for one in (strange, hired_by_a)] == [name for name, _ in seen[fleet]]
    assert seen["a"] == [(f"ray-a-{'f' * 16}", False), ("a-1", True)]
    assert seen["b"] == [(f"ray-b-{'f' * 16}", False), (f"ray-b-{'e' * 16}", False)]
    # Names of workers are labels in Ray.
    assert all(label_value(name) == name for names in seen.values() for name, _ in names)


# ---------------------------------------------------------------------------------------------------- the flights


@dataclass
class Ray:
    """Answers as told, and otherwise not at all; ending an attempt takes until it is let go."""

    answers: list[Answer | Callable[[UUID], Awaitable[Answer]]] = field(default_factory=list)
    closed: list[set[str]] = field(default_factory=list)
    submitted: asyncio.Event = field(default_factory=asyncio.Event)
    is_ending: asyncio.Event = field(default_factory=asyncio.Event)
    may_end: asyncio.Event = field(default_factory=asyncio.Event)

    def submit(self, claim: Claim, _needs: Resources, closed: Collection[str]) -> Any:
        self.closed.append(set(closed))
        self.submitted.set()
        return claim.token

    async def answer(self, reference: Any) -> Answer:
        if not self.answers:
            await asyncio.Event().wait()
        answer = self.answers.pop(0)
        return await answer(reference) if callable(answer) else answer

    async def end(self, _reference: Any) -> None:
        self.is_ending.set()
        await self.may_end.wait()


def claim(payload: object = None) -> Claim:
    return Claim(1, uuid4(), "q", json.dumps(payload), 1, 3, None, 0, NOW)


def flights_of(nodes: Nodes, verdict: Verdict = Verdict.PLACED) -> Flights:
    def place(_placement: Placement) -> "asyncio.Future[Verdict]":
        answer: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        answer.set_result(verdict)
        return answer

    return Flights(nodes, place)


async def run(nodes: Nodes, ray: Ray, payload: object = None, flights: Flights | None = None) -> Outcome:
    executor = RayExecutor(ray, flights_of(nodes) if flights is None else flights, nodes.settings)
    return await asyncio.wait_for(executor.run(claim(payload), lambda _fraction, _note: None), LIMIT_S)


async def test_a_task_that_no_node_of_the_fleet_could_ever_hold_fails_at_once() -> None:
    ray = Ray()
    outcome = await run(hired("n1"), ray, {"ray_resources": {"num_cpus": 8}})
    assert isinstance(outcome, Failure)
    assert (outcome.code, outcome.retry) == ("BAD_RESOURCES", False)
    assert "CPU 8" in outcome.error
    assert not ray.closed


async def test_a_task_that_a_larger_node_might_hold_is_given_back_for_a_while() -> None:
    with pytest.raises(NotBegun, match="memory") as given_back:
        await run(hired("n1"), Ray(), {"ray_resources": {"memory_mb": 1 << 20}})
    assert MISFIT_DELAY_S <= given_back.value.delay_s <= 1.5 * MISFIT_DELAY_S


async def test_of_tasks_that_wait_for_a_cluster_to_grow_only_the_margin_does() -> None:
    nodes, ray = foreign(node("id-1")), Ray()
    flights = flights_of(nodes)
    large = {"ray_resources": {"num_cpus": 8}}
    executor = RayExecutor(ray, flights, nodes.settings)
    async with asyncio.timeout(LIMIT_S):
        waiting = [asyncio.create_task(executor.run(claim(large), lambda _f, _n: None)) for _ in range(2)]
        while len(ray.closed) < 2:
            ray.submitted.clear()
            await ray.submitted.wait()
        flights.ground()
        with pytest.raises(NotBegun):
            await executor.run(claim(large), lambda _f, _n: None)
        ray.may_end.set()
        for task in waiting:
            assert not task.done()
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_an_attempt_that_a_node_cannot_run_goes_to_another() -> None:
    ray = Ray([NoHandler("no handler there", "id-n1"), Success("1")])
    nodes = hired("n1", "n2")
    assert await run(nodes, ray) == Success("1")
    assert ray.closed == [set(), {"id-n1"}]
    # Nobody else is sent there either.
    ray.answers.append(Success("2"))
    assert await run(nodes, ray) == Success("2")
    assert ray.closed[2] == {"id-n1"}


async def test_a_handler_that_no_node_has_is_the_end() -> None:
    ray = Ray([NoHandler("no handler there", "id-n1"), NoHandler("nor there", "id-n2")])
    with pytest.raises(HandlerNotFound, match="handler"):
        await run(hired("n1", "n2"), ray)


@pytest.mark.parametrize(
    ("place", "verdict"), [("id-n1", Verdict.BARRED), ("id-unseen", Verdict.PLACED)], ids=["barred", "not yet seen"]
)
async def test_an_attempt_that_a_node_sends_away_does_not_come_there_again(place: str, verdict: Verdict) -> None:
    nodes = hired("n1", "n2")
    flights = flights_of(nodes, verdict)

    async def ask(token: UUID) -> Answer:
        return Success("begun") if await flights.may_start(token, place) else NotStarted("sent away")

    ray = Ray([ask, Success("elsewhere")])
    assert await run(nodes, ray, flights=flights) == Success("elsewhere")
    assert ray.closed == [set(), {place}]


async def test_one_that_is_being_called_back_can_be_called_again() -> None:
    """Ray takes its time to end an attempt, and nodes are looked at more often than that."""
    nodes, ray = hired("n1"), Ray()
    flights = flights_of(nodes)
    executor = RayExecutor(ray, flights, nodes.settings)
    attempt = asyncio.create_task(executor.run(claim(), lambda _f, _n: None))
    async with asyncio.timeout(LIMIT_S):
        await ray.submitted.wait()
        nodes.see([], {})
        flights.ground()
        await ray.is_ending.wait()
        flights.ground()
        ray.may_end.set()
        with pytest.raises(NotBegun) as given_back:
            await attempt
    # Its queue is seen by whoever hires, at once.
    assert given_back.value.delay_s == 0.0
    assert not flights.counts


async def test_an_attempt_on_a_node_that_ray_has_given_up_is_over() -> None:
    """Also where Ray hears nothing of its end, because the node was only cut off."""
    nodes, ray, one = hired("n1"), Ray(), claim()
    flights = flights_of(nodes)
    attempt = asyncio.create_task(RayExecutor(ray, flights, nodes.settings).run(one, lambda _f, _n: None))
    async with asyncio.timeout(LIMIT_S):
        await ray.submitted.wait()
        assert await flights.may_start(one.token, "id-n1")
        flights.ground()
        nodes.see([], {})
        flights.ground()
        await ray.is_ending.wait()
        flights.ground()
        ray.may_end.set()
        outcome = await attempt
    assert isinstance(outcome, Failure) and (outcome.code, outcome.retry) == ("NODE_LOST", True)


async def test_what_waits_when_a_node_is_lost_is_given_back_and_comes_again() -> None:
    """Ray may be about to place it there, and would wait for that node."""
    nodes, ray = hired("n1", "n2"), Ray()
    flights = flights_of(nodes)
    attempt = asyncio.create_task(RayExecutor(ray, flights, nodes.settings).run(claim(), lambda _f, _n: None))
    async with asyncio.timeout(LIMIT_S):
        await ray.submitted.wait()
        flights.ground(waiting_since=asyncio.get_running_loop().time() - 60)
        for _ in range(5):  # as many turns as it would take
            await asyncio.sleep(0)
        assert not ray.is_ending.is_set()
        flights.ground(waiting_since=asyncio.get_running_loop().time() + 60)
        ray.may_end.set()
        with pytest.raises(NotBegun) as given_back:
            await attempt
    assert given_back.value.delay_s == 0.0
    assert len(ray.closed) == 1
