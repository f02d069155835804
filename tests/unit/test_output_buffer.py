"""Output of workers before it is sent: limits, order, dropped lines, attempts, masking."""

import asyncio
import json
import sys
import threading
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest

from windlass.model.payload_privacy import privacy_of
from windlass.model.redaction import set_known_secrets
from windlass.model.task import Claim
from windlass.model.worker_log import MAX_CHUNKS, MAX_LINE_CHARACTERS, AttemptKey, LogChunk
from windlass.worker.nonblocking_stderr import standard_error
from windlass.worker.output_buffer import (
    MAX_BATCH_BYTES,
    MAX_TAIL_BYTES,
    MAX_WAITING_BYTES,
    OutputBuffer,
    OutputLimits,
    captured_output,
    current_attempt,
)


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def claim(task_id: int = 1, attempt: int = 1, payload: str = "null") -> Claim:
    return Claim(task_id, uuid4(), "q", payload, attempt, 3, None, 0, datetime.now(UTC))


def sent(buffer: OutputBuffer, clock: Clock) -> list[LogChunk]:
    chunks: list[LogChunk] = []
    while (batch := buffer.take()) is not None:
        chunks += batch.chunks(clock())
    return chunks


def lines_of(chunks: list[LogChunk], task_id: int | None = None) -> list[str]:
    return [line for chunk in chunks if chunk.task_id == task_id for line in chunk.lines]


def dropped(chunks: list[LogChunk]) -> int:
    return sum(chunk.dropped for chunk in chunks)


def test_lines_are_complete_and_have_ages(clock: Clock) -> None:
    buffer = OutputBuffer(clock=clock)
    buffer.add(b"one\ntw")
    clock.now += 2
    buffer.add(b"o\nthr")
    clock.now += 1
    (chunk,) = sent(buffer, clock)
    assert (chunk.lines, chunk.ages_ms, chunk.task_id) == (("one", "two"), (3000, 1000), None)
    assert buffer.is_empty
    buffer.close()
    assert lines_of(sent(buffer, clock)) == ["thr"]


def test_lines_of_concurrent_attempts_are_kept_apart(clock: Clock) -> None:
    buffer = OutputBuffer(clock=clock)
    first, second = buffer.begin(claim(1, 1)), buffer.begin(claim(2, 3))
    for number in range(3):
        buffer.add(f"first {number}\n".encode(), first)
        buffer.add(f"second {number}\n".encode(), second)
    buffer.add(b"own\n")
    chunks = sent(buffer, clock)
    assert [(chunk.task_id, chunk.attempt, len(chunk.lines)) for chunk in chunks] == [
        (1, 1, 3),
        (2, 3, 3),
        (None, None, 1),
    ]
    assert lines_of(chunks, 2) == ["second 0", "second 1", "second 2"]


def test_output_after_the_attempt_is_the_workers_own(clock: Clock) -> None:
    buffer = OutputBuffer(clock=clock)
    key = buffer.begin(claim())
    buffer.add(b"unfinished", key)
    buffer.end(key)
    buffer.add(b"late\n", key)
    chunks = sent(buffer, clock)
    assert (lines_of(chunks, 1), lines_of(chunks)) == (["unfinished"], ["late"])


def test_output_above_the_rate_is_dropped_and_counted(clock: Clock) -> None:
    buffer = OutputBuffer(OutputLimits(bytes_per_s=1_000, bytes_per_attempt=1 << 20), clock=clock)
    data = b"".join(b"line %06d\n" % number for number in range(100_000))
    for start in range(0, len(data), 4096):
        buffer.add(data[start : start + 4096])
    chunks = sent(buffer, clock)
    kept = lines_of(chunks)
    assert kept[0] == "line 000000"
    assert sum(map(len, kept)) <= 16_000
    assert dropped(chunks) == 0, "the gap is reported by the lines after it"
    clock.now += 60
    rest = sent(buffer, clock)
    assert rest[0].lines[-1] == "line 099999", "the end is sent when the rate allows it"
    assert len(kept) + dropped(rest) + len(rest[0].lines) == 100_000


