"""A cold start that takes a quarter of an hour: no machine is deleted before it joined, no hour is billed twice.

The real control loop runs over the real providers and the emulated vendors, in virtual time: with the default policy,
and with the seed's, which fixes the number of machines. Workers are played by the test: each joins as soon as its
machine could run a program.
"""

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from support import hetzner_fixture, runpod_fixture
from support.memory_store.stores import MemoryStores
from support.simulator.loop import run, virtual_now
from windlass.control.cycle import FleetCycle
from windlass.model.auth import Activation, hash_of
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate
from windlass.model.machine import MachineRequest
from windlass.model.runpod import RunpodSettings
from windlass.model.task import Finished, TaskStatus, new_task
from windlass.model.worker import Registration

PULL_S = 900.0
TASKS = 6
LIMIT_S = 3 * 3600.0


class ColdStart:
    """`boots_in_s`: from the moment at which the vendor reports a machine as running until its worker can join."""

    def __init__(self, config: FleetConfig, provider: Any, boots_in_s: float) -> None:
        self.store = MemoryStores(virtual_now)
        self.config, self.provider, self.boots_in_s = config, provider, boots_in_s
        self.tokens: dict[str, str] = {}
        self.joined: set[str] = set()
        self.deleted: list[str] = []
        create, delete = provider.create, provider.delete

        async def record_creation(request: MachineRequest) -> Any:
            self.tokens[request.name] = request.join_token or ""
            return await create(request)

        async def record_deletion(machine: Any) -> Any:
            self.deleted.append(machine.name)
            return await delete(machine)

        provider.create, provider.delete = record_creation, record_deletion
        self.cycle = FleetCycle("red", config, self.store, provider, Candidate("ann", 60.0), Random(1))  # noqa: S311

    async def run(self, is_running: Callable[[str], float | None]) -> None:
        """`is_running`: how long the machine of this worker has been running, by the vendor's own state."""
        ids = [await self.store.enqueue(new_task("red")) for _ in range(TASKS)]
        while virtual_now().timestamp() - self.started < LIMIT_S:
            await self.cycle.run()
            for worker_id in set(self.tokens) - self.joined - set(self.deleted):
                since_s = is_running(worker_id)
                if since_s is not None and since_s >= self.boots_in_s:
                    await self._join(worker_id)
            for worker_id in self.joined - set(self.deleted):
                await self._work(worker_id)
            if [(await self.store.task(id_)).status for id_ in ids] == [TaskStatus.COMPLETE] * TASKS:
                return
            await asyncio.sleep(self.config.poll_interval_s)
        pytest.fail("not all tasks completed")

    @property
    def started(self) -> float:
        if not hasattr(self, "_started"):
            self._started = virtual_now().timestamp()
        return self._started

    async def _join(self, worker_id: str) -> None:
        token = hash_of(self.tokens[worker_id])
        assert await self.store.activate(worker_id, token, hash_of(worker_id)) is Activation.ACTIVATED
        await self.store.register(Registration(worker_id, ("red",), fleet="red", lease_s=600.0))
        self.joined.add(worker_id)

    async def _work(self, worker_id: str) -> None:
        await self.store.heartbeat(worker_id, [], {})
        for claim in await self.store.claim(worker_id, ("red",), 1):
            await self.store.finish_and_claim(worker_id, [Finished(claim.task_id, claim.token, None)], (), 0)

    async def check(self, machines: int | None) -> None:
        """`machines`: how many the policy requests; None: it decides itself."""
        workers = await self.store.workers(include_terminated=True)
        assert [worker.code for worker in workers if worker.code == "SPAWNING_TIMEOUT"] == []
        assert set(self.deleted) <= self.joined, "a machine was deleted before it joined"
        assert machines in (None, len(self.tokens)), "a machine was requested twice"
        assert len(self.tokens) == len({(worker.fleet, worker.slot) for worker in workers}), "a slot was filled twice"
        assert self.joined == set(self.tokens)
        for worker in workers:
            assert worker.running_at is not None and worker.joined_at is not None and worker.first_claimed_at
            assert worker.created_at <= worker.running_at <= worker.joined_at <= worker.first_claimed_at


@pytest.mark.parametrize("policy", ["adaptive", "buffered"])
@pytest.mark.parametrize("pull", ["starting_s", "runtime_s"], ids=["STARTING", "RUNNING without a runtime"])
def test_pods_that_pull_an_image_for_15_minutes_are_not_replaced(policy: str, pull: str) -> None:
    """Defect 3 of the cloud review: two pods were deleted at 602 s, two minutes before they would have run."""

    async def scenario() -> None:
        cloud = runpod_fixture.EmulatedRunpod(**{pull: PULL_S})
        settings = RunpodSettings(image=runpod_fixture.IMAGE, choices=[runpod_fixture.GPU])
        config = FleetConfig(
            provider="runpod",
            policy=policy,
            queues=("red",),
            handler="a:b",
            has_gpu=False,
            max_workers=2,
            runpod=settings,
        )
        start = ColdStart(config, cloud.provider(), boots_in_s=30.0)

        def is_running(worker_id: str) -> float | None:
            cloud.emulator.settle()
            (pod,) = [pod for pod in cloud.pods.values() if pod.name == worker_id] or [None]
            since = pod.runtime_since(virtual_now()) if pod is not None else None
            return (virtual_now() - since).total_seconds() if since is not None else None

        await start.run(is_running)
        await start.check(machines=2 if policy == "buffered" else None)
        bill = cloud.emulator.ledger.to_json(virtual_now())
        assert len(bill["pods"]) == len(start.tokens)

    run(scenario())


@pytest.mark.parametrize("policy", ["adaptive", "clear-time"])
def test_servers_that_boot_for_15_minutes_are_used_within_their_hour(policy: str) -> None:
    """Defect 2 of the cloud review: ten servers were deleted at 122 s, each after one billed hour, and none joined."""

    async def scenario() -> None:
        cloud = hetzner_fixture.EmulatedHetzner(boot_s=30.0)
        config = FleetConfig(
            provider="hetzner", policy=policy, queues=("red",), handler="a:b", concurrency=1, max_workers=20
        )
        start = ColdStart(config, cloud.provider(), boots_in_s=PULL_S)

        def is_running(worker_id: str) -> float | None:
            cloud.emulator.settle()
            (server,) = [s for s in cloud.servers.values() if s.labels["windlass-worker"] == worker_id] or [None]
            since = [at for at, status in server.statuses if status == "running"] if server is not None else []
            return (virtual_now() - since[0]).total_seconds() if since else None

        await start.run(is_running)
        await start.check(machines=TASKS if policy == "clear-time" else None)
        hours = [line["hours"] for line in cloud.emulator.ledger.to_json(virtual_now())["servers"]]
        assert hours == [1] * len(start.tokens)

    run(scenario())
