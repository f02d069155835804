"""`windlass tasks`: lists, shows, retries, cancels and deletes tasks, and prints their output."""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Annotated

import typer

from windlass import operations, queue_operations
from windlass.cli.cost import plain_cost
from windlass.cli.errors import EXIT_BAD_INPUT, print_error
from windlass.cli.log_output import NO_OUTPUT_HINT, LogTail, Timestamps, print_log_lines, print_note
from windlass.cli.options import AsJson, ConfigFile, DataDir, QueueFilter, load, person_command
from windlass.cli.output import (
    one_line,
    print_json,
    print_table,
    printable,
    progress,
    to_plain,
)
from windlass.cli.queues import check_queue_is_known
from windlass.cli.task_search import errors, search_tasks
from windlass.cli.times import parse_duration
from windlass.config_loader import Loaded, secrets_of
from windlass.cost.queries import task_cost
from windlass.log_reader import follow_task_log
from windlass.model.error_text import error_headline
from windlass.model.errors import BadInput
from windlass.model.event import check_reason
from windlass.model.listing import ListedTask, TaskList
from windlass.model.money import with_currency
from windlass.model.payload_privacy import privacy_of
from windlass.model.plural import plural
from windlass.model.redaction import mask_of
from windlass.model.task import CANCELLED, MAX_TASK_ID, Task, TaskStatus, TaskSummary
from windlass.model.text_format import duration
from windlass.model.worker_log import WorkerLogLine
from windlass.operations import CANCEL_REASON, OperationResult
from windlass.ports.queries import SEARCH_S
from windlass.ports.tasks import TaskStore
from windlass.queue_operations import MAX_CONCURRENT_CALLS
from windlass.server.payload_previews import without_private_parts
from windlass.wiring import stores

app = typer.Typer(help="List, retry, cancel and delete tasks.", no_args_is_help=True)

# Characters of a payload in a list.
PAYLOAD_WIDTH = 40

TaskIds = Annotated[list[int] | None, typer.Argument(help="Ids of tasks.", metavar="ID", min=1, max=MAX_TASK_ID)]


class StatusFilter(StrEnum):
    """The statuses of tasks as people see them, and as `windlass status` counts them.

    `scheduled` is queued for later, `retrying` is stored as error, and `cancelled` as failed.
    """

    QUEUED = "queued"
    SCHEDULED = "scheduled"
    RUNNING = "running"
    COMPLETE = "complete"
    RETRYING = "retrying"
    FAILED = "failed"
    CANCELLED = "cancelled"
    # The database and the JSON output call a retrying task this.
    ERROR = "error"


_STORED_STATUS = {
    StatusFilter.SCHEDULED: TaskStatus.QUEUED,
    StatusFilter.RETRYING: TaskStatus.ERROR,
    StatusFilter.CANCELLED: TaskStatus.FAILED,
}
_IS_CANCELLED = {StatusFilter.CANCELLED: True, StatusFilter.FAILED: False}


class FinishedFilter(StrEnum):
    COMPLETE = "complete"
    FAILED = "failed"


