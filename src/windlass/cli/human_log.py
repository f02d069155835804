"""Log entries as short lines for a person at a terminal: the time of day, then a sentence.

Decisions, changes of workers, holds and alerts have sentences of their own, as in the demo; the loaded settings are
counted by source. Requests that succeeded and cycles that decide the same as before are left out: the JSON log has
them. Every other entry is shown with its fields.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping
from datetime import datetime
from typing import Any

import structlog

from windlass.cli.output import printable
from windlass.model.error_text import error_headline

_RED, _YELLOW, _DIM, _RESET = "\x1b[31m", "\x1b[33m", "\x1b[2m", "\x1b[0m"
_COLORS = {"warning": _YELLOW, "error": _RED, "critical": _RED}
# Fields that say nothing to a person, or that the line has already.
_HIDDEN = ("event", "level", "timestamp", "exception", "cycle", "logger_name")
# Decisions that are shown each time; of the others only a new kind.
_ACTING = ("spawn", "drain")
# A source that is an environment variable.
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")
# One sentence per event. None: left out.
_SENTENCES: Mapping[str, str | None] = {
    "ignore setting": "{reason}",
    "started server": None,
    "finish cycle": "{fleet}: {decision}",
    "skip cycle": "{fleet}: {decision}",
    "wait as standby": "standby: {reason}",
    "change worker": "{worker} is {change}: {reason}",
    "fail worker": "{worker} failed: {reason}",
    # By a plan; the alert itself follows as "change alert".
    "fire alert": None,
    "change alert": "alert {code} {kind}: {reason}",
    "started orchestrator": "started with pid {pid}; database: {database}",
    "stopped orchestrator": "stopped",
    "shut down fleet": "{fleet}: shutting down, at most {limit_s:.0f} s for tasks to finish; {hint}",
}


class HumanRenderer:
    """The last processor of structlog. `clock` returns local time."""

    def __init__(self, *, has_colors: bool, clock: Callable[[], datetime] = datetime.now) -> None:
        self._has_colors = has_colors
        self._clock = clock
        self._last_kind: dict[str, str] = {}

    def __call__(self, _logger: Any, _method: str, entry: MutableMapping[str, Any]) -> str:
        level, event = str(entry.get("level", "info")), str(entry.get("event", ""))
        if event == "handle request" and level == "info":
            raise structlog.DropEvent
        if event in ("finish cycle", "skip cycle") and not self._record_decision(entry):
            raise structlog.DropEvent
        text = self._text(event, entry)
        if text is None:
            raise structlog.DropEvent
        exception = entry.get("exception")
        first, *more = "\n".join([printable(text), *([printable(str(exception))] if exception else [])]).split("\n")
        # Further lines begin below the text of the first.
        indented = "".join(f"\n          {line}" for line in more)
        return f"{self._paint(_DIM, f'{self._clock():%H:%M:%S}')}  {self._paint(_COLORS.get(level), first)}{indented}"

    def _record_decision(self, entry: Mapping[str, Any]) -> bool:
        """Record the kind of a decision. True if it acts, or if its kind differs from the fleet's last one."""
        fleet, decision = str(entry.get("fleet", "")), str(entry.get("decision", ""))
        kind = re.sub(r"\d+", "", decision.partition(":")[0])
        previous, self._last_kind[fleet] = self._last_kind.get(fleet), kind
        return kind.startswith(_ACTING) or kind != previous

    def _text(self, event: str, entry: Mapping[str, Any]) -> str | None:
        if event == "announce fleets":
            return _next_steps(entry)
        if event == "loaded configuration":
            return _sources(entry)
        if event == "change worker" and entry.get("change") == "active":
            return f"{entry.get('worker')} is active"
        if event == "reloaded configuration" and not entry.keys() & {"new", "changed", "removed"}:
            return "reloaded configuration: no fleet changed"
        if event in _SENTENCES:
            sentence = _SENTENCES[event]
            try:
                return sentence.format(**entry).removesuffix(": ") if sentence is not None else None
            except (KeyError, ValueError, TypeError):
                pass  # an entry with other fields is shown with all of them
        fields = [f"{name}={_field(value)}" for name, value in entry.items() if name not in _HIDDEN]
        return f"{event}: {', '.join(fields)}" if fields else event

    def _paint(self, color: str | None, text: str) -> str:
        return f"{color}{text}{_RESET}" if self._has_colors and color is not None else text


def _next_steps(entry: Mapping[str, Any]) -> str:
    """The entry "announce fleets": one line per step."""
    steps = [f"ready: {entry.get('fleets', '')}"]
    steps += [f"{name:<10} {step}" for name, step in entry.get("next", {}).items()]
    return "\n".join(steps)


def _sources(entry: Mapping[str, Any]) -> str:
    """The entry "loaded configuration": how many settings each source gives. Environment variables by name."""
    counts = Counter(setting["source"] for setting in entry.get("settings", {}).values())
    del counts["default"]
    variables = [source for source in counts if _VARIABLE.fullmatch(source)]
    given = [f"{count} from {source}" for source, count in counts.items() if source not in variables]
    given += [f"{', '.join(variables)} from the environment"] if variables else []
    return f"settings: {'; '.join(given) or 'all defaults'} (`windlass config show` lists all settings)"


def _field(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return error_headline(text) if "\n" in text else text
