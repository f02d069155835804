"""Retention as in the SQL function sweep: a bounded number of rows of each kind at a time."""

from itertools import islice, takewhile

from support.memory_store.interval import interval
from support.memory_store.ledger import forget_spans
from support.memory_store.tables import Tables
from support.memory_store.workers import MemoryWorker
from windlass.model.config import Retention
from windlass.model.task import TaskStatus

MAX_SWEPT_PER_KIND = 1000


def sweep(tables: Tables, kept: Retention) -> int:
    """Returns how many rows were deleted."""
    deleted = _sweep_ledger(tables, kept)
    while (count := _sweep_once(tables, kept)) >= MAX_SWEPT_PER_KIND:
        deleted += count
    cycles = tables.cycles.forget(tables.now() - interval(kept.cycles_s), MAX_SWEPT_PER_KIND)
    logs_before, max_bytes = tables.now() - interval(kept.worker_logs_s), kept.worker_logs_mb << 20
    while (logs := tables.worker_logs.delete_old(logs_before, max_bytes, MAX_SWEPT_PER_KIND)) > 0:
        deleted += logs
    return deleted + count + cycles


def _sweep_ledger(tables: Tables, kept: Retention) -> int:
    now = tables.now()
    settled = tables.ledger.forget(now - interval(kept.charges_s), MAX_SWEPT_PER_KIND)
    spans_before = now - interval(max(kept.complete_s, kept.failed_s))
    return settled + forget_spans(tables.workers.rows.values(), spans_before, MAX_SWEPT_PER_KIND)


def _sweep_once(tables: Tables, kept: Retention) -> int:
    now, tasks = tables.now(), tables.tasks
    complete = tasks.ended_before(TaskStatus.COMPLETE, now - interval(kept.complete_s))
    failed = tasks.ended_before(TaskStatus.FAILED, now - interval(kept.failed_s))
    old = [row for rows in (complete, failed) for row in islice(rows, MAX_SWEPT_PER_KIND)]
    for row in old:
        tasks.delete(row)
    events = tables.event_log.forget(now - interval(kept.events_s), MAX_SWEPT_PER_KIND)
    return len(old) + events + _forget_workers(tables, kept)


def _forget_workers(tables: Tables, kept: Retention) -> int:
    before = tables.now() - interval(max(kept.complete_s, kept.failed_s, kept.events_s))

    def is_old(worker: MemoryWorker) -> bool:
        return worker.terminated_at is not None and worker.terminated_at < before

    ended = takewhile(is_old, tables.workers.terminated.values())
    # A worker is kept until its bill is settled.
    old = list(islice((worker for worker in ended if worker.spawned.settle_at is None), MAX_SWEPT_PER_KIND))
    for worker in old:
        tables.workers.forget(worker)
        tables.worker_logs.forget_worker(worker.id)
        tables.diagnostics.pop(worker.id, None)
        tables.tasks.running.pop(worker.id, None)
    return len(old)
