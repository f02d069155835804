"""Builds the snapshot of a fleet from the tables. Reads only."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import islice, takewhile
from typing import Any

from support.memory_store.events import EventLog
from support.memory_store.fleets import FleetRow
from support.memory_store.interval import interval
from support.memory_store.ledger import to_settle
from support.memory_store.tables import Tables
from support.memory_store.tasks import MemoryTask, TaskTable
from support.memory_store.workers import MemoryWorker, WorkerTable
from windlass.model.cost import Bill
from windlass.model.event import Event
from windlass.model.fleet import FleetConfig
from windlass.model.snapshot import (
    BootTimes,
    FailureStreak,
    LaunchRecord,
    ProviderRefusal,
    QueueDurations,
    QueueView,
    RecentFailure,
    RunningView,
    SlotView,
    Snapshot,
    StorageUse,
    WorkerView,
)
from windlass.model.task import TaskStatus
from windlass.model.worker import LIVE, WorkerKind, WorkerStatus

# The bounds of the SQL function observe().
MAX_LAUNCHES = 1000
MAX_BOOTS = 50
MAX_BOOT_ROWS = 200
MAX_DURATIONS = 500
MAX_SAMPLE = 200
MAX_QUEUES = 32
MAX_QUEUE_SAMPLE = 100
MAX_QUEUE_ROWS_SCANNED = 5_000
MAX_ANSWERS = 50
MAX_STREAKS = 50
MAX_COMPLETED_COMPARED = 500
MAX_FAILURES_COMPARED = 1000
MAX_ROWS_SCANNED = 20_000
MAX_ENDED_BILLS = 1000
# Refusals that are not about one machine.
FLEET_REFUSALS = frozenset({"LIMIT_REACHED", "DENIED", "INVALID_REQUEST", "NO_CAPACITY", "PROVIDER_PAUSE"})
FAILURES = ("TASK_ERROR", "TASK_FAILED")
# Codes of checks that depend on the host of a machine.
HOST_CHECKS = frozenset({"GPU_NOT_DETECTED", "STORAGE_NOT_MOUNTED", "DISK_FULL", "SSH_UNREACHABLE"})
# An image may be at fault for these, too.
IMAGE_CHECKS = frozenset({"DISK_FULL", "SSH_UNREACHABLE"})


def observe(tables: Tables, fleet: FleetRow, config: FleetConfig) -> Snapshot:
    now, tasks = tables.now(), tables.tasks
    rows_of_all_fleets = tables.workers.rows.values()
    workers = sorted(
        (worker for worker in rows_of_all_fleets if worker.fleet == fleet.name), key=lambda row: row.age_order
    )
    spawned = [worker for worker in workers if worker.slot is not None]
    return Snapshot(
        now=now,
        fleet=fleet.name,
        queue=replace(
            _queues(tasks, tables.workers, config.queues, now),
            arrived=_arrived(tasks, config.queues, fleet.planner_state.scaling.newest_task_id),
            newest_task_id=max(tasks.rows, default=None),
            boots_s=tuple(
                sorted(
                    round((w.activated_at - w.created_at).total_seconds(), 3)
                    for w in [w for w in spawned[-MAX_BOOT_ROWS:] if w.activated_at][-MAX_BOOTS:]
                    if w.activated_at
                )
            ),
        ),
        workers=tuple(
            _view(w, tasks.run_by(w.id), has_queues=len(config.queues) > 1)
            for w in workers
            if w.status is not WorkerStatus.TERMINATED
        ),
        slots=_slots(fleet, now - interval(config.restart_window_s)),
        launches=_launches(spawned, now - interval(config.failure_window_s), now),
        refusal=_last_refusal(spawned[-MAX_ANSWERS:]),
        last_failure=_last_failure(spawned),
        storage=_storage(workers),
        failure_streaks=_failure_streaks(tasks, tables.event_log, workers, config),
        avoided_hosts=_avoided_hosts(spawned, now, fleet.reset_at),
        orphaned=_orphaned(tasks, tables.workers, fleet.name, config.queues),
        is_paused=fleet.is_paused,
        boots=_boots([(w.activated_at - w.created_at).total_seconds() for w in spawned[-MAX_BOOTS:] if w.activated_at]),
        requested=fleet.requested_workers,
        reset_at=fleet.reset_at,
        restarted_at=fleet.restarted_at,
        deploy=fleet.deploy,
        spending=tables.ledger.spent_by(fleet.name, now),
        ended_bills=tuple(islice(_ended_bills(workers), MAX_ENDED_BILLS)),
        is_settlement_due=bool(to_settle(workers, fleet.name, now)),
        planner_state=fleet.planner_state,
    )


def _queues(tasks: TaskTable, workers: WorkerTable, names: Sequence[str], now: datetime) -> QueueView:
    queues = [tasks.queues[name] for name in dict.fromkeys(names)]
    rows = [row for queue in queues for row in queue.unfinished.values()]
    running = [row for row in rows if row.status is TaskStatus.RUNNING]
    # Claimed by a dispatcher and not placed on a node yet: counted as queued.
    held = [row for row in running if _is_dispatcher(workers.get(row.worker_id))]
    since = [row.could_be_claimed_since() for row in rows if row.is_ready()]
    since += [row.could_be_claimed_since() for row in held]
    newest = islice(reversed(tasks.finished[TaskStatus.COMPLETE].values()), MAX_ROWS_SCANNED)
    recent = islice((row for row in newest if row.queue in names), MAX_DURATIONS)
    durations = [(r.finished_at - r.started_at).total_seconds() for r in recent if r.finished_at and r.started_at]
    sample = durations[:MAX_SAMPLE]
    return QueueView(
        queued=len(held) + sum(row.is_ready() or (row.run_after is not None and row.run_after <= now) for row in rows),
        running=len(running) - len(held),
        oldest_queued_age_s=(now - min(since)).total_seconds() if since else None,
        duration_p50_s=_median(durations),
        durations_s=tuple(sorted(round(duration, 3) for duration in sample)),
        duration_mean_s=sum(sample) / len(sample) if sample else None,
        each=_each_queue(tasks, workers, names, now) if len(names) > 1 else (),
    )


def _each_queue(
    tasks: TaskTable, workers: WorkerTable, names: Sequence[str], now: datetime
) -> tuple[QueueDurations, ...]:
    views = {name: _queues(tasks, workers, [name], now) for name in names}
    counts = {name: view.queued + view.running for name, view in views.items()}
    busiest = sorted((name for name in views if counts[name]), key=lambda name: (-counts[name], name))[:MAX_QUEUES]
    newest = list(islice(reversed(tasks.finished[TaskStatus.COMPLETE].values()), MAX_QUEUE_ROWS_SCANNED))
    found = []
    for name in sorted(busiest):
        recent = islice((row for row in newest if row.queue == name), MAX_QUEUE_SAMPLE)
        sample = [(r.finished_at - r.started_at).total_seconds() for r in recent if r.finished_at and r.started_at]
        mean_s = sum(sample) / len(sample) if sample else None
        found.append(QueueDurations(name, views[name].queued, tuple(sorted(round(s, 3) for s in sample)), mean_s))
    return tuple(found)


def _arrived(tasks: TaskTable, names: Sequence[str], newest_id: int | None) -> int:
    if newest_id is None:
        return 0
    later = takewhile(lambda id_: id_ > newest_id, reversed(tasks.rows))
    return sum(tasks.rows[id_].queue in names for id_ in later)


def queues_with_tasks(tables: Tables, names: Sequence[str]) -> set[str]:
    now = tables.now()
    return {name for name in names if _queues(tables.tasks, tables.workers, [name], now).queued}


def _is_dispatcher(worker: MemoryWorker | None) -> bool:
    return worker is not None and worker.kind is WorkerKind.DISPATCHER


def _reported_seconds(value: Any) -> float | None:
    """The same as windlass_internal.reported_seconds."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value <= 1e9 else None


