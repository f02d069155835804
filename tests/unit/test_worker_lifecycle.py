"""Registration, drain and exit of a worker over a scripted transport."""

import asyncio
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs

from support.worker_scenario import UNAVAILABLE, Fault, WorkerScenario, echo, result_of, running_worker
from windlass.model.errors import DatabaseUnavailable, SchemaMismatch
from windlass.model.task import Finished, TaskStatus
from windlass.model.worker import Registration, WorkerStatus
from windlass.worker import lifecycle
from windlass.worker.handler import RunningTask
from windlass.worker.lifecycle import ExitReason

DRAIN_LIMIT_S = 0.05


async def test_two_signals_at_once_count_as_one() -> None:
    """`timeout` sends a signal to the program and then to its process group."""
    may_finish = asyncio.Event()

    async def waits(task: RunningTask) -> Any:
        await may_finish.wait()
        return task.payload

    with capture_logs() as lines:
        async with running_worker(waits) as scenario:
            task_id = scenario.enqueue(5)
            await scenario.wait_for_status(task_id, TaskStatus.RUNNING)
            # Different signals: the system may merge two of the same kind.
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            await scenario.wait_until(
                lambda: {"drain worker", "ignored repeated signal"} <= {line["event"] for line in lines},
                "both signals are handled",
            )
            may_finish.set()
            assert await scenario.exit() is ExitReason.DRAINED
            assert scenario.task(task_id).status is TaskStatus.COMPLETE


async def test_claim_arriving_after_second_signal_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "SAME_SIGNAL_S", 0.0)
    began = []

    async def sleeps(_task: RunningTask) -> None:
        began.append(1)
        await asyncio.sleep(600)

    with capture_logs() as lines:
        async with running_worker(sleeps) as scenario:
            await scenario.wait_for_heartbeat()

            def drain_limits_s() -> list[float]:
                return [line["limit_s"] for line in lines if line["event"] == "drain worker"]

            async def signal_twice() -> None:
                if scenario.has_running_task():
                    os.kill(os.getpid(), signal.SIGTERM)
                    await scenario.wait_until(lambda: scenario.runtime.is_draining, "first signal")
                    os.kill(os.getpid(), signal.SIGTERM)
                    await scenario.wait_until(lambda: 0.0 in drain_limits_s(), "second signal")

            scenario.transport.after["finish_and_claim"] = signal_twice
            task_id = scenario.enqueue()
            assert await scenario.exit() is ExitReason.DRAINED
            task = scenario.task(task_id)
            assert (task.status, task.attempts, began) == (TaskStatus.QUEUED, 0, [])


async def test_result_ready_at_urgent_exit_is_delivered() -> None:
    scenarios: list[WorkerScenario] = []

    async def drains_and_finishes(task: RunningTask) -> Any:
        scenarios[0].runtime.drain("test", 0.0)
        return task.payload

    async with running_worker(drains_and_finishes, prepare=scenarios.append) as scenario:
        task_id = scenario.enqueue(5)
        assert await scenario.exit() is ExitReason.DRAINED
        task = scenario.task(task_id)
        assert (task.status, task.result, task.attempts) == (TaskStatus.COMPLETE, "5", 1)


async def test_drain_during_delivery_stops_claiming_after_it() -> None:
    async with running_worker() as scenario:
        await scenario.wait_for_heartbeat()

        async def drain() -> None:
            scenario.runtime.drain("during a delivery")

        scenario.transport.after["finish_and_claim"] = drain
        first, second = scenario.enqueue(1), scenario.enqueue(2)
        assert await scenario.exit() is ExitReason.DRAINED
        statuses = [scenario.task(first).status, scenario.task(second).status]
        assert statuses == [TaskStatus.COMPLETE, TaskStatus.QUEUED]
        assert result_of(scenario.store.workers()) == []


@asynccontextmanager
async def drained_during_outage(
    handler: Callable[[RunningTask], Any] = echo, **settings: Any
) -> AsyncIterator[tuple[WorkerScenario, int]]:
    """A worker that claimed a task, then lost its database, with a drain limit of DRAIN_LIMIT_S."""
    async with running_worker(handler, **settings) as scenario:
        await scenario.wait_for_heartbeat()

        async def go_down_and_drain() -> None:
            if scenario.has_running_task():
                scenario.transport.is_down = True
                scenario.runtime.drain("test", DRAIN_LIMIT_S)

        scenario.transport.after["finish_and_claim"] = go_down_and_drain
        task_id = scenario.enqueue(5)
        await scenario.wait_until(lambda: scenario.transport.is_down, "the task is claimed")
        yield scenario, task_id


