"""The runbooks: for each code of an alert, a hold, a task or a worker, what it means and what to do.

docs/runbooks.md is their only source; the wheel contains it. Its tables are read here, and every program that shows a
code finds the code's runbook through this module: `windlass runbook`, `windlass explain` and the dashboard, which also
serves the whole page, so that no link leaves the installation.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).parent
# In the installed package, or in the repository that this program runs from.
_FILES = (_PACKAGE / "runbooks.md", _PACKAGE.parents[1] / "docs" / "runbooks.md")
_CODE = re.compile(r"`([A-Z]+(?:_[A-Z]+)*)`")
_CODE_CELL = re.compile(rf"{_CODE.pattern}(?:, {_CODE.pattern})*")
# How explanations show a code: "failed 5 s ago (CODE): reason", "failed in attempt 1 of 3 (CODE: reason)".
_SHOWN_CODE = re.compile(r"\(([A-Z]+(?:_[A-Z]+)*)[:)]")
_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")
_LINK_IN_PAGE = re.compile(r"\]\(#([^)]+)\)")


@dataclass(frozen=True, slots=True)
class Runbook:
    """One row of a table. A code may have several: `NO_CAPACITY` as an alert, and as the refusal of one machine."""

    code: str
    section: str
    # Heading of a column to its text, without the code: "meaning", "what to do".
    columns: Mapping[str, str]
    # Anchors of the sections that the row links to, for procedures().
    see: tuple[str, ...]


def heading_anchor(heading: str) -> str:
    """The id of a heading, as the documentation site forms it."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def runbook_page() -> str:
    """The page as Markdown. Empty if this installation has none: a worker's machine, for example."""
    return next((file.read_text(encoding="utf-8") for file in _FILES if file.is_file()), "")


@cache
def runbooks() -> Mapping[str, tuple[Runbook, ...]]:
    """All runbooks by code, in the order of the page."""
    found: dict[str, tuple[Runbook, ...]] = {}
    section = ""
    headings: list[str] = []
    for line in runbook_page().splitlines():
        if line.startswith("## "):
            section, headings = line.removeprefix("## "), []
        if not line.startswith("| "):
            continue
        first, *cells = (cell.strip() for cell in line.strip("| ").split(" | "))
        if first == "code":
            headings = cells
        elif headings and _CODE_CELL.fullmatch(first):
            columns = dict(zip(headings, (_LINK.sub(r"\1", cell) for cell in cells), strict=True))
            for code in _CODE.findall(first):
                see = tuple(_LINK_IN_PAGE.findall(line))
                found[code] = (*found.get(code, ()), Runbook(code, section, columns, see))
    return found


@cache
def procedures() -> Mapping[str, str]:
    """The parts of the sections by their anchors: "section: heading", then the text without links."""
    found: dict[str, str] = {}
    for section in _LINK.sub(r"\1", runbook_page()).split("\n## ")[1:]:
        introduction, *parts = section.split("\n### ")
        for part in parts:
            title = introduction.partition("\n")[0]
            found[heading_anchor(part.partition("\n")[0])] = f"{title}: {part.strip()}"
    return found


def codes_in(sentence: str) -> list[str]:
    """The codes with a runbook that a sentence of an explanation names, each once."""
    return [code for code in dict.fromkeys(_SHOWN_CODE.findall(sentence)) if code in runbooks()]
