"""Errors as RFC 9457 problems, with the statuses and texts that Runpod uses."""

from collections.abc import Mapping, Sequence
from http import HTTPStatus

from windlass_emulators.http import Json, Response, VendorApiError, json_response

# This text is the only sign of missing capacity: Runpod has no error codes.
NO_CAPACITY = (
    "There are no longer any instances available with the requested specifications. Please refresh and try again."
)
# The default text of each status.
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


class RunpodApiError(VendorApiError):
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

    def response(self) -> Response:
        body: Json = {"title": HTTPStatus(self.status).phrase, "status": self.status, "detail": self.detail}
        if self.errors:
            body["errors"] = list(self.errors)
        return json_response(self.status, body, {**self.headers, "Content-Type": "application/problem+json"})


def not_found(what: str) -> RunpodApiError:
    return RunpodApiError(404, f"{what} not found")


def unsupported(what: str) -> RunpodApiError:
    return RunpodApiError(400, f"the emulator does not support {what}")
