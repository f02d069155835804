"""A worker's life as a real process over a real database: works, stays warm, obeys, leaves in good order."""

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

from support.worker_harness import PATIENCE_S, Crew, Hand, is_alive, until
from windlass.cli.worker import END_TIMEOUT_S
from windlass.model.task import Task, TaskStatus
from windlass.model.worker import WorkerStatus
from windlass.worker.attempts import CANCEL_TIMEOUT_S

# Beats come every 0.2 s here.
LONGEST_SILENCE_S = 1.5
# A worker's look-out and its upkeep may open one each when they first need it.
LATE_CONNECTIONS = 2
LOOP = ["--exec", """sh -c 'touch "$RUNNING"; while [ ! -e "$GO" ]; do sleep 0.05; done; echo 1'"""]
KINDS = {
    "--handler": ["--handler", "handlers:wait_for_file"],
    "--inline": ["--inline", "--handler", "handlers:wait_for_file_inline"],
    "--exec": LOOP,
}


@pytest.fixture
async def crew(dsn: str, tmp_path: Path) -> AsyncIterator[Crew]:
    async with Crew(dsn, tmp_path) as crew:
        yield crew


@dataclass
class Gate:
    """A task that runs until it is let go."""

    crew: Crew

    @property
    def files(self) -> dict[str, str]:
        return {"running": str(self.crew.folder / "running"), "go": str(self.crew.folder / "go")}

    @property
    def env(self) -> dict[str, str]:
        return {name.upper(): path for name, path in self.files.items()}

    async def enter(self, **options: object) -> int:
        """Enqueue it and wait until its handler runs."""
        task_id = await self.crew.enqueue(self.files, **options)
        await until(lambda: Path(self.files["running"]).exists(), "the handler runs")
        return task_id

    def handler_pid(self) -> int:
        return int(Path(self.files["running"]).read_text().split()[0])

    def open(self) -> None:
        Path(self.files["go"]).touch()


@pytest.fixture
def gate(crew: Crew) -> Gate:
    return Gate(crew)


# ------------------------------------------------------------------------------------------------------- working


async def test_a_child_stays_warm_between_tasks_and_a_new_one_follows_after_its_death(crew: Crew) -> None:
    hand = await crew.hire(handler="who")
    first, second = [await crew.complete(await crew.enqueue()) for _ in range(2)]
    assert second == {"pid": first["pid"], "calls": 2}
    assert first["pid"] != hand.pid

    psutil.Process(first["pid"]).kill()
    await until(lambda: not is_alive(first["pid"]), "the child is gone")
    task_id = await crew.enqueue()
    third = await crew.complete(task_id)
    assert third["pid"] != first["pid"]
    assert third["calls"] == 1
    # It died while it had nothing to do, which is not the next task's fault.
    assert (await crew.task(task_id)).attempts == 1


async def test_a_command_gets_its_payload_as_json_and_answers_with_json(crew: Crew) -> None:
    await crew.hire("--exec", "cat")
    payload = {"text": "Grüße\n", "numbers": [1, 2.5, None]}
    assert await crew.complete(await crew.enqueue(payload)) == payload


async def test_heartbeats_come_at_the_interval_and_say_which_process_works_on_which_task(
    crew: Crew, gate: Gate
) -> None:
    await crew.note_beats()
    hand = await crew.hire(handler="wait_for_file")
    task = await crew.task(await gate.enter())
    row = await crew.row_of(hand)
    assert row is not None
    assert row.pid == hand.pid
    assert (task.status, task.worker_id) == (TaskStatus.RUNNING, row.id)
    # There is no NVIDIA driver here.
    assert (row.vram_total_mb, row.vram_used_mb) == (None, None)

    begun = await crew.store.now()
    count = "select count(*) from public.beats where at > $1"
    await until(lambda: _at_least(10, crew.sql(count, begun)), "ten beats")
    took_s = (await crew.store.now() - begun).total_seconds()
    # Ten beats have at least nine intervals between them.
    assert took_s >= 9 * 0.2 * 0.9
    assert await crew.longest_silence_s(hand, begun) < LONGEST_SILENCE_S


async def _at_least(least: int, count: Awaitable[int]) -> bool:
    return await count >= least


async def test_progress_reaches_the_tasks_row_and_nonsense_does_not_stop_the_heartbeat(crew: Crew, gate: Gate) -> None:
    await crew.note_beats()
    hand = await crew.hire(handler="report")
    task_id = await crew.enqueue(gate.files)

    async def progress() -> tuple[float | None, str | None]:
        task = await crew.task(task_id)
        return task.progress, task.progress_note

    await until(lambda: _equal(progress(), (0.25, "a quarter")), "the progress is in the row")
    begun = await crew.store.now()
    await until(lambda: _at_least(5, crew.sql("select count(*) from public.beats where at > $1", begun)), "beats")
    assert await crew.longest_silence_s(hand, begun) < LONGEST_SILENCE_S
    gate.open()
    assert await crew.complete(task_id) == "done"


