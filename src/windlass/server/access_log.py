"""The access log: one line per request, without headers, query strings and bodies.

Successful reads are not logged. Refused requests (4xx) are counted: the first of each status per window is logged as an
example, and the counts follow at the end of the window. Other requests are logged up to MAX_LINES per caller and
window. All requests without a token or session are one caller, and so are all failed requests (5xx). So no client can
fill the disk.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import structlog

MAX_LINES = 100
LINES_WINDOW_S = 60.0
MAX_PATH_CHARACTERS = 200
# Requested all the time by workers, probes and open pages.
_UNLOGGED_READS = (
    *("/internal/worker/", "/healthz", "/readyz", "/metrics", "/static/", "/api/v1/"),
    *("/workers", "/tasks", "/cycles", "/cost", "/what-if", "/audit", "/access"),
)
log = structlog.get_logger("windlass.server")


class AccessLog:
    """`on_refused` is called with the status of each refused request."""

    def __init__(
        self, on_refused: Callable[[int], None] = lambda _status: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._on_refused = on_refused
        self._clock = clock
        self._window_started = clock()
        # Refused requests by status, and others by caller, since the window started.
        self._refused: Counter[int] = Counter()
        self._lines: Counter[str] = Counter()

    async def run(self) -> None:
        """Write the counts of each window, also if no further request arrives."""
        while True:
            await asyncio.sleep(LINES_WINDOW_S)
            self._end_window()

    def record(self, scope: Any, status: int, caller: str | None, duration_s: float) -> None:
        method, path = scope["method"], scope["path"]
        is_success = 200 <= status < 400
        if is_success:
            is_read = method in ("GET", "HEAD") or path.startswith("/internal/worker/")
            if is_read and (path == "/" or path.startswith(_UNLOGGED_READS)):
                return
        if not self._take_line(status, (caller or "no caller") if is_success else "failed"):
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

    def _take_line(self, status: int, group: str) -> bool:
        """Count a request. True if this window has a line left for its group."""
        if self._clock() >= self._window_started + LINES_WINDOW_S:
            self._end_window()
        if 400 <= status < 500:
            self._on_refused(status)
            self._refused[status] += 1
            return self._refused[status] == 1
        self._lines[group] += 1
        return self._lines[group] <= MAX_LINES

    def _end_window(self) -> None:
        if self._refused.total() > len(self._refused):  # others than those with a line
            log.warning(
                "count refused requests",
                requests=self._refused.total(),
                by_status={str(status): count for status, count in sorted(self._refused.items())},
            )
        dropped = sum(lines - MAX_LINES for lines in self._lines.values() if lines > MAX_LINES)
        if dropped:
            log.warning("drop log lines", logger_name="windlass.server", lines=dropped)
        self._window_started, self._refused, self._lines = self._clock(), Counter(), Counter()


def short_path(path: str) -> str:
    return path if len(path) <= MAX_PATH_CHARACTERS else f"{path[:MAX_PATH_CHARACTERS]}..."
