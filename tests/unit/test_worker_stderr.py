"""Standard error: a reader that stands still holds up nobody, and is told what it has missed."""

import os
import threading
from collections.abc import Iterator

import pytest

from windlass.worker import nonblocking_stderr as stderr
from windlass.worker.nonblocking_stderr import NonblockingWriter

PATIENCE_S = 20.0


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


@pytest.mark.parametrize("is_blocking", [True, False], ids=["as usual", "made non-blocking by who shares it"])
def test_who_does_not_read_misses_what_there_is_no_room_for_and_is_told_so(
    pipe: tuple[int, int], is_blocking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stderr, "MAX_QUEUED_BYTES", 1_000_000)
    reading, writing = pipe
    os.set_blocking(writing, is_blocking)
    outlet = NonblockingWriter(writing)
    line = b"x" * 99_999 + b"\n"
    for _ in range(10):
        outlet.write(line)
    for _ in range(3):
        outlet.write(b"too much")
    assert not outlet.drain(0.01)
    assert read(reading, 1_000_000) == line * 10
    told = b"windlass: 24 bytes of output are missing here: standard error was not read in time.\n"
    assert read(reading, len(told)) == told
    assert outlet.drain(PATIENCE_S)
    outlet.write(b"and on it goes\n")
    assert read(reading, 15) == b"and on it goes\n"


def test_a_forked_process_writes_its_own_lines_and_not_ours_again(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    outlet = NonblockingWriter(writing)
    outlet.write(b"ours\n")
    assert outlet.drain(PATIENCE_S)
    before = threading.active_count()
    if (pid := os.fork()) == 0:
        outlet.reset()  # as the process's own outlet does at each fork
        outlet.write(b"theirs\n")
        os._exit(0 if outlet.drain(PATIENCE_S) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert read(reading, 12) == b"ours\ntheirs\n"
    assert threading.active_count() == before
