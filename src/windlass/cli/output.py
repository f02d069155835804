"""Output of commands: JSON, tables and progress bars.

Text from the database may contain anything. Control characters in it are escaped before they reach a terminal.
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

# Rich takes longer to import than a whole command, so it is imported only where a terminal shows its output.
if TYPE_CHECKING:
    from rich.table import Table

# Rich needs about a millisecond per row. Longer tables are printed as plain text.
MAX_RICH_ROWS = 500


def print_json(value: Any, stored: Mapping[str, str] = MappingProxyType({})) -> None:
    """Print `value` as JSON. `stored` adds members to the object, as JSON text from the database, unparsed.

    PostgreSQL accepts deeper nesting and longer numbers than Python's parser.
    """
    text = json.dumps(to_plain(value), indent=2, ensure_ascii=False)
    if stored:
        members = "".join(f',\n  "{name}": {json_text}' for name, json_text in stored.items())
        text = f"{text.removesuffix('}').rstrip()}{members}\n}}"
    print(text)


def to_plain(value: Any) -> Any:
    """Convert our own types to those that JSON can represent."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, frozenset):
        return sorted(map(to_plain, value))
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [to_plain(item) for item in value]
    return value


@dataclass(frozen=True, slots=True)
class TextTable:
    """`right` names the right-aligned columns. None is an empty cell. Without headings only the rows are printed."""

    rows: Sequence[Sequence[object]]
    headings: Sequence[str] = ()
    right: Collection[str] = ()

    def cells(self) -> list[list[str]]:
        return [["" if cell is None else printable(str(cell)) for cell in row] for row in self.rows]


def print_table(rows: Sequence[Sequence[object]], *headings: str, right: Collection[str] = ()) -> None:
    print_text_table(TextTable(rows, headings, right))


def print_text_table(table: TextTable) -> None:
    if sys.stdout.isatty() and len(table.rows) <= MAX_RICH_ROWS:
        from rich.console import Console

        Console().print(rich_table(table))
        return
    cells = [list(table.headings), *table.cells()] if table.headings else table.cells()
    for line in _align(cells, [heading in table.right for heading in table.headings]):
        print(line)


def _align(rows: list[list[str]], is_right: list[bool]) -> Iterator[str]:
    """One line per row, neither cut nor folded, so that grep and awk can read it."""
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
        # Text, because rich would read square brackets in a string as markup.
        drawn.add_row(*map(Text, row))
    return drawn


def printable(text: str) -> str:
    """Escape every control character except the newline."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def one_line(text: str | None, width: int = 60) -> str | None:
    """The text with spaces for line ends, cut to `width`. None if it is empty."""
    line = " ".join((text or "").split())
    return (line if len(line) <= width else f"{line[: width - 1]}…") or None


@contextmanager
def progress(description: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Yield a function that advances a progress bar. The bar is shown only on a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda amount: bar.advance(task, amount)
