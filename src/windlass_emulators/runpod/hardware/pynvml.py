"""Replaces NVIDIA's NVML module inside an emulated pod, with the functions that a worker calls."""

from collections.abc import Callable
from typing import Any, NoReturn

import readings

NVML_ERROR_UNINITIALIZED = 1
NVML_ERROR_INVALID_ARGUMENT = 2
NVML_ERROR_NOT_SUPPORTED = 3
NVML_ERROR_NOT_FOUND = 6
NVML_ERROR_LIBRARY_NOT_FOUND = 12
NVML_ERROR_FUNCTION_NOT_FOUND = 13
nvmlMemory_v2 = 0x02000028  # noqa: N816
_MIB = 1024 * 1024


class NVMLError(Exception):
    def __init__(self, value: int = NVML_ERROR_NOT_SUPPORTED) -> None:
        super().__init__(f"NVML error {value} (emulated)")
        self.value = value


class NVMLError_LibraryNotFound(NVMLError):
    def __init__(self) -> None:
        super().__init__(NVML_ERROR_LIBRARY_NOT_FOUND)


class NVMLError_NotFound(NVMLError):
    def __init__(self) -> None:
        super().__init__(NVML_ERROR_NOT_FOUND)


class NVMLError_FunctionNotFound(NVMLError):
    def __init__(self) -> None:
        super().__init__(NVML_ERROR_FUNCTION_NOT_FOUND)


class _Memory:
    def __init__(self, total: int, used: int) -> None:
        self.total, self.used, self.free = total, used, total - used


class _Utilization:
    gpu = memory = 0


def nvmlInit() -> None:
    if not readings.read()["has_driver"]:
        raise NVMLError_LibraryNotFound


def nvmlShutdown() -> None: ...


def nvmlSystemGetDriverVersion() -> str:
    return str(readings.read()["driver"])


def nvmlDeviceGetCount() -> int:
    return len(readings.read()["gpus"])


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    if index >= nvmlDeviceGetCount():
        raise NVMLError_NotFound
    return index


def nvmlDeviceGetName(handle: int) -> str:
    return str(_gpu(handle)["name"])


def nvmlDeviceGetUUID(handle: int) -> str:
    return f"GPU-{handle:08x}"


def nvmlDeviceGetMemoryInfo(handle: int, version: int | None = None) -> _Memory:  # noqa: ARG001
    gpu = _gpu(handle)
    return _Memory(gpu["total_mb"] * _MIB, gpu["used_mb"] * _MIB)


def nvmlDeviceGetUtilizationRates(handle: int) -> _Utilization:
    _gpu(handle)
    return _Utilization()


def _gpu(handle: int) -> dict[str, Any]:
    try:
        gpu: dict[str, Any] = readings.read()["gpus"][handle]
        return gpu
    except IndexError:
        # The GPU was lost meanwhile.
        raise NVMLError_NotFound from None


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """Every other NVML function raises NVML_ERROR_NOT_SUPPORTED."""
    if not name.startswith("nvml"):
        raise AttributeError(name)

    def unsupported(*_: object, **__: object) -> NoReturn:
        raise NVMLError

    return unsupported
