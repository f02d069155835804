"""Tells the user's own stack frames from those of libraries, and shortens the latter in a long traceback.

A text that is too long for the database is cut in the middle. Frames of libraries are left out before that, so that the
user's own frames are never cut for them.
"""

import re
import sysconfig
from collections.abc import Sequence
from itertools import groupby
from pathlib import PurePath

_FRAME = re.compile(r'^(?P<margin>[ |]*)File "(?P<path>.*)", line \d+')
# The worker's own code is in this folder. It calls the handler.
_WORKER = str(PurePath(__file__).parent)
_STANDARD_LIBRARY = tuple(sysconfig.get_path(name) + "/" for name in ("stdlib", "platstdlib"))
_PACKAGES = ("site-packages", "dist-packages")
_OURS, _PYTHON = "windlass", "the standard library"


def is_own_code(path: str) -> bool:
    return library_of(path) is None


def library_of(path: str) -> str | None:
    """The package of a source file; None for the user's own code."""
    parts = PurePath(path).parts
    for folder in _PACKAGES:
        if folder in parts[:-1]:
            return parts[parts.index(folder) + 1].removesuffix(".py")
    if path.startswith(_WORKER):
        return _OURS
    return _PYTHON if path.startswith((*_STANDARD_LIBRARY, "<")) else None


def shorten_frames(parts: Sequence[str], *, is_innermost_first: bool = False) -> list[str]:
    """The parts of a traceback with one line for each run of library frames.

    The last frame before a message is kept: the error was raised there. The package of the handler is no library: a
    project may be installed like one.
    """
    called = (_library(part) for part in (reversed(parts) if is_innermost_first else parts) if _FRAME.match(part))
    handlers = next((library for library in called if library not in (_OURS, _PYTHON)), None)

    def is_library_frame(part: str) -> bool:
        return _library(part) not in (None, handlers)

    shown: list[str] = []
    runs = [(is_library, list(run)) for is_library, run in groupby(parts, is_library_frame)]
    for place, (is_library, run) in enumerate(runs):
        following = runs[place + 1][1][0] if place + 1 < len(runs) else ""
        raised = [] if _FRAME.match(following) else run[-1:]
        left_out = run[: len(run) - len(raised)]
        if not is_library or len(left_out) < 2:
            shown += run
            continue
        frame = _FRAME.match(left_out[0])
        margin = frame["margin"] if frame is not None else ""
        names = ", ".join(dict.fromkeys(str(_library(part)) for part in left_out))
        shown += [f"{margin}[{len(left_out)} frames in {names}]\n", *raised]
    return shown


def _library(part: str) -> str | None:
    frame = _FRAME.match(part)
    return library_of(frame["path"]) if frame is not None else None
