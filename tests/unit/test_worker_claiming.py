"""When a worker claims and how much, over a scripted transport: late answers, notifications, clocks, missing GPUs."""

import asyncio
import itertools
import threading
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from structlog.testing import capture_logs

from support.memory_store.stores import MemoryStores
from support.worker_scenario import (
    TIMEOUT_S,
    UNAVAILABLE,
    Barrier,
    Fault,
    ScriptedTransport,
    WorkerScenario,
    result_of,
    running_worker,
)
from windlass.model.task import Finished, TaskStatus
from windlass.worker import claiming, gpu
from windlass.worker.handler import RunningTask


async def test_claim_with_lost_answer_is_released_after_lease_uncounted() -> None:
    async with running_worker(lease_s=1.0) as scenario:
        await scenario.wait_for_heartbeat()
        scenario.transport.faults["finish_and_claim"] = [Fault(UNAVAILABLE, takes_effect=True)]
        task = await scenario.wait_for_status(scenario.enqueue(5), TaskStatus.COMPLETE)
        assert task.attempts == 1
        assert [event.code for event in result_of(scenario.store.events(task_id=task.id))] == ["TASK_RELEASED"]


@pytest.mark.parametrize("is_loop_blocked", [False, True], ids=["slow transport", "blocked event loop"])
async def test_claim_that_arrives_after_its_release_is_not_begun(is_loop_blocked: bool) -> None:
    began: list[int] = []
    is_released = threading.Event()

    async def records(task: RunningTask) -> Any:
        began.append(task.attempt)
        return task.payload

    async with running_worker(records, lease_s=1.0) as scenario:
        await scenario.wait_for_heartbeat()
        task_id = 0

        async def record() -> None:
            if any(event.code == "TASK_RELEASED" for event in result_of(scenario.store.events(task_id=task_id))):
                is_released.set()

        async def answer_late() -> None:
            if scenario.has_running_task():
                scenario.transport.after.pop("finish_and_claim")
                if is_loop_blocked:
                    assert is_released.wait(TIMEOUT_S)
                else:
                    await scenario.wait_until(is_released.is_set, "the lease expires")

        scenario.transport.after |= {"finish_and_claim": answer_late, "heartbeat": record}
        task_id = scenario.enqueue(5)
        task = await scenario.wait_for_status(task_id, TaskStatus.COMPLETE)
        assert is_released.is_set()
        assert (began, task.attempts) == ([1], 1)
        (worker,) = result_of(scenario.store.workers())
        assert worker.late_results == 0


async def test_error_while_waiting_for_work_does_not_leave_worker_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claiming, "POLL_INTERVAL_S", 0.02)
    async with running_worker() as scenario:
        scenario.transport.faults["next_run_after"] = [Fault(RuntimeError("a bug")), Fault(UNAVAILABLE)] * 3
        await scenario.wait_until(lambda: not scenario.transport.faults["next_run_after"], "the faults are used up")
        await scenario.wait_for_status(scenario.enqueue(5), TaskStatus.COMPLETE)


async def test_worker_without_results_waits_for_database_without_limit() -> None:
    async with running_worker(delivery_timeout_s=0.1) as scenario:
        await scenario.wait_for_heartbeat()
        scenario.transport.is_down = True
        claims = scenario.transport.count("finish_and_claim")
        await scenario.wait_until(
            lambda: scenario.transport.count("finish_and_claim") >= claims + 4, "it keeps retrying"
        )
        scenario.transport.is_down = False
        await scenario.wait_for_status(scenario.enqueue(5), TaskStatus.COMPLETE)


async def test_work_announced_during_delivery_is_claimed() -> None:
    """The answer to the delivery was computed before the announcement and does not contain the new task."""
    may_finish, is_announced = asyncio.Event(), asyncio.Event()
    waits, second = [], []

    async def first_waits(task: RunningTask) -> Any:
        if task.payload == "first":
            await may_finish.wait()
        return task.payload

    async def wait_for_work(_queues: Sequence[str], _timeout_s: float) -> None:
        waits.append(1)
        # Only the first wait gets an announcement; later ones never end.
        await (is_announced.wait() if len(waits) == 1 else asyncio.Event().wait())

    def prepare(scenario: WorkerScenario) -> None:
        scenario.transport.wait_for_work = wait_for_work  # type: ignore[method-assign]
        scenario.enqueue("first")

    async with running_worker(first_waits, concurrency=2, prepare=prepare) as scenario:

        async def announce() -> None:
            scenario.transport.after.clear()
            second.append(scenario.enqueue("second"))
            is_announced.set()
            await asyncio.sleep(0)  # lets the waiting task see it
            await asyncio.sleep(0)

        await scenario.wait_until(lambda: waits, "it waits for a second task")
        scenario.transport.after["finish_and_claim"] = announce
        may_finish.set()
        await scenario.wait_until(lambda: second, "delivery of the first result")
        await scenario.wait_for_status(second[0], TaskStatus.COMPLETE)