async def _equal(found: Awaitable[object], wanted: object) -> bool:
    return await found == wanted


async def test_a_time_limit_of_the_task_comes_before_that_of_the_worker(crew: Crew) -> None:
    await crew.hire("--timeout", "0.5", handler="misbehave")
    without = await crew.enqueue({"how": "spin"}, max_attempts=1)
    with_own = await crew.enqueue({"how": "spin"}, max_attempts=1, timeout_s=0.75)
    assert "its limit of 0.5 s" in ((await crew.failed(without)).error or "")
    assert "its limit of 0.75 s" in ((await crew.failed(with_own)).error or "")


async def test_a_cancelled_task_loses_its_handler_soon(crew: Crew, gate: Gate) -> None:
    hand = await crew.hire(handler="wait_for_file")
    task_id = await gate.enter()
    assert await crew.store.cancel_task(task_id, "no longer wanted")
    await until(lambda: not is_alive(gate.handler_pid()), "the handler is gone", timeout_s=5)
    task = await crew.task(task_id)
    assert (task.status, task.error_code, task.error) == (TaskStatus.FAILED, "CANCELLED", "no longer wanted")
    gate.open()
    assert (await crew.complete(await crew.enqueue(gate.files)))["attempt"] == 1
    assert hand.is_running()


async def test_a_paused_worker_finishes_claims_nothing_and_goes_on_when_resumed(crew: Crew, gate: Gate) -> None:
    await crew.note_beats()
    hand = await crew.hire(handler="wait_for_file")
    row = await crew.row_of(hand)
    assert row is not None
    first = await gate.enter()
    assert await crew.store.set_paused([row.id], True) == 1
    await until(lambda: '"is_paused": true' in hand.log(), "the worker knows")
    gate.open()
    await crew.complete(first)

    second = await crew.enqueue(gate.files)
    begun = await crew.store.now()
    await until(lambda: _at_least(5, crew.sql("select count(*) from public.beats where at > $1", begun)), "beats")
    assert (await crew.task(second)).attempts == 0
    assert await crew.store.set_paused([row.id], False) == 1
    await crew.complete(second)


# ------------------------------------------------------------------------------------------------------- leaving


async def _sigterm(_crew: Crew, hand: Hand) -> None:
    hand.send(signal.SIGTERM)


async def _sigint(_crew: Crew, hand: Hand) -> None:
    hand.send(signal.SIGINT)


async def _sigterm_to_all_its_processes(_crew: Crew, hand: Hand) -> None:
    hand.send_to_all(signal.SIGTERM)


async def _two_signals_of_one_moment(_crew: Crew, hand: Hand) -> None:
    # As `timeout` does with a program and its group.
    hand.send(signal.SIGTERM)
    hand.send(signal.SIGINT)
    await until(lambda: '"event": "repeated signal ignored' in hand.log(), "it has heard both")


async def _set_terminating(crew: Crew, hand: Hand) -> None:
    row = await crew.row_of(hand)
    assert row is not None
    assert await crew.store.set_terminating([row.id], "no longer needed") == 1


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
async def test_a_worker_told_to_end_finishes_its_task_claims_no_other_and_leaves(
    crew: Crew, gate: Gate, tell: Callable[[Crew, Hand], Awaitable[None]], kind: str
) -> None:
    hand = await crew.hire(*KINDS[kind], env=gate.env)
    task_id = await gate.enter()
    await tell(crew, hand)
    await until(lambda: '"event": "draining"' in hand.log(), "the worker knows")
    waiting = await crew.enqueue(gate.files)
    gate.open()
    assert await hand.exit_code() == 0

    task = await crew.task(task_id)
    assert (task.status, task.attempts) == (TaskStatus.COMPLETE, 1)
    assert (await crew.task(waiting)).status is TaskStatus.QUEUED
    assert await crew.status_of(hand) is WorkerStatus.TERMINATED
    assert not crew.remains()
    # Whatever thread or signal a line comes from: it says whose it is, once there is an id.
    lines = [json.loads(line) for line in hand.log().splitlines() if line.startswith("{")]
    events = [line["event"] for line in lines]
    assert "draining" in events
    assert [line for line in lines[events.index("worker registered") :] if "worker_id" not in line] == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_worker_told_twice_gives_its_task_back_and_leaves_at_once(
    crew: Crew, gate: Gate, kind: str, second: signal.Signals
) -> None:
    hand = await crew.hire(*KINDS[kind], env=gate.env)
    task_id = await gate.enter()
    hand.send(signal.SIGTERM)
    await until(lambda: '"event": "draining"' in hand.log(), "the worker knows")
    await hand.send_again(second)
    assert await hand.exit_code(timeout_s=10) == 0
    await _is_given_back(crew, hand, await crew.task(task_id))


