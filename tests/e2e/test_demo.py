"""`windlass demo`, as `make demo` runs it."""

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from command_line import CommandLine


@pytest.fixture
def windlass(reachable_path: Path) -> CommandLine:
    (reachable_path / "tmp").mkdir()
    # Whatever is set around it has no say.
    (reachable_path / "windlass.toml").write_text("nonsense")
    nonsense = {"DATABASE_URL": "nonsense", "WINDLASS_NONSENSE": "1"}
    return CommandLine(reachable_path, {"TMPDIR": str(reachable_path / "tmp"), **nonsense})


def processes_in(folder: Path) -> list[str]:
    """Of whom the command line names the folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or [])
        if str(folder) in words and process.pid != os.getpid():
            found.append(words)
    return found


def test_a_killed_worker_costs_nothing_and_nothing_stays_behind(windlass: CommandLine) -> None:
    report = windlass("demo", "--json", "--workers", 3, "--tasks", 200).json
    assert report["is_kept"]
    assert report["problems"] == []
    assert (report["enqueued"], report["complete"]) == (200, 200)
    assert (report["accepted_once"], report["accepted_twice"]) == (200, 0)
    assert report["failed_attempts"] == 10
    assert report["attempts"] == 200 + report["failed_attempts"] + report["lost_attempts"]
    (recovery,) = report["recoveries"]
    assert recovery["lost_worker_id"] == report["killed_worker_id"]
    assert recovery["noticed_by"] != report["killed_worker_id"] != recovery["completed_by"]
    assert report["took_s"] < 60
    assert list((windlass.folder / "tmp").iterdir()) == []
    assert processes_in(windlass.folder) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_cleans_up(windlass: CommandLine, number: signal.Signals) -> None:
    with windlass.start("demo", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        has_begun = any("enqueued 300 tasks" in line for line in process.stdout)
        assert has_begun, process.stderr.read()
        process.send_signal(number)
        assert process.stderr.read() == ""
    assert process.returncode == 128 + number
    assert list((windlass.folder / "tmp").iterdir()) == []
    assert processes_in(windlass.folder) == []