async def test_claim_batch_shrinks_on_late_answers_and_grows_again() -> None:
    limits: list[int] = []
    is_slow = True
    barrier = Barrier(16)

    def record(_worker_id: str, _results: Sequence[Finished], _queues: Sequence[str], limit: int) -> None:
        limits.append(limit)

    async with running_worker(barrier.wait_for_all, concurrency=16, lease_s=1.0) as scenario:
        await scenario.wait_for_heartbeat()

        async def delay_large_answers() -> None:
            if is_slow and limits[-1] > 3 and scenario.has_running_task():
                await asyncio.Event().wait()

        scenario.transport.before["finish_and_claim"] = record
        scenario.transport.after["finish_and_claim"] = delay_large_answers
        first = [scenario.enqueue(number) for number in range(3)]
        await scenario.wait_until(lambda: barrier.waiting == 3, "small claims are answered")
        assert [limit for limit, _ in itertools.groupby(limits)][:3] == [8, 4, 2]
        is_slow = False
        limits.clear()
        for task_id in first + [scenario.enqueue(number) for number in range(100)]:
            assert (await scenario.wait_for_status(task_id, TaskStatus.COMPLETE)).attempts == 1
        assert max(limits) == 8


async def test_worker_with_fast_clock_backs_off_polling() -> None:
    behind = timedelta(hours=1)
    transport = ScriptedTransport(MemoryStores(lambda: datetime.now(UTC) - behind))
    async with running_worker(transport=transport) as scenario:
        due = datetime.now(UTC) - behind + timedelta(minutes=30)
        scenario.enqueue(run_after=due)
        # The scripted transport waits less than asked, so the test compares the requested times.
        waits_s: list[float] = []
        wait = scenario.transport.wait_for_work

        async def wait_for_work(queues: Sequence[str], timeout_s: float) -> None:
            waits_s.append(timeout_s)
            await wait(queues, timeout_s)

        scenario.transport.wait_for_work = wait_for_work  # type: ignore[method-assign]
        await scenario.wait_until(lambda: len(waits_s) >= 10, "ten polls")
        assert waits_s[-1] == claiming.POLL_INTERVAL_S


class FakeNvml:
    """NVML with a settable number of GPUs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        memory = SimpleNamespace(total=1 << 34, used=0)
        monkeypatch.setattr(gpu, "SAMPLE_INTERVAL_S", 0.01)
        monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: self.count)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda *_, **__: memory)


async def test_worker_that_needs_gpu_and_sees_none_does_not_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(monkeypatch)
    with capture_logs() as lines:
        async with running_worker(needs_gpu=True) as scenario:
            task_id = scenario.enqueue(5)
            await scenario.wait_until(lambda: scenario.transport.count("heartbeat") >= 3, "three heartbeats")
            (worker,) = result_of(scenario.store.workers())
            assert worker.vram_total_mb == 0
            assert (scenario.task(task_id).status, scenario.task(task_id).attempts) == (TaskStatus.QUEUED, 0)
            assert scenario.transport.count("finish_and_claim") == 0
            nvml.count = 1
            await scenario.wait_for_status(task_id, TaskStatus.COMPLETE)
            # The GPU falls off the bus. Once that is seen, nothing is claimed.
            nvml.count = 0
            await scenario.wait_until(lambda: len(warnings_in(lines)) == 2, "second warning")
            later = scenario.enqueue(6)
            heartbeats = scenario.transport.count("heartbeat")
            await scenario.wait_until(
                lambda: scenario.transport.count("heartbeat") >= heartbeats + 3, "three more heartbeats"
            )
            assert scenario.task(later).status is TaskStatus.QUEUED
    assert len(warnings_in(lines)) == 2


def warnings_in(lines: list[Any]) -> list[Any]:
    return [line for line in lines if line["event"] == "stop claiming"]


async def test_worker_that_needs_no_gpu_claims_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(monkeypatch)
    async with running_worker() as scenario:
        await scenario.wait_for_status(scenario.enqueue(5), TaskStatus.COMPLETE)
