"""The trace of a simulation: one line per event, with its virtual time and source."""

import asyncio
import traceback
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import structlog

# Lines printed with a violation: the first quarter from the start of the run, the rest from its end.
MAX_LINES = 400


def shorten(text: str, limit: int = MAX_LINES) -> str:
    """The first and last lines of a trace."""
    lines = text.split("\n")
    if len(lines) > limit:
        head, tail = lines[: limit // 4], lines[-(limit - limit // 4) :]
        lines = [*head, f"            ... {len(lines) - limit} lines ...", *tail]
    return "\n".join(lines)


class Trace:
    def __init__(self) -> None:
        self._lines: list[tuple[float, str, str]] = []
        self._is_closed = False
        # Events logged at level error or above. A simulation fails on the first one.
        self.errors: list[str] = []

    def add(self, source: str, event: str) -> None:
        if not self._is_closed:
            self._lines.append((asyncio.get_running_loop().time(), source, event))

    def close(self, event: str) -> None:
        """Add a last line and ignore every later one."""
        self.add("simulation", event)
        self._is_closed = True

    def text(self, limit: int | None = MAX_LINES) -> str:
        text = "\n".join(f"{at:10.3f}  {source:<14} {event}" for at, source, event in self._lines)
        return text if limit is None else shorten(text, limit)

    @contextmanager
    def capture_logs(self) -> Iterator[None]:
        """Add the log lines of the real code to the trace."""
        before = structlog.get_config()
        structlog.configure(
            processors=[self._add_log],
            wrapper_class=structlog.BoundLogger,
            logger_factory=structlog.ReturnLoggerFactory(),
            cache_logger_on_first_use=False,
        )
        try:
            yield
        finally:
            structlog.configure(**before)

    def _add_log(self, _: Any, level: str, fields: MutableMapping[str, Any]) -> str:
        event = str(fields.pop("event", ""))
        if fields.pop("exc_info", None):
            fields["error"] = traceback.format_exc()
        text = f"{event} ({', '.join(f'{name}={value}' for name, value in fields.items())})"
        self.add("log", f"{level}: {text}")
        if level in ("error", "exception", "critical"):
            self.errors.append(text)
        return ""
