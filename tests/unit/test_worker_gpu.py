"""GPU figures of a worker: missing, broken, late and hanging drivers, and sums over all GPUs."""

import threading
from types import SimpleNamespace

import pynvml
import pytest

from windlass.worker import gpu
from windlass.worker.gpu import GpuReader

MIB = 1024 * 1024


@pytest.fixture(autouse=True)
def short_sample_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "SAMPLE_INTERVAL_S", 0.01)


def vitals_after_start(*, is_needed: bool = False) -> dict[str, int]:
    reader = GpuReader(is_needed=is_needed)
    reader.start()
    try:
        return reader.vitals()
    finally:
        reader.stop()


@pytest.mark.parametrize(("is_needed", "expected"), [(False, {}), (True, {"vram_total_mb": 0, "vram_used_mb": 0})])
def test_missing_nvml_library_reports_zero_only_if_gpu_is_needed(
    monkeypatch: pytest.MonkeyPatch, is_needed: bool, expected: dict[str, int]
) -> None:
    def init() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", init)
    assert vitals_after_start(is_needed=is_needed) == expected


def test_late_driver_and_vanished_gpu_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED]
    gpus = [SimpleNamespace(total=24 * MIB, used=5 * MIB)]
    changed = threading.Semaphore(0)

    def init() -> None:
        if errors:
            raise pynvml.NVMLError(errors.pop(0))

    monkeypatch.setattr(pynvml, "nvmlInit", init)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: len(gpus))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda index, **_: gpus[index])
    reader = GpuReader(is_needed=True, on_change=changed.release)
    try:
        reader.start()
        assert changed.acquire(timeout=30)
        assert reader.shows_gpu
        assert reader.vitals() == {"vram_total_mb": 24, "vram_used_mb": 5}
        gpus.clear()
        assert changed.acquire(timeout=30)
        assert not reader.shows_gpu
    finally:
        reader.stop()


def test_real_machine_without_driver_reports_nothing() -> None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        assert vitals_after_start() == {}
    else:
        pytest.skip("this machine has an NVIDIA driver")


def test_driver_that_is_not_loaded_reports_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    def count() -> int:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)

    monkeypatch.setattr(pynvml, "nvmlInit", init)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", count)
    assert vitals_after_start() == {"vram_total_mb": 0, "vram_used_mb": 0}


def test_memory_of_all_gpus_is_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [SimpleNamespace(total=24 * MIB, used=5 * MIB), SimpleNamespace(total=48 * MIB, used=7 * MIB)]
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: len(gpus))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda index, **_: gpus[index])
    assert vitals_after_start() == {"vram_total_mb": 72, "vram_used_mb": 12}


def test_old_driver_is_read_with_version_1_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def memory(_index: int, version: int | None = None) -> SimpleNamespace:
        if version is not None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return SimpleNamespace(total=24 * MIB, used=5 * MIB)

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 1)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", memory)
    assert vitals_after_start() == {"vram_total_mb": 24, "vram_used_mb": 5}


def test_hanging_driver_blocks_nothing_and_old_sample_expires(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_hanging, may_continue = threading.Event(), threading.Event()
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        if calls > 1:
            is_hanging.set()
            may_continue.wait(30)
        return 0

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", count)
    reader = GpuReader()
    try:
        reader.start()
        assert is_hanging.wait(30)
        assert reader.vitals() == {"vram_total_mb": 0, "vram_used_mb": 0}
        monkeypatch.setattr(gpu, "SAMPLE_VALID_S", 0.0)
        assert reader.vitals() == {}
    finally:
        reader.stop()
        may_continue.set()


@pytest.mark.parametrize(("is_needed", "expected"), [(False, {}), (True, {"vram_total_mb": 0, "vram_used_mb": 0})])
def test_driver_hanging_at_first_read_counts_as_no_gpu_if_needed(
    monkeypatch: pytest.MonkeyPatch, is_needed: bool, expected: dict[str, int]
) -> None:
    may_continue = threading.Event()
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: may_continue.wait(30))
    monkeypatch.setattr(gpu, "FIRST_SAMPLE_TIMEOUT_S", 0.01)
    reader = GpuReader(is_needed=is_needed)
    try:
        reader.start()
        # It may only be slow, so nothing is reported within SAMPLE_VALID_S.
        assert reader.vitals() == {}
        monkeypatch.setattr(gpu, "SAMPLE_VALID_S", 0.0)
        assert reader.vitals() == expected
        assert not reader.shows_gpu
    finally:
        reader.stop()
        may_continue.set()