@app.command("list")
@person_command
async def list_(
    queue: QueueFilter = None,
    status: Annotated[
        StatusFilter | None,
        typer.Option(
            "--status", "-s", help="Only this status; scheduled: queued for later; failed: without cancelled ones."
        ),
    ] = None,
    search: Annotated[
        str | None,
        typer.Option(
            "--search", help="An id, a unique key, or part of a payload or of an error of any attempt.", metavar="TEXT"
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Maximum number of tasks.", metavar="N")] = 50,
    before: Annotated[
        int | None,
        typer.Option(help="Only tasks older than this one, for the next page.", metavar="ID", min=1, max=MAX_TASK_ID),
    ] = None,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """List tasks, newest first, with the beginning of their payloads.

    `windlass tasks show` prints payload and result in full. What a fleet's `redact` hides is not listed.
    """
    if search is not None and before is not None:
        raise BadInput("--search and --before cannot be combined: raise --limit to find more.")
    loaded = load(config, data_dir).config
    privacy = privacy_of([(fleet.queues, fleet.redact) for fleet in loaded.fleets.values()])
    async with stores.store(loaded, may_create=False) as store:
        is_scheduled = status is StatusFilter.SCHEDULED
        wanted = _STORED_STATUS.get(status) or TaskStatus(status.value) if status is not None else None
        found: Sequence[ListedTask]
        following: str | None = None
        if search is not None:
            which = (
                TaskList("error" if status is StatusFilter.RETRYING else status.value) if status is not None else None
            )
            found = await search_tasks(store, search, queue=queue, which=which, limit=limit, privacy=privacy)
        else:
            page = await store.task_summaries(
                queue=queue,
                status=wanted,
                limit=limit,
                before_id=before,
                is_scheduled=is_scheduled,
                is_cancelled=_IS_CANCELLED.get(status) if status is not None else None,
            )
            found, following = page.rows, page.next_cursor
        if not found and following is None:
            await check_queue_is_known(store, queue)
        now = await store.now()
    found = without_private_parts(privacy, found)
    if following is not None and len(found) < limit:
        print(f"the list stopped after {SEARCH_S:g} s: older tasks were not searched.", file=sys.stderr)
    if as_json:
        print_json(found)
        return
    headings = ("id", "queue", "status", "attempt", "age", "due", "took", "worker", "payload", "note")
    print_table([_row(task, now) for task in found], *headings, right=("id", "attempt", "age", "due", "took"))
    if following is not None:
        print(f"next page: --before {following}")


def _row(task: ListedTask, now: datetime) -> tuple[object, ...]:
    took_s = None
    if task.started_at is not None and task.status is not TaskStatus.QUEUED:
        took_s = ((task.finished_at or now) - task.started_at).total_seconds()
    note = one_line(error_headline(task.error))
    if task.status is TaskStatus.RUNNING:
        percent = f"{task.progress * 100:.0f} %" if task.progress is not None else None
        note = " ".join(part for part in (percent, one_line(task.progress_note)) if part) or None
    due_s = (task.run_after - now).total_seconds() if task.run_after is not None else 0.0
    return (
        task.id,
        task.queue,
        _shown_status(task, due_s),
        f"{task.attempts}/{task.max_attempts}",
        duration((now - task.created_at).total_seconds()),
        f"in {duration(due_s)}" if due_s > 0 else None,
        duration(took_s),
        task.worker_id,
        one_line(task.payload_preview, PAYLOAD_WIDTH),
        note,
    )


def _shown_status(task: TaskSummary, due_s: float) -> str:
    """The name that `windlass status` and the dashboard use."""
    if task.status is TaskStatus.ERROR:
        return "retrying"
    if task.status is TaskStatus.FAILED and task.error_code == CANCELLED:
        return "cancelled"
    return "scheduled" if task.status is TaskStatus.QUEUED and due_s > 0 else task.status.value


app.command()(errors)


@app.command()
@person_command
async def show(
    task_id: Annotated[int, typer.Argument(help="Id of the task.", metavar="ID", min=1, max=MAX_TASK_ID)],
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Show all fields, the cost and the events of a task."""
    async with stores.store(load(config, data_dir).config, may_create=False) as store:
        (task,) = await _find_tasks(store, [task_id])
        # A producer's user reads tasks alone.
        may_read_events = await store.may_read_events()
        events = await store.events(task_id=task_id) if may_read_events else []
        cost = await task_cost(store, task_id, await store.now()) if may_read_events else None
    plain = to_plain(task)
    if as_json:
        stored = {"payload": plain.pop("payload"), "result": plain.pop("result") or "null"}
        print_json({**plain, "cost": plain_cost(cost) if cost is not None else None, "events": events}, stored)
        return
    for name, value in plain.items():
        if value is not None:
            text = f"{value * 100:.0f} %" if name == "progress" else str(value)
            print(f"{name:<14} {printable(text)}")
    if cost is not None:
        mark = "~" if cost.is_estimate else ""
        print(f"{'cost':<14} {mark}{with_currency(cost.total_micros, cost.currency)}")
    for event in events:
        print(f"{event.at:%Y-%m-%d %H:%M:%S%z}  {event.code}  {printable(event.reason)}")


# ----------------------------------------------------------------------------------------------------------- changing


@app.command()
@person_command
async def retry(
    task_ids: TaskIds = None,
    all_failed: Annotated[
        bool, typer.Option("--all-failed", help="All failed tasks of --queue, except cancelled ones.")
    ] = False,
    include_cancelled: Annotated[
        bool, typer.Option("--include-cancelled", help="With --all-failed: also cancelled tasks.")
    ] = False,
    queue: QueueFilter = None,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> int:
    """Requeue failed tasks, with their full number of attempts.

    If one of the ids does not exist, nothing is changed.
    """
    if all_failed == bool(task_ids) or (all_failed and queue is None) or (queue is not None and not all_failed):
        raise BadInput("nothing to retry: pass ids of tasks, or --all-failed with --queue.")
    if include_cancelled and not all_failed:
        raise BadInput("--include-cancelled needs --all-failed: tasks given by id are retried in any case.")
    loaded = load(config, data_dir).config
    async with stores.store(loaded, max_connections=MAX_CONCURRENT_CALLS, may_create=False) as store:
        if queue is not None:
            with progress("retrying", None) as advance:
                retried = await queue_operations.retry_failed_tasks(
                    store, queue, include_cancelled=include_cancelled, on_batch=advance
                )
            if not retried.changed:
                await check_queue_is_known(store, queue)
            return _report("retried", retried.task_ids, [], as_json)
        tasks = await _find_tasks(store, task_ids or [])
        done, refused = await _change(tasks, lambda task_id: operations.retry_task(store, task_id), "retrying")
    return _report("retried", done, refused, as_json)


@app.command()
@person_command
async def cancel(
    task_ids: TaskIds = None,
    all_queued: Annotated[bool, typer.Option("--all-queued", help="All queued and retrying tasks of --queue.")] = False,
    queue: QueueFilter = None,
    reason: Annotated[str, typer.Option(help="Reason, stored with the task.", metavar="TEXT")] = CANCEL_REASON,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> int:
    """Fail unfinished tasks. A worker stops a running attempt at its next heartbeat."""
    if all_queued == bool(task_ids) or all_queued != (queue is not None):
        raise BadInput("nothing was cancelled: pass ids of tasks, or --all-queued with --queue.")
    check_reason(reason, "--reason")
    loaded = load(config, data_dir).config
    async with stores.store(loaded, max_connections=MAX_CONCURRENT_CALLS, may_create=False) as store:
        if queue is not None:
            with progress("cancelling", None) as advance:
                cancelled = await queue_operations.cancel_queued_tasks(store, queue, reason, on_batch=advance)
            if not cancelled.changed:
                await check_queue_is_known(store, queue)
            return _report("cancelled", cancelled.task_ids, [], as_json)
        tasks = await _find_tasks(store, task_ids or [])
        done, refused = await _change(tasks, lambda one: operations.cancel_task(store, one, reason), "cancelling")
    return _report("cancelled", done, refused, as_json)


@app.command()
def purge(
    status: Annotated[
        list[FinishedFilter] | None,
        typer.Option("--status", "-s", help="Status of the tasks to delete. May be repeated."),
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(help="Only tasks that finished longer ago: 90s, 5m, 2h, 7d; 0s for all.", metavar="DURATION"),
    ] = None,
    queue: QueueFilter = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> int:
    """Delete finished tasks permanently.

    Finished tasks are also deleted automatically after their retention time: see `windlass config show`.
    """
    missing = [] if status else ["--status complete or --status failed (or both)"]
    missing += [] if older_than is not None else ["--older-than, for example 7d, or 0s for all"]
    if not status or older_than is None:
        raise BadInput(f"nothing was deleted: add {' and '.join(missing)}.")
    older_than_s = parse_duration(older_than, "--older-than")
    statuses = [TaskStatus(name) for name in dict.fromkeys(status)]
    loaded = load(config, data_dir)
    # Asked before the database is opened, so that Ctrl-C simply exits.
    if not yes:
        _confirm(statuses, older_than, queue)
    return _purge(loaded, queue, statuses, older_than_s, as_json)


@person_command
async def _purge(
    loaded: Loaded, queue: str | None, statuses: list[TaskStatus], older_than_s: float, as_json: bool
) -> None:
    async with stores.store(loaded.config, may_create=False) as store:
        deleted = await store.purge(queue, statuses, older_than_s)
        if not deleted:
            await check_queue_is_known(store, queue)
    if as_json:
        print_json({"deleted": deleted})
    else:
        print(f"deleted {plural(deleted, 'task')}")


def _confirm(statuses: list[TaskStatus], older_than: str, queue: str | None) -> None:
    """Ask on standard error, so that standard output stays one JSON value. Raise BadInput unless the answer is yes."""
    which = f"{' and '.join(statuses)} tasks of {'queue ' + queue if queue else 'all queues'}"
    question = f"Delete all {which} that finished more than {older_than} ago, permanently? [y/N] "
    print(question, end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline() if sys.stdin is not None else ""
    if not answer.endswith("\n"):
        print(file=sys.stderr)
    if answer.strip().lower() not in ("y", "yes"):
        raise BadInput("nothing was deleted. Answer yes, or add --yes.")


@app.command()
@person_command
async def logs(
    task_id: Annotated[int, typer.Argument(help="Id of the task.", metavar="ID", min=1, max=MAX_TASK_ID)],
    attempt: Annotated[
        int | None, typer.Option("--attempt", help="Only this attempt.", metavar="N", min=1, max=2**31 - 1)
    ] = None,
    lines: LogTail = 100,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until the task finishes.")] = False,
    timestamps: Timestamps = False,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Print the output of a task's attempts.

    It stays readable after their machines are gone. With --json, one object per line.
    """
    loaded = load(config, data_dir)
    async with stores.store(loaded.config, may_create=False) as store:
        (task,) = await _find_tasks(store, [task_id])

        async def read() -> AsyncIterator[WorkerLogLine]:
            page = await store.task_log(task_id, lines, attempt=attempt)
            for line in page.lines:
                yield line
            if follow:
                async for line in follow_task_log(store, task_id, page.cursor, attempt=attempt):
                    yield line

        count = await print_log_lines(
            read(),
            mask_of(secrets_of(loaded.config)),
            has_timestamps=timestamps,
            as_json=as_json,
            is_flushed=follow,
        )
    if not count and not as_json:
        which = f"attempt {attempt} of task {task_id}" if attempt is not None else f"task {task_id}"
        hint = NO_OUTPUT_HINT if task.attempts else "It has not been claimed yet."
        print_note(f"no output of {which} is known. {hint}")


async def _find_tasks(store: TaskStore, task_ids: list[int]) -> list[Task]:
    """All tasks with these ids. Raises BadInput for unknown ids before anything is changed."""
    tasks = {task_id: await store.task(task_id) for task_id in dict.fromkeys(task_ids)}
    if unknown := [str(task_id) for task_id, task in tasks.items() if task is None]:
        noun = "task" if len(unknown) == 1 else "tasks"
        raise BadInput(
            f"{noun} {', '.join(unknown)} not found (unknown, or already purged). `windlass tasks list` shows tasks."
        )
    return [task for task in tasks.values() if task is not None]


async def _change(
    tasks: list[Task], change: Callable[[int], Awaitable[OperationResult]], doing: str
) -> tuple[list[int], list[tuple[Task, OperationResult]]]:
    """Apply an operation to each task. Returns the ids of changed tasks, and the refused tasks with their results."""
    semaphore = asyncio.Semaphore(MAX_CONCURRENT_CALLS)
    done: list[int] = []
    refused: list[tuple[Task, OperationResult]] = []

    async def change_one(task: Task) -> None:
        async with semaphore:
            result = await change(task.id)
        if result.is_refused:
            refused.append((task, result))
        else:
            done.append(task.id)
        advance(1)

    with progress(doing, len(tasks)) as advance:
        async with asyncio.TaskGroup() as group:
            for task in tasks:
                group.create_task(change_one(task))
    return sorted(done), sorted(refused, key=lambda one: one[0].id)


def _report(verb: str, done: Sequence[int], refused: Sequence[tuple[Task, OperationResult]], as_json: bool) -> int:
    if as_json:
        print_json({verb: done, "refused": [{"id": task.id, "status": task.status} for task, _ in refused]})
    elif len(done) == 1:
        print(f"{verb} task {done[0]}")
    elif done or not refused:
        print(f"{verb} {plural(len(done), 'task')}")
    for _, result in refused:
        print_error(f"{result.message}.")
    return EXIT_BAD_INPUT if refused else 0
