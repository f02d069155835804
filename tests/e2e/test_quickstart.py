"""Every command of docs/quickstart.md runs as it stands, on an empty home directory, and prints what the page says.

Only what the internet would give is replaced: `git clone` copies this repository, pip finds packages in a folder, and
the port is a free one.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.postgres_servers import reachable_temp_dir
from support.wheel_folder import write_wheels

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "quickstart.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
SOURCES = ("src", "deploy", "docs/runbooks.md", "pyproject.toml", "README.md", "LICENSE")
COMMAND_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 120.0
# An installation by pip, and two tasks.
pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]


@pytest.fixture
def home() -> Iterator[Path]:
    # The embedded PostgreSQL may run as another user, who must be able to enter the folder.
    with reachable_temp_dir() as root:
        for name in ("home", "bin", "repository"):
            (root / name).mkdir()
        for name in SOURCES:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, root / "repository" / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                (root / "repository" / name).parent.mkdir(exist_ok=True)
                shutil.copy(ROOT / name, root / "repository" / name)
        programs = {
            "git": f'[ "$1" = clone ] && cp -r {root}/repository "$3"',
            # The Python that the packages of the folder are for.
            "python3": f'exec {Path(sys._base_executable).resolve()} "$@"',  # type: ignore[attr-defined]
        }
        for name, line in programs.items():
            (root / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
            (root / "bin" / name).chmod(0o755)
        write_wheels(root / "wheels", also=("hatchling",))
        yield root / "home"


def environment(home: Path) -> dict[str, str]:
    return {
        "HOME": str(home),
        "PATH": f"{home.parent / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "LANG": "C.UTF-8",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(home.parent / "wheels"),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        # For root the default is a folder of the system.
        "WINDLASS_DATA_DIR": str(home / "data"),
    }


def logged(home: Path) -> str:
    log = home.parent / "up.log"
    return log.read_text()[-3000:] if log.exists() else ""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port


def test_quickstart_runs_word_by_word(home: Path) -> None:
    exports, output, compared = "", "", 0
    up: subprocess.Popen[str] | None = None
    try:
        for language, text in BLOCKS:
            if language == "python":
                (home / text.splitlines()[0].removeprefix("# ")).write_text(text)
            elif language == "text":
                # Everything that the page shows, in its order; the program may print more.
                lines = iter(output.splitlines())
                assert all(any(line == printed for printed in lines) for line in text.splitlines()), (text, output)
                compared += 1
            elif text.startswith("windlass up "):
                command = text.replace("8080", str(free_port()))
                with (home.parent / "up.log").open("w") as log:
                    up = subprocess.Popen(
                        ["bash", "-euc", f"{exports}exec {command}"], cwd=home, env=environment(home), text=True,
                        stdout=subprocess.DEVNULL, stderr=log, start_new_session=True,
                    )  # fmt: skip
            else:
                done = subprocess.run(
                    ["bash", "-euc", exports + text], cwd=home, env=environment(home), text=True,
                    capture_output=True, timeout=COMMAND_TIMEOUT_S, check=False,
                )  # fmt: skip
                assert done.returncode == 0, (text, done.stderr, logged(home))
                output = done.stdout
                exports += "".join(f"{line}\n" for line in text.splitlines() if line.startswith("export "))
        assert up is not None and compared == 5
        # Ctrl-C in its terminal.
        os.killpg(up.pid, signal.SIGINT)
        assert up.wait(STOP_TIMEOUT_S) in (0, 130)
    finally:
        if up is not None and up.poll() is None:
            os.killpg(up.pid, signal.SIGKILL)
            up.wait()
