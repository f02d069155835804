"""A worker's loop over a scripted transport, for races that real processes meet once in a thousand runs.

The store behind the transport is the one in memory, and handlers run inline. A script says which call fails and when:
before the store receives it, or after it took effect and the answer is lost.
"""

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, cast

from support.memory_store.stores import MemoryStores
from windlass.model.errors import DatabaseUnavailable
from windlass.model.task import Finished, Task, TaskStatus, new_task
from windlass.ports.transport import WorkerTransport
from windlass.worker.executor import Executor
from windlass.worker.handler import RunningTask
from windlass.worker.inline import InlineExecutor
from windlass.worker.lifecycle import ExitReason, WorkerRuntime, WorkerSettings

TIMEOUT_S = 20.0
UNAVAILABLE = DatabaseUnavailable("the connection is down")
CALLS = (
    "register",
    "claim",
    "finish_and_claim",
    "fail",
    "release",
    "heartbeat",
    "deregister",
    "run_maintenance",
    "next_run_after",
)


@dataclass
class Fault:
    error: Exception
    # Whether the store executes the call before the answer is lost.
    takes_effect: bool = False


@dataclass
class ScriptedTransport:
    """A transport to a store in memory, used from two threads, that fails on script."""

    store: MemoryStores
    faults: defaultdict[str, list[Fault | None]] = field(default_factory=lambda: defaultdict(list))
    calls: list[str] = field(default_factory=list)
    # Called before and after each call of that name; may raise.
    before: dict[str, Callable[..., None]] = field(default_factory=dict)
    after: dict[str, Callable[[], Awaitable[None]]] = field(default_factory=dict)
    is_down: bool = False
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[WorkerTransport]:
        yield cast(WorkerTransport, self)

    def __getattr__(self, name: str) -> Any:
        if name not in CALLS:
            raise AttributeError(name)

        async def call(*args: Any, **options: Any) -> Any:
            self.calls.append(name)
            if self.is_down:
                raise UNAVAILABLE
            if name in self.before:
                self.before[name](*args)
            fault = self.faults[name].pop(0) if self.faults[name] else None
            if fault is not None and not fault.takes_effect:
                raise fault.error
            with self._lock:
                answer = result_of(getattr(self.store, name)(*args, **options))
            if name in self.after:
                await self.after[name]()
            if fault is not None:
                raise fault.error
            return answer

        return call

    async def wait_for_work(self, _queues: Sequence[str], timeout_s: float) -> None:
        await asyncio.sleep(min(timeout_s, 0.01))

    def count(self, name: str) -> int:
        return self.calls.count(name)


def result_of(coroutine: Any) -> Any:
    """The result of a coroutine that never waits, such as those of the store in memory."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("the coroutine waits for something")


def lengths(results: Sequence[Finished]) -> list[int]:
    return [len(item.result or "") for item in results]


@dataclass
class WorkerScenario:
    transport: ScriptedTransport
    store: MemoryStores
    exit_reason: "asyncio.Task[ExitReason]"
    runtime: WorkerRuntime

    def task(self, task_id: int) -> Task:
        task = result_of(self.store.task(task_id))
        assert isinstance(task, Task)
        return task

    def has_running_task(self) -> bool:
        return any(task.status is TaskStatus.RUNNING for task in result_of(self.store.tasks()))

    def enqueue(self, payload: Any = None, **options: Any) -> int:
        task_id: int = result_of(self.store.enqueue(new_task("q", payload, **options)))
        return task_id

    async def wait_until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, f"timed out: {what}"
            if self.exit_reason.done() and not condition():
                raise AssertionError(f"the worker exited before: {what} ({self.exit_reason})")
            await asyncio.sleep(0.01)

    async def wait_for_heartbeat(self) -> None:
        await self.wait_until(lambda: self.transport.count("heartbeat"), "first heartbeat")

    async def wait_for_status(self, task_id: int, status: TaskStatus) -> Task:
        await self.wait_until(lambda: self.task(task_id).status is status, f"task {task_id} is {status}")
        return self.task(task_id)

    async def exit(self) -> ExitReason:
        return await asyncio.wait_for(asyncio.shield(self.exit_reason), TIMEOUT_S)


@dataclass
class Barrier:
    """Handlers that wait for each other, so that their results are ready at the same moment."""

    size: int
    waiting: int = 0
    is_full: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait_for_all(self, task: RunningTask) -> Any:
        self.waiting += 1
        if self.waiting == self.size:
            self.is_full.set()
        await self.is_full.wait()
        return task.payload


async def echo(task: RunningTask) -> Any:
    return task.payload


@asynccontextmanager
async def running_worker(
    handler: Callable[[RunningTask], Any] | Executor = echo,
    *,
    transport: ScriptedTransport | None = None,
    prepare: Callable[[WorkerScenario], None] | None = None,
    **settings: Any,
) -> AsyncIterator[WorkerScenario]:
    transport = transport or ScriptedTransport(MemoryStores(lambda: datetime.now(UTC)))
    executor = InlineExecutor(handler) if callable(handler) else handler
    chosen = {"heartbeat_interval_s": 0.05, "lease_s": 30.0, **settings}
    worker = WorkerRuntime(WorkerSettings(queues=("q",), **chosen), transport.open, executor)
    scenario = WorkerScenario(transport, transport.store, cast("asyncio.Task[ExitReason]", None), worker)
    if prepare is not None:
        prepare(scenario)
    scenario.exit_reason = asyncio.create_task(worker.run())
    try:
        yield scenario
    finally:
        if not scenario.exit_reason.done():
            worker.drain("end of the test", 0.0)
        await asyncio.wait([scenario.exit_reason], timeout=TIMEOUT_S)
        assert scenario.exit_reason.done()
        scenario.exit_reason.exception()
