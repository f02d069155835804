"""Reads the process table, and signals exactly the intended process.

A process is identified by host, pid and start time, so a reused pid is never mistaken for the old process. A process
that is gone or unreadable reads as None. Any other failure raises OSError: an incomplete table must not pass for a
complete one.
"""

import contextlib
import errno
import os
import signal
import socket
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import psutil

# A host name contains no slash. Each container is a host of its own.
HOST = socket.gethostname()
# Nearly all environments are shorter; longer ones take another call.
_READ_BYTES = 128 * 1024
# Errors of a process that exited while it was read, and of one that belongs to another user.
_GONE = frozenset({errno.ENOENT, errno.ESRCH})
_CLOSED = frozenset({errno.EACCES, errno.EPERM})
# The kernel or a sandbox lacks pidfd: the signal is then sent by pid, right after the check.
_NO_PIDFD = frozenset({errno.ENOSYS, errno.EPERM, errno.EINVAL})


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    # In the unit of its table; together with the pid it identifies one process.
    started: int
    parent_pid: int
    session: int
    # It has exited with all its threads, and its parent has not reaped it.
    is_zombie: bool

    @property
    def id(self) -> str:
        return f"{HOST}/{self.pid}-{self.started}"


class ProcessTable(Protocol):
    def pids(self) -> list[int]: ...

    def read(self, pid: int) -> Process | None:
        """None if the process does not exist."""

    def environment(self, pid: int) -> bytes | None:
        """The environment at program start, entries terminated by NUL. None if gone or unreadable."""

    def arguments(self, pid: int) -> list[bytes]:
        """The command line. Empty if the process is gone or unreadable."""

    def created_at(self, process: Process) -> datetime: ...


class ProcFs:
    """Linux: reads /proc. `started` counts clock ticks since boot, unaffected by clock changes."""

    def __init__(self) -> None:
        self._ticks_per_s = os.sysconf("SC_CLK_TCK")
        self._booted_at = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)

    def pids(self) -> list[int]:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - the paths are not needed

    def read(self, pid: int) -> Process | None:
        text = _read(f"/proc/{pid}/stat")
        if not text:
            return None
        # The process name may contain anything, even ") ".
        fields = text[text.rindex(b")") + 2 :].split()
        return Process(
            pid=pid,
            started=int(fields[19]),
            parent_pid=int(fields[1]),
            session=int(fields[3]),
            # While other threads are still exiting, the exit code is not available.
            is_zombie=fields[0] in (b"Z", b"X") and int(fields[17]) <= 1,
        )

    def environment(self, pid: int) -> bytes | None:
        return _read(f"/proc/{pid}/environ")

    def arguments(self, pid: int) -> list[bytes]:
        return (_read(f"/proc/{pid}/cmdline") or b"").split(b"\0")[:-1]

    def created_at(self, process: Process) -> datetime:
        return datetime.fromtimestamp(self._booted_at + process.started / self._ticks_per_s, UTC)


class PsutilTable:
    """Other systems: psutil, about half as fast. `started` counts microseconds."""

    def pids(self) -> list[int]:
        return psutil.pids()

    def read(self, pid: int) -> Process | None:
        try:
            process = psutil.Process(pid)
            return Process(
                pid=pid,
                started=round(process.create_time() * 1e6),
                parent_pid=process.ppid(),
                session=os.getsid(pid),
                is_zombie=process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD),
            )
        except (psutil.Error, ProcessLookupError, PermissionError):
            return None

    def environment(self, pid: int) -> bytes | None:
        try:
            found = psutil.Process(pid).environ()
        except (psutil.Error, ProcessLookupError, PermissionError):
            return None
        return b"".join(os.fsencode(f"{name}={value}\0") for name, value in found.items())

    def arguments(self, pid: int) -> list[bytes]:
        try:
            return [os.fsencode(word) for word in psutil.Process(pid).cmdline()]
        except (psutil.Error, ProcessLookupError, PermissionError):
            return []

    def created_at(self, process: Process) -> datetime:
        return datetime.fromtimestamp(process.started / 1e6, UTC)


def process_table() -> ProcessTable:
    """The fastest table that this system supports."""
    return ProcFs() if Path("/proc/self/stat").exists() else PsutilTable()


def is_alive(table: ProcessTable, process: Process) -> bool:
    """Whether exactly this process still runs."""
    now = table.read(process.pid)
    return now is not None and now.started == process.started and not now.is_zombie


def send_signal(table: ProcessTable, process: Process, number: signal.Signals) -> None:
    """Send a signal to exactly this process or to none. Raises PermissionError."""
    with contextlib.suppress(ProcessLookupError):
        handle = _handle(process.pid)
        try:
            # Checked while the handle is held: a process that reuses the pid now does not get the signal.
            if not is_alive(table, process):
                return
            if handle is None:
                os.kill(process.pid, number)
            else:
                signal.pidfd_send_signal(handle, number)
        finally:
            if handle is not None:
                os.close(handle)


def _handle(pid: int) -> int | None:
    """A pidfd of the process that has this pid now. None where pidfd is not supported."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in _NO_PIDFD:
            return None
        raise


def _read(path: str) -> bytes | None:
    try:
        file = os.open(path, os.O_RDONLY)
        try:
            text = part = os.read(file, _READ_BYTES)
            # These files return everything in one call; only a full buffer may be incomplete.
            while len(part) == _READ_BYTES:
                part = os.read(file, _READ_BYTES)
                text += part
        finally:
            os.close(file)
    except OSError as error:
        if error.errno in _GONE or error.errno in _CLOSED:
            return None
        raise
    return text
