"""A clock that was set back, as in the SQL function follow_clock."""

from datetime import datetime, timedelta
from typing import Any

from pydantic import TypeAdapter

from support.memory_store.interval import whole_seconds
from support.memory_store.tables import Tables
from support.memory_store.workers import MemoryWorker
from windlass.model.snapshot import PlannerState
from windlass.model.task import TaskStatus
from windlass.model.worker import WorkerStatus

_OUT_OF_ORDER = timedelta(seconds=1)
_SEEN_EVERY = timedelta(seconds=5)
_LONGEST_STEP = timedelta(days=1)
_HEARTBEATS = ("last_heartbeat", "heartbeat_gapless_since")
_WORKER_TIMES = ("activated_at", "first_claimed_at", "failing_since")
_SPAWNED_TIMES = ("terminating_at", "machine_at", "preparing_at", "prepared_at", "vram_at", "vram_lost_at")
_PLANNER_STATE = TypeAdapter(PlannerState)


def follow_clock(tables: Tables) -> None:
    now, seen_at = tables.now(), tables.clock_seen_at
    if seen_at is None or now > seen_at + _SEEN_EVERY:
        tables.clock_seen_at = now
    elif now < seen_at - _OUT_OF_ORDER:
        tables.clock_seen_at = now
        _correct(tables, now, seen_at - now)


def move_back_state(state: PlannerState, now: datetime) -> PlannerState:
    """The state of a plan that is committed now. The clock may have been set back since the plan's snapshot."""
    step = (state.cadence.planned_at or now) - now
    return _moved_back_state(state, now, step) if timedelta() < step <= _LONGEST_STEP else state


def _moved_back_state(state: PlannerState, now: datetime, step: timedelta) -> PlannerState:
    return _PLANNER_STATE.validate_python(_moved_back_in(_PLANNER_STATE.dump_python(state), now, step))


def _correct(tables: Tables, now: datetime, step: timedelta) -> None:
    tables.event_log.add("CLOCK_SET_BACK", f"the database clock was set back by {whole_seconds(step)} s")
    for lease in tables.leases.rows.values():
        lease.shorten(now)
    for worker in tables.workers.not_terminated.values():
        _move_back(worker, _HEARTBEATS, now, step)
    for queue in tables.tasks.queues.values():
        for row in list(queue.unfinished.values()):
            moved_at = row.finished_at if row.status is TaskStatus.ERROR else row.ready_at
            if row.run_after is None or row.run_after <= now or moved_at is None or moved_at <= now:
                continue
            row.run_after -= step
            _move_back(row, ("ready_at",), now, step)
            queue.place(row)
    if step > _LONGEST_STEP:
        return
    for worker in tables.workers.rows.values():
        if worker.status is not WorkerStatus.TERMINATED or worker.spawned.settle_at is not None:
            _correct_worker(worker, now, step)
    for held in tables.tasks.running.values():
        for row in held.values():
            _move_back(row, ("started_at",), now, step)
    for fleet in tables.fleets.values():
        fleet.planner_state = _moved_back_state(fleet.planner_state, now, step)
        _move_back(fleet, ("reset_at", "restarted_at"), now, step)
        for slot in fleet.slots.values():
            slot.restarts = [min(at - step, now) if at > now else at for at in slot.restarts]


def _correct_worker(worker: MemoryWorker, now: datetime, step: timedelta) -> None:
    if worker.credentials is not None and worker.created_at > now:
        worker.credentials.join_expires_at -= step
    _move_back(worker, ("created_at", *_WORKER_TIMES), now, step)
    _move_back(worker.spawned, _SPAWNED_TIMES, now, step)
    if worker.spawned.settle_at is not None and worker.spawned.settle_at > now:
        worker.spawned.settle_at -= step


def _move_back(row: Any, names: tuple[str, ...], now: datetime, step: timedelta) -> None:
    for name in names:
        at = getattr(row, name)
        if at is not None and at > now:
            setattr(row, name, min(at - step, now))


def _moved_back_in(value: Any, now: datetime, step: timedelta) -> Any:
    if isinstance(value, dict):
        return {key: _moved_back_in(each, now, step) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_moved_back_in(each, now, step) for each in value]
    return value - step if isinstance(value, datetime) and value > now else value