def _view(worker: MemoryWorker, running: Sequence[MemoryTask], *, has_queues: bool) -> WorkerView:
    spawned = worker.spawned
    return WorkerView(
        id=worker.id,
        slot=worker.slot,
        status=worker.status,
        is_paused=worker.is_paused,
        concurrency=worker.concurrency,
        created_at=worker.created_at,
        activated_at=worker.activated_at,
        last_heartbeat=worker.last_heartbeat,
        first_claimed_at=worker.first_claimed_at,
        terminating_at=spawned.terminating_at,
        idle_s=_reported_seconds(worker.metadata.get("idle_s")),
        machine_id=spawned.machine_id,
        machine_at=spawned.machine_at,
        creation=spawned.creation,
        prepared_at=spawned.prepared_at,
        vram_total_mb=worker.vram_total_mb,
        vram_used_mb=worker.vram_used_mb,
        vram_at=spawned.vram_at,
        vram_lost_at=spawned.vram_lost_at,
        running=tuple(
            RunningView(row.id, row.started_at, row.timeout_s, row.queue if has_queues else None)
            for row in running
            if row.started_at is not None
        ),
        code=worker.code,
        reason=worker.reason,
        lease_s=worker.lease_s,
        bill=spawned.bill,
        prepare_code=spawned.prepare_code,
        prepare_reason=spawned.prepare_reason,
        host_key=spawned.host_key,
        node=worker.node,
        failing_since=worker.failing_since,
        fingerprint=spawned.fingerprint,
        provider=spawned.provider,
        running_at=spawned.running_at,
        progress_at=max(
            filter(
                None,
                (
                    *(spawned.boot_step_at, spawned.reachable_at, spawned.joined_at),
                    *(spawned.preparing_at, spawned.prepared_at),
                ),
            ),
            default=None,
        ),
        address=spawned.address,
        machine_host=spawned.machine_host,
        instance_type=spawned.instance_type,
        place=spawned.place,
        machine_created_at=spawned.machine_created_at,
    )


