"""Standard error with a writer thread, so that a reader that stalls blocks no one else.

A write to an unread pipe, a terminal after Ctrl-S or a hanging log driver blocks until it is read. On the event loop,
time limits and signals would stop while heartbeats continue, so the tasks would never be requeued. Output is therefore
queued up to a limit. Beyond the limit it is dropped and counted until the queue is empty; then a line says how much is
missing. `is_behind` lets large producers wait for a slow reader, but not for one that has stalled. Write errors are
ignored. `copy_to` gets everything that is written, also what is dropped here, with the attempt that printed it.
"""

import atexit
import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

from windlass.model.worker_log import AttemptKey

# Limit of the queue: enough for a burst, and all the memory that a stalled reader costs.
MAX_QUEUED_BYTES = 16 * 1024 * 1024
# With more than this queued, producers should pause.
BEHIND_BYTES = 1024 * 1024
# A reader that has taken nothing for this long has stalled.
STALL_S = 1.0
# At process exit, time for a slow reader to take the rest.
EXIT_TIMEOUT_S = 10.0

_STDERR = 2


class NonblockingWriter:
    """Writes to a file descriptor, in order. Thread-safe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        # Must return at once and not raise.
        self.copy_to: Callable[[bytes, AttemptKey | None], None] | None = None
        self.reset()

    def reset(self) -> None:
        """Empty the queue. Called after a fork, because a fork has no writer thread and must not repeat the output."""
        self._changed = threading.Condition()
        self._queue: deque[bytes] = deque()
        # Includes the chunk that is being written.
        self._queued_bytes = 0
        self._dropped_bytes = 0
        self._has_writer = False
        # When the reader last took something, or the queue was empty.
        self._moved_at = time.monotonic()

    @property
    def is_behind(self) -> bool:
        """Whether much is queued and the reader has not stalled."""
        with self._changed:
            return self._queued_bytes > BEHIND_BYTES and not self._is_stalled()

    def _is_stalled(self) -> bool:
        return time.monotonic() - self._moved_at >= STALL_S

    def write(self, data: bytes, attempt: AttemptKey | None = None) -> None:
        """Queue output. Never blocks or raises."""
        if self.copy_to is not None:
            self.copy_to(data, attempt)
        with self._changed:
            if self._dropped_bytes or self._queued_bytes + len(data) > MAX_QUEUED_BYTES:
                self._dropped_bytes += len(data)
                return
            if not self._queued_bytes:
                self._moved_at = time.monotonic()
            self._queue.append(data)
            self._queued_bytes += len(data)
            self._changed.notify_all()
            if not self._has_writer:
                # If no thread can be started now, the next write tries again.
                with contextlib.suppress(RuntimeError):
                    threading.Thread(target=self._write_queue, name="windlass-stderr", daemon=True).start()
                    self._has_writer = True

    def drain(self, timeout_s: float = EXIT_TIMEOUT_S) -> bool:
        """Wait until everything is written. False if the reader stalled or the time ran out."""
        give_up_at = time.monotonic() + timeout_s
        with self._changed:
            while self._queued_bytes or self._dropped_bytes:
                if self._is_stalled() or time.monotonic() >= give_up_at:
                    return False
                self._changed.wait(STALL_S / 10)
        return True

    def _write_queue(self) -> None:
        ends_line = True
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._dropped_bytes)
                if self._queue:
                    data = self._queue.popleft()
                else:
                    data = _missing_notice(self._dropped_bytes, ends_line=ends_line)
                    self._dropped_bytes = 0
                    self._queued_bytes += len(data)
            ends_line = data.endswith(b"\n")
            self._write(data)
            with self._changed:
                self._queued_bytes -= len(data)
                self._changed.notify_all()

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        # The descriptor or its other end may be closed.
        with contextlib.suppress(OSError):
            while left:
                try:
                    # Not sys.stderr: a blocked writer would hold its lock when Python exits.
                    left = left[os.write(self._fd, left) :]
                    self._moved_at = time.monotonic()
                except BlockingIOError:  # another user of the descriptor made it non-blocking
                    select.select([], [self._fd], [])


def _missing_notice(dropped_bytes: int, *, ends_line: bool) -> bytes:
    notice = f"windlass: {dropped_bytes:,} bytes of output are missing here: standard error was not read in time.\n"
    return (notice if ends_line else f"\n{notice}").encode()


# Shared by the whole process, so that output keeps its order.
standard_error = NonblockingWriter(_STDERR)
atexit.register(standard_error.drain)
os.register_at_fork(after_in_child=standard_error.reset)
