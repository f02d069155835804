"""Ends a test that does not end at its time limit.

pytest-timeout raises an error in the test once. A test that swallows it, or waits for a task that swallows its
cancellation, would never end. Here the process of such a test prints its stacks and exits, LATE_S after the limit;
pytest-xdist reports the test as failed and goes on with the others in a new process.
"""

import faulthandler
import os
from collections.abc import Generator

import pytest

# For the clean-up of a test that failed at its limit, on a machine that is six times overloaded.
LATE_S = 60.0
_stderr = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        with capture.global_and_fixture_disabled():
            config.stash[_stderr] = os.dup(2)


def limit_of(item: pytest.Item) -> float:
    """The time limit of a test in seconds. 0: none."""
    marker = item.get_closest_marker("timeout")
    if marker is not None:
        return float(marker.args[0] if marker.args else marker.kwargs["timeout"])
    given = item.config.getoption("timeout")
    return float(item.config.getini("timeout") or 0.0) if given is None else float(given)


def exit_after(item: pytest.Item, delay_s: float) -> None:
    late_s = float(os.environ.get("WINDLASS_TEST_LATE_S", "0")) or LATE_S
    faulthandler.dump_traceback_later(delay_s + late_s, exit=True, file=item.config.stash.get(_stderr, 2))


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    limit_s = limit_of(item)
    if limit_s == 0 or item.config.getoption("usepdb"):
        return (yield)
    exit_after(item, limit_s)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """The test failed, perhaps at its limit; its clean-up may hang. pytest has just cancelled the exit."""
    if isinstance(node, pytest.Item) and limit_of(node) > 0 and not node.config.getoption("usepdb"):
        exit_after(node, 0.0)
