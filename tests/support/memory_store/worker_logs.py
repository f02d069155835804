"""Output of workers in memory, as in the SQL file 16_worker_logs.sql. Implements ports/worker_logs.py."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from support.memory_store.workers import MemoryWorker
from windlass.model.errors import BadInput
from windlass.model.event import Event
from windlass.model.task import storable
from windlass.model.worker import WorkerStatus
from windlass.model.worker_log import (
    MAX_BOOT_LOG_CHARACTERS,
    MAX_CALL_BYTES,
    MAX_CHUNKS,
    MAX_LINES_READ,
    LogChunk,
    LogSource,
    WorkerLogLine,
    WorkerLogPage,
    deleted_line,
    dropped_line,
)

if TYPE_CHECKING:
    from support.memory_store.tables import Tables

ROW_BYTES = 64
FAILURES = ("TASK_ERROR", "TASK_FAILED")
MAX_MINUTE_BYTES = 16 << 20


@dataclass(slots=True)
class MemoryLogChunk:
    id: int
    worker_id: str
    task_id: int | None
    attempt: int | None
    source: LogSource
    at: datetime
    chunk: LogChunk

    @property
    def size_bytes(self) -> int:
        return len("\n".join(self.chunk.lines).encode()) + 4 * len(self.chunk.lines) + ROW_BYTES


@dataclass(slots=True)
class LogTotals:
    minute_at: datetime
    minute_bytes: int = 0
    dropped_lines: int = 0
    deleted_lines: int = 0
    last_batch: UUID | None = None


@dataclass(slots=True)
class WorkerLogTable:
    rows: list[MemoryLogChunk] = field(default_factory=list)
    totals: dict[str, LogTotals] = field(default_factory=dict)
    last_id: int = 0

    def add(self, row: MemoryLogChunk) -> None:
        self.last_id += 1
        self.rows.append(replace(row, id=self.last_id))

    def of_worker(self, worker_id: str) -> list[MemoryLogChunk]:
        return [row for row in self.rows if row.worker_id == worker_id]

    def stored_bytes(self, rows: Sequence[MemoryLogChunk]) -> int:
        return sum(row.size_bytes for row in rows if row.source is LogSource.WORKER)

    def delete(self, rows: Sequence[MemoryLogChunk]) -> int:
        gone = {row.id for row in rows}
        self.rows = [row for row in self.rows if row.id not in gone]
        for row in rows:
            if row.worker_id in self.totals and row.source is LogSource.WORKER:
                self.totals[row.worker_id].deleted_lines += len(row.chunk.lines)
        return len(rows)

    def trim(self, worker_id: str, max_bytes: int) -> None:
        own = [row for row in self.of_worker(worker_id) if row.source is LogSource.WORKER]
        if self.stored_bytes(own) <= max_bytes:
            return
        newer, old = 0, []
        for row in reversed(own):
            newer += row.size_bytes
            if newer > int(0.9 * max_bytes):
                old.append(row)
        self.delete(old)

    def delete_old(self, before: datetime, max_bytes: int, limit: int) -> int:
        excess, older, old = self.stored_bytes(self.rows) - max_bytes, 0, []
        for row in sorted(self.rows, key=lambda row: (row.at, row.id))[:limit]:
            if row.at < before or older < excess:
                old.append(row)
            older += row.size_bytes
        return self.delete(old)

    def forget_worker(self, worker_id: str) -> None:
        self.rows = [row for row in self.rows if row.worker_id != worker_id]
        self.totals.pop(worker_id, None)

    def set_boot(self, worker: MemoryWorker, output: str, now: datetime) -> None:
        if not output or worker.status is WorkerStatus.TERMINATED or worker.last_heartbeat is not None:
            return
        lines = tuple(storable(output)[-MAX_BOOT_LOG_CHARACTERS:].split("\n"))
        chunk = LogChunk(lines, (0,) * len(lines))
        for row in self.of_worker(worker.id):
            if row.source is LogSource.BOOT:
                row.at, row.chunk = now, chunk
                return
        self.add(MemoryLogChunk(0, worker.id, None, None, LogSource.BOOT, now, chunk))


def append(tables: "Tables", worker_id: str, batch_id: UUID, chunks: Sequence[LogChunk]) -> None:
    """The caller has checked that the worker exists."""
    size = len(json.dumps([{"lines": chunk.lines, "ages_ms": chunk.ages_ms} for chunk in chunks]).encode())
    if len(chunks) > MAX_CHUNKS or size > MAX_CALL_BYTES:
        limit = f"at most {MAX_CHUNKS} chunks and {MAX_CALL_BYTES:,} bytes of output are accepted in one call"
        raise BadInput(f"storing output: {limit}.")
    logs, now = tables.worker_logs, tables.now()
    totals = logs.totals.setdefault(worker_id, LogTotals(now))
    if totals.last_batch == batch_id:
        return
    totals.last_batch = batch_id
    if now >= totals.minute_at + timedelta(minutes=1):
        totals.minute_at, totals.minute_bytes = now, 0
    if totals.minute_bytes + size > MAX_MINUTE_BYTES:
        totals.dropped_lines += sum(len(chunk.lines) + chunk.dropped for chunk in chunks)
        return
    for chunk in chunks:
        holder = _holder(tables, worker_id, chunk.task_id)
        lines = tuple(storable(line).replace("\n", " ") for line in chunk.lines)
        ages_ms = tuple(max(0, age) for age in (*chunk.ages_ms, *[0] * len(lines))[: len(lines)])
        row = MemoryLogChunk(
            0, holder or worker_id, chunk.task_id if holder else None, chunk.attempt if holder else None,
            LogSource.WORKER, now, replace(chunk, lines=lines, ages_ms=ages_ms),
        )  # fmt: skip
        logs.add(row)
        totals.minute_bytes += row.size_bytes
        logs.totals.setdefault(row.worker_id, LogTotals(now)).dropped_lines += chunk.dropped
        logs.trim(row.worker_id, tables.retention.worker_log_mb << 20)


def _holder(tables: "Tables", worker_id: str, task_id: int | None) -> str | None:
    """The worker that had the attempt, if this one may act for it."""
    if task_id is None:
        return None
    task = tables.tasks.rows.get(task_id)
    workers = [task.worker_id] if task is not None else []
    workers += [event.worker_id for event in reversed(tables.event_log.latest(task_id, None, 50))]
    return next((each for each in workers if each is not None and tables.acts_for(worker_id, each)), None)


def last_lines(logs: WorkerLogTable, worker_id: str, count: int) -> list[str]:
    rows = [row for row in logs.of_worker(worker_id) if row.chunk.lines][-count:]
    lines = [line for row in rows for line in row.chunk.lines][-count:]
    kept: list[str] = []
    for line in reversed(lines):
        shown = "".join(c for c in line[:500] if c.isprintable())
        if sum(map(len, kept)) + len(shown) > 3000:
            break
        kept.append(shown)
    return kept[::-1]


def diagnostics_of(
    worker: MemoryWorker, before: WorkerStatus, running: int, logs: WorkerLogTable, events: Sequence[Event]
) -> dict[str, Any]:
    """The part of the SQL function record_diagnostics that tests compare."""
    totals = logs.totals.get(worker.id)
    found = {
        "code": worker.code,
        "reason": worker.reason,
        "status_before": str(before),
        "vitals": dict(worker.metadata) or None,
        "last_error": next((_last_error(event) for event in reversed(events) if event.code in FAILURES), None),
        "running_tasks": running or None,
        "dropped_lines": (totals.dropped_lines if totals is not None else 0) or None,
    }
    if worker.spawned.prepare_code is not None:
        found["preparation"] = {"code": worker.spawned.prepare_code, "output": worker.spawned.prepare_reason}
    return {name: value for name, value in found.items() if value is not None} | {
        "last_lines": last_lines(logs, worker.id, 20)
    }


def _last_error(event: Event) -> dict[str, Any]:
    detail = event.detail or {}
    return {
        "code": detail.get("error_code"),
        "task_id": event.task_id,
        "attempt": detail.get("attempt"),
        "at": event.at.isoformat(),
    }


def read_page(
    rows: Sequence[MemoryLogChunk], wanted: int, after: int | None, *, is_sorted: bool, deleted: int = 0
) -> WorkerLogPage:
    wanted = min(wanted, MAX_LINES_READ)
    if after is not None:
        rows = [row for row in rows if row.id > after and row.source is LogSource.WORKER]
    lines = [line for row in rows for line in _lines_of(row)]
    if is_sorted:
        lines.sort(key=lambda line: line.at or rows[0].at)
    if after is None and deleted and sum(len(row.chunk.lines) for row in rows) < wanted:
        lines.insert(0, deleted_line(lines[0].at if lines else None, rows[0].worker_id if rows else "", deleted))
    kept = lines if after is not None else lines[-wanted:]
    return WorkerLogPage(tuple(kept), rows[-1].id if rows else after or 0)


def _lines_of(row: MemoryLogChunk) -> list[WorkerLogLine]:
    times = [row.at - timedelta(milliseconds=age_ms) for age_ms in row.chunk.ages_ms]
    attempt = (row.worker_id, row.task_id, row.attempt, row.source)
    lines = [WorkerLogLine(at, text, *attempt) for at, text in zip(times, row.chunk.lines, strict=True)]
    if row.chunk.dropped:
        first_at = times[0] if times else row.at
        lines.insert(0, dropped_line(first_at, row.worker_id, row.chunk.dropped, row.task_id, row.attempt))
    return lines


class MemoryWorkerLogs:
    _tables: "Tables"

    async def worker_log(self, worker_id: str, lines: int, *, after: int | None = None) -> WorkerLogPage:
        logs = self._tables.worker_logs
        totals = logs.totals.get(worker_id)
        deleted = totals.deleted_lines if totals is not None else 0
        return read_page(logs.of_worker(worker_id), lines, after, is_sorted=True, deleted=deleted)

    async def task_log(
        self, task_id: int, lines: int, *, attempt: int | None = None, after: int | None = None
    ) -> WorkerLogPage:
        rows = [
            row for row in self._tables.worker_logs.rows if row.task_id == task_id and attempt in (None, row.attempt)
        ]
        return read_page(rows, lines, after, is_sorted=False)

    async def diagnostics(self, worker_id: str) -> Mapping[str, Any] | None:
        return self._tables.diagnostics.get(worker_id)
