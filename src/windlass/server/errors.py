"""What callers are told when something is not as it should be: a status, a code, one sentence. Never a traceback.

In the form of RFC 9457, `application/problem+json`, with our code beside it.
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

from windlass.model.auth import without_tokens
from windlass.model.errors import WORDS_OF_TYPES, BadInput, DatabaseUnavailable, TooSlow, UnknownWorker
from windlass.model.redaction import masked
from windlass.ports import http

# Whoever asked while the database was away may ask again after this time.
RETRY_AFTER_S = 1
_WORDS = {404: "there is nothing at this address.", 405: "this address takes another method."}
# What the validator says in the words of its own types, in ours.
_NO_OBJECT = frozenset({"model_attributes_type", "model_type", "dict_type", "dataclass_type"})
_OF_VALIDATOR = {
    **dict.fromkeys(_NO_OBJECT, "it must be a JSON object"),
    "missing": "this is missing",
    "extra_forbidden": "there is no such name here",
    "json_invalid": "this is not JSON",
    **WORDS_OF_TYPES,
    "string_type": "it must be text",
}
log = structlog.get_logger(__name__)


class ApiError(HTTPException):
    """Raised anywhere below a handler; becomes the answer."""

    def __init__(self, status: int, code: str, message: str, *, retry_after_s: int | None = None) -> None:
        headers = {"Retry-After": str(retry_after_s)} if retry_after_s is not None else {}
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        super().__init__(status, message, headers)
        self.code = code

    def answer(self) -> JSONResponse:
        title = HTTPStatus(self.status_code).phrase
        detail = without_tokens(masked(self.detail))
        problem = http.ErrorBody(title=title, status=self.status_code, code=self.code, detail=detail)
        return JSONResponse(asdict(problem), self.status_code, dict(self.headers or {}), http.PROBLEM_JSON)


# How a problem looks as a page.
AsPage = Callable[[Request, ApiError], Response]
_FOR_PROGRAMS = ("/api/", "/internal/")


def unauthorized(message: str) -> ApiError:
    return ApiError(401, http.UNAUTHORIZED, message)


def forbidden(message: str) -> ApiError:
    return ApiError(403, http.FORBIDDEN, message)


def not_found(message: str) -> ApiError:
    return ApiError(404, http.NOT_FOUND, message)


def gone(message: str) -> ApiError:
    return ApiError(410, http.GONE, message)


def unavailable(message: str) -> ApiError:
    return ApiError(503, http.UNAVAILABLE, message, retry_after_s=RETRY_AFTER_S)


def as_api_error(error: Exception) -> ApiError | None:
    """What a caller is told of an error that has a meaning; None for one that has none."""
    match error:
        case ApiError():
            return error
        case BadInput():
            # What the database says of it has no full stop.
            return ApiError(400, http.BAD_INPUT, f"{str(error).rstrip('.')}.")
        case UnknownWorker():
            return ApiError(404, http.UNKNOWN_WORKER, str(error))
        case TooSlow():
            log.warning("not answered: it took the database too long", error=str(error))
            return unavailable("looking this up takes too long now: ask for less at once, or later.")
        case DatabaseUnavailable():
            # Where the database is, is nobody's business out there.
            log.warning("not answered: the database is away", error=str(error))
            return unavailable("the control plane's database does not answer: try again.")
        case RequestValidationError():
            return ApiError(400, http.BAD_INPUT, _what_is_wrong(error))
        case HTTPException():
            code = http.NOT_FOUND if error.status_code in _WORDS else http.BAD_INPUT
            told = ApiError(error.status_code, code, _WORDS.get(error.status_code, "the request cannot be read."))
            told.headers = {**(told.headers or {}), **(error.headers or {})}  # which methods it takes
            return told
    return None


def _what_is_wrong(error: RequestValidationError) -> str:
    # What was sent is not repeated: it may be anybody's secret.
    problem: dict[str, Any] = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"])
    kind = problem["type"]
    if problem["loc"] == ("body",) and kind in _NO_OBJECT:
        return "the body is not a JSON object: send one as JSON, with Content-Type: application/json."
    message = str(problem["msg"]).removeprefix("Value error, ").replace("Input should be", "it must be")
    return f"the request is not as expected: {where}: {_OF_VALIDATOR.get(kind, message).rstrip('.')}."


def answer_to(request: Request, error: ApiError, as_page: AsPage | None) -> Response:
    """A page for whoever looks at pages, a Problem for programs."""
    is_looking = "text/html" in request.headers.get("accept", "") and not request.url.path.startswith(_FOR_PROGRAMS)
    return as_page(request, error) if as_page is not None and is_looking else error.answer()


def add_error_handlers(app: FastAPI, as_page: AsPage | None) -> None:
    async def answer(request: Request, error: Exception) -> Response:
        told = as_api_error(error)
        if told is None:
            raise error
        return answer_to(request, told, as_page)

    for kind in (HTTPException, RequestValidationError, BadInput, UnknownWorker, DatabaseUnavailable):
        app.add_exception_handler(kind, answer)
