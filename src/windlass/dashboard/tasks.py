"""Pages about tasks: the list, and one task with its attempts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from windlass.dashboard.filters import MAX_JSON_CHARACTERS, count, indented_json
from windlass.dashboard.rendering import PageContext, next_page_url, render
from windlass.dashboard.worker_logs import log_by_attempt
from windlass.model.cost import Cost
from windlass.model.event import Event
from windlass.model.listing import Page, TaskDetail, TaskRow
from windlass.model.overview import Work
from windlass.model.task import Task, TaskStatus
from windlass.model.worker_log import WorkerLogLine

# Tabs: the value of `status` in the address, the label, and the field of Work that counts them.
TASK_LISTS = (
    (None, "All", None),
    ("queued", "Queued", "queued"),
    ("running", "Running", "running"),
    ("scheduled", "Scheduled", "scheduled"),
    ("error", "Retrying", "retrying"),
    ("complete", "Complete", None),
    ("failed", "Failed", "dead"),
    ("cancelled", "Cancelled", None),
)
# Statuses of tasks that the buttons for selected tasks change.
RETRIED_STATUSES = frozenset({TaskStatus.FAILED, TaskStatus.ERROR})
CANCELLED_STATUSES = frozenset({TaskStatus.QUEUED, TaskStatus.RUNNING, TaskStatus.ERROR})
_SUMMARIES = {
    None: "Newest first",
    "queued": "In the order in which they will be claimed",
    "failed": "Newest first, without cancelled ones",
}


@dataclass(frozen=True, slots=True)
class AttemptView:
    number: int
    worker_id: str | None
    started_at: datetime | None
    ended_at: datetime | None
    outcome: str
    error_code: str | None = None
    error: str | None = None


def attempts_of(task: Task, events: Sequence[Event]) -> list[AttemptView]:
    """Newest first: failed attempts from their events, a running or complete one from the task itself.

    A manual retry starts the count again, so numbers can occur twice.
    """
    attempts = []
    for event in events:
        if event.detail is None or "attempt" not in event.detail:
            continue
        started_at = event.detail.get("started_at")
        attempts.append(
            AttemptView(
                int(event.detail["attempt"]),
                event.worker_id,
                datetime.fromisoformat(started_at) if started_at else None,
                event.at,
                "failed",
                event.detail.get("error_code"),
                event.detail.get("error"),
            )
        )
    if task.status is TaskStatus.RUNNING or task.status is TaskStatus.COMPLETE:
        attempts.append(
            AttemptView(task.attempts, task.worker_id, task.started_at, task.finished_at, task.status.value)
        )
    return attempts[::-1]


def tasks_page(
    page_context: PageContext,
    page: Page[TaskRow],
    *,
    work: Work,
    queues: Sequence[str],
    has_more_queues: bool,
    queue: str | None,
    which: str | None,
    search: str | None,
    histories: Mapping[int, Sequence[Event]],
    is_first: bool,
    is_search_incomplete: bool = False,
) -> str:
    """`work`: counts of the chosen queues, shown without a search. `histories`: events of the failed tasks on the page.

    `is_search_incomplete`: the search stopped at its limit.
    """
    labels = {value: label for value, label, _ in TASK_LISTS}
    statuses = {row.status for row in page.rows}
    what = _SUMMARIES.get(which, f"{labels[which]} tasks")
    return render(
        "tasks.html",
        page_context,
        here="tasks",
        rows=[(row, waited_s(row)) for row in page.rows],
        next_url=next_page_url("/tasks", page, queue=queue, status=which, search=search),
        lists=[
            (value, label, getattr(work, field) if field is not None and not search else None)
            for value, label, field in TASK_LISTS
        ],
        filters={"queue": queue, "status": which, "search": search},
        queues=queues,
        has_more_queues=has_more_queues,
        queue=queue,
        which=which,
        search=search,
        # Number of attempts, and the events.
        histories={
            task_id: (
                sum(event.detail is not None and "attempt" in event.detail for event in events),
                [(event.at, f"{event.code}: {event.reason}") for event in events],
            )
            for task_id, events in histories.items()
        },
        is_search_incomplete=is_search_incomplete,
        summary=f"{what}{f', queue {queue}' if queue else ''}{f', matching “{search}”' if search else ''}.",
        can_retry=not statuses.isdisjoint(RETRIED_STATUSES),
        can_cancel=not statuses.isdisjoint(CANCELLED_STATUSES),
        is_first=is_first,
    )


def waited_s(task: TaskRow | TaskDetail) -> float | None:
    """Time from ready to started, of a first attempt. None for later attempts, which waited for other reasons."""
    if task.attempts != 1 or task.started_at is None or task.status is TaskStatus.ERROR:
        return None
    # Started before it was ready: it has become ready again, for its second attempt.
    if task.started_at < task.ready_at:
        return None
    return (task.started_at - task.ready_at).total_seconds()


def task_page(
    page_context: PageContext,
    task: TaskDetail,
    *,
    answer: Sequence[str],
    history: Sequence[tuple[datetime, str]],
    events: Sequence[Event],
    cost: Cost | None,
    log: Sequence[WorkerLogLine] = (),
) -> str:
    def cut_note(text: str) -> str | None:
        if len(text) <= MAX_JSON_CHARACTERS:
            return None
        return f"The first {count(MAX_JSON_CHARACTERS)} of {len(text):,} characters."

    return render(
        "task.html",
        page_context,
        here="tasks",
        task=task,
        waited_s=waited_s(task),
        answer=answer,
        history=history,
        attempts=attempts_of(task, events),
        texts=[
            (name, indented_json(text), cut_note(text))
            for name, text in (("Payload", task.payload), ("Result", task.result))
            if text is not None
        ],
        cost=cost,
        logs=log_by_attempt(log),
    )
