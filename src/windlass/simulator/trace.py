"""What happened, line by line, in the words of those to whom it happened."""

import asyncio
import traceback
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import structlog

# A story is read by a person: its beginning sets the scene, its end has the trouble.
MAX_LINES = 400


class Trace:
    def __init__(self) -> None:
        self._lines: list[tuple[float, str, str]] = []
        self._is_over = False
        # Logged as errors: whatever it is, nobody foresaw it.
        self.errors: list[str] = []

    def add(self, who: str, what: str) -> None:
        if not self._is_over:
            self._lines.append((asyncio.get_running_loop().time(), who, what))

    def end(self, why: str) -> None:
        """What happens after this is of no interest."""
        self.add("world", why)
        self._is_over = True

    def text(self, limit: int | None = MAX_LINES) -> str:
        lines = [f"{at:10.3f}  {who:<14} {what}" for at, who, what in self._lines]
        if limit is not None and len(lines) > limit:
            head, tail = lines[: limit // 4], lines[-(limit - limit // 4) :]
            lines = [*head, f"            ... {len(lines) - limit} lines ...", *tail]
        return "\n".join(lines)

    @contextmanager
    def with_logs(self) -> Iterator[None]:
        """Log lines of the real code become lines of the story."""
        before = structlog.get_config()
        structlog.configure(
            processors=[self._on_log],
            wrapper_class=structlog.BoundLogger,
            logger_factory=structlog.ReturnLoggerFactory(),
            cache_logger_on_first_use=False,
        )
        try:
            yield
        finally:
            structlog.configure(**before)

    def _on_log(self, _: Any, level: str, fields: MutableMapping[str, Any]) -> str:
        event = str(fields.pop("event", ""))
        if fields.pop("exc_info", None):
            fields["error"] = traceback.format_exc()
        said = ", ".join(f"{name}={value}" for name, value in fields.items())
        self.add("log", f"{level}: {event} ({said})")
        if level in ("error", "exception", "critical"):
            self.errors.append(f"{event} ({said})")
        return ""
