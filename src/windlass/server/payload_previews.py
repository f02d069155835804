"""Tasks, their previews, errors and notes without the parts that a fleet's `redact` hides.

A preview that is cut cannot be parsed, so it is hidden as a whole, and so is the error, which may repeat a part of the
payload. Payloads of such queues are not searched either: a match would reveal the text.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from windlass.model.listing import ListedTask, TaskError, TaskRow, WorkerRow
from windlass.model.payload_privacy import PayloadPrivacy
from windlass.model.redaction import HIDDEN
from windlass.model.task import Task

Row = TypeVar("Row", ListedTask, TaskRow, TaskError)
TaskT = TypeVar("TaskT", bound=Task)


def text_filter(privacy: PayloadPrivacy, task: Task) -> Callable[[str], str]:
    """Hides the private parts of a task in texts about it."""
    return privacy.text_filter(task.queue, task.payload, task.result) if privacy.hides(task.queue) else str


def without_hidden_parts(privacy: PayloadPrivacy, task: TaskT) -> TaskT:
    hide = text_filter(privacy, task)
    return replace(
        task,
        payload=privacy.redact(task.queue, task.payload) or "null",
        result=privacy.redact(task.queue, task.result),
        error=hide(task.error) if task.error is not None else None,
        progress_note=hide(task.progress_note) if task.progress_note is not None else None,
    )


def without_private_note(privacy: PayloadPrivacy, worker: WorkerRow) -> WorkerRow:
    """The row of a worker without the note of its task, which may repeat the payload."""
    if worker.task_note is None or not privacy.hides(worker.task_queue):
        return worker
    return replace(worker, task_note=HIDDEN)


def without_private_parts(privacy: PayloadPrivacy, rows: Sequence[Row]) -> tuple[Row, ...]:
    return tuple(_without_private_parts(privacy, row) for row in rows)


def _without_private_parts(privacy: PayloadPrivacy, row: Row) -> Row:
    if not privacy.hides(row.queue):
        return row
    # A preview that is cut, or missing, is not valid JSON: everything is hidden.
    queue, payload = row.queue or "", row.payload_preview or ""
    hide = privacy.text_filter(queue, payload)
    row = replace(
        row,
        payload_preview=privacy.redact(queue, payload) if row.queue is not None else None,
        error=hide(row.error) if row.error is not None else None,
    )
    if isinstance(row, ListedTask) and row.progress_note is not None:
        return replace(row, progress_note=hide(row.progress_note))
    return row


def unsearched_queues(privacy: PayloadPrivacy) -> list[str]:
    """Queues whose payloads a search leaves out."""
    return [queue for queue, paths in privacy.paths.items() if paths]
