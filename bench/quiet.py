"""Knows how much of the machine others use, so that a figure taken beside somebody else's work can be taken again."""

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

# Of all cores together. Below this, others are the background of any machine.
QUIET_SHARE = 0.1
LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class _Moment:
    at: float
    busy_s: float
    ours_s: float


class Onlooker:
    """`patience_s`: how long to wait for a quiet machine, for each figure. 0: take them as they come."""

    def __init__(self, postgres_data: Path, patience_s: float) -> None:
        postmaster = int((postgres_data / "postmaster.pid").read_text().split()[0])
        self._roots = [psutil.Process(os.getpid()), psutil.Process(postmaster)]
        self._patience_s = patience_s

    def give_up_at(self) -> float:
        return time.monotonic() + self._patience_s

    async def until_quiet(self, give_up_at: float) -> None:
        while time.monotonic() < give_up_at:
            before = self.look()
            await asyncio.sleep(LOOK_S)
            if self.share_of_others(before) < QUIET_SHARE:
                return

    def look(self) -> _Moment:
        times = psutil.cpu_times()
        busy_s = sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)
        return _Moment(time.monotonic(), busy_s, self._ours_s())

    def share_of_others(self, since: _Moment) -> float:
        now = self.look()
        others_s = (now.busy_s - since.busy_s) - (now.ours_s - since.ours_s)
        return others_s / ((now.at - since.at) * (psutil.cpu_count() or 1))

    def _ours_s(self) -> float:
        total_s = 0.0
        for root in self._roots:
            for process in (root, *root.children(recursive=True)):
                try:
                    times = process.cpu_times()
                except psutil.Error:  # it has just ended
                    continue
                total_s += times.user + times.system
        return total_s