async def wait_for_failed_deliveries(scenario: WorkerScenario) -> None:
    """Two deliveries fail after the drain deadline. The drain began before, so it is due first, however slow we are."""
    await asyncio.sleep(DRAIN_LIMIT_S)
    calls = scenario.transport.count("finish_and_claim")
    await scenario.wait_until(lambda: scenario.transport.count("finish_and_claim") >= calls + 2, "it keeps retrying")


async def test_result_is_delivered_after_drain_deadline_once_database_is_back() -> None:
    async with drained_during_outage() as (scenario, task_id):
        await wait_for_failed_deliveries(scenario)
        scenario.transport.is_down = False
        assert await scenario.exit() is ExitReason.DRAINED
        task = scenario.task(task_id)
        assert (task.status, task.result, task.attempts) == (TaskStatus.COMPLETE, "5", 1)
        assert result_of(scenario.store.workers()) == []


async def test_failure_is_delivered_after_drain_deadline() -> None:
    async def fails(_task: RunningTask) -> None:
        raise ValueError("the cause")

    async with drained_during_outage(fails) as (scenario, task_id):
        await asyncio.sleep(DRAIN_LIMIT_S)
        calls = scenario.transport.count("fail")
        await scenario.wait_until(lambda: scenario.transport.count("fail") >= calls + 2, "it keeps retrying")
        scenario.transport.is_down = False
        assert await scenario.exit() is ExitReason.DRAINED
        assert "the cause" in (scenario.task(task_id).error or "")


async def test_second_drain_request_stops_waiting_for_database() -> None:
    async with drained_during_outage() as (scenario, task_id):
        await wait_for_failed_deliveries(scenario)
        scenario.runtime.drain("test", 0.0)
        with pytest.raises(DatabaseUnavailable):
            await scenario.exit()
        assert scenario.task(task_id).status is TaskStatus.RUNNING


async def test_delivery_timeout_applies_after_drain_deadline() -> None:
    started = time.monotonic()
    async with drained_during_outage(delivery_timeout_s=0.5) as (scenario, task_id):
        with pytest.raises(DatabaseUnavailable):
            await scenario.exit()
        assert time.monotonic() - started > 0.5
        assert scenario.task(task_id).status is TaskStatus.RUNNING


async def test_worker_does_not_outstay_drain_deadline_for_releases() -> None:
    async def sleeps(_task: RunningTask) -> None:
        await asyncio.sleep(600)

    async with drained_during_outage(sleeps) as (scenario, task_id):
        with pytest.raises(DatabaseUnavailable):
            await scenario.exit()
        assert scenario.task(task_id).status is TaskStatus.RUNNING
        assert scenario.transport.count("release") == 1


async def test_worker_does_not_outstay_drain_deadline_on_schema_mismatch() -> None:
    async with running_worker(drain_timeout_s=0.05) as scenario:
        await scenario.wait_for_heartbeat()

        def refuse_results(_worker_id: str, results: Sequence[Finished], *_: object) -> None:
            if results:
                raise SchemaMismatch("upgrade windlass on this machine.")

        scenario.transport.before["finish_and_claim"] = refuse_results
        scenario.enqueue(5)
        with pytest.raises(SchemaMismatch):
            await scenario.exit()


async def test_idle_worker_drains_while_database_is_unavailable() -> None:
    async with running_worker() as scenario:
        await scenario.wait_for_heartbeat()
        scenario.transport.is_down = True
        claims = scenario.transport.count("finish_and_claim")
        await scenario.wait_until(lambda: scenario.transport.count("finish_and_claim") > claims, "an unanswered claim")
        scenario.runtime.drain("test")
        assert await scenario.exit() is ExitReason.DRAINED


