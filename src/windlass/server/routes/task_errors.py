"""Failed attempts: the JSON route and the page. Answers which tasks failed with an error, when, and on which worker."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from windlass.dashboard.charts import RANGE_S, ChartRange
from windlass.dashboard.task_errors import task_errors_page
from windlass.model.listing import Page, TaskError
from windlass.server.context import AppContext
from windlass.server.json_api import (
    VIEWER,
    CallerScope,
    Cursor,
    Limit,
    PageResponse,
    QueueFilter,
    WorkerFilter,
    api_router,
    filter_in_scope,
    json_response,
    page_response,
)
from windlass.server.openapi import documented
from windlass.server.pages import PAGE_ROWS, PageCursor, PageFilter, PageViewer, html, page_context
from windlass.server.payload_previews import unsearched_queues, without_private_parts

# Events are kept for a month by default.
MAX_SINCE_S = 400 * 86_400.0

_errors = json_response(PageResponse[TaskError])
ErrorSearch = Annotated[str | None, Query(max_length=200, description="An error code, or part of an error text.")]


def routes(context: AppContext) -> APIRouter:
    router, viewer = APIRouter(), api_router(VIEWER)
    store = context.store

    @viewer.get("/errors", **documented(PageResponse[TaskError], "List failed attempts"))
    async def errors(
        scope: CallerScope,
        queue: QueueFilter = None,
        worker_id: WorkerFilter = None,
        search: ErrorSearch = None,
        since_s: Annotated[float, Query(gt=0, le=MAX_SINCE_S, description="Only the last seconds.")] = 3_600.0,
        limit: Limit = 50,
        cursor: Cursor = None,
    ) -> Response:
        """Newest first, also of tasks that were retried and completed since."""
        queue = filter_in_scope(queue, scope.queues, scope, "queue")
        page = await store.task_errors(
            since_s=since_s,
            queue=queue,
            worker_id=worker_id,
            search=search,
            unsearched_queues=unsearched_queues(context.privacy),
            limit=limit,
            cursor=cursor,
        )
        return _errors(page_response(page, without_private_parts(context.privacy, page.rows)))

    @router.get("/errors", include_in_schema=False)
    async def page(
        request: Request,
        _viewer: PageViewer,
        queue: PageFilter = None,
        worker: Annotated[str | None, Query(max_length=200)] = None,
        search: Annotated[str | None, Query(max_length=200)] = None,
        chosen: Annotated[ChartRange, Query(alias="range")] = ChartRange.HOUR,
        cursor: PageCursor = None,
    ) -> Response:
        since_s = RANGE_S[chosen]
        found = await store.task_errors(
            since_s=since_s,
            queue=queue or None,
            worker_id=worker or None,
            search=search or None,
            unsearched_queues=unsearched_queues(context.privacy),
            limit=PAGE_ROWS,
            cursor=cursor,
        )
        counts = await store.task_error_counts(
            since_s=since_s,
            queue=queue or None,
            worker_id=worker or None,
            search=search or None,
            unsearched_queues=unsearched_queues(context.privacy),
        )
        overview = await context.overview_feed.overview()
        shown = task_errors_page(
            page_context(context, request, await store.now()),
            Page(without_private_parts(context.privacy, found.rows), found.next_cursor),
            counts,
            queues=sorted({*overview.queues, *([queue] if queue else [])}),
            queue=queue or None,
            worker_id=worker or None,
            search=search or None,
            chosen=chosen,
            is_first=cursor is None,
            is_incomplete=found.next_cursor is not None and len(found.rows) < PAGE_ROWS,
        )
        return html(request, shown)

    router.include_router(viewer)
    return router