def test_attempt_above_its_limit_sends_its_beginning_and_end(clock: Clock) -> None:
    buffer = OutputBuffer(OutputLimits(bytes_per_s=1 << 20, bytes_per_attempt=10_000), clock=clock)
    key = buffer.begin(claim())
    for number in range(10_000):
        buffer.add(b"line %06d\n" % number, key)
    during = lines_of(sent(buffer, clock), 1)
    assert during[0] == "line 000000"
    assert 12 * len(during) in range(9_900, 10_100)
    buffer.end(key)
    (end,) = sent(buffer, clock)
    assert end.lines[-1] == "line 009999"
    assert sum(len(line) + 1 for line in end.lines) <= MAX_TAIL_BYTES
    assert len(during) + end.dropped + len(end.lines) == 10_000
    # The next attempt has the whole limit again.
    key = buffer.begin(claim(2))
    buffer.add(b"next\n", key)
    assert lines_of(sent(buffer, clock), 2) == ["next"]


def test_memory_is_bounded_while_nothing_can_be_sent(clock: Clock) -> None:
    buffer = OutputBuffer(OutputLimits(bytes_per_s=1e9), clock=clock)
    for _ in range(64):
        buffer.add(b"x" * 99 + b"\n" + (b"y" * 99 + b"\n") * 1_000)
    buffer.add(b"the end\n")
    chunks = sent(buffer, clock)
    kept = lines_of(chunks)
    assert sum(len(line) + 1 for line in kept) <= MAX_WAITING_BYTES + MAX_TAIL_BYTES
    assert kept[-1] == "the end"
    assert len(kept) + dropped(chunks) == 64 * 1_001 + 1


def test_lines_of_a_lost_batch_are_counted_at_the_next_line(clock: Clock) -> None:
    buffer = OutputBuffer(clock=clock)
    running, ended = (buffer.begin(claim(number)) for number in (1, 2))
    for key in (running, ended, None):
        buffer.add(b"lost\nlost\n", key)
    lost = buffer.take()
    assert lost is not None
    buffer.add(b"waits already\n", None)
    buffer.end(ended)
    assert buffer.count_lost(lost) == 6
    buffer.add(b"next\n", running)
    buffer.add(b"own\n")
    buffer.add(b"own again\n")
    following = buffer.take()
    assert following is not None
    assert [(chunk.task_id, chunk.lines[0], chunk.dropped) for chunk in following.chunks(clock())] == [
        (None, "waits already", 2), (None, "own", 2), (1, "next", 2),
    ]  # fmt: skip


def test_a_batch_is_bounded(clock: Clock) -> None:
    buffer = OutputBuffer(OutputLimits(bytes_per_s=1e9), clock=clock)
    for number in range(400):
        key = buffer.begin(claim(number))
        buffer.add(b"x" * 500 + b"\n", key)
        buffer.end(key)
    sizes = []
    while (batch := buffer.take()) is not None:
        chunks = batch.chunks(clock())
        sizes.append((len(chunks), sum(len(line) for chunk in chunks for line in chunk.lines)))
    assert len(sizes) > 1
    assert all(count <= MAX_CHUNKS and size <= MAX_BATCH_BYTES for count, size in sizes)


def test_long_lines_are_cut(clock: Clock) -> None:
    buffer = OutputBuffer(OutputLimits(bytes_per_s=1e9), clock=clock)
    for _ in range(100):
        buffer.add(b"z" * 10_000)
    buffer.add(b"\nnext\n" + b"w" * 100_000 + b"\nlast\n")
    lines = lines_of(sent(buffer, clock))
    assert [line[0] for line in lines] == ["z", "n", "w", "l"]
    assert all(len(line) <= MAX_LINE_CHARACTERS + 20 for line in lines)


def test_progress_bar_is_sent_in_its_last_state(clock: Clock) -> None:
    buffer = OutputBuffer(clock=clock)
    for percent in range(101):
        buffer.add(b"\r%3d %%" % percent)
    buffer.add(b"\nwindows\r\n")
    assert lines_of(sent(buffer, clock)) == ["100 %", "windows"]


