"""Payload privacy: hides parts of payloads and results where people read them (`redact` of a fleet).

json_path.py describes the paths. A text that was found at a path is also hidden in errors and events of the same task.
What is stored, and what handlers and owners of tasks read, stays as it is.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from windlass.model.json_path import PathParts, parse_path
from windlass.model.redaction import HIDDEN, MIN_SECRET_LENGTH, hide_values, mask_of


@dataclass(frozen=True, slots=True)
class PayloadPrivacy:
    """The paths that are hidden, by queue."""

    paths: Mapping[str, tuple[PathParts, ...]] = field(default_factory=dict)

    def hides(self, queue: str) -> bool:
        return bool(self.paths.get(queue))

    def redact(self, queue: str, text: str | None) -> str | None:
        """JSON text with the parts of this queue hidden. A text that cannot be parsed is hidden as a whole."""
        paths = self.paths.get(queue)
        if not paths or text is None:
            return text
        try:
            value = json.loads(text)
            for path in paths:
                value = _replace(value, path)
            return json.dumps(value, ensure_ascii=False)
        except (ValueError, RecursionError):
            return json.dumps(HIDDEN)

    def redact_text(self, queue: str, message: str | None, *values: str | None) -> str | None:
        """A message without the texts that stand at the hidden parts of these JSON values."""
        paths = self.paths.get(queue)
        if not paths or message is None:
            return message
        found: set[str] = set()
        for text in values:
            try:
                value = json.loads(text) if text is not None else None
                found.update(part for path in paths for part in _texts(value, path))
            except (ValueError, RecursionError):
                return HIDDEN
        return hide_values(message, mask_of(found).secrets)


def privacy_of(redacted: Sequence[tuple[Sequence[str], Sequence[str]]]) -> PayloadPrivacy:
    """From pairs of queues and paths, one per fleet."""
    paths: dict[str, tuple[PathParts, ...]] = {}
    for queues, hidden in redacted:
        for queue in queues:
            paths[queue] = (*paths.get(queue, ()), *map(parse_path, hidden))
    return PayloadPrivacy(paths)


def _replace(value: Any, path: PathParts) -> Any:
    if not path:
        return HIDDEN
    part, rest = path[0], path[1:]
    if isinstance(part, str) and isinstance(value, dict) and part in value:
        return {**value, part: _replace(value[part], rest)}
    if part is None and isinstance(value, list):
        return [_replace(item, rest) for item in value]
    if isinstance(part, int) and isinstance(value, list) and part < len(value):
        return [_replace(item, rest) if number == part else item for number, item in enumerate(value)]
    return value


def _texts(value: Any, path: PathParts) -> Iterator[str]:
    """All texts in the parts of a value at this path."""
    if not path:
        yield from _all_texts(value)
        return
    part, rest = path[0], path[1:]
    if isinstance(part, str) and isinstance(value, dict) and part in value:
        yield from _texts(value[part], rest)
    elif isinstance(value, list) and not isinstance(part, str):
        items = value if part is None else value[part : part + 1]
        for item in items:
            yield from _texts(item, rest)


def _all_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        if len(value) >= MIN_SECRET_LENGTH:
            yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _all_texts(item)
