"""`windlass.health` of workers with heartbeats: a component is healthy only if its worker can do its work."""

from random import Random
from typing import Any

import pytest

from support.api_fixture import InstantProvider
from support.queue_sql import connected
from support.stores import PostgresStores
from windlass.control.cycle import FleetCycle
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate, Standby
from windlass.model.machine import ProviderTraits
from windlass.model.node import AliveNode, DeadNode, dispatcher_lease
from windlass.model.worker import Registration
from windlass.policy.planning_context import build_context

LEADER = Candidate("leader", 3600.0)
DISPATCHER = Candidate("dispatcher", 3600.0, dispatcher_lease("gpus"))
GPU_FLEET: dict[str, Any] = {
    "handler": "app:work",
    "min_workers": 1,
    "max_workers": 1,
    "has_gpu": True,
    "startup_grace_s": 60,
    "heartbeat_interval_s": 5,
    "heartbeat_timeout_s": 30,
    "gpu_not_detected_timeout_s": 600,
}
# The message of a healthy worker is None.
Seen = tuple[str, str | None]


def config_of(**settings: Any) -> FleetConfig:
    return FleetConfig.model_validate({"queues": ("q",), **GPU_FLEET, **settings})


class Fleet:
    """The fleet `gpus` with one worker, real cycles and a provider without delays."""

    def __init__(self, store: PostgresStores, clock: Any, **settings: Any) -> None:
        self.store, self.clock = store, clock
        config = config_of(**settings)
        self._cycle = FleetCycle(
            "gpus",
            config,
            store,
            InstantProvider(ProviderTraits()),
            LEADER,
            Random(4),  # noqa: S311
        )
        self.config, self.worker_id = config, ""

    async def start(self) -> None:
        await self._cycle.run()
        (worker,) = await self.store.workers()
        self.worker_id = worker.id
        await self.store.register(Registration(worker.id, ("q",), fleet="gpus"))

    async def components(self) -> list[tuple[str, str, str | None]]:
        rows = await self.store.component_health()
        return [(row["component"], row["status"], row["error_message"]) for row in rows]

    async def seen(self) -> Seen:
        ((component, *seen),) = await self.components()
        assert component == "worker:q:0"
        return seen[0], seen[1]

    async def is_ready(self) -> bool:
        """How the control loop judges the worker."""
        observed = await self.store.observe(LEADER, "gpus", self.config)
        assert not isinstance(observed, Standby)
        return build_context(observed[1], self.config).states[self.worker_id].is_healthy

    async def seen_after(self, seconds: float, **vitals: int) -> Seen:
        """What a monitor sees after this time, with heartbeats every five seconds."""
        for _ in range(int(seconds // 5)):
            self.clock.advance(5)
            await self.store.heartbeat(self.worker_id, (), vitals)
        await self._cycle.run()
        seen = await self.seen()
        assert (seen[0] == "healthy") is await self.is_ready()
        return seen


@pytest.fixture
async def store(dsn: str, clock: Any) -> Any:
    async with PostgresStores(dsn, virtual_now=clock) as store:
        yield store


async def test_worker_without_gpu_memory_is_unhealthy(store: PostgresStores, clock: Any) -> None:
    fleet = Fleet(store, clock)
    await fleet.start()
    assert await fleet.seen_after(5) == ("starting", "it has not reported a GPU")
    assert await fleet.seen_after(5, vram_total_mb=0, vram_used_mb=0) == ("starting", "it reports no GPU memory")
    assert await fleet.seen_after(60, vram_total_mb=0, vram_used_mb=0) == ("crashed", "it reports no GPU memory")
    assert await fleet.seen_after(5, vram_total_mb=80, vram_used_mb=1) == ("healthy", None)
    lost = ("crashed", "it lost its GPU: it reports no GPU memory")
    assert await fleet.seen_after(5, vram_total_mb=0, vram_used_mb=0) == lost
    assert await fleet.seen_after(5, vram_total_mb=80, vram_used_mb=1) == ("healthy", None)


async def test_worker_that_never_reports_a_gpu_is_unhealthy(store: PostgresStores, clock: Any) -> None:
    fleet = Fleet(store, clock)
    await fleet.start()
    assert await fleet.seen_after(70) == ("crashed", "it has not reported a GPU")


async def test_worker_that_needs_no_gpu_is_healthy_without_one(store: PostgresStores, clock: Any) -> None:
    fleet = Fleet(store, clock, has_gpu=False)
    await fleet.start()
    assert await fleet.seen_after(70, vram_total_mb=0, vram_used_mb=0) == ("healthy", None)


async def test_silent_worker_says_since_when(store: PostgresStores, clock: Any) -> None:
    fleet = Fleet(store, clock, has_gpu=False)
    await fleet.start()
    assert await fleet.seen_after(5) == ("healthy", None)
    clock.advance(31)
    assert await fleet.seen() == ("crashed", "no heartbeat for 31 s")


async def test_paused_worker_is_healthy_and_says_that_it_is_paused(store: PostgresStores, clock: Any) -> None:
    fleet = Fleet(store, clock, has_gpu=False)
    await fleet.start()
    await fleet.seen_after(5)
    await store.set_paused([fleet.worker_id], True)
    assert await fleet.seen() == ("healthy", "worker is paused")
    await store.pause_fleet("gpus", True)
    assert await fleet.seen() == ("healthy", "fleet is paused")
    await store.pause_fleet("gpus", False)
    assert await fleet.seen() == ("healthy", None)


async def test_ray_node_is_healthy_only_while_ray_reports_it_alive(store: PostgresStores, clock: Any) -> None:
    fleet = Fleet(store, clock, provider="ray-local", engine="ray")
    await fleet.start()
    term = await store.acquire_lease(DISPATCHER)
    assert isinstance(term, int)

    async def report(node: AliveNode | DeadNode | None) -> None:
        await store.report_nodes(DISPATCHER, term, "gpus", ["q"], 30.0, [node] if node is not None else [])

    def alive(**total: float) -> AliveNode:
        return AliveNode(fleet.worker_id, "n1", {"CPU": 2.0, **total}, {})

    assert await fleet.seen_after(5) == ("starting", "its node has not joined the Ray cluster")
    await report(None)
    assert await fleet.seen_after(5) == ("starting", "its node has not joined the Ray cluster")
    await report(alive(GPU=1.0))
    assert await fleet.seen_after(5) == ("healthy", None)
    for _ in range(7):
        clock.advance(5)
        await store.heartbeat(fleet.worker_id)
    # Without reports the control loop fails no node, but nothing runs on it.
    silent = "the dispatcher of fleet gpus has not reported on its Ray node for 40 s"
    assert await fleet.seen() == ("crashed", silent)
    await report(alive())
    assert await fleet.seen_after(5) == ("starting", "its Ray node has no GPU")
    assert await fleet.seen_after(10) == ("crashed", "its Ray node has no GPU")
    await report(alive(GPU=1.0))
    assert await fleet.seen_after(5) == ("healthy", None)
    await report(DeadNode(fleet.worker_id, "n1", "killed by the kernel"))
    assert await fleet.seen() == ("crashed", "its Ray node is dead: killed by the kernel")


async def test_fleet_without_a_plan_lists_its_components(dsn: str, store: PostgresStores, clock: Any) -> None:
    """The leader wrote the fleet's row, and ended before its first plan."""
    term = await store.acquire_lease(LEADER)
    assert isinstance(term, int)
    await store.observe(LEADER, "gpus", config_of(min_workers=2, max_workers=3))
    fleet = Fleet(store, clock)
    assert await fleet.components() == [
        (f"worker:q:{slot}", "starting", "not started: the control plane has made no plan of this fleet yet")
        for slot in (0, 1)
    ]
    # A worker that was started by hand creates a fleet that needs none.
    async with connected(dsn) as connection:
        await connection.execute("update windlass.fleets set min_workers = 0")
    assert await fleet.components() == []
