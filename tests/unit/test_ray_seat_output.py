"""What an attempt prints in one of Ray's processes: read from the file to which Ray redirects it, sent by attempt."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.ray_builders import make_claim
from windlass.model.worker_log import LogChunk
from windlass.ray import seat_output, wire_protocol
from windlass.ray.seat_output import SeatOutput
from windlass.worker.output_buffer import OutputLimits


class PrintedFile:
    """A file to which a process appends its output, and the lines that were sent of it."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.sent: list[LogChunk] = []

    def write(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    @property
    def lines(self) -> list[str]:
        return [line for chunk in self.sent for line in chunk.lines]


@pytest.fixture
def printed(tmp_path: Path) -> Iterator[PrintedFile]:
    file = PrintedFile(tmp_path / "worker.out")
    yield file
    os.close(file.descriptor)


def test_lines_of_an_attempt_are_sent_before_its_end(printed: PrintedFile) -> None:
    printed.write("of the import\n")
    output = SeatOutput(OutputLimits(), (printed.descriptor,))
    output.begin(make_claim({}), printed.sent.append)
    printed.write("first\nsec")
    printed.write("ond\nlast")
    output.end()
    assert printed.lines == ["first", "second", "last"]
    printed.write(" of the first attempt\nbetween\n")
    output.begin(make_claim({}), printed.sent.append)
    printed.write("of the second attempt\n")
    output.end()
    assert printed.lines[3:] == ["of the second attempt"]


def test_lines_of_two_files_are_not_mixed(printed: PrintedFile, tmp_path: Path) -> None:
    errors = PrintedFile(tmp_path / "worker.err")
    output = SeatOutput(OutputLimits(), (printed.descriptor, errors.descriptor))
    output.begin(make_claim({}), printed.sent.append)
    printed.write("half ")
    errors.write("a warn")
    printed.write("a line")
    errors.write("ing\n")
    output.end()
    assert sorted(printed.lines) == ["a warning", "half a line"]
    os.close(errors.descriptor)


def test_secrets_of_the_machine_are_masked_where_they_are_known(
    printed: PrintedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VENDOR_API_KEY", "a-key-of-this-machine")
    output = SeatOutput(OutputLimits(), (printed.descriptor,))
    output.begin(make_claim({}), printed.sent.append)
    printed.write("uses a-key-of-this-machine\n")
    output.end()
    assert printed.lines == ["uses ********"]


def test_output_above_the_limit_is_counted_and_its_end_is_sent(printed: PrintedFile) -> None:
    output = SeatOutput(OutputLimits(bytes_per_attempt=10_000), (printed.descriptor,))
    output.begin(make_claim({}), printed.sent.append)
    printed.write("".join(f"line {number:05}\n" for number in range(20_000)))
    output.end()
    assert (printed.lines[0], printed.lines[-1]) == ("line 00000", "line 19999")
    assert len("\n".join(printed.lines)) < 10_000 + (16 << 10)
    assert len(printed.lines) + sum(chunk.dropped for chunk in printed.sent) == 20_000


def test_output_that_cannot_be_read_in_time_is_reported(printed: PrintedFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seat_output, "END_TIMEOUT_S", 0.0)
    monkeypatch.setattr(seat_output, "READ_BYTES", 10)
    monkeypatch.setattr(seat_output, "READ_INTERVAL_S", 60.0)
    output = SeatOutput(OutputLimits(), (printed.descriptor,))
    output.begin(make_claim({}), printed.sent.append)
    printed.write("123456789\n" * 5)
    output.end()
    assert printed.lines == ["123456789", "windlass: 40 bytes of output were not read in time"]


def test_line_without_an_end_is_cut(printed: PrintedFile) -> None:
    output = SeatOutput(OutputLimits(), (printed.descriptor,))
    output.begin(make_claim({}), printed.sent.append)
    printed.write("x" * 300_000)
    output.end()
    assert printed.lines[0].endswith(" [line cut]") and len("".join(printed.lines)) < 3 * 8_192 + 100


def test_output_to_a_pipe_is_left_alone(printed: PrintedFile) -> None:
    reader, writer = os.pipe()
    output = SeatOutput(OutputLimits(), (writer,))
    output.begin(make_claim({}), printed.sent.append)
    os.write(writer, b"for another reader\n")
    output.end()
    assert (printed.sent, os.read(reader, 100)) == ([], b"for another reader\n")
    os.close(reader)
    os.close(writer)


def test_lost_connection_does_not_end_the_attempt(printed: PrintedFile) -> None:
    def fail(_chunk: LogChunk) -> None:
        raise BrokenPipeError

    output = SeatOutput(OutputLimits(), (printed.descriptor,))
    output.begin(make_claim({}), fail)
    printed.write("lost\n")
    output.end()
    assert printed.sent == []


def test_lines_in_one_message_are_bounded() -> None:
    chunk = LogChunk(("x" * 8_192,) * 200)
    message = wire_protocol.encode_output("s", make_claim({}).token, chunk)
    assert len(message) <= wire_protocol.MAX_OUTPUT_BYTES + 200
