"""A reader who follows a page of the documentation: runs its commands in an empty home directory, as they stand.

Only what the internet would give is replaced: `git clone` copies this repository, pip finds packages in a folder, and
the port is a free one.
"""

import os
import pty
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.postgres_servers import reachable_temp_dir
from support.wheel_folder import write_wheels

ROOT = Path(__file__).parents[2]
SOURCES = ("src", "deploy", "docs/runbooks.md", "pyproject.toml", "README.md", "LICENSE")
COMMAND_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 120.0


def blocks_of(page: str) -> list[tuple[str, str]]:
    """Language and text of each code block of a page. Without a language they are commands, as `sh`."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    return [(language or "sh", text) for language, text in found]


class PageReader:
    """`prelude`: the lines that a new terminal needs, as `export` and `cd`. They run before each command."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.repository = home.parent / "repository"
        self.prelude = ""
        self._up: subprocess.Popen[str] | None = None

    def run(self, text: str, *, keeps: tuple[str, ...] = ("export ",), typed: str = "") -> str:
        """Run commands and return what they print. Lines that begin with one of `keeps` hold for all later ones.

        `typed`: what the reader types into the last of them."""
        done = subprocess.run(
            ["bash", "-euc", self.prelude + text], cwd=self.home, env=self.environment(), text=True, input=typed,
            capture_output=True, timeout=COMMAND_TIMEOUT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (text, done.stdout, done.stderr, self._logged())
        self.prelude += "".join(f"{line}\n" for line in text.splitlines() if line.startswith(keeps))
        return done.stdout

    def watch(self, command: str, until: str) -> None:
        """Run a command in a terminal, and press Ctrl-C once it shows this."""
        pid, terminal = pty.fork()
        if pid == 0:
            os.chdir(self.home)
            os.execvpe("bash", ["bash", "-euc", f"{self.prelude}exec {command}"], self.environment())  # noqa: S606
        shown, is_interrupted, deadline = "", False, time.monotonic() + COMMAND_TIMEOUT_S
        while select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0]:
            try:
                shown += os.read(terminal, 65_536).decode(errors="replace")
            except OSError:  # it has ended
                break
            if until in shown and not is_interrupted:
                is_interrupted = True
                os.write(terminal, b"\x03")
        else:
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(terminal)
        assert is_interrupted, (command, shown, self._logged())
        assert code in (0, 130), (command, code, shown)

    def start_up(self, command: str) -> None:
        """Run `windlass up` in a terminal of its own, on a free port."""
        with socket.create_server(("127.0.0.1", 0)) as taken:
            command = command.replace("8080", str(taken.getsockname()[1]))
        with (self.home.parent / "up.log").open("w") as log:
            self._up = subprocess.Popen(
                ["bash", "-euc", f"{self.prelude}exec {command}"], cwd=self.home, env=self.environment(), text=True,
                stdout=subprocess.DEVNULL, stderr=log, start_new_session=True,
            )  # fmt: skip

    def stop_up(self) -> int:
        """Press Ctrl-C in its terminal. Returns the exit code."""
        assert self._up is not None
        os.killpg(self._up.pid, signal.SIGINT)
        return self._up.wait(STOP_TIMEOUT_S)

    def kill_up(self) -> None:
        if self._up is not None and self._up.poll() is None:
            os.killpg(self._up.pid, signal.SIGKILL)
            self._up.wait()

    def environment(self) -> dict[str, str]:
        return {
            "HOME": str(self.home),
            "PATH": f"{self.home.parent / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "LANG": "C.UTF-8",
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.home.parent / "wheels"),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            # For root the default is a folder of the system.
            "WINDLASS_DATA_DIR": str(self.home / "data"),
        }

    def _logged(self) -> str:
        log = self.home.parent / "up.log"
        return log.read_text()[-3000:] if log.exists() else ""


@contextmanager
def page_reader() -> Iterator[PageReader]:
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
            # A clean machine has none.
            "psql": 'echo "psql: command not found" >&2; exit 127',
        }
        for name, line in programs.items():
            (root / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
            (root / "bin" / name).chmod(0o755)
        write_wheels(root / "wheels", also=("hatchling",))
        reader = PageReader(root / "home")
        try:
            yield reader
        finally:
            reader.kill_up()
