"""Counters in shared memory, written by the handlers of every contender and read by the benchmark.

All contenders are measured at the same point by the same few instructions. The first call of each process waits for a
release, so that no process works before all have started.
"""

import mmap
import os
import struct
import time
from pathlib import Path

MAX_PROCESSES = 16
MAX_LATENCIES = 10_000
# A process that waits longer than this for the release was abandoned.
RELEASE_TIMEOUT_S = 120.0

_NUMBER = struct.Struct("q")
# One number per cache line: counting must not slow other processes down.
_LINE = 64
_RELEASE_AT = MAX_PROCESSES * _LINE
_LATENCIES_AT = _RELEASE_AT + _LINE
_SIZE = _LATENCIES_AT + (1 + MAX_LATENCIES) * _NUMBER.size


class SharedCounters:
    """The benchmark's side. `environment` is what the processes need to find it."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_SIZE))
        path.chmod(0o666)
        self._path = path
        self._memory = _open(path)

    def environment(self, slot: int) -> dict[str, str]:
        return {"BENCH_TALLY": str(self._path), "BENCH_SLOT": str(slot)}

    def counts(self, processes: int) -> list[int]:
        return [_NUMBER.unpack_from(self._memory, slot * _LINE)[0] for slot in range(processes)]

    def release(self) -> None:
        _NUMBER.pack_into(self._memory, _RELEASE_AT, 1)

    def latencies_ns(self) -> list[int]:
        (count,) = _NUMBER.unpack_from(self._memory, _LATENCIES_AT)
        return list(struct.unpack_from(f"{count}q", self._memory, _LATENCIES_AT + _NUMBER.size))


class _Mark:
    """The handler's side."""

    def __init__(self) -> None:
        self._memory = _open(Path(os.environ["BENCH_TALLY"]))
        self._at = int(os.environ["BENCH_SLOT"]) * _LINE
        self._count = 0

    def count(self) -> None:
        self._count += 1
        _NUMBER.pack_into(self._memory, self._at, self._count)
        if self._count == 1:
            self._wait_for_release()

    def arrived(self, sent_at_ns: int) -> None:
        latency_ns = time.monotonic_ns() - sent_at_ns
        _NUMBER.pack_into(self._memory, _LATENCIES_AT + (1 + self._count) * _NUMBER.size, latency_ns)
        self._count += 1
        _NUMBER.pack_into(self._memory, _LATENCIES_AT, self._count)

    def _wait_for_release(self) -> None:
        # Blocks the event loop on purpose: this process does nothing until all have started.
        deadline = time.monotonic() + RELEASE_TIMEOUT_S
        while not _NUMBER.unpack_from(self._memory, _RELEASE_AT)[0]:
            if time.monotonic() > deadline:
                raise TimeoutError("the benchmark never released its workers")
            time.sleep(0.002)


def _open(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), _SIZE)


if "BENCH_TALLY" in os.environ:
    _mark = _Mark()
    count = _mark.count
    arrived = _mark.arrived
