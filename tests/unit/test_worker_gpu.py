"""What a worker says about GPUs: nothing without a driver, unless one is needed; zero if it is broken, sums otherwise,
never a wait."""

import threading
from types import SimpleNamespace

import pynvml
import pytest

from windlass.worker import gpu
from windlass.worker.gpu import GpuReader

MIB = 1024 * 1024


@pytest.fixture(autouse=True)
def short_first_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "SAMPLE_INTERVAL_S", 0.01)


def vitals_after_start(*, is_needed: bool = False) -> dict[str, int]:
    reader = GpuReader(is_needed=is_needed)
    reader.start()
    try:
        return reader.vitals()
    finally:
        reader.stop()


@pytest.mark.parametrize(("is_needed", "said"), [(False, {}), (True, {"vram_total_mb": 0, "vram_used_mb": 0})])
def test_without_the_nvml_library_nothing_is_said_but_where_a_gpu_is_needed(
    monkeypatch: pytest.MonkeyPatch, is_needed: bool, said: dict[str, int]
) -> None:
    def init() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", init)
    assert vitals_after_start(is_needed=is_needed) == said


def test_a_driver_that_comes_late_and_a_gpu_that_goes_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED]
    cards = [SimpleNamespace(total=24 * MIB, used=5 * MIB)]
    changed = threading.Semaphore(0)

    def init() -> None:
        if errors:
            raise pynvml.NVMLError(errors.pop(0))

    monkeypatch.setattr(pynvml, "nvmlInit", init)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: len(cards))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda index, **_: cards[index])
    reader = GpuReader(is_needed=True, on_change=changed.release)
    try:
        reader.start()
        assert changed.acquire(timeout=30)
        assert reader.shows_gpu
        assert reader.vitals() == {"vram_total_mb": 24, "vram_used_mb": 5}
        cards.clear()
        assert changed.acquire(timeout=30)
        assert not reader.shows_gpu
    finally:
        reader.stop()


def test_on_this_machine_which_has_no_driver_nothing_is_said() -> None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        assert vitals_after_start() == {}
    else:
        pytest.skip("this machine has an NVIDIA driver")


def test_a_driver_that_does_not_start_counts_as_no_memory_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    def count() -> int:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)

    monkeypatch.setattr(pynvml, "nvmlInit", init)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", count)
    assert vitals_after_start() == {"vram_total_mb": 0, "vram_used_mb": 0}


def test_the_memory_of_all_gpus_is_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [SimpleNamespace(total=24 * MIB, used=5 * MIB), SimpleNamespace(total=48 * MIB, used=7 * MIB)]
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: len(cards))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda index, **_: cards[index])
    assert vitals_after_start() == {"vram_total_mb": 72, "vram_used_mb": 12}


def test_an_old_driver_is_asked_in_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def memory(_index: int, version: int | None = None) -> SimpleNamespace:
        if version is not None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return SimpleNamespace(total=24 * MIB, used=5 * MIB)

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 1)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", memory)
    assert vitals_after_start() == {"vram_total_mb": 24, "vram_used_mb": 5}


def test_a_driver_that_hangs_holds_nobody_up_and_what_it_once_said_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_hanging, may_go_on = threading.Event(), threading.Event()
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        if calls > 1:
            is_hanging.set()
            may_go_on.wait(30)
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
        may_go_on.set()


@pytest.mark.parametrize(("is_needed", "said"), [(False, {}), (True, {"vram_total_mb": 0, "vram_used_mb": 0})])
def test_a_driver_that_hangs_at_the_very_first_look_is_no_gpu_where_one_is_needed(
    monkeypatch: pytest.MonkeyPatch, is_needed: bool, said: dict[str, int]
) -> None:
    may_go_on = threading.Event()
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: may_go_on.wait(30))
    monkeypatch.setattr(gpu, "FIRST_SAMPLE_TIMEOUT_S", 0.01)
    reader = GpuReader(is_needed=is_needed)
    try:
        reader.start()
        # It may be slow: within its time nothing is said.
        assert reader.vitals() == {}
        monkeypatch.setattr(gpu, "SAMPLE_VALID_S", 0.0)
        assert reader.vitals() == said
        assert not reader.shows_gpu
    finally:
        reader.stop()
        may_go_on.set()
