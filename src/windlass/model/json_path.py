"""Paths to parts of a JSON value, a small part of JSONPath.

`$` is the whole value, `$.prompt` a member, `$.items[*].text` a member of every item, `$.items[0]` one item.
"""

import re

_PATH = re.compile(r"\$(?:\.[A-Za-z_][\w-]*|\[(?:\*|\d{1,6})\])*")
_PART = re.compile(r"\.([A-Za-z_][\w-]*)|\[(\*|\d+)\]")
# None stands for every item of a list.
PathParts = tuple[str | int | None, ...]


def parse_path(path: str) -> PathParts:
    """Raises ValueError with what to write instead."""
    if not _PATH.fullmatch(path):
        raise ValueError(f"{path!r} is not a path: write $.member, $.list[*].member or $")
    parts: list[str | int | None] = []
    for name, index in _PART.findall(path):
        parts.append(name or (None if index == "*" else int(index)))
    return tuple(parts)
