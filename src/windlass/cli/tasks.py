"""`windlass tasks`: look at tasks, try them again, end them, delete them."""

import sys
from collections.abc import Awaitable, Callable
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from windlass.cli.common import EXIT_BAD_INPUT, AsJson, ConfigFile, DataDir, command, load, say
from windlass.cli.cost import plain_cost
from windlass.cli.output import format_count, duration, print_json, print_table, printable, progress, last_line, to_plain
from windlass.cli.queues import check_queue_is_known
from windlass.cli.times import parse_duration
from windlass.cost.queries import task_cost
from windlass.model.errors import BadInput
from windlass.model.event import check_reason
from windlass.model.money import with_currency
from windlass.model.task import MAX_TASK_ID, Task, TaskStatus, TaskSummary

if TYPE_CHECKING:
    from windlass.config_loader import Loaded
    from windlass.store.postgres import PostgresStore

app = typer.Typer(help="Look at tasks, retry, cancel and delete them.", no_args_is_help=True)

PAGE = 1_000
# As many calls at once as the store has connections.
AT_ONCE = 4

Queue = Annotated[str | None, typer.Option("--queue", "-q", help="Only of this queue.", metavar="NAME")]
TaskIds = Annotated[list[int] | None, typer.Argument(help="Ids of tasks.", metavar="ID", min=1, max=MAX_TASK_ID)]


class StatusFilter(StrEnum):
    """What can be listed: the statuses, and those among the queued that wait for their time."""

    QUEUED = "queued"
    SCHEDULED = "scheduled"
    RUNNING = "running"
    COMPLETE = "complete"
    ERROR = "error"
    FAILED = "failed"


class FinishedFilter(StrEnum):
    """What can be purged."""

    COMPLETE = "complete"
    FAILED = "failed"


