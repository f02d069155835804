"""`windlass tasks errors`, and the search of `windlass tasks list`.

Both read pages of the queries behind the dashboard and the HTTP API, until enough is found or MAX_SEARCH_S have passed.
"""

import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Protocol, TypeVar

import typer

from windlass.cli.options import AsJson, ConfigFile, DataDir, QueueFilter, load, person_command
from windlass.cli.output import one_line, print_json, print_table
from windlass.cli.queues import check_queue_is_known
from windlass.cli.times import parse_duration
from windlass.model.error_text import error_headline
from windlass.model.listing import MAX_PAGE, Page, TaskError, TaskList, TaskRow
from windlass.model.payload_privacy import PayloadPrivacy
from windlass.model.text_format import duration
from windlass.server.payload_previews import unsearched_queues
from windlass.wiring import stores

# A page of a search takes about a second. A search of millions of tasks ends after this time, and says so.
MAX_SEARCH_S = 20.0

Row = TypeVar("Row")
# Reads the page after a cursor, with at most this many rows.
ReadPage = Callable[[str | None, int], Awaitable[Page[Row]]]


class TaskLists(Protocol):
    async def tasks_page(
        self,
        *,
        queue: str | None,
        which: TaskList | None,
        search: str,
        unsearched_queues: Sequence[str],
        limit: int,
        cursor: str | None,
    ) -> Page[TaskRow]: ...


async def search_tasks(
    store: TaskLists,
    search: str,
    *,
    queue: str | None,
    which: TaskList | None,
    limit: int,
    privacy: PayloadPrivacy,
) -> list[TaskRow]:
    async def read(cursor: str | None, wanted: int) -> Page[TaskRow]:
        return await store.tasks_page(
            queue=queue,
            which=which,
            search=search,
            unsearched_queues=unsearched_queues(privacy),
            limit=wanted,
            cursor=cursor,
        )

    # A task that matches by its id or key comes first, and again in its place.
    found = {task.id: task for task in await _read_pages(read, limit)}
    return list(found.values())[:limit]


async def _read_pages(read: ReadPage[Row], limit: int) -> list[Row]:
    rows: list[Row] = []
    cursor = None
    until = time.monotonic() + MAX_SEARCH_S
    while len(rows) < limit:
        page = await read(cursor, min(MAX_PAGE, limit - len(rows)))
        rows += page.rows
        cursor = page.next_cursor
        if cursor is None:
            break
        if time.monotonic() >= until:
            print(f"the search stopped after {MAX_SEARCH_S:.0f} s: older ones were not searched.", file=sys.stderr)
            break
    return rows


@person_command
async def errors(
    search: Annotated[
        str | None, typer.Option("--search", help="An error code, or part of an error.", metavar="TEXT")
    ] = None,
    since: Annotated[
        str, typer.Option("--since", help="How far to look back: 90s, 5m, 2h, 7d.", metavar="DURATION")
    ] = "1h",
    queue: QueueFilter = None,
    worker: Annotated[str | None, typer.Option("--worker", help="Only this worker.", metavar="ID")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Maximum number of attempts.", metavar="N")] = 50,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """List failed attempts, newest first, with the worker that ran them.

    Attempts of tasks that succeeded later are included.
    """
    since_s = parse_duration(since, "--since")
    async with stores.store(load(config, data_dir).config, may_create=False) as store:

        async def read(cursor: str | None, wanted: int) -> Page[TaskError]:
            return await store.task_errors(
                since_s=since_s, queue=queue, worker_id=worker, search=search, limit=wanted, cursor=cursor
            )

        found = await _read_pages(read, limit)
        if not found:
            await check_queue_is_known(store, queue)
        now = await store.now()
    if as_json:
        print_json(found)
        return
    rows = [
        (
            error.task_id,
            error.queue,
            error.attempt,
            duration((now - error.at).total_seconds()),
            error.worker_id,
            error.instance_type or error.host,
            error.error_code,
            one_line(error_headline(error.error)),
        )
        for error in found
    ]
    headings = ("task", "queue", "attempt", "age", "worker", "machine", "code", "error")
    print_table(rows, *headings, right=("task", "attempt", "age"))
