"""Programs that are kept running: real processes that note what becomes of them in a file; and Ray's folder."""

import asyncio
import fcntl
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from windlass.model.errors import WindlassError
from windlass.ray import head
from windlass.ray import supervisor as supervise
from windlass.ray import temp_dir as folder
from windlass.ray.supervisor import ProgramSupervisor, SupervisedProgram, kept_running
from windlass.worker.process import ProcessGroup, start_group

LIMIT_S = 20.0
POLL_S = 0.02
# Notes when it starts, when it is told to stop, and when it has done so; to stop takes it some time.
NOTER = """
import signal, sys, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
def note(what):
    with open(sys.argv[1], "a") as notes:
        notes.write(f"{sys.argv[2]} {what}\\n")
note("started")
signal.sigwait([signal.SIGTERM])
time.sleep(float(sys.argv[3]))
note("stopped")
"""


def noter(notes: Path, name: str, stops_in_s: float = 0.0) -> SupervisedProgram:
    command = (sys.executable, "-c", NOTER, str(notes), name, str(stops_in_s))
    return SupervisedProgram(command, os.environ, stop_timeout_s=0.3)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not is_so():
            await asyncio.sleep(POLL_S)


def lines(notes: Path) -> list[str]:
    return notes.read_text().splitlines() if notes.exists() else []


async def test_one_that_needs_its_whole_time_to_stop_gets_some_more_to_end_in_good_order(tmp_path: Path) -> None:
    """A dispatcher whose time is up still has to give its tasks back."""
    notes = tmp_path / "notes"
    async with kept_running("a", noter(notes, "a", stops_in_s=0.5)):
        await until(lambda: lines(notes) == ["a started"])
    assert lines(notes) == ["a started", "a stopped"]


async def test_one_that_is_at_work_before_its_start_is_through_is_asked_to_stop_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "notes"

    async def start(command: Sequence[str], **how: Any) -> ProcessGroup:
        group = await start_group(command, **how)
        await until(lambda: lines(notes) == ["a started"])
        begun.set()
        await asyncio.sleep(0)
        return group

    begun = asyncio.Event()
    monkeypatch.setattr(supervise, "start_group", start)
    async with kept_running("a", noter(notes, "a")):
        await begun.wait()
    assert lines(notes) == ["a started", "a stopped"]


async def test_one_that_never_stops_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "STOP_MARGIN_S", 0.1)
    notes = tmp_path / "notes"
    async with asyncio.timeout(LIMIT_S), kept_running("a", noter(notes, "a", stops_in_s=600)):
        await until(lambda: lines(notes) == ["a started"])
    assert lines(notes) == ["a started"]


class Host:
    """Has no process to spare the first time it is asked; then it starts what is to be started."""

    def __init__(self) -> None:
        self.asked = 0

    async def start_group(self, command: Sequence[str], **how: Any) -> ProcessGroup:
        self.asked += 1
        if self.asked == 1:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return await start_group(command, **how)


async def test_one_that_cannot_be_started_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "start_group", Host().start_group)
    notes = tmp_path / "notes"
    async with kept_running("a", noter(notes, "a")):
        await until(lambda: lines(notes) == ["a started"])
    assert lines(notes) == ["a started", "a stopped"]


async def test_a_head_that_cannot_be_started_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host, greeted = Host(), asyncio.Event()

    async def start(_command: Sequence[str], **how: Any) -> ProcessGroup:
        return await host.start_group(("sleep", "60"), **how)

    async def greet(*_: Any) -> None:
        greeted.set()

    monkeypatch.setattr(head, "start_group", start)
    monkeypatch.setattr(head, "greet", greet)
    died = await start_group(("false",), env=os.environ)
    keeping = asyncio.create_task(head._keep(head.HeadAddress("127.0.0.1:1", {}), tmp_path, dict(os.environ), died))
    try:
        async with asyncio.timeout(LIMIT_S):
            await greeted.wait()
        assert (host.asked, keeping.done()) == (2, False)
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def test_a_head_that_cannot_be_started_at_first_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "start_group", Host().start_group)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(WindlassError, match="the Ray head cannot be started on this host .*temporarily unavailable"):
        async with head.kept_head("127.0.0.1"):
            pytest.fail("no process")


async def test_new_ones_start_changed_ones_start_anew_and_others_end(tmp_path: Path) -> None:
    same, changed, gone, new = (tmp_path / name for name in ("same", "changed", "gone", "new"))
    programs = ProgramSupervisor()
    try:
        kept = {"same": noter(same, "same"), "changed": noter(changed, "first")}
        programs.arrange({**kept, "gone": noter(gone, "gone")})
        await until(lambda: all(lines(notes) for notes in (same, changed, gone)))
        programs.arrange({**kept, "changed": noter(changed, "second"), "new": noter(new, "new")})
        # Another change, before the first one is through: only the last one counts.
        programs.arrange({**kept, "changed": noter(changed, "third"), "new": noter(new, "new")})
        await until(lambda: len(lines(changed)) == 3 and len(lines(gone)) == 2 and len(lines(new)) == 1)
        assert lines(changed) == ["first started", "first stopped", "third started"]
        assert lines(gone) == ["gone started", "gone stopped"]
    finally:
        await programs.close()
    assert lines(same) == ["same started", "same stopped"]
    assert lines(changed)[-1] == "third stopped"


def test_rays_folder_is_not_taken_for_abandoned_by_one_that_looks_before_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.flock

    def meddle(file: Any, how: int) -> None:
        if how == fcntl.LOCK_EX:
            folder._delete_abandoned()
        lock(file, how)

    abandoned = tmp_path / "wl-ray-abandoned"
    abandoned.mkdir()
    (abandoned / "owner.lock").touch()
    monkeypatch.setattr(folder, "_PLACE", tmp_path)
    monkeypatch.setattr(fcntl, "flock", meddle)
    with folder.ray_folder() as ours:
        folder._delete_abandoned()
        assert list(tmp_path.iterdir()) == [ours]
    assert not ours.exists()
