"""A hang ends the test, never the run: also in a test that swallows every cancellation."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
HANGING = """
import asyncio

async def test_hangs():
    async def swallow():
        while True:
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                pass

    await asyncio.create_task(swallow())

def test_next():
    pass
"""


def test_test_that_swallows_cancellation_fails_and_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "test_swallow.py").write_text(HANGING)
    ran = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "pytest",
                "-p",
                "xdist.plugin",
                "-p",
                "pytest_timeout",
                "-p",
                "pytest_asyncio.plugin",
            ),
            *("-p", "support.hangs", "-p", "no:cacheprovider", "-q", "-n", "1"),
            *("-o", "asyncio_mode=auto", "--rootdir", str(tmp_path), "--timeout=1", str(tmp_path)),
        ],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(TESTS),
            "WINDLASS_TEST_LATE_S": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    # The limit fails the test, then the hanging clean-up ends its process.
    assert "1 passed" in ran.stdout, ran.stdout + ran.stderr
    assert "crashed while running 'test_swallow.py::test_hangs'" in ran.stdout
    assert "most recent call first" in ran.stderr
