"""How much memory the GPUs of this machine have and use, by NVML.

Read on a thread of its own: a broken driver can block the call for ever, and the heartbeat must not wait for it. Zero
is reported where a GPU is needed and none answers, be it that the very first look at it never ends, and where there is
an NVIDIA driver and none answers: zero means broken. Where there is no driver, and nobody needs one, nothing is
reported.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import pynvml

SAMPLE_INTERVAL_S = 5.0
# Short, so that a driver that hangs does not hold up the worker's start.
FIRST_LOOK_S = 2.0
# A sample older than this says nothing about now: the reading thread hangs.
SAMPLE_VALID_S = 60.0
_MIB = 1024 * 1024
_NOTHING = {"vram_total_mb": 0, "vram_used_mb": 0}


class GpuReader:
    """`is_needed`: without a GPU this machine is of no use. `on_change` is told, on the reader's thread, when
    `shows_gpu` has become another."""

    def __init__(self, *, is_needed: bool = False, on_change: Callable[[], None] = lambda: None) -> None:
        self._is_needed = is_needed
        self._on_change = on_change
        self._sample: tuple[float, dict[str, int]] | None = None
        self._started_at = time.monotonic()
        self._stopped = threading.Event()
        self._first_look = threading.Event()

    def start(self) -> None:
        self._started_at = time.monotonic()
        threading.Thread(target=self._read_forever, name="windlass-gpu", daemon=True).start()
        self._first_look.wait(FIRST_LOOK_S)

    def stop(self) -> None:
        self._stopped.set()

    def vitals(self) -> dict[str, int]:
        """`vram_total_mb` and `vram_used_mb` over all GPUs; empty where there is nothing (new) to say."""
        looked_at = self._started_at if self._sample is None else self._sample[0]
        is_hanging = time.monotonic() - looked_at > SAMPLE_VALID_S
        if self._sample is None:
            # Whoever has never seen a GPU, and needs one, has none: who says nothing is waited for, and paid for.
            return _NOTHING if self._is_needed and is_hanging else {}
        return {} if is_hanging else self._sample[1]

    @property
    def shows_gpu(self) -> bool:
        """By the last look, however long ago: one that hangs says neither that a GPU is there nor that it is gone."""
        return self._sample is not None and self._sample[1]["vram_total_mb"] > 0

    def _read_forever(self) -> None:
        is_open = False
        while not self._stopped.is_set():
            try:
                # Again and again: a driver may come late.
                is_open = is_open or _open()
            except pynvml.NVMLError_LibraryNotFound:
                if not self._is_needed:
                    self._first_look.set()
                    return
            had_gpu = self.shows_gpu
            self._sample = (time.monotonic(), _read() if is_open else _NOTHING)
            if self.shows_gpu != had_gpu:
                self._on_change()
            self._first_look.set()
            self._stopped.wait(SAMPLE_INTERVAL_S)


def _open() -> bool:
    """Whether the driver answers. Raises NVMLError_LibraryNotFound if there is none."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        raise
    except pynvml.NVMLError:
        return False
    return True


def _read() -> dict[str, int]:
    total = used = 0
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            memory = _memory(pynvml.nvmlDeviceGetHandleByIndex(index))
            total += int(memory.total)
            used += int(memory.used)
    except pynvml.NVMLError:
        return _NOTHING
    return {"vram_total_mb": total // _MIB, "vram_used_mb": used // _MIB}


def _memory(gpu: Any) -> Any:
    """As nvidia-smi counts it: the first form of the call adds what the driver keeps for itself to what is used."""
    try:
        return pynvml.nvmlDeviceGetMemoryInfo(gpu, version=pynvml.nvmlMemory_v2)
    except pynvml.NVMLError_FunctionNotFound:  # drivers before 510
        return pynvml.nvmlDeviceGetMemoryInfo(gpu)
