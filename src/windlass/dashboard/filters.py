"""How times, numbers and money read. static/windlass.js counts ages on in the same words."""

import re
from datetime import datetime

from windlass.model.money import amount
from windlass.model.overview import COUNT_LIMIT

# What is not known, or was not.
UNKNOWN = "\N{EN DASH}"
# As much of a payload or a result as a page shows: more than anybody reads, little enough to be shown again and again.
MAX_JSON_CHARACTERS = 64_000
# And as much as is worth setting in lines.
MAX_INDENTED_CHARACTERS = 16_000
MAX_INDENTED_DEPTH = 8
_JSON_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')
_UNUSUAL = re.compile(r"[^\n\t -~]+")
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3_600, 86_400


def duration(seconds: float | None) -> str:
    """12 s, 3 min 5 s, 5 h 2 min, 2 d 3 h. Nothing known: a dash."""
    if seconds is None:
        return UNKNOWN
    whole = max(0, int(seconds))
    if whole < _MINUTE_S:
        return f"{whole} s"
    for limit_s, big_s, big, small_s, small in (
        (_HOUR_S, _MINUTE_S, "min", 1, "s"),
        (_DAY_S, _HOUR_S, "h", _MINUTE_S, "min"),
    ):
        if whole < limit_s:
            return f"{whole // big_s} {big} {whole % big_s // small_s} {small}"
    return f"{whole // _DAY_S} d {whole % _DAY_S // _HOUR_S} h"


def brief(seconds: float | None) -> str:
    """For figures in a row: 0.42 s, 8.1 s, 42 s, 3.5 min, 2.1 h."""
    if seconds is None:
        return UNKNOWN
    for limit, unit_s, unit in ((90.0, 1, "s"), (5_400.0, 60, "min"), (172_800.0, 3_600, "h")):
        if seconds < limit:
            number = max(0.0, seconds) / unit_s
            digits = 2 if number < 1 else 1 if number < 10 else 0
            return f"{number:.{digits}f} {unit}"
    return f"{seconds / _DAY_S:.0f} d"


def count(number: float) -> str:
    """1,204. As many as are ever counted, or more: 100,000+."""
    return f"{number:,.0f}" + ("+" if number >= COUNT_LIMIT else "")


def counted(number: int, what: str) -> str:
    """1 task, 2 tasks."""
    return f"{count(number)} {what}" + ("" if number == 1 else "s")


def percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share * 100:.0f} %"


def money(micros: int | None, currency: str | None) -> str:
    return UNKNOWN if micros is None else f"{currency or ''} {amount(micros)}".strip()


def moment(at: datetime | None) -> str:
    """In full, by UTC: 2026-11-15 18:24:05."""
    return UNKNOWN if at is None else f"{at:%Y-%m-%d %H:%M:%S}"


def gigabytes(megabytes: int | None) -> str:
    return UNKNOWN if megabytes is None else f"{megabytes / 1024:.1f}"


def last_line(text: str | None) -> str:
    """Where a traceback names its cause."""
    lines = (text or "").strip().splitlines()
    return lines[-1].strip() if lines else ""


def gist(text: str) -> str:
    """A reason that brings a traceback along, without it: what was tried, and the line that names the cause."""
    begin, found, _ = text.partition("Traceback (most recent call last)")
    return f"{begin}{last_line(text)}" if found else text


def action_label(code: str) -> str:
    """What an event's code says that happened: WORKER_ACTIVATED is activated, SLOT_FAILED is slot failed."""
    return code.removeprefix("WORKER_").removeprefix("TASK_").replace("_", " ").lower()


def indented_json(text: str) -> str:
    """JSON text as people read it, and every value as it was written; of a long one the beginning, as it is."""
    if len(text) > MAX_INDENTED_CHARACTERS:
        return text[:MAX_JSON_CHARACTERS]
    parts, depth, is_opened = [], 0, False
    for word in _JSON_WORD.findall(text):
        if word in "}]":
            depth -= 1
        if is_opened:
            parts.append("" if word in "}]" else _line_end(depth, ""))
        elif word in "}]":
            parts.append(_line_end(depth, "", is_closing=True))
        is_opened = word in "{["
        depth += is_opened
        parts.append({",": "," + _line_end(depth, " "), ":": ": "}.get(word, word))
    return "".join(parts)


def _line_end(depth: int, otherwise: str, *, is_closing: bool = False) -> str:
    """A new line, except in the depths: what is nested deeply would be mostly spaces."""
    return "\n" + "  " * depth if depth + is_closing <= MAX_INDENTED_DEPTH else otherwise


def plain(text: str) -> str:
    """The text with every control character but the line's end written out: a log may hold anything."""
    return _UNUSUAL.sub(lambda found: _written_out(found[0]), text)


def _written_out(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
