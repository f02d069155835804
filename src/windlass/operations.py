"""The write side of Windlass: what producers and operators do to tasks, workers and fleets.

Each operation is one function over the store's ports. It returns a result with an outcome, a sentence for a person, and
the numbers that callers format. The JSON API, the dashboard, the supervisor-compatible routes and the command line call
these functions and repeat none of their rules. More are in queue_operations.py, rollouts.py and access.py.

`scope` limits an operation to the queues and fleets of its caller; tasks and workers outside of it count as unknown. An
operation changes the database only: the next cycle spawns workers and deletes machines. Raises DatabaseUnavailable, and
BadInput for arguments that no state of the store could accept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from windlass.model.auth import EVERYTHING, TokenScope
from windlass.model.cycle import Fleet
from windlass.model.errors import BadInput, OutOfScope
from windlass.model.plural import plural
from windlass.model.task import NewTask
from windlass.model.worker import LIVE, Worker, WorkerStatus
from windlass.ports.fleets import FleetQueries, Operations
from windlass.ports.tasks import TaskStore

RESTART_REASON = "restarted by an operator"
TERMINATE_REASON = "terminated by an operator"
CANCEL_REASON = "cancelled by an operator"
# Tasks that one call changes by their ids.
MAX_SELECTED_TASKS = 500
# A fleet with this hold has machines that its API key does not list. Restarting the fleet abandons them.
OTHER_ACCOUNT = "OTHER_ACCOUNT"


class OperationStore(TaskStore, FleetQueries, Operations, Protocol):
    """The store methods that operations on workers and fleets need. Operations on tasks need only `TaskStore`."""


class OperationOutcome(StrEnum):
    DONE = "done"
    UNCHANGED = "unchanged"  # the requested state was already there
    NOT_FOUND = "not_found"
    CONFLICT = "conflict"  # the current state does not allow the operation; nothing was changed


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationResult:
    outcome: OperationOutcome
    # What happened and why, for a person. Starts in lower case and has no final full stop.
    message: str
    # How many tasks or workers were changed.
    changed: int = 0

    @property
    def is_refused(self) -> bool:
        return self.outcome in (OperationOutcome.NOT_FOUND, OperationOutcome.CONFLICT)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnqueueResult(OperationResult):
    """UNCHANGED: a task with this unique key existed, and `task_id` is its id."""

    task_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnResult(OperationResult):
    fleet: str
    # How many workers this call requested.
    asked: int
    # How many of them were accepted: fewer if the fleet has fewer free slots.
    granted: int = 0
    # Accepted from all callers and not spawned yet.
    requested: int = 0
    max_workers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartResult(OperationResult):
    """`changed` counts the workers that began to drain."""

    slots_freed: int = 0
    workers: tuple[str, ...] = ()


def _done(message: str, changed: int = 1) -> OperationResult:
    return OperationResult(outcome=OperationOutcome.DONE, message=message, changed=changed)


def _unchanged(message: str) -> OperationResult:
    return OperationResult(outcome=OperationOutcome.UNCHANGED, message=message)


def _not_found(message: str) -> OperationResult:
    return OperationResult(outcome=OperationOutcome.NOT_FOUND, message=message)


def _conflict(message: str) -> OperationResult:
    return OperationResult(outcome=OperationOutcome.CONFLICT, message=message)


def task_not_found(task_id: int) -> str:
    return f"task {task_id} not found (unknown, or already purged)"


def worker_not_found(worker_id: str) -> str:
    return f"worker {worker_id} not found (unknown, or already purged)"


def fleet_not_found(fleet: str, known: Sequence[Fleet] = ()) -> str:
    names = ", ".join(one.name for one in known)
    return f"fleet {fleet} not found; known fleets: {names or 'none'}"


# ---------------------------------------------------------------------------------------------------------------- tasks


async def enqueue_task(store: TaskStore, task: NewTask, *, scope: TokenScope = EVERYTHING) -> EnqueueResult:
    check_queue_scope(scope, task.queue)
    if task.unique_key is None:
        # One statement, and a producer role needs no right to read tasks for it.
        task_id, is_new = await store.enqueue(task), True
    else:
        task_id, is_new = await store.enqueue_or_find(task)
    outcome = OperationOutcome.DONE if is_new else OperationOutcome.UNCHANGED
    message = f"task {task_id} enqueued in {task.queue}" if is_new else f"unique key already used by task {task_id}"
    return EnqueueResult(outcome=outcome, message=message, changed=int(is_new), task_id=task_id)


def check_queue_scope(scope: TokenScope, queue: str) -> None:
    """Raise OutOfScope unless the caller may reach this queue."""
    if not scope.allows_queue(queue):
        raise OutOfScope(f"queue {queue} is outside of this token, which is limited to {scope}")


def check_fleet_scope(scope: TokenScope, fleet: str) -> None:
    """Raise OutOfScope unless the caller may reach this fleet."""
    if not scope.allows_fleet(fleet):
        raise OutOfScope(f"fleet {fleet} is outside of this token, which is limited to {scope}")


async def _is_task_in_scope(store: TaskStore, task_id: int, scope: TokenScope) -> bool:
    if scope.is_all:
        return True
    task = await store.task(task_id)
    return task is not None and scope.allows_queue(task.queue)


async def retry_task(store: TaskStore, task_id: int, *, scope: TokenScope = EVERYTHING) -> OperationResult:
    """Requeue a failed or retrying task with its full number of attempts."""
    if not await _is_task_in_scope(store, task_id, scope):
        return _not_found(task_not_found(task_id))
    if await store.retry_task(task_id):
        return _done(f"task {task_id} requeued")
    return await _refuse_task(store, task_id, "only failed and retrying tasks can be retried")


async def cancel_task(
    store: TaskStore, task_id: int, reason: str = CANCEL_REASON, *, scope: TokenScope = EVERYTHING
) -> OperationResult:
    """Fail an unfinished task with code CANCELLED. A worker that is running it stops the attempt."""
    if not await _is_task_in_scope(store, task_id, scope):
        return _not_found(task_not_found(task_id))
    if await store.cancel_task(task_id, reason):
        return _done(f"task {task_id} cancelled")
    return await _refuse_task(store, task_id, "only unfinished tasks can be cancelled")


async def retry_tasks(store: TaskStore, task_ids: Sequence[int], *, scope: TokenScope = EVERYTHING) -> OperationResult:
    """Retry each of these tasks, and skip tasks that cannot be retried."""
    results = [await retry_task(store, task_id, scope=scope) for task_id in _selection(task_ids)]
    return _sum_up(results, "requeued", "only failed and retrying tasks can be retried")


async def cancel_tasks(
    store: TaskStore, task_ids: Sequence[int], reason: str = CANCEL_REASON, *, scope: TokenScope = EVERYTHING
) -> OperationResult:
    """Cancel each of these tasks, and skip finished ones."""
    results = [await cancel_task(store, task_id, reason, scope=scope) for task_id in _selection(task_ids)]
    return _sum_up(results, "cancelled", "only unfinished tasks can be cancelled")


def _selection(task_ids: Sequence[int]) -> list[int]:
    """Each id once."""
    if not task_ids:
        raise BadInput("no task is selected: select at least one.")
    if len(task_ids) > MAX_SELECTED_TASKS:
        raise BadInput(f"{len(task_ids)} tasks are selected, at most {MAX_SELECTED_TASKS} are allowed.")
    return list(dict.fromkeys(task_ids))


def _sum_up(results: Sequence[OperationResult], done: str, rule: str) -> OperationResult:
    changed = sum(not result.is_refused for result in results)
    refused = len(results) - changed
    if not changed:
        return _conflict(f"none of {plural(refused, 'task')} {done}: {rule}")
    message = f"{plural(changed, 'task')} {done}"
    return _done(f"{message}, {refused} left as they are: {rule}" if refused else message, changed)


async def _refuse_task(store: TaskStore, task_id: int, rule: str) -> OperationResult:
    task = await store.task(task_id)
    if task is None:
        return _not_found(task_not_found(task_id))
    return _conflict(f"task {task_id} is {task.status}: {rule}")


# -------------------------------------------------------------------------------------------------------------- workers


async def _live_worker(store: OperationStore, worker_id: str, scope: TokenScope) -> Worker | OperationResult:
    worker = await store.worker(worker_id)
    if worker is None or not scope.allows_fleet(worker.fleet):
        return _not_found(worker_not_found(worker_id))
    if worker.status not in LIVE:
        why = "its machine is being deleted" if worker.status is WorkerStatus.ERROR else "it cannot be changed"
        return _conflict(f"worker {worker_id} is in status {worker.status}: {why}")
    return worker


async def pause_worker(store: OperationStore, worker_id: str, *, scope: TokenScope = EVERYTHING) -> OperationResult:
    """The worker finishes its current tasks and claims no others."""
    worker = await _live_worker(store, worker_id, scope)
    if isinstance(worker, OperationResult):
        return worker
    if await store.set_paused([worker_id], True):
        return _done(f"worker {worker_id} paused")
    return _unchanged(f"worker {worker_id} was already paused")


async def resume_worker(store: OperationStore, worker_id: str, *, scope: TokenScope = EVERYTHING) -> OperationResult:
    worker = await _live_worker(store, worker_id, scope)
    if isinstance(worker, OperationResult):
        return worker
    if await store.set_paused([worker_id], False):
        return _done(f"worker {worker_id} resumed")
    return _unchanged(f"worker {worker_id} was not paused")


async def restart_worker(store: OperationStore, worker_id: str, *, scope: TokenScope = EVERYTHING) -> OperationResult:
    """Drain the worker and clear the restart count of its slot. The next cycle spawns a replacement."""
    worker = await _live_worker(store, worker_id, scope)
    if isinstance(worker, OperationResult):
        return worker
    if worker.slot is not None:
        await store.restart_slots(worker.fleet, worker.slot)
    if await store.set_terminating([worker_id], RESTART_REASON):
        after = (
            "a later cycle spawns its replacement" if worker.slot is not None else "it has no slot to be replaced in"
        )
        return _done(f"worker {worker_id} drains; {after}")
    return _unchanged(f"worker {worker_id} was already draining")


async def terminate_worker(
    store: OperationStore,
    worker_id: str,
    reason: str = TERMINATE_REASON,
    *,
    force: bool = False,
    scope: TokenScope = EVERYTHING,
) -> OperationResult:
    """Drain the worker, or with `force` terminate it at once and requeue its tasks."""
    worker = await _live_worker(store, worker_id, scope)
    if isinstance(worker, OperationResult):
        return worker
    if force:
        if await store.terminate_worker(worker_id, reason):
            return _done(f"worker {worker_id} terminated; its tasks were requeued")
        return _conflict(f"worker {worker_id} has terminated meanwhile")
    if await store.set_terminating([worker_id], reason):
        return _done(f"worker {worker_id} drains: it finishes its current tasks, then terminates")
    return _unchanged(f"worker {worker_id} was already draining")


async def terminate_fleet_workers(
    store: OperationStore, name: str, reason: str = TERMINATE_REASON, *, force: bool = False
) -> OperationResult:
    """Terminate every live worker of a fleet, including those without a slot. Cycles spawn up to min_workers again."""
    fleet = await find_fleet(store, name)
    if isinstance(fleet, OperationResult):
        return fleet
    ids = [worker.id for worker in await store.workers() if worker.fleet == name]
    if force:
        changed = sum([await store.terminate_worker(worker_id, reason) for worker_id in ids])
    else:
        changed = await store.set_terminating(ids, reason)
    if not changed:
        return _unchanged(f"fleet {name} has no workers to {'terminate' if force else 'drain'}")
    return _done(f"{plural(changed, 'worker')} of fleet {name} {'terminated' if force else 'drain'}", changed)


# --------------------------------------------------------------------------------------------------------------- fleets


async def find_fleet(store: OperationStore, name: str, *, has_cycles: bool = False) -> Fleet | OperationResult:
    """`has_cycles`: refuse a fleet that exists only because a worker was started by hand. No cycle spawns for it."""
    fleets = await store.fleets()
    found = next((fleet for fleet in fleets if fleet.name == name), None)
    if found is None:
        return _not_found(fleet_not_found(name, fleets))
    if has_cycles and found.planned_at is None:
        return _conflict(f"fleet {name} has had no cycle yet: start `windlass up` with it first")
    return found


async def pause_fleet(store: OperationStore, name: str) -> OperationResult:
    """Pause every worker of the fleet and stop spawning."""
    return await _set_fleet_paused(store, name, True)


async def resume_fleet(store: OperationStore, name: str) -> OperationResult:
    return await _set_fleet_paused(store, name, False)


async def _set_fleet_paused(store: OperationStore, name: str, is_paused: bool) -> OperationResult:
    fleet = await find_fleet(store, name)
    if isinstance(fleet, OperationResult):
        return fleet
    changed = await store.pause_fleet(name, is_paused)
    if not changed and fleet.is_paused == is_paused:
        return _unchanged(f"fleet {name} was already paused" if is_paused else f"fleet {name} was not paused")
    verb = "paused" if is_paused else "resumed"
    return _done(f"fleet {name} {verb}, with {plural(changed, 'worker')}", changed)


async def pause_all_fleets(store: OperationStore) -> OperationResult:
    changed = sum([await store.pause_fleet(fleet.name, True) for fleet in await store.fleets()])
    return _done(f"all fleets paused, with {plural(changed, 'worker')}", changed)


async def resume_all_fleets(store: OperationStore) -> OperationResult:
    changed = sum([await store.pause_fleet(fleet.name, False) for fleet in await store.fleets()])
    return _done(f"all fleets resumed, with {plural(changed, 'worker')}", changed)


async def spawn_workers(store: OperationStore, name: str, count: int = 1) -> SpawnResult:
    """Request workers whatever the scaling policy decides, up to the fleet's free slots. Idle ones drain as usual."""
    fleet = await find_fleet(store, name, has_cycles=True)
    if isinstance(fleet, OperationResult):
        return SpawnResult(outcome=fleet.outcome, message=fleet.message, fleet=name, asked=count)
    requested = await store.request_workers(name, count)
    granted = max(0, requested - fleet.requested_workers)
    message = f"{plural(granted, 'worker')} requested in fleet {name}; the next cycle spawns"
    if granted < count:
        limit = f"max_workers is {fleet.max_workers}, and no more slots are free"
        message = f"{granted} of {plural(count, 'worker')} requested in fleet {name}: {limit}"
    return SpawnResult(
        outcome=OperationOutcome.DONE if granted else OperationOutcome.UNCHANGED,
        message=message,
        changed=granted,
        fleet=name,
        asked=count,
        granted=granted,
        requested=requested,
        max_workers=fleet.max_workers,
    )


