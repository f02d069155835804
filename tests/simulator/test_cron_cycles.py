"""`windlass cycle` from cron, at any interval: an idle server is deleted before its next billing hour."""

import asyncio
from random import Random

import pytest

from support.hetzner_fixture import EmulatedHetzner
from support.memory_store.stores import MemoryStores
from support.simulator.loop import run, virtual_now
from windlass.control.cycle import FleetCycle, run_once
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate
from windlass.model.task import new_task

HOUR_S = 3600.0
FLEET = FleetConfig(
    provider="hetzner", queues=("red",), handler="app:work", policy="clear-time", max_workers=3, concurrency=1
)


class Cron:
    """One fleet of three servers, and a process that regularly runs one cycle and ends."""

    def __init__(self, every_s: float) -> None:
        self.every_s = every_s
        self.rng = Random(1)  # noqa: S311
        self.store, self.project = MemoryStores(virtual_now), EmulatedHetzner()

    async def tick(self) -> None:
        """Send a heartbeat of every worker, idle for a minute, and run one cycle."""
        for worker in await self.store.workers():
            await self.store.heartbeat(worker.id, (), {"idle_s": 60.0})
        provider, leader = self.project.provider(), Candidate("cron", 30.0)
        await run_once([FleetCycle("red", FLEET, self.store, provider, leader, self.rng)])

    async def spawn_three(self) -> None:
        for _ in range(3):
            await self.store.enqueue(new_task("red", {}))
        await self.tick()
        assert len(self.project.servers) == 3
        for task in await self.store.tasks(limit=3):
            await self.store.cancel_task(task.id, "enough")

    async def lives_s(self) -> float:
        """How long the last server lives, at most six hours."""
        began = asyncio.get_running_loop().time()
        while self.project.servers and asyncio.get_running_loop().time() - began < 6 * HOUR_S:
            await asyncio.sleep(self.every_s)
            await self.tick()
        return asyncio.get_running_loop().time() - began


@pytest.mark.parametrize("every_s", [10, 60, 300, 900])
@pytest.mark.parametrize("begins_s", [0, 7, 31])
def test_idle_server_is_deleted_before_its_next_billing_hour(every_s: float, begins_s: float) -> None:
    async def scenario() -> None:
        cron = Cron(every_s)
        await cron.spawn_three()
        await asyncio.sleep(begins_s)  # a billing hour may begin at any moment between two cycles
        lived_s = await cron.lives_s() + begins_s
        assert lived_s < HOUR_S
        assert lived_s > HOUR_S - 4 * every_s - 60, "the billed hour is used"

    run(scenario())


def test_hourly_cron_deletes_idle_servers_once_the_interval_is_known() -> None:
    async def scenario() -> None:
        cron = Cron(HOUR_S)
        await cron.spawn_three()
        assert await cron.lives_s() <= 3 * HOUR_S + 60

    run(scenario())


@pytest.mark.parametrize("is_cron", [True, False], ids=["gaps between cron processes", "gaps of one process"])
def test_next_plan_is_due_after_the_cron_interval_not_after_an_outage(is_cron: bool) -> None:
    async def scenario() -> None:
        cron = Cron(every_s=300)
        lasting = FleetCycle("red", FLEET, cron.store, cron.project.provider(), Candidate("up", 30.0), cron.rng)
        for _ in range(4):
            await (cron.tick() if is_cron else lasting.run())
            await asyncio.sleep(cron.every_s)
        (fleet,) = await cron.store.fleets()
        assert fleet.next_plan_in_s == pytest.approx(300 if is_cron else FLEET.poll_interval_s, abs=5)

    run(scenario())
