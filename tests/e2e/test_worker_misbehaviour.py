"""Misbehaving handlers: heartbeats continue, the attempt fails with a code and a reason, and the next one runs."""

import re
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from support.postgres_servers import Server
from support.worker_harness import WorkerHarness, WorkerProcess, is_alive, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

TIMEOUT_S = 2.0
# Heartbeats come every 0.2 s, also on a machine that is busy with other tests. One attempt blocks for longer than this.
LONGEST_SILENCE_S = 10.0
BLOCKED_S = 12.0
MEMORY_LIMIT_MB = 400
PARENT_MEMORY_LIMIT_MB = 200


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def harness(embedded_server: Server, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WorkerHarness]:
    with embedded_server.migrated_database() as dsn:
        async with WorkerHarness(dsn, tmp_path_factory.mktemp("workers")) as harness:
            await harness.record_heartbeats()
            yield harness


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def process(harness: WorkerHarness) -> WorkerProcess:
    return await harness.start_registered("--memory-limit-mb", str(MEMORY_LIMIT_MB), handler="misbehave")


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def check_heartbeats(harness: WorkerHarness, process: WorkerProcess) -> AsyncIterator[None]:
    """Heartbeats continue and the next attempt succeeds, in every test of this file."""
    begun = await harness.store.now()
    yield
    assert await harness.longest_heartbeat_gap_s(process, begun) < LONGEST_SILENCE_S
    assert process.is_running()
    # The next attempt has a working process.
    assert await harness.wait_for_result(await harness.enqueue({"how": "nothing"}, max_attempts=1)) == {
        "how": "nothing"
    }


FAILURES = [
    ("spin", "TIMEOUT", r"exceeded its time limit of 2 s"),
    ("hold the GIL", "TIMEOUT", r"exceeded its time limit of 12 s"),
    (
        "segfault",
        "CHILD_DIED",
        r"^killed by SIGSEGV in handlers.py:\d+ segfault; last output:\nabout to read address zero",
    ),
    ("kill itself", "CHILD_DIED", r"^killed by SIGKILL \(out of memory\?\)"),
    ("os._exit", "CHILD_DIED", r"exited with code 7"),
    ("os._exit with 0", "CHILD_DIED", r"exited with code 0"),
    ("eat memory", "MEMORY_LIMIT", r"the attempt used [4-9]\d\d MiB of memory; the limit is 400 MiB"),
    ("eat memory in a copy", "MEMORY_LIMIT", r"the attempt used [4-9]\d\d MiB of memory; the limit is 400 MiB"),
    ("flood", "OUTPUT_LIMIT", r"the attempt printed more than 64 MiB"),
    ("raise", "HANDLER_ERROR", r"(?s)Traceback.*ValueError: the cause"),
    ("raise an endless message", "HANDLER_ERROR", r"(?s)^Traceback.*ValueError: x{900}.* \.\.\. x{2900}.*the end\s*$"),
    ("raise with what PostgreSQL cannot store", "HANDLER_ERROR", r"ValueError: a\\0b\\ud800c"),
    ("raise DoNotRetry", "DO_NOT_RETRY", r"^never$"),
    ("raise KeyboardInterrupt", "HANDLER_ERROR", r"KeyboardInterrupt"),
    ("raise MemoryError", "OUT_OF_MEMORY", r"MemoryError"),
    ("sys.exit", "HANDLER_ERROR", r"^the handler called sys.exit\('enough'\)$"),
    ("return an object", "BAD_RESULT", r"cannot be written as JSON .*object.*: use dicts, lists, strings and numbers"),
    ("return NaN", "BAD_RESULT", r"cannot be written as JSON"),
    ("return a cycle", "BAD_RESULT", r"cannot be written as JSON .*[Cc]ircular"),
    ("return NUL", "BAD_RESULT", r"contains a NUL character"),
    ("return half a surrogate pair", "BAD_RESULT", r"half of a surrogate pair"),
    ("return too much", "BAD_RESULT", r"has 1,048,578 bytes and at most 1,048,576 are accepted"),
    ("close every file", "CHILD_DIED", r"closed its connection to the worker"),
    ("scribble on every socket", "CHILD_DIED", r"closed its connection to the worker"),
    ("cancel something", "HANDLER_ERROR", r"CancelledError"),
]


