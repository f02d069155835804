"""Writes log lines to the table windlass.logs without delaying the callers.

A line enters a bounded queue, from any thread, and is written in batches. When the queue is full, or the database is
unavailable for longer than the queue has room, lines are dropped and counted. Standard error has all of them.
"""

import asyncio
import json
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from windlass.model.errors import DatabaseUnavailable
from windlass.model.task import storable
from windlass.store.database import DatabaseStore

MAX_WAITING = 10_000
MAX_BATCH = 1_000
WRITE_INTERVAL_S = 1.0
MAX_MESSAGE_CHARACTERS = 4_000
# Fields that name the worker and the cycle of a line.
_WORKER_FIELDS = ("worker_id", "worker")
_CYCLE_FIELDS = ("cycle_id", "cycle")


class PostgresLogStore(DatabaseStore):
    async def add_logs(self, rows: list[dict[str, Any]]) -> None:
        await self._database.call("writing log lines", "windlass_internal.add_logs", json.dumps(rows))


class LogSink:
    """`on_dropped` gets the number of dropped lines."""

    def __init__(
        self, store: PostgresLogStore, on_dropped: Callable[[int], None] = lambda _count: None, limit: int = MAX_WAITING
    ) -> None:
        self._store = store
        self._on_dropped = on_dropped
        self._limit = limit
        self._waiting: deque[dict[str, Any]] = deque()
        self._dropped = 0
        self._lock = threading.Lock()

    def take(self, line: Mapping[str, Any]) -> None:
        """Add a line. Never blocks; callable from any thread."""
        with self._lock:
            if len(self._waiting) >= self._limit:
                self._dropped += 1
            else:
                self._waiting.append(dict(line))

    async def run(self) -> None:
        """Write batches until cancelled, then write the rest if the database answers."""
        try:
            while True:
                await asyncio.sleep(WRITE_INTERVAL_S)
                await self.write()
        finally:
            await self.write()

    async def write(self) -> None:
        """Write queued lines. They stay queued while the database is unavailable; lines that it refuses are dropped,
        because it would refuse them again."""
        for _ in range(self._limit // MAX_BATCH + 1):
            lines = self._take_batch()
            if not lines:
                return
            try:
                await self._store.add_logs([_row(line) for line in lines])
            except DatabaseUnavailable:
                self._put_back(lines)
                return
            except Exception:
                with self._lock:
                    self._dropped += len(lines)
                return

    def _take_batch(self) -> list[dict[str, Any]]:
        with self._lock:
            dropped, self._dropped = self._dropped, 0
            lines = [self._waiting.popleft() for _ in range(min(MAX_BATCH, len(self._waiting)))]
        if dropped:
            self._on_dropped(dropped)
            lines.append({"level": "warning", "event": f"{dropped} log lines were not written to the database"})
        return lines

    def _put_back(self, lines: list[dict[str, Any]]) -> None:
        with self._lock:
            room = self._limit - len(self._waiting)
            # Without room, the oldest lines are dropped.
            kept = lines[max(0, len(lines) - room) :]
            self._dropped += len(lines) - len(kept)
            self._waiting.extendleft(reversed(kept))


def _row(line: Mapping[str, Any]) -> dict[str, Any]:
    fields = dict(line)
    level, message, at = fields.pop("level", "info"), fields.pop("event", ""), fields.pop("timestamp", None)
    worker_id = next((fields.pop(name) for name in _WORKER_FIELDS if isinstance(fields.get(name), str)), None)
    cycle_id = next((fields.pop(name) for name in _CYCLE_FIELDS if isinstance(fields.get(name), int)), None)
    plain = json.loads(json.dumps(fields, default=str))
    return {
        "at": at,
        "level": str(level),
        "message": storable(str(message)[:MAX_MESSAGE_CHARACTERS]),
        "worker_id": storable(worker_id) if worker_id is not None else None,
        "cycle_id": cycle_id,
        "fields": _storable(plain) or None,
    }


def _storable(value: Any) -> Any:
    if isinstance(value, str):
        return storable(value[:MAX_MESSAGE_CHARACTERS])
    if isinstance(value, dict):
        return {storable(name): _storable(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_storable(each) for each in value]
    return value
