"""Lost workers and databases: tasks are requeued, results wait, and a lost claim changes no row."""

import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncpg
import pytest

from support.postgres_servers import reachable_temp_dir
from support.worker_harness import QUEUE, KillableServer, WorkerHarness, WorkerProcess, is_alive, until
from windlass.model.task import TaskStatus
from windlass.model.worker import WorkerStatus

# Short, so that a lost worker is found soon; long enough for a machine that is six times overloaded.
LEASE_S = 10.0
HEARTBEAT_S = 0.3
SHORT_LEASE = {"heartbeat_s": HEARTBEAT_S, "lease_s": LEASE_S}


@pytest.fixture
async def harness(dsn: str, tmp_path: Path) -> AsyncIterator[WorkerHarness]:
    async with WorkerHarness(dsn, tmp_path) as harness:
        yield harness


def gate(folder: Path, attempt: int) -> dict[str, str]:
    return {"running": str(folder / f"running-{attempt}"), "go": str(folder / f"go-{attempt}")}


# ------------------------------------------------------------------------------------------------------- workers


async def test_killed_worker_loses_child_and_its_task_is_requeued(harness: WorkerHarness) -> None:
    process = await harness.start_registered(handler="block_the_first_time", **SHORT_LEASE)
    file = harness.folder / "pids"
    task_id = await harness.enqueue({"file": str(file)})
    await until(lambda: file.exists() and len(file.read_text().split()) == 2, "the handler blocks")
    pids = [int(pid) for pid in file.read_text().split()]
    process.send(signal.SIGKILL)
    # Although its interpreter is blocked, and with the process that it forked.
    await until(lambda: not any(map(is_alive, pids)), "the child and its copy are gone")

    other = await harness.start_registered(handler="block_the_first_time", **SHORT_LEASE)
    assert await harness.wait_for_result(task_id) == "the second attempt"
    task, row = await harness.task(task_id), await harness.worker_row(other)
    assert row is not None
    assert (task.attempts, task.worker_id) == (2, row.id)
    assert await harness.event_codes(task_id=task_id) == ["TASK_REQUEUED"]
    assert await harness.worker_status(process) is WorkerStatus.TERMINATED


@pytest.mark.parametrize("how", ["hang with a detached family", "leave a detached family"])
async def test_detached_descendants_of_killed_worker_are_killed(harness: WorkerHarness, how: str) -> None:
    process = await harness.start_registered(handler="misbehave", **SHORT_LEASE)
    file = harness.folder / "pids"
    task_id = await harness.enqueue({"how": how, "file": str(file)}, max_attempts=1)
    await until(lambda: file.exists() and len(file.read_text().splitlines()) == 3, "three generations live")
    if how.startswith("leave"):
        assert await harness.wait_for_result(task_id) == "they live on"
    pids = [int(pid) for pid in file.read_text().split()]
    assert all(map(is_alive, pids))
    process.send(signal.SIGKILL)
    await until(lambda: not any(map(is_alive, pids)), "none of them is left")


async def test_worker_resumed_after_lease_registers_under_new_id(harness: WorkerHarness) -> None:
    sleeper = await harness.start_registered(handler="wait_for_file_of_attempt", **SHORT_LEASE)
    lost_row = await harness.worker_row(sleeper)
    assert lost_row is not None
    task_id = await harness.enqueue({str(attempt): gate(harness.folder, attempt) for attempt in (1, 2)})
    await until((harness.folder / "running-1").exists, "the first attempt runs")
    sleeper.send_to_all(signal.SIGSTOP)

    other = await harness.start_registered(handler="wait_for_file_of_attempt", **SHORT_LEASE)
    await until((harness.folder / "running-2").exists, "the second attempt runs")
    (harness.folder / "go-2").touch()
    assert (await harness.wait_for_result(task_id))["attempt"] == 2
    accepted, other_row = await harness.task(task_id), await harness.worker_row(other)
    assert other_row is not None
    assert (accepted.attempts, accepted.worker_id) == (2, other_row.id)

    # Its handler ends when it resumes, so that it has a result to deliver.
    (harness.folder / "go-1").touch()
    sleeper.send_to_all(signal.SIGCONT)
    await until(lambda: _is_renamed(harness, sleeper, lost_row.id), "the worker has registered again")
    assert await harness.task(task_id) == accepted
    ended = await harness.store.worker(lost_row.id)
    assert ended is not None
    assert ended.status is WorkerStatus.TERMINATED
    assert ended.last_heartbeat is not None
    assert ended.terminated_at is not None
    assert ended.last_heartbeat < ended.terminated_at
    events = ("stop terminated worker", "reject result")
    assert any(event in sleeper.log() for event in events)

    # It works again.
    other.send(signal.SIGTERM)
    assert await other.exit_code() == 0
    next_id = await harness.enqueue({"1": gate(harness.folder, 1)})
    assert (await harness.wait_for_result(next_id))["attempt"] == 1
    new_row = await harness.worker_row(sleeper)
    assert new_row is not None
    assert (await harness.task(next_id)).worker_id == new_row.id


