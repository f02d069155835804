"""Queues: JSON routes and pages. A queue exists while a fleet serves it or it has tasks."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from windlass.dashboard.fleets import fleet_card
from windlass.dashboard.queues import queue_page, queues_page
from windlass.model.listing import TaskList
from windlass.model.overview import Overview, QueueOverview, Work
from windlass.model.task import is_name
from windlass.server.context import AppContext
from windlass.server.errors import not_found
from windlass.server.json_api import VIEWER, CallerScope, api_router, extend, json_response
from windlass.server.openapi import documented
from windlass.server.pages import PageViewer, html, page_context
from windlass.server.payload_previews import without_private_parts

# Tasks and errors on the page of a queue. Its links lead to all of them.
TASKS_ON_PAGE = 10
ERRORS_ON_PAGE = 10
ERRORS_S = 3_600.0

QueueName = Annotated[str, Path(max_length=63)]


@dataclass(frozen=True, slots=True)
class QueueResponse:
    """A queue, and what serves it."""

    name: str
    work: Work
    # Fleets that serve it.
    fleets: tuple[str, ...]
    # Live workers that run its tasks, of fleets or started by hand.
    workers: int
    # False: no fleet and no live worker claims its tasks.
    is_served: bool


_queues = json_response(list[QueueResponse])
_queue = json_response(QueueResponse)


def routes(context: AppContext) -> APIRouter:
    router, viewer = APIRouter(), api_router(VIEWER)
    store, feed = context.store, context.overview_feed

    async def find_queue(name: str) -> tuple[Overview, QueueOverview]:
        seen = await feed.overview()
        if name in seen.queues:
            return seen, seen.queue(name)
        work = await store.queue_work(name) if is_name(name) else None
        is_known = work is not None and (
            work.queued + work.scheduled + work.retrying + work.running + work.dead > 0
            or bool((await store.tasks_page(queue=name, limit=1)).rows)
        )
        if not is_known:
            raise not_found(f"queue {name} not found: no fleet serves it and it has no recent tasks")
        return seen, seen.queue(name, work)

    @viewer.get("/queues", **documented(list[QueueResponse], "List queues"))
    async def queues(scope: CallerScope) -> Response:
        """Queues that fleets serve, and others with unfinished tasks. About one second old at most."""
        seen = await feed.overview()
        return _queues([_response(seen.queue(name)) for name in seen.queues if scope.allows_queue(name)])

    @viewer.get("/queues/{queue}", **documented(QueueResponse, "Get a queue"))
    async def queue(queue: QueueName) -> Response:
        return _queue(_response((await find_queue(queue))[1]))

    @router.get("/queues", include_in_schema=False)
    async def list_page(request: Request, _viewer: PageViewer) -> Response:
        seen = await feed.overview()
        return html(request, queues_page(page_context(context, request, seen.at), seen))

    @router.get("/queues/{queue}", include_in_schema=False)
    async def page(request: Request, queue: QueueName, _viewer: PageViewer) -> Response:
        seen, found = await find_queue(queue)
        waiting = await store.tasks_page(queue=queue, which=TaskList.QUEUED, limit=TASKS_ON_PAGE)
        errors = await store.task_errors(since_s=ERRORS_S, queue=queue, limit=ERRORS_ON_PAGE)
        shown = queue_page(
            page_context(context, request, seen.at),
            found,
            cards=[fleet_card(each, (), seen.at) for each in seen.fleets if queue in each.fleet.queues],
            next_tasks=without_private_parts(context.privacy, waiting.rows),
            errors=without_private_parts(context.privacy, errors.rows),
            counts=await store.task_error_counts(since_s=ERRORS_S, queue=queue),
        )
        return html(request, shown)

    router.include_router(viewer)
    return router


def _response(queue: QueueOverview) -> QueueResponse:
    return extend(QueueResponse, queue, is_served=queue.is_served)
