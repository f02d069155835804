"""`windlass demo`, as `make demo` runs it."""

import os
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from support.command_line import CommandLine
from support.postgres_servers import wait_until

TIDY_TIMEOUT_S = 30.0


@pytest.fixture
def windlass(reachable_path: Path) -> CommandLine:
    (reachable_path / "tmp").mkdir()
    # Whatever is set around it has no say.
    (reachable_path / "windlass.toml").write_text("nonsense")
    nonsense = {"DATABASE_URL": "nonsense", "WINDLASS_NONSENSE": "1", "MAX_ACTIVE_GPUS": "0"}
    return CommandLine(reachable_path, {"TMPDIR": str(reachable_path / "tmp"), **nonsense})


def remains_of(windlass: CommandLine) -> list[str]:
    """Files, and processes of which the environment or the command line names the folder."""
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


def test_it_hires_heals_buries_and_lets_go_and_nothing_stays_behind(windlass: CommandLine) -> None:
    done = windlass("demo", "--json", "--workers", 3, "--tasks", 60)
    report = done.json
    assert report["problems"] == []
    assert (report["enqueued"], report["complete"]) == (60, 59)
    assert (report["accepted_once"], report["accepted_twice"]) == (59, 0)
    assert report["dead_letters"] == [report["poisonous_task_id"]]
    assert len(set(report["poisoned_worker_ids"])) == 3
    assert report["attempts"] == 59 + report["lost_attempts"]
    assert report["worker_ended_as"] == "MACHINE_GONE"
    assert report["completed_by"] not in (None, report["killed_worker_id"])
    assert report["workers_left"] == 1
    assert remains_of(windlass) == []


def test_a_promise_that_is_broken_is_said_and_ends_it_with_1(windlass: CommandLine) -> None:
    arguments = ("demo", "--tasks", 50, "--workers", 2)
    with windlass.start(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        data_dir = next(filter(None, (re.search(r"starting PostgreSQL in (\S+)", line) for line in process.stdout)))[1]
        assert any("a burst of 50 tasks arrives" in line for line in process.stdout)
        # Somebody interferes: a task that should have been completed is not.
        assert CommandLine(windlass.folder / "tmp")("tasks", "cancel", 50, "--data-dir", data_dir).code == 0
        told, problem = process.stdout.read(), process.stderr.read()
    assert process.returncode == 1, told
    assert "windlass: the demo failed: 48 of 49 tasks are complete." in problem
    assert remains_of(windlass) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ended_before_its_time_it_leaves_nothing_behind(windlass: CommandLine, number: signal.Signals) -> None:
    with windlass.start("demo", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert any("a burst of 200 tasks arrives" in line for line in process.stdout), process.stderr.read()
        process.send_signal(number)
        assert process.stderr.read() == ""
    assert process.returncode == (-number if number is signal.SIGKILL else 128 + number)
    # After a SIGKILL somebody else tidies up; otherwise it is done when the demo is.
    if number is signal.SIGKILL:
        wait_until(lambda: not remains_of(windlass), TIDY_TIMEOUT_S, "tidying up")
    assert remains_of(windlass) == []


def test_kept_it_can_be_looked_at_until_ctrl_c(windlass: CommandLine) -> None:
    arguments = ("demo", "--keep", "--tasks", 50, "--workers", 2)
    with windlass.start(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        shown = next(filter(None, (re.search(r"status --watch --data-dir (\S+)", line) for line in process.stdout)))
        try:
            look_at(CommandLine(windlass.folder / "tmp"), shown[1])
        finally:
            process.send_signal(signal.SIGINT)
        assert "everything is ended and deleted" in process.stdout.read()
    assert process.returncode == 0
    assert remains_of(windlass) == []


def look_at(windlass: CommandLine, data_dir: str) -> None:
    """From another terminal."""
    status = windlass("status", "--json", "--data-dir", data_dir).json
    assert [(fleet["name"], fleet["min_workers"], fleet["hold"]) for fleet in status["fleets"]] == [("demo", 1, None)]
    assert [worker["status"] for worker in status["workers"]] == ["active"]
    assert "Fleet demo" in windlass("explain", "demo", "--data-dir", data_dir).out
