"""The life of a worker as a real process with a real database: work, signals, drain, output."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from support.worker_harness import PATIENCE_S, WorkerHarness, WorkerProcess, is_alive, until
from windlass.cli.worker import EXIT_TIMEOUT_S
from windlass.model.task import Task, TaskStatus
from windlass.model.worker import WorkerStatus
from windlass.worker.attempts import CANCEL_TIMEOUT_S

# The wait for work and maintenance each open a connection when they first need one.
LATE_CONNECTIONS = 2
LOOP = ["--exec", """sh -c 'touch "$RUNNING"; while [ ! -e "$GO" ]; do sleep 0.05; done; echo 1'"""]
KINDS = {
    "--handler": ["--handler", "handlers:wait_for_file"],
    "--inline": ["--inline", "--handler", "handlers:wait_for_file_inline"],
    "--exec": LOOP,
}


@pytest.fixture
async def harness(dsn: str, tmp_path: Path) -> AsyncIterator[WorkerHarness]:
    async with WorkerHarness(dsn, tmp_path) as harness:
        yield harness


@dataclass
class Gate:
    """A task that runs until the gate is opened."""

    harness: WorkerHarness

    @property
    def files(self) -> dict[str, str]:
        return {"running": str(self.harness.folder / "running"), "go": str(self.harness.folder / "go")}

    @property
    def env(self) -> dict[str, str]:
        return {name.upper(): path for name, path in self.files.items()}

    async def enter(self, **options: object) -> int:
        """Enqueue it and wait until its handler runs."""
        task_id = await self.harness.enqueue(self.files, **options)
        await until(lambda: Path(self.files["running"]).exists(), "the handler runs")
        return task_id

    def handler_pid(self) -> int:
        return int(Path(self.files["running"]).read_text().split()[0])

    def open(self) -> None:
        Path(self.files["go"]).touch()


@pytest.fixture
def gate(harness: WorkerHarness) -> Gate:
    return Gate(harness)


# ------------------------------------------------------------------------------------------------------- tasks


async def test_child_stays_warm_and_is_replaced_after_death(harness: WorkerHarness) -> None:
    process = await harness.start_registered(handler="who")
    first, second = [await harness.wait_for_result(await harness.enqueue()) for _ in range(2)]
    assert second == {"pid": first["pid"], "calls": 2}
    assert first["pid"] != process.pid

    psutil.Process(first["pid"]).kill()
    await until(lambda: not is_alive(first["pid"]), "the child is gone")
    task_id = await harness.enqueue()
    third = await harness.wait_for_result(task_id)
    assert third["pid"] != first["pid"]
    assert third["calls"] == 1
    # The child died between tasks, which does not fail the next task.
    assert (await harness.task(task_id)).attempts == 1


async def test_command_gets_and_returns_json(harness: WorkerHarness) -> None:
    await harness.start_registered("--exec", "cat")
    payload = {"text": "Grüße\n", "numbers": [1, 2.5, None]}
    assert await harness.wait_for_result(await harness.enqueue(payload)) == payload


async def test_heartbeats_are_regular_and_list_process_and_task(harness: WorkerHarness, gate: Gate) -> None:
    await harness.record_heartbeats()
    process = await harness.start_registered(handler="wait_for_file")
    task = await harness.task(await gate.enter())
    row = await harness.worker_row(process)
    assert row is not None
    assert row.pid == process.pid
    assert (task.status, task.worker_id) == (TaskStatus.RUNNING, row.id)
    # There is no NVIDIA driver here.
    assert (row.vram_total_mb, row.vram_used_mb) == (None, None)

    begun = await harness.store.now()
    await harness.wait_for_heartbeats(10, begun)
    took_s = (await harness.store.now() - begun).total_seconds()
    # Ten heartbeats have at least nine intervals of 0.2 s between them.
    assert took_s >= 9 * 0.2 * 0.9


async def test_progress_is_stored_and_invalid_notes_do_no_harm(harness: WorkerHarness, gate: Gate) -> None:
    await harness.record_heartbeats()
    await harness.start_registered(handler="report")
    task_id = await harness.enqueue(gate.files)

    async def progress() -> tuple[float | None, str | None]:
        task = await harness.task(task_id)
        return task.progress, task.progress_note

    await until(lambda: _equal(progress(), (0.25, "a quarter")), "the progress is in the row")
    await harness.wait_for_heartbeats(5, await harness.store.now())
    gate.open()
    assert await harness.wait_for_result(task_id) == "done"


async def _equal(found: Awaitable[object], wanted: object) -> bool:
    return await found == wanted


async def test_time_limit_of_task_overrides_that_of_worker(harness: WorkerHarness) -> None:
    await harness.start_registered("--timeout", "0.5", handler="misbehave")
    without = await harness.enqueue({"how": "spin"}, max_attempts=1)
    with_own = await harness.enqueue({"how": "spin"}, max_attempts=1, timeout_s=0.75)
    assert "time limit of 0.5 s" in ((await harness.wait_until_failed(without)).error or "")
    assert "time limit of 0.75 s" in ((await harness.wait_until_failed(with_own)).error or "")


async def test_handler_of_cancelled_task_is_killed(harness: WorkerHarness, gate: Gate) -> None:
    process = await harness.start_registered(handler="wait_for_file")
    task_id = await gate.enter()
    assert await harness.store.cancel_task(task_id, "no longer needed")
    await until(lambda: not is_alive(gate.handler_pid()), "the handler is gone")
    task = await harness.task(task_id)
    assert (task.status, task.error_code, task.error) == (TaskStatus.FAILED, "CANCELLED", "no longer needed")
    gate.open()
    assert (await harness.wait_for_result(await harness.enqueue(gate.files)))["attempt"] == 1
    assert process.is_running()


async def test_paused_worker_finishes_and_claims_nothing_until_resumed(harness: WorkerHarness, gate: Gate) -> None:
    await harness.record_heartbeats()
    process = await harness.start_registered(handler="wait_for_file")
    row = await harness.worker_row(process)
    assert row is not None
    first = await gate.enter()
    assert await harness.store.set_paused([row.id], True) == 1
    await until(lambda: '"is_paused": true' in process.log(), "the worker has noticed")
    gate.open()
    await harness.wait_for_result(first)

    second = await harness.enqueue(gate.files)
    await harness.wait_for_heartbeats(5, await harness.store.now())
    assert (await harness.task(second)).attempts == 0
    assert await harness.store.set_paused([row.id], False) == 1
    await harness.wait_for_result(second)


# ------------------------------------------------------------------------------------------------------- drain


async def _sigterm(_harness: WorkerHarness, process: WorkerProcess) -> None:
    process.send(signal.SIGTERM)


async def _sigint(_harness: WorkerHarness, process: WorkerProcess) -> None:
    process.send(signal.SIGINT)


async def _sigterm_to_all_its_processes(_harness: WorkerHarness, process: WorkerProcess) -> None:
    process.send_to_all(signal.SIGTERM)


async def _two_signals_of_one_moment(_harness: WorkerHarness, process: WorkerProcess) -> None:
    # `timeout` signals a program and then its process group.
    process.send(signal.SIGTERM)
    process.send(signal.SIGINT)
    await until(lambda: '"event": "ignored repeated signal' in process.log(), "both signals are handled")


async def _set_terminating(harness: WorkerHarness, process: WorkerProcess) -> None:
    row = await harness.worker_row(process)
    assert row is not None
    assert await harness.store.set_terminating([row.id], "no longer needed") == 1


@pytest.mark.parametrize(
    ("tell", "kind"),
    [
        (_sigint, "--handler"),
        (_sigterm_to_all_its_processes, "--handler"),
        (_two_signals_of_one_moment, "--handler"),
        (_set_terminating, "--handler"),
        *((_sigterm, kind) for kind in KINDS),
    ],
)
async def test_drained_worker_finishes_its_task_and_claims_no_other(
    harness: WorkerHarness, gate: Gate, tell: Callable[[WorkerHarness, WorkerProcess], Awaitable[None]], kind: str
) -> None:
    process = await harness.start_registered(*KINDS[kind], env=gate.env)
    task_id = await gate.enter()
    await tell(harness, process)
    await until(lambda: '"event": "drain worker"' in process.log(), "the worker has noticed")
    waiting = await harness.enqueue(gate.files)
    gate.open()
    assert await process.exit_code() == 0

    task = await harness.task(task_id)
    assert (task.status, task.attempts) == (TaskStatus.COMPLETE, 1)
    assert (await harness.task(waiting)).status is TaskStatus.QUEUED
    assert await harness.worker_status(process) is WorkerStatus.TERMINATED
    assert not harness.live_processes()
    # After the registration every log line has the worker id, whatever thread or signal it comes from.
    lines = [json.loads(line) for line in process.log().splitlines() if line.startswith("{")]
    events = [line["event"] for line in lines]
    assert "drain worker" in events
    assert [line for line in lines[events.index("registered worker") :] if "worker_id" not in line] == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_second_signal_releases_task_and_exits_at_once(
    harness: WorkerHarness, gate: Gate, kind: str, second: signal.Signals
) -> None:
    process = await harness.start_registered(*KINDS[kind], env=gate.env)
    task_id = await gate.enter()
    process.send(signal.SIGTERM)
    await until(lambda: '"event": "drain worker"' in process.log(), "the worker has noticed")
    await process.send_again(second)
    assert await process.exit_code(timeout_s=10) == 0
    await _is_given_back(harness, process, await harness.task(task_id))


async def test_task_is_released_at_drain_deadline(harness: WorkerHarness, gate: Gate) -> None:
    process = await harness.start_registered(handler="wait_for_file", env={"WINDLASS_WORKER__DRAIN_TIMEOUT_S": "0.5"})
    task_id = await gate.enter()
    process.send(signal.SIGTERM)
    assert await process.exit_code(timeout_s=10) == 0
    await _is_given_back(harness, process, await harness.task(task_id))


async def _is_given_back(harness: WorkerHarness, process: WorkerProcess, task: Task) -> None:
    assert (task.status, task.attempts, task.worker_id) == (TaskStatus.QUEUED, 0, None)
    assert await harness.event_codes(task_id=task.id) == ["TASK_RELEASED"]
    assert await harness.worker_status(process) is WorkerStatus.TERMINATED
    assert not harness.live_processes()


async def test_idle_worker_exits_at_once_on_drain(harness: WorkerHarness) -> None:
    process = await harness.start_registered(handler="echo")
    process.send(signal.SIGTERM)
    assert await process.exit_code(timeout_s=30) == 0
    assert await harness.worker_status(process) is WorkerStatus.TERMINATED
    assert "Traceback" not in process.log()
    assert "never retrieved" not in process.log()


async def test_drain_does_not_wait_for_handler_import(harness: WorkerHarness) -> None:
    (harness.folder / "sleepy.py").write_text("import time\nprint('importing')\ntime.sleep(600)\n")
    process = harness.start("--chdir", str(harness.folder), "--handler", "sleepy:handler")
    await until(lambda: "importing" in process.log(), "the import has started")
    process.send(signal.SIGTERM)
    assert await process.exit_code(timeout_s=30) == 0
    assert not harness.live_processes()
    assert await harness.store.workers(include_terminated=True) == []


async def test_lost_handler_releases_task_and_exits_with_reason(harness: WorkerHarness) -> None:
    module = harness.folder / "fragile.py"
    module.write_text("import os\ndef handler(task): os._exit(1)\n")
    process = await harness.start_registered("--chdir", str(harness.folder), "--handler", "fragile:handler")
    assert (await harness.wait_until_failed(await harness.enqueue(max_attempts=1))).error_code == "CHILD_DIED"
    module.write_text("this is not Python at all\n")
    task_id = await harness.enqueue()
    assert await process.exit_code() == 2
    assert "windlass: cannot import handler fragile:handler: SyntaxError" in process.log()
    await _is_given_back(harness, process, await harness.task(task_id))


async def test_lost_command_releases_task_and_exits_with_reason(harness: WorkerHarness) -> None:
    script = harness.folder / "no-interpreter"
    script.write_text("echo 1\n")
    script.chmod(0o755)
    process = await harness.start_registered("--exec", str(script))
    task_id = await harness.enqueue()
    assert await process.exit_code() == 2
    assert f"windlass: cannot run the command '{script}': Exec format error" in process.log()
    await _is_given_back(harness, process, await harness.task(task_id))


# -------------------------------------------------------------------------------------------------------- inline


async def test_inline_handlers_run_concurrently_with_own_outcomes(harness: WorkerHarness) -> None:
    process = await harness.start_registered("--inline", "--concurrency", "50", handler="inline")
    sleeping = [await harness.enqueue({"how": "sleep"}, timeout_s=60) for _ in range(45)]
    for task_id in sleeping:
        await harness.wait_until_running(task_id)
    ends = {how: await harness.enqueue({"how": how}, max_attempts=1) for how in ("good", "raise", "sys.exit", "cancel")}
    limited = await harness.enqueue({"how": "sleep"}, max_attempts=1, timeout_s=0.3)
    assert await harness.wait_for_result(ends["good"]) == "good"
    assert "ValueError: the cause" in ((await harness.wait_until_failed(ends["raise"])).error or "")
    assert (await harness.wait_until_failed(ends["sys.exit"])).error == "the handler called sys.exit(3)"
    assert "CancelledError" in ((await harness.wait_until_failed(ends["cancel"])).error or "")
    assert (await harness.wait_until_failed(limited)).error_code == "TIMEOUT"

    assert await harness.store.cancel_task(sleeping[0], "no longer needed")
    await until(lambda: f'"task_id": {sleeping[0]}' in process.log(), "the cancelled task has ended")
    # The others still run. After two signals the worker releases them.
    statuses = {(await harness.task(task_id)).status for task_id in sleeping[1:]}
    assert statuses == {TaskStatus.RUNNING}
    process.send(signal.SIGTERM)
    await until(lambda: '"event": "drain worker"' in process.log(), "the worker has noticed")
    await process.send_again(signal.SIGTERM)
    assert await process.exit_code(timeout_s=10) == 0
    assert {(await harness.task(task_id)).status for task_id in sleeping[1:]} == {TaskStatus.QUEUED}


async def test_blocking_inline_handler_does_not_stop_heartbeat(harness: WorkerHarness, gate: Gate) -> None:
    await harness.record_heartbeats()
    await harness.start_registered("--inline", handler="inline")
    task_id = await harness.enqueue({"how": "block", **gate.files})
    await until(Path(gate.files["running"]).exists, "the handler blocks")
    await harness.wait_for_heartbeats(5, await harness.store.now())
    gate.open()
    assert await harness.wait_for_result(task_id) == "block"


@pytest.mark.parametrize("how", ["refuse to be cancelled", "sleep in a thread"])
async def test_unstoppable_inline_handler_does_not_block_exit(harness: WorkerHarness, how: str) -> None:
    """With more handlers than the thread pool has threads, so that no other code gets one."""
    process = await harness.start_registered("--inline", "--concurrency", "40", handler="inline")
    task_ids = [await harness.enqueue({"how": how}) for _ in range(40)]
    for task_id in task_ids:
        await harness.wait_until_running(task_id)
    process.send(signal.SIGTERM)
    await until(lambda: "drain worker" in process.log(), "the first signal is handled")
    await process.send_again(signal.SIGTERM)
    assert await process.exit_code(CANCEL_TIMEOUT_S + EXIT_TIMEOUT_S + PATIENCE_S) == 0
    tasks = [await harness.task(task_id) for task_id in task_ids]
    assert {(task.status, task.attempts) for task in tasks} == {(TaskStatus.QUEUED, 0)}
    assert '"stopped worker"' in process.log().splitlines()[-1]


# ------------------------------------------------------------------------------------------------------ robustness


async def test_thousand_tasks_leak_no_file_process_or_memory(harness: WorkerHarness) -> None:
    process = await harness.start_registered("--concurrency", "4", handler="echo")
    await asyncio.gather(*[harness.wait_for_result(await harness.enqueue(number)) for number in range(20)])
    worker = psutil.Process(process.pid)
    files_before, processes_before = worker.num_fds(), len(worker.children(recursive=True))
    memory_before = worker.memory_info().rss
    last = [await harness.enqueue(number) for number in range(1000)][-20:]
    for task_id in last:
        await harness.wait_for_result(task_id)
    assert worker.num_fds() <= files_before + LATE_CONNECTIONS
    assert len(worker.children(recursive=True)) == processes_before
    assert worker.memory_info().rss - memory_before < 16 << 20


async def test_worker_with_unread_output_works_and_keeps_time_limits(harness: WorkerHarness) -> None:
    reading, writing = os.pipe()
    _fill(writing)
    try:
        process = await harness.start_registered(
            "--exec", "sh -c 'head -c 1000000 /dev/zero >&2; [ $(cat) = 1 ] || sleep 600; echo 1'", stderr=writing
        )
        endless = await harness.enqueue(600, timeout_s=1, max_attempts=1)
        assert (await harness.wait_until_failed(endless)).error_code == "TIMEOUT"
        assert await harness.wait_for_result(await harness.enqueue(1)) == 1
        process.send(signal.SIGTERM)
        assert await process.exit_code() == 0
    finally:
        os.close(writing)
        os.close(reading)


async def test_failing_worker_exits_although_output_is_not_read(harness: WorkerHarness) -> None:
    reading, writing = os.pipe()
    _fill(writing)
    try:
        process = harness.start(handler="missing_handler", stderr=writing)
        assert await process.exit_code() == 2
    finally:
        os.close(writing)
        os.close(reading)


def _fill(pipe: int) -> None:
    os.set_blocking(pipe, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe, b"x" * 4096)
    os.set_blocking(pipe, True)


async def test_worker_with_closed_output_works(harness: WorkerHarness) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        process = await harness.start_registered("--exec", "sh -c 'echo noise >&2; echo 1'", stderr=writing)
        for _ in range(3):
            assert await harness.wait_for_result(await harness.enqueue()) == 1
        process.send(signal.SIGTERM)
        assert await process.exit_code() == 0
    finally:
        os.close(writing)
