"""CPU time and memory of processes, from /proc. CPU time of a server is steadier than its rate on a shared machine."""

import os
from collections.abc import Iterable
from pathlib import Path

import psutil

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_USER_AT = 11  # utime, stime, cutime and cstime, counted from the field after the name


def cpu_s(pids: Iterable[int]) -> float:
    """CPU seconds of these processes and of their children that have exited. Gone processes count as 0."""
    total = 0
    for pid in pids:
        try:
            # The name may contain spaces, and ends with the last parenthesis.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += sum(map(int, fields[_USER_AT : _USER_AT + 4]))
    return total / _TICKS_PER_S


def memory_mib(pid: int) -> float:
    """Private memory of a process (its anonymous pages), without shared buffers and program files. 0 if it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    for line in status.splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    return 0.0


def process_tree(pid: int) -> list[psutil.Process]:
    """A process and its live descendants, oldest first."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
