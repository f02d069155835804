"""How much memory the GPUs of this machine have and use, by NVML.

Read on a thread of its own: a broken driver can block the call for ever, and the heartbeat must not wait for it. Where
there is no NVIDIA driver nothing is reported; where there is one but no GPU answers, zero is, and zero means broken.
"""

import threading
import time
from typing import Any

import pynvml

SAMPLE_INTERVAL_S = 5.0
# A sample older than this says nothing about now: the reading thread hangs.
SAMPLE_VALID_S = 60.0
_MIB = 1024 * 1024


class GpuReader:
    def __init__(self) -> None:
        self._sample: tuple[float, dict[str, int]] | None = None
        self._stopped = threading.Event()
        self._first_look = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._read_forever, name="windlass-gpu", daemon=True).start()
        # Short, so that a driver that hangs does not hold up the worker's start.
        self._first_look.wait(2.0)

    def stop(self) -> None:
        self._stopped.set()

    def vitals(self) -> dict[str, int]:
        """`vram_total_mb` and `vram_used_mb` over all GPUs; empty where there is nothing (new) to say."""
        if self._sample is None or time.monotonic() - self._sample[0] > SAMPLE_VALID_S:
            return {}
        return self._sample[1]

    def _read_forever(self) -> None:
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError_LibraryNotFound:
            self._first_look.set()
            return
        except pynvml.NVMLError:
            pass  # a driver that does not start: each look below says zero
        while not self._stopped.is_set():
            self._sample = (time.monotonic(), _read())
            self._first_look.set()
            self._stopped.wait(SAMPLE_INTERVAL_S)


def _read() -> dict[str, int]:
    total = used = 0
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            memory = _memory(pynvml.nvmlDeviceGetHandleByIndex(index))
            total += int(memory.total)
            used += int(memory.used)
    except pynvml.NVMLError:
        return {"vram_total_mb": 0, "vram_used_mb": 0}
    return {"vram_total_mb": total // _MIB, "vram_used_mb": used // _MIB}


def _memory(gpu: Any) -> Any:
    """As nvidia-smi counts it: the first form of the call adds what the driver keeps for itself to what is used."""
    try:
        return pynvml.nvmlDeviceGetMemoryInfo(gpu, version=pynvml.nvmlMemory_v2)
    except pynvml.NVMLError_FunctionNotFound:  # drivers before 510
        return pynvml.nvmlDeviceGetMemoryInfo(gpu)
