"""The access log: one line per request, without headers, query strings and bodies.

Successful reads are not logged. Refused and failed requests are logged up to MAX_LINES per window, and the rest is
counted, so that no client can fill the disk.
"""

import time
from collections.abc import Callable
from typing import Any

import structlog

MAX_LINES = 100
LINES_WINDOW_S = 60.0
MAX_PATH_CHARACTERS = 200
# Requested all the time by workers, probes and open pages.
_UNLOGGED_READS = (
    *("/internal/worker/", "/healthz", "/readyz", "/metrics", "/static/", "/api/v1/"),
    *("/workers", "/tasks", "/cycles", "/cost", "/audit", "/access"),
)
log = structlog.get_logger("windlass.server")


class AccessLog:
    """`on_refused` is called with the status of each refused request."""

    def __init__(
        self, on_refused: Callable[[int], None] = lambda _status: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._on_refused = on_refused
        self._clock = clock
        self._window_started = float("-inf")
        self._lines = 0

    def record(self, scope: Any, status: int, caller: str | None, duration_s: float) -> None:
        method, path = scope["method"], scope["path"]
        is_success = 200 <= status < 400
        if is_success:
            is_read = method in ("GET", "HEAD") or path.startswith("/internal/worker/")
            if is_read and (path == "/" or path.startswith(_UNLOGGED_READS)):
                return
        else:
            if 400 <= status < 500:
                self._on_refused(status)
            if not self._has_line():
                return
        client = scope.get("client")
        fields: dict[str, Any] = {
            "method": method[:MAX_PATH_CHARACTERS],
            "path": short_path(path),
            "status": status,
            "duration_ms": round(duration_s * 1000, 1),
            "client": client[0] if client else None,
            "caller": caller,
        }
        (log.info if is_success else log.warning)("handle request", **fields)

    def _has_line(self) -> bool:
        """Whether this window has a line left for a request that did not succeed."""
        now = self._clock()
        if now >= self._window_started + LINES_WINDOW_S:
            dropped = self._lines - MAX_LINES
            self._window_started, self._lines = now, 0
            if dropped > 0:
                log.warning("drop log lines", logger_name="windlass.server", lines=dropped)
        self._lines += 1
        return self._lines <= MAX_LINES


def short_path(path: str) -> str:
    return path if len(path) <= MAX_PATH_CHARACTERS else f"{path[:MAX_PATH_CHARACTERS]}..."
