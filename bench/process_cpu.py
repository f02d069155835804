"""CPU seconds of processes, from /proc: more robust on a shared machine than the time of day."""

from pathlib import Path

import psutil


class ProcessCpu:
    """CPU time of a process and its children since this object was made, or since `restart`."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._before_s = self._total_s()

    @classmethod
    def of_postgres(cls, data: Path) -> "ProcessCpu":
        """All processes of the server with this data directory."""
        return cls(int((data / "postmaster.pid").read_text().split()[0]))

    def restart(self) -> None:
        self._before_s = self._total_s()

    @property
    def used_s(self) -> float:
        return self._total_s() - self._before_s

    def _total_s(self) -> float:
        total_s = 0.0
        for process in (self._root, *self._root.children(recursive=True)):
            try:
                times = process.cpu_times()
            except psutil.Error:  # the process has just exited
                continue
            total_s += times.user + times.system + times.children_user + times.children_system
        return total_s