async def _is_renamed(harness: WorkerHarness, process: WorkerProcess, old_id: str) -> bool:
    row = await harness.worker_row(process)
    return row is not None and row.id != old_id and row.status is WorkerStatus.ACTIVE


async def test_task_that_always_kills_its_process_fails_with_history(harness: WorkerHarness) -> None:
    process = await harness.start_registered(handler="misbehave")
    task_id = await harness.enqueue({"how": "segfault"}, max_attempts=3)
    for attempt in (1, 2):
        await until(lambda attempt=attempt: _waits_after(harness, task_id, attempt), f"attempt {attempt} has failed")
        # Skip the back-off, which other tests cover.
        await harness.sql("update windlass.tasks set run_after = windlass.now() where id = $1", task_id)
        await harness.sql("select pg_notify('windlass_tasks', $1)", QUEUE)
    task = await harness.wait_until_failed(task_id)
    assert (task.attempts, task.error_code) == (3, "CHILD_DIED")
    assert "SIGSEGV" in (task.error or "")
    events = await harness.store.events(task_id=task_id)
    assert [event.code for event in events] == ["TASK_ERROR", "TASK_ERROR", "TASK_FAILED"]
    assert [event.detail and event.detail["attempt"] for event in events] == [1, 2, 3]
    assert all("SIGSEGV" in event.reason for event in events)
    assert process.is_running()


async def _waits_after(harness: WorkerHarness, task_id: int, attempts: int) -> bool:
    task = await harness.task(task_id)
    return (task.status, task.attempts) == (TaskStatus.ERROR, attempts)


async def test_blocked_maintenance_does_not_stop_heartbeats(harness: WorkerHarness) -> None:
    await harness.record_heartbeats()
    # A lost worker, and a lock on the rows that the recovery of its task reads.
    dead = await harness.start_registered(handler="block_the_first_time", **SHORT_LEASE)
    file = harness.folder / "pids"
    task_id = await harness.enqueue({"file": str(file)})
    await until(file.exists, "the handler runs")
    dead.send(signal.SIGKILL)
    locker = await asyncpg.connect(harness.dsn)
    try:
        await locker.execute("begin")
        await locker.execute("lock table windlass.leases")
        await harness.start_registered(handler="block_the_first_time", **SHORT_LEASE)
        waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = $1"
        database = await locker.fetchval("select current_database()")
        await until(lambda: harness.sql(waiting, database), "recovery waits for the lock")
        await harness.wait_for_heartbeats(10, await harness.store.now())
        assert await harness.sql(waiting, database) > 0
    finally:
        await locker.close()
    assert await harness.wait_for_result(task_id) == "the second attempt"


async def test_worker_drains_when_its_contract_is_no_longer_supported(harness: WorkerHarness) -> None:
    process = await harness.start_registered(handler="wait_for_file", **SHORT_LEASE)
    task_id = await harness.enqueue(gate(harness.folder, 1))
    await until((harness.folder / "running-1").exists, "the handler runs")
    contract = "create or replace function windlass.contract_versions(out oldest integer, out newest integer)"
    await harness.sql(f"{contract} language sql immutable parallel safe as 'select 2, 2'")
    # The connection breaks during a heartbeat.
    locker = await asyncpg.connect(harness.dsn)
    try:
        await locker.execute("begin")
        await locker.execute("select from windlass.workers for update")
        beats = "application_name = 'windlass' and datname = current_database() and query like '%heartbeat%'"
        waiting = f"select count(*) from pg_stat_activity where {beats} and wait_event_type = $1"  # noqa: S608
        await until(lambda: harness.sql(waiting, "Lock"), "a heartbeat waits")
        await locker.execute(f"select pg_terminate_backend(pid) from pg_stat_activity where {beats}")  # noqa: S608
    finally:
        await locker.close()
    await until(lambda: "drain worker" in process.log(), "the worker has noticed")
    (harness.folder / "go-1").touch()
    assert await process.exit_code() == 2
    said = process.log().splitlines()[-1]
    assert "the database supports contract versions 2 to 2" in said
    assert (await harness.sql("select status from windlass.tasks where id = $1", task_id)) == "complete"
    await harness.sql(f"{contract} language sql immutable parallel safe as 'select 1, 1'")


