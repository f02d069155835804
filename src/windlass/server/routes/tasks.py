"""Tasks: JSON routes, pages and dashboard forms."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

from fastapi import APIRouter, Body, Query, Request, Response
from pydantic import AwareDatetime, BeforeValidator, FailFast, Field, TypeAdapter

from windlass import operations, queue_operations
from windlass.cost.queries import task_cost
from windlass.dashboard.tasks import task_page, tasks_page
from windlass.model.auth import Role
from windlass.model.cost import Cost
from windlass.model.errors import BadInput
from windlass.model.event import Event
from windlass.model.listing import Page, TaskList, TaskRow
from windlass.model.masked_values import masked_json
from windlass.model.overview import Work
from windlass.model.task import MAX_TASK_ID, NAME_PATTERN, TaskStatus, TaskSummary, check_json_text, new_task
from windlass.operations import (
    MAX_SELECTED_TASKS,
    EnqueueResult,
    OperationOutcome,
    OperationResult,
    task_not_found,
)
from windlass.queue_operations import RetryFailedResult
from windlass.server.context import AppContext
from windlass.server.errors import forbidden, not_found
from windlass.server.forms import submit_form
from windlass.server.json_api import (
    FORM_OPERATOR,
    OPERATOR,
    PRODUCER,
    TASK_READER,
    VIEWER,
    CallerScope,
    Cursor,
    LargeBody,
    Limit,
    PageResponse,
    QueueFilter,
    ReasonBody,
    RequestBody,
    TaskId,
    api_router,
    filter_in_scope,
    json_response,
    operation_response,
    page_response,
)
from windlass.server.log_responses import (
    OUTPUT_IS_PRIVATE,
    LogCursor,
    LogLineCount,
    LogLinesResponse,
    is_output_private,
    log_response,
)
from windlass.server.openapi import documented
from windlass.server.pages import PAGE_ROWS, PageCursor, PageFilter, PageViewer, html, page_context
from windlass.server.payload_previews import (
    text_filter,
    unsearched_queues,
    without_hidden_parts,
    without_private_parts,
)

# Failed tasks per page: fewer, because each is shown with its history.
FAILED_PAGE_ROWS = 25
LOG_LINES_ON_PAGE = 300
# Failed tasks that one click on "Retry all failed" requeues.
MAX_RETRIED_BY_FORM = 10_000


@dataclass(frozen=True, slots=True)
class TaskResponse(TaskSummary):
    payload: Any
    result: Any
    # Oldest first.
    events: list[Event]
    # Explains the current state, in sentences.
    answer: list[str]
    cost: Cost | None


_Integer = Annotated[int, Field(ge=-(2**31), lt=2**31)]


class NewTaskBody(RequestBody):
    queue: str = Field(description="The queue.", pattern=NAME_PATTERN, examples=["renders"])
    payload: Any = Field(default=None, description="Any JSON value.", examples=[{"prompt": "a lighthouse"}])
    priority: _Integer = Field(default=0, description="Tasks with a higher priority are claimed first.")
    run_after: AwareDatetime | None = Field(default=None, description="Not claimed before this time.")
    max_attempts: Annotated[int, Field(ge=1, lt=2**31)] = Field(default=3, description="Attempts before it fails.")
    timeout_s: Annotated[float, Field(gt=0, lt=1e9)] | None = Field(default=None, description="Per attempt.")
    unique_key: str | None = Field(
        default=None, description="Enqueueing the same key again returns the existing task.", examples=["order-1234"]
    )


class RetryFailedBody(RequestBody):
    queue: str = Field(description="The queue.")
    limit: Annotated[int, Field(ge=1, le=1_000)] = Field(default=1_000, description="Maximum number, oldest first.")


class TaskIdsBody(RequestBody):
    task_ids: Annotated[
        list[Annotated[int, Field(ge=1, le=MAX_TASK_ID)]],
        Field(min_length=1, max_length=MAX_SELECTED_TASKS),
        FailFast(),
    ] = Field(description="Ids of the tasks.", examples=[[4711, 4712]])


class CancelTasksBody(TaskIdsBody, ReasonBody):
    pass


_NEW_TASK = LargeBody(NewTaskBody, "payload")
_TASK = TypeAdapter(TaskResponse)
_tasks = json_response(PageResponse[TaskRow])


def _task_without_values(task: TaskResponse) -> str:
    return _TASK.dump_json(task, exclude={"payload", "result"}).decode()


def routes(context: AppContext) -> APIRouter:
    router, viewer, producer, operator = APIRouter(), api_router(VIEWER), api_router(PRODUCER), api_router(OPERATOR)
    reader = api_router(TASK_READER)
    _add_read_routes(viewer, reader, context)
    _add_write_routes(producer, operator, context)
    _add_pages(router, context)
    _add_form_routes(router, context)
    for part in (viewer, reader, producer, operator):
        router.include_router(part)
    return router


def _add_read_routes(viewer: APIRouter, reader: APIRouter, context: AppContext) -> None:
    store = context.store

    @viewer.get("/tasks", **documented(PageResponse[TaskRow], "List tasks"))
    async def tasks(
        scope: CallerScope,
        queue: QueueFilter = None,
        status: Annotated[TaskList | None, Query(description="Without it all tasks, newest first.")] = None,
        search: Annotated[
            str | None,
            Query(
                max_length=200,
                description="An id, the start of a unique key, or part of a payload or of an error of any attempt.",
            ),
        ] = None,
        limit: Limit = 50,
        cursor: Cursor = None,
    ) -> Response:
        """With the beginning of their payloads. Queued tasks are in the order in which they will be claimed.

        A page of a search may be empty and still have a `next_cursor`: it continues with older tasks."""
        queue = filter_in_scope(queue, scope.queues, scope, "queue")
        page = await store.tasks_page(
            queue=queue,
            which=status,
            search=search,
            unsearched_queues=unsearched_queues(context.privacy),
            limit=limit,
            cursor=cursor,
        )
        return _tasks(page_response(page, without_private_parts(context.privacy, page.rows)))

    @reader.get("/tasks/{task_id}", **documented(TaskResponse, "Get a task"))
    async def task(request: Request, task_id: TaskId, scope: CallerScope) -> Response:
        """With payload, result, events and cost. A producer gets its own tasks only, without events and cost."""
        found, caller = await store.task(task_id), request.state.caller
        is_producer = caller.role is Role.PRODUCER
        if found is None or not scope.allows_queue(found.queue) or (is_producer and found.owner != caller.actor):
            raise not_found(task_not_found(task_id))
        events = [] if is_producer else await store.events(task_id=task_id)
        answer = [] if is_producer else (await context.control.explain(str(task_id))).answer
        if caller.role is Role.VIEWER:
            hide = text_filter(context.privacy, found)
            events = [context.privacy.redact_event(event, hide) for event in events]
            answer = list(map(hide, answer))
            found = without_hidden_parts(context.privacy, found)
        summary = {field.name: getattr(found, field.name) for field in fields(TaskSummary)}
        response = TaskResponse(
            **summary,
            payload=None,
            result=None,
            events=events,
            answer=answer,
            cost=await task_cost(store, task_id, await store.now(), found.worker_id)
            if found.worker_id and not is_producer
            else None,
        )
        # Payload and result are copied as stored: PostgreSQL accepts deeper nesting and longer numbers than Python.
        rest = masked_json(_task_without_values, response).removesuffix("}").encode()
        parts = (rest, found.payload.encode(), (found.result or "null").encode())
        return Response(b'%s,"payload":%s,"result":%s}' % parts, media_type="application/json")

    @viewer.get("/tasks/{task_id}/logs", **documented(LogLinesResponse, "Get a task's output"))
    async def task_log(
        request: Request,
        task_id: TaskId,
        scope: CallerScope,
        attempt: Annotated[int | None, Query(ge=1, lt=2**31, description="Only this attempt.")] = None,
        lines: LogLineCount = 200,
        after: LogCursor = None,
    ) -> Response:
        """The last lines that the attempts of a task printed, oldest first, also after their machines are gone.

        With `after`, the lines since that cursor: repeat the request to follow the output."""
        found = await store.task(task_id)
        if found is None or not scope.allows_queue(found.queue):
            raise not_found(task_not_found(task_id))
        if is_output_private(context, request, (found.queue,)):
            raise forbidden(OUTPUT_IS_PRIVATE)
        return log_response(await store.task_log(task_id, lines, attempt=attempt, after=after))


def _add_write_routes(producer: APIRouter, operator: APIRouter, context: AppContext) -> None:
    store, feed = context.store, context.overview_feed
    check_payload = functools.partial(check_json_text, what="the payload", max_bytes=context.max_payload_bytes)

    @producer.post(
        "/tasks",
        **documented(EnqueueResult, "Enqueue a task", status_code=201, also=200),
        openapi_extra=_NEW_TASK.openapi_extra,
    )
    async def enqueue(request: Request, scope: CallerScope) -> Response:
        """201 for a new task, 200 if the unique key already has one."""
        body, payload = await _NEW_TASK.read(request, check_payload)
        new = new_task(**body.model_dump(exclude={"payload"}))._replace(payload=payload)
        result = await operations.enqueue_task(store, new, scope=scope)
        response = operation_response(feed, result)
        response.status_code = 201 if result.outcome is OperationOutcome.DONE else 200
        return response

    @operator.post("/tasks/retry-failed", **documented(RetryFailedResult, "Retry failed tasks"))
    async def retry_failed(body: RetryFailedBody, scope: CallerScope) -> Response:
        """The oldest failed tasks of a queue. Cancelled tasks stay failed."""
        result = await queue_operations.retry_failed_tasks(store, body.queue, limit=body.limit, scope=scope)
        return operation_response(feed, result)

    @operator.post("/tasks/retry", **documented(OperationResult, "Retry several tasks"))
    async def retry_several(body: TaskIdsBody, scope: CallerScope) -> Response:
        """Failed and retrying ones are requeued with their full number of attempts. Others stay as they are."""
        return operation_response(feed, await operations.retry_tasks(store, body.task_ids, scope=scope))

    @operator.post("/tasks/cancel", **documented(OperationResult, "Cancel several tasks"))
    async def cancel_several(body: CancelTasksBody, scope: CallerScope) -> Response:
        """Unfinished ones fail with code CANCELLED. Others stay as they are."""
        result = await operations.cancel_tasks(store, body.task_ids, body.reason, scope=scope)
        return operation_response(feed, result)

    @operator.post("/tasks/{task_id}/retry", **documented(OperationResult, "Retry a task"))
    async def retry(task_id: TaskId, scope: CallerScope) -> Response:
        """A failed or retrying task is requeued with its full number of attempts."""
        return operation_response(feed, await operations.retry_task(store, task_id, scope=scope))

    @operator.post("/tasks/{task_id}/cancel", **documented(OperationResult, "Cancel a task"))
    async def cancel(
        task_id: TaskId, scope: CallerScope, body: Annotated[ReasonBody, Body(default_factory=ReasonBody)]
    ) -> Response:
        """It fails with code CANCELLED. A worker that is running it stops the attempt."""
        return operation_response(feed, await operations.cancel_task(store, task_id, body.reason, scope=scope))


def _add_pages(router: APIRouter, context: AppContext) -> None:
    store = context.store

    @router.get("/tasks", include_in_schema=False)
    async def tasks(
        request: Request,
        _viewer: PageViewer,
        queue: PageFilter = None,
        status: Annotated[TaskList | None, BeforeValidator(lambda value: value or None)] = None,
        which: TaskList | None = None,
        search: Annotated[str | None, Query(max_length=200)] = None,
        cursor: PageCursor = None,
    ) -> Response:
        """`which`: the former name of `status`."""
        which = status or which
        limit = FAILED_PAGE_ROWS if which is TaskList.FAILED else PAGE_ROWS
        found = await store.tasks_page(
            queue=queue or None,
            which=which,
            search=search or None,
            unsearched_queues=unsearched_queues(context.privacy),
            limit=limit,
            cursor=cursor,
        )
        found = Page(without_private_parts(context.privacy, found.rows), found.next_cursor)
        # The events of a task may repeat its payload.
        is_failed = which is TaskList.FAILED
        failed = [task.id for task in found.rows if is_failed and not context.privacy.hides(task.queue)]
        overview = await context.overview_feed.overview()
        page = tasks_page(
            page_context(context, request, await store.now()),
            found,
            work=overview.queues.get(queue, Work()) if queue else overview.total,
            queues=sorted({*overview.queues, *([queue] if queue else [])}),
            has_more_queues=overview.has_more_queues,
            queue=queue or None,
            which=which.value if which is not None else None,
            search=search or None,
            histories={task_id: await store.events(task_id=task_id) for task_id in failed},
            is_first=cursor is None,
            is_search_incomplete=found.next_cursor is not None and len(found.rows) < limit,
        )
        return html(request, page)

    @router.get("/tasks/{task_id}", include_in_schema=False)
    async def task(request: Request, task_id: TaskId, _viewer: PageViewer) -> Response:
        found = await store.task_in_full(task_id)
        if found is None:
            raise not_found(task_not_found(task_id))
        hide = text_filter(context.privacy, found)
        events = [context.privacy.redact_event(event, hide) for event in await store.events(task_id=task_id)]
        explanation = await context.control.explain(str(task_id))
        now = await store.now()
        is_private = is_output_private(context, request, (found.queue,))
        page = task_page(
            # A complete task does not change any more. A failed one may be retried.
            page_context(context, request, now, is_live=found.status is not TaskStatus.COMPLETE),
            without_hidden_parts(context.privacy, found),
            answer=list(map(hide, explanation.answer)),
            history=[(at, hide(line)) for at, line in explanation.history],
            events=events,
            cost=await task_cost(store, task_id, now, found.worker_id),
            log=() if is_private else (await store.task_log(task_id, LOG_LINES_ON_PAGE)).lines,
        )
        return html(request, page)


def _selected(fields: Mapping[str, str]) -> list[int]:
    """Ids of the tasks that were selected in a list."""
    ids = [text for text in fields.get("id", "").split(",") if text]
    if not all(text.isascii() and text.isdigit() and len(text) < 20 and 0 < int(text) <= MAX_TASK_ID for text in ids):
        raise BadInput("invalid request: id: must be the id of a task.")
    return [int(text) for text in ids]


def _add_form_routes(router: APIRouter, context: AppContext) -> None:
    store = context.store

    @router.post("/tasks/retry", dependencies=[FORM_OPERATOR], include_in_schema=False)
    async def retry_several(request: Request) -> Response:
        return await submit_form(context, request, lambda fields: operations.retry_tasks(store, _selected(fields)))

    @router.post("/tasks/cancel", dependencies=[FORM_OPERATOR], include_in_schema=False)
    async def cancel_several(request: Request) -> Response:
        return await submit_form(context, request, lambda fields: operations.cancel_tasks(store, _selected(fields)))

    @router.post("/tasks/{task_id}/retry", dependencies=[FORM_OPERATOR], include_in_schema=False)
    async def retry(request: Request, task_id: TaskId) -> Response:
        return await submit_form(context, request, lambda _: operations.retry_task(store, task_id))

    @router.post("/tasks/{task_id}/cancel", dependencies=[FORM_OPERATOR], include_in_schema=False)
    async def cancel(request: Request, task_id: TaskId) -> Response:
        return await submit_form(context, request, lambda _: operations.cancel_task(store, task_id))

    @router.post("/queues/{queue}/retry", dependencies=[FORM_OPERATOR], include_in_schema=False)
    async def retry_failed(request: Request, queue: str) -> Response:
        return await submit_form(
            context, request, lambda _: queue_operations.retry_failed_tasks(store, queue, limit=MAX_RETRIED_BY_FORM)
        )
