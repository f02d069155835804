"""What a worker tells of storage: a real file system's figures, or the sum of what is in a part of a very large one."""

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


def test_it_is_what_the_file_system_says(read: Callable[[Path], StorageReader]) -> None:
    vitals = measured(read(Path("/")))
    whole = os.statvfs("/")
    size = whole.f_blocks * whole.f_frsize
    used, free = vitals["storage_used_bytes"], vitals["storage_free_bytes"]
    assert used is not None
    assert free is not None
    assert 0 < used < size
    assert 0 < free <= size - used + 10**9


def test_of_a_file_system_larger_than_any_volume_what_is_in_it_is_added_up(
    tmp_path: Path, read: Callable[[Path], StorageReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "MAX_VOLUME_BYTES", 1)
    monkeypatch.setattr(os.path, "ismount", lambda path: path == str(tmp_path))
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for folder in ("", "deep", "deep/er"):
        (tmp_path / folder / "file").write_bytes(os.urandom(100_000))
    (tmp_path / "loop").symlink_to(tmp_path)
    # A file of many names, as package managers make them, takes its place once.
    for number in range(20):
        (tmp_path / "deep" / f"name {number}").hardlink_to(tmp_path / "file")
    used = measured(read(tmp_path))["storage_used_bytes"]
    assert used is not None
    assert 300_000 <= used < 400_000


def test_what_is_not_mounted_is_not_measured(
    tmp_path: Path, read: Callable[[Path], StorageReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = threading.Semaphore(0)
    is_mounted = False

    def look(_path: str) -> bool:
        looks.release()
        return is_mounted

    monkeypatch.setattr(os.path, "ismount", look)
    # A folder that is there and not mounted is a part of the machine's own disk.
    reader = read(tmp_path)
    for _ in range(3):
        assert looks.acquire(timeout=10)
    assert reader.vitals() == UNKNOWN
    is_mounted = True
    assert measured(reader) != UNKNOWN
    assert StorageReader(str(tmp_path)).vitals() == UNKNOWN
