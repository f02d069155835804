"""`windlass demo` with local workers."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from support.command_line import CommandLine
from support.postgres_servers import wait_until

CLEANUP_TIMEOUT_S = 60.0


@pytest.fixture
def windlass(reachable_path: Path) -> CommandLine:
    (reachable_path / "tmp").mkdir()
    # The demo ignores the settings of its user.
    (reachable_path / "windlass.toml").write_text("nonsense")
    nonsense = {"DATABASE_URL": "nonsense", "WINDLASS_NONSENSE": "1", "MAX_ACTIVE_GPUS": "0"}
    return CommandLine(reachable_path, {"TMPDIR": str(reachable_path / "tmp"), **nonsense})


def leftovers_of(windlass: CommandLine) -> list[str]:
    """Files in the folder, and processes that name it in their environment or command line."""
    found = [str(path) for path in (windlass.folder / "tmp").iterdir()]
    for process in psutil.process_iter():
        try:
            words = " ".join(process.cmdline())
            names = words + " ".join(process.environ().values())
        except psutil.Error:
            continue
        if str(windlass.folder) in names and process.pid != os.getpid():
            found.append(words)
    return found


def test_demo_passes_its_checks_and_leaves_nothing(windlass: CommandLine) -> None:
    done = windlass("demo", "--json", "--workers", 3, "--tasks", 60)
    report = done.json
    assert report["problems"] == []
    assert (report["enqueued"], report["complete"]) == (60, 59)
    assert (report["accepted_once"], report["accepted_twice"]) == (59, 0)
    assert report["failed_tasks"] == [report["poisonous_task_id"]]
    assert len(set(report["poisoned_worker_ids"])) == 3
    assert report["attempts"] == 59 + report["lost_attempts"]
    assert report["worker_ended_as"] == "MACHINE_GONE"
    assert report["completed_by"] not in (None, report["killed_worker_id"])
    assert report["workers_left"] == 1
    assert leftovers_of(windlass) == []


def test_failed_check_is_reported_with_exit_code_1(windlass: CommandLine) -> None:
    arguments = ("demo", "--tasks", 50, "--workers", 2)
    with windlass.start(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        data_dir = next(filter(None, (re.search(r"starting PostgreSQL in (\S+)", line) for line in process.stdout)))[1]
        assert any("50 tasks enqueued" in line for line in process.stdout)
        # Cancel a task, so that it cannot complete.
        assert CommandLine(windlass.folder / "tmp")("tasks", "cancel", 50, "--data-dir", data_dir).code == 0
        printed, problem = process.stdout.read(), process.stderr.read()
    assert process.returncode == 1, printed
    assert "windlass: demo check failed: 48 of 49 tasks are complete." in problem
    assert leftovers_of(windlass) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_interrupted_demo_leaves_nothing(windlass: CommandLine, number: signal.Signals) -> None:
    with windlass.start("demo", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert any("200 tasks enqueued" in line for line in process.stdout), process.stderr.read()
        process.send_signal(number)
        assert process.stderr.read() == ""
    assert process.returncode == (-number if number is signal.SIGKILL else 128 + number)
    # After SIGKILL the clean-up process continues alone. Otherwise the demo waits for it.
    if number is signal.SIGKILL:
        wait_until(lambda: not leftovers_of(windlass), CLEANUP_TIMEOUT_S, "cleaning up")
    assert leftovers_of(windlass) == []


def test_kept_demo_runs_until_ctrl_c(windlass: CommandLine) -> None:
    arguments = ("demo", "--keep", "--tasks", 50, "--workers", 2)
    with windlass.start(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        suggestion = re.compile(r"^ +(.+) status --watch --data-dir (\S+)$")
        shown = next(filter(None, map(suggestion.search, process.stdout)))
        assert shown[1] == f"{sys.executable} -m windlass"
        link = next(line for line in process.stdout if "dashboard: " in line)
        assert "/login?key=wll_" in link
        try:
            check_status(CommandLine(windlass.folder / "tmp"), shown[2])
        finally:
            process.send_signal(signal.SIGINT)
        assert "stopping and deleting everything" in process.stdout.read()
    assert process.returncode == 0
    assert leftovers_of(windlass) == []


def check_status(windlass: CommandLine, data_dir: str) -> None:
    """From another terminal."""
    status = windlass("status", "--json", "--data-dir", data_dir).json
    assert [(fleet["name"], fleet["min_workers"], fleet["hold"]) for fleet in status["fleets"]] == [("demo", 1, None)]
    assert [worker["status"] for worker in status["workers"]] == ["active"]
    assert "Fleet demo" in windlass("explain", "demo", "--data-dir", data_dir).out