@pytest.mark.parametrize(("how", "code", "message"), FAILURES, ids=[how for how, _, _ in FAILURES])
async def test_misbehaving_handler_fails_attempt_with_code_and_reason(
    harness: WorkerHarness, how: str, code: str, message: str
) -> None:
    limit_s = (BLOCKED_S if how == "hold the GIL" else TIMEOUT_S) if code == "TIMEOUT" else 60
    task = await harness.wait_until_failed(await harness.enqueue({"how": how}, max_attempts=1, timeout_s=limit_s))
    assert task.error_code == code
    assert re.search(message, task.error or ""), task.error
    assert "TASK_FAILED" in await harness.event_codes(task_id=task.id)


SUCCESSES = [
    ("fork and return from both", "the original"),
    ("fork and exit in the copy", "the original"),
    ("share memory with copies", str(150 << 20)),
    ("terminate what it started", 4),
]


@pytest.mark.parametrize(("how", "result"), SUCCESSES, ids=[how for how, _ in SUCCESSES])
async def test_only_original_process_of_forking_handler_answers(
    harness: WorkerHarness, how: str, result: object
) -> None:
    assert await harness.wait_for_result(await harness.enqueue({"how": how}, max_attempts=1, timeout_s=60)) == result


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("die before its copy", "CHILD_DIED"),
        ("hang with another group", "TIMEOUT"),
        ("hang with a detached process", "TIMEOUT"),
    ],
)
async def test_descendants_of_handler_end_with_its_process(
    harness: WorkerHarness, tmp_path: Path, how: str, code: str
) -> None:
    file = tmp_path / "pid"
    limit_s = TIMEOUT_S if code == "TIMEOUT" else 60
    task_id = await harness.enqueue({"how": how, "file": str(file)}, max_attempts=1, timeout_s=limit_s)
    assert (await harness.wait_until_failed(task_id)).error_code == code
    await until(lambda: not is_alive(int(file.read_text())), "its process is gone")


async def test_gigabyte_of_output_does_not_fill_worker_memory(harness: WorkerHarness, process: WorkerProcess) -> None:
    task = await harness.wait_until_failed(await harness.enqueue({"how": "flood"}, max_attempts=1))
    assert task.error_code == "OUTPUT_LIMIT"
    assert peak_memory_mb(process.pid) < PARENT_MEMORY_LIMIT_MB


def peak_memory_mb(pid: int) -> int:
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert peak is not None
    return int(peak[1]) >> 10


async def test_leftover_thread_does_not_report_for_next_attempt(harness: WorkerHarness, tmp_path: Path) -> None:
    await harness.wait_for_result(await harness.enqueue({"how": "report after the end"}))
    # Two seconds are enough for its reports to be sent: progress is sent once a second.
    task = await harness.wait_until_failed(await harness.enqueue({"how": "spin"}, max_attempts=1, timeout_s=TIMEOUT_S))
    assert task.progress_note is None


async def test_attempts_that_kill_their_process_leak_nothing(harness: WorkerHarness, process: WorkerProcess) -> None:
    worker = psutil.Process(process.pid)
    files_before, processes_before = worker.num_fds(), len(worker.children())
    for _ in range(10):
        await harness.wait_until_failed(await harness.enqueue({"how": "os._exit"}, max_attempts=1))
    assert await harness.wait_for_result(await harness.enqueue({"how": "nothing"})) == {"how": "nothing"}
    # The wait for work and maintenance may each have opened a connection.
    assert worker.num_fds() <= files_before + 2
    assert len(worker.children()) == processes_before