def _slots(fleet: FleetRow, since: datetime) -> tuple[SlotView, ...]:
    views = (
        SlotView(number, slot.is_failed, tuple(at for at in slot.restarts if at > since))
        for number, slot in sorted(fleet.slots.items())
    )
    return tuple(view for view in views if view.is_failed or view.restarts)


def _launches(spawned: Sequence[MemoryWorker], since: datetime, now: datetime) -> tuple[LaunchRecord, ...]:
    recent = [
        LaunchRecord(
            worker.created_at, worker.spawned.failed_at is not None and not worker.spawned.is_proven, worker.slot
        )
        for worker in spawned
        if worker.code != "HOST_AVOIDED"
        for failed_at in [worker.spawned.failed_at or worker.created_at]
        if max(worker.created_at, failed_at) > since and max(worker.created_at, failed_at) <= now
    ]
    return tuple(recent[-MAX_LAUNCHES:])


def _last_refusal(spawned: Sequence[MemoryWorker]) -> ProviderRefusal | None:
    """The newest refusal, unless a machine was created since."""
    created_at = [worker.spawned.machine_at for worker in spawned if worker.spawned.machine_at is not None]
    # Newest first: of refusals at the same moment, the one of the worker spawned last.
    refusals = [
        ProviderRefusal(worker.code, worker.reason or "", worker.terminated_at)
        for worker in reversed(spawned)
        if worker.spawned.creation == "refused" and worker.code in FLEET_REFUSALS and worker.terminated_at
    ]
    last = max(refusals, key=lambda refusal: refusal.at, default=None)
    return last if last is not None and not any(at > last.at for at in created_at) else None


def _last_failure(spawned: Sequence[MemoryWorker]) -> RecentFailure | None:
    failed = [(at, worker) for worker in spawned if (at := worker.spawned.failed_at) is not None]
    at, worker = max(failed, key=lambda pair: (pair[0], pair[1].id), default=(None, None))
    if at is None or worker is None:
        return None
    return RecentFailure(worker.id, worker.code or "", worker.reason or "", at)


def _avoided_hosts(spawned: Sequence[MemoryWorker], now: datetime, reset_at: datetime | None) -> tuple[str, ...]:
    since = max(now - timedelta(days=1), reset_at or datetime.min.replace(tzinfo=UTC))
    failed = Counter(
        worker.spawned.machine_host
        for worker in spawned
        if worker.spawned.failed_at is not None
        and worker.spawned.failed_at > since
        and worker.code in HOST_CHECKS
        and (worker.code not in IMAGE_CHECKS or worker.spawned.fingerprint == spawned[-1].spawned.fingerprint)
    )
    return tuple(sorted(host for host, count in failed.items() if host is not None and count >= 2))


def _storage(workers: Sequence[MemoryWorker]) -> StorageUse | None:
    """The value of the live worker with the newest heartbeat."""
    values = [
        (worker.last_heartbeat, worker.id, worker.metadata.get("storage_used_bytes"))
        for worker in workers
        if worker.status in LIVE and worker.last_heartbeat is not None
    ]
    known = [(at, id_, used) for at, id_, used in values if type(used) is int and abs(used) < 10**18]
    newest = max(known, key=lambda each: each[:2], default=None)
    return None if newest is None else StorageUse(newest[1], newest[2], newest[0])


