"""Shared parts of the JSON routes: the path prefix, parameter types, paging, request bodies and serialisation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Generic, TypeVar

from fastapi import APIRouter, Depends, Path, Query, Response
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter

from windlass.model.listing import MAX_PAGE, Page
from windlass.model.task import MAX_TASK_ID
from windlass.operations import OperationResult
from windlass.server.auth import form_operator, open_to_all, operator, producer, viewer
from windlass.server.errors import raise_if_refused
from windlass.server.event_stream import OverviewFeed

API = "/api/v1"
VIEWER, PRODUCER, OPERATOR = Depends(viewer), Depends(producer), Depends(operator)
FORM_OPERATOR, OPEN = Depends(form_operator), Depends(open_to_all)

FleetName = Annotated[str, Path(max_length=63)]
WorkerId = Annotated[str, Path(max_length=200)]
TaskId = Annotated[int, Path(ge=1, le=MAX_TASK_ID)]
CycleId = Annotated[int, Path(ge=1, le=MAX_TASK_ID)]
FleetFilter = Annotated[str | None, Query(max_length=63, description="Only this fleet.")]
QueueFilter = Annotated[str | None, Query(max_length=63, description="Only this queue.")]
WorkerFilter = Annotated[str | None, Query(max_length=200, description="Only this worker.")]
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE, description="Maximum number of rows.")]
Cursor = Annotated[str | None, Query(max_length=1_000, description="`next_cursor` of the previous page.")]

Item = TypeVar("Item")
Extended = TypeVar("Extended")


@dataclass(frozen=True, slots=True)
class PageResponse(Generic[Item]):
    """`next_cursor` goes into the request of the next page. Null on the last page; a page before it may be empty."""

    items: Sequence[Item]
    next_cursor: str | None


def api_router(role: Any) -> APIRouter:
    """A router of JSON routes that need this role."""
    return APIRouter(prefix=API, dependencies=[role])


def page_response(page: Page[Any], items: Sequence[Any] | None = None) -> PageResponse[Any]:
    return PageResponse(items if items is not None else page.rows, page.next_cursor)


class RequestBody(BaseModel):
    # An unknown field is a typo: better to refuse it than to ignore what was meant.
    model_config = ConfigDict(extra="forbid")


class ReasonBody(RequestBody):
    reason: Annotated[str, StringConstraints(strip_whitespace=True)] = Field(
        default="requested over the API", min_length=1, max_length=500, description="Stored with the change."
    )


def json_response(kind: Any) -> Callable[[Any], Response]:
    """A function that serialises values of this type. Faster than FastAPI, which copies and validates responses."""
    adapter: TypeAdapter[Any] = TypeAdapter(kind)

    def respond(value: Any) -> Response:
        return Response(adapter.dump_json(value), media_type="application/json")

    return respond


def extend(kind: type[Extended], value: Any, **more: Any) -> Extended:
    """A dataclass with the fields of `value` and some more."""
    return kind(**{field.name: getattr(value, field.name) for field in fields(value)}, **more)


def operation_response(feed: OverviewFeed, result: OperationResult) -> Response:
    """The result of an operation as JSON, or the error that it stands for."""
    raise_if_refused(result)
    feed.mark_changed()
    return json_response(type(result))(result)
