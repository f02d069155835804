"""Times and spans as people type them: 90s, 5m, 2h, 7d, or a time of the day with its zone."""

import re
from datetime import datetime, timedelta

from windlass.model.errors import BadInput

_SPAN = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_UNIT_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
# A century: beyond it PostgreSQL's and Python's calendars begin to end.
MAX_SPAN_S = 100 * 366 * 86_400


def parse_span(text: str, option: str) -> float:
    """Seconds."""
    found = _SPAN.fullmatch(text.strip())
    span_s = float(found[1]) * _UNIT_S[found[2]] if found else None
    if span_s is None or span_s > MAX_SPAN_S:
        raise BadInput(f"{option} {text!r} is not a span of time: write 90s, 5m, 2h or 7d.")
    return span_s


def parse_when(text: str, option: str) -> datetime | timedelta:
    """A point in time, or how long from now."""
    if _SPAN.fullmatch(text.strip()):
        return timedelta(seconds=parse_span(text, option))
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise BadInput(f"{option} {text!r} is not a time: write 90s, 5m, 2h, 7d or 2030-01-31T08:00Z.") from None
    if when.tzinfo is None:
        raise BadInput(f"{option} {text!r} has no time zone: append Z for UTC, or an offset such as +02:00.")
    return when