def _ended_bills(workers: Sequence[MemoryWorker]) -> Iterator[Bill]:
    for worker in workers:
        spawned = worker.spawned
        if worker.status is WorkerStatus.TERMINATED and spawned.settle_at is not None and spawned.bill is not None:
            yield spawned.bill


def _orphaned(tasks: TaskTable, workers: WorkerTable, fleet: str, queues: Sequence[str]) -> tuple[str, ...]:
    """Ended or unknown workers that still hold tasks of this fleet or its queues."""
    orphaned = []
    for worker_id, held in tasks.running.items():
        worker = workers.get(worker_id)
        if not held or (worker is not None and (worker.fleet != fleet or worker.status in LIVE)):
            continue
        if worker is not None or any(row.queue in queues for row in held.values()):
            orphaned.append(worker_id)
    return tuple(sorted(orphaned))


def _failure_streaks(
    tasks: TaskTable, event_log: EventLog, workers: Sequence[MemoryWorker], config: FleetConfig
) -> tuple[FailureStreak, ...]:
    failing = [
        (worker.failing_since, worker.id, worker)
        for worker in workers
        if worker.failing_since is not None
        and worker.is_staying
        and len(worker.failed_tasks) >= config.quarantine_min_failures
    ]
    if not failing:
        return ()
    completed = _recently_completed(tasks, config.queues, min(since for since, _, _ in failing))
    doers = {row.worker_id for row in completed}
    events = islice(reversed(event_log.events), MAX_ROWS_SCANNED)
    failed = [event for event in events if event.code in FAILURES and event.worker_id in doers]
    longest = sorted(failing, key=lambda each: each[:2])[:MAX_STREAKS]
    return tuple(
        _failure_streak(tasks, event_log, worker, since, completed, failed[:MAX_FAILURES_COMPARED])
        for since, _, worker in longest
    )


def _recently_completed(tasks: TaskTable, queues: Sequence[str], since: datetime) -> list[MemoryTask]:
    """Newest first."""
    finished = islice(reversed(tasks.finished[TaskStatus.COMPLETE].values()), MAX_ROWS_SCANNED)
    recent = (row for row in finished if row.finished_at is not None and row.finished_at >= since)
    return list(islice((row for row in recent if row.queue in queues), MAX_COMPLETED_COMPARED))


def _failure_streak(
    tasks: TaskTable,
    event_log: EventLog,
    worker: MemoryWorker,
    since: datetime,
    recent_completions: Sequence[MemoryTask],
    failed: Sequence[Event],
) -> FailureStreak:
    completed = [
        row.worker_id
        for row in recent_completions
        if row.finished_at is not None and row.finished_at >= since and row.worker_id != worker.id
    ]
    others = set(completed)
    own = sorted(worker.failed_tasks)
    rows = [row for id_ in own if (row := tasks.rows.get(id_)) is not None]
    return FailureStreak(
        worker_id=worker.id,
        since=since,
        failed=tuple(worker.failed_tasks),
        completed_by={
            row.id: row.worker_id
            for row in rows
            if row.status is TaskStatus.COMPLETE and row.worker_id is not None and row.worker_id != worker.id
        },
        failed_elsewhere=tuple(
            id_
            for id_ in own
            if any(event.code in FAILURES and event.worker_id in others for event in event_log.of_task(id_))
        ),
        others=len(others),
        others_completed=len(completed),
        others_failed=sum(event.at >= since and event.worker_id in others for event in failed),
    )


def _boots(boots_s: Sequence[float]) -> BootTimes:
    return BootTimes(len(boots_s), percentile(boots_s, 0.5), percentile(boots_s, 0.99))


def _median(values: Iterable[float]) -> float | None:
    return percentile(values, 0.5)


def percentile(values: Iterable[float], share: float) -> float | None:
    """The same as percentile_cont."""
    ordered = sorted(values)
    if not ordered:
        return None
    position = share * (len(ordered) - 1)
    low, high = ordered[math.floor(position)], ordered[math.ceil(position)]
    return low + (position - math.floor(position)) * (high - low)