def test_any_bytes_become_text_that_can_be_stored(clock: Clock) -> None:
    buffer = OutputBuffer(clock=clock)
    buffer.add(b"NUL \0, half \xed\xa0\x80, \xff\n")
    (line,) = lines_of(sent(buffer, clock))
    assert "\0" not in line
    line.encode()


def test_secrets_are_masked_by_value(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "hunter2-correct-horse"
    set_known_secrets([secret])
    try:
        buffer = OutputBuffer(OutputLimits(bytes_per_s=1e9), clock=clock)
        # In two parts, encoded, and across the place where a long line is cut.
        buffer.add(b"key hunter2-corr")
        buffer.add(b"ect-horse and " + secret.encode().hex().encode() + b"\n")
        buffer.add(b"x" * (MAX_LINE_CHARACTERS - 5) + secret.encode() + b"y" * 50_000 + b"\n")
        text = "\n".join(lines_of(sent(buffer, clock)))
    finally:
        set_known_secrets([])
    assert text.startswith("key ******** and ********\n")
    assert "hunt" not in text
    assert "horse" not in text


def test_hidden_parts_of_the_payload_are_masked(clock: Clock) -> None:
    buffer = OutputBuffer(privacy=privacy_of([(["q"], ["$.prompt"])]), clock=clock)
    key = buffer.begin(claim(payload=json.dumps({"prompt": "a private prompt", "seed": 1})))
    buffer.add(b"rendering a private prompt with seed 1\n", key)
    other = buffer.begin(claim(2, payload="{not json"))
    buffer.add(b"got {not json\n", other)
    chunks = sent(buffer, clock)
    assert lines_of(chunks, 1) == ["rendering ******** with seed 1"]
    assert lines_of(chunks, 2) == ["********"]


def test_repeated_batch_keeps_its_id_and_ages_its_lines(clock: Clock) -> None:
    buffer = OutputBuffer(clock=clock)
    buffer.add(b"line\n")
    batch = buffer.take()
    assert batch is not None
    before = batch.chunks(clock())
    clock.now += 90
    after = batch.chunks(clock())
    assert (before[0].ages_ms, after[0].ages_ms) == ((0,), (90_000,))
    assert buffer.take() is None


async def test_prints_of_inline_handlers_belong_to_their_attempts(clock: Clock, capsys: Any) -> None:
    buffer = OutputBuffer(clock=clock)

    async def handler(key: AttemptKey) -> None:
        current_attempt.set(key)
        for number in range(3):
            print(key.task_id, number)
            await asyncio.sleep(0)
        await asyncio.to_thread(print, "in a thread", file=sys.stderr)

    keys = [buffer.begin(claim(number)) for number in (1, 2)]
    with captured_output(buffer):
        await asyncio.gather(*(asyncio.create_task(handler(key)) for key in keys))
        print("own")
        standard_error.write(b"forwarded\n", keys[0])
    print("afterwards")
    chunks = sent(buffer, clock)
    assert lines_of(chunks, 1) == ["1 0", "1 1", "1 2", "in a thread", "forwarded"]
    assert lines_of(chunks, 2) == ["2 0", "2 1", "2 2", "in a thread"]
    assert lines_of(chunks) == ["own"]
    assert "1 2\n" in capsys.readouterr().out, "still printed"


def test_finaliser_that_prints_while_output_is_added_does_not_block() -> None:
    class PrintingClock(Clock):
        """The buffer reads its clock while it holds its lock, as a garbage collection may run there."""

        def __init__(self) -> None:
            super().__init__()
            self.buffer: OutputBuffer | None = None

        def __call__(self) -> float:
            if self.buffer is not None:
                buffer, self.buffer = self.buffer, None
                buffer.add(b"unclosed session\n")
            return super().__call__()

    clock = PrintingClock()
    buffer = OutputBuffer(clock=clock)
    clock.buffer = buffer
    done = threading.Thread(target=buffer.add, args=(b"first\nsecond\n",), daemon=True)
    done.start()
    done.join(30)
    assert not done.is_alive(), "the buffer waits for itself"
    batch = buffer.take()
    assert batch is not None
    assert [line for chunk in batch.chunks(0) for line in chunk.lines] == ["first", "second", "unclosed session"]
