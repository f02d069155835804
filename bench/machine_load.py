"""Measures the CPU share of unrelated processes, so that a disturbed measurement can be repeated."""

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

# Share of all cores. Unrelated load below this is normal background.
QUIET_SHARE = 0.1
SAMPLE_S = 0.1


@dataclass(frozen=True, slots=True)
class _Moment:
    at: float
    busy_s: float
    ours_s: float


class LoadMonitor:
    """`quiet_timeout_s`: how long each measurement waits for a quiet machine. 0 measures without waiting."""

    def __init__(self, postgres_data: Path, quiet_timeout_s: float) -> None:
        postmaster = int((postgres_data / "postmaster.pid").read_text().split()[0])
        self._roots = [psutil.Process(os.getpid()), psutil.Process(postmaster)]
        self._quiet_timeout_s = quiet_timeout_s

    def deadline(self) -> float:
        return time.monotonic() + self._quiet_timeout_s

    async def until_quiet(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            before = self.sample()
            await asyncio.sleep(SAMPLE_S)
            if self.share_of_others(before) < QUIET_SHARE:
                return

    def sample(self) -> _Moment:
        times = psutil.cpu_times()
        busy_s = sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)
        return _Moment(time.monotonic(), busy_s, self._ours_s())

    def share_of_others(self, since: _Moment) -> float:
        now = self.sample()
        others_s = (now.busy_s - since.busy_s) - (now.ours_s - since.ours_s)
        return others_s / ((now.at - since.at) * (psutil.cpu_count() or 1))

    def _ours_s(self) -> float:
        total_s = 0.0
        for root in self._roots:
            for process in (root, *root.children(recursive=True)):
                try:
                    times = process.cpu_times()
                except psutil.Error:  # the process has just exited
                    continue
                total_s += times.user + times.system
        return total_s
