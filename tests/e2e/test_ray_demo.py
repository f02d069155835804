"""`windlass demo --on ray`, whole: a Ray head, raylets that are hired for a burst, and one that is killed."""

import re
import subprocess
from pathlib import Path

import pytest
from test_demo import remains_of

from support.command_line import CommandLine, Done
from support.postgres_servers import wait_until

TASKS, NODES = 50, 2
# It takes 45 s alone, and a minute on a busy machine; after three of them the demo itself would give up.
RUN_TIMEOUT_S = 170.0
HEAD_TIMEOUT_S = 60.0
RAY_FOLDER = re.compile(r"/tmp/wl-ray-\w+")

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.timeout(200)]


@pytest.fixture
def windlass(reachable_path: Path) -> CommandLine:
    (reachable_path / "tmp").mkdir()
    return CommandLine(reachable_path, {"TMPDIR": str(reachable_path / "tmp")})


def test_nodes_are_hired_one_is_killed_and_nothing_is_lost_or_stays_behind(windlass: CommandLine) -> None:
    arguments = ("demo", "--on", "ray", "--json", "--workers", NODES, "--tasks", TASKS)
    with windlass.start(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            ray_folders: set[str] = set()

            def is_head_there() -> bool:
                assert process.poll() is None, process.stderr and process.stderr.read()
                ray_folders.update(RAY_FOLDER.findall(" ".join(remains_of(windlass))))
                return bool(ray_folders)

            wait_until(is_head_there, HEAD_TIMEOUT_S, "starting a Ray head")
            out, err = process.communicate(timeout=RUN_TIMEOUT_S)
        finally:
            process.kill()  # of a demo that was killed, its guard ends the rest
    report = Done(process.returncode, out, err).json
    assert report["problems"] == []
    assert (report["enqueued"], report["complete"]) == (TASKS, TASKS)
    assert (report["accepted_once"], report["accepted_twice"], report["dead_letters"]) == (TASKS, 0, [])
    assert report["attempts"] == TASKS + report["lost_attempts"] > TASKS
    # The raylet was killed, and with it ended the process that kept it; another node took its place.
    assert report["worker_ended_as"] == "MACHINE_GONE"
    assert report["completed_by"] not in (None, report["killed_worker_id"])
    assert report["workers_spawned"] > NODES
    assert report["nodes_at_work"] >= NODES
    assert report["workers_left"] == 0
    assert remains_of(windlass) == []
    assert [folder for folder in ray_folders if Path(folder).exists()] == []
