"""The worker's loop over a line that fails on script: races that real processes meet once in a thousand times.

The store behind the line is the one in memory; handlers run inline. Each script says what goes wrong and when: before
the store hears of a call, or after it has done it and the answer is lost.
"""

import asyncio
import itertools
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import pynvml
import pytest
from structlog.testing import capture_logs

from windlass.model.errors import BadInput, DatabaseUnavailable, HandlerNotFound, SchemaMismatch
from windlass.model.task import Finished, Task, TaskStatus, new_task
from windlass.model.worker import Registration, WorkerStatus
from windlass.ports.transport import WorkerTransport
from windlass.store.memory.store import MemoryStore
from windlass.worker import gpu, runtime
from windlass.worker.executor import Executor
from windlass.worker.handler import RunningTask
from windlass.worker.inline import InlineExecutor
from windlass.worker.runtime import ExitReason, WorkerRuntime, WorkerSettings

PATIENCE_S = 20.0
GONE = DatabaseUnavailable("the line is dead")
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
    # Whether the store does what it was asked before the answer is lost.
    takes_effect: bool = False


@dataclass
class Line:
    """A transport to a store in memory, from two threads, that fails on script."""

    store: MemoryStore
    faults: defaultdict[str, list[Fault | None]] = field(default_factory=lambda: defaultdict(list))
    calls: list[str] = field(default_factory=list)
    # Called before and after each call of that name; may raise.
    before: dict[str, Callable[..., None]] = field(default_factory=dict)
    after: dict[str, Callable[[], Awaitable[None]]] = field(default_factory=dict)
    is_dead: bool = False
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[WorkerTransport]:
        yield cast(WorkerTransport, self)

    def __getattr__(self, name: str) -> Any:
        if name not in CALLS:
            raise AttributeError(name)

        async def call(*args: Any, **options: Any) -> Any:
            self.calls.append(name)
            if self.is_dead:
                raise GONE
            if name in self.before:
                self.before[name](*args)
            fault = self.faults[name].pop(0) if self.faults[name] else None
            if fault is not None and not fault.takes_effect:
                raise fault.error
            with self._lock:
                answer = finished(getattr(self.store, name)(*args, **options))
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


