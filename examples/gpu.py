"""A task that takes GPU memory and holds it for a while, to see it in the worker's heartbeat.

In one terminal, from this folder:    windlass worker --queue gpu --handler gpu:hold
In another:                           windlass enqueue gpu '{"mib": 4096, "seconds": 60}'
                                      windlass workers list; nvidia-smi
"""

import ctypes
import time

from windlass import RunningTask


def hold(task: RunningTask) -> dict[str, int]:
    """Through CUDA's driver alone, so that it needs no framework."""
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    size = ctypes.c_size_t(task.payload["mib"] * 1024 * 1024)
    _check("cuInit", cuda.cuInit(0))
    _check("cuDeviceGet", cuda.cuDeviceGet(ctypes.byref(device), 0))
    _check("cuCtxCreate", cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device))
    try:
        _check("cuMemAlloc", cuda.cuMemAlloc_v2(ctypes.byref(address), size))
        task.progress(0.5, f"holding {task.payload['mib']} MiB")
        time.sleep(task.payload["seconds"])
    finally:
        cuda.cuCtxDestroy_v2(context)
    return {"held_mib": task.payload["mib"]}


def _check(call: str, result: int) -> None:
    if result != 0:
        raise RuntimeError(f"{call} answered {result}")
