"""The supervisor of processes, with processes that do little."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from support.worker_harness import PATIENCE_S, is_alive, until
from windlass.model.config import ApiConfig, Config
from windlass.model.process import ProcessKind
from windlass.wiring.process_link import MessageReader, ProcessLink, ProcessNote, StartOrder
from windlass.wiring.processes import server_process_count
from windlass.wiring.supervised_process import ProcessRole, SupervisedProcess

# Each process writes when it starts and stops.
SCRIPT = """
import asyncio, gc, os, sys
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
        link.report_ready()
        os._exit(7)
    link.on_stop = lambda: None
    frozen = gc.get_freeze_count()
    link.report_ready()
    say(f"frozen-{gc.get_freeze_count() > frozen}")
    while "spin" in sys.argv and order.reason is None:
        pass
    open("server-is-ready", "w").close()
    await link.stop_requested.wait()
    say("stopped")

async def fail(link, order):
    raise ConfigError("the port is closed. Open it.")

async def control(link, order):
    if "fatal" in sys.argv:
        while not os.path.exists("server-is-ready"):
            await asyncio.sleep(0.01)
        raise ConfigError("the cluster does not answer. Start it.")
    say(f"control-{order.reason}")
    if order.reason is None:
        link.report_ready()
        os._exit(7)
    while "starting" in sys.argv and not os.path.exists("go"):
        await asyncio.sleep(0.01)
    link.on_stop = lambda: say("shut-down")
    link.report_ready()
    await link.stop_requested.wait()

if "absent" in sys.argv:
    supervisor.Backoff.next_delay_s = lambda self: 3600.0
memory = 1 if "memory" in sys.argv else None
silence_s = 1.0 if "spin" in sys.argv else 5.0
role = ProcessRole(ProcessKind.SERVER, 0, fail if "fail" in sys.argv else serve, silence_s, memory)
roles = [role]
if {"absent", "starting", "fatal"} & set(sys.argv):
    roles.insert(0, ProcessRole(ProcessKind.CONTROL, 0, control, 5.0))
code = supervisor.Supervisor(roles, Config(), reload=Config, terminal=ControllingTerminal()).run()
say(f"ended-{code}")
"""


class SupervisedScript:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._out = folder / "out"
        (folder / "script.py").write_text(SCRIPT)
        self._script = folder / "script.py"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, case: str) -> None:
        with self._out.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(self._script), case], stdout=out, stderr=out, cwd=self.folder
            )

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


async def test_collections_skip_what_a_ready_process_has_built(script: SupervisedScript) -> None:
    script.start("serve")
    await script.until_line("frozen-True")


async def test_server_above_its_memory_is_stopped_after_its_successor_started(script: SupervisedScript) -> None:
    script.start("memory")
    first = await script.until_line("started-None")
    second = await script.until_line("started-memory")
    assert await script.until_line("stopped") == first
    starts = [what for what, _ in script.lines() if not what.startswith("frozen")]
    assert starts[:3] == ["started-None", "started-memory", "stopped"]
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


async def test_process_whose_loop_spins_is_killed_late_and_replaced(script: SupervisedScript) -> None:
    """A busy process may only be slow, so it gets more time than one that sleeps."""
    script.start("spin")
    first = await script.until_line("started-None")
    await script.until_line("started-stalled")
    assert not is_alive(first)
    silent_s = [float(found) for found in re.findall(r'"silent_s": ([\d.]+)', script.text())]
    assert silent_s[0] > 3.0  # a process that sleeps is killed after its limit of 1 s


@pytest.mark.parametrize(
    ("cores", "configured", "count"),
    [(1, None, 1), (2, None, 1), (3, None, 1), (4, None, 2), (16, None, 8), (2, 3, 3), (16, 1, 1)],
)
def test_servers_use_half_of_the_cores_unless_configured(
    monkeypatch: pytest.MonkeyPatch, cores: int, configured: int | None, count: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(cores)), raising=False)
    assert server_process_count(Config(api=ApiConfig(processes=configured))) == count


async def test_first_process_that_cannot_start_ends_the_program(script: SupervisedScript) -> None:
    script.start("fail")
    assert await script.until_ended() == 1
    assert script.text().splitlines()[-1].endswith("ProcessFailed: the port is closed. Open it.")


async def test_stop_without_control_process_starts_one_that_shuts_down(script: SupervisedScript) -> None:
    script.start("absent")
    await until(lambda: '"lost process"' in script.text(), "the end of the control process", 3 * PATIENCE_S)
    assert script.process is not None
    script.process.send_signal(signal.SIGTERM)
    assert await script.until_ended() == 0
    lines = [what for what, _ in script.lines()]
    assert lines.index("control-exited") < lines.index("shut-down") < lines.index("ended-0")


async def test_stop_waits_for_a_control_process_that_restarts(script: SupervisedScript) -> None:
    script.start("starting")
    await script.until_line("control-exited")
    assert script.process is not None
    script.process.send_signal(signal.SIGTERM)
    (script.folder / "go").touch()
    assert await script.until_ended() == 0
    lines = [what for what, _ in script.lines()]
    assert lines.count("shut-down") == 1
    assert lines[-1] == "ended-0"


async def test_fatal_start_of_control_process_ends_the_program_with_servers(script: SupervisedScript) -> None:
    script.start("fatal")
    assert await script.until_ended() == 1
    assert script.text().splitlines()[-1].endswith("ProcessFailed: the cluster does not answer. Start it.")


def test_configuration_of_a_starting_process_is_not_lost() -> None:
    link, received = ProcessLink(), list[Config]()
    first, second = Config(max_payload_bytes=1_000), Config(max_payload_bytes=2_000)
    link.set_config(first)
    link.receive_configs(received.append)
    link.set_config(second)
    assert received == [first, second]


def test_note_of_a_ready_process_outlives_successors_that_do_not_start() -> None:
    async def main(link: ProcessLink, order: StartOrder) -> None: ...

    role, holder = ProcessRole(ProcessKind.CONTROL, 0, main, 5.0), ProcessNote(uuid4(), "holder")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        order = StartOrder(Config(), "exited", (holder,))
        for _ in range(2):
            failed = SupervisedProcess(role, 0, ours, order, note=ProcessNote(uuid4(), "failed"))
            assert failed.notes() == (holder, failed.note)
            order = StartOrder(Config(), "exited", failed.notes())
        failed.is_ready = True
        assert failed.notes() == (failed.note,)


def test_messages_longer_than_the_socket_buffer_arrive_whole() -> None:
    async def main(link: ProcessLink, order: StartOrder) -> None: ...

    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        role = ProcessRole(ProcessKind.SERVER, 0, main, 5.0)
        process, reader = SupervisedProcess(role, 0, ours, StartOrder(Config())), MessageReader()
        sent = [("config", "a" * 4_000_000), ("stop",)]
        for message in sent:
            process.send(*message)
        received = list[tuple[object, ...]]()
        theirs.settimeout(PATIENCE_S)
        while len(received) < len(sent):
            received += reader.feed(theirs.recv(1 << 16))
            process.flush()
        assert received == sent
        assert not process.outgoing
