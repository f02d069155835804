"""HTTP errors: a status, a code for programs and a message for people, as RFC 9457 `application/problem+json`.

Browsers that ask for a page get the error as a page. No error shows a traceback, a token or a database address.
"""

from collections.abc import Callable
from dataclasses import asdict
from http import HTTPStatus
from typing import Any

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from windlass.model.errors import WORDS_OF_TYPES, BadInput, DatabaseUnavailable, OutOfScope, TooSlow, UnknownWorker
from windlass.model.redaction import mask_known
from windlass.operations import OperationOutcome, OperationResult
from windlass.ports import http
from windlass.server.failure_log import FailureLog

# Sent as Retry-After while the database is unavailable.
RETRY_AFTER_S = 1
_NOT_AN_OBJECT = frozenset({"model_attributes_type", "model_type", "dict_type", "dataclass_type"})
# Messages of the pydantic validator, in words that do not need knowledge of Python.
_VALIDATION_MESSAGES = {
    **dict.fromkeys(_NOT_AN_OBJECT, "must be a JSON object"),
    "missing": "required field is missing",
    "extra_forbidden": "unknown field",
    "json_invalid": "not valid JSON",
    **WORDS_OF_TYPES,
    "string_type": "must be text",
}
_API_PATHS = ("/api/", "/internal/")
log = structlog.get_logger(__name__)


class ApiError(HTTPException):
    """Raised by handlers and middleware. Becomes the response."""

    def __init__(self, status: int, code: str, message: str, *, retry_after_s: int | None = None) -> None:
        headers = {"Retry-After": str(retry_after_s)} if retry_after_s is not None else {}
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        super().__init__(status, f"{message.rstrip('.')}.", headers)
        self.code = code
        # For the log: who was refused, if that is known.
        self.caller_name: str | None = None

    def to_response(self) -> JSONResponse:
        body = http.ErrorBody(
            title=HTTPStatus(self.status_code).phrase,
            status=self.status_code,
            code=self.code,
            detail=mask_known(self.detail),
        )
        return JSONResponse(asdict(body), self.status_code, dict(self.headers or {}), http.PROBLEM_JSON)


# Renders an error as a page.
ErrorPage = Callable[[Request, ApiError], Response]


def unauthorized(message: str) -> ApiError:
    return ApiError(401, http.UNAUTHORIZED, message)


def forbidden(message: str) -> ApiError:
    return ApiError(403, http.FORBIDDEN, message)


def not_found(message: str) -> ApiError:
    return ApiError(404, http.NOT_FOUND, message)


def conflict(message: str) -> ApiError:
    return ApiError(409, http.CONFLICT, message)


def gone(message: str) -> ApiError:
    return ApiError(410, http.GONE, message)


def unavailable(message: str) -> ApiError:
    return ApiError(503, http.UNAVAILABLE, message, retry_after_s=RETRY_AFTER_S)


def defect() -> ApiError:
    return ApiError(500, http.DEFECT, "internal error: the server's log has the details")


def raise_if_refused(result: OperationResult) -> None:
    """404 for an operation on something unknown, 409 if the current state does not allow it."""
    if result.outcome is OperationOutcome.NOT_FOUND:
        raise not_found(result.message)
    if result.outcome is OperationOutcome.CONFLICT:
        raise conflict(result.message)


def to_api_error(error: Exception, failures: FailureLog) -> ApiError | None:
    """The response to an expected error. None for a defect."""
    match error:
        case ApiError():
            return error
        case BadInput():
            return ApiError(400, http.BAD_INPUT, str(error))
        case OutOfScope():
            return forbidden(str(error))
        case UnknownWorker():
            return ApiError(404, http.UNKNOWN_WORKER, str(error))
        case TooSlow():
            if requests := failures.count(str(error)):
                log.warning("run query timed out", error=str(error), requests=requests)
            return unavailable("the query took too long: ask for fewer rows, or retry later")
        case DatabaseUnavailable():
            # The message in the log may hold the database address. Callers must not see it.
            if requests := failures.count(str(error)):
                log.warning("call database failed", error=str(error), requests=requests)
            if error.is_refusal:
                message = "the control plane's database refused the call: the server's log has the details"
                return ApiError(503, http.STATEMENT_REFUSED, message, retry_after_s=RETRY_AFTER_S)
            return unavailable("the control plane's database is unavailable: retry")
        case RequestValidationError():
            return ApiError(400, http.BAD_INPUT, _validation_message(error))
        case HTTPException(status_code=404):
            return not_found("no such path")
        case HTTPException():
            is_method = error.status_code == 405
            code, message = (http.NOT_FOUND, "method not allowed") if is_method else (http.BAD_INPUT, "bad request")
            converted = ApiError(error.status_code, code, message)
            converted.headers = {**(converted.headers or {}), **(error.headers or {})}  # Allow
            return converted
    return None


def _validation_message(error: RequestValidationError) -> str:
    """Names the field and the rule. Does not repeat the value: it may be a secret."""
    problem: dict[str, Any] = error.errors()[0]
    kind = problem["type"]
    if problem["loc"] == ("body",) and kind in _NOT_AN_OBJECT:
        return "the body must be a JSON object, sent with Content-Type: application/json"
    field = ".".join(str(part) for part in problem["loc"])
    message = str(problem["msg"]).removeprefix("Value error, ").replace("Input should be", "must be")
    return f"invalid request: {field}: {_VALIDATION_MESSAGES.get(kind, message)}"


def error_response(request: Request, error: ApiError, error_page: ErrorPage | None) -> Response:
    """A page for browsers outside the API paths, otherwise problem+json."""
    wants_page = "text/html" in request.headers.get("accept", "") and not request.url.path.startswith(_API_PATHS)
    return error_page(request, error) if error_page is not None and wants_page else error.to_response()


def add_error_handlers(app: FastAPI, error_page: ErrorPage | None, failures: FailureLog) -> None:
    async def handle(request: Request, error: Exception) -> Response:
        converted = to_api_error(error, failures)
        if converted is None:
            raise error
        return error_response(request, converted, error_page)

    async def handle_defect(request: Request, _error: Exception) -> Response:
        return error_response(request, defect(), error_page)

    for kind in (HTTPException, RequestValidationError, BadInput, OutOfScope, UnknownWorker, DatabaseUnavailable):
        app.add_exception_handler(kind, handle)
    # Starlette raises the error again after this response, and the middleware logs it.
    app.add_exception_handler(Exception, handle_defect)
