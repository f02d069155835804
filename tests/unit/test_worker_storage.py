"""Storage figures of a worker: those of the file system, or the sum of all files on an oversized one."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from windlass.worker import storage
from windlass.worker.storage import StorageReader

UNKNOWN = {"storage_used_bytes": None, "storage_free_bytes": None}


@pytest.fixture
def read() -> Iterator[Callable[[Path], StorageReader]]:
    readers = []

    def read(path: Path) -> StorageReader:
        readers.append(StorageReader(str(path), interval_s=0.01))
        readers[-1].start()
        return readers[-1]

    yield read
    for reader in readers:
        reader.stop()


def measured(reader: StorageReader) -> dict[str, int | None]:
    give_up_at = time.monotonic() + 10
    while reader.vitals() == UNKNOWN and time.monotonic() < give_up_at:
        time.sleep(0.005)
    return reader.vitals()


def test_usage_is_that_of_the_file_system(read: Callable[[Path], StorageReader]) -> None:
    vitals = measured(read(Path("/")))
    whole = os.statvfs("/")
    size = whole.f_blocks * whole.f_frsize
    used, free = vitals["storage_used_bytes"], vitals["storage_free_bytes"]
    assert used is not None
    assert free is not None
    assert 0 < used < size
    assert 0 < free <= size - used + 10**9


def test_files_on_oversized_file_system_are_summed(
    tmp_path: Path, read: Callable[[Path], StorageReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "MAX_VOLUME_BYTES", 1)
    monkeypatch.setattr(os.path, "ismount", lambda path: path == str(tmp_path))
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for folder in ("", "deep", "deep/er"):
        (tmp_path / folder / "file").write_bytes(os.urandom(100_000))
    (tmp_path / "loop").symlink_to(tmp_path)
    # Hard links, as package managers create them, count once.
    for number in range(20):
        (tmp_path / "deep" / f"name {number}").hardlink_to(tmp_path / "file")
    used = measured(read(tmp_path))["storage_used_bytes"]
    assert used is not None
    assert 300_000 <= used < 400_000


def test_path_that_is_no_mount_point_is_not_measured(
    tmp_path: Path, read: Callable[[Path], StorageReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = threading.Semaphore(0)
    is_mounted = False

    def check(_path: str) -> bool:
        checks.release()
        return is_mounted

    monkeypatch.setattr(os.path, "ismount", check)
    # A folder that is not a mount point is part of the machine's own disk.
    reader = read(tmp_path)
    for _ in range(3):
        assert checks.acquire(timeout=10)
    assert reader.vitals() == UNKNOWN
    is_mounted = True
    assert measured(reader) != UNKNOWN
    assert StorageReader(str(tmp_path)).vitals() == UNKNOWN
