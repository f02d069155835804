"""Worker processes of a contender: started together, let run in turns, stopped for sure."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.tally import Tally

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
ROOT = Path(__file__).resolve().parent.parent


class Crew:
    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], tally: Tally, log: Path) -> None:
        self._processes = processes
        self._tally = tally
        self._log = log

    def counts(self) -> list[int]:
        return self._tally.counts(len(self._processes))

    async def until_all_work(self) -> None:
        """Every process has taken its first task and waits at the gate."""
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while not all(self.counts()):
            self.check()
            if time.monotonic() > give_up_at:
                raise TimeoutError(f"a worker took no task in {START_TIMEOUT_S:g} s\n{self._last_words()}")
            await asyncio.sleep(0.01)

    def pause(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGCONT)

    def check(self) -> None:
        if any(process.poll() is not None for process in self._processes):
            raise ChildProcessError(f"a worker ended early\n{self._last_words()}")

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

    def _last_words(self) -> str:
        return self._log.read_text(errors="replace")[-2_000:]


@contextmanager
def crew(command: Sequence[str], processes: int, dsn: str, tally: Tally, log: Path) -> Iterator[Crew]:
    started = []
    with log.open("wb") as output:
        for slot in range(processes):
            environment = {**os.environ, **tally.environment(slot), "DATABASE_URL": dsn, "PYTHONPATH": str(ROOT)}
            started.append(
                subprocess.Popen(command, env=environment, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
            )
    running = Crew(started, tally, log)
    try:
        yield running
    finally:
        running.stop()


def python_module(name: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", name, *map(str, arguments)]