async def test_unanswered_claim_times_out_after_half_a_lease(harness: WorkerHarness) -> None:
    """After a whole lease a heartbeat would release the claims that the worker is about to receive."""
    locker = await asyncpg.connect(harness.dsn)
    try:
        await locker.execute("begin")
        await locker.execute("lock table windlass.tasks in exclusive mode")
        process = harness.start(handler="echo", **SHORT_LEASE)
        await until(
            lambda: f"claiming tasks: no answer within {LEASE_S / 2:g} s (half of the lease)" in process.log(),
            "the claim has timed out",
            timeout_s=10 * LEASE_S / 2,
        )
    finally:
        await locker.close()
    assert await harness.wait_for_result(await harness.enqueue(5)) == 5


# ----------------------------------------------------------------------------------------------------- databases


@pytest.fixture(scope="module")
def server() -> Iterator[KillableServer]:
    with reachable_temp_dir() as folder:
        server = KillableServer(folder)
        yield server
        server.close()


@pytest.fixture
async def killable_harness(server: KillableServer, tmp_path: Path) -> AsyncIterator[WorkerHarness]:
    server.start()
    async with WorkerHarness(server.dsn, tmp_path) as harness:
        yield harness
        server.start()


@pytest.mark.parametrize("how", [signal.SIGQUIT, signal.SIGKILL], ids=["immediate shutdown", "kill -9"])
async def test_result_is_delivered_after_database_outage(
    server: KillableServer, killable_harness: WorkerHarness, how: signal.Signals
) -> None:
    harness = killable_harness
    process = await harness.start_registered(handler="wait_for_file")
    before = await harness.worker_row(process)
    task_id = await harness.enqueue(gate(harness.folder, 1))
    await until((harness.folder / "running-1").exists, "the handler runs")
    server.end(how)
    await until(lambda: '"event": "send heartbeat failed"' in process.log(), "the worker has noticed")
    (harness.folder / "go-1").touch()
    await until(lambda: f'"undelivered": [{task_id}]' in process.log(), "an undelivered result")
    assert process.is_running()

    server.start()
    await until(lambda: _is_complete(harness, task_id), "the result is delivered")
    task, after = await harness.task(task_id), await harness.worker_row(process)
    assert before is not None
    assert after is not None
    assert (task.attempts, task.worker_id, after.id) == (1, before.id, before.id)
    assert await harness.event_codes(task_id=task_id) == []


async def _is_complete(harness: WorkerHarness, task_id: int) -> bool:
    return (await harness.task(task_id)).status is TaskStatus.COMPLETE


async def test_idle_worker_drains_during_database_outage(
    server: KillableServer, killable_harness: WorkerHarness
) -> None:
    process = await killable_harness.start_registered(handler="echo")
    server.end(signal.SIGQUIT)
    await until(lambda: '"event": "deliver results failed"' in process.log(), "the worker has noticed")
    process.send(signal.SIGTERM)
    assert await process.exit_code(timeout_s=15) == 0


async def test_second_signal_abandons_undelivered_result_with_error(
    server: KillableServer, killable_harness: WorkerHarness
) -> None:
    harness = killable_harness
    process = await harness.start_registered(handler="wait_for_file")
    await harness.enqueue(gate(harness.folder, 1))
    await until((harness.folder / "running-1").exists, "the handler runs")
    server.end(signal.SIGQUIT)
    (harness.folder / "go-1").touch()
    await until(lambda: '"undelivered": [' in process.log(), "an undelivered result")
    process.send(signal.SIGTERM)
    await until(lambda: '"event": "drain worker"' in process.log(), "the worker has noticed")
    await process.send_again(signal.SIGTERM)
    assert await process.exit_code(timeout_s=15) == 2
    assert "windlass: finishing tasks: the database at its local socket cannot be reached" in process.log()