def finished(coroutine: Any) -> Any:
    """The result of a coroutine that never waits, as those of the store in memory."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it waits for something")


@dataclass
class DemoScenario:
    line: Line
    store: MemoryStore
    exit_reason: "asyncio.Task[ExitReason]"
    runtime: WorkerRuntime

    def task(self, task_id: int) -> Task:
        task = finished(self.store.task(task_id))
        assert isinstance(task, Task)
        return task

    def enqueue(self, payload: Any = None, **options: Any) -> int:
        task_id: int = finished(self.store.enqueue(new_task("q", payload, **options)))
        return task_id

    async def until(self, is_so: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < deadline, what
            assert not self.exit_reason.done() or is_so(), f"the worker has ended before: {what} ({self.ending})"
            await asyncio.sleep(0.01)

    async def until_status(self, task_id: int, status: TaskStatus) -> Task:
        await self.until(lambda: self.task(task_id).status is status, f"task {task_id} is {status}")
        return self.task(task_id)

    async def end(self) -> ExitReason:
        return await asyncio.wait_for(asyncio.shield(self.exit_reason), PATIENCE_S)


async def echo(task: RunningTask) -> Any:
    return task.payload


@asynccontextmanager
async def working(
    handler: Callable[[RunningTask], Any] | Executor = echo,
    *,
    line: Line | None = None,
    prepare: Callable[[DemoScenario], None] | None = None,
    **settings: Any,
) -> AsyncIterator[DemoScenario]:
    line = line or Line(MemoryStore(lambda: datetime.now(UTC)))
    executor = InlineExecutor(handler) if callable(handler) else handler
    chosen = {"heartbeat_interval_s": 0.05, "lease_s": 30.0, **settings}
    worker = WorkerRuntime(WorkerSettings(queues=("q",), **chosen), line.open, executor)
    scene = DemoScenario(line, line.store, cast("asyncio.Task[ExitReason]", None), worker)
    if prepare is not None:
        prepare(scene)
    scene.exit_reason = asyncio.create_task(worker.run())
    try:
        yield scene
    finally:
        if not scene.exit_reason.done():
            worker.drain("the end of the test", 0.0)
        await asyncio.wait([scene.exit_reason], timeout=PATIENCE_S)
        assert scene.exit_reason.done()
        scene.exit_reason.exception()


# ------------------------------------------------------------------------------------------- answers that are lost


@pytest.mark.parametrize("takes_effect", [False, True], ids=["never asked", "answer lost"])
async def test_a_result_whose_delivery_fails_is_delivered_again_and_counts_once(takes_effect: bool) -> None:
    async with working() as scene:
        await scene.until(lambda: scene.line.count("heartbeat"), "it lives")
        # The first call claims the task, the second delivers it.
        scene.line.faults["finish_and_claim"] = [None, Fault(GONE, takes_effect), Fault(GONE, takes_effect)]
        task = await scene.until_status(scene.enqueue(5), TaskStatus.COMPLETE)
        assert (task.attempts, task.result) == (1, "5")
        (worker,) = finished(scene.store.workers())
        assert worker.late_results == 0


@pytest.mark.parametrize("takes_effect", [False, True], ids=["never asked", "answer lost"])
async def test_a_failure_whose_delivery_fails_is_delivered_again_and_counts_once(takes_effect: bool) -> None:
    async def fails(_task: RunningTask) -> None:
        raise ValueError("the cause")

    async with working(fails) as scene:
        scene.line.faults["fail"] = [Fault(GONE, takes_effect), Fault(GONE, takes_effect)]
        task = await scene.until_status(scene.enqueue(max_attempts=1), TaskStatus.FAILED)
        assert "the cause" in (task.error or "")
        assert [event.code for event in finished(scene.store.events(task_id=task.id))] == ["TASK_FAILED"]


async def test_a_claim_whose_answer_is_lost_comes_back_after_the_lease_uncounted() -> None:
    async with working(lease_s=0.5) as scene:
        await scene.until(lambda: scene.line.count("heartbeat"), "it lives")
        scene.line.faults["finish_and_claim"] = [Fault(GONE, takes_effect=True)]
        task = await scene.until_status(scene.enqueue(5), TaskStatus.COMPLETE)
        assert task.attempts == 1
        assert [event.code for event in finished(scene.store.events(task_id=task.id))] == ["TASK_RELEASED"]


@pytest.mark.parametrize("is_loop_held_up", [False, True], ids=["a slow line", "a loop that is held up"])
async def test_a_claim_that_arrives_when_it_was_taken_back_is_not_begun(is_loop_held_up: bool) -> None:
    began: list[int] = []
    is_taken_back = threading.Event()

    async def notes(task: RunningTask) -> Any:
        began.append(task.attempt)
        return task.payload

    async with working(notes, lease_s=1.0) as scene:
        await scene.until(lambda: scene.line.count("heartbeat"), "it lives")
        task_id = 0

        async def take_note() -> None:
            if any(event.code == "TASK_RELEASED" for event in finished(scene.store.events(task_id=task_id))):
                is_taken_back.set()

        async def answer_late() -> None:
            if await _has_claimed(scene):
                scene.line.after.pop("finish_and_claim")
                if is_loop_held_up:
                    assert is_taken_back.wait(PATIENCE_S)
                else:
                    await scene.until(is_taken_back.is_set, "the lease runs out")

        scene.line.after |= {"finish_and_claim": answer_late, "heartbeat": take_note}
        task_id = scene.enqueue(5)
        task = await scene.until_status(task_id, TaskStatus.COMPLETE)
        assert is_taken_back.is_set()
        assert (began, task.attempts) == ([1], 1)
        (worker,) = finished(scene.store.workers())
        assert worker.late_results == 0


async def test_results_alone_may_take_longer_than_half_a_lease() -> None:
    """Nothing is claimed with them that could grow old, and large ones need their time."""
    deliveries: list[int] = []

    def take_note(_worker_id: str, results: Sequence[Finished], *_: object) -> None:
        if results:
            deliveries.append(len(results))

    async with working(lease_s=0.4) as scene:
        await scene.until(lambda: scene.line.count("heartbeat"), "it lives")
        task_id = 0

        async def answer_late() -> None:
            if scene.task(task_id).status is TaskStatus.COMPLETE:
                scene.line.after.clear()
                beats = scene.line.count("heartbeat")
                await scene.until(lambda: scene.line.count("heartbeat") > beats + 6, "more than half a lease")

        async def drain() -> None:
            if await _has_claimed(scene):
                scene.runtime.drain("told to end")
                scene.line.after["finish_and_claim"] = answer_late

        scene.line.before["finish_and_claim"] = take_note
        scene.line.after["finish_and_claim"] = drain
        task_id = scene.enqueue(5)
        assert await scene.end() is ExitReason.LEFT
        assert scene.task(task_id).status is TaskStatus.COMPLETE
        assert deliveries == [1]


async def test_an_error_nobody_expected_does_not_cost_the_work_at_hand() -> None:
    async with working() as scene:
        await scene.until(lambda: scene.line.count("heartbeat"), "it lives")
        scene.line.faults["finish_and_claim"] = [None, Fault(RuntimeError("a failover, in words nobody knows"))]
        task = await scene.until_status(scene.enqueue(5), TaskStatus.COMPLETE)
        assert task.attempts == 1


async def test_a_look_out_that_fails_in_any_way_does_not_leave_the_worker_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtime, "POLL_INTERVAL_S", 0.02)
    async with working() as scene:
        scene.line.faults["next_run_after"] = [Fault(RuntimeError("a bug")), Fault(GONE)] * 3
        await scene.until(lambda: not scene.line.faults["next_run_after"], "it has looked out")
        await scene.until_status(scene.enqueue(5), TaskStatus.COMPLETE)


async def test_results_that_cannot_be_delivered_are_given_up_after_their_time_limit() -> None:
    async with working(delivery_timeout_s=0.3) as scene:

        async def die() -> None:
            scene.line.is_dead = bool(scene.line.count("finish_and_claim") > 1 or await _has_claimed(scene))

        scene.line.after["finish_and_claim"] = die
        task_id = scene.enqueue(5)
        with pytest.raises(DatabaseUnavailable):
            await scene.end()
        assert scene.task(task_id).status is TaskStatus.RUNNING


async def _has_claimed(scene: DemoScenario) -> bool:
    return any(task.status is TaskStatus.RUNNING for task in finished(scene.store.tasks()))


async def test_a_worker_with_nothing_to_deliver_waits_for_its_database_for_ever() -> None:
    async with working(delivery_timeout_s=0.1) as scene:
        await scene.until(lambda: scene.line.count("heartbeat"), "it lives")
        scene.line.is_dead = True
        claims = scene.line.count("finish_and_claim")
        await scene.until(lambda: scene.line.count("finish_and_claim") >= claims + 4, "it asks again and again")
        scene.line.is_dead = False
        await scene.until_status(scene.enqueue(5), TaskStatus.COMPLETE)


async def test_work_announced_while_the_worker_delivers_is_not_forgotten() -> None:
    """The answer to its delivery was made before the announcement and knows nothing of it."""
    may_finish, is_announced = asyncio.Event(), asyncio.Event()
    looks, second = [], []

    async def first_waits(task: RunningTask) -> Any:
        if task.payload == "first":
            await may_finish.wait()
        return task.payload

    async def wait_for_work(_queues: Sequence[str], _timeout_s: float) -> None:
        looks.append(1)
        # One announcement comes, to the first look; no other look ever ends.
        await (is_announced.wait() if len(looks) == 1 else asyncio.Event().wait())

    def prepare(scene: DemoScenario) -> None:
        scene.line.wait_for_work = wait_for_work  # type: ignore[method-assign]
        scene.enqueue("first")

    async with working(first_waits, concurrency=2, prepare=prepare) as scene:

        async def announce() -> None:
            scene.line.after.clear()
            second.append(scene.enqueue("second"))
            is_announced.set()
            await asyncio.sleep(0)  # the look-out hears of it
            await asyncio.sleep(0)

        await scene.until(lambda: looks, "it looks out for a second task")
        scene.line.after["finish_and_claim"] = announce
        may_finish.set()
        await scene.until(lambda: second, "the first is being delivered")
        await scene.until_status(second[0], TaskStatus.COMPLETE)


# ------------------------------------------------------------------------------------------- too much for one call


@dataclass
class Gathering:
    """Handlers that wait for each other, so that their results are there in the same moment."""

    size: int
    at_once: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    async def together(self, task: RunningTask) -> Any:
        self.at_once += 1
        if self.at_once == self.size:
            self.gate.set()
        await self.gate.wait()
        return task.payload


def lengths(results: Sequence[Finished]) -> list[int]:
    return [len(item.result or "") for item in results]


async def test_more_results_than_one_call_carries_are_delivered_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "MAX_DELIVERY_BYTES", 100)
    deliveries: list[list[int]] = []

    def take_note(_worker_id: str, results: Sequence[Finished], *_: object) -> None:
        if results:
            deliveries.append(lengths(results))

    async with working(Gathering(8).together, concurrency=8) as scene:
        scene.line.before["finish_and_claim"] = take_note
        # As JSON, with quotation marks, two more each; one is too large for any call and goes all the same.
        sizes = [38, 38, 38, 38, 298, 18, 38, 38]
        task_ids = [scene.enqueue("x" * size) for size in sizes]
        for task_id in task_ids:
            await scene.until_status(task_id, TaskStatus.COMPLETE)
        assert sorted(itertools.chain(*deliveries)) == sorted(size + 2 for size in sizes)
        assert [batch for batch in deliveries if len(batch) > 1 and sum(batch) > 100] == []
        assert any(len(batch) > 1 for batch in deliveries)


async def test_results_of_which_too_many_go_unanswered_are_delivered_in_smaller_portions_and_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtime, "MAX_DELIVERY_BYTES", 1_000)
    monkeypatch.setattr(runtime, "MIN_DELIVERY_BYTES", 10)
    asked: list[tuple[int, int]] = []

    def cut_off(_worker_id: str, results: Sequence[Finished], _queues: Sequence[str], limit: int) -> None:
        if results:
            asked.append((sum(lengths(results)), limit))
            if asked[-1][0] > 100:
                raise GONE

    async with working(Gathering(8).together, concurrency=8) as scene:
        scene.line.before["finish_and_claim"] = cut_off
        for task_id in [scene.enqueue("x" * 38) for _ in range(8)]:
            task = await scene.until_status(task_id, TaskStatus.COMPLETE)
            assert task.attempts == 1
        # What went unanswered is repeated as half of what a call may carry, and claims nothing.
        assert [size for size, _ in asked][:4] == [320, 320, 240, 120]
        assert [limit for size, limit in asked[1:5]] == [0, 0, 0, 0]


async def test_claims_whose_answer_does_not_come_in_time_become_smaller_and_then_grow_again() -> None:
    asked: list[int] = []
    is_line_slow = True
    gathering = Gathering(16)

    def take_note(_worker_id: str, _results: Sequence[Finished], _queues: Sequence[str], limit: int) -> None:
        asked.append(limit)

    async with working(gathering.together, concurrency=16, lease_s=1.0) as scene:
        await scene.until(lambda: scene.line.count("heartbeat"), "it lives")

        async def carry_three() -> None:
            if is_line_slow and asked[-1] > 3 and await _has_claimed(scene):
                await asyncio.Event().wait()

        scene.line.before["finish_and_claim"] = take_note
        scene.line.after["finish_and_claim"] = carry_three
        first = [scene.enqueue(number) for number in range(3)]
        await scene.until(lambda: gathering.at_once == 3, "claims get through")
        assert [limit for limit, _ in itertools.groupby(asked)][:3] == [8, 4, 2]
        is_line_slow = False
        asked.clear()
        for task_id in first + [scene.enqueue(number) for number in range(100)]:
            assert (await scene.until_status(task_id, TaskStatus.COMPLETE)).attempts == 1
        assert max(asked) == 8


# ---------------------------------------------------------------------------------------------- results refused


def refuse_poison(_worker_id: str, results: Sequence[Finished], *_: object) -> None:
    if any(item.result == '"poison"' for item in results):
        raise BadInput("finishing tasks: it cannot be stored")


@pytest.mark.parametrize("is_line_bad", [False, True], ids=["a good line", "a bad line"])
async def test_a_refused_result_costs_only_its_own_attempt(is_line_bad: bool) -> None:
    """And no more tasks are claimed than there are places, whatever had to be repeated."""
    at_once, most_at_once = 0, 0
    gate = asyncio.Event()

    async def together(task: RunningTask) -> Any:
        nonlocal at_once, most_at_once
        at_once += 1
        most_at_once = max(most_at_once, at_once)
        try:
            await gate.wait()
            return task.payload
        finally:
            at_once -= 1

    async with working(together, concurrency=4, lease_s=1.0) as scene:
        scene.line.before["finish_and_claim"] = refuse_poison
        payloads = ["good", "poison", "good", "good", "good", "poison", "good", "good", "good", "good"]
        task_ids = [scene.enqueue(payload, max_attempts=1) for payload in payloads]
        await scene.until(lambda: at_once == 4, "four run")
        if is_line_bad:
            scene.line.faults["fail"] = [Fault(GONE, takes_effect=True), Fault(GONE)]
            scene.line.faults["finish_and_claim"] = [None, Fault(GONE), None, Fault(GONE, takes_effect=True)]
        gate.set()
        for task_id, payload in zip(task_ids, payloads, strict=True):
            status = TaskStatus.FAILED if payload == "poison" else TaskStatus.COMPLETE
            task = await scene.until_status(task_id, status)
            assert task.error_code == ("BAD_RESULT" if payload == "poison" else None)
            assert task.attempts == 1
        assert most_at_once <= 4


# -------------------------------------------------------------------------------------------------- being told


async def test_two_signals_of_one_moment_are_one() -> None:
    """As `timeout` sends them: to the program, and to its group."""
    may_finish = asyncio.Event()

    async def waits(task: RunningTask) -> Any:
        await may_finish.wait()
        return task.payload

    with capture_logs() as lines:
        async with working(waits) as scene:
            task_id = scene.enqueue(5)
            await scene.until_status(task_id, TaskStatus.RUNNING)
            # Of two kinds, as the system may make one of two of the same.
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            await scene.until(
                lambda: (
                    [line["event"].split(":")[0] for line in lines if "draining" in line["event"]]
                    == ["draining", "draining already"]
                ),
                "both are heard",
            )
            may_finish.set()
            assert await scene.end() is ExitReason.LEFT
            assert scene.task(task_id).status is TaskStatus.COMPLETE


async def test_a_claim_that_arrives_after_the_second_signal_is_given_back_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtime, "SAME_SIGNAL_S", 0.0)
    began = []

    async def sleeps(_task: RunningTask) -> None:
        began.append(1)
        await asyncio.sleep(600)

    async with working(sleeps) as scene:
        await scene.until(lambda: scene.line.count("heartbeat"), "it lives")

        async def tell_twice() -> None:
            if await _has_claimed(scene):
                os.kill(os.getpid(), signal.SIGTERM)
                await scene.until(lambda: scene.runtime._orders.is_draining, "the first is heard")
                os.kill(os.getpid(), signal.SIGTERM)
                await scene.until(scene.runtime._orders.is_urgent.is_set, "the second counts")

        scene.line.after["finish_and_claim"] = tell_twice
        task_id = scene.enqueue()
        assert await scene.end() is ExitReason.LEFT
        task = scene.task(task_id)
        assert (task.status, task.attempts) == (TaskStatus.QUEUED, 0)


async def test_a_result_that_is_there_when_the_worker_must_leave_is_delivered() -> None:
    scenes: list[DemoScenario] = []

    async def finishes_in_that_moment(task: RunningTask) -> Any:
        scenes[0].runtime.drain("told twice", 0.0)
        return task.payload

    async with working(finishes_in_that_moment, prepare=scenes.append) as scene:
        task_id = scene.enqueue(5)
        assert await scene.end() is ExitReason.LEFT
        task = scene.task(task_id)
        assert (task.status, task.result, task.attempts) == (TaskStatus.COMPLETE, "5", 1)


async def test_a_result_is_delivered_although_the_handler_would_not_be_cancelled() -> None:
    async def finishes_when_cancelled(_task: RunningTask) -> str:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            return "saved"
        return "slept"

    async with working(finishes_when_cancelled) as scene:
        task_id = scene.enqueue()
        await scene.until_status(task_id, TaskStatus.RUNNING)
        await scene.until(lambda: scene.line.count("heartbeat") > 2, "the handler runs")
        scene.runtime.drain("told twice", 0.0)
        assert await scene.end() is ExitReason.LEFT
        assert scene.task(task_id).result == '"saved"'


async def test_a_handler_that_cannot_be_cancelled_does_not_keep_the_worker_from_leaving(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtime, "CANCEL_TIMEOUT_S", 0.1)
    may_end = asyncio.Event()

    async def stubborn(_task: RunningTask) -> None:
        while not may_end.is_set():
            try:
                await may_end.wait()
            except asyncio.CancelledError:
                continue

    async with working(stubborn) as scene:
        task_id = scene.enqueue()
        await scene.until_status(task_id, TaskStatus.RUNNING)
        scene.runtime.drain("told twice", 0.0)
        assert await scene.end() is ExitReason.LEFT
        task = scene.task(task_id)
        assert (task.status, task.attempts) == (TaskStatus.QUEUED, 0)
        may_end.set()


async def test_a_drain_that_comes_while_a_result_is_being_delivered_is_obeyed_after_it() -> None:
    async with working() as scene:
        await scene.until(lambda: scene.line.count("heartbeat"), "it lives")

        async def drain() -> None:
            scene.runtime.drain("in the middle of a delivery")

        scene.line.after["finish_and_claim"] = drain
        first, second = scene.enqueue(1), scene.enqueue(2)
        assert await scene.end() is ExitReason.LEFT
        statuses = [scene.task(first).status, scene.task(second).status]
        assert statuses == [TaskStatus.COMPLETE, TaskStatus.QUEUED]
        assert finished(scene.store.workers()) == []


@asynccontextmanager
async def past_its_drain_limit(
    handler: Callable[[RunningTask], Any] = echo, **settings: Any
) -> AsyncIterator[tuple[DemoScenario, int]]:
    """A worker that has claimed a task, whose database is gone since then and whose drain limit is over."""
    async with working(handler, **settings) as scene:
        await scene.until(lambda: scene.line.count("heartbeat"), "it lives")

        async def die_and_drain() -> None:
            if await _has_claimed(scene):
                scene.line.is_dead = True
                scene.runtime.drain("told to end", 0.05)

        scene.line.after["finish_and_claim"] = die_and_drain
        task_id = scene.enqueue(5)
        await scene.until(lambda: scene.line.is_dead, "it has claimed")
        yield scene, task_id


async def deliveries_in_vain(scene: DemoScenario) -> None:
    deadline = scene.runtime._orders.drain_deadline
    await scene.until(lambda: time.monotonic() > deadline, "the drain limit is over")
    calls = scene.line.count("finish_and_claim")
    await scene.until(lambda: scene.line.count("finish_and_claim") >= calls + 2, "it goes on trying")


async def test_a_result_outlives_the_drain_limit_when_the_database_is_gone_in_that_moment() -> None:
    async with past_its_drain_limit() as (scene, task_id):
        await deliveries_in_vain(scene)
        scene.line.is_dead = False
        assert await scene.end() is ExitReason.LEFT
        task = scene.task(task_id)
        assert (task.status, task.result, task.attempts) == (TaskStatus.COMPLETE, "5", 1)
        assert finished(scene.store.workers()) == []


async def test_a_failure_outlives_the_drain_limit_too() -> None:
    async def fails(_task: RunningTask) -> None:
        raise ValueError("the cause")

    async with past_its_drain_limit(fails) as (scene, task_id):
        await scene.until(lambda: scene.line.count("fail") >= 3, "it goes on trying")
        assert time.monotonic() > scene.runtime._orders.drain_deadline
        scene.line.is_dead = False
        assert await scene.end() is ExitReason.LEFT
        assert "the cause" in (scene.task(task_id).error or "")


async def test_who_is_told_again_waits_no_longer_for_the_database() -> None:
    async with past_its_drain_limit() as (scene, task_id):
        await deliveries_in_vain(scene)
        scene.runtime.drain("told again", 0.0)
        with pytest.raises(DatabaseUnavailable):
            await scene.end()
        assert scene.task(task_id).status is TaskStatus.RUNNING


async def test_a_result_is_not_kept_for_longer_than_its_time_limit_after_the_drain_limit() -> None:
    begun = time.monotonic()
    async with past_its_drain_limit(delivery_timeout_s=0.5) as (scene, task_id):
        with pytest.raises(DatabaseUnavailable):
            await scene.end()
        assert time.monotonic() - begun > 0.5
        assert scene.task(task_id).status is TaskStatus.RUNNING


async def test_nobody_stays_beyond_the_drain_limit_only_to_give_a_task_back() -> None:
    async def sleeps(_task: RunningTask) -> None:
        await asyncio.sleep(600)

    async with past_its_drain_limit(sleeps) as (scene, task_id):
        with pytest.raises(DatabaseUnavailable):
            await scene.end()
        assert scene.task(task_id).status is TaskStatus.RUNNING
        assert scene.line.count("release") == 1


async def test_nobody_stays_beyond_the_drain_limit_where_the_schema_is_another() -> None:
    async with working(drain_timeout_s=0.05) as scene:
        await scene.until(lambda: scene.line.count("heartbeat"), "it lives")

        def refuse_results(_worker_id: str, results: Sequence[Finished], *_: object) -> None:
            if results:
                raise SchemaMismatch("upgrade windlass on this machine.")

        scene.line.before["finish_and_claim"] = refuse_results
        scene.enqueue(5)
        with pytest.raises(SchemaMismatch):
            await scene.end()


async def test_an_idle_worker_whose_database_is_gone_leaves_when_told() -> None:
    async with working() as scene:
        await scene.until(lambda: scene.line.count("heartbeat"), "it lives")
        scene.line.is_dead = True
        claims = scene.line.count("finish_and_claim")
        await scene.until(lambda: scene.line.count("finish_and_claim") > claims, "it has noticed")
        scene.runtime.drain("told to end")
        assert await scene.end() is ExitReason.LEFT


async def test_a_claim_lost_while_the_handler_answers_touches_nothing() -> None:
    async with working() as scene:

        def take_back(_worker_id: str, results: Sequence[Finished], *_: object) -> None:
            for item in results:
                finished(scene.store.cancel_task(item.task_id, "in that moment"))

        scene.line.before["finish_and_claim"] = take_back
        task = await scene.until_status(scene.enqueue(5), TaskStatus.FAILED)
        assert (task.error_code, task.result) == ("CANCELLED", None)
        await scene.until(lambda: finished(scene.store.workers())[0].late_results == 1, "it is counted")
        scene.line.before.clear()
        await scene.until_status(scene.enqueue(6), TaskStatus.COMPLETE)


# ------------------------------------------------------------------------------------------ ended, lost, hired


def hired(status: WorkerStatus) -> Callable[[DemoScenario], None]:
    """A worker that has a row before its process begins, in this status."""

    def prepare(scene: DemoScenario) -> None:
        finished(scene.store.register(Registration("hired", ("q",))))
        if status is WorkerStatus.TERMINATING:
            finished(scene.store.set_terminating(["hired"], "no longer needed"))
        elif status is WorkerStatus.TERMINATED:
            finished(scene.store.deregister("hired", "ended before it began"))

    return prepare


async def test_a_hired_worker_that_is_terminating_when_it_comes_leaves_at_once() -> None:
    async with working(prepare=hired(WorkerStatus.TERMINATING), worker_id="hired") as scene:
        task_id = scene.enqueue()
        assert await scene.end() is ExitReason.LEFT
        assert scene.task(task_id).status is TaskStatus.QUEUED
        assert finished(scene.store.worker("hired")).status is WorkerStatus.TERMINATED


async def test_a_hired_worker_that_was_ended_before_it_came_does_not_come_back_under_another_name() -> None:
    async with working(prepare=hired(WorkerStatus.TERMINATED), worker_id="hired") as scene:
        assert await scene.end() is ExitReason.LOST
        assert [worker.id for worker in finished(scene.store.workers(include_terminated=True))] == ["hired"]


async def test_a_worker_ended_by_others_drops_its_work_and_joins_again_even_over_a_bad_line() -> None:
    ran = []

    async def first_sleeps(task: RunningTask) -> Any:
        ran.append(task.attempt)
        if len(ran) == 1:
            await asyncio.sleep(600)
        return task.payload

    async with working(first_sleeps) as scene:
        task_id = scene.enqueue(5)
        await scene.until(lambda: ran, "the handler runs")
        (old,) = finished(scene.store.workers())
        scene.line.faults["register"] = [Fault(GONE), Fault(GONE)]
        finished(scene.store.deregister(old.id, "ended by somebody else"))
        task = await scene.until_status(task_id, TaskStatus.COMPLETE)
        (new,) = finished(scene.store.workers())
        assert new.id != old.id
        assert task.worker_id == new.id
        assert scene.line.count("register") == 4


async def test_a_worker_ended_by_others_while_it_delivers_gets_a_new_name_and_the_result_counts_as_late() -> None:
    async with working() as scene:
        names = itertools.count()

        def end_it(worker_id: str, results: Sequence[Finished], *_: object) -> None:
            if results and next(names) == 0:
                finished(scene.store.deregister(worker_id, "in the middle of a delivery"))

        scene.line.before["finish_and_claim"] = end_it
        task = await scene.until_status(scene.enqueue(5), TaskStatus.COMPLETE)
        rows = finished(scene.store.workers(include_terminated=True))
        assert [row.late_results for row in rows] == [1, 0]
        assert task.worker_id == rows[1].id


async def test_a_worker_ended_by_others_learns_it_although_no_heartbeat_gets_through() -> None:
    async with working() as scene:
        await scene.until(lambda: scene.line.count("heartbeat"), "it lives")
        scene.line.faults["heartbeat"] = [Fault(GONE)] * 100_000
        (old,) = finished(scene.store.workers())
        finished(scene.store.deregister(old.id, "ended by somebody else"))
        task = await scene.until_status(scene.enqueue(5), TaskStatus.COMPLETE)
        assert task.worker_id != old.id


@pytest.mark.parametrize("call", ["heartbeat", "finish_and_claim"])
async def test_a_worker_whose_database_got_another_schema_finishes_leaves_and_says_why(call: str) -> None:
    may_finish = asyncio.Event()

    async def waits(task: RunningTask) -> Any:
        await may_finish.wait()
        return task.payload

    async with working(waits, concurrency=2) as scene:
        task_id = scene.enqueue(5)
        await scene.until_status(task_id, TaskStatus.RUNNING)
        scene.line.faults[call] = [Fault(SchemaMismatch("upgrade windlass on this machine."))] * 2
        await scene.until(lambda: scene.runtime._orders.is_draining, "it has heard of it")
        later = scene.enqueue(6)
        may_finish.set()
        with pytest.raises(SchemaMismatch, match="upgrade windlass on this machine"):
            await scene.end()
        assert scene.task(task_id).status is TaskStatus.COMPLETE
        assert scene.task(later).status is TaskStatus.QUEUED
        assert finished(scene.store.workers()) == []


# --------------------------------------------------------------------------------------------------- executors


class Breaks:
    """An executor that raises what it should not, or can start no handler any more."""

    def __init__(self, *errors: Exception | None) -> None:
        self._errors = list(errors)
        self._good = InlineExecutor(echo)
        self.is_closed = False

    async def start(self) -> None:
        await self._good.start()

    async def run(self, claim: Any, report: Any) -> Any:
        if self._errors and (error := self._errors.pop(0)) is not None:
            raise error
        return await self._good.run(claim, report)

    async def close(self) -> None:
        self.is_closed = True


async def test_an_error_of_our_own_ends_the_attempt_and_not_the_worker() -> None:
    async with working(Breaks(RuntimeError("a bug"))) as scene:
        task = await scene.until_status(scene.enqueue(max_attempts=1), TaskStatus.FAILED)
        assert task.error_code == "WORKER_ERROR"
        assert "RuntimeError: a bug" in (task.error or "")
        await scene.until_status(scene.enqueue(5), TaskStatus.COMPLETE)


async def test_a_worker_that_can_start_no_handler_gives_back_leaves_and_says_why() -> None:
    executor = Breaks(None, HandlerNotFound("cannot import app:handler"))
    async with working(executor) as scene:
        good, bad = scene.enqueue(1), scene.enqueue(2)
        with pytest.raises(HandlerNotFound, match="cannot import app:handler"):
            await scene.end()
        assert scene.task(good).status is TaskStatus.COMPLETE
        task = scene.task(bad)
        assert (task.status, task.attempts) == (TaskStatus.QUEUED, 0)
        assert finished(scene.store.workers()) == []
        assert executor.is_closed


# ------------------------------------------------------------------------------------------------------- clocks


async def test_a_worker_whose_clock_is_ahead_does_not_spin() -> None:
    behind = timedelta(hours=1)
    line = Line(MemoryStore(lambda: datetime.now(UTC) - behind))
    async with working(line=line) as scene:
        due = datetime.now(UTC) - behind + timedelta(minutes=30)
        scene.enqueue(run_after=due)
        # The line's own waits are shorter than asked for, so the pauses are read off and not waited for.
        life_pauses: list[float] = []
        wait = scene.line.wait_for_work

        async def wait_for_work(queues: Sequence[str], timeout_s: float) -> None:
            life_pauses.append(timeout_s)
            await wait(queues, timeout_s)

        scene.line.wait_for_work = wait_for_work  # type: ignore[method-assign]
        await scene.until(lambda: len(life_pauses) >= 10, "ten looks")
        assert life_pauses[-1] == runtime.POLL_INTERVAL_S


# -------------------------------------------------------------------------------------------------------------- GPUs


class Cards:
    """What NVML shows, as long as this test lasts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        memory = SimpleNamespace(total=1 << 34, used=0)
        monkeypatch.setattr(gpu, "SAMPLE_INTERVAL_S", 0.01)
        monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: self.count)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda *_, **__: memory)


