"""Distributes the tests over the processes of pytest-xdist, and runs tests with Ray one at a time.

`--dist worksteal` gives each process an equal number of tests, in the order of their collection. A process that has
none left takes the second half of those of another. So the long files come first in each part, and what is left for
the end is short. Long files wait for processes and limits most of the time; short ones need a processor.
"""

import fcntl
import os
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

# A Ray cluster has twenty processes. Two at once would be too slow for each other's limits.
RAY = "ray"
# Files that take more than about 20 s on two quiet cores, in seconds. Rough figures are enough.
LONG_S = {
    # All tests with Ray, one after another.
    RAY: 360,
    "e2e/test_first_cloud_fleet.py": 135,
    "e2e/test_runpod_installation.py": 110,
    "e2e/test_worker_life.py": 90,
    "e2e/test_hetzner.py": 75,
    "e2e/test_demo.py": 70,
    "postgres/test_control_processes.py": 60,
    "e2e/test_key_rotation_in_up.py": 50,
    "e2e/test_quickstart.py": 50,
    "e2e/test_runpod_demo.py": 47,
    "e2e/test_runpod_fleet.py": 45,
    "e2e/test_release_files.py": 45,
    "e2e/test_rolling_deploy.py": 40,
    "e2e/test_worker_loss.py": 40,
    "e2e/test_worker_over_http.py": 40,
    "e2e/test_fleet_restarts.py": 35,
    "e2e/test_hetzner_http.py": 35,
    "e2e/test_move_in.py": 28,
    "e2e/test_rollback_of_settings.py": 28,
    "e2e/test_worker_logs.py": 28,
    "e2e/test_fleet_configuration.py": 25,
    "e2e/test_runpod_ssh.py": 25,
    "e2e/test_server_processes.py": 25,
    "e2e/test_up_http_server.py": 25,
    "browser/test_pages.py": 60,
    "conformance/test_lost_workers.py": 30,
    "conformance/test_store_histories.py": 30,
    "simulator/test_storms.py": 40,
}
_TESTS = Path(__file__).parents[1]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        items[:] = distributed(items, worker["workercount"])


def distributed(items: list[pytest.Item], processes: int) -> list[pytest.Item]:
    """The tests of each process, one process after another: its share of the long files, then others."""
    long: dict[str, list[pytest.Item]] = {}
    others: list[pytest.Item] = []
    for item in items:
        unit = _unit(item)
        (others if unit is None else long.setdefault(unit, [])).append(item)
    parts: list[list[pytest.Item]] = [[] for _ in range(processes)]
    loads = [0.0] * processes
    for unit in sorted(long, key=LONG_S.__getitem__, reverse=True):
        least = loads.index(min(loads))
        parts[least] += long[unit]
        loads[least] += LONG_S[unit]
    others.reverse()
    found: list[pytest.Item] = []
    for number, part in enumerate(parts):
        # The number of tests that xdist gives to this process.
        size = (len(items) - len(found)) // (processes - number)
        found += part
        while len(part) < size and others:
            part.append(others.pop())
            found.append(part[-1])
    return found


def _unit(item: pytest.Item) -> str | None:
    """The file of a test if it is long, and one name for all tests with Ray."""
    if item.get_closest_marker(RAY):
        return RAY
    file = item.path.relative_to(_TESTS).as_posix() if item.path.is_relative_to(_TESTS) else ""
    return file if file in LONG_S else None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if item.get_closest_marker(RAY) is None:
        return (yield)
    # The system releases it with the process, however that ends, and a test that holds it has a time limit.
    path = Path(tempfile.gettempdir()) / f"windlass-tests-ray-{os.getuid()}.lock"
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return (yield)
