"""Which of several idle workers gets a task: real worker runtimes on PostgreSQL, with tasks one at a time.

Each worker hears of a task up to JITTER_S late, so that without an order of claims all get about as many. All delays
are SLOWER times as long as in production: the workers and their server share one event loop on a busy machine, which
delays notifications for longer than a network does.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from support.http_transport_fixture import over_http
from support.stores import PostgresStores
from support.worker_harness import until
from windlass.model.task import TaskStatus, new_task
from windlass.worker import claim_race
from windlass.worker.handler import RunningTask
from windlass.worker.inline import InlineExecutor
from windlass.worker.lifecycle import WorkerRuntime, WorkerSettings

SLOWER = 4
JITTER_S = SLOWER * claim_race.STEP_S / 2
# The first tasks decide who is most recently used.
LEARNING, COUNTED = 12, 40
# Minutes of the billing hour that have passed, by worker. `next` is in the second minute of its second hour.
HOURS = {"late": 54, "half": 30, "third": 20, "next": 61}
IN_HOURS = """
update windlass.workers
set price_micros_per_hour = 5000, currency = 'EUR', billing_unit_s = 3600,
  billed_since = now() - $2 * interval '1 minute'
where id = $1
"""


@pytest.fixture(autouse=True)
def slower_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STEP_S", "MAX_DELAY_S"):
        monkeypatch.setattr(claim_race, name, SLOWER * getattr(claim_race, name))


@dataclass
class SeenWorker:
    """The state of a worker as its transport observes it."""

    random: random.Random
    is_waiting: bool = False
    # When the last heartbeat began that reported an idle worker.
    idle_heartbeat_at: float = 0.0
    # From the reply to the last heartbeat.
    delay: float | None = None


class LateTransport:
    """Another transport that hears of tasks a little late."""

    def __init__(self, behind: Any, seen: SeenWorker) -> None:
        self._behind = behind
        self._seen = seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._behind, name)

    async def wait_for_work(self, queues: Any, timeout_s: float) -> None:
        self._seen.is_waiting = True
        await self._behind.wait_for_work(queues, timeout_s)
        self._seen.is_waiting = False
        await asyncio.sleep(self._seen.random.uniform(0.0, JITTER_S))

    async def heartbeat(self, worker_id: str, claims: Any, vitals: Any) -> Any:
        began_at = time.monotonic()
        reply = await self._behind.heartbeat(worker_id, claims, vitals)
        self._seen.delay = reply.claim_delay
        if vitals["idle_s"] > 0:
            self._seen.idle_heartbeat_at = began_at
        return reply


async def work(task: RunningTask) -> Any:
    """A task with the payload "long" lasts until the end of the test."""
    if task.payload == "long":
        await asyncio.Event().wait()
    return task.payload


class Workers:
    def __init__(self, store: PostgresStores, open_transport: Callable[[str], Any]) -> None:
        self.store = store
        self.seen: dict[str, SeenWorker] = {}
        self.exits: list[asyncio.Task[Any]] = []
        self._open_transport = open_transport
        self._runtimes: list[WorkerRuntime] = []

    async def start(self, name: str, slots: int = 1) -> None:
        seen = self.seen[name] = SeenWorker(random.Random(len(self.seen)))  # noqa: S311

        @asynccontextmanager
        async def open_transport() -> AsyncIterator[Any]:
            async with self._open_transport(name) as transport:
                yield LateTransport(transport, seen)

        settings = WorkerSettings(
            queues=("q",), worker_id=name, concurrency=slots, heartbeat_interval_s=0.1, lease_s=60.0
        )
        runtime = WorkerRuntime(settings, open_transport, InlineExecutor(work))
        self._runtimes.append(runtime)
        self.exits.append(asyncio.create_task(runtime.work()))
        await until(lambda: seen.is_waiting, f"{name} waits for work")

    async def close(self) -> None:
        for runtime in self._runtimes:
            runtime.drain("end of the test", 0.0)
        await asyncio.gather(*self.exits)

    async def is_running(self) -> bool:
        return any(task.status is TaskStatus.RUNNING for task in await self.store.tasks())

    async def claimants(self, count: int, *, heartbeats: int = 0) -> Counter[str]:
        """Count the tasks of each worker. A task is enqueued when all workers wait for one.

        Before that, each worker has reported that it is idle in `heartbeats` heartbeats.
        """
        found = Counter[str]()
        for _ in range(count):
            for _ in range(heartbeats):
                begins = time.monotonic()
                await until(lambda: all(s.idle_heartbeat_at > begins for s in self.seen.values()), "heartbeats")  # noqa: B023
            await until(lambda: all(seen.is_waiting for seen in self.seen.values()), "all workers wait")
            task_id = await self.store.enqueue(new_task("q", "short"))

            async def claimant(task_id: int = task_id) -> str | None:
                task = await self.store.task(task_id)
                assert task is not None
                return task.worker_id if task.status is TaskStatus.COMPLETE else None

            found[await until(claimant, "the task is complete")] += 1
        return found


@asynccontextmanager
async def workers(dsn: str, *, is_http: bool) -> AsyncIterator[Workers]:
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(PostgresStores(dsn))
        if is_http:
            behind = await stack.enter_async_context(over_http(store))
            found = Workers(store, behind.new_transport)
        else:
            found = Workers(store, lambda _: PostgresStores(dsn))
        try:
            yield found
        finally:
            await found.close()


async def set_hours(store: Any, hours: Mapping[str, int]) -> None:
    async with store.database.connection("billing hours") as connection:
        for name, minutes in hours.items():
            await connection.execute(IN_HOURS, name, minutes)


async def test_sparse_tasks_go_to_one_worker(dsn: str) -> None:
    async with workers(dsn, is_http=False) as started:
        for number in range(4):
            await started.start(f"w{number}")
        await started.claimants(LEARNING)
        found = await started.claimants(COUNTED)
        assert found.most_common(1)[0][1] > 0.9 * COUNTED, found


async def test_sparse_tasks_go_to_the_worker_with_most_billed_time_left(dsn: str) -> None:
    async with workers(dsn, is_http=True) as started:
        for name in HOURS:
            await started.start(name)
        # The second time, the most recently used worker is late in its hour.
        for preferred, hours in (("next", HOURS), ("half", HOURS | {"half": 61, "next": 40})):
            await set_hours(started.store, hours)
            # The first heartbeats say who is idle, the second ones who waits.
            found = await started.claimants(COUNTED // 2, heartbeats=2)
            assert found[preferred] > 0.9 * (COUNTED // 2), found


@pytest.mark.parametrize("is_late", [True, False])
async def test_partly_busy_worker_gets_tasks_before_idle_ones(dsn: str, is_late: bool) -> None:
    """Its machine cannot be deleted anyway, also late in its billing hour."""
    async with workers(dsn, is_http=True) as started:
        await started.start("busy", slots=2)
        await started.store.enqueue(new_task("q", "long"))
        await until(started.is_running, "the long task runs")
        for name in ("half", "next"):
            await started.start(name, slots=2)
        await set_hours(started.store, {"busy": 54 if is_late else 5, "half": 30, "next": 61})
        await until(lambda: all(seen.delay is not None for seen in started.seen.values()), "heartbeats")
        await started.claimants(LEARNING)
        found = await started.claimants(COUNTED)
        assert found["busy"] > 0.9 * COUNTED, found
