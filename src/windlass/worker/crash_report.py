"""Reads the output of a handler's process that crashed: where it was, and what is worth keeping of its last output.

Python's fault handler prints the stacks of all threads, the most recent call first, then a list of extension modules
that may be longer than the stacks. The report keeps the crashed thread's frames down to the handler and leaves out
those of the worker and the interpreter, so that the user's own frames are never cut for them. The worker's log has all.
"""

import re
from pathlib import PurePath
from typing import NamedTuple

from windlass.worker.stack_frames import is_own_code, shorten_frames

# Kept of the output before the dump, and of the whole report.
MAX_OUTPUT_CHARACTERS = 2_000
MAX_REPORT_CHARACTERS = 6_000
_FATAL = "Fatal Python error: "
_CRASHED_THREAD = re.compile(r"^Current thread .*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(?P<path>.*)", line (?P<line>\d+) in (?P<function>.+)$')
_WORKER = str(PurePath(__file__).parent)


class Crash(NamedTuple):
    # "video.py:22 render", of the innermost frame in the user's own code; None without a stack.
    place: str | None
    output: str


def read_crash(output: str) -> Crash:
    before, _, dump = output.rpartition(_FATAL)
    lines = dump.split("\n")
    starts = [number for number, line in enumerate(lines) if _CRASHED_THREAD.match(line)]
    frames = []
    for line in lines[starts[0] + 1 :] if starts else ():
        frame = _FRAME.match(line)
        if frame is None or frame["path"].startswith((_WORKER, "<frozen runpy>")):
            break
        frames.append(frame)
    if not frames:
        return Crash(None, output[-MAX_OUTPUT_CHARACTERS:].strip())
    own = next((frame for frame in frames if is_own_code(frame["path"])), frames[0])
    place = f"{PurePath(own['path']).name}:{own['line']} {own['function']}"
    innermost, *others = [f"{frame[0]}\n" for frame in frames]
    if sum(map(len, others)) > MAX_REPORT_CHARACTERS - len(innermost) - len(lines[0]):
        others = shorten_frames(others, is_innermost_first=True)
    report = f"{_FATAL}{lines[0]}\n{innermost}{''.join(others)}"[:MAX_REPORT_CHARACTERS]
    kept = before.strip()[-MAX_OUTPUT_CHARACTERS:]
    return Crash(place, f"{kept}\n{report}".strip())