async def test_a_worker_gives_its_task_back_when_the_drain_limit_is_reached(crew: Crew, gate: Gate) -> None:
    hand = await crew.hire(handler="wait_for_file", env={"WINDLASS_WORKER__DRAIN_TIMEOUT_S": "0.5"})
    task_id = await gate.enter()
    hand.send(signal.SIGTERM)
    assert await hand.exit_code(timeout_s=10) == 0
    await _is_given_back(crew, hand, await crew.task(task_id))


async def _is_given_back(crew: Crew, hand: Hand, task: Task) -> None:
    assert (task.status, task.attempts, task.worker_id) == (TaskStatus.QUEUED, 0, None)
    assert await crew.codes(task_id=task.id) == ["TASK_RELEASED"]
    assert await crew.status_of(hand) is WorkerStatus.TERMINATED
    assert not crew.remains()


async def test_a_worker_without_work_leaves_at_once_when_told(crew: Crew) -> None:
    hand = await crew.hire(handler="echo")
    hand.send(signal.SIGTERM)
    assert await hand.exit_code(timeout_s=5) == 0
    assert await crew.status_of(hand) is WorkerStatus.TERMINATED
    assert "Traceback" not in hand.log()
    assert "never retrieved" not in hand.log()


async def test_a_worker_told_to_end_while_its_handler_is_imported_does_not_wait_for_it(crew: Crew) -> None:
    (crew.folder / "sleepy.py").write_text("import time\nprint('importing')\ntime.sleep(600)\n")
    hand = crew.start("--chdir", str(crew.folder), "--handler", "sleepy:handler")
    await until(lambda: "importing" in hand.log(), "the import has begun")
    hand.send(signal.SIGTERM)
    assert await hand.exit_code(timeout_s=5) == 0
    assert not crew.remains()
    assert await crew.store.workers(include_terminated=True) == []


async def test_a_worker_whose_handler_can_no_longer_be_started_gives_its_task_back_and_says_why(crew: Crew) -> None:
    module = crew.folder / "fragile.py"
    module.write_text("import os\ndef handler(task): os._exit(1)\n")
    hand = await crew.hire("--chdir", str(crew.folder), "--handler", "fragile:handler")
    assert (await crew.failed(await crew.enqueue(max_attempts=1))).error_code == "CHILD_DIED"
    module.write_text("this is not Python at all\n")
    task_id = await crew.enqueue()
    assert await hand.exit_code() == 2
    assert "windlass: cannot import handler fragile:handler: SyntaxError" in hand.log()
    await _is_given_back(crew, hand, await crew.task(task_id))


async def test_a_worker_whose_command_cannot_be_executed_gives_its_task_back_and_says_why(crew: Crew) -> None:
    script = crew.folder / "no-interpreter"
    script.write_text("echo 1\n")
    script.chmod(0o755)
    hand = await crew.hire("--exec", str(script))
    task_id = await crew.enqueue()
    assert await hand.exit_code() == 2
    assert f"windlass: cannot run the command '{script}' (Exec format error)" in hand.log()
    await _is_given_back(crew, hand, await crew.task(task_id))


# -------------------------------------------------------------------------------------------------------- inline


async def test_inline_handlers_run_many_at_once_and_each_ends_in_its_own_way(crew: Crew) -> None:
    hand = await crew.hire("--inline", "--concurrency", "50", handler="inline")
    sleeping = [await crew.enqueue({"how": "sleep"}, timeout_s=60) for _ in range(45)]
    for task_id in sleeping:
        await crew.running(task_id)
    ends = {how: await crew.enqueue({"how": how}, max_attempts=1) for how in ("good", "raise", "sys.exit", "cancel")}
    limited = await crew.enqueue({"how": "sleep"}, max_attempts=1, timeout_s=0.3)
    assert await crew.complete(ends["good"]) == "good"
    assert "ValueError: the cause" in ((await crew.failed(ends["raise"])).error or "")
    assert (await crew.failed(ends["sys.exit"])).error == "the handler called sys.exit(3)"
    assert "CancelledError" in ((await crew.failed(ends["cancel"])).error or "")
    assert (await crew.failed(limited)).error_code == "TIMEOUT"

    assert await crew.store.cancel_task(sleeping[0], "no longer wanted")
    await until(lambda: f'"task_id": {sleeping[0]}' in hand.log(), "the worker ended the cancelled one")
    # The others were not disturbed; told twice, the worker gives them back.
    statuses = {(await crew.task(task_id)).status for task_id in sleeping[1:]}
    assert statuses == {TaskStatus.RUNNING}
    hand.send(signal.SIGTERM)
    await until(lambda: '"event": "draining"' in hand.log(), "the worker knows")
    await hand.send_again(signal.SIGTERM)
    assert await hand.exit_code(timeout_s=10) == 0
    assert {(await crew.task(task_id)).status for task_id in sleeping[1:]} == {TaskStatus.QUEUED}


