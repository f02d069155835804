"""Generated documentation is current: command line, routes, state diagrams."""

import asyncio
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from windlass.model.task import TaskStatus
from windlass.model.worker import WorkerStatus

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "tools" / "reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["reference"] = module
    spec.loader.exec_module(module)
    return module


def test_generated_documentation_is_current(reference: ModuleType, dsn: str) -> None:
    outdated = [str(path.relative_to(ROOT)) for path in reference.outdated(dsn)]
    assert outdated == [], "run: python tools/reference.py"


def test_task_transitions_are_those_of_the_queue(reference: ModuleType, dsn: str) -> None:
    found = {(each.before, each.after) for each in asyncio.run(reference.task_transitions(dsn))}
    assert ("queued", "running") in found
    assert ("running", "complete") in found
    # A complete task never changes again.
    assert not [pair for pair in found if pair[0] == TaskStatus.COMPLETE]
    assert {state for pair in found for state in pair} == set(TaskStatus)


def test_worker_transitions_name_every_status(reference: ModuleType) -> None:
    found = {(each.before, each.after) for each in reference.worker_transitions()}
    assert {state for pair in found for state in pair} == set(WorkerStatus)
    assert not [pair for pair in found if pair[0] == WorkerStatus.TERMINATED]


def test_reference_has_every_command_and_route(reference: ModuleType) -> None:
    commands = reference.cli_reference()
    assert "## windlass explain\n\nExplain the state of a task, a worker or a fleet." in commands
    assert "### windlass tasks retry\n" in commands
    assert "| `--port PORT` |" in commands
    routes = reference.http_reference()
    paths = reference.openapi_description()["paths"]
    assert len(paths) > 20
    assert [path for path in paths if f" {path}\n" not in routes] == []
