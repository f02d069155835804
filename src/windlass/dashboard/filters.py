"""Jinja filters for times, numbers, money and JSON. static/windlass.js updates ages in the same format."""

import re
from datetime import datetime

from windlass.model.error_text import error_headline
from windlass.model.money import MICROS, amount
from windlass.model.overview import COUNT_LIMIT

UNKNOWN = "\N{EN DASH}"
# Part of a payload or result that a page shows. Pages are reloaded often, so it is bounded.
MAX_JSON_CHARACTERS = 64_000
# Longer or deeper JSON is not indented: it would be mostly spaces.
MAX_INDENTED_CHARACTERS = 16_000
MAX_INDENTED_DEPTH = 8
_JSON_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')
_UNUSUAL = re.compile(r"[^\n\t -~]+")
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3_600, 86_400


def duration(seconds: float | None) -> str:
    """12 s, 3 min 5 s, 5 h 2 min, 2 d 3 h. A dash for None."""
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
    """Two significant digits: 0.42 s, 8.1 s, 42 s, 3.5 min, 2.1 h."""
    if seconds is None:
        return UNKNOWN
    for limit, unit_s, unit in ((90.0, 1, "s"), (5_400.0, 60, "min"), (172_800.0, 3_600, "h")):
        if seconds < limit:
            number = max(0.0, seconds) / unit_s
            digits = 2 if number < 1 else 1 if number < 10 else 0
            return f"{number:.{digits}f} {unit}"
    return f"{seconds / _DAY_S:.0f} d"


def count(number: float) -> str:
    """1,204. Counting stops at COUNT_LIMIT: 100,000+."""
    return f"{number:,.0f}" + ("+" if number >= COUNT_LIMIT else "")


def counted(number: int, what: str) -> str:
    """1 task, 2 tasks."""
    return f"{count(number)} {what}" + ("" if number == 1 else "s")


def percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share * 100:.0f} %"


def money(micros: int | None, currency: str | None) -> str:
    return UNKNOWN if micros is None else f"{currency or ''} {amount(micros)}".strip()


def cents(micros: int) -> str:
    """The amount with two decimals, so that the decimals of a column align. Amounts below a cent: <0.01."""
    return "<0.01" if 0 < micros < MICROS // 100 else f"{micros / MICROS:.2f}"


def moment(at: datetime | None) -> str:
    """2026-11-15 18:24:05, in UTC."""
    return UNKNOWN if at is None else f"{at:%Y-%m-%d %H:%M:%S}"


def gigabytes(megabytes: int | None) -> str:
    return UNKNOWN if megabytes is None else f"{megabytes / 1024:.1f}"


def headline(error: str | None) -> str:
    """The one line of an error that lists show."""
    return error_headline(error)


def gist(text: str) -> str:
    """A reason without its traceback: the text before it, and the exception's first line."""
    begin, found, _ = text.partition("Traceback (most recent call last)")
    return f"{begin}{error_headline(text[len(begin) :])}" if found else text


def action_label(code: str) -> str:
    """An event code as words: WORKER_ACTIVATED is activated, SLOT_FAILED is slot failed."""
    return code.removeprefix("WORKER_").removeprefix("TASK_").replace("_", " ").lower()


def indented_json(text: str) -> str:
    """JSON text with indentation and every value unchanged. A long text is cut and not indented."""
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
    return "\n" + "  " * depth if depth + is_closing <= MAX_INDENTED_DEPTH else otherwise


def plain(text: str) -> str:
    """The text with control characters other than line ends and tabs escaped, for logs with arbitrary content."""

    def escape(found: re.Match[str]) -> str:
        run = found[0]
        return run if run.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in run)

    return _UNUSUAL.sub(escape, text)
