"""The headline of an error: the one line that lists, explanations, events and alerts show.

It is the exception's own first line, or for a process that died how it died. `tasks show` has the full text. The SQL
function windlass_internal.error_headline() follows the same rules; a test compares the two.
"""

import re

MAX_HEADLINE_CHARACTERS = 200
# Ends the first line of an error that is followed by the output of a process, in which nothing is looked for.
LAST_OUTPUT = "; last output:"
_TRACEBACK = "Traceback (most recent call last):"
# Between two tracebacks, the later of which belongs to the exception that was raised last.
_CHAINED = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
# What both implementations strip from lines.
_BLANK = " \t\r"
_GROUP_MARGIN = re.compile(r"^ *\| ?")


def error_headline(error: str | None) -> str:
    """The headline, at most MAX_HEADLINE_CHARACTERS long. Empty for an error without text."""
    first = next((line.strip(_BLANK) for line in (error or "").split("\n") if line.strip(_BLANK)), "")
    headline = first.removesuffix(LAST_OUTPUT) if first.endswith(LAST_OUTPUT) else raised_line(error or "") or first
    if len(headline) <= MAX_HEADLINE_CHARACTERS:
        return headline
    return f"{headline[: MAX_HEADLINE_CHARACTERS - 1]}…"


def raised_line(text: str) -> str | None:
    """The first line after the frames of the last chained traceback, if there is one.

    Tracebacks that a message quotes do not count.
    """
    found: str | None = None
    is_expected, is_in_frames = True, False
    for line in (each.rstrip(_BLANK) for each in text.split("\n")):
        if is_in_frames:
            text = _GROUP_MARGIN.sub("", line)
            if text and not text.startswith(" "):
                found, is_in_frames, is_expected = text, False, False
        elif is_expected and line.endswith(_TRACEBACK):
            is_in_frames = True
        elif line.strip(" |") in _CHAINED:
            is_expected = True
    return found
