"""The event log, and the text of events about failed attempts."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from itertools import islice, takewhile
from typing import Any, TypeVar

from support.memory_store.tasks import MemoryTask
from support.memory_store.workers import WorkerTable
from windlass.model.actor import current_actor
from windlass.model.event import Event

MAX_ATTEMPTS_LISTED = 20
MAX_WORKERS_NAMED = 5
FAILED_ATTEMPTS = frozenset({"TASK_ERROR", "TASK_REQUEUED", "TASK_FAILED"})

_Key = TypeVar("_Key", int, str)


class EventLog:
    def __init__(self, clock: Callable[[], datetime]) -> None:
        self._clock = clock
        self._last_id = 0
        self.events: deque[Event] = deque()
        self._of_task: defaultdict[int, deque[Event]] = defaultdict(deque)
        self._of_worker: defaultdict[str, deque[Event]] = defaultdict(deque)

    def add(
        self,
        code: str,
        reason: str,
        *,
        fleet: str | None = None,
        worker_id: str | None = None,
        task_id: int | None = None,
        detail: dict[str, Any] | None = None,
    ) -> None:
        self._last_id += 1
        event = Event(self._last_id, self._clock(), code, reason, fleet, worker_id, task_id, detail, current_actor())
        self.events.append(event)
        if task_id is not None:
            self._of_task[task_id].append(event)
        if worker_id is not None:
            self._of_worker[worker_id].append(event)

    def of_task(self, task_id: int) -> Sequence[Event]:
        return self._of_task.get(task_id, deque())

    def of_worker(self, worker_id: str) -> Sequence[Event]:
        return self._of_worker.get(worker_id, deque())

    def since_retried(self, task_id: int) -> Iterator[Event]:
        """Events of a task since it was enqueued or last retried by hand, newest first."""
        return takewhile(lambda event: event.code != "TASK_RETRIED", reversed(self.of_task(task_id)))

    def latest(self, task_id: int | None, worker_id: str | None, limit: int) -> list[Event]:
        """Oldest first."""
        events: Sequence[Event] = self.events
        if task_id is not None:
            events = self.of_task(task_id)
        elif worker_id is not None:
            events = self.of_worker(worker_id)
        matching = (event for event in reversed(events) if worker_id in (None, event.worker_id))
        return list(islice(matching, limit))[::-1]

    def forget(self, before: datetime, limit: int) -> int:
        count = 0
        while count < limit and self.events and self.events[0].at < before:
            event = self.events.popleft()
            _forget_oldest(self._of_task, event.task_id)
            _forget_oldest(self._of_worker, event.worker_id)
            count += 1
        return count


def failed_attempts(
    event_log: EventLog, workers: WorkerTable, row: MemoryTask, last: dict[str, Any]
) -> list[dict[str, Any]]:
    """All failed attempts since the task was enqueued or retried. `last` has no event yet."""
    failed = [event for event in event_log.since_retried(row.id) if event.code in FAILED_ATTEMPTS]
    values = [
        {
            "attempt": (event.detail or {}).get("attempt"),
            "worker_id": event.worker_id,
            "error_code": (event.detail or {}).get("error_code"),
            "has_worked_since": (worker := workers.get(event.worker_id)) is not None
            and row.id not in worker.failed_tasks,
        }
        for event in reversed(failed[: MAX_ATTEMPTS_LISTED - 1])
    ]
    return [*values, {**last, "has_worked_since": False}]


def failed_attempts_text(attempts: list[dict[str, Any]]) -> str:
    """The same as windlass.failed_attempts_text."""
    workers = list(dict.fromkeys(str(attempt["worker_id"]) for attempt in attempts))
    if len(workers) < 2:
        return ""
    more = f" and {len(workers) - MAX_WORKERS_NAMED} more" if len(workers) > MAX_WORKERS_NAMED else ""
    return f"; failed on {', '.join(workers[:MAX_WORKERS_NAMED])}{more}"


def _forget_oldest(events: defaultdict[_Key, deque[Event]], key: _Key | None) -> None:
    if key is None:
        return
    events[key].popleft()
    if not events[key]:
        del events[key]
