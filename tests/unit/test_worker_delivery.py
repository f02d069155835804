"""Delivery of results and failures over a scripted transport: unanswered, oversized and refused deliveries."""

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from support.worker_scenario import UNAVAILABLE, Barrier, Fault, lengths, result_of, running_worker
from windlass.model.errors import BadInput, DatabaseUnavailable
from windlass.model.task import Finished, TaskStatus
from windlass.worker import delivery
from windlass.worker.handler import RunningTask
from windlass.worker.lifecycle import ExitReason


@pytest.mark.parametrize("takes_effect", [False, True], ids=["call lost", "answer lost"])
async def test_unanswered_result_is_redelivered_and_counts_once(takes_effect: bool) -> None:
    async with running_worker() as scenario:
        await scenario.wait_for_heartbeat()
        # The first call claims the task, the second delivers it.
        scenario.transport.faults["finish_and_claim"] = [
            None,
            Fault(UNAVAILABLE, takes_effect),
            Fault(UNAVAILABLE, takes_effect),
        ]
        task = await scenario.wait_for_status(scenario.enqueue(5), TaskStatus.COMPLETE)
        assert (task.attempts, task.result) == (1, "5")
        (worker,) = result_of(scenario.store.workers())
        assert worker.late_results == 0


@pytest.mark.parametrize("takes_effect", [False, True], ids=["call lost", "answer lost"])
async def test_unanswered_failure_is_redelivered_and_counts_once(takes_effect: bool) -> None:
    async def fails(_task: RunningTask) -> None:
        raise ValueError("the cause")

    async with running_worker(fails) as scenario:
        scenario.transport.faults["fail"] = [Fault(UNAVAILABLE, takes_effect), Fault(UNAVAILABLE, takes_effect)]
        task = await scenario.wait_for_status(scenario.enqueue(max_attempts=1), TaskStatus.FAILED)
        assert "the cause" in (task.error or "")
        assert [event.code for event in result_of(scenario.store.events(task_id=task.id))] == ["TASK_FAILED"]


async def test_delivery_without_claims_may_take_over_half_a_lease() -> None:
    """No claims can expire meanwhile, and large results take time."""
    deliveries: list[int] = []

    def record(_worker_id: str, results: Sequence[Finished], *_: object) -> None:
        if results:
            deliveries.append(len(results))

    async with running_worker(lease_s=1.0) as scenario:
        await scenario.wait_for_heartbeat()
        task_id = 0

        async def answer_late() -> None:
            if scenario.task(task_id).status is TaskStatus.COMPLETE:
                scenario.transport.after.clear()
                heartbeats = scenario.transport.count("heartbeat")
                await scenario.wait_until(
                    lambda: scenario.transport.count("heartbeat") > heartbeats + 6, "more than half a lease"
                )

        async def drain() -> None:
            if scenario.has_running_task():
                scenario.runtime.drain("test")
                scenario.transport.after["finish_and_claim"] = answer_late

        scenario.transport.before["finish_and_claim"] = record
        scenario.transport.after["finish_and_claim"] = drain
        task_id = scenario.enqueue(5)
        assert await scenario.exit() is ExitReason.DRAINED
        assert scenario.task(task_id).status is TaskStatus.COMPLETE
        assert deliveries == [1]


async def test_unexpected_error_does_not_lose_finished_work() -> None:
    async with running_worker() as scenario:
        await scenario.wait_for_heartbeat()
        scenario.transport.faults["finish_and_claim"] = [None, Fault(RuntimeError("an unknown error during failover"))]
        task = await scenario.wait_for_status(scenario.enqueue(5), TaskStatus.COMPLETE)
        assert task.attempts == 1


async def test_undeliverable_results_raise_after_delivery_timeout() -> None:
    async with running_worker(delivery_timeout_s=0.3) as scenario:

        async def go_down() -> None:
            scenario.transport.is_down = bool(
                scenario.transport.count("finish_and_claim") > 1 or scenario.has_running_task()
            )

        scenario.transport.after["finish_and_claim"] = go_down
        task_id = scenario.enqueue(5)
        with pytest.raises(DatabaseUnavailable):
            await scenario.exit()
        assert scenario.task(task_id).status is TaskStatus.RUNNING


