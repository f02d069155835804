"""Which processes there are, and how to signal exactly the one that is meant.

A process is named by its host, its pid and the moment it started, so a pid that was given to somebody else is never
mistaken for the old one. A process that is gone or not ours to look at reads as nothing; any other trouble raises
OSError, because a table of which a part could not be read must not pass for the whole.
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

# A slash is in no host's name. (In containers, each is a host.)
HOST = socket.gethostname()
# Nearly all environments are shorter; longer ones take another call.
_READ_BYTES = 128 * 1024
# What the kernel says of a process that ended while we looked, and of one that belongs to somebody else.
_GONE = frozenset({errno.ENOENT, errno.ESRCH})
_CLOSED = frozenset({errno.EACCES, errno.EPERM})
# No such call in this kernel, or a sandbox that does not know it: then the signal goes by pid, right after the check.
_NO_PIDFD = frozenset({errno.ENOSYS, errno.EPERM, errno.EINVAL})


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    # In the unit of the table it was read from; together with the pid it names one process.
    started: int
    parent_pid: int
    session: int
    # It has ended with all its threads, and waits for its parent to take note.
    is_zombie: bool

    @property
    def id(self) -> str:
        return f"{HOST}/{self.pid}-{self.started}"


class ProcessTable(Protocol):
    def pids(self) -> list[int]: ...

    def read(self, pid: int) -> Process | None:
        """None: there is no such process, or not any more."""

    def environment(self, pid: int) -> bytes | None:
        """As it was when its program started, entries ended by NUL. None: not there, or not ours to read."""

    def arguments(self, pid: int) -> list[bytes]:
        """The words of its command line. Empty: not there, or not ours to read."""

    def created_at(self, process: Process) -> datetime: ...


class ProcFs:
    """Linux: read from /proc. `started` counts clock ticks since boot, which no change of the clock can move."""

    def __init__(self) -> None:
        self._ticks_per_s = os.sysconf("SC_CLK_TCK")
        self._booted_at = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)

    def pids(self) -> list[int]:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - no use for the paths

    def read(self, pid: int) -> Process | None:
        text = _read(f"/proc/{pid}/stat")
        if not text:
            return None
        # Its name may contain anything, even ") ".
        fields = text[text.rindex(b")") + 2 :].split()
        return Process(
            pid=pid,
            started=int(fields[19]),
            parent_pid=int(fields[1]),
            session=int(fields[3]),
            # While others of its threads are still dying, nobody can be told how it ended.
            is_zombie=fields[0] in (b"Z", b"X") and int(fields[17]) <= 1,
        )

    def environment(self, pid: int) -> bytes | None:
        return _read(f"/proc/{pid}/environ")

    def arguments(self, pid: int) -> list[bytes]:
        return (_read(f"/proc/{pid}/cmdline") or b"").split(b"\0")[:-1]

    def created_at(self, process: Process) -> datetime:
        return datetime.fromtimestamp(self._booted_at + process.started / self._ticks_per_s, UTC)


class PsutilTable:
    """Elsewhere: by psutil, which takes about twice as long. `started` counts microseconds."""

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
    """The best one this system has."""
    return ProcFs() if Path("/proc/self/stat").exists() else PsutilTable()


def is_alive(table: ProcessTable, process: Process) -> bool:
    """Whether this very process still runs."""
    now = table.read(process.pid)
    return now is not None and now.started == process.started and not now.is_zombie


def send_signal(table: ProcessTable, process: Process, number: signal.Signals) -> None:
    """To this very process or to nobody. Raises PermissionError."""
    with contextlib.suppress(ProcessLookupError):
        handle = _handle(process.pid)
        try:
            # Checked while the handle is held: whoever gets the pid from now on does not get the signal.
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
    """What stands for the process that has this pid now, and for no later one. None where there is no such thing."""
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
            # These files give all they have in one call; a full answer may be cut off.
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
