"""`windlass cycle` from cron, at whatever pace: an idle server that is paid by the hour goes, before its next one."""

import asyncio
from random import Random

import pytest

from support.hetzner_fixture import Bed
from windlass.control.cycle import FleetCycle, run_once
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate
from windlass.model.task import new_task
from windlass.simulator.loop import run, virtual_now
from windlass.store.memory.stores import MemoryStores

HOUR_S = 3600.0
FLEET = FleetConfig(
    provider="hetzner", queues=("red",), handler="app:work", min_workers=0, max_workers=3, concurrency=1
)


class Cron:
    """One fleet of three servers, and a program that runs one cycle of it and ends, every so often."""

    def __init__(self, every_s: float) -> None:
        self.every_s = every_s
        self.rng = Random(1)  # noqa: S311
        self.store, self.project = MemoryStores(virtual_now), Bed()

    async def tick(self) -> None:
        """Whoever is there was heard a moment ago, and has been idle for long."""
        for worker in await self.store.workers():
            await self.store.heartbeat(worker.id, (), {"idle_s": 60.0})
        provider, leader = self.project.provider(), Candidate("cron", 30.0)
        await run_once([FleetCycle("red", FLEET, self.store, provider, leader, self.rng)])

    async def hire(self) -> None:
        for _ in range(3):
            await self.store.enqueue(new_task("red", {}))
        await self.tick()
        assert len(self.project.servers) == 3
        for task in await self.store.tasks(limit=3):
            await self.store.cancel_task(task.id, "enough")

    async def lives_s(self) -> float:
        """How long it takes until the last of them is gone, and six hours at most."""
        began = asyncio.get_running_loop().time()
        while self.project.servers and asyncio.get_running_loop().time() - began < 6 * HOUR_S:
            await asyncio.sleep(self.every_s)
            await self.tick()
        return asyncio.get_running_loop().time() - began


@pytest.mark.parametrize("every_s", [10, 60, 300, 900])
@pytest.mark.parametrize("begins_s", [0, 7, 31])
def test_an_idle_server_is_gone_before_its_next_hour_however_far_apart_cycles_are(
    every_s: float, begins_s: float
) -> None:
    async def story() -> None:
        cron = Cron(every_s)
        await cron.hire()
        await asyncio.sleep(begins_s)  # the hour of a server begins at any moment between two cycles
        lived_s = await cron.lives_s() + begins_s
        assert lived_s < HOUR_S
        assert lived_s > HOUR_S - 4 * every_s - 60, "what is paid is used"

    run(story())


def test_cycles_too_far_apart_for_any_window_let_an_idle_server_go_as_soon_as_that_is_known() -> None:
    async def story() -> None:
        cron = Cron(HOUR_S)
        await cron.hire()
        assert await cron.lives_s() <= 3 * HOUR_S + 60

    run(story())


@pytest.mark.parametrize("is_single", [True, False], ids=["of cron, they are its pace", "of one program, outages"])
def test_gaps_between_cycles_are(is_single: bool) -> None:
    async def story() -> None:
        cron = Cron(every_s=300)
        lasting = FleetCycle("red", FLEET, cron.store, cron.project.provider(), Candidate("up", 30.0), cron.rng)
        for _ in range(4):
            await (cron.tick() if is_single else lasting.run())
            await asyncio.sleep(cron.every_s)
        (fleet,) = await cron.store.fleets()
        assert fleet.next_plan_in_s == pytest.approx(300 if is_single else FLEET.poll_interval_s, abs=5)

    run(story())
