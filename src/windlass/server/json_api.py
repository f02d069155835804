"""Shared parts of the JSON routes: the path prefix, parameter types, paging, request bodies and serialisation."""

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError, model_validator

from windlass.model.auth import TokenScope
from windlass.model.errors import BadInput, OutOfScope
from windlass.model.listing import MAX_PAGE, Page
from windlass.model.masked_values import masked_json
from windlass.model.task import MAX_TASK_ID
from windlass.operations import OperationResult
from windlass.server.auth import (
    admin,
    caller_scope,
    form_admin,
    form_operator,
    open_to_all,
    operator,
    producer,
    task_reader,
    viewer,
)
from windlass.server.errors import raise_if_refused
from windlass.server.event_stream import OverviewFeed
from windlass.server.request_body import decode_body

API = "/api/v1"
VIEWER, PRODUCER, OPERATOR = Depends(viewer), Depends(producer), Depends(operator)
FORM_OPERATOR, OPEN = Depends(form_operator), Depends(open_to_all)
TASK_READER, ADMIN, FORM_ADMIN = Depends(task_reader), Depends(admin), Depends(form_admin)
# The queues and fleets of the caller. A route with this parameter checks them.
CallerScope = Annotated[TokenScope, Depends(caller_scope)]

FleetName = Annotated[str, Path(max_length=63)]
WorkerId = Annotated[str, Path(max_length=200)]
TaskId = Annotated[int, Path(ge=1, le=MAX_TASK_ID)]
CycleId = Annotated[int, Path(ge=1, le=MAX_TASK_ID)]
FleetFilter = Annotated[str | None, Query(max_length=63, description="Only this fleet.")]
QueueFilter = Annotated[str | None, Query(max_length=63, description="Only this queue.")]
WorkerFilter = Annotated[str | None, Query(max_length=200, description="Only this worker.")]
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE, description="Maximum number of rows.")]
Cursor = Annotated[str | None, Query(max_length=1_000, description="`next_cursor` of the previous page.")]

# Fields of any body, known or not.
MAX_FIELDS = 50
# Size of the fields of a large body, other than the large one.
MAX_FIELD_BYTES = 4_096
_NOT_AN_OBJECT = "the body must be a JSON object, sent with Content-Type: application/json"
_UNKNOWN_FIELD = re.compile(r"unknown field `(.*)`", re.DOTALL)
_MAX_SHOWN = 100

Body = TypeVar("Body", bound=BaseModel)
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


def filter_in_scope(wanted: str | None, allowed: frozenset[str], scope: TokenScope, what: str) -> str | None:
    """The filter of a list for this caller: `wanted`, or the only name that its token allows. Raises OutOfScope."""
    if scope.is_all or (wanted is not None and wanted in allowed):
        return wanted
    if wanted is None and len(allowed) == 1:
        return next(iter(allowed))
    raise OutOfScope(f"this token is limited to {scope}: name one of them with ?{what}=")


def page_response(page: Page[Any], items: Sequence[Any] | None = None) -> PageResponse[Any]:
    return PageResponse(items if items is not None else page.rows, page.next_cursor)


class RequestBody(BaseModel):
    # An unknown field is a typo: better to refuse it than to ignore what was meant.
    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _check_count(cls, given: Any) -> Any:
        # Otherwise pydantic describes every unknown field.
        if isinstance(given, dict) and len(given) > MAX_FIELDS:
            raise ValueError(f"more than {MAX_FIELDS} fields")
        return given


class ReasonBody(RequestBody):
    reason: Annotated[str, StringConstraints(strip_whitespace=True)] = Field(
        default="requested over the API", min_length=1, max_length=500, description="Stored with the change."
    )


class LargeBody(Generic[Body]):
    """Reads a JSON object in which one field may be large.

    That field is checked to be valid JSON and kept as it was written. No Python objects are made of it, so its number
    of values costs nothing. `check` of `read` judges it, its size and depth for example. The other fields are validated
    as usual.
    """

    def __init__(self, model: type[Body], large_field: str) -> None:
        self._model = model
        self._large_field = large_field
        names = [(name, msgspec.Raw, msgspec.Raw(b"")) for name in model.model_fields]
        fields_of_body = msgspec.defstruct(f"{model.__name__}Fields", names, forbid_unknown_fields=True)
        self._decoder = msgspec.json.Decoder(fields_of_body)
        self.openapi_extra = {
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": model.model_json_schema()}},
            }
        }

    async def read(self, request: Request, check: Callable[[bytes], str]) -> tuple[Body, str]:
        """The other fields, and the large one as `check` returns it. A large body is decoded in a thread."""
        content = await request.body()
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if not (media_type == "application/json" or media_type.endswith("+json")):
            raise BadInput(f"{_NOT_AN_OBJECT}.")
        return await decode_body(functools.partial(self.decode, check), content)

    def decode(self, check: Callable[[bytes], str], content: bytes) -> tuple[Body, str]:
        try:
            raw = self._decoder.decode(content)
        except msgspec.ValidationError as error:
            unknown = _UNKNOWN_FIELD.search(str(error))
            if unknown is None:
                raise BadInput(f"{_NOT_AN_OBJECT}.") from None
            raise BadInput(f"invalid request: body.{unknown[1][:_MAX_SHOWN]}: unknown field.") from None
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise BadInput("invalid request: body: not valid JSON.") from None
        except RecursionError:
            raise BadInput("invalid request: body: nested too deeply.") from None
        given = {name: bytes(getattr(raw, name)) for name in self._model.model_fields}
        large = given.pop(self._large_field)
        for name, value in given.items():
            if len(value) > MAX_FIELD_BYTES:
                raise BadInput(f"invalid request: body.{name}: more than {MAX_FIELD_BYTES:,} bytes.")
        rest = b",".join(b'"%s":%s' % (name.encode(), value) for name, value in given.items() if value)
        try:
            body = self._model.model_validate_json(b"{%s}" % rest)
        except ValidationError as error:
            problems = [{**problem, "loc": ("body", *problem["loc"])} for problem in error.errors()]
            raise RequestValidationError(problems) from None
        return body, check(large or b"null")


def json_response(kind: Any, *, is_masked: bool = True) -> Callable[[Any], Response]:
    """A function that serialises values of this type. Faster than FastAPI, which copies and validates responses.

    Known secrets are hidden, except in what only programs read (`is_masked` False): a worker gets its fleet's
    environment, and a cursor is no text.
    """
    adapter: TypeAdapter[Any] = TypeAdapter(kind)

    def dump(value: Any) -> str:
        return adapter.dump_json(value).decode()

    def respond(value: Any) -> Response:
        content = masked_json(dump, value) if is_masked else dump(value)
        return Response(content, media_type="application/json")

    return respond


def extend(kind: type[Extended], value: Any, **more: Any) -> Extended:
    """A dataclass with the fields of `value` and some more."""
    return kind(**{field.name: getattr(value, field.name) for field in fields(value)}, **more)


def operation_response(feed: OverviewFeed, result: OperationResult) -> Response:
    """The result of an operation as JSON, or the error that it stands for."""
    raise_if_refused(result)
    feed.mark_changed()
    return json_response(type(result))(result)
