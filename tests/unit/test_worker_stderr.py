"""Standard error: a stalled reader blocks no writer, and a line says how much output is missing."""

import os
import threading
from collections.abc import Iterator

import pytest

from windlass.worker import nonblocking_stderr as stderr
from windlass.worker.nonblocking_stderr import NonblockingWriter

TIMEOUT_S = 20.0


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    os.close(writing)
    os.close(reading)


def read(fd: int, size: int) -> bytes:
    content = b""
    while len(content) < size:
        content += os.read(fd, size - len(content))
    return content


@pytest.mark.parametrize("is_blocking", [True, False], ids=["blocking descriptor", "non-blocking descriptor"])
def test_output_over_limit_is_dropped_with_notice(
    pipe: tuple[int, int], is_blocking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stderr, "MAX_QUEUED_BYTES", 1_000_000)
    reading, writing = pipe
    os.set_blocking(writing, is_blocking)
    writer = NonblockingWriter(writing)
    line = b"x" * 99_999 + b"\n"
    for _ in range(10):
        writer.write(line)
    for _ in range(3):
        writer.write(b"too much")
    assert not writer.drain(0.01)
    assert read(reading, 1_000_000) == line * 10
    notice = b"windlass: 24 bytes of output are missing here: standard error was not read in time.\n"
    assert read(reading, len(notice)) == notice
    assert writer.drain(TIMEOUT_S)
    writer.write(b"more output...\n")
    assert read(reading, 15) == b"more output...\n"


def test_fork_does_not_repeat_queued_output(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    writer = NonblockingWriter(writing)
    writer.write(b"ours\n")
    assert writer.drain(TIMEOUT_S)
    before = threading.active_count()
    if (pid := os.fork()) == 0:
        writer.reset()  # as `standard_error` does at each fork
        writer.write(b"theirs\n")
        os._exit(0 if writer.drain(TIMEOUT_S) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert read(reading, 12) == b"ours\ntheirs\n"
    assert threading.active_count() == before