async def test_who_needs_a_gpu_and_sees_none_beats_and_claims_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = Cards(monkeypatch)
    with capture_logs() as lines:
        async with working(needs_gpu=True) as scene:
            task_id = scene.enqueue(5)
            await scene.until(lambda: scene.line.count("heartbeat") >= 3, "it lives")
            (worker,) = finished(scene.store.workers())
            assert worker.vram_total_mb == 0
            assert (scene.task(task_id).status, scene.task(task_id).attempts) == (TaskStatus.QUEUED, 0)
            assert scene.line.count("finish_and_claim") == 0
            cards.count = 1
            await scene.until_status(task_id, TaskStatus.COMPLETE)
            # It falls off the bus: from the moment in which that is seen, nothing is taken.
            cards.count = 0
            await scene.until(lambda: len(told(lines)) == 2, "it says so")
            later = scene.enqueue(6)
            beats = scene.line.count("heartbeat")
            await scene.until(lambda: scene.line.count("heartbeat") >= beats + 3, "it lives")
            assert scene.task(later).status is TaskStatus.QUEUED
    assert len(told(lines)) == 2


def told(lines: list[Any]) -> list[Any]:
    return [line for line in lines if line["event"].startswith("claiming nothing")]


async def test_who_needs_no_gpu_works_without(monkeypatch: pytest.MonkeyPatch) -> None:
    Cards(monkeypatch)
    async with working() as scene:
        await scene.until_status(scene.enqueue(5), TaskStatus.COMPLETE)
