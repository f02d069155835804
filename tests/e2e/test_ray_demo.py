"""`windlass demo --on ray`: a Ray head, raylets that are spawned for a burst, and one that is killed."""

import re
import subprocess
from pathlib import Path

import pytest
from test_demo import leftovers_of

from support.command_line import CommandLine, Completed
from support.postgres_servers import wait_until

TASKS, NODES = 50, 2
# It takes 45 s on an idle machine. The time limit of the demo itself is shorter.
RUN_TIMEOUT_S = 420.0
HEAD_TIMEOUT_S = 90.0
RAY_FOLDER = re.compile(r"/tmp/wl-ray-\w+")

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


@pytest.fixture
def windlass(reachable_path: Path) -> CommandLine:
    (reachable_path / "tmp").mkdir()
    return CommandLine(reachable_path, {"TMPDIR": str(reachable_path / "tmp")})


def test_demo_on_ray_passes_its_checks_and_leaves_nothing(windlass: CommandLine) -> None:
    arguments = ("demo", "--on", "ray", "--json", "--workers", NODES, "--tasks", TASKS)
    with windlass.start(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            ray_folders: set[str] = set()

            def is_head_running() -> bool:
                assert process.poll() is None, process.stderr and process.stderr.read()
                ray_folders.update(RAY_FOLDER.findall(" ".join(leftovers_of(windlass))))
                return bool(ray_folders)

            wait_until(is_head_running, HEAD_TIMEOUT_S, "starting a Ray head")
            out, err = process.communicate(timeout=RUN_TIMEOUT_S)
        finally:
            process.kill()  # its clean-up process stops the rest
    report = Completed(process.returncode, out, err).json
    assert report["problems"] == []
    assert (report["enqueued"], report["complete"]) == (TASKS, TASKS)
    assert (report["accepted_once"], report["accepted_twice"], report["failed_tasks"]) == (TASKS, 0, [])
    assert report["attempts"] == TASKS + report["lost_attempts"] > TASKS
    # The process that supervised the raylet exited with it, and another node replaced it.
    assert report["worker_ended_as"] == "MACHINE_GONE"
    assert report["completed_by"] not in (None, report["killed_worker_id"])
    assert report["workers_spawned"] > NODES
    assert report["nodes_at_work"] >= NODES
    assert report["workers_left"] == 0
    assert leftovers_of(windlass) == []
    assert [folder for folder in ray_folders if Path(folder).exists()] == []
