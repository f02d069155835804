"""Worker processes of a contender: started together, paused and resumed by signals, always stopped."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.shared_counters import SharedCounters

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
ROOT = Path(__file__).resolve().parent.parent


class WorkerProcesses:
    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], counters: SharedCounters, log: Path) -> None:
        self._processes = processes
        self._tally = counters
        self._log = log

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def counts(self) -> list[int]:
        return self._tally.counts(len(self._processes))

    async def wait_until_all_started(self) -> None:
        """Wait until every process has taken its first task and waits for the release."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not all(self.counts()):
            self.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"no task taken by a worker in {START_TIMEOUT_S:g} s\n{self._log_tail()}")
            await asyncio.sleep(0.01)

    def pause(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGCONT)

    def check(self) -> None:
        if any(process.poll() is not None for process in self._processes):
            raise ChildProcessError(f"a worker exited early\n{self._log_tail()}")

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()
        self.resume()
        for process in self._processes:
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _log_tail(self) -> str:
        return self._log.read_text(errors="replace")[-2_000:]


@contextmanager
def worker_processes(
    command: Sequence[str], processes: int, dsn: str, counters: SharedCounters, log: Path
) -> Iterator[WorkerProcesses]:
    started = []
    with log.open("wb") as output:
        for slot in range(processes):
            environment = {**os.environ, **counters.environment(slot), "DATABASE_URL": dsn, "PYTHONPATH": str(ROOT)}
            started.append(
                subprocess.Popen(command, env=environment, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
            )
    running = WorkerProcesses(started, counters, log)
    try:
        yield running
    finally:
        running.stop()


def python_module(name: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", name, *map(str, arguments)]