@app.command("list")
@command
async def list_(
    queue: Queue = None,
    status: Annotated[
        StatusFilter | None, typer.Option("--status", "-s", help="Only with this status; scheduled: queued for later.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most so many.", metavar="N")] = 50,
    before: Annotated[
        int | None, typer.Option(help="Only older ones than this: the next page.", metavar="ID", min=1, max=MAX_TASK_ID)
    ] = None,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """List tasks, newest first.

    Without payloads and results: `windlass tasks show` has those.
    """
    from windlass.wiring import stores

    async with stores.store(load(config, data_dir).config, may_create=False) as store:
        is_scheduled = status is StatusFilter.SCHEDULED
        of = TaskStatus.QUEUED if is_scheduled else TaskStatus(status.value) if status is not None else None
        found = await store.task_summaries(
            queue=queue, status=of, limit=limit, before_id=before, is_scheduled=is_scheduled
        )
        if not found:
            await check_queue_is_known(store, queue)
        now = await store.now()
    if as_json:
        print_json(found)
        return
    headings = ("id", "queue", "status", "attempt", "age", "due", "took", "worker", "note")
    print_table([_row(task, now) for task in found], *headings, right=("id", "attempt", "age", "due", "took"))
    if len(found) == limit:
        print(f"more: --before {found[-1].id}")


def _row(task: TaskSummary, now: datetime) -> tuple[object, ...]:
    took_s = None
    if task.started_at is not None and task.status is not TaskStatus.QUEUED:
        took_s = ((task.finished_at or now) - task.started_at).total_seconds()
    note = _progress(task) if task.status is TaskStatus.RUNNING else last_line(task.error)
    due_s = (task.run_after - now).total_seconds() if task.run_after is not None else 0.0
    return (
        task.id,
        task.queue,
        task.status.value,
        f"{task.attempts}/{task.max_attempts}",
        duration((now - task.created_at).total_seconds()),
        f"in {duration(due_s)}" if due_s > 0 else None,
        duration(took_s),
        task.worker_id,
        note,
    )


def _progress(task: TaskSummary) -> str | None:
    """20 % half way"""
    percent = f"{task.progress * 100:.0f} %" if task.progress is not None else None
    return " ".join(part for part in (percent, last_line(task.progress_note)) if part) or None


@app.command()
@command
async def show(
    task_id: Annotated[int, typer.Argument(help="The task's id.", metavar="ID", min=1, max=MAX_TASK_ID)],
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Everything about one task: its fields and what happened to it."""
    from windlass.wiring import stores

    async with stores.control_store(load(config, data_dir).config, may_create=False) as store:
        (task,) = await _existing(store, [task_id])
        events = await store.events(task_id=task_id)
        cost = await task_cost(store, task_id, await store.now())
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
@command
async def retry(
    task_ids: TaskIds = None,
    all_failed: Annotated[
        bool, typer.Option("--all-failed", help="All dead letters of --queue, but those that were cancelled.")
    ] = False,
    include_cancelled: Annotated[
        bool, typer.Option("--include-cancelled", help="With --all-failed: those that were cancelled, too.")
    ] = False,
    queue: Queue = None,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> int:
    """Put failed tasks back into their queue.

    They get all their attempts again. Ids that do not exist are named, and then nothing is changed.
    """
    if all_failed == bool(task_ids) or (all_failed and queue is None) or (queue is not None and not all_failed):
        raise BadInput("say which tasks to retry: their ids, or --all-failed with --queue.")
    if include_cancelled and not all_failed:
        raise BadInput("--include-cancelled goes with --all-failed: a task that is named by its id is retried anyway.")
    from windlass.wiring import stores

    async with stores.store(load(config, data_dir).config, max_connections=AT_ONCE, may_create=False) as store:
        refused: list[Task] = []
        if queue is not None:
            done = await _retry_all_failed(store, queue, include_cancelled=include_cancelled)
            if not done:
                await check_queue_is_known(store, queue)
        else:
            done, refused = await _change(await _existing(store, task_ids or []), store.retry_task, "retrying")
    return _report(
        "retried", done, refused, as_json, "only failed tasks and those that wait for a retry can be retried"
    )


@app.command()
@command
async def cancel(
    task_ids: TaskIds = None,
    reason: Annotated[str, typer.Option(help="Kept with the task.", metavar="TEXT")] = "cancelled by hand",
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> int:
    """End unfinished tasks as failed. A running one is stopped by its worker at the next heartbeat."""
    if not task_ids:
        raise BadInput("say which tasks to cancel: their ids.")
    check_reason(reason, "--reason")
    from windlass.wiring import stores

    async with stores.store(load(config, data_dir).config, max_connections=AT_ONCE, may_create=False) as store:
        tasks = await _existing(store, task_ids)
        done, refused = await _change(tasks, lambda task_id: store.cancel_task(task_id, reason), "cancelling")
    return _report("cancelled", done, refused, as_json, "only tasks that are not finished can be cancelled")


@app.command()
def purge(
    status: Annotated[
        list[FinishedFilter] | None, typer.Option("--status", "-s", help="Delete those; may be repeated.")
    ] = None,
    older_than: Annotated[
        str | None, typer.Option(help="Only tasks that ended longer ago: 90s, 5m, 2h, 7d; 0s for all.", metavar="SPAN")
    ] = None,
    queue: Queue = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> int:
    """Delete finished tasks, for good.

    Retention does this by itself after a while; see `windlass config show`.
    """
    if not status or older_than is None:
        raise BadInput("say what to delete: --status complete or failed (or both), and --older-than, such as 7d.")
    older_than_s = parse_duration(older_than, "--older-than")
    statuses = [TaskStatus(name) for name in dict.fromkeys(status)]
    loaded = load(config, data_dir)
    # Before anything is open: Ctrl-C at a question should simply end it.
    if not yes:
        _ask(statuses, older_than, queue)
    return _purge(loaded, queue, statuses, older_than_s, as_json)


@command
async def _purge(
    loaded: "Loaded", queue: str | None, statuses: list[TaskStatus], older_than_s: float, as_json: bool
) -> None:
    from windlass.wiring import stores

    async with stores.store(loaded.config, may_create=False) as store:
        deleted = await store.purge(queue, statuses, older_than_s)
        if not deleted:
            await check_queue_is_known(store, queue)
    if as_json:
        print_json({"deleted": deleted})
    else:
        print(f"deleted {format_count(deleted, 'task')}")


def _ask(statuses: list[TaskStatus], older_than: str, queue: str | None) -> None:
    """On standard error, so that what is printed stays one JSON value. No answer is no."""
    which = f"{' and '.join(statuses)} tasks of {'queue ' + queue if queue else 'all queues'}"
    question = f"Delete all {which} that ended more than {older_than} ago, for good? [y/N] "
    print(question, end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline() if sys.stdin is not None else ""
    if not answer.endswith("\n"):
        print(file=sys.stderr)
    if answer.strip().lower() not in ("y", "yes"):
        raise BadInput("nothing was deleted: answer yes, or add --yes.")


async def _existing(store: "PostgresStore", task_ids: list[int]) -> list[Task]:
    """All of them, before anything is changed: an id that is wrong is a reason to stop and look."""
    tasks = {task_id: await store.task(task_id) for task_id in dict.fromkeys(task_ids)}
    if unknown := [str(task_id) for task_id, task in tasks.items() if task is None]:
        raise BadInput(
            f"there is no task {', '.join(unknown)}: `windlass tasks list` shows those there are; finished ones go "
            "when their retention is over."
        )
    return [task for task in tasks.values() if task is not None]


async def _retry_all_failed(store: "PostgresStore", queue: str, *, include_cancelled: bool) -> list[int]:
    """In bounded steps; those that fail meanwhile are left alone."""
    began, failed_from = await store.now(), None
    done: list[int] = []
    with progress("retrying", None) as advance:
        while True:
            was_from = failed_from
            # At the end once more from the beginning, for those that somebody had locked.
            ids, failed_from = await store.retry_failed(
                queue, began, PAGE, failed_from=was_from, include_cancelled=include_cancelled
            )
            if not ids and was_from is None:
                return sorted(done)
            done += ids
            advance(len(ids))


async def _change(
    tasks: list[Task], change: Callable[[int], Awaitable[bool]], doing: str
) -> tuple[list[int], list[Task]]:
    """Do it to each. Returns which were changed, and which were in no state for it."""
    import asyncio

    places = asyncio.Semaphore(AT_ONCE)
    done: list[int] = []
    refused: list[Task] = []

    async def one(task: Task) -> None:
        async with places:
            is_done = await change(task.id)
        if is_done:
            done.append(task.id)
        else:
            refused.append(task)
        advance(1)

    with progress(doing, None) as advance:
        async with asyncio.TaskGroup() as group:
            for task in tasks:
                group.create_task(one(task))
    return sorted(done), sorted(refused, key=lambda task: task.id)


def _report(did: str, done: list[int], refused: list[Task], as_json: bool, rule: str) -> int:
    if as_json:
        print_json({did: done, "refused": [{"id": task.id, "status": task.status} for task in refused]})
    elif len(done) == 1:
        print(f"{did} task {done[0]}")
    elif done or not refused:
        print(f"{did} {format_count(len(done), 'task')}")
    for task in refused:
        say(f"task {task.id} is {task.status.value}: {rule}.")
    return EXIT_BAD_INPUT if refused else 0