async def restart_fleet(store: OperationStore, name: str, slot: int | None = None) -> RestartResult:
    """Declare the cause of failures fixed, and replace the fleet's workers, or the one in `slot`.

    Restart counts are cleared, failed slots become free, a hold for failures ends, and spawned workers drain. A fleet
    on hold with OTHER_ACCOUNT abandons the machines that its API key does not list. Raises BadInput for a slot that the
    fleet does not have.
    """
    fleet = await find_fleet(store, name, has_cycles=True)
    if isinstance(fleet, OperationResult):
        return RestartResult(outcome=fleet.outcome, message=fleet.message)
    slots_freed = await store.restart_slots(name, slot)
    workers = [
        worker.id
        for worker in await store.workers()
        if worker.fleet == name and worker.slot is not None and slot in (None, worker.slot)
    ]
    draining = await store.set_terminating(workers, RESTART_REASON)
    message = f"fleet {name}: {plural(draining, 'worker')} drain, {plural(slots_freed, 'failed slot')} freed"
    if slot is None and fleet.hold is not None and fleet.hold.code == OTHER_ACCOUNT:
        message += "; machines that its API key does not list are abandoned and may still be billed"
    return RestartResult(
        outcome=OperationOutcome.DONE,
        message=message,
        changed=draining,
        slots_freed=slots_freed,
        workers=tuple(workers),
    )


async def restart_all_fleets(store: OperationStore) -> RestartResult:
    """Restart every fleet that has had a cycle."""
    names = [fleet.name for fleet in await store.fleets() if fleet.planned_at is not None]
    results = [await restart_fleet(store, name) for name in names]
    draining, freed = sum(result.changed for result in results), sum(result.slots_freed for result in results)
    return RestartResult(
        outcome=OperationOutcome.DONE,
        message=f"{plural(draining, 'worker')} drain, {plural(freed, 'failed slot')} freed",
        changed=draining,
        slots_freed=freed,
        workers=tuple(worker for result in results for worker in result.workers),
    )
