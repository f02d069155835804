"""How tests are distributed over the processes of a run, and that tests with Ray wait for each other."""

import fcntl
import os
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from support import scheduling
from support.postgres_servers import wait_until
from support.scheduling import LONG_S, RAY, distributed

TESTS = Path(__file__).parents[1]
LOCKS = Path("/proc/locks")
LIMIT_S = 30.0


class Item:
    def __init__(self, file: str, *, has_ray: bool = False) -> None:
        self.path = TESTS / file
        self.file = file
        self.has_ray = has_ray

    def get_closest_marker(self, name: str) -> object:
        return object() if self.has_ray and name == RAY else None


def parts_of(items: list[Any], processes: int) -> list[list[Any]]:
    """What each process gets from `--dist worksteal`."""
    left, parts = distributed(items, processes), []
    for number in range(processes):
        size = len(left) // (processes - number)
        parts.append(left[:size])
        left = left[size:]
    return parts


def test_every_process_begins_with_its_share_of_the_long_files() -> None:
    long = [file for file in LONG_S if file != RAY]
    items = [Item(f"unit/test_{number // 10}.py") for number in range(500)] + [Item(file) for file in long]
    items += [Item("ray/test_ray.py", has_ray=True), Item("e2e/test_examples.py", has_ray=True)]
    parts = parts_of(items, 4)
    assert Counter(map(id, items)) == Counter(id(item) for part in parts for item in part)
    with_ray = [sum(item.has_ray for item in part) for part in parts]
    assert sorted(with_ray) == [0, 0, 0, 2], "all tests with Ray in one process"
    for part in parts:
        is_long = [item.has_ray or item.file in LONG_S for item in part]
        assert any(is_long)
        assert is_long == sorted(is_long, reverse=True)
        others = [item.file for item in part if item.file not in LONG_S and not item.has_ray]
        assert others == sorted(others, key=lambda file: int(file[10:-3])), "other files keep their order"


def test_every_long_file_exists() -> None:
    assert [file for file in LONG_S if file != RAY and not (TESTS / file).is_file()] == []


def test_tests_with_ray_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    begun = threading.Event()

    def run() -> None:
        steps: Any = scheduling.pytest_runtest_protocol(Item("ray/test_ray.py", has_ray=True))  # type: ignore[arg-type]
        next(steps)
        begun.set()
        steps.close()

    with (tmp_path / f"windlass-tests-ray-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=run)
        thread.start()
        # The system lists a process that waits for a lock with an arrow.
        wait_until(lambda: f"-> FLOCK  ADVISORY  WRITE {os.getpid()} " in LOCKS.read_text(), LIMIT_S, "waiting")
        assert not begun.is_set()
    assert begun.wait(LIMIT_S)
    thread.join(LIMIT_S)