async def test_an_inline_handler_that_blocks_the_loop_does_not_stop_the_heartbeat(crew: Crew) -> None:
    await crew.note_beats()
    hand = await crew.hire("--inline", handler="inline")
    begun = await crew.store.now()
    assert await crew.complete(await crew.enqueue({"how": "block"})) == "block"
    assert await crew.longest_silence_s(hand, begun) < LONGEST_SILENCE_S


@pytest.mark.parametrize("how", ["refuse to be cancelled", "sleep in a thread"])
async def test_an_inline_handler_that_cannot_be_ended_does_not_keep_the_process(crew: Crew, how: str) -> None:
    """With more of them than Python has threads of its own, so that nothing else gets one either."""
    hand = await crew.hire("--inline", "--concurrency", "40", handler="inline")
    task_ids = [await crew.enqueue({"how": how}) for _ in range(40)]
    for task_id in task_ids:
        await crew.running(task_id)
    hand.send(signal.SIGTERM)
    await until(lambda: "draining" in hand.log(), "it has heard the first signal")
    await hand.send_again(signal.SIGTERM)
    assert await hand.exit_code(CANCEL_TIMEOUT_S + END_TIMEOUT_S + PATIENCE_S) == 0
    tasks = [await crew.task(task_id) for task_id in task_ids]
    assert {(task.status, task.attempts) for task in tasks} == {(TaskStatus.QUEUED, 0)}
    assert '"worker stopped"' in hand.log().splitlines()[-1]


# ------------------------------------------------------------------------------------------------------ sturdiness


async def test_a_thousand_tasks_leave_no_file_no_process_and_no_memory_behind(crew: Crew) -> None:
    hand = await crew.hire("--concurrency", "4", handler="echo")
    await asyncio.gather(*[crew.complete(await crew.enqueue(number)) for number in range(20)])
    worker = psutil.Process(hand.pid)
    files_before, processes_before = worker.num_fds(), len(worker.children(recursive=True))
    memory_before = worker.memory_info().rss
    last = [await crew.enqueue(number) for number in range(1000)][-20:]
    for task_id in last:
        await crew.complete(task_id)
    assert worker.num_fds() <= files_before + LATE_CONNECTIONS
    assert len(worker.children(recursive=True)) == processes_before
    assert worker.memory_info().rss - memory_before < 16 << 20


async def test_a_worker_whose_output_nobody_reads_works_on_keeps_time_limits_and_ends_when_told(crew: Crew) -> None:
    reading, writing = os.pipe()
    _fill(writing)
    try:
        hand = await crew.hire(
            "--exec", "sh -c 'head -c 1000000 /dev/zero >&2; [ $(cat) = 1 ] || sleep 600; echo 1'", stderr=writing
        )
        endless = await crew.enqueue(600, timeout_s=1, max_attempts=1)
        assert (await crew.failed(endless)).error_code == "TIMEOUT"
        assert await crew.complete(await crew.enqueue(1)) == 1
        hand.send(signal.SIGTERM)
        assert await hand.exit_code() == 0
    finally:
        os.close(writing)
        os.close(reading)


async def test_a_worker_that_must_leave_does_so_although_nobody_reads_why(crew: Crew) -> None:
    reading, writing = os.pipe()
    _fill(writing)
    try:
        hand = crew.start(handler="nobody_wrote_it", stderr=writing)
        assert await hand.exit_code() == 2
    finally:
        os.close(writing)
        os.close(reading)


def _fill(pipe: int) -> None:
    os.set_blocking(pipe, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe, b"x" * 4096)
    os.set_blocking(pipe, True)


async def test_a_worker_whose_output_has_lost_its_reader_works_on(crew: Crew) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        hand = await crew.hire("--exec", "sh -c 'echo noise >&2; echo 1'", stderr=writing)
        for _ in range(3):
            assert await crew.complete(await crew.enqueue()) == 1
        hand.send(signal.SIGTERM)
        assert await hand.exit_code() == 0
    finally:
        os.close(writing)
