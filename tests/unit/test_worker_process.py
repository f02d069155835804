"""Process groups: the whole group ends, limits are enforced, and no process or file stays open."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from windlass.worker import process
from windlass.worker.nonblocking_stderr import NonblockingWriter, standard_error
from windlass.worker.process import ProcessGroup, describe_exit, start_group

TIMEOUT_S = 20.0


async def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"timed out: {what}"
        await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def start(script: str, **options: int) -> ProcessGroup:
    return await start_group(["sh", "-c", script], env=dict(os.environ), **options)


async def pid_in(file: Path) -> int:
    def content() -> str:
        return file.read_text() if file.exists() else ""

    await wait_until(lambda: content().endswith("\n"), "process id written")
    return int(content())


@pytest.mark.parametrize(
    ("returncode", "text"),
    [
        (0, "exited with code 0"),
        (3, "exited with code 3"),
        (-signal.SIGSEGV, "was killed by SIGSEGV"),
        (-signal.SIGKILL, "was killed by SIGKILL (out of memory?)"),
        (-200, "was killed by signal 200"),
    ],
)
def test_exit_code_is_described(returncode: int, text: str) -> None:
    assert describe_exit(returncode) == text


async def test_exit_is_noticed_while_forked_process_holds_pipes(tmp_path: Path) -> None:
    group = await start(f"sleep 600 & echo $! > {tmp_path}/pid; exit 3")
    assert await asyncio.wait_for(group.wait(), TIMEOUT_S) == 3
    await group.end()
    assert not is_alive(await pid_in(tmp_path / "pid"))


async def test_exit_is_noticed_while_escaped_process_holds_pipes(tmp_path: Path) -> None:
    group = await start(
        f"setsid sh -c 'echo $$ > {tmp_path}/pid; exec sleep 600' & while [ ! -s {tmp_path}/pid ]; "
        "do sleep 0.01; done; exit 4"
    )
    try:
        assert await asyncio.wait_for(group.wait(), TIMEOUT_S) == 4
    finally:
        # The group cannot reach it: it has its own session and no parent.
        os.kill(await pid_in(tmp_path / "pid"), signal.SIGKILL)
        await group.end()


async def test_kill_reaches_detached_descendants(tmp_path: Path) -> None:
    forms = {"plain": "", "group": "set -m;", "session": "setsid"}
    script = "".join(
        f"{prefix} sh -c 'echo $$ > {tmp_path}/{name}; exec sleep 600' & " for name, prefix in forms.items()
    )
    group = await start(f"{script} wait")
    pids = [await pid_in(tmp_path / name) for name in forms]
    await group.end()
    # Processes in sessions of their own have been sent SIGKILL; only children report their exit.
    await wait_until(lambda: not any(is_alive(pid) for pid in pids), "the descendants are gone")
    group.kill()  # safe to repeat
    await group.end()


async def test_end_completes_although_caller_is_cancelled() -> None:
    fds = psutil.Process().num_fds()
    group = await start("sleep 600")
    pid = group.pid
    ending = asyncio.create_task(group.end())
    await asyncio.sleep(0)
    ending.cancel()
    await wait_until(lambda: not is_alive(pid) and not guards(), "the process and its guard are gone")
    await wait_until(lambda: psutil.Process().num_fds() <= fds, "its pipes are closed")
    await wait_until(lambda: asyncio.all_tasks() == {asyncio.current_task()}, "the end is complete")


def guards() -> list[psutil.Process]:
    mine = [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
    return [p for p in mine if "windlass-guard" in p.cmdline()]


async def test_guard_survives_sigterm() -> None:
    group = await start("sleep 600")
    # A process that has just started may have no command line yet.
    await wait_until(guards, "a guard")
    (guard,) = guards()
    # The shell sets its traps after its start.
    await wait_until(lambda: _ignores(guard.pid, signal.SIGTERM), "the guard has set its traps")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        guard.send_signal(number)
    group_pid = group.pid
    assert is_alive(guard.pid)
    assert is_alive(group_pid)
    await group.end()
    assert not is_alive(guard.pid)


def _ignores(pid: int, number: signal.Signals) -> bool:
    (mask,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigIgn")]
    return bool(int(mask.split()[1], 16) >> (number - 1) & 1)


async def test_many_groups_leak_no_file_or_process() -> None:
    async def once() -> None:
        group = await start("echo output; exit 0", max_answer_bytes=100)
        group.write_all(b"input")
        assert await group.wait() == 0
        await group.end()

    await once()
    me = psutil.Process()
    before = (me.num_fds(), len(me.children()))
    for _ in range(50):
        await once()
    assert (me.num_fds(), len(me.children())) == before


async def test_closed_standard_error_does_not_end_process(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    closed_pipe = NonblockingWriter(writing)
    monkeypatch.setattr(process, "standard_error", closed_pipe)
    try:
        group = await start("for n in 1 2 3; do echo line $n; done")
        assert await group.wait() == 0
        assert group.tail() == "line 1\nline 2\nline 3"
        await group.end()
        assert closed_pipe.drain(TIMEOUT_S)
    finally:
        os.close(writing)


async def test_slow_reader_gets_all_output(monkeypatch: pytest.MonkeyPatch) -> None:
    size, got = 40_000_000, 0
    reading, writing = os.pipe()
    slow_pipe = NonblockingWriter(writing)
    monkeypatch.setattr(process, "standard_error", slow_pipe)

    def read() -> None:
        nonlocal got
        while piece := os.read(reading, 65_536):
            got += len(piece)
            time.sleep(0.001)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        group = await start(f"head -c {size} /dev/zero >&2")
        assert await group.wait() == 0
        await wait_until(lambda: group.output_bytes == size, "all output")
        await group.end()
        assert await asyncio.to_thread(slow_pipe.drain, TIMEOUT_S)
    finally:
        os.close(writing)
        reader.join()
        os.close(reading)
    assert got == size


async def test_output_limit_applies_per_attempt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process, "MAX_OUTPUT_BYTES", 1 << 20)
    some = "head -c 900000 /dev/zero >&2"
    wait = "while [ ! -e {} ]; do sleep 0.01; done"
    first, second = tmp_path / "first", tmp_path / "second"
    group = await start(f"{some}; {wait.format(first)}; {some}; {wait.format(second)}; cat /dev/zero >&2")
    await wait_until(lambda: group.output_bytes == 900_000, "the first attempt's output is read")
    group.begin_attempt()
    first.touch()
    await wait_until(lambda: group.output_bytes == 900_000, "the second attempt's output is read")
    assert group.limit_failure is None
    second.touch()
    assert await group.wait() == -signal.SIGKILL
    assert group.limit_failure is not None
    assert group.limit_failure.code == "OUTPUT_LIMIT"
    await group.end()
    assert standard_error.drain(TIMEOUT_S)
    assert len(capfd.readouterr().err) <= 3 << 20


async def test_answer_over_limit_fails() -> None:
    group = await start("cat /dev/zero", max_answer_bytes=1000)
    assert await group.wait() == -signal.SIGKILL
    assert group.limit_failure is not None
    assert (group.limit_failure.code, group.limit_failure.error) == (
        "BAD_RESULT",
        "the result has more than 1,000 bytes",
    )
    await group.end()


async def test_memory_of_previous_attempt_does_not_fail_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "MEMORY_CHECK_INTERVAL_S", 0.01)
    group = await start("sleep 600", memory_limit_bytes=100)
    measured = 0

    def measure(_how: object) -> int:
        nonlocal measured
        measured += 1
        if measured < 10:
            group.begin_attempt()  # during the measurement
        return 1000

    monkeypatch.setattr(group, "_memory_bytes", measure)
    assert await group.wait() == -signal.SIGKILL
    assert measured >= 10
    assert group.limit_failure is not None
    assert group.limit_failure.code == "MEMORY_LIMIT"
    await group.end()
