"""Label selectors, in the grammar that Hetzner publishes.

`k=v`, `k==v`, `k!=v`, `k`, `!k`, `k in (a,b)`, `k notin (a,b)`, and any of them joined by commas, which mean "and".
As published, `k!=v` and `k notin (...)` also hold for what has no label `k`.
"""

import re
from collections.abc import Callable, Mapping

from windlass_emulators.hetzner.errors import HetznerApiError

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
    """Raises ApiError(invalid_input)."""
    terms = [_parse_term(term.strip()) for term in _split(text)]
    return lambda labels: all(term(labels) for term in terms)


def _split(text: str) -> list[str]:
    """At the commas that are not within parentheses."""
    return re.split(r",(?![^(]*\))", text) if text.strip() else []


def _parse_term(term: str) -> Selector:
    for pattern, make in _TERMS:
        if match := pattern.fullmatch(term):
            return make(match)
    raise HetznerApiError(
        "invalid_input",
        f"invalid input in field 'label_selector': cannot parse '{term}'",
        {"fields": [{"name": "label_selector", "messages": [f"cannot parse '{term}'"]}]},
    )


def _is_in(key: str, values: str) -> Selector:
    wanted = {value.strip() for value in values.split(",")}
    return lambda labels: key in labels and labels[key] in wanted


def _has(key: str) -> Selector:
    return lambda labels: key in labels


def _not(selector: Selector) -> Selector:
    return lambda labels: not selector(labels)
