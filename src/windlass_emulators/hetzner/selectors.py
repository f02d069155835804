"""Label selectors in Hetzner's published grammar.

`k=v`, `k==v`, `k!=v`, `k`, `!k`, `k in (a,b)`, `k notin (a,b)`, joined by commas that mean "and".
The vendor documents that `k!=v` and `k notin (...)` also match resources without the label `k`.
"""

import re
from collections.abc import Callable, Mapping

from windlass_emulators.hetzner.errors import invalid

Labels = Mapping[str, str]
Selector = Callable[[Labels], bool]

_KEY = r"[A-Za-z0-9](?:[A-Za-z0-9._/-]*[A-Za-z0-9])?"
_VALUE = r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)?"
_SET = rf"\(\s*({_VALUE}(?:\s*,\s*{_VALUE})*)\s*\)"
_TERMS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], Selector]], ...] = (
    (re.compile(rf"({_KEY})\s+in\s*{_SET}"), lambda m: _is_in(m[1], m[2])),
    (re.compile(rf"({_KEY})\s+notin\s*{_SET}"), lambda m: _not(_is_in(m[1], m[2]))),
    (re.compile(rf"({_KEY})\s*!=\s*({_VALUE})"), lambda m: _not(_is_in(m[1], m[2]))),
    (re.compile(rf"({_KEY})\s*==?\s*({_VALUE})"), lambda m: _is_in(m[1], m[2])),
    (re.compile(rf"!\s*({_KEY})"), lambda m: _not(_has(m[1]))),
    (re.compile(rf"({_KEY})"), lambda m: _has(m[1])),
)


def parse_selector(text: str) -> Selector:
    """Raises HetznerApiError(invalid_input)."""
    # Split at commas outside parentheses.
    parts = re.split(r",(?![^(]*\))", text) if text.strip() else []
    terms = [_parse_term(part.strip()) for part in parts]
    return lambda labels: all(term(labels) for term in terms)


def _parse_term(term: str) -> Selector:
    for pattern, make in _TERMS:
        if match := pattern.fullmatch(term):
            return make(match)
    raise invalid([("label_selector", f"cannot parse '{term}'")])


def _is_in(key: str, values: str) -> Selector:
    wanted = {value.strip() for value in values.split(",")}
    return lambda labels: key in labels and labels[key] in wanted


def _has(key: str) -> Selector:
    return lambda labels: key in labels


def _not(selector: Selector) -> Selector:
    return lambda labels: not selector(labels)
