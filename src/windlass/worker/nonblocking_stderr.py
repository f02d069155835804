"""Our standard error, written to by a thread of its own: whoever does not read it holds up nobody.

A pipe that is not read, a terminal after Ctrl-S, a log driver that hangs: a write there lasts until somebody reads. On
the event loop that would be the end of all time limits and signals, while heartbeats go on and keep the claims. So what
is to be written waits here, up to a limit, and whoever has much to say asks first whether we are behind: a reader that
is slow is waited for, one that stands still is not. What comes beyond the limit is dropped and counted, until all that
waits is written; then a line says how much is missing in that place. Output that nobody can read any more is no trouble
at all.
"""

import atexit
import contextlib
import os
import select
import threading
import time
from collections import deque

# Room for the burst that a slow reader takes a moment for. A reader that stands still costs no more memory than this.
MAX_WAITING_BYTES = 16 * 1024 * 1024
# Who has more waiting than this should say nothing more for the moment.
BEHIND_BYTES = 1024 * 1024
# A reader that has taken nothing for so long stands still.
STALL_S = 1.0
# At the end of the process, for what still waits, however slowly it is taken.
LAST_WORDS_TIMEOUT_S = 10.0

_STDERR = 2


class NonblockingWriter:
    """Writes to a file descriptor, in order. Any thread may use it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.begin_anew()

    def begin_anew(self) -> None:
        """Also in a process that was forked: it has neither our thread nor a share in what that has still to write."""
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        # With what is being written at the moment.
        self._waiting_bytes = 0
        self._dropped_bytes = 0
        self._has_writer = False
        # When something was last taken, or there was nothing to take.
        self._moved_at = time.monotonic()

    @property
    def is_behind(self) -> bool:
        """Whether much waits, and is being read."""
        with self._changed:
            return self._waiting_bytes > BEHIND_BYTES and not self._is_stalled()

    def _is_stalled(self) -> bool:
        return time.monotonic() - self._moved_at >= STALL_S

    def write(self, data: bytes) -> None:
        """Returns at once. Raises nothing."""
        with self._changed:
            if self._dropped_bytes or self._waiting_bytes + len(data) > MAX_WAITING_BYTES:
                self._dropped_bytes += len(data)
                return
            if not self._waiting_bytes:
                self._moved_at = time.monotonic()
            self._waiting.append(data)
            self._waiting_bytes += len(data)
            self._changed.notify_all()
            if not self._has_writer:
                # Where no thread is to be had now, the next to write tries again.
                with contextlib.suppress(RuntimeError):
                    threading.Thread(target=self._write_on, name="windlass-stderr", daemon=True).start()
                    self._has_writer = True

    def drain(self, timeout_s: float = LAST_WORDS_TIMEOUT_S) -> bool:
        """Wait until all is written, as long as some of it is being read. False: it was not to be."""
        give_up_at = time.monotonic() + timeout_s
        with self._changed:
            while self._waiting_bytes or self._dropped_bytes:
                if self._is_stalled() or time.monotonic() >= give_up_at:
                    return False
                self._changed.wait(STALL_S / 10)
        return True

    def _write_on(self) -> None:
        ends_line = True
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._dropped_bytes)
                if self._waiting:
                    data = self._waiting.popleft()
                else:
                    data = _words_for(self._dropped_bytes, ends_line=ends_line)
                    self._dropped_bytes = 0
                    self._waiting_bytes += len(data)
            ends_line = data.endswith(b"\n")
            self._write(data)
            with self._changed:
                self._waiting_bytes -= len(data)
                self._changed.notify_all()

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        # Closed, or nobody at the other end.
        with contextlib.suppress(OSError):
            while left:
                try:
                    # Not through sys.stderr, whose lock a stuck writer would hold when Python wants to end.
                    left = left[os.write(self._fd, left) :]
                    self._moved_at = time.monotonic()
                except BlockingIOError:  # who shares it with us made it so
                    select.select([], [self._fd], [])


def _words_for(dropped_bytes: int, *, ends_line: bool) -> bytes:
    words = f"windlass: {dropped_bytes:,} bytes of output are missing here: nobody read standard error in time.\n"
    return (words if ends_line else f"\n{words}").encode()


# That of this process: one for all, so that what they write stands in the order in which they wrote it.
standard_error = NonblockingWriter(_STDERR)
atexit.register(standard_error.drain)
os.register_at_fork(after_in_child=standard_error.begin_anew)
