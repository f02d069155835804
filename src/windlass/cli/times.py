"""Parses durations (90s, 5m, 2h, 7d) and ISO 8601 times with a time zone, as given in options."""

import re
from datetime import datetime, timedelta

from windlass.model.errors import BadInput

_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_UNIT_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
# About a century. Sums with much longer durations overflow the timestamps of Python and PostgreSQL.
MAX_DURATION_S = 100 * 366 * 86_400


def parse_duration(text: str, option: str) -> float:
    """Return seconds."""
    found = _DURATION.fullmatch(text.strip())
    duration_s = float(found[1]) * _UNIT_S[found[2]] if found else None
    if duration_s is None or duration_s > MAX_DURATION_S:
        raise BadInput(f"{option} {text!r} is not a duration: write 90s, 5m, 2h or 7d.")
    return duration_s


def parse_when(text: str, option: str) -> datetime | timedelta:
    """Return a point in time, or a duration from now."""
    if _DURATION.fullmatch(text.strip()):
        return timedelta(seconds=parse_duration(text, option))
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise BadInput(f"{option} {text!r} is not a time: write 90s, 5m, 2h, 7d or 2030-01-31T08:00Z.") from None
    if when.tzinfo is None:
        raise BadInput(f"{option} {text!r} has no time zone: append Z for UTC, or an offset such as +02:00.")
    return when
