"""A dispatcher's term, in virtual time: Ray says what it is told to, the store is the one in memory."""

import asyncio
from random import Random
from typing import Any

import pytest

from windlass.model.config import Retention
from windlass.model.errors import DatabaseUnavailable
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate, LeaseLost
from windlass.model.node import dispatcher_lease
from windlass.ray.cluster import ClusterNode
from windlass.ray.dispatcher import LEASE_S, Dispatch, Dispatcher
from windlass.ray.seat_pool import Seats
from windlass.simulator.loop import run, virtual_now
from windlass.store.memory.stores import MemoryStores
from windlass.worker.lifecycle import ExitReason

CONFIG = FleetConfig(provider="ray", engine="ray", queues=("q",), handler="app:f")


class Cluster:
    """What Ray says of its nodes."""

    def __init__(self, _address: str) -> None:
        self.seen: list[ClusterNode] = []

    async def nodes(self) -> list[ClusterNode]:
        return self.seen


class Term:
    """A dispatcher that leads, as `run` would have it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, config: FleetConfig = CONFIG) -> None:
        monkeypatch.setattr("windlass.ray.dispatcher.Cluster", Cluster)
        self.store = MemoryStores(virtual_now, Retention(), Random(1))  # noqa: S311
        self.dispatcher = Dispatcher(Dispatch("f", config, "127.0.0.1:1", 1000, None), self.store, self._transport)
        self.seats = Seats(self, self.dispatcher._nodes, config.ray, self._never)  # type: ignore[arg-type]

    def _transport(self) -> Any:
        raise AssertionError("nobody works here")

    def _never(self, _placement: Any) -> Any:
        raise AssertionError("nothing is placed here")

    @property
    def ray(self) -> Any:
        return self.dispatcher._cluster

    async def lead(self) -> int:
        term = await self.dispatcher._lead()
        assert term is not None
        return term

    async def look(self, term: int) -> None:
        await self.dispatcher._look(self.seats, term)

    async def told_of(self) -> list[str]:
        return [worker.id for worker in await self.store.workers()]


def node(node_id: str) -> ClusterNode:
    return ClusterNode(node_id, True, {}, "127.0.0.1", {"CPU": 2.0}, {}, is_head=False)


def test_a_fleet_that_cannot_be_taken_over_yet_is_asked_for_again_under_the_same_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def locked() -> None:
        bench = Term(monkeypatch)
        term = await bench.lead()
        take_over, times = bench.store.take_over_nodes, 0

        async def taken(*arguments: Any) -> int:
            nonlocal times
            times += 1
            if times < 20:  # for longer than a lease
                raise DatabaseUnavailable("somebody has locked one of its tasks")
            return await take_over(*arguments)

        monkeypatch.setattr(bench.store, "take_over_nodes", taken)
        assert await bench.dispatcher._take_over(term) == 0
        assert times == 20
        times = 0
        await bench.store.release_lease(bench.dispatcher._candidate)
        assert isinstance(await bench.store.acquire_lease(Candidate("other", 1e6, dispatcher_lease("f"))), int)
        with pytest.raises(LeaseLost):
            await bench.dispatcher._take_over(term)

    run(locked())


def test_after_an_outage_that_outlasted_its_lease_a_dispatcher_goes_on_if_nobody_took_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def outage() -> None:
        bench = Term(monkeypatch)
        term = await bench.lead()
        bench.ray.seen = [node("id-1")]
        await bench.look(term)
        await asyncio.sleep(LEASE_S + 1)
        # The database answers again, and a look comes before the next renewal.
        bench.ray.seen.append(node("id-2"))
        await bench.look(term)
        assert await bench.told_of() == ["ray-f-id-1"]
        assert await bench.lead() == term
        await bench.look(term)
        assert await bench.told_of() == ["ray-f-id-1", "ray-f-id-2"]

    run(outage())


def test_a_lease_that_runs_out_while_nodes_are_reported_is_judged_by_its_renewal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def slow() -> None:
        bench = Term(monkeypatch)
        term = await bench.lead()
        bench.store.tables.leases.rows[dispatcher_lease("f")].expires_at = virtual_now()
        await bench.look(term)
        # Nothing is claimed until it is known whose it is.
        assert not bench.dispatcher._trust.is_valid
        assert isinstance(await bench.store.acquire_lease(Candidate("another", LEASE_S, dispatcher_lease("f"))), int)
        with pytest.raises(LeaseLost, match="another dispatcher acts for fleet f"):
            await bench.dispatcher._renew(term)

    run(slow())


def test_seats_that_wait_since_a_loss_are_replaced_in_time_however_many_losses_follow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def losses() -> list[float | None]:
        bench, told = Term(monkeypatch), []
        monkeypatch.setattr(bench.seats, "look", told.append)
        for number in range(7):
            # Every four seconds another node takes the place of the one before it, three times.
            bench.ray.seen = [node(f"id-{min(number, 3)}")]
            await bench.look(1)
            await asyncio.sleep(4)
        return told

    assert run(losses()) == [None, None, None, None, 4.0, 8.0, 12.0]


class Runtime:
    """Works until it is told to end, by us or by others."""

    def __init__(self) -> None:
        self.limits_s: list[float | None] = []
        self.is_told = asyncio.Event()

    async def work(self) -> ExitReason:
        await self.is_told.wait()
        return ExitReason.DRAINED

    def drain(self, _why: str, limit_s: float | None = None) -> None:
        self.limits_s.append(limit_s)
        self.is_told.set()


@pytest.mark.parametrize("is_by_us", [False, True], ids=["others", "us"])
def test_a_part_that_is_told_to_end_by_others_has_the_whole_start_anew_in_good_order(
    monkeypatch: pytest.MonkeyPatch, is_by_us: bool
) -> None:
    async def beside() -> None:
        dispatcher = Term(monkeypatch).dispatcher
        told, other = Runtime(), Runtime()
        dispatcher._runtimes.extend([told, other])  # type: ignore[list-item]
        asyncio.get_running_loop().call_later(1, dispatcher.stop if is_by_us else told.is_told.set)
        async with asyncio.timeout(10):
            if is_by_us:
                await dispatcher._run_beside()
            else:
                with pytest.raises(LeaseLost, match="told to end"):
                    await dispatcher._run_beside()
        # What runs is allowed its time.
        assert other.limits_s[0] is None

    run(beside())
