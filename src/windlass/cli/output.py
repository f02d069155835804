"""The two ways of printing: JSON for programs, tables for people. And progress, where somebody is watching.

What comes out of the database may be anything, so nothing of it reaches a terminal as a control sequence.
"""

import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

# Rich takes a millisecond for a row; longer tables are not for looking at.
MAX_ROWS_FOR_LOOKS = 500


def print_json(value: Any, stored: Mapping[str, str] = MappingProxyType({})) -> None:
    """`stored`: more members of the object, by name, as the JSON text that the database holds. They are printed as they
    are: PostgreSQL takes what is nested more deeply, and longer numbers, than Python reads."""
    text = json.dumps(to_plain(value), indent=2, ensure_ascii=False)
    if stored:
        members = "".join(f',\n  "{name}": {json_text}' for name, json_text in stored.items())
        text = f"{text.removesuffix('}').rstrip()}{members}\n}}"
    print(text)


def to_plain(value: Any) -> Any:
    """What JSON can hold, from our own types."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [to_plain(item) for item in value]
    return value


@dataclass(frozen=True, slots=True)
class TextTable:
    """`right` names the columns of numbers. None is shown as nothing. Without headings, only the rows."""

    rows: Sequence[Sequence[object]]
    headings: Sequence[str] = ()
    right: Collection[str] = ()

    def cells(self) -> list[list[str]]:
        return [["" if cell is None else printable(str(cell)) for cell in row] for row in self.rows]


def print_table(rows: Sequence[Sequence[object]], *headings: str, right: Collection[str] = ()) -> None:
    print_text_table(TextTable(rows, headings, right))


def print_text_table(table: TextTable) -> None:
    if sys.stdout.isatty() and len(table.rows) <= MAX_ROWS_FOR_LOOKS:
        from rich.console import Console

        Console().print(rich_table(table))
        return
    cells = [list(table.headings), *table.cells()] if table.headings else table.cells()
    for line in _aligned(cells, [heading in table.right for heading in table.headings]):
        print(line)


def _aligned(rows: list[list[str]], is_right: list[bool]) -> Iterator[str]:
    """A pipe has no width, so nothing is cut or folded: one line a row, for grep and awk."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    is_right = is_right or [False] * len(widths)
    for row in rows:
        padded = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_right, strict=True)
        )
        yield "  ".join(padded).rstrip().replace("\n", "\\n")


def rich_table(table: TextTable) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    has_headings = bool(table.headings)
    drawn = Table(box=SIMPLE_HEAD if has_headings else None, show_header=has_headings, show_edge=False, pad_edge=False)
    for heading in table.headings:
        drawn.add_column(heading, justify="right" if heading in table.right else "left", overflow="fold")
    for row in table.cells():
        # As Text, so that square brackets are no markup.
        drawn.add_row(*map(Text, row))
    return drawn


def printable(text: str) -> str:
    """The text with every control character but the line's end written out."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def shortened(text: str | None, width: int = 60) -> str | None:
    """One line of it: the last, where a traceback names its cause."""
    if not text or not text.strip():
        return None
    line = text.strip().splitlines()[-1].strip()
    return line if len(line) <= width else f"{line[: width - 1]}…"


def duration(seconds: float | None) -> str | None:
    """For people: 0.4 s, 12 s, 3 min, 5 h, 2 d."""
    if seconds is None:
        return None
    if seconds < 10:
        return f"{max(seconds, 0.0):.1f} s"
    for limit, unit, unit_s in ((120, "s", 1), (7_200, "min", 60), (172_800, "h", 3_600)):
        if seconds < limit:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def counted(count: int, what: str) -> str:
    """1 task, 2 tasks."""
    return f"{count:,} {what}" + ("" if count == 1 else "s")


@contextmanager
def progress(description: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Gives a function to call with how much more is done. Shows a bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda amount: bar.advance(task, amount)
