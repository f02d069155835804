"""How the demonstration is watched: a live picture on a terminal, a line a second elsewhere, nothing for programs."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.live import Live

LINE_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class CrewMember:
    worker_id: str
    status: str
    complete: int
    task_id: int | None
    silent_s: float | None
    is_killed: bool

    def doing(self) -> str:
        if self.is_killed and self.status == "terminated":
            return "killed, found out"
        if self.is_killed:
            return f"killed, silent for {self.silent_s or 0:.1f} s"
        return f"task {self.task_id}" if self.task_id is not None else "idle"


@dataclass(frozen=True, slots=True)
class Picture:
    total: int
    complete: int
    running: int
    retrying: int
    crew: Sequence[CrewMember]


class View(Protocol):
    def note(self, text: str) -> None:
        """Something happened."""

    def show(self, picture: Picture) -> None:
        """How it stands now."""


@contextmanager
def view_for(*, is_silent: bool) -> Iterator[View]:
    if is_silent:
        yield _Silent()
    elif not sys.stdout.isatty():
        yield _Lines()
    else:
        from rich.live import Live

        with Live(refresh_per_second=10) as live:
            yield _Live(live)


class _Silent:
    def note(self, text: str) -> None: ...

    def show(self, picture: Picture) -> None: ...


class _Lines:
    def __init__(self) -> None:
        self._started = self._shown = time.monotonic()

    def note(self, text: str) -> None:
        print(f"{time.monotonic() - self._started:5.1f} s  {text}", flush=True)

    def show(self, picture: Picture) -> None:
        if time.monotonic() - self._shown >= LINE_INTERVAL_S:
            self._shown = time.monotonic()
            retrying = f", {picture.retrying} waiting for their retry" if picture.retrying else ""
            self.note(f"{picture.complete} of {picture.total} complete, {picture.running} running{retrying}")


class _Live:
    def __init__(self, live: "Live") -> None:
        self._live = live
        self._started = time.monotonic()

    def note(self, text: str) -> None:
        self._live.console.print(f"{time.monotonic() - self._started:5.1f} s  {text}", markup=False, highlight=False)

    def show(self, picture: Picture) -> None:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            ProgressBar(picture.total, picture.complete, width=40),
            f"{picture.complete} of {picture.total}",
            f"{picture.retrying} waiting for their retry" if picture.retrying else "",
        )
        crew = Table.grid(padding=(0, 2))
        for member in picture.crew:
            style = "red" if member.is_killed else ""
            crew.add_row(Text(member.worker_id), Text(f"{member.complete} done"), Text(member.doing()), style=style)
        self._live.update(Group(bar, crew))
