"""Refusals as RFC 9457 problems, with the statuses and the prose that Runpod uses."""

from collections.abc import Mapping, Sequence
from http import HTTPStatus

from windlass_emulators.http import Json, Response, json_response

# The only sign of it: there is no code.
NO_CAPACITY = (
    "There are no longer any instances available with the requested specifications. Please refresh and try again."
)
# What is said where nothing better is known.
DETAILS: Mapping[int, str] = {
    400: "request could not be processed",
    401: "missing bearer token",
    402: "Your account balance is too low to deploy this pod. Please add funds and try again.",
    403: "access denied",
    404: "resource not found",
    405: "The requested method is not allowed for this path.",
    409: "action not valid for current pod status",
    413: "The request body is too large.",
    422: "Request validation failed.",
    429: "rate limit exceeded for the minute window",
    500: "internal server error",
    502: "upstream request failed",
    503: "service temporarily unavailable",
    504: "upstream request timed out",
}


class RunpodApiError(Exception):
    """An answer that says no."""

    def __init__(
        self,
        status: int,
        detail: str | None = None,
        errors: Sequence[str] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = status
        self.detail = detail or DETAILS.get(status, "request failed")
        self.errors = tuple(errors)
        self.headers = dict(headers or {})
        super().__init__(self.detail)

    def to_json(self) -> Json:
        body: Json = {"title": HTTPStatus(self.status).phrase, "status": self.status, "detail": self.detail}
        return {**body, "errors": list(self.errors)} if self.errors else body

    def response(self, headers: Mapping[str, str]) -> Response:
        return json_response(
            self.status, self.to_json(), {**headers, **self.headers, "Content-Type": "application/problem+json"}
        )


def not_found(what: str) -> RunpodApiError:
    return RunpodApiError(404, f"{what} not found")


def no_capacity() -> RunpodApiError:
    return RunpodApiError(400, NO_CAPACITY)


def unsupported(what: str) -> RunpodApiError:
    return RunpodApiError(400, f"the emulator does not do this: {what}")
