"""Whatever a handler does, the worker goes on beating, the attempt ends with a code and a reason, the next one runs."""

import re
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from support.postgres_servers import Server
from support.worker_harness import Crew, Hand, is_alive, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Beats come every 0.2 s. The attempts that block do so for longer than this.
LONGEST_SILENCE_S = 1.5
BLOCKED_S = 2.0
MEMORY_LIMIT_MB = 400
PARENT_MEMORY_LIMIT_MB = 200


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def crew(embedded_server: Server, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Crew]:
    with embedded_server.migrated_database() as dsn:
        async with Crew(dsn, tmp_path_factory.mktemp("crew")) as crew:
            await crew.note_beats()
            yield crew


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hand(crew: Crew) -> Hand:
    return await crew.hire("--memory-limit-mb", str(MEMORY_LIMIT_MB), handler="misbehave")


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def beats_go_on(crew: Crew, hand: Hand) -> AsyncIterator[None]:
    """In every test of this file."""
    begun = await crew.store.now()
    yield
    assert await crew.longest_silence_s(hand, begun) < LONGEST_SILENCE_S
    assert hand.is_running()
    # The next attempt has a process that works.
    assert await crew.complete(await crew.enqueue({"how": "nothing"}, max_attempts=1)) == {"how": "nothing"}


FAILURES = [
    ("spin", "TIMEOUT", r"exceeded its time limit of 2 s"),
    ("hold the GIL", "TIMEOUT", r"exceeded its time limit of 2 s"),
    ("segfault", "CHILD_DIED", r"(?s)was killed by SIGSEGV; last output:.*about to read address zero.*in segfault"),
    ("kill itself", "CHILD_DIED", r"was killed by SIGKILL \(out of memory\?\)"),
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
async def test_a_handler_that_misbehaves_fails_its_attempt_with_a_code_and_a_reason(
    crew: Crew, how: str, code: str, message: str
) -> None:
    limit_s = BLOCKED_S if code == "TIMEOUT" else 60
    task = await crew.failed(await crew.enqueue({"how": how}, max_attempts=1, timeout_s=limit_s))
    assert task.error_code == code
    assert re.search(message, task.error or ""), task.error
    assert "TASK_FAILED" in await crew.codes(task_id=task.id)


SUCCESSES = [
    ("fork and return from both", "the original"),
    ("fork and exit in the copy", "the original"),
    ("share memory with copies", str(150 << 20)),
    ("terminate what it started", 4),
]


@pytest.mark.parametrize(("how", "result"), SUCCESSES, ids=[how for how, _ in SUCCESSES])
async def test_a_handler_that_forks_is_answered_by_the_original_alone(crew: Crew, how: str, result: object) -> None:
    assert await crew.complete(await crew.enqueue({"how": how}, max_attempts=1, timeout_s=60)) == result


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("die before its copy", "CHILD_DIED"),
        ("hang with another group", "TIMEOUT"),
        ("hang with a detached process", "TIMEOUT"),
    ],
)
async def test_what_a_handler_started_ends_with_its_process(crew: Crew, tmp_path: Path, how: str, code: str) -> None:
    file = tmp_path / "pid"
    limit_s = BLOCKED_S if code == "TIMEOUT" else 60
    task_id = await crew.enqueue({"how": how, "file": str(file)}, max_attempts=1, timeout_s=limit_s)
    assert (await crew.failed(task_id)).error_code == code
    await until(lambda: not is_alive(int(file.read_text())), "its process is gone")


async def test_a_gigabyte_of_output_does_not_fill_the_workers_own_memory(crew: Crew, hand: Hand) -> None:
    task = await crew.failed(await crew.enqueue({"how": "flood"}, max_attempts=1))
    assert task.error_code == "OUTPUT_LIMIT"
    assert peak_memory_mb(hand.pid) < PARENT_MEMORY_LIMIT_MB


def peak_memory_mb(pid: int) -> int:
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert peak is not None
    return int(peak[1]) >> 10


async def test_a_thread_that_outlives_its_attempt_does_not_report_for_the_next_one(crew: Crew, tmp_path: Path) -> None:
    await crew.complete(await crew.enqueue({"how": "report after the end"}))
    # Two seconds are enough for its reports to be carried along: news of progress go out once a second.
    task = await crew.failed(await crew.enqueue({"how": "spin"}, max_attempts=1, timeout_s=BLOCKED_S))
    assert task.progress_note is None


async def test_attempts_that_kill_their_process_leave_no_file_and_no_process_behind(crew: Crew, hand: Hand) -> None:
    worker = psutil.Process(hand.pid)
    files_before, processes_before = worker.num_fds(), len(worker.children())
    for _ in range(10):
        await crew.failed(await crew.enqueue({"how": "os._exit"}, max_attempts=1))
    assert await crew.complete(await crew.enqueue({"how": "nothing"})) == {"how": "nothing"}
    # Two connections may have been opened meanwhile, for looking out and for upkeep.
    assert worker.num_fds() <= files_before + 2
    assert len(worker.children()) == processes_before
