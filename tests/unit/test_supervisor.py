"""The supervisor of processes, with processes that do little."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.worker_harness import PATIENCE_S, is_alive, until

# Each process writes when it starts and stops. `MEMORY` is the limit of the first role in bytes.
SCRIPT = """
import asyncio, os, sys
from windlass.cli.logs import configure_logs
from windlass.model.config import Config
from windlass.model.errors import ConfigError
from windlass.model.process import ProcessKind
from windlass.wiring import supervisor
from windlass.wiring.supervised_process import ProcessRole
from windlass.wiring.terminal import ControllingTerminal

configure_logs("json")
supervisor.MEMORY_CHECK_INTERVAL_S = 0.1

def say(text):
    os.write(1, f"{text} {os.getpid()}\\n".encode())

async def serve(link, order):
    say(f"started-{order.reason}")
    if "crash" in sys.argv and order.reason is None:
        link.send("ready")
        os._exit(7)
    link.on_stop = lambda: None
    link.send("ready")
    await link.stop_requested.wait()
    say("stopped")

async def fail(link, order):
    raise ConfigError("the port is closed. Open it.")

memory = 1 if "memory" in sys.argv else None
role = ProcessRole(ProcessKind.SERVER, 0, fail if "fail" in sys.argv else serve, 5.0, memory)
code = supervisor.Supervisor([role], Config(), reload=Config, terminal=ControllingTerminal()).run()
say(f"ended-{code}")
"""


class SupervisedScript:
    def __init__(self, folder: Path) -> None:
        self._out = folder / "out"
        (folder / "script.py").write_text(SCRIPT)
        self._script = folder / "script.py"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, case: str) -> None:
        with self._out.open("wb") as out:
            self.process = subprocess.Popen([sys.executable, str(self._script), case], stdout=out, stderr=out)

    def lines(self) -> list[tuple[str, int]]:
        """What the processes wrote, with their pids."""
        return [(what, int(pid)) for what, pid in re.findall(r"^([\w-]+) (\d+)$", self._out.read_text(), re.MULTILINE)]

    def text(self) -> str:
        return self._out.read_text()

    async def until_line(self, what: str) -> int:
        async def pid() -> int | None:
            return next((pid for line, pid in self.lines() if line == what), None)

        found: int = await until(pid, f"{what}\n{self.text()}", 3 * PATIENCE_S)
        return found

    async def until_ended(self) -> int:
        process = self.process
        assert process is not None
        await until(lambda: process.poll() is not None, f"the end\n{self.text()}", 3 * PATIENCE_S)
        assert process.returncode is not None
        return process.returncode


@pytest.fixture
def script(tmp_path: Path) -> Iterator[SupervisedScript]:
    script = SupervisedScript(tmp_path)
    yield script
    if script.process is not None:
        script.process.kill()
        script.process.wait(PATIENCE_S)


async def test_server_above_its_memory_is_stopped_after_its_successor_started(script: SupervisedScript) -> None:
    script.start("memory")
    first = await script.until_line("started-None")
    second = await script.until_line("started-memory")
    assert await script.until_line("stopped") == first
    assert [what for what, _ in script.lines()][:3] == ["started-None", "started-memory", "stopped"]
    assert is_alive(second)
    assert script.process is not None
    script.process.send_signal(signal.SIGTERM)
    assert await script.until_ended() == 0
    assert script.lines()[-1][0] == "ended-0"
    assert not is_alive(second)


async def test_crashed_process_is_restarted_and_ends_with_its_supervisor(script: SupervisedScript) -> None:
    script.start("crash")
    second = await script.until_line("started-exited")
    assert "exited with code 7" in script.text()
    assert script.process is not None
    # A signal to a process alone changes nothing: its supervisor decides.
    os.kill(second, signal.SIGTERM)
    script.process.kill()
    await until(lambda: not is_alive(second), "the end of the process")
    assert "stopped" not in [what for what, _ in script.lines()]


async def test_first_process_that_cannot_start_ends_the_program(script: SupervisedScript) -> None:
    script.start("fail")
    assert await script.until_ended() == 1
    assert script.text().splitlines()[-1].endswith("ProcessFailed: the port is closed. Open it.")
