"""Output of workers over PostgreSQL. Implements ports/worker_logs.py; workers write it with append_logs."""

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from windlass.model.worker_log import (
    MAX_LINES_READ,
    LogSource,
    WorkerLogLine,
    WorkerLogPage,
    deleted_line,
    dropped_line,
)
from windlass.store.database import DatabaseStore
from windlass.store.queries import read_queries

QUERIES = read_queries("windlass.store", "worker_logs.sql")
# Limits of one page. One chunk more may be read.
MAX_READ_BYTES = 4 << 20
MAX_READ_CHUNKS = 5_000


class PostgresWorkerLogs(DatabaseStore):
    async def worker_log(self, worker_id: str, lines: int, *, after: int | None = None) -> WorkerLogPage:
        lines = min(lines, MAX_LINES_READ)
        rows = await self._log_rows("worker", worker_id, None, lines, after)
        # The attempts of one batch are stored one after the other.
        found = sorted(_lines_of(rows), key=lambda line: line.at or rows[0]["at"])
        if after is None and sum(row["lines"] for row in rows) < lines:
            count = await self._database.fetchval("reading output", QUERIES["deleted_lines"], worker_id)
            if count:
                found.insert(0, deleted_line(found[0].at if found else None, worker_id, count))
        return _page(rows, found, lines, after)

    async def task_log(
        self, task_id: int, lines: int, *, attempt: int | None = None, after: int | None = None
    ) -> WorkerLogPage:
        lines = min(lines, MAX_LINES_READ)
        rows = await self._log_rows("task", task_id, attempt, lines, after)
        return _page(rows, _lines_of(rows), lines, after)

    async def diagnostics(self, worker_id: str) -> Mapping[str, Any] | None:
        text = await self._database.fetchval("reading diagnostics", QUERIES["diagnostics"], worker_id)
        found: dict[str, Any] | None = json.loads(text) if text is not None else None
        return found

    async def _log_rows(
        self, kind: str, subject: str | int, attempt: int | None, lines: int, after: int | None
    ) -> Sequence[Any]:
        arguments = (subject, attempt, lines, MAX_READ_BYTES, MAX_READ_CHUNKS)
        if after is None:
            return await self._database.fetch("reading output", QUERIES[f"log_tail_{kind}"], *arguments)
        return await self._database.fetch("reading output", QUERIES[f"log_after_{kind}"], *arguments, after)


def _lines_of(rows: Sequence[Any]) -> list[WorkerLogLine]:
    lines: list[WorkerLogLine] = []
    for row in rows:
        attempt = (row["worker_id"], row["task_id"], row["attempt"], LogSource(row["source"]))
        times = [row["at"] - timedelta(milliseconds=age_ms) for age_ms in row["ages_ms"]]
        if row["dropped_lines"]:
            worker_id, task_id, number, _ = attempt
            first_at = times[0] if times else row["at"]
            lines.append(dropped_line(first_at, worker_id, row["dropped_lines"], task_id, number))
        texts = row["body"].split("\n") if row["lines"] else []
        lines += [WorkerLogLine(at, text, *attempt) for at, text in zip(times, texts, strict=False)]
    return lines


def _page(rows: Sequence[Any], lines: list[WorkerLogLine], wanted: int, after: int | None) -> WorkerLogPage:
    # A tail is cut at its beginning. A continued page is never cut: its cursor would skip the rest.
    kept = lines if after is not None else lines[-wanted:]
    return WorkerLogPage(tuple(kept), rows[-1]["id"] if rows else after or 0)
