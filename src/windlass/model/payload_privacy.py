"""Payload privacy: hides parts of payloads and results where people read them (`redact` of a fleet).

json_path.py describes the paths. A text that was found at a path is also hidden in errors and events of the same task.
Where the task itself is not known, as in lists of events, everything that its handler may have written is hidden.
What is stored, and what handlers and owners of tasks read, stays as it is.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from windlass.model.event import Event
from windlass.model.json_path import PathParts, parse_path
from windlass.model.redaction import HIDDEN, MIN_SECRET_LENGTH, quick_mask_of

# Texts at the hidden paths of one task. With more of them, or of their lines, its messages are hidden as a whole.
MAX_TEXTS = 100
MAX_TEXT_LINES = 1_000
# Events of tasks whose texts no handler writes.
_PLAIN_EVENTS = frozenset({"TASK_RETRIED", "TASK_CANCELLED", "ATTEMPTS_REFUNDED", "LATE_RESULT"})
_ATTEMPT = re.compile(r"attempt \d+ of \d+: ")
# Texts in the details of an event that no handler writes.
_PLAIN_DETAILS = frozenset({"code", "error_code", "started_at"})


@dataclass(frozen=True, slots=True)
class PayloadPrivacy:
    """The paths that are hidden, by queue."""

    paths: Mapping[str, tuple[PathParts, ...]] = field(default_factory=dict)

    def hides(self, queue: str | None) -> bool:
        """Whether tasks of this queue have hidden parts. None: unknown, because the task was purged; then any may."""
        return bool(self.paths.get(queue)) if queue is not None else any(self.paths.values())

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
        if message is None or not self.hides(queue):
            return message
        return self.text_filter(queue, *values)(message)

    def text_filter(self, queue: str, *values: str | None) -> Callable[[str], str]:
        """Return a function that works like redact_text, for many messages about the same values."""
        paths, found = self.paths.get(queue, ()), set[str]()
        for text in values:
            try:
                value = json.loads(text) if text is not None else None
                found.update(part for path in paths for part in _texts(value, path))
            except (ValueError, RecursionError):
                return _hide_all
            if len(found) > MAX_TEXTS or sum(text.count("\n") for text in found) > MAX_TEXT_LINES:
                return _hide_all
        # A short text is hidden as a word only: it may be a part of others.
        short = "|".join(re.escape(text) for text in found if len(text) < MIN_SECRET_LENGTH)
        words = re.compile(rf"(?<!\w)(?:{short})(?!\w)") if short else None
        mask = quick_mask_of(found)

        def hide(message: str) -> str:
            return mask.hide(words.sub(HIDDEN, message) if words is not None else message)

        return hide

    def redact_event(self, event: Event, hide: Callable[[str], str] | None = None) -> Event:
        """The event without hidden parts of its task. `hide`: the text_filter of its task, if that is known."""
        hide = hide or _hide_all
        if event.task_id is None or event.code in _PLAIN_EVENTS or not self.hides(event.queue):
            return event
        detail = {
            name: hide(value) if isinstance(value, str) and name not in _PLAIN_DETAILS else value
            for name, value in (event.detail or {}).items()
        }
        return replace(event, reason=hide(event.reason), detail=detail if event.detail is not None else None)


def _hide_all(text: str) -> str:
    attempt = _ATTEMPT.match(text)
    return f"{attempt[0] if attempt else ''}{HIDDEN}"


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
    """Texts, numbers as a program prints them, and names of members."""
    if isinstance(value, str):
        if value.strip():
            yield value
    elif isinstance(value, dict | list):
        for item in (*value, *value.values()) if isinstance(value, dict) else value:
            yield from _all_texts(item)
    elif value is not None and not isinstance(value, bool):
        yield str(value)
