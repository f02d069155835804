"""Programs that are kept running: real processes that note what becomes of them in a file."""

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from windlass.engine import supervise
from windlass.engine.supervise import Program, Programs, kept_running

LIMIT_S = 20.0
POLL_S = 0.02
# Notes when it starts, when it is told to stop, and when it has done so; to stop takes it some time.
NOTER = """
import signal, sys, threading, time
told = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: told.set())
def note(what):
    with open(sys.argv[1], "a") as notes:
        notes.write(f"{sys.argv[2]} {what}\\n")
note("started")
told.wait()
time.sleep(float(sys.argv[3]))
note("stopped")
"""


def noter(notes: Path, name: str, stops_in_s: float = 0.0) -> Program:
    command = (sys.executable, "-c", NOTER, str(notes), name, str(stops_in_s))
    return Program(command, os.environ, stop_timeout_s=0.3)


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


async def test_one_that_never_stops_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "STOP_MARGIN_S", 0.1)
    notes = tmp_path / "notes"
    async with asyncio.timeout(LIMIT_S), kept_running("a", noter(notes, "a", stops_in_s=600)):
        await until(lambda: lines(notes) == ["a started"])
    assert lines(notes) == ["a started"]


async def test_new_ones_start_changed_ones_start_anew_and_others_end(tmp_path: Path) -> None:
    same, changed, gone, new = (tmp_path / name for name in ("same", "changed", "gone", "new"))
    programs = Programs()
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