def spawned(status: WorkerStatus) -> Callable[[WorkerScenario], None]:
    """Adds the row of a spawned worker in this status before its process starts."""

    def prepare(scenario: WorkerScenario) -> None:
        result_of(scenario.store.register(Registration("spawned", ("q",))))
        if status is WorkerStatus.TERMINATING:
            result_of(scenario.store.set_terminating(["spawned"], "no longer needed"))
        elif status is WorkerStatus.TERMINATED:
            result_of(scenario.store.deregister("spawned", "terminated before its start"))

    return prepare


async def test_spawned_worker_already_terminating_exits_at_once() -> None:
    async with running_worker(prepare=spawned(WorkerStatus.TERMINATING), worker_id="spawned") as scenario:
        task_id = scenario.enqueue()
        assert await scenario.exit() is ExitReason.DRAINED
        assert scenario.task(task_id).status is TaskStatus.QUEUED
        assert result_of(scenario.store.worker("spawned")).status is WorkerStatus.TERMINATED


async def test_spawned_worker_already_terminated_gets_no_new_id() -> None:
    async with running_worker(prepare=spawned(WorkerStatus.TERMINATED), worker_id="spawned") as scenario:
        assert await scenario.exit() is ExitReason.LOST
        assert [worker.id for worker in result_of(scenario.store.workers(include_terminated=True))] == ["spawned"]


async def test_terminated_worker_cancels_attempts_and_registers_again() -> None:
    ran = []

    async def first_sleeps(task: RunningTask) -> Any:
        ran.append(task.attempt)
        if len(ran) == 1:
            await asyncio.sleep(600)
        return task.payload

    async with running_worker(first_sleeps) as scenario:
        task_id = scenario.enqueue(5)
        await scenario.wait_until(lambda: ran, "the handler runs")
        (old,) = result_of(scenario.store.workers())
        scenario.transport.faults["register"] = [Fault(UNAVAILABLE), Fault(UNAVAILABLE)]
        result_of(scenario.store.deregister(old.id, "terminated by another process"))
        task = await scenario.wait_for_status(task_id, TaskStatus.COMPLETE)
        (new,) = result_of(scenario.store.workers())
        assert new.id != old.id
        assert task.worker_id == new.id
        assert scenario.transport.count("register") == 4


async def test_worker_terminated_during_delivery_gets_new_id_and_late_result() -> None:
    async with running_worker() as scenario:
        deliveries = itertools.count()

        def terminate(worker_id: str, results: Sequence[Finished], *_: object) -> None:
            if results and next(deliveries) == 0:
                result_of(scenario.store.deregister(worker_id, "during a delivery"))

        scenario.transport.before["finish_and_claim"] = terminate
        task = await scenario.wait_for_status(scenario.enqueue(5), TaskStatus.COMPLETE)
        rows = result_of(scenario.store.workers(include_terminated=True))
        assert [row.late_results for row in rows] == [1, 0]
        assert task.worker_id == rows[1].id


async def test_worker_learns_of_termination_without_heartbeats() -> None:
    async with running_worker() as scenario:
        await scenario.wait_for_heartbeat()
        scenario.transport.faults["heartbeat"] = [Fault(UNAVAILABLE)] * 100_000
        (old,) = result_of(scenario.store.workers())
        result_of(scenario.store.deregister(old.id, "terminated by another process"))
        task = await scenario.wait_for_status(scenario.enqueue(5), TaskStatus.COMPLETE)
        assert task.worker_id != old.id


@pytest.mark.parametrize("call", ["heartbeat", "finish_and_claim"])
async def test_schema_mismatch_drains_worker_and_is_raised(call: str) -> None:
    may_finish = asyncio.Event()

    async def waits(task: RunningTask) -> Any:
        await may_finish.wait()
        return task.payload

    async with running_worker(waits, concurrency=2) as scenario:
        task_id = scenario.enqueue(5)
        await scenario.wait_for_status(task_id, TaskStatus.RUNNING)
        scenario.transport.faults[call] = [Fault(SchemaMismatch("upgrade windlass on this machine."))] * 2
        await scenario.wait_until(lambda: scenario.runtime.is_draining, "the mismatch is seen")
        later = scenario.enqueue(6)
        may_finish.set()
        with pytest.raises(SchemaMismatch, match="upgrade windlass on this machine"):
            await scenario.exit()
        assert scenario.task(task_id).status is TaskStatus.COMPLETE
        assert scenario.task(later).status is TaskStatus.QUEUED
        assert result_of(scenario.store.workers()) == []
