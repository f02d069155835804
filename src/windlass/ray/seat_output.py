"""Sends what an attempt prints in one of Ray's processes to its dispatcher, which stores it.

Ray redirects the standard output and error of its processes to files. A thread reads what is added to them while an
attempt runs, so nothing that the handler, its libraries or its child processes print is missed, and none of them ever
waits for a reader. Lines are masked and bounded here, where the secrets of the machine are known (output_buffer.py).

Not sent: output between attempts, of Ray tasks and actors that a handler starts, and the last READ_INTERVAL_S of a
process that is killed. All of it is in Ray's own log files. Nothing is sent from systems without /proc, or if Ray
rotates these files (RAY_ROTATION_MAX_BYTES), which replaces them by pipes.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable

from windlass.model.redaction import add_known_secrets, secrets_in
from windlass.model.task import Claim
from windlass.model.worker_log import AttemptKey, LogChunk
from windlass.worker.nonblocking_stderr import standard_error
from windlass.worker.output_buffer import MAX_LINE_BYTES, OutputBuffer, OutputLimits

READ_INTERVAL_S = 0.2
READ_BYTES = 1 << 18
# Time for reading the rest when the attempt ends, and for output of its commands to reach the file. The outcome waits.
END_TIMEOUT_S = 1.0

_STDOUT, _STDERR = 1, 2
SendChunk = Callable[[LogChunk], None]


class SeatOutput:
    """The output of this process, of one attempt at a time. `send` must raise nothing but OSError."""

    def __init__(self, limits: OutputLimits, descriptors: tuple[int, ...] = (_STDOUT, _STDERR)) -> None:
        add_known_secrets(secrets_in(os.environ))
        self._buffer = OutputBuffer(limits)
        self._files = [file for file in map(_OutputFile.of, descriptors) if file is not None]
        # Held while output is read and sent, so that all of an attempt is sent before its end.
        self._lock = threading.Lock()
        self._attempt: tuple[AttemptKey, SendChunk] | None = None
        self._begun = threading.Event()
        threading.Thread(target=self._send_while_running, name="windlass-output", daemon=True).start()

    def begin(self, claim: Claim, send: SendChunk) -> None:
        with self._lock:
            for file in self._files:
                file.skip_to_end()
            self._attempt = self._buffer.begin(claim), send
        self._begun.set()

    def end(self) -> None:
        """Send the rest. The attempt's outcome may be sent after this."""
        self._begun.clear()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # closed by the handler
                stream.flush()
        # Commands print through this writer.
        standard_error.drain(END_TIMEOUT_S)
        with self._lock:
            attempt, self._attempt = self._attempt, None
            if attempt is None:
                return
            key, send = attempt
            self._read(key, time.monotonic() + END_TIMEOUT_S)
            for file in self._files:
                self._buffer.add(file.take_rest(), key)
            if unread := sum(file.unread_bytes for file in self._files):
                self._buffer.add(f"windlass: {unread:,} bytes of output were not read in time\n".encode(), key)
            self._buffer.end(key)
            self._send(send)

    def _send_while_running(self) -> None:
        while True:
            self._begun.wait()
            time.sleep(READ_INTERVAL_S)
            with self._lock:
                if self._attempt is not None:
                    key, send = self._attempt
                    self._read(key, time.monotonic() + READ_INTERVAL_S)
                    self._send(send)

    # Below: the caller holds the lock.

    def _read(self, key: AttemptKey, deadline: float) -> None:
        for file in self._files:
            while data := file.read_lines():
                self._buffer.add(data, key)
                if time.monotonic() >= deadline:
                    break

    def _send(self, send: SendChunk) -> None:
        # A lost connection ends the process elsewhere.
        with contextlib.suppress(OSError):
            while (batch := self._buffer.take()) is not None:
                for chunk in batch.chunks(time.monotonic()):
                    send(chunk)


class _OutputFile:
    """Reads a file to which this process, and others, append."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._line = b""

    @classmethod
    def of(cls, descriptor: int) -> "_OutputFile | None":
        """None if the descriptor is no file, or cannot be opened for reading."""
        try:
            opened = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            os.lseek(opened, 0, os.SEEK_END)
        except OSError:  # a pipe or a terminal
            os.close(opened)
            return None
        return cls(opened)

    @property
    def unread_bytes(self) -> int:
        return max(0, os.fstat(self._descriptor).st_size - os.lseek(self._descriptor, 0, os.SEEK_CUR))

    def skip_to_end(self) -> None:
        os.lseek(self._descriptor, 0, os.SEEK_END)
        self._line = b""

    def read_lines(self) -> bytes:
        """Complete lines; empty if there are none yet. Lines of two files must not be mixed."""
        while data := os.read(self._descriptor, READ_BYTES):
            lines, newline, self._line = (self._line + data).rpartition(b"\n")
            if newline:
                return lines + newline
            if len(self._line) > MAX_LINE_BYTES:
                # It is cut anyway. The rest of it counts as another line.
                return self.take_rest()
        return b""

    def take_rest(self) -> bytes:
        """The beginning of a line, as a line."""
        line, self._line = self._line, b""
        return line + b"\n" if line else b""
