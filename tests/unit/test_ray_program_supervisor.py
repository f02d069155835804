"""Programs that are kept running, with real processes that log their start and stop in a file; and the Ray head."""

import asyncio
import fcntl
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from windlass.model.errors import WindlassError
from windlass.ray import head, supervisor, temp_dir
from windlass.ray.supervisor import ProgramSupervisor, SupervisedProgram
from windlass.worker.process import ProcessGroup, start_group

TIMEOUT_S = 20.0
POLL_S = 0.02
# Arguments: file, name, seconds that stopping takes.
PROGRAM = """
import signal, sys, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
def log(event):
    with open(sys.argv[1], "a") as file:
        file.write(f"{sys.argv[2]} {event}\\n")
log("started")
signal.sigwait([signal.SIGTERM])
time.sleep(float(sys.argv[3]))
log("stopped")
"""


def logging_program(file: Path, name: str, stops_in_s: float = 0.0) -> SupervisedProgram:
    command = (sys.executable, "-c", PROGRAM, str(file), name, str(stops_in_s))
    return SupervisedProgram(command, os.environ, stop_timeout_s=0.3)


@asynccontextmanager
async def running_program(program: SupervisedProgram) -> AsyncIterator[None]:
    programs = ProgramSupervisor()
    programs.set_programs({"a": program})
    try:
        yield
    finally:
        await programs.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(POLL_S)


def lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


async def test_program_gets_a_margin_after_its_stop_timeout(tmp_path: Path) -> None:
    """A dispatcher releases its remaining tasks after its stop timeout."""
    file = tmp_path / "log"
    async with running_program(logging_program(file, "a", stops_in_s=0.5)):
        await until(lambda: lines(file) == ["a started"])
    assert lines(file) == ["a started", "a stopped"]


async def test_program_that_works_before_its_start_returns_is_stopped_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, is_working = tmp_path / "log", asyncio.Event()

    async def start_slowly(command: Sequence[str], **options: Any) -> ProcessGroup:
        group = await start_group(command, **options)
        await until(lambda: lines(file) == ["a started"])
        is_working.set()
        await asyncio.sleep(0)
        return group

    monkeypatch.setattr(supervisor, "start_group", start_slowly)
    async with running_program(logging_program(file, "a")):
        await is_working.wait()
    assert lines(file) == ["a started", "a stopped"]


async def test_program_that_does_not_stop_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "STOP_MARGIN_S", 0.1)
    file = tmp_path / "log"
    async with asyncio.timeout(TIMEOUT_S), running_program(logging_program(file, "a", stops_in_s=600)):
        await until(lambda: lines(file) == ["a started"])
    assert lines(file) == ["a started"]


class FullHost:
    """Fails to start the process of one call, counted from 1."""

    def __init__(self, failing_call: int = 1) -> None:
        self.failing_call = failing_call
        self.calls = 0

    async def start_group(self, command: Sequence[str], **options: Any) -> ProcessGroup:
        self.calls += 1
        if self.calls == self.failing_call:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return await start_group(command, **options)


async def test_failed_start_of_a_program_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "start_group", FullHost().start_group)
    file = tmp_path / "log"
    async with running_program(logging_program(file, "a")):
        await until(lambda: lines(file) == ["a started"])
    assert lines(file) == ["a started", "a stopped"]


async def test_new_programs_start_changed_ones_restart_and_others_stop(tmp_path: Path) -> None:
    same, changed, removed, new = (tmp_path / name for name in ("same", "changed", "removed", "new"))
    programs = ProgramSupervisor()
    try:
        kept = {"same": logging_program(same, "same"), "changed": logging_program(changed, "first")}
        programs.set_programs({**kept, "removed": logging_program(removed, "removed")})
        await until(lambda: all(lines(file) for file in (same, changed, removed)))
        kept["new"] = logging_program(new, "new")
        programs.set_programs({**kept, "changed": logging_program(changed, "second")})
        # Another change before the first is complete: only the last one counts.
        programs.set_programs({**kept, "changed": logging_program(changed, "third")})
        await until(lambda: len(lines(changed)) == 3 and len(lines(removed)) == 2 and len(lines(new)) == 1)
        assert lines(changed) == ["first started", "first stopped", "third started"]
        assert lines(removed) == ["removed started", "removed stopped"]
    finally:
        await programs.close()
    assert lines(same) == ["same started", "same stopped"]
    assert lines(changed)[-1] == "third stopped"


# --------------------------------------------------------------------------------------------------------- Ray head


async def test_failed_restart_of_a_head_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first head exits at once, the second cannot be started, the third runs."""
    host, probes = FullHost(failing_call=2), 0

    async def start(_command: Sequence[str], **options: Any) -> ProcessGroup:
        return await host.start_group(("sleep", "60" if host.calls else "0.5"), **options)

    async def probe(*_: Any) -> None:
        nonlocal probes
        probes += 1

    monkeypatch.setattr(head, "start_group", start)
    monkeypatch.setattr(head, "probe_head", probe)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    async with head.run_head("127.0.0.1"):
        await until(lambda: probes == 2)
        assert host.calls == 3


async def test_error_says_that_the_first_head_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "start_group", FullHost().start_group)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(WindlassError, match="cannot start a Ray head on this host: .*temporarily unavailable"):
        async with head.run_head("127.0.0.1"):
            pytest.fail("started")


def test_temp_dir_is_not_abandoned_before_it_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = fcntl.flock

    def delete_before_lock(file: Any, operation: int) -> None:
        if operation == fcntl.LOCK_EX:
            temp_dir.delete_abandoned_dirs()
        lock(file, operation)

    abandoned = tmp_path / "wl-ray-abandoned"
    abandoned.mkdir()
    (abandoned / "owner.lock").touch()
    monkeypatch.setattr(temp_dir, "PARENT", tmp_path)
    monkeypatch.setattr(fcntl, "flock", delete_before_lock)
    with temp_dir.ray_temp_dir() as ours:
        temp_dir.delete_abandoned_dirs()
        assert list(tmp_path.iterdir()) == [ours]
    assert not ours.exists()
