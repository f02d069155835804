"""Process groups: they end whole, keep their limits, and leave nothing behind."""

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

PATIENCE_S = 20.0


async def until(is_so: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, what
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

    await until(lambda: content().endswith("\n"), "a pid is written")
    return int(content())


@pytest.mark.parametrize(
    ("returncode", "words"),
    [
        (0, "exited with code 0"),
        (3, "exited with code 3"),
        (-signal.SIGSEGV, "was killed by SIGSEGV"),
        (-signal.SIGKILL, "was killed by SIGKILL (out of memory?)"),
        (-200, "was killed by signal 200"),
    ],
)
def test_an_exit_is_told_in_words(returncode: int, words: str) -> None:
    assert describe_exit(returncode) == words


async def test_the_exit_is_noticed_although_a_forked_process_holds_the_pipes(tmp_path: Path) -> None:
    group = await start(f"sleep 600 & echo $! > {tmp_path}/pid; exit 3")
    assert await asyncio.wait_for(group.wait(), PATIENCE_S) == 3
    await group.end()
    assert not is_alive(await pid_in(tmp_path / "pid"))


async def test_the_exit_is_noticed_although_an_escaped_process_holds_the_pipes(tmp_path: Path) -> None:
    group = await start(
        f"setsid sh -c 'echo $$ > {tmp_path}/pid; exec sleep 600' & while [ ! -s {tmp_path}/pid ]; "
        "do sleep 0.01; done; exit 4"
    )
    try:
        assert await asyncio.wait_for(group.wait(), PATIENCE_S) == 4
    finally:
        # Out of reach, as the module says: a session of its own, and no parent.
        os.kill(await pid_in(tmp_path / "pid"), signal.SIGKILL)
        await group.end()


async def test_killing_reaches_every_descendant_however_it_detached_itself(tmp_path: Path) -> None:
    forms = {"plain": "", "group": "set -m;", "session": "setsid"}
    script = "".join(
        f"{prefix} sh -c 'echo $$ > {tmp_path}/{name}; exec sleep 600' & " for name, prefix in forms.items()
    )
    group = await start(f"{script} wait")
    pids = [await pid_in(tmp_path / name) for name in forms]
    await group.end()
    assert [is_alive(pid) for pid in pids] == [False, False, False]
    group.kill()  # safe to repeat
    await group.end()


async def test_ending_goes_on_when_the_one_who_asked_is_cancelled() -> None:
    group = await start("sleep 600")
    pid = group.pid
    exit_reason = asyncio.create_task(group.end())
    await asyncio.sleep(0)
    exit_reason.cancel()
    await until(lambda: not is_alive(pid) and not guards(), "the process and its guard are gone")
    await until(group._started.is_closing, "and its pipes are closed")


def guards() -> list[psutil.Process]:
    mine = [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
    return [p for p in mine if "windlass-guard" in p.cmdline()]


async def test_the_guard_outlasts_a_service_managers_sigterm() -> None:
    group = await start("sleep 600")
    # A process that has only just been executed has no command line yet.
    await until(guards, "a guard")
    (guard,) = guards()
    # A shell sets its traps after it has started.
    await until(lambda: _ignores(guard.pid, signal.SIGTERM), "the guard has set its traps")
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


async def test_many_groups_leave_no_file_and_no_process_behind() -> None:
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


async def test_output_that_nobody_can_read_does_not_end_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    nobody_reads = NonblockingWriter(writing)
    monkeypatch.setattr(process, "standard_error", nobody_reads)
    try:
        group = await start("for n in 1 2 3; do echo line $n; done")
        assert await group.wait() == 0
        assert group.tail() == "line 1\nline 2\nline 3"
        await group.end()
        assert nobody_reads.drain(PATIENCE_S)
    finally:
        os.close(writing)


async def test_who_reads_slowly_gets_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    size, got = 40_000_000, 0
    reading, writing = os.pipe()
    slowly_read = NonblockingWriter(writing)
    monkeypatch.setattr(process, "standard_error", slowly_read)

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
        await until(lambda: group._output_bytes == size, "all is printed")
        await group.end()
        assert await asyncio.to_thread(slowly_read.drain, PATIENCE_S)
    finally:
        os.close(writing)
        reader.join()
        os.close(reading)
    assert got == size


async def test_too_much_output_is_the_end_and_the_count_begins_anew_with_each_attempt(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process, "MAX_OUTPUT_BYTES", 1 << 20)
    some = "head -c 900000 /dev/zero >&2"
    group = await start(f"{some}; read word; {some}; read word; cat /dev/zero >&2", max_answer_bytes=10)
    await until(lambda: group._output_bytes == 900_000, "the first attempt's output is read")
    group.begin_attempt()
    stdin = group._started.get_pipe_transport(0)
    assert isinstance(stdin, asyncio.WriteTransport)
    stdin.write(b"\n")
    await until(lambda: group._output_bytes == 900_000, "the second attempt's output is read")
    assert group.limit_failure is None
    stdin.write(b"\n")
    assert await group.wait() == -signal.SIGKILL
    assert group.limit_failure is not None
    assert group.limit_failure.code == "OUTPUT_LIMIT"
    await group.end()
    assert standard_error.drain(PATIENCE_S)
    assert len(capfd.readouterr().err) <= 3 << 20


async def test_an_answer_that_is_too_long_is_cut_off() -> None:
    group = await start("cat /dev/zero", max_answer_bytes=1000)
    assert await group.wait() == -signal.SIGKILL
    assert group.limit_failure is not None
    assert (group.limit_failure.code, group.limit_failure.error) == (
        "BAD_RESULT",
        "the result has more than 1,000 bytes",
    )
    await group.end()


async def test_an_attempt_does_not_answer_for_the_memory_of_the_one_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "MEMORY_CHECK_INTERVAL_S", 0.01)
    group = await start("sleep 600", memory_limit_bytes=100)
    measured = 0

    def measure(_how: object) -> int:
        nonlocal measured
        measured += 1
        if measured < 10:
            group.begin_attempt()  # while it is being measured
        return 1000

    monkeypatch.setattr(group, "_memory_bytes", measure)
    assert await group.wait() == -signal.SIGKILL
    assert measured >= 10
    assert group.limit_failure is not None
    assert group.limit_failure.code == "MEMORY_LIMIT"
    await group.end()
