"""Running and cancelling attempts over a scripted transport, with handlers and executors that misbehave."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from support.worker_scenario import echo, result_of, running_worker
from windlass.model.errors import HandlerNotFound
from windlass.model.task import Finished, TaskStatus
from windlass.worker import attempts
from windlass.worker.handler import RunningTask
from windlass.worker.inline import InlineExecutor
from windlass.worker.lifecycle import ExitReason


async def test_result_of_handler_that_caught_cancellation_is_delivered() -> None:
    async def finishes_when_cancelled(_task: RunningTask) -> str:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            return "saved"
        return "slept"

    async with running_worker(finishes_when_cancelled) as scenario:
        task_id = scenario.enqueue()
        await scenario.wait_for_status(task_id, TaskStatus.RUNNING)
        await scenario.wait_until(lambda: scenario.transport.count("heartbeat") > 2, "the handler runs")
        scenario.runtime.drain("test", 0.0)
        assert await scenario.exit() is ExitReason.DRAINED
        assert scenario.task(task_id).result == '"saved"'


async def test_uncancellable_handler_does_not_block_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "CANCEL_TIMEOUT_S", 0.1)
    may_end = asyncio.Event()

    async def ignores_cancellation(_task: RunningTask) -> None:
        while not may_end.is_set():
            try:
                await may_end.wait()
            except asyncio.CancelledError:
                continue

    async with running_worker(ignores_cancellation) as scenario:
        task_id = scenario.enqueue()
        await scenario.wait_for_status(task_id, TaskStatus.RUNNING)
        scenario.runtime.drain("test", 0.0)
        assert await scenario.exit() is ExitReason.DRAINED
        task = scenario.task(task_id)
        assert (task.status, task.attempts) == (TaskStatus.QUEUED, 0)
        may_end.set()


async def test_claim_lost_during_delivery_changes_nothing() -> None:
    async with running_worker() as scenario:

        def take_back(_worker_id: str, results: Sequence[Finished], *_: object) -> None:
            for item in results:
                result_of(scenario.store.cancel_task(item.task_id, "cancelled during delivery"))

        scenario.transport.before["finish_and_claim"] = take_back
        task = await scenario.wait_for_status(scenario.enqueue(5), TaskStatus.FAILED)
        assert (task.error_code, task.result) == ("CANCELLED", None)
        await scenario.wait_until(
            lambda: result_of(scenario.store.workers())[0].late_results == 1, "the late result is counted"
        )
        scenario.transport.before.clear()
        await scenario.wait_for_status(scenario.enqueue(6), TaskStatus.COMPLETE)


class FailingExecutor:
    """An executor whose runs raise these errors in order; None is a run that succeeds."""

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


async def test_executor_defect_fails_attempt_but_not_worker() -> None:
    async with running_worker(FailingExecutor(RuntimeError("a bug"))) as scenario:
        task = await scenario.wait_for_status(scenario.enqueue(max_attempts=1), TaskStatus.FAILED)
        assert task.error_code == "WORKER_ERROR"
        assert "RuntimeError: a bug" in (task.error or "")
        await scenario.wait_for_status(scenario.enqueue(5), TaskStatus.COMPLETE)


async def test_lost_handler_releases_task_drains_worker_and_is_raised() -> None:
    executor = FailingExecutor(None, HandlerNotFound("cannot import app:handler"))
    async with running_worker(executor) as scenario:
        good, bad = scenario.enqueue(1), scenario.enqueue(2)
        with pytest.raises(HandlerNotFound, match="cannot import app:handler"):
            await scenario.exit()
        assert scenario.task(good).status is TaskStatus.COMPLETE
        task = scenario.task(bad)
        assert (task.status, task.attempts) == (TaskStatus.QUEUED, 0)
        assert result_of(scenario.store.workers()) == []
        assert executor.is_closed


async def test_attempt_ends_when_a_heartbeat_says_that_its_claim_is_lost() -> None:
    has_begun, was_cancelled, may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def runs_on(_task: RunningTask) -> None:
        has_begun.set()
        try:
            await may_end.wait()
        except asyncio.CancelledError:
            was_cancelled.set()
            raise

    async with running_worker(runs_on) as scenario:
        task_id = scenario.enqueue()
        await scenario.wait_until(has_begun.is_set, "the handler runs")
        result_of(scenario.store.cancel_task(task_id, "no longer wanted"))
        heartbeats = scenario.transport.count("heartbeat")
        # Counted, not timed: one heartbeat may be on its way, and the answer reaches the attempt from another thread.
        await scenario.wait_until(
            lambda: was_cancelled.is_set() or scenario.transport.count("heartbeat") > heartbeats + 20, "more heartbeats"
        )
        may_end.set()  # so that a failure does not wait for the handler
        assert was_cancelled.is_set()
        assert scenario.task(task_id).error_code == "CANCELLED"
