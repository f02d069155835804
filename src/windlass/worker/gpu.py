"""Reads the total and used memory of this machine's GPUs through NVML.

Reading has its own thread, because a broken driver can block a call forever and must not delay the heartbeat. Zero
means broken: an NVIDIA driver is installed, or the worker needs a GPU, and no GPU responds (even if the first read
hangs). Without a driver and without the need for a GPU nothing is reported.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import pynvml

SAMPLE_INTERVAL_S = 5.0
# Short, so that a hanging driver does not delay the worker's start.
FIRST_SAMPLE_TIMEOUT_S = 2.0
# An older sample is not reported: the reading thread hangs.
SAMPLE_VALID_S = 60.0
_MIB = 1024 * 1024
_NO_GPU = {"vram_total_mb": 0, "vram_used_mb": 0}


class GpuReader:
    """`is_needed`: the worker requires a GPU. `on_change` runs on the reader's thread when `shows_gpu` changes."""

    def __init__(self, *, is_needed: bool = False, on_change: Callable[[], None] = lambda: None) -> None:
        self._is_needed = is_needed
        self._on_change = on_change
        self._sample: tuple[float, dict[str, int]] | None = None
        self._started_at = time.monotonic()
        self._stopped = threading.Event()
        self._has_sample = threading.Event()

    def start(self) -> None:
        self._started_at = time.monotonic()
        threading.Thread(target=self._read_forever, name="windlass-gpu", daemon=True).start()
        self._has_sample.wait(FIRST_SAMPLE_TIMEOUT_S)

    def stop(self) -> None:
        self._stopped.set()

    def vitals(self) -> dict[str, int]:
        """`vram_total_mb` and `vram_used_mb` over all GPUs; empty if there is no recent sample."""
        sampled_at = self._started_at if self._sample is None else self._sample[0]
        is_hanging = time.monotonic() - sampled_at > SAMPLE_VALID_S
        if self._sample is None:
            # The first read hangs. Report no GPU: a silent worker would be kept, and billed, for longer.
            return _NO_GPU if self._is_needed and is_hanging else {}
        return {} if is_hanging else self._sample[1]

    @property
    def shows_gpu(self) -> bool:
        """Whether the last sample, however old, found a GPU. A hanging read proves neither presence nor absence."""
        return self._sample is not None and self._sample[1]["vram_total_mb"] > 0

    def _read_forever(self) -> None:
        is_open = False
        while not self._stopped.is_set():
            try:
                # Repeated until it succeeds: a driver may be loaded late.
                is_open = is_open or _open()
            except pynvml.NVMLError_LibraryNotFound:
                if not self._is_needed:
                    self._has_sample.set()
                    return
            had_gpu = self.shows_gpu
            self._sample = (time.monotonic(), _read() if is_open else _NO_GPU)
            if self.shows_gpu != had_gpu:
                self._on_change()
            self._has_sample.set()
            self._stopped.wait(SAMPLE_INTERVAL_S)


def _open() -> bool:
    """Whether the driver responds. Raises NVMLError_LibraryNotFound if there is none."""
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
        return _NO_GPU
    return {"vram_total_mb": total // _MIB, "vram_used_mb": used // _MIB}


def _memory(gpu: Any) -> Any:
    """The figures of nvidia-smi. Version 1 of the call counts the driver's reserved memory as used."""
    try:
        return pynvml.nvmlDeviceGetMemoryInfo(gpu, version=pynvml.nvmlMemory_v2)
    except pynvml.NVMLError_FunctionNotFound:  # drivers before 510
        return pynvml.nvmlDeviceGetMemoryInfo(gpu)
