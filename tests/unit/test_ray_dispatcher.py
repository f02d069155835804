"""Parts of the dispatcher in virtual time: its lease, its observation of nodes, its runtimes."""

import asyncio
from random import Random
from typing import Any

import pytest

from support.ray_builders import make_node
from windlass.model.config import Retention
from windlass.model.errors import DatabaseUnavailable
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate, LeaseLost
from windlass.model.node import dispatcher_lease
from windlass.ray.cluster import Cluster, ClusterNode
from windlass.ray.dispatcher_lease import LEASE_S, DispatcherLease
from windlass.ray.node_table import NodeTable
from windlass.ray.node_watch import NodeWatch
from windlass.ray.runtime_group import RuntimeGroup
from windlass.ray.seat_pool import SeatPool
from windlass.simulator.loop import run, virtual_now
from windlass.store.memory.stores import MemoryStores
from windlass.worker.lifecycle import ExitReason

CONFIG = FleetConfig(provider="ray", engine="ray", queues=("q",), handler="app:f")
ANOTHER = Candidate("another", LEASE_S, dispatcher_lease("f"))


class FakeCluster(Cluster):
    """Lists the nodes in `nodes`."""

    def __init__(self) -> None:
        super().__init__("127.0.0.1:1")
        self.nodes: list[ClusterNode] = []

    async def list_nodes(self) -> list[ClusterNode]:
        return self.nodes


class IdlePool(SeatPool):
    """Has no attempts, and records the calls of reconcile()."""

    def __init__(self, nodes: NodeTable) -> None:
        super().__init__(self, nodes, CONFIG.ray, self)  # type: ignore[arg-type]
        self.stuck_since: list[float | None] = []

    def reconcile(self, stuck_since: float | None = None) -> None:
        self.stuck_since.append(stuck_since)


class DispatcherParts:
    """The lease and the node watch of a dispatcher, over the memory store."""

    def __init__(self) -> None:
        self.store = MemoryStores(virtual_now, Retention(), Random(1))  # noqa: S311
        self.cluster = FakeCluster()
        self.lease = DispatcherLease(self.store, "f")
        nodes = NodeTable("f", CONFIG.ray, CONFIG.queues, None)
        self.pool = IdlePool(nodes)
        self.watch = NodeWatch(CONFIG, nodes, self.lease, self.store, self.cluster, lambda: None)

    async def acquire_lease(self) -> int:
        assert await self.lease.acquire(asyncio.Event())
        return self.lease.term

    async def observe(self) -> None:
        await self.watch.observe(self.pool)

    async def reported_workers(self) -> list[str]:
        return [worker.id for worker in await self.store.workers()]


def test_take_over_is_retried_under_the_same_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    async def take_over() -> None:
        parts, stop = DispatcherParts(), asyncio.Event()
        await parts.acquire_lease()
        take_over_nodes, calls = parts.store.take_over_nodes, 0

        async def fail_for_longer_than_a_lease(*arguments: Any) -> int:
            nonlocal calls
            calls += 1
            if calls < 20:
                raise DatabaseUnavailable("a task is locked")
            return await take_over_nodes(*arguments)

        monkeypatch.setattr(parts.store, "take_over_nodes", fail_for_longer_than_a_lease)
        assert await parts.lease.take_over(stop) == 0
        assert calls == 20
        calls = 0
        await parts.lease.release()
        assert isinstance(await parts.store.acquire_lease(Candidate("another", 1e6, dispatcher_lease("f"))), int)
        with pytest.raises(LeaseLost):
            await parts.lease.take_over(stop)

    run(take_over())


def test_dispatcher_continues_after_an_outage_if_its_lease_was_not_taken() -> None:
    async def outage() -> None:
        parts = DispatcherParts()
        term = await parts.acquire_lease()
        parts.cluster.nodes = [make_node("id-1")]
        await parts.observe()
        await asyncio.sleep(LEASE_S + 1)
        # The database responds again, and nodes are observed before the next renewal.
        parts.cluster.nodes.append(make_node("id-2"))
        await parts.observe()
        assert await parts.reported_workers() == ["ray-f-id-1"]
        assert await parts.acquire_lease() == term
        await parts.observe()
        assert await parts.reported_workers() == ["ray-f-id-1", "ray-f-id-2"]

    run(outage())


def test_lease_that_expires_during_a_report_is_decided_by_its_renewal() -> None:
    async def slow_report() -> None:
        parts = DispatcherParts()
        await parts.acquire_lease()
        parts.store.tables.leases.rows[dispatcher_lease("f")].expires_at = virtual_now()
        await parts.observe()
        # Nothing is claimed until the next renewal.
        assert not parts.lease.is_valid
        assert isinstance(await parts.store.acquire_lease(ANOTHER), int)
        with pytest.raises(LeaseLost, match="another dispatcher of fleet f is active"):
            await parts.lease.renew_until_lost(lambda: None)

    run(slow_report())


def test_seats_pending_since_a_node_loss_are_replaced_after_each_loss() -> None:
    async def losses() -> list[float | None]:
        parts = DispatcherParts()
        for number in range(7):
            # Every four seconds another node replaces the previous one, three times.
            parts.cluster.nodes = [make_node(f"id-{min(number, 3)}")]
            await parts.observe()
            await asyncio.sleep(4)
        return parts.pool.stuck_since

    assert run(losses()) == [None, None, None, None, 4.0, 8.0, 12.0]


class FakeRuntime:
    """Works until it is drained."""

    def __init__(self) -> None:
        self.drain_limits_s: list[float | None] = []
        self.is_drained = asyncio.Event()

    async def work(self) -> ExitReason:
        await self.is_drained.wait()
        return ExitReason.DRAINED

    def drain(self, _reason: str, limit_s: float | None = None) -> None:
        self.drain_limits_s.append(limit_s)
        self.is_drained.set()


@pytest.mark.parametrize("is_stopped", [False, True], ids=["by the control plane", "by a stop request"])
def test_when_one_runtime_is_drained_all_drain(is_stopped: bool) -> None:
    async def drain_one() -> None:
        group, drained, other = RuntimeGroup("d"), FakeRuntime(), FakeRuntime()
        group.add(drained)  # type: ignore[arg-type]
        group.add(other)  # type: ignore[arg-type]
        asyncio.get_running_loop().call_later(1, group.stop if is_stopped else drained.is_drained.set)
        async with asyncio.timeout(10):
            if is_stopped:
                await group.run()
            else:
                with pytest.raises(LeaseLost, match="drained by the control plane"):
                    await group.run()
        # Running tasks may finish within the normal limit.
        assert other.drain_limits_s[0] is None

    run(drain_one())