async def test_large_results_are_delivered_in_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "MAX_DELIVERY_BYTES", 100)
    deliveries: list[list[int]] = []

    def record(_worker_id: str, results: Sequence[Finished], *_: object) -> None:
        if results:
            deliveries.append(lengths(results))

    async with running_worker(Barrier(8).wait_for_all, concurrency=8) as scenario:
        scenario.transport.before["finish_and_claim"] = record
        # JSON adds two quotation marks to each. One result exceeds the limit and is delivered alone.
        sizes = [38, 38, 38, 38, 298, 18, 38, 38]
        task_ids = [scenario.enqueue("x" * size) for size in sizes]
        for task_id in task_ids:
            await scenario.wait_for_status(task_id, TaskStatus.COMPLETE)
        assert sorted(itertools.chain(*deliveries)) == sorted(size + 2 for size in sizes)
        assert [batch for batch in deliveries if len(batch) > 1 and sum(batch) > 100] == []
        assert any(len(batch) > 1 for batch in deliveries)


async def test_unanswered_batch_is_halved_and_delivered_without_claiming(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "MAX_DELIVERY_BYTES", 1_000)
    monkeypatch.setattr(delivery, "MIN_DELIVERY_BYTES", 10)
    calls: list[tuple[int, int]] = []

    def cut_off(_worker_id: str, results: Sequence[Finished], _queues: Sequence[str], limit: int) -> None:
        if results:
            calls.append((sum(lengths(results)), limit))
            if calls[-1][0] > 100:
                raise UNAVAILABLE

    async with running_worker(Barrier(8).wait_for_all, concurrency=8) as scenario:
        scenario.transport.before["finish_and_claim"] = cut_off
        for task_id in [scenario.enqueue("x" * 38) for _ in range(8)]:
            task = await scenario.wait_for_status(task_id, TaskStatus.COMPLETE)
            assert task.attempts == 1
        # After an unanswered call the size limit is halved, and the next call claims nothing.
        assert [size for size, _ in calls][:4] == [320, 320, 240, 120]
        assert [limit for size, limit in calls[1:5]] == [0, 0, 0, 0]


def reject_poison(_worker_id: str, results: Sequence[Finished], *_: object) -> None:
    if any(item.result == '"poison"' for item in results):
        raise BadInput("finishing tasks: the result cannot be stored")


@pytest.mark.parametrize("is_unreliable", [False, True], ids=["reliable transport", "unreliable transport"])
async def test_refused_result_fails_only_its_own_attempt(is_unreliable: bool) -> None:
    """The concurrency limit holds during the repeated calls."""
    running, max_running = 0, 0
    may_finish = asyncio.Event()

    async def waits(task: RunningTask) -> Any:
        nonlocal running, max_running
        running += 1
        max_running = max(max_running, running)
        try:
            await may_finish.wait()
            return task.payload
        finally:
            running -= 1

    async with running_worker(waits, concurrency=4, lease_s=1.0) as scenario:
        scenario.transport.before["finish_and_claim"] = reject_poison
        payloads = ["good", "poison", "good", "good", "good", "poison", "good", "good", "good", "good"]
        task_ids = [scenario.enqueue(payload, max_attempts=1) for payload in payloads]
        await scenario.wait_until(lambda: running == 4, "four attempts run")
        if is_unreliable:
            scenario.transport.faults["fail"] = [Fault(UNAVAILABLE, takes_effect=True), Fault(UNAVAILABLE)]
            scenario.transport.faults["finish_and_claim"] = [
                None,
                Fault(UNAVAILABLE),
                None,
                Fault(UNAVAILABLE, takes_effect=True),
            ]
        may_finish.set()
        for task_id, payload in zip(task_ids, payloads, strict=True):
            status = TaskStatus.FAILED if payload == "poison" else TaskStatus.COMPLETE
            task = await scenario.wait_for_status(task_id, status)
            assert task.error_code == ("BAD_RESULT" if payload == "poison" else None)
            assert task.attempts == 1
        assert max_running <= 4
